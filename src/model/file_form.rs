//! The form of the matrices of a family in the files of a model.

use super::delta_files::DeltaForm;
use super::expert_files::ExpertForm;

/// How matrices are stored in the files of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileForm {
    /// Queries, keys and values are one tensor, `qkv_proj`.
    pub joins_qkv: bool,
    /// Gate and up are one tensor, `gate_up_proj`.
    pub joins_gate_up: bool,
    /// Column 2i of a head is rotated with 2i + 1.
    pub is_interleaved: bool,
    /// The usual form of experts.
    pub experts: ExpertForm,
    /// The form of layers with the gated delta rule.
    pub delta: DeltaForm,
}

impl FileForm {
    /// Each matrix is a tensor, and columns of a head are rotated with those half a head apart.
    pub const PLAIN: Self = Self {
        joins_qkv: false,
        joins_gate_up: false,
        is_interleaved: false,
        experts: ExpertForm::Each,
        delta: DeltaForm::ByMatrix,
    };
}
