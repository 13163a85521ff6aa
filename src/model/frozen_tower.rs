//! Vision towers that do not train: loaded when the first image comes, shared by models of one directory, and run once for
//! each image. Their rows are kept by the image's hash.

use super::arch::{Arch, Head};
use super::load::{self, ModelFiles};
use super::params::ParamTable;
use super::part::TensorPart;
use super::pixels::Pixels;
use super::tower::{Merged, Tower};
use super::vision_spec::VisionSpec;
use super::weights::Weights;
use super::weights::partition::Shards;
use crate::comm::Axes;
use crate::device::cuda::owned_by;
use crate::device::{Device, null};
use crate::error::Result;
use crate::experience::Image;
use crate::ops::residual;
use crate::tensor::DType;
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// The bytes of kept rows above which the oldest are dropped.
const KEPT_BYTES_MAX: usize = 1 << 30;
/// The owner of kept rows in plans.
const KEPT: &str = "rows of images";

#[derive(Debug)]
pub struct FrozenTower {
    tower: Tower,
    weights: Weights,
    kept: RefCell<Kept>,
}

/// The rows of images by hash, with the time of their last use.
#[derive(Debug, Default)]
struct Kept {
    rows: HashMap<u64, (Rc<Merged>, u64)>,
    bytes: usize,
    time: u64,
    /// In a plan, the rows of the images that its steps do not see.
    unseen: null::Held,
}

thread_local! {
    /// The towers in use: models are used by the thread that loaded them.
    static TOWERS: RefCell<Vec<(PathBuf, DType, Weak<FrozenTower>)>> = const { RefCell::new(Vec::new()) };
}

impl FrozenTower {
    /// The tower of the model in `dir`, in `dtype`. Models of one directory share it.
    ///
    /// # Errors
    /// The errors of `load::load`.
    pub fn open(dir: &Path, arch: &Arch, spec: &Arc<VisionSpec>, dtype: DType) -> Result<Rc<Self>> {
        let path = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        // A plan has towers of its own, without values.
        let path =
            if null::is_active() { Path::new("null:").join(path.strip_prefix("/").unwrap_or(&path)) } else { path };
        let known = TOWERS.with_borrow_mut(|all| {
            all.retain(|(.., tower)| tower.strong_count() > 0);
            all.iter().find(|(of, known, _)| *of == path && *known == dtype).and_then(|(.., tower)| tower.upgrade())
        });
        if let Some(tower) = known {
            return Ok(tower);
        }
        let mut table = ParamTable::empty(Device::Cpu, Head::LanguageModel, TensorPart::whole(), spec.init_std);
        let tower = Tower::declare(&mut table, spec);
        let arch = Arch { tuning: None, ..arch.clone() }.with_tower_in_table(spec);
        let files = ModelFiles { dir, adapter: None, arch: &arch, head: arch.head };
        let table = Arc::new(table);
        let source = if null::is_active() { None } else { Some(load::open_table(&files, table.clone(), 0)?) };
        let shards = Shards::new(&table, &Axes::one(), 0);
        let weights = owned_by("weights of the vision tower", || {
            let fill = |values| match &source {
                Some(source) => source.fill_unit(values),
                None => Ok(values),
            };
            Weights::build(table, dtype, &shards, fill)
        })?;
        let tower = Rc::new(Self { tower, weights, kept: RefCell::default() });
        TOWERS.with_borrow_mut(|all| all.push((path, dtype, Rc::downgrade(&tower))));
        Ok(tower)
    }

    /// The rows of an image.
    ///
    /// # Errors
    /// The errors of `pixels`.
    pub fn rows(&self, image: &Image, pixels: &Pixels) -> Result<Rc<Merged>> {
        let mut kept = self.kept.borrow_mut();
        kept.time += 1;
        let time = kept.time;
        if let Some((rows, used)) = kept.rows.get_mut(&image.hash) {
            *used = time;
            return Ok(rows.clone());
        }
        let patches = [Arc::new(pixels.of(image)?)];
        let mut rows = self.tower.forward(&self.weights, &patches, None).0;
        kept.bytes += rows.bytes();
        if null::is_active() {
            rows = owned_by(KEPT, || rows.each(residual::copy));
            let all = (pixels.planned * rows.bytes()).min(KEPT_BYTES_MAX);
            kept.unseen = null::Held::default();
            kept.unseen = null::hold(KEPT, all.saturating_sub(kept.bytes));
        }
        let rows = Rc::new(rows);
        kept.rows.insert(image.hash, (rows.clone(), time));
        while kept.bytes > KEPT_BYTES_MAX && kept.rows.len() > 1 {
            let oldest = kept.rows.iter().min_by_key(|(_, (_, used))| *used).map(|(hash, _)| *hash);
            if let Some((dropped, _)) = oldest.and_then(|hash| kept.rows.remove(&hash)) {
                kept.bytes -= dropped.bytes();
            }
        }
        Ok(rows)
    }
}
