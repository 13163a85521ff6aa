//! Plain texts for `data.pretrain`, all of which is learned. Documents are [text], read as demonstrations without a
//! response.

use serde_json::{Map, Value};

use super::spec::RowSpec;
use crate::data::fields::{required, token_ids};
use crate::data::images;
use crate::data::rows::{Place, Reading};
use crate::data::shape::{self, Content, Field, Fields};
use crate::error::{Error, Result};
use crate::text::images::Sequences;
use crate::text::kind_of;

pub struct Texts;

impl RowSpec for Texts {
    fn fields(&self) -> Fields {
        Fields::Text
    }

    fn has_splits(&self) -> bool {
        false
    }

    fn has_windows(&self) -> bool {
        true
    }

    /// The tokens of a text, or token ids.
    fn encode(&self, row: &Map<String, Value>, reading: Reading) -> Result<Sequences> {
        let (config, key) = (reading.config, &reading.config.prompt_key);
        let text = required(row, key).map_err(|_| shape::missing(row, config, self.fields(), key))?;
        let content = match text {
            Value::Array(items) => Content::Ids(token_ids(key, items)?),
            Value::String(text) => Content::Text(text.clone()),
            other => return Err(Error::data(format!("field {key:?} must be a string (got {})", kind_of(other)))),
        };
        let tokens = vec![reading.tokens(&Field { key, content }, Place::Whole)?];
        Ok(Sequences { tokens, images: images::of_columns(row)? })
    }
}
