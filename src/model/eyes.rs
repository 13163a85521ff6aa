//! The images of a forward: rows of the model's tower in place of their tokens and after the first layers, and the
//! gradients of these rows.

use super::arch::Arch;
use super::block::Keep;
use super::frozen_tower::FrozenTower;
use super::pixels::Pixels;
use super::tower::{Merged, Tower, TowerSaved};
use super::weights::{Gradients, Weights};
use crate::device::{Device, null};
use crate::error::{Error, Result};
use crate::experience::{Image, Patches};
use crate::ops::rows;
use crate::pictures::Picture;
use crate::tensor::{DType, Tensor};
use std::cell::OnceCell;
use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// The tower of a model, and the source of the patches that it reads.
#[derive(Clone, Debug)]
pub(super) struct Eyes {
    place: Place,
    pixels: Option<Pixels>,
}

#[derive(Clone, Debug)]
enum Place {
    /// A tower in the parameter table.
    Own(Box<Tower>),
    /// One that does not train, once an image has come.
    Frozen(Rc<OnceCell<Rc<FrozenTower>>>),
}

/// The images of a forward.
#[derive(Debug)]
pub(super) struct Seen {
    /// The rows of their tokens, ascending.
    rows: Vec<u32>,
    /// The tower's rows for them.
    merged: Merged,
    /// If the tower trains: the index of each of these among the rows of its forward, their number, and what its backward
    /// needs.
    of_tower: Option<(Vec<u32>, usize, TowerSaved)>,
}

/// The gradients of the tower's rows: one tensor of the rows, and those after layers, the last one first.
pub(super) type Slopes = Vec<Tensor>;

impl Eyes {
    pub fn new(tower: Option<Tower>) -> Self {
        let place = tower.map_or_else(|| Place::Frozen(Rc::default()), |tower| Place::Own(Box::new(tower)));
        Self { place, pixels: None }
    }

    /// Sets the source of patches.
    pub fn read_with(&mut self, pixels: Pixels) {
        self.pixels = Some(pixels);
    }

    /// The source of patches.
    ///
    /// # Errors
    /// `Fault` without one.
    fn pixels(&self) -> Result<&Pixels> {
        self.pixels
            .as_ref()
            .ok_or_else(|| Error::fault("images need a source of their pixels, which this model does not have"))
    }

    /// Loads a tower that does not train.
    ///
    /// # Errors
    /// `Data` if the model has none that is known; the errors of `FrozenTower::open`; `Usage` on a GPU.
    pub fn open(&self, arch: &Arch, device: Device, dtype: DType) -> Result<()> {
        arch.check_images(device != Device::Cpu)?;
        self.pixels()?;
        let Place::Frozen(frozen) = &self.place else { return Ok(()) };
        if frozen.get().is_none() {
            let (sight, dir) = (arch.need_sight()?, arch.others.as_deref());
            let dir = if null::is_active() { Some(dir.unwrap_or(Path::new(""))) } else { dir };
            let dir = dir.ok_or_else(|| Error::fault("the model's directory is not known"))?;
            let _ = frozen.set(FrozenTower::open(dir, arch, &sight.spec, dtype)?);
        }
        Ok(())
    }

    /// The rows of `pictures`, with what the backward needs if the tower trains and `keep` is given. If weights are
    /// sharded, this is a collective, also without pictures.
    ///
    /// # Panics
    /// With the error of `open`.
    pub fn see(&self, arch: &Arch, w: &Weights, pictures: &[Picture], keep: Option<Keep>) -> Option<Seen> {
        if pictures.is_empty() {
            if let (Place::Own(tower), true) = (&self.place, w.is_sharded()) {
                tower.units().for_each(|unit| drop(w.unit(unit)));
            }
            return None;
        }
        let seen = self.seen(arch, w, pictures, keep);
        Some(seen.unwrap_or_else(|error| std::panic::panic_any(error)))
    }

    fn seen(&self, arch: &Arch, w: &Weights, pictures: &[Picture], keep: Option<Keep>) -> Result<Seen> {
        self.open(arch, w.device(), w.dtype())?;
        match &self.place {
            Place::Own(tower) => Seen::with(tower, self.pixels()?, w, pictures, keep),
            Place::Frozen(frozen) => Seen::kept(frozen.get().expect("it is open"), self.pixels()?, pictures),
        }
    }

