//! The requests for a row: its prompt, with the options of the command line or its own.

use super::args::Args;
use crate::cli::model_dirs::ModelDirs;
use crate::cli::rows::{self, Row};
use crate::cli::texts::Texts;
use crate::config::nearest;
use crate::config::rollout::RolloutConfig;
use crate::error::{Error, Kind, Result};
use crate::experience::Prompt;
use crate::model::Arch;
use crate::rng::{Purpose, Rng};
use crate::rollout::{self, Edits, Request, Stop};
use crate::text::{Tokenizer, kind_of};
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;

/// Fields of a result; they replace fields of the row with the same names.
const FIELDS: [&str; 5] = ["prompt_tokens", "tokens", "text", "logprobs", "finish"];

/// Keys of a row's `sampling`, and the corresponding keys of a job's `rollout`.
const KEYS: [(&str, &str); 9] = [
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("repetition_penalty", "repetition_penalty"),
    ("max_new_tokens", "response_tokens_max"),
    ("samples", "samples_per_prompt"),
    ("stop", "stop"),
    ("ignore_eos", "ignore_eos"),
];

/// The other keys of `sampling`.
const OTHERS: [&str; 3] = ["seed", "logit_bias", "bad_words"];

/// The most tokens that a response counts: few responses reach their maximum.
const RESPONSE_TOKENS: usize = 4096;

/// The least tokens that a row counts: its fields are kept in memory until its result is written.
const ROW_TOKENS: usize = 256;

/// A row, without the fields that its results replace, and its requests.
pub struct Asked {
    pub row: Row,
    pub requests: Vec<Request>,
    /// Tokens of prompt and responses, as an estimate of work and memory.
    pub size: usize,
}

/// The sampling settings of a row.
#[derive(Clone)]
struct Settings {
    config: RolloutConfig,
    stop: Arc<Stop>,
    edits: Arc<Edits>,
    rng: Option<Rng>,
}

/// Turns rows into requests.
pub struct Asker<'a> {
    args: &'a Args,
    arch: Arch,
    pub texts: Texts,
    /// The settings of rows without settings of their own.
    settings: Settings,
}

impl<'a> Asker<'a> {
    pub fn new(args: &'a Args, config: &RolloutConfig, dirs: &ModelDirs) -> Result<Self> {
        let arch = dirs.arch()?;
        let texts = Texts::open(&dirs.tokenizer, &arch, &args.template())?;
        let texts = texts.of_rows(args.input.as_deref().unwrap_or(Path::new("-")));
        let tokenizer = texts.tokenizer.as_ref();
        let edits = Arc::new(edits(args, tokenizer, arch.vocabulary)?);
        let stop = Arc::new(Stop::of_model(config, &arch.eos_tokens, tokenizer));
        Ok(Self { args, arch, texts, settings: Settings { config: config.clone(), stop, edits, rng: None } })
    }

    /// The requests for row `id`. The ids count rows from 0; they are keys of the random numbers.
    pub fn row(&self, id: u64, row: &Row) -> Result<Asked> {
        let (tokens, images) = self.texts.prompt(row)?;
        rows::check(&tokens, &self.arch)?;
        let context = self.arch.context;
        if tokens.len() == context {
            return Err(Error::data(format!("the prompt fills the model's context of {context} tokens"))
                .hint("shorten it by at least 1 token, so that a new token fits"));
        }
        let Settings { config, stop, edits, rng } = self.settings(row)?;
        let prompt = Prompt { id, tokens, images, source: self.args.input_name(), ..Prompt::default() };
        let mut requests = rollout::requests(std::slice::from_ref(&prompt), &config, &stop, context)?;
        for request in &mut requests {
            request.edits = edits.clone();
            request.rng = rng;
            request.top_logprobs = self.args.top_logprobs;
            if let (false, Some(tokenizer)) = (request.images.is_empty(), &self.texts.tokenizer) {
                request.stop = Arc::new(Stop::clone(&request.stop).with_images(tokenizer));
            }
        }
        let response = config.response_tokens_max.min(RESPONSE_TOKENS);
        let size = prompt.tokens.len() + config.samples_per_prompt.max(self.args.beams) * response;
        let size = size.max(ROW_TOKENS);
        let is_replaced = |key: &str| {
            FIELDS.contains(&key)
                || (key == "score" && self.args.beams > 1)
                || (key == "top_logprobs" && self.args.top_logprobs > 0)
        };
        let kept = row.iter().filter(|(key, _)| !is_replaced(key));
        let row = kept.map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(Asked { row, requests, size })
    }

