//! The tensors of a mixture of experts in the files of a model: one for each matrix, as on the Hub, or one for the
//! matrices of all experts, as in the memory of transformers 5.

use super::block_spec::ExpertsSpec;
use super::file_rows::{Columns, FileRows, Runs};
use super::files::Checkpoint;
use super::tuning::adapter_names;

/// The form of the experts in the files of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertForm {
    /// `mlp.experts.0.gate_proj.weight` and so on, and the router `mlp.gate.weight`.
    Each,
    /// `block_sparse_moe.experts.0.w1.weight` (gate), `w3` (up) and `w2` (down), and the router
    /// `block_sparse_moe.gate.weight`: Mixtral.
    EachNumbered,
    /// `mlp.experts.gate_up_proj` (E, 2 f, d) and `mlp.experts.down_proj` (E, d, f), and the router `mlp.gate.weight`.
    Stacked,
    /// `mlp.experts.gate_up_proj` (E, d, 2 f) with columns of gate and up in turn, `mlp.experts.down_proj` (E, f, d), their
    /// biases `gate_up_proj_bias` (E, 2 f) and `down_proj_bias` (E, d), and the router `mlp.router`: gpt-oss.
    Columns,
}

impl ExpertForm {
    /// Whether the files of a model have one tensor for all experts.
    pub(super) fn is_stacked(files: &Checkpoint) -> bool {
        files.has(|name| name.starts_with("model.layers.") && name.ends_with(".mlp.experts.gate_up_proj"))
    }
}

/// The tensors of one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertFiles<'a> {
    pub layer: usize,
    pub form: ExpertForm,
    pub spec: &'a ExpertsSpec,
    /// The width of the hidden state.
    pub width: usize,
}

impl ExpertFiles<'_> {
    /// The place of the router; `None`: a tensor of its name.
    pub(super) fn router(self) -> Option<FileRows> {
        let name = match self.form {
            ExpertForm::Each | ExpertForm::Stacked => return None,
            ExpertForm::EachNumbered => format!("model.layers.{}.block_sparse_moe.gate.weight", self.layer),
            ExpertForm::Columns => format!("model.layers.{}.mlp.router.weight", self.layer),
        };
        Some(FileRows::own(&name, self.spec.count))
    }

    /// The place of the bias of `part` of expert `e`.
    pub(super) fn bias(self, e: usize, part: &str) -> FileRows {
        let rows = self.columns(e, part);
        FileRows { tensor: format!("{}_bias", rows.tensor), is_transposed: false, ..rows }
    }

    /// The place of `part` of expert `e` among the columns of its matrices.
    fn columns(self, e: usize, part: &str) -> FileRows {
        let Self { layer, spec: ExpertsSpec { count, width: f, .. }, width: d, .. } = self;
        let (tensor, first, rows) = match part {
            "gate" => ("gate_up", 0, 2 * f),
            "up" => ("gate_up", 1, 2 * f),
            _ => ("down", 0, d),
        };
        let runs = (tensor == "gate_up").then_some(Runs { rows: 1, step: 2 });
        let name = format!("model.layers.{layer}.mlp.experts.{tensor}_proj");
        let (first, matrices) = (e * rows + first, Some(*count));
        FileRows { first, runs, matrices, is_transposed: true, ..FileRows::own(&name, count * rows) }
    }

    /// The module of the router in transformers.
    pub(super) fn router_module(self) -> String {
        let last = if self.form == ExpertForm::Columns { "router" } else { "gate" };
        format!("model.layers.{}.mlp.{last}", self.layer)
    }

    /// The names of the parameters of all experts in transformers: of gates and ups, and of downs.
    pub(super) fn parameters(self) -> [String; 2] {
        ["gate_up", "down"].map(|part| format!("model.layers.{}.mlp.experts.{part}_proj", self.layer))
    }

    /// The places of A and B of the adapter of expert `e` in the tensors of `module`: rows of A by expert, and columns of B
    /// by rank. B is that of `part` (gate, up, or down).
    pub(super) fn adapter(self, module: &str, e: usize, part: &str, rank: usize) -> [FileRows; 2] {
        let Self { spec: ExpertsSpec { count, width: f, .. }, width: d, .. } = self;
        let [a, b] = adapter_names(module);
        let in_turn = Some(Runs { rows: 1, step: 2 });
        let (first, rows, runs) = match (part, self.form) {
            ("gate", ExpertForm::Columns) => (0, 2 * f, in_turn),
            ("up", ExpertForm::Columns) => (1, 2 * f, in_turn),
            ("gate", _) => (0, 2 * f, None),
            ("up", _) => (*f, 2 * f, None),
            _ => (0, d, None),
        };
        let columns = Some(Columns { first: e, step: *count, of: rank * count });
        let of_a = FileRows { first: e * rank, ..FileRows::own(&a, count * rank) };
        [of_a, FileRows { first, runs, columns, ..FileRows::own(&b, rows) }]
    }

    /// The place of the `part` (gate, up, or down) of expert `e`; `None`: a tensor of its name.
    pub(super) fn expert(self, e: usize, part: &str) -> Option<FileRows> {
        let Self { layer, spec: ExpertsSpec { count, width: f, .. }, width: d, .. } = self;
        let numbered = |number: usize, rows: usize| {
            FileRows::own(&format!("model.layers.{layer}.block_sparse_moe.experts.{e}.w{number}.weight"), rows)
        };
        let stacked = |tensor: &str, first: usize, rows: usize| FileRows {
            first: e * rows + first,
            matrices: Some(*count),
            ..FileRows::own(&format!("model.layers.{layer}.mlp.experts.{tensor}_proj"), count * rows)
        };
        match (self.form, part) {
            (ExpertForm::Each, _) => None,
            (ExpertForm::Columns, _) => Some(self.columns(e, part)),
            (ExpertForm::EachNumbered, "gate") => Some(numbered(1, *f)),
            (ExpertForm::EachNumbered, "up") => Some(numbered(3, *f)),
            (ExpertForm::EachNumbered, _) => Some(numbered(2, d)),
            (ExpertForm::Stacked, "gate") => Some(stacked("gate_up", 0, 2 * f)),
            (ExpertForm::Stacked, "up") => Some(stacked("gate_up", *f, 2 * f)),
            (ExpertForm::Stacked, _) => Some(stacked("down", 0, d)),
        }
    }
}
