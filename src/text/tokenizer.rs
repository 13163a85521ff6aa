//! The tokenizer of a Hugging Face model directory: `tokenizer.json` for the pieces, the small JSON files next to it
//! for the names of the special tokens.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::chat::{ChatTemplate, token_text};
use crate::comm::abort;
use crate::error::{Error, Result};
use crate::sys::{files, patterns};

/// Text to token ids and back, with the ids that begin and end a text.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// `tokenizer.json`, for messages.
    path: PathBuf,
    vocabulary: usize,
    sha256: String,
    bos_id: Option<u32>,
    eos_ids: Vec<u32>,
    chat: Option<ChatTemplate>,
}

impl Tokenizer {
    /// Reads `dir`: `tokenizer.json`, and where present `tokenizer_config.json`, `special_tokens_map.json`,
    /// `generation_config.json`, `config.json`, `chat_template.jinja`.
    ///
    /// End tokens are those of `generation_config.json`, else of `config.json`, else the tokenizer's `eos_token`: the
    /// order in which `transformers` decides where generation stops. The begin token is the tokenizer's `bos_token`;
    /// a tokenizer that names none (Qwen) has none, whatever `config.json` says.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let bytes = files::if_any(&path, files::read)?.ok_or_else(|| {
            Error::data(format!("{} has no tokenizer.json", dir.display()))
                .hint("save it with `AutoTokenizer.from_pretrained(...).save_pretrained(DIR)` (a fast tokenizer)")
        })?;
        patterns::limit_backtracking();
        let inner = guarded(&path, "is not a tokenizer", || {
            let mut inner = tokenizers::Tokenizer::from_bytes(&bytes)?;
            // A text is never cut or padded behind the caller's back; `transformers` resets both on each call too.
            inner.with_truncation(None)?;
            inner.with_padding(None);
            Ok(inner)
        })?;

        let [settings, special_tokens, generation, config] =
            ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"]
                .map(|name| files::read_object(&dir.join(name)));
        let (settings, special_tokens, generation, config) = (settings?, special_tokens?, generation?, config?);
        let token = |name: &str| {
            let mut files = [&settings, &special_tokens].into_iter().flatten();
            files.find_map(|file| file.get(name)).and_then(token_text)
        };
        let id_of = |text: &str| {
            inner.token_to_id(text).ok_or_else(|| {
                Error::data(format!("special token {text:?} of {} is not in its tokenizer.json", dir.display()))
            })
        };
        let (bos_token, eos_token) = (token("bos_token"), token("eos_token"));
        let bos_id = bos_token.as_deref().map(id_of).transpose()?;
        let mut eos_ids: Vec<u32> = end_tokens(generation.as_ref());
        if eos_ids.is_empty() {
            eos_ids = end_tokens(config.as_ref());
        }
        if eos_ids.is_empty() {
            eos_ids = eos_token.as_deref().map(id_of).transpose()?.into_iter().collect();
        }
        let vocabulary = inner.get_vocab(true).values().map(|id| *id as usize + 1).max().unwrap_or(0);
        let chat = ChatTemplate::find(dir, settings.as_ref(), bos_token, eos_token)?;
        let sha256 = Sha256::digest(&bytes).iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
        Ok(Self { inner, path, vocabulary, sha256, bos_id, eos_ids, chat })
    }

    /// The tokenizer of a directory, where it has one.
    pub fn find(dir: &Path) -> Result<Option<Self>> {
        if dir.join("tokenizer.json").exists() { Self::load(dir).map(Some) } else { Ok(None) }
    }

    /// Whether tokens that both have are the same ids in both; either may have more.
    pub fn agrees_with(&self, other: &Self) -> bool {
        let [own, others] = [self, other].map(|tokenizer| tokenizer.inner.get_vocab(true));
        own.iter().all(|(token, id)| others.get(token).is_none_or(|other| other == id))
    }

    /// Token ids of `text`; with `special`, those that the tokenizer itself puts around a text (BOS, mostly).
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let tokens = guarded(&self.path, format_args!("cannot tokenize {:?}", excerpt(text)), || {
            Ok(self.inner.encode_fast(text, special)?.get_ids().to_vec())
        })?;
        if let Some(bos) = self.bos_id
            && tokens.starts_with(&[bos, bos])
        {
            return Err(Error::data(format!("the text {:?} would begin with two BOS tokens", excerpt(text))).hint(
                "a text that a chat template made carries its own BOS: use the template, or take BOS out of it",
            ));
        }
        Ok(tokens)
    }

    /// The text of `tokens`; with `skip_special`, without special tokens. Ids beyond the vocabulary give no text.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String> {
        guarded(&self.path, "cannot decode tokens", || self.inner.decode(tokens, skip_special))
    }

    /// The text of a prompt as reward functions see it: special tokens kept (a template's turns are part of the
    /// question), but for a leading BOS, which no one wrote.
    pub fn decode_prompt(&self, tokens: &[u32]) -> Result<String> {
        let text = match (self.bos_id, tokens.first()) {
            (Some(bos), Some(first)) if bos == *first => &tokens[1..],
            _ => tokens,
        };
        self.decode(text, false)
    }

    /// Parts of a row as text, special tokens and all; those with true, which a model learns, stand between ⟦ and ⟧.
    pub fn marked<'a>(&self, parts: impl IntoIterator<Item = (&'a [u32], bool)>) -> Result<String> {
        let of = |(tokens, is_learned): (&[u32], bool)| {
            let text = self.decode(tokens, false)?;
            Ok(if is_learned { format!("⟦{text}⟧") } else { text })
        };
        parts.into_iter().map(of).collect()
    }

    /// A tokenizer without tokens, for a plan whose rows only have lengths.
    pub fn none() -> Self {
        let inner = tokenizers::Tokenizer::new(tokenizers::models::bpe::BPE::default());
        let (path, sha256) = (PathBuf::new(), String::new());
        Self { inner, path, vocabulary: 0, sha256, bos_id: None, eos_ids: Vec::new(), chat: None }
    }

    /// One more than the largest token id.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Tokens that end a text, the first being the one that is appended to a demonstration. May be empty.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    pub fn bos_id(&self) -> Option<u32> {
        self.bos_id
    }

    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    pub fn chat(&self) -> Result<&ChatTemplate> {
        self.chat.as_ref().ok_or_else(|| {
            Error::data("the tokenizer has no chat template")
                .hint("set data.chat_template = false, or put chat_template.jinja beside tokenizer.json")
        })
    }

    /// Token ids of `messages` through the chat template, whose further variables are `more`.
    pub fn encode_chat(
        &self,
        messages: &Value,
        more: &Map<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>> {
        self.encode(&self.chat()?.apply(messages, more, add_generation_prompt)?, false)
    }

    /// Token ids that the chat template puts between an assistant's answer, whose tokens are `answer`, and the next one, with
    /// `messages` between them. Where `answer` ends with the token that ends a turn, that is left out. No token of the
    /// conversation before is made anew.
    pub fn encode_chat_turn(
        &self,
        answer: &[u32],
        messages: &[Map<String, Value>],
        more: &Map<String, Value>,
    ) -> Result<Vec<u32>> {
        let mut all = vec![json!({"role": "user", "content": ANSWER}), json!({"role": "assistant", "content": ANSWER})];
        all.extend(messages.iter().cloned().map(Value::Object));
        let text = self.chat()?.apply(&Value::Array(all), more, true)?;
        let Some((_, behind)) = text.split_once(ANSWER).and_then(|(_, behind)| behind.split_once(ANSWER)) else {
            return Err(Error::data("the chat template does not print an assistant's answer as it is")
                .hint("an environment can write text or token ids in place of messages"));
        };
        let mut tokens = self.encode(behind, false)?;
        if !tokens.is_empty() && answer.last() == tokens.first() {
            tokens.remove(0);
        }
        Ok(tokens)
    }
}

/// Stands for what was said before: a word that no template knows.
const ANSWER: &str = "rlhfhpcanswer";

/// Runs `body`, in which a hand-written `tokenizer.json` may panic; `what` says what failed.
fn guarded<T>(path: &Path, what: impl Display, body: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let outcome = abort::caught(|| body().map_err(|e| Error::fault(e.to_string())));
    outcome.map_err(|e| Error::data(format!("{} {what}: {}", path.display(), e.message)))
}

/// The end tokens of a file, one or several.
fn end_tokens(file: Option<&Map<String, Value>>) -> Vec<u32> {
    match file.and_then(|file| file.get("eos_token_id")) {
        Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_u64).map(|id| id as u32).collect(),
        Some(id) => id.as_u64().map(|id| id as u32).into_iter().collect(),
        None => Vec::new(),
    }
}

fn excerpt(text: &str) -> String {
    text.chars().take(40).collect()
}