    /// The settings of the command line, with the changes in the row's `sampling`.
    fn settings(&self, row: &Row) -> Result<Settings> {
        let mut settings = self.settings.clone();
        let own = match row.get("sampling") {
            None | Some(Value::Null) => return Ok(settings),
            Some(Value::Object(own)) => own,
            Some(other) => {
                return Err(Error::data(format!("field \"sampling\" must be an object (got {})", kind_of(other))));
            }
        };
        let (mut table, mut changed) = (as_table(&settings.config), Edits::clone(&settings.edits));
        for (name, value) in own {
            let wrong = |error: Error| Error::data(format!("sampling.{name}: {}", error.message));
            match name.as_str() {
                "seed" => {
                    let seed = value.as_u64().ok_or_else(|| wrong(of_type(value, "an integer of at least 0")))?;
                    settings.rng = Some(Rng::new(seed, Purpose::Sample));
                }
                "logit_bias" => {
                    let object = value.as_object().ok_or_else(|| wrong(of_type(value, "an object")))?;
                    changed.bias = bias(object, self.texts.tokenizer.as_ref(), self.arch.vocabulary).map_err(wrong)?;
                }
                "bad_words" => {
                    let words = serde_json::from_value(value.clone());
                    let words: Vec<String> = words.map_err(|_| wrong(of_type(value, "a list of strings")))?;
                    changed.bad_words = bad_words(&words, self.texts.tokenizer.as_ref()).map_err(wrong)?;
                }
                _ => {
                    let (_, key) = KEYS.iter().find(|(known, _)| known == name).ok_or_else(|| unknown(name))?;
                    table.insert((*key).to_string(), value.clone());
                    let config = serde_json::from_value(Value::Object(table.clone()));
                    settings.config = config.map_err(|e| wrong(Error::data(e.to_string())))?;
                }
            }
        }
        settings.config.check().and_then(|()| self.args.check(&settings.config)).map_err(of_row)?;
        settings.stop =
            Arc::new(Stop::of_model(&settings.config, &self.arch.eos_tokens, self.texts.tokenizer.as_ref()));
        settings.edits = Arc::new(changed);
        Ok(settings)
    }
}

fn as_table(config: &RolloutConfig) -> Map<String, Value> {
    let table = serde_json::to_value(config).ok();
    table.and_then(|table| table.as_object().cloned()).expect("a configuration is an object")
}

fn of_type(value: &Value, needed: &str) -> Error {
    Error::data(format!("must be {needed} (got {})", kind_of(value)))
}

fn unknown(name: &str) -> Error {
    let known: Vec<&str> = KEYS.iter().map(|(key, _)| *key).chain(OTHERS).collect();
    let hint = match nearest(name, &known) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("use one of {}", known.join(", ")),
    };
    Error::data(format!("sampling has no key `{name}`")).hint(hint)
}

/// Turns an error about the settings of a job into one about those of a row.
fn of_row(mut error: Error) -> Error {
    error.kind = Kind::Data;
    for (name, key) in KEYS {
        for of_option in [format!("rollout.{key}"), format!("--{}", name.replace('_', "-"))] {
            error.message = error.message.replace(&of_option, &format!("sampling.{name}"));
        }
    }
    error
}

/// The changes that the options make to logits.
pub fn edits(args: &Args, tokenizer: Option<&Tokenizer>, vocabulary: usize) -> Result<Edits> {
    let of = |option: &str, error: Error| Error::usage(format!("{option}: {}", error.message));
    Ok(Edits {
        bias: bias(&args.logit_bias, tokenizer, vocabulary).map_err(|e| of("--logit-bias", e))?,
        bad_words: bad_words(&args.bad_word, tokenizer).map_err(|e| of("--bad-word", e))?,
    })
}

/// Reads {"token": number}; a token is its id, or a text that is one token.
fn bias(of: &Row, tokenizer: Option<&Tokenizer>, vocabulary: usize) -> Result<Vec<(u32, f32)>> {
    let mut biases: Vec<(u32, f32)> = Vec::with_capacity(of.len());
    for (name, value) in of {
        let token = match name.parse::<u32>() {
            Ok(id) => id,
            Err(_) => match rows::needed(tokenizer, "a text")?.encode(name, false)?[..] {
                [id] => id,
                ref ids => return Err(Error::data(format!("{name:?} must be 1 token (got {}: {ids:?})", ids.len()))),
            },
        };
        let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
        let number = number
            .ok_or_else(|| Error::data(format!("the value for {name:?} must be a finite number (got {value})")))?;
        if token as usize >= vocabulary {
            return Err(Error::data(format!("token {token} is outside the vocabulary of {vocabulary}")));
        }
        if biases.iter().any(|(known, _)| *known == token) {
            return Err(Error::data(format!("token {token} has two values")));
        }
        biases.push((token, number));
    }
    biases.sort_unstable_by_key(|(token, _)| *token);
    Ok(biases)
}

fn bad_words(texts: &[String], tokenizer: Option<&Tokenizer>) -> Result<Vec<Vec<u32>>> {
    let word = |text: &String| {
        let tokens = rows::needed(tokenizer, "a text")?.encode(text, false)?;
        if tokens.is_empty() { Err(Error::data(format!("{text:?} has no tokens"))) } else { Ok(tokens) }
    };
    texts.iter().map(word).collect()
}
