//! Tests of tokens, shards, splits, order and the account of rows.

mod chat;
mod files;
mod fixture;
mod labelled;
mod pairs;
mod refused;
pub mod rows;
mod shapes;
mod shard;
mod sources;
mod tables;
mod templates;
pub mod text;
