//! Tests of tokens, shards, splits, order and the account of rows.

mod chat;
mod fixture;
mod labelled;
mod pairs;
mod refused;
pub mod rows;
mod shard;
mod sources;
mod tables;
pub mod text;
