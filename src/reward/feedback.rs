//! The text that an environment appends to a turn, and its tokens.

use super::reply::printable;
use crate::text::Tokenizer;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::fmt;
use std::sync::Arc;

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Feedback {
    Text(String),
    Tokens(Vec<u32>),
    /// Messages for the chat template.
    Messages(Vec<Map<String, Value>>),
}

impl Default for Feedback {
    fn default() -> Self {
        Self::Text(String::new())
    }
}

/// The tokenizer of the model that continues after the feedback.
pub struct Texts {
    pub tokenizer: Arc<Tokenizer>,
    /// Variables of the chat template.
    pub template: Map<String, Value>,
    pub vocabulary: usize,
}

impl fmt::Debug for Texts {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Texts").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

impl Texts {
    /// The tokens of `feedback` after a turn of the tokens `last`, and their text.
    ///
    /// # Errors
    /// The reason, if the model cannot continue after it.
    pub fn tokens(&self, feedback: &Feedback, last: &[u32]) -> Result<(Vec<u32>, String), String> {
        let has_image = || "its feedback has an image, but only prompts may have images".to_owned();
        if let Feedback::Messages(messages) = feedback
            && messages.iter().any(names_image)
        {
            return Err(has_image());
        }
        let tokens = match feedback {
            Feedback::Text(text) => self.tokenizer.encode(text, false),
            Feedback::Tokens(tokens) => Ok(tokens.clone()),
            Feedback::Messages(messages) => self.tokenizer.encode_chat_turn(last, messages, &self.template),
        };
        let tokens = tokens.map_err(|e| format!("its feedback cannot be tokenized: {}", printable(&e.to_string())))?;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= self.vocabulary) {
            let vocabulary = self.vocabulary;
            return Err(format!(
                "its feedback has the token {token}, but the model's vocabulary has only {vocabulary} tokens"
            ));
        }
        // A text may hold the token, too, and a model would look for the image.
        let is_image = |token: &u32| self.tokenizer.images().is_ok_and(|images| images.token == *token);
        if tokens.iter().any(is_image) {
            return Err(has_image());
        }
        let text = match feedback {
            Feedback::Text(text) => text.clone(),
            _ => self.tokenizer.decode(&tokens, false).map_err(|e| format!("its feedback cannot be decoded: {e}"))?,
        };
        Ok((tokens, text))
    }
}

/// Whether a part of a message is an image, by its type or, as in templates, by its key.
fn names_image(message: &Map<String, Value>) -> bool {
    let parts = message.get("content").and_then(Value::as_array).into_iter().flatten();
    let is_image = |part: &Value| match part.get("type").and_then(Value::as_str) {
        Some(kind) => kind.contains("image"),
        None => ["image", "image_url"].iter().any(|key| part.get(key).is_some()),
    };
    parts.into_iter().any(is_image)
}