    /// The rows of images, one image after another.
    ///
    /// # Errors
    /// The errors of `open`, and those of their files.
    pub fn rows(&self, arch: &Arch, w: &Weights, images: &[Image]) -> Result<Merged> {
        let picture = |image: &Image| Picture {
            image: image.clone(),
            rows: Vec::new(),
            tokens: (0..image.tokens as u32).collect(),
        };
        Ok(self.seen(arch, w, &images.iter().map(picture).collect::<Vec<_>>(), None)?.merged)
    }

    /// Adds the gradients of a tower that trains, from those of its rows; on ranks without images too.
    pub fn backward(&self, w: &Weights, seen: Option<Seen>, slopes: Slopes, grads: &mut Gradients) {
        let Place::Own(tower) = &self.place else { return };
        let Some((tokens, count, saved)) = seen.and_then(|seen| seen.of_tower) else {
            for unit in tower.units().rev() {
                grads.begin(unit);
                if w.is_sharded() {
                    drop(w.unit(unit));
                }
                grads.finish(unit);
            }
            return;
        };
        let mut all = slopes.into_iter().map(|slope| {
            let mut sum = slope.zeros_like(count, slope.width());
            rows::scatter(&slope, &tokens, &mut sum);
            sum
        });
        let rows = all.next_back().expect("the gradient of the rows comes last");
        let deep: Vec<Tensor> = all.rev().collect();
        tower.backward(w, saved, &Merged { rows, deep }, grads);
    }
}

impl Seen {
    /// Runs a tower for the distinct images of `pictures`.
    fn with(tower: &Tower, pixels: &Pixels, w: &Weights, pictures: &[Picture], keep: Option<Keep>) -> Result<Self> {
        let (mut images, mut known): (Vec<Arc<Patches>>, HashMap<u64, u32>) = (Vec::new(), HashMap::new());
        let (mut count, mut tokens) = (0, Vec::new());
        for Picture { image, tokens: seen, .. } in pictures {
            let first = if let Some(first) = known.get(&image.hash) {
                *first
            } else {
                let (patches, first) = (pixels.of(image)?, count as u32);
                count += tower.spec.tokens_of(patches.grid);
                images.push(Arc::new(patches));
                known.insert(image.hash, first);
                first
            };
            tokens.extend(seen.iter().map(|token| first + token));
        }
        let values: usize = images.iter().map(|image| image.grid.iter().product::<usize>()).sum();
        let _patches = null::hold("patches of images", values * tower.spec.patch_values() * size_of::<f32>());
        let (merged, saved) = tower.forward(w, &images, keep);
        let merged = merged.each(|all| gathered(all, &tokens));
        let rows = pictures.iter().flat_map(|picture| picture.rows.iter().copied()).collect();
        Ok(Self { rows, merged, of_tower: saved.map(|saved| (tokens, count, saved)) })
    }

    /// Looks up the rows of `pictures` in a frozen tower.
    fn kept(tower: &FrozenTower, pixels: &Pixels, pictures: &[Picture]) -> Result<Self> {
        let of = |picture: &Picture| {
            let rows = tower.rows(&picture.image, pixels)?;
            Ok(rows.each(|all| gathered(all, &picture.tokens)))
        };
        let all: Vec<Merged> = pictures.iter().map(of).collect::<Result<_>>()?;
        let rows = pictures.iter().flat_map(|picture| picture.rows.iter().copied()).collect();
        Ok(Self { rows, merged: Merged::stacked(&all), of_tower: None })
    }

    /// Puts the rows in place of the embeddings x of the image tokens.
    pub fn place(&self, x: &mut Tensor) {
        rows::place(&self.merged.rows, &self.rows, x);
    }

    /// Adds the rows after layer `layer` to its result x.
    pub fn add_after(&self, layer: usize, x: &mut Tensor) {
        if let Some(deep) = self.merged.deep.get(layer) {
            rows::scatter(deep, &self.rows, x);
        }
    }

    /// Keeps the gradient of the rows after layer `layer` from that of its result.
    pub fn slope_after(&self, layer: usize, dx: &Tensor, slopes: &mut Slopes) {
        if self.of_tower.is_some() && layer < self.merged.deep.len() {
            slopes.push(gathered(dx, &self.rows));
        }
    }

    /// Keeps the gradient of the rows from that of the embeddings. The image tokens' embeddings have none.
    pub fn take_slope(&self, dx: &mut Tensor, slopes: &mut Slopes) {
        if self.of_tower.is_some() {
            slopes.push(gathered(dx, &self.rows));
        }
        rows::clear(&self.rows, dx);
    }
}

/// The rows `rows` of x.
fn gathered(x: &Tensor, rows: &[u32]) -> Tensor {
    let mut some = x.as_wide(rows.len());
    rows::gather(x, &rows.into(), &mut some);
    some
}
