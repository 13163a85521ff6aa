//! Tests of tokens, shards, splits, the order of rows and their ledger.

mod chat;
mod files;
mod fixture;
pub mod image_rows;
mod images;
mod labelled;
mod pairs;
mod refused;
pub mod rows;
mod selection;
mod shapes;
mod shard;
mod sources;
mod tables;
mod templates;
pub mod text;
