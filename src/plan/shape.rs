//! What one rank of a layout holds: local dims of a model, units of its flat buffer, and its own ranges of them.

use super::job::head_of;
use crate::config::mesh::RoleName;
use crate::device::Device;
use crate::mesh::Mesh;
use crate::model::{Arch, ParamTable, Partition, TensorPart};
use std::ops::Range;

/// How a job lies on its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub mesh: Mesh,
    /// ZeRO stage: 0 nothing is sharded, 1 optimizer state, 2 gradients too, 3 weights too.
    pub zero: usize,
    /// Ranks that share each matrix during rollout.
    pub rollout_tensor: usize,
    pub swap: Swap,
}

/// What waits in the host's memory while it is not needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Swap {
    /// AdamW's moments and master weights, outside of updates.
    pub optimizer: bool,
    /// Weights of all roles but the actor during rollout; those that do not learn also during training.
    pub roles: bool,
}

impl Layout {
    /// Ranks that ZeRO shards over.
    pub fn zero_ranks(&self) -> usize {
        self.mesh.data * self.mesh.sequence
    }

    /// The stage in force: on one rank there is nothing to shard.
    pub fn stage(&self) -> usize {
        if self.zero_ranks() == 1 { 0 } else { self.zero }
    }

    /// Groups of ranks that share the prompts of a rollout.
    pub fn rollout_data(&self) -> usize {
        self.mesh.ranks() / self.rollout_tensor
    }

    /// Whether the rollout needs weights of its own: another layout, or none that are whole.
    pub fn reshards(&self) -> bool {
        self.stage() == 3 || self.rollout_tensor != self.mesh.tensor
    }

    /// The layout of the rollout.
    pub fn rollout(&self) -> Mesh {
        Mesh { tensor: self.rollout_tensor, ..Mesh::data_only(self.rollout_data()) }
    }

    pub fn words(&self) -> String {
        let Mesh { data, pipeline, sequence, tensor } = self.mesh;
        let mut words = vec![format!("data {data}")];
        for (name, n) in [("pipeline", pipeline), ("sequence", sequence), ("tensor", tensor)] {
            if n > 1 {
                words.push(format!("{name} {n}"));
            }
        }
        let mut words = vec![words.join(" x "), format!("zero {}", self.zero)];
        if self.rollout_tensor != tensor {
            words.push(format!("rollout tensor {}", self.rollout_tensor));
        }
        let waiting = match (self.swap.optimizer, self.swap.roles) {
            (true, true) => "optimizer and idle roles in host memory",
            (true, false) => "optimizer in host memory",
            (false, true) => "idle roles in host memory",
            (false, false) => return words.join(", "),
        };
        words.push(waiting.to_string());
        words.join(", ")
    }
}

/// The rank that has most of a model's matrices.
pub(super) fn fullest(arch: &Arch, size: usize) -> TensorPart {
    let share = |part: &TensorPart| part.range(arch.mlp_width).len() * arch.layers + part.range(arch.vocabulary).len();
    let parts = (0..size).map(|rank| TensorPart { rank, size });
    parts.max_by_key(share).unwrap_or_else(TensorPart::whole)
}

/// The dims of a model on one of the ranks that share its matrices (the fullest one).
#[derive(Clone, Debug, PartialEq)]
pub struct Dims {
    pub layers: usize,
    /// Width of the hidden state.
    pub d: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Width of the MLP.
    pub f: usize,
    /// Rows of the vocabulary: this rank's, and all.
    pub v: usize,
    pub vocabulary: usize,
    /// Columns of all key (or value) heads of the model, where ranks hold copies of some; else 0.
    pub kv_copied: usize,
    pub qk_norm: bool,
    pub context: usize,
    pub windows: Vec<Option<usize>>,
}

impl Dims {
    pub fn new(arch: &Arch, tensor: usize) -> Self {
        let part = fullest(arch, tensor);
        Self {
            layers: arch.layers,
            d: arch.width,
            heads: arch.heads / tensor,
            kv_heads: part.kv_heads(arch).len(),
            head_dim: arch.head_dim,
            f: part.range(arch.mlp_width).len(),
            v: part.range(arch.vocabulary).len(),
            vocabulary: arch.vocabulary,
            kv_copied: if part.kv_copies(arch) > 1 { arch.kv_width() } else { 0 },
            qk_norm: arch.qk_norm,
            context: arch.context,
            windows: arch.windows.clone(),
        }
    }

    /// Columns of all query heads.
    pub fn q(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns of all key (or value) heads.
    pub fn kv(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of a layer's matrices.
    pub fn layer_elements(&self) -> usize {
        2 * self.d * self.q() + 2 * self.d * self.kv() + 3 * self.d * self.f
    }
}

/// The flat vector of one role on one rank, padding included.
#[derive(Clone, Debug, PartialEq)]
pub struct Flat {
    /// Where each unit lies: embedding, layers, final norm with the head.
    ranges: Vec<Range<usize>>,
    /// Parameters as papers count them: those of this rank.
    pub parameters: usize,
}

impl Flat {
    pub fn of(arch: &Arch, role: RoleName, tensor: usize) -> Self {
        Self::on(Device::Cpu, arch, role, tensor)
    }

    /// As a device lays it out: on a GPU nothing is filled up to whole panels.
    pub fn on(device: Device, arch: &Arch, role: RoleName, tensor: usize) -> Self {
        let table = ParamTable::on(device, arch, head_of(role), fullest(arch, tensor));
        Self { ranges: table.units().to_vec(), parameters: table.parameters() }
    }

    /// Elements of each unit.
    pub fn units(&self) -> Vec<usize> {
        self.ranges.iter().map(Range::len).collect()
    }

    pub fn unit(&self, index: usize) -> usize {
        self.ranges[index].len()
    }

    pub fn len(&self) -> usize {
        self.ranges.last().map_or(0, |unit| unit.end)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the fullest of `ranks` owns of each unit.
    pub fn own_units(&self, ranks: usize) -> Vec<usize> {
        let partitions = (0..ranks).map(|rank| Partition::new(&self.ranges, rank, ranks));
        let fullest = partitions.max_by_key(Partition::own_len).expect("at least one rank");
        (0..self.ranges.len()).map(|unit| fullest.own_cut(unit).len()).collect()
    }

    /// The most elements that one of `ranks` owns of all units.
    pub fn own(&self, ranks: usize) -> usize {
        self.own_units(ranks).iter().sum()
    }

    /// The largest unit.
    pub fn largest(&self) -> usize {
        self.ranges.iter().map(Range::len).max().unwrap_or(0)
    }
}
