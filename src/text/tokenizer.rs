//! The tokenizer of a Hugging Face model directory: `tokenizer.json` for the tokens, and the small JSON files next to
//! it for the names of the special tokens.

use std::borrow::Cow;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::chat::{ChatTemplate, template_files};
use super::growth;
use super::outside::SmallFiles;
use crate::comm::abort;
use crate::error::{Error, Result};
use crate::hub::{self, Kind};
use crate::images::Images;
use crate::sys::{files, patterns, sandbox, stderr};
use tokenizers::models::wordlevel::WordLevel;

/// Converts text to token ids and back. Knows the ids that begin and end a text.
#[derive(Debug)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    /// The most bytes that the parts of `tokenizer.json` make of one byte of text.
    growth: f64,
    /// The most bytes of text that one token has.
    token_bytes: f64,
    /// The path of `tokenizer.json`, for messages.
    path: PathBuf,
    vocabulary: usize,
    sha256: String,
    /// A hash of everything that changes the tokens of a row, chat template and end tokens included.
    recipe: String,
    bos_id: Option<u32>,
    eos_ids: Vec<u32>,
    chat: Option<ChatTemplate>,
    /// The images that the model sees, or why they cannot be read.
    images: Result<Option<Images>>,
}

impl Tokenizer {
    /// Reads `dir`: `tokenizer.json`, and if present `tokenizer_config.json`, `special_tokens_map.json`,
    /// `added_tokens.json`, `generation_config.json`, `config.json`, `chat_template.jinja`.
    ///
    /// End tokens are the tokenizer's `eos_token` and those of `generation_config.json`, or of `config.json` if that
    /// file names none. The begin token is the tokenizer's `bos_token`. A tokenizer without one (Qwen) has none, even
    /// if `config.json` names one.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let bytes = files::if_any(&path, files::read)?.ok_or_else(|| no_tokenizer(dir))?;
        let small = SmallFiles::read(dir)?;
        patterns::limit_backtracking();
        // A normalizer also normalizes the added tokens, here.
        let (json, files) = (Arc::new(bytes), Arc::new(small));
        let (bytes, small) = (Arc::clone(&json), Arc::clone(&files));
        let (inner, changes) = bounded(&path, "is not a tokenizer", bytes.len(), move || {
            let mut inner = tokenizers::Tokenizer::from_bytes(json.as_slice())?;
            // A text is never implicitly cut or padded. `transformers` also resets both on each call.
            inner.with_truncation(None)?;
            inner.with_padding(None);
            let changes = files.complete(&mut inner, &json);
            Ok((inner, changes))
        })?;
        let changes = changes.map_err(|e| e.within(dir.display()))?;
        small.warn(dir);

