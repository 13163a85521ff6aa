//! The tensors of the gated delta rule in the files of a model: those of one projection together, or those of one key
//! head.

use super::block_spec::DeltaSpec;
use super::file_rows::{FileRows, Runs};

/// The form of the projections of the gated delta rule in the files of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaForm {
    /// `in_proj_qkv`: all queries, all keys, all values; `in_proj_z`, `in_proj_b` and `in_proj_a`.
    ByMatrix,
    /// `in_proj_qkvz` has, for each key head, its queries, its keys, its values and their gates; `in_proj_ba` has its
    /// rates and its decays.
    ByHead,
}

/// The modules of one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeltaFiles<'a> {
    /// The module of the layer.
    pub name: &'a str,
    pub form: DeltaForm,
    pub spec: &'a DeltaSpec,
}

impl DeltaFiles<'_> {
    /// The place of the projection of queries (0), keys (1), values (2) or gates (3); `None`: a module of its name.
    pub(super) fn inputs(self, i: usize) -> Option<FileRows> {
        let [keys, values] = [self.spec.keys().size(), self.spec.values().size()];
        match self.form {
            DeltaForm::ByMatrix if i < 3 => Some(self.joined("in_proj_qkv", &[keys, keys, values], i, 1)),
            DeltaForm::ByMatrix => None,
            DeltaForm::ByHead => Some(self.of_heads("in_proj_qkvz", &[keys, keys, values, values], i)),
        }
    }

    /// The place of the projection to rates (0) or decays (1); `None`: a module of its name.
    pub(super) fn gates(self, i: usize) -> Option<FileRows> {
        let heads = self.spec.heads().size();
        (self.form == DeltaForm::ByHead).then(|| self.of_heads("in_proj_ba", &[heads, heads], i))
    }

    /// The place of the taps of queries (0), keys (1) or values (2).
    pub(super) fn taps(self, i: usize) -> FileRows {
        let [keys, values] = [self.spec.keys().size(), self.spec.values().size()];
        self.joined("conv1d.weight", &[keys, keys, values], i, 1)
    }

    fn of_heads(self, tensor: &str, sizes: &[usize], i: usize) -> FileRows {
        self.joined(tensor, sizes, i, self.spec.key_heads)
    }

    /// The rows of matrix `i` of those with `sizes` rows, of which a tensor has `groups` groups of equally many rows of
    /// each.
    fn joined(self, tensor: &str, sizes: &[usize], i: usize, groups: usize) -> FileRows {
        let (first, all) = (sizes[..i].iter().sum::<usize>() / groups, sizes.iter().sum::<usize>());
        let runs = (groups > 1).then(|| Runs { rows: sizes[i] / groups, step: all / groups });
        FileRows { first, runs, ..FileRows::own(&format!("{}.{tensor}", self.name), all) }
    }
}
