//! The description of a kind of rows: how a row becomes a document of a shard, and the document a row of a method.

use serde_json::{Map, Value};

use crate::config::data::DataConfig;
use crate::config::method::RowKind;
use crate::data::cut::{Entries, Entry, cut};
use crate::data::fields::named;
use crate::data::rows::Reading;
use crate::data::shape::{Fields, Unread};
use crate::data::source::Document;
use crate::error::{Error, Result};
use crate::text::Tokenizer;
use crate::text::images::Sequences;

/// The description of a kind of rows.
pub trait RowSpec: Sync {
    /// The fields that hold the texts of a row.
    fn fields(&self) -> Fields;

    /// Further fields that often belong to a prompt and are not read.
    fn unread(&self) -> &'static [Unread] {
        &[]
    }

    /// Whether a shard keeps all fields of its rows, for rewards.
    fn keeps_fields(&self) -> bool {
        false
    }

    /// Whether the names of prepared shards depend on the kind. Otherwise the keys of its fields distinguish them.
    fn names_shards(&self) -> bool {
        true
    }

    /// Whether a configuration chooses splits of the rows.
    fn has_splits(&self) -> bool {
        true
    }

    /// Whether a row that is too long may become several: `data.long_prompts = "window"`.
    fn has_windows(&self) -> bool {
        false
    }

    /// The sequences of the row's document.
    ///
    /// # Errors
    /// `Data`, if the row lacks a field, or has one that cannot be read.
    fn encode(&self, row: &Map<String, Value>, reading: Reading) -> Result<Sequences>;

    /// The label of the row as text. Empty without one.
    ///
    /// # Errors
    /// `Data`, if the row lacks it, or if it cannot be read. `Usage`, if no key names the field of a label that is
    /// needed.
    fn label(&self, row: &Map<String, Value>, config: &DataConfig) -> Result<String> {
        if config.label_key.is_empty() {
            return Ok(String::new());
        }
        Ok(match named(row, &config.label_key, "label")? {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        })
    }

    /// The entries of a document whose prompt has `prompt` tokens. Tokens after a prompt count only if they are learned
    /// from.
    ///
    /// # Errors
    /// `Data`, if the document is one of another kind.
    fn entries(&self, document: Document, prompt: usize, config: &DataConfig) -> Result<Entries> {
        Ok(cut(config, document, prompt, 0))
    }

    /// The tokens of an entry that are learned. The document is `None` for rows of which only the length is known.
    fn response_tokens(&self, entry: &Entry, _document: Option<Document>) -> Result<usize> {
        Ok(entry.rest as usize)
    }
}

/// The label of a row that must have one.
pub fn needed_label<'a>(row: &'a Map<String, Value>, config: &DataConfig) -> Result<&'a Value> {
    if config.label_key.is_empty() {
        return Err(Error::usage("data.label_key must name the field of the labels")
            .hint("set data.label_key (or pass --label-key)"));
    }
    named(row, &config.label_key, "label")
}

/// A row of a method.
pub trait Row: Sized {
    /// The kind of the data row that it is read from.
    const KIND: RowKind;
    /// The minimum number of tokens that it leaves free in the model's context.
    const FREE: usize = 0;

    /// The number of tokens of the longest sequence made from it.
    fn longest(entry: &Entry, _document: Option<Document>) -> Result<usize> {
        Ok(entry.tokens())
    }

    /// The hint: keys that make rows fit a context of `context` tokens.
    fn hint(context: usize) -> String {
        format!("set data.row_tokens_max = {context}, and data.long_prompts to cut longer rows or drop them")
    }

    /// Its tokens in parts, and whether each part is learned.
    fn parts(&self) -> Vec<(&[u32], bool)>;

    /// Its label, to be shown. Empty without one.
    fn label(&self) -> String {
        String::new()
    }

    /// The number of tokens of each sequence made from it.
    fn sequences(&self) -> Vec<usize> {
        vec![self.parts().iter().map(|(tokens, _)| tokens.len()).sum()]
    }

    /// The row, or the piece of a row, that `entry` describes. The document is `None` for rows of which only the length
    /// is known.
    fn read(entry: &Entry, document: Option<Document>, tokenizer: &Tokenizer) -> Result<Self>;
}
