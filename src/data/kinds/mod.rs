//! The kinds of rows, each in its own file: its fields, its encoder, its label, the documents of its shards, and the
//! row that a method gets. A new kind needs a file here, a line in each list below, and a variant of `RowKind`.

mod demonstration;
mod labelled;
mod pair;
mod prompt;
mod spec;
mod steps;
mod text;

pub use demonstration::SftRow;
pub use labelled::LabelledRow;
pub use pair::PairRow;
pub use spec::{Row, RowSpec};
pub use steps::{StepLabel, StepRow};

use crate::config::method::RowKind;

impl RowKind {
    /// The description of the kind.
    pub(super) fn spec(self) -> &'static dyn RowSpec {
        match self {
            Self::Prompt => &prompt::Prompts,
            Self::Demonstration => &demonstration::Demonstrations,
            Self::Pair => &pair::Pairs,
            Self::Labelled => &labelled::LabelledResponses,
            Self::Steps => &steps::StepTexts,
            Self::Text => &text::Texts,
        }
    }
}
