//! What an environment appends to a turn: a text with its images, and their tokens.

use super::reply::printable;
use crate::error::{Error, Result};
use crate::experience::Image;
use crate::text::Tokenizer;
use crate::text::images::{Sequences, check_parts, lift};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::fmt;
use std::path::Path;
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
    /// The reason why feedback may have no images, if it may not.
    pub blind: Option<Error>,
}

/// Tokens to append after a turn, the images among them, and their text, in which an image has one token.
#[derive(Clone, Debug, Default)]
pub struct Appended {
    pub tokens: Vec<u32>,
    /// `Image::at` counts from the first of `tokens`.
    pub images: Vec<Image>,
    pub text: String,
}

impl fmt::Debug for Texts {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Texts").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

impl Texts {
    /// `feedback` with the `images` of parts that have none of their own, after a turn of the tokens `last`. Paths start
    /// from `folder`.
    ///
    /// # Errors
    /// The reason, if the model cannot continue after it.
    pub fn append(
        &self,
        feedback: &Feedback,
        images: &[Value],
        last: &[u32],
        folder: &Path,
    ) -> std::result::Result<Appended, String> {
        let encoded = self.encode(feedback, images.to_vec(), last);
        let placed = encoded.and_then(|sequences| match &self.blind {
            Some(why) if !sequences.images.is_empty() => Err(why.clone()),
            _ => sequences.place(&self.tokenizer, folder),
        });
        let placed = placed.map_err(|e| format!("its feedback cannot be tokenized: {}", printable(&e.message)))?;
        let (tokens, images) = (placed.tokens.concat(), placed.images);
        if let Some(token) = tokens.iter().find(|token| **token as usize >= self.vocabulary) {
            let vocabulary = self.vocabulary;
            return Err(format!(
                "its feedback has the token {token}, but the model's vocabulary has only {vocabulary} tokens"
            ));
        }
        let text = match feedback {
            Feedback::Text(text) => text.clone(),
            _ => self
                .tokenizer
                .marked([(&*tokens, false)])
                .map_err(|e| format!("its feedback cannot be decoded: {e}"))?,
        };
        Ok(Appended { tokens, images, text })
    }

    /// The tokens of feedback, with one for each image, and its images as they are given.
    fn encode(&self, feedback: &Feedback, images: Vec<Value>, last: &[u32]) -> Result<Sequences> {
        let (tokens, images) = match feedback {
            Feedback::Text(text) => (self.tokenizer.encode(text, false)?, images),
            Feedback::Tokens(tokens) => (tokens.clone(), images),
            Feedback::Messages(messages) => {
                messages.iter().try_for_each(|message| check_parts(message, "a message"))?;
                let mut messages: Vec<Value> = messages.iter().cloned().map(Value::Object).collect();
                let images = lift(&mut messages, images, &self.tokenizer)?;
                (self.tokenizer.encode_chat_turn(last, messages, &self.template)?, images)
            }
        };
        Ok(Sequences { tokens: vec![tokens], images })
    }
}
