//! To be written.

pub mod corpus;
pub mod shard;
pub mod tokenizer;
