//! Streaming text: the text that each new token adds, in whole characters only.

use super::tokenizer::Tokenizer;
use crate::error::Result;

/// Decodes token by token. A character made of several tokens appears with its last one, so returned text never
/// changes. All pieces, including `finish`, join to `Tokenizer::decode` of all tokens, special ones included.
#[derive(Clone, Debug, Default)]
pub struct StreamDecoder {
    tokens: Vec<u32>,
    // tokens[context..given] were returned already. They are decoded again with the following ones, because some
    // decoders treat the first token of a text differently (a leading space is dropped).
    context: usize,
    given: usize,
}

impl StreamDecoder {
    /// The text that `token` completes. Empty while a character is incomplete.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<String> {
        self.tokens.push(token);
        let all = tokenizer.decode(&self.tokens[self.context..], false)?;
        if all.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        self.give(tokenizer, &all)
    }

    /// The remaining text. An incomplete character at the end becomes U+FFFD.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let all = tokenizer.decode(&self.tokens[self.context..], false)?;
        self.give(tokenizer, &all)
    }

    fn give(&mut self, tokenizer: &Tokenizer, all: &str) -> Result<String> {
        let known = tokenizer.decode(&self.tokens[self.context..self.given], false)?;
        let new = all.get(known.len()..).unwrap_or_default().to_owned();
        if !new.is_empty() {
            self.context = self.given;
            self.given = self.tokens.len();
        }
        Ok(new)
    }
}
