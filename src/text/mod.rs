//! Text and tokens: the tokenizer of a model directory, chat templates, incremental decoding, training of a BPE.

pub mod bpe;
pub mod chat;
mod growth;
pub mod images;
mod jinja;
mod json;
mod outside;
pub mod stream;
pub mod tokenizer;

pub use bpe::train_bpe;
pub use chat::ChatTemplate;
pub use json::kind_of;
pub use stream::StreamDecoder;
pub use tokenizer::Tokenizer;