        let id_of = |text: &str| {
            inner.token_to_id(text).ok_or_else(|| {
                Error::data(format!("the special token {text:?} of {} must be in its tokenizer.json", dir.display()))
            })
        };
        let (bos_token, eos_token) = (small.special_token("bos_token"), small.special_token("eos_token"));
        let bos_id = bos_token.as_deref().map(id_of).transpose()?;
        let mut eos_ids: Vec<u32> = eos_token.as_deref().map(id_of).transpose()?.into_iter().collect();
        let mut of_model =
            end_tokens(&small.generation).map_err(|e| e.within(dir.join("generation_config.json").display()))?;
        if of_model.is_empty() {
            of_model = end_tokens(&small.config).map_err(|e| e.within(dir.join("config.json").display()))?;
        }
        let tokens = inner.get_vocab(true);
        let vocabulary = tokens.values().map(|id| *id as usize + 1).max().unwrap_or(0);
        // Texts have no other tokens. The model may have more, and knows these end tokens itself.
        of_model.retain(|id| (*id as usize) < vocabulary && !eos_ids.contains(id));
        eos_ids.extend(of_model);
        let longest = tokens.keys().map(String::len).max().unwrap_or(0) as f64;
        let chat = ChatTemplate::find(dir, Some(&small.settings), small.special_tokens())?;
        let images = Images::find(dir);
        let sha256 = hashed(&[&bytes, changes.as_bytes()]);
        let recipe = format!("{eos_ids:?} {} {:?}", json!(small.settings), template_files(dir)?);
        let recipe = hashed(&[sha256.as_bytes(), recipe.as_bytes()]);
        let growth = growth::growth_of(inner.get_normalizer())
            * growth::growth_of(inner.get_pre_tokenizer())
            * growth::growth_of(inner.get_post_processor());
        let token_bytes = growth::growth_of(inner.get_decoder()) * longest;
        let inner = Arc::new(inner);
        let tokenizer =
            Self { inner, growth, token_bytes, path, vocabulary, sha256, recipe, bos_id, eos_ids, chat, images };
        tokenizer.warn_of_ends(&small.settings);
        Ok(tokenizer)
    }

    /// Warns if `add_bos_token` or `add_eos_token` differs from what `tokenizer.json` adds to a text.
    fn warn_of_ends(&self, settings: &Map<String, Value>) {
        let Ok(tokens) = self.encode("a", true) else { return };
        for (key, what, adds) in [
            ("add_bos_token", "begin", self.bos_id.is_some() && tokens.first().copied() == self.bos_id),
            ("add_eos_token", "end", tokens.last().is_some_and(|last| self.eos_ids.contains(last))),
        ] {
            if let Some(value) = settings.get(key).and_then(Value::as_bool).filter(|value| *value != adds) {
                let does = if adds { "adds" } else { "adds no" };
                stderr::warn_once(&format!(
                    "{}: tokenizer_config.json sets {key} = {value}, but tokenizer.json {does} {what} token; it decides, as in \
                     transformers 5",
                    self.path.parent().unwrap_or(&self.path).display()
                ));
            }
        }
    }

    /// The tokenizer of a directory, if it has one.
    pub fn find(dir: &Path) -> Result<Option<Self>> {
        if dir.join("tokenizer.json").exists() { Self::load(dir).map(Some) } else { Ok(None) }
    }

    /// The tokenizer in `dir`, if there is one with other tokens. No tokenizer differs from `none`.
    pub fn find_other(&self, dir: &Path) -> Result<Option<Self>> {
        let is_none = self.path.as_os_str().is_empty();
        let found = if is_none { None } else { Self::find(dir)? };
        Ok(found.filter(|found| found.sha256 != self.sha256))
    }

    /// Whether shared tokens have the same ids in both. Either may have more tokens.
    pub fn agrees_with(&self, other: &Self) -> bool {
        let [own, others] = [self, other].map(|tokenizer| tokenizer.inner.get_vocab(true));
        own.iter().all(|(token, id)| others.get(token).is_none_or(|other| other == id))
    }

    /// The token ids of `text`. With `special`, including the tokens that the tokenizer adds around a text (usually
    /// BOS).
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encode =
            move |inner: &tokenizers::Tokenizer, text: &str| Ok(inner.encode_fast(text, special)?.get_ids().to_vec());
        let what = format_args!("cannot tokenize {:?}", excerpt(text));
        let tokens = if text.len() as f64 * self.growth <= BYTES_UNCHECKED {
            guarded(&self.path, what, || encode(&self.inner, text))
        } else {
            let (inner, owned) = (Arc::clone(&self.inner), text.to_owned());
            bounded(&self.path, what, text.len(), move || encode(&inner, &owned))
        }?;
        if let Some(bos) = self.bos_id
            && tokens.starts_with(&[bos, bos])
        {
            return Err(Error::data(format!("the text {:?} would begin with two BOS tokens", excerpt(text))).hint(
                "use the chat template, or remove BOS from the text: texts made by a chat template have their own",
            ));
        }
        Ok(tokens)
    }

    /// The text of `tokens`. With `skip_special`, without special tokens. Ids beyond the vocabulary have no text.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String> {
        let what = "cannot decode tokens";
        if tokens.len() as f64 * self.token_bytes <= BYTES_UNCHECKED {
            return guarded(&self.path, what, || self.inner.decode(tokens, skip_special));
        }
        let (inner, owned) = (Arc::clone(&self.inner), tokens.to_vec());
        bounded(&self.path, what, tokens.len(), move || inner.decode(&owned, skip_special))
    }

    /// The text of a prompt as reward functions see it. Special tokens are kept, because a template's turns are part of
    /// the question. A leading BOS that the text does not contain is removed, and an image has one token.
    pub fn decode_prompt(&self, tokens: &[u32]) -> Result<String> {
        let text = match (self.bos_id, tokens.first()) {
            (Some(bos), Some(first)) if bos == *first => &tokens[1..],
            _ => tokens,
        };
        self.decode(&self.with_images_once(text), false)
    }

    /// `tokens` with one token for each image, as the chat template prints them.
    fn with_images_once<'a>(&self, tokens: &'a [u32]) -> Cow<'a, [u32]> {
        let Ok(Images { token: image, .. }) = self.images() else { return Cow::Borrowed(tokens) };
        let mut once = tokens.to_vec();
        once.dedup_by(|token, before| token == before && token == image);
        once.into()
    }

    /// Parts of a row as text, special tokens included. Parts with true, which a model learns, are between ⟦ and ⟧. An
    /// image has one token.
    pub fn marked<'a>(&self, parts: impl IntoIterator<Item = (&'a [u32], bool)>) -> Result<String> {
        let of = |(tokens, is_learned): (&[u32], bool)| {
            let text = self.decode(&self.with_images_once(tokens), false)?;
            Ok(if is_learned { format!("⟦{text}⟧") } else { text })
        };
        parts.into_iter().map(of).collect()
    }

    /// The tokenizer of a plan, whose rows have only lengths: it reads every text as token 0.
    pub fn none() -> Self {
        let unknown = WordLevel::builder().vocab([(String::new(), 0)].into()).unk_token(String::new());
        let inner = Arc::new(tokenizers::Tokenizer::new(unknown.build().expect("a vocabulary of one token")));
        let (path, sha256, recipe) = (PathBuf::new(), String::new(), String::new());
        let (growth, token_bytes) = (1.0, 0.0);
        Self {
            inner,
            growth,
            token_bytes,
            path,
            vocabulary: 0,
            sha256,
            recipe,
            bos_id: None,
            eos_ids: Vec::new(),
            chat: None,
            images: Ok(None),
        }
    }

    /// One more than the largest token id.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The tokens with ids from `first` on, for a message: `"<pad>" and 3 more`.
    pub fn names_from(&self, first: usize) -> String {
        let name = |id| self.inner.id_to_token(id).map(|name| format!("{name:?}"));
        let named = (first..self.vocabulary).find_map(|id| name(id as u32)).unwrap_or_default();
        match self.vocabulary.saturating_sub(first) {
            0 | 1 => named,
            n => format!("{named} and {} more", n - 1),
        }
    }

    /// Tokens that end a text. The first, the tokenizer's own, is appended to demonstrations. May be empty.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    pub fn bos_id(&self) -> Option<u32> {
        self.bos_id
    }

    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    pub fn recipe(&self) -> &str {
        &self.recipe
    }

    /// The images that the model sees: how they are read, and its tokens for them.
    ///
    /// # Errors
    /// `Data`, if it sees none, or if its processor is not known.
    pub fn images(&self) -> Result<&Images> {
        self.images.as_ref().map_err(Clone::clone)?.as_ref().ok_or_else(|| {
            Error::data("the model reads text only")
                .hint("use a model with a preprocessor_config.json and an image_token_id in its config.json, or rows without images")
        })
    }

    pub fn chat(&self) -> Result<&ChatTemplate> {
        self.chat.as_ref().ok_or_else(|| {
            Error::data("the tokenizer has no chat template")
                .hint("put a chat_template.jinja next to tokenizer.json, or use plain prompts (in a job: data.chat_template = false)")
        })
    }

    /// The token ids of `messages` through the chat template. `more` are further variables of the template.
    pub fn encode_chat(
        &self,
        messages: &Value,
        more: &Map<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>> {
        self.encode(&self.chat()?.apply(messages, more, add_generation_prompt)?, false)
    }

    /// The number of leading tokens of an assistant's turn, as the template prints it, that the model learns. They end
    /// with the turn's last end token. If it has none, they end with the last added token that only whitespace follows.
    pub fn turn_end(&self, turn: &[u32]) -> usize {
        let is_added = |id: &u32| self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(id);
        let is_blank = |tokens: &[u32]| self.decode(tokens, false).is_ok_and(|text| text.trim().is_empty());
        let ends = turn.iter().rposition(|id| self.eos_ids.contains(id)).map(|at| at + 1);
        let marked = || turn.iter().rposition(is_added).map(|at| at + 1).filter(|at| is_blank(&turn[*at..]));
        ends.or_else(marked).unwrap_or(turn.len())
    }

    /// Warns if the chat template ends an assistant's turn without an end token, so that no answer would end there.
    /// `more` are further variables of the template.
    pub fn warn_of_turn_end(&self, more: &Map<String, Value>) {
        let turns = ["user", "assistant"].map(|role| json!({"role": role, "content": ANSWER}));
        let text = self.chat().and_then(|chat| chat.apply(&json!(turns), more, false));
        // A template that does not accept this conversation is checked with the rows.
        let Some(Ok(tokens)) =
            text.as_ref().ok().and_then(|text| Some(self.encode(text.rsplit_once(ANSWER)?.1, false)))
        else {
            return;
        };
        if tokens.iter().any(|id| self.eos_ids.contains(id)) {
            return;
        }
        let dir = self.path.parent().unwrap_or(&self.path).display();
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        stderr::warn_once(&match tokens.iter().rev().find_map(|id| Some((id, added.get(id)?))) {
            Some((id, token)) => format!(
                "{dir}: the chat template ends a turn with {:?}, which is no end token of the model, so its answers do not \
                 end there; add {id} to eos_token_id in generation_config.json",
                token.content
            ),
            None => {
                format!("{dir}: the chat template ends a turn without an end token, so the model cannot learn to stop")
            }
        });
    }

    /// The token ids that the chat template puts between an assistant's answer, whose tokens are `answer`, and the next
    /// one, with `messages` between them. If `answer` ends with the token that ends a turn, that token is left out. No
    /// token of the earlier conversation is tokenized again.
    pub fn encode_chat_turn(
        &self,
        answer: &[u32],
        messages: Vec<Value>,
        more: &Map<String, Value>,
    ) -> Result<Vec<u32>> {
        let mut all = vec![json!({"role": "user", "content": ANSWER}), json!({"role": "assistant", "content": ANSWER})];
        all.extend(messages);
        let text = self.chat()?.apply(&Value::Array(all), more, true)?;
        let Some((_, behind)) = text.split_once(ANSWER).and_then(|(_, behind)| behind.split_once(ANSWER)) else {
            return Err(Error::data("the chat template must print an assistant's answer unchanged, but it does not")
                .hint("return text or token ids from the environment instead of messages"));
        };
        let mut tokens = self.encode(behind, false)?;
        if !tokens.is_empty() && answer.last() == tokens.first() {
            tokens.remove(0);
        }
        Ok(tokens)
    }
}

