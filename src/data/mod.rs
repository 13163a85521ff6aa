//! Conversion of rows of text to prompts and demonstrations: token shards, splits, order, packing, and the ledger of
//! all rows.

mod ahead;
mod arrow;
pub mod balance;
mod cut;
mod encode;
mod eval_sets;
mod feed;
mod fields;
mod folder;
mod foreign;
mod hashes;
pub mod images;
pub mod input;
mod json;
mod kinds;
pub mod ledger;
mod left_out;
mod row_source;
pub mod rows;
mod shape;
pub mod shard;
mod source;
mod sources;
mod split;

pub use crate::config::method::RowKind;
pub use ahead::look_ahead;
pub use cut::{RowImages, RowTokens};
pub use encode::{sequences, shard_rows};
pub use feed::Cursor;
pub use hashes::Hashes;
pub use kinds::{LabelledRow, PairRow, Row, SftRow, StepLabel, StepRow};
pub use ledger::Ledger;
pub use left_out::LEDGER_LINES;
pub use row_source::{PromptSource, RowSource, SftSource};
pub use rows::Reading;
pub use sources::{Prepared, Rows, SourceFile, prepare};
pub use split::{TEST, TRAIN};
