//! A model of a job, with the part of it that this rank holds.

use crate::comm::Axes;
use crate::device::Device;
use crate::device::cuda::owned_by;
use crate::dtype::DType;
use crate::error::Result;
use crate::model::load::{ModelFiles, Source};
use crate::model::partition::{Partition, Shards};
use crate::model::{Arch, ParamTable, Transformer, Weights};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A model of a job: actor, critic or reference.
pub struct Role {
    pub name: &'static str,
    pub dir: PathBuf,
    pub transformer: Transformer,
    pub weights: Weights,
    /// The source that the weights were rounded from, if they were. A learner reads its master weights from it.
    pub source: Option<Source>,
}

impl Role {
    /// Loads this rank's part of a model, on its frozen base if it has one, at ZeRO stage `stage` (0 to 3).
    pub fn load(
        device: Device,
        name: &'static str,
        files: &ModelFiles,
        base: Option<Rc<Weights>>,
        dtype: DType,
        seed: u64,
        axes: &Axes,
        stage: usize,
    ) -> Result<Self> {
        let (weights, source) = owned_by(owner(name), || files.weights(device, base, dtype, seed, axes, stage))?;
        let role = Self::new(name, files.dir, &source.arch, weights, axes);
        Ok(Self { source: Some(source).filter(|source| source.is_rounded(dtype)), ..role })
    }

    /// Allocates a model. Its values are unspecified until `Learner::restore` reads a checkpoint.
    pub fn allocate(
        device: Device,
        name: &'static str,
        files: &ModelFiles,
        base: Option<Rc<Weights>>,
        dtype: DType,
        axes: &Axes,
        stage: usize,
    ) -> Result<Self> {
        let table = files.table(device, base.as_deref(), axes)?;
        let shards = Shards::new(&table, axes, stage);
        let weights = owned_by(owner(name), || Weights::scratch(table, dtype, &shards)).on_base(base);
        Ok(Self::new(name, files.dir, files.arch, weights, axes))
    }

    pub fn new(name: &'static str, dir: &Path, arch: &Arch, weights: Weights, axes: &Axes) -> Self {
        let transformer = Transformer::for_axes(arch, &weights.table, axes);
        Self { name, dir: dir.to_path_buf(), transformer, weights, source: None }
    }

    /// Sets the weights that this rank holds. `read(flat range, out)` returns their f32 numbers, a few MiB at a time.
    pub fn fill(&mut self, mut read: impl FnMut(Range<usize>, &mut [f32]) -> Result<()>) -> Result<()> {
        let mut room = Vec::new();
        for u in 0..self.weights.table.units().len() {
            for part in pieces(self.weights.local(u).range()) {
                room.resize(part.len(), 0.0);
                read(part.clone(), &mut room)?;
                self.weights.store_master(part, &room);
            }
        }
        self.weights.release();
        Ok(())
    }

    pub fn arch(&self) -> &Arch {
        &self.transformer.arch
    }

    /// The table of the whole model, of which this rank may hold a part.
    pub fn whole(&self) -> ParamTable {
        ParamTable::new(self.arch(), self.weights.table.head())
    }
}

/// The key with which a job names the model of a role.
pub fn key(role: &str) -> String {
    match role {
        "reward" => "reward.models".to_string(),
        "rollout" => "model.actor".to_string(),
        "teacher" => "model.teachers".to_string(),
        role => format!("model.{role}"),
    }
}

/// The name under which the memory of a role's weights is counted.
pub fn owner(role: &str) -> &'static str {
    match role {
        "actor" => "weights of the actor",
        "critic" => "weights of the critic",
        "reference" => "weights of the reference",
        "reward" => "weights of the reward model",
        "rollout" => "weights of the rollout's copy",
        _ => "weights",
    }
}

/// Elements read at a time from a checkpoint, or from the files of a model.
const READ: usize = 1 << 20;

/// Splits a range into pieces of a few MiB.
fn pieces(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(READ).map(move |start| start..(start + READ).min(end))
}

/// The own ranges of a rank in pieces of a few MiB: the unit of each piece, the piece, and its position in the unit's
/// own range.
pub(super) fn own_pieces(of: &Partition) -> impl Iterator<Item = (usize, Range<usize>, usize)> {
    let of_unit = |u| {
        let own = of.own(u);
        let first = own.start;
        pieces(own).map(move |part| (u, part.clone(), part.start - first))
    };
    (0..of.units()).flat_map(of_unit)
}