/// A placeholder for the earlier answer: a word that no template contains.
const ANSWER: &str = "rlhfhpcanswer";

/// A text that cannot become longer than this is tokenized without limits: it saves a change of threads.
const BYTES_UNCHECKED: f64 = (64 << 20) as f64;
/// The memory that tokenizing may take, next to `BYTES_A_BYTE` for each byte of the text or file. A token has some
/// 100 bytes, and its text and offsets exist several times.
const BYTES_MAX: usize = 256 << 20;
const BYTES_A_BYTE: usize = 256;
/// The seconds of processor time that tokenizing may take, next to `SECONDS_A_BYTE` for each byte.
const SECONDS_MAX: f64 = 60.0;
const SECONDS_A_BYTE: f64 = 2e-5;

/// Runs `body` like `guarded`, within limits of memory and time that depend on `len`, the length of the input. A few
/// bytes of `tokenizer.json` can describe gigabytes.
fn bounded<T: Send + 'static>(
    path: &Path,
    what: impl Display,
    len: usize,
    body: impl FnOnce() -> tokenizers::Result<T> + Send + 'static,
) -> Result<T> {
    let (bytes, seconds) = (BYTES_MAX + BYTES_A_BYTE * len, SECONDS_MAX + SECONDS_A_BYTE * len as f64);
    let outcome =
        sandbox::run_within(bytes, seconds, move || abort::caught(|| body().map_err(|e| Error::fault(e.to_string()))));
    let message = match outcome {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(e)) => e.message,
        Err(limit) => {
            let message = format!("{} {what}: it {limit}", path.display());
            return Err(Error::data(message).hint(
                "check its parts: a `precompiled_charsmap` may be damaged, or a `Replace` makes texts too long",
            ));
        }
    };
    Err(Error::data(format!("{} {what}: {message}", path.display())))
}

