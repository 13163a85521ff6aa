//! What one rank of a layout holds: local dims of a model, units of its flat buffer, and its own ranges of them.

use super::job::head_of;
use crate::config::mesh::RoleName;
use crate::mesh::Mesh;
use crate::model::params::{ParamSpec, ParamTable, Shard};
use crate::model::{Arch, Head};
use crate::tensor::{Layout as Order, PANEL};

/// Elements at whose multiples a unit is dealt to the ranks of ZeRO.
const BLOCK: usize = 4096;

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

    /// Groups of ranks that share the prompts of a rollout.
    pub fn rollout_data(&self) -> usize {
        self.mesh.ranks() / self.rollout_tensor
    }

    /// Whether the rollout needs weights of its own: another layout, or none that are whole.
    pub fn reshards(&self) -> bool {
        self.zero == 3 || self.rollout_tensor != self.mesh.tensor
    }

    /// Whether log-probabilities at sampling are not bitwise those of training.
    pub fn recomputes_logprobs(&self) -> bool {
        self.mesh.sequence > 1 || self.rollout_tensor != self.mesh.tensor
    }

    pub fn words(&self) -> String {
        let Mesh { data, pipeline, sequence, tensor } = self.mesh;
        let mut text = format!("data {data}");
        for (name, n) in [("pipeline", pipeline), ("sequence", sequence), ("tensor", tensor)] {
            if n > 1 {
                text += &format!(" x {name} {n}");
            }
        }
        text += &format!(", zero {}", self.zero);
        if self.rollout_tensor != tensor {
            text += &format!(", rollout tensor {}", self.rollout_tensor);
        }
        match (self.swap.optimizer, self.swap.roles) {
            (true, true) => text += ", optimizer and idle roles in host memory",
            (true, false) => text += ", optimizer in host memory",
            (false, true) => text += ", idle roles in host memory",
            (false, false) => {}
        }
        text
    }
}

/// The most that one of `ranks` gets of `n` things, cut at multiples of `PANEL` where each rank gets at least two panels.
fn largest_part(n: usize, ranks: usize) -> usize {
    let panels = n.div_ceil(PANEL);
    if panels >= 2 * ranks { (panels.div_ceil(ranks) * PANEL).min(n) } else { n.div_ceil(ranks) }
}

/// Local key/value heads of a rank that holds `heads / ranks` query heads.
fn kv_heads(arch: &Arch, ranks: usize) -> usize {
    let local = arch.heads / ranks;
    let group = arch.heads / arch.kv_heads;
    local / gcd(local, group)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
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
    /// Rows of the vocabulary.
    pub v: usize,
    pub qk_norm: bool,
    pub context: usize,
    pub windows: Vec<Option<usize>>,
}

impl Dims {
    pub fn new(arch: &Arch, tensor: usize) -> Self {
        Self {
            layers: arch.layers,
            d: arch.width,
            heads: arch.heads / tensor,
            kv_heads: kv_heads(arch, tensor),
            head_dim: arch.head_dim,
            f: largest_part(arch.mlp_width, tensor),
            v: largest_part(arch.vocabulary, tensor),
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

/// Whether the ranks can share the heads evenly.
pub fn tensor_is_legal(arch: &Arch, tensor: usize) -> bool {
    tensor > 0 && arch.heads.is_multiple_of(tensor)
}

/// The flat buffer of one role on one rank, padding included.
#[derive(Clone, Debug, PartialEq)]
pub struct Flat {
    /// Elements of each unit: embedding, layers, final norm with the head.
    pub units: Vec<usize>,
    /// Elements of parameters in row order, which bf16 models hold in f32 once more.
    pub rows: usize,
    /// Parameters as papers count them: those of this rank.
    pub parameters: usize,
}

impl Flat {
    pub fn new(arch: &Arch, head: Head, tensor: usize) -> Self {
        let table = ParamTable::new(arch, head);
        let mut units = vec![0; table.units().len()];
        let (mut rows, mut parameters) = (0, 0);
        let mut unit = 0;
        for spec in table.specs() {
            while spec.offset >= table.units()[unit].end {
                unit += 1;
            }
            let (n, k) = local(spec, arch, tensor);
            let len = spec.layout.len(n, k);
            units[unit] += len;
            parameters += n * k;
            if spec.layout == Order::Row {
                rows += len;
            }
        }
        Self { units, rows, parameters }
    }

    pub fn of(arch: &Arch, role: RoleName, tensor: usize) -> Self {
        Self::new(arch, head_of(role), tensor)
    }

    pub fn len(&self) -> usize {
        self.units.iter().sum()
    }

    pub fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// The most elements that one of `ranks` owns of unit `index`.
    pub fn own_of(&self, index: usize, ranks: usize) -> usize {
        let len = self.units[index];
        if ranks == 1 { len } else { (len.div_ceil(BLOCK).div_ceil(ranks) * BLOCK).min(len) }
    }

    /// The most elements that one of `ranks` owns of all units.
    pub fn own(&self, ranks: usize) -> usize {
        if ranks == 1 {
            return self.len();
        }
        // Ranks take turns in what does not divide: the sum over units of one rank's blocks, for the fullest rank.
        let blocks = |len: usize, rank: usize| {
            let all = len.div_ceil(BLOCK);
            let at = |r: usize| (r * all / ranks * BLOCK).min(len);
            at(rank + 1) - at(rank)
        };
        let own = |rank: usize| self.units.iter().map(|&len| blocks(len, rank)).sum::<usize>();
        (0..ranks).map(own).max().unwrap_or(0)
    }

    /// The largest unit.
    pub fn largest(&self) -> usize {
        self.units.iter().copied().max().unwrap_or(0)
    }
}

/// (rows, columns) of a parameter on the fullest rank.
fn local(spec: &ParamSpec, arch: &Arch, tensor: usize) -> (usize, usize) {
    let (n, k) = spec.dims();
    if tensor == 1 {
        return (n, k);
    }
    let is_bias = spec.shape.len() == 1;
    let cut = |len: usize| {
        let attention = spec.name.contains("self_attn.");
        let dims = Dims::new(arch, tensor);
        match () {
            () if attention && (spec.name.contains("k_proj") || spec.name.contains("v_proj")) => dims.kv(),
            () if attention => dims.q(),
            () => largest_part(len, tensor),
        }
    };
    match spec.shard {
        Shard::Replicate => (n, k),
        Shard::Column if is_bias => (n, cut(k)),
        Shard::Column | Shard::Vocab => (cut(n), k),
        Shard::Row => (n, cut(k)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_cut_at_panels_where_each_rank_has_two_and_evenly_elsewhere() {
        assert_eq!([largest_part(11008, 2), largest_part(11008, 4), largest_part(32000, 8)], [5504, 2752, 4000]);
        assert_eq!([largest_part(352, 4), largest_part(96, 4), largest_part(100, 3)], [96, 24, 34]);
        assert_eq!(largest_part(64, 1), 64);
    }
}