/// Runs `body`, which may panic on a hand-written `tokenizer.json`. `what` describes the failure.
fn guarded<T>(path: &Path, what: impl Display, body: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let outcome = abort::caught(|| body().map_err(|e| Error::fault(e.to_string())));
    outcome.map_err(|e| Error::data(format!("{} {what}: {}", path.display(), e.message)))
}

/// The end tokens of a file, one or several. transformers writes -1 for none.
fn end_tokens(file: &Map<String, Value>) -> Result<Vec<u32>> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = match file.get("eos_token_id") {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(value) if value.as_i64() == Some(-1) => Some(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().map(id).collect(),
        Some(one) => id(one).map(|id| vec![id]),
    };
    ids.ok_or_else(|| {
        Error::data(format!("eos_token_id must be a token id or a list of them (got {})", file["eos_token_id"]))
    })
}

/// The error for a directory without `tokenizer.json`.
fn no_tokenizer(dir: &Path) -> Error {
    if dir.join("tiktoken.model").exists() {
        return Error::data(format!("{} has no tokenizer.json: its tokens are in tiktoken.model", dir.display())).hint(
            "convert them once in Python: `from transformers.convert_slow_tokenizer import TikTokenConverter`, then \
             `TikTokenConverter(\"tiktoken.model\", pattern=PATTERN, extra_special_tokens=TOKENS).converted().save(\"tokenizer.json\")`; \
             PATTERN (`pat_str`) and the special tokens in the order of their ids are in the model's Python files",
        );
    }
    let error = Error::data(format!("{} has no tokenizer.json", dir.display()))
        .hint("save it with `AutoTokenizer.from_pretrained(...).save_pretrained(DIR)` (a fast tokenizer)");
    if hub::snapshot_of(dir).is_some() { hub::explain(dir, Kind::Model, error) } else { error }
}

fn hashed(parts: &[&[u8]]) -> String {
    let sha256 = parts.iter().fold(Sha256::new(), Sha256::chain_update).finalize();
    sha256.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

fn excerpt(text: &str) -> String {
    text.chars().take(40).collect()
}
