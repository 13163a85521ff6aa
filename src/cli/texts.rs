//! Texts of rows as tokens: as they are, or as messages of a chat, as in the job that trained the model.

use super::rows::{self, Row};
use crate::config::data::DataConfig;
use crate::data::images::{has_images, of_tokens};
use crate::data::rows::{Reading, template_variables};
use crate::data::{RowKind, sequences};
use crate::error::{Error, Result};
use crate::experience::Image;
use crate::model::Arch;
use crate::sys::{files, stderr};
use crate::text::{Tokenizer, kind_of};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The options of the command line that concern the chat template.
pub struct Template<'a> {
    /// `--chat-template`.
    pub is_wanted: bool,
    /// `--no-chat-template`.
    pub is_unwanted: bool,
    /// `--chat-template-args`.
    pub args: &'a Row,
}

/// A model's tokenizer, and whether text prompts go through its chat template.
pub struct Texts {
    pub tokenizer: Option<Tokenizer>,
    /// The keys of a job that reads its rows in the same way.
    config: DataConfig,
    vocabulary: usize,
    /// The folder that paths of images start from.
    folder: PathBuf,
    /// Whether texts are used as they are, even with images.
    is_plain: bool,
    /// Whether the model has a template, but the command does not say whether to use it.
    is_undecided: bool,
}

/// The tokens of a prompt and of a response, and the images among them.
pub type Answered = ([Vec<u32>; 2], Vec<Image>);

impl Texts {
    /// Opens the tokenizer in `dir`. Without an option, texts go through the chat template if the
    /// config.json says that the job that exported the model used the template.
    pub fn open(dir: &Path, arch: &Arch, template: &Template) -> Result<Self> {
        let (tokenizer, of_job) = (Tokenizer::find(dir)?, arch.chat_template());
        if template.is_wanted && template.is_unwanted {
            return Err(Error::usage("--chat-template excludes --no-chat-template").hint("leave out one of them"));
        }
        let is_chat = template.is_wanted || !template.is_unwanted && of_job.is_some();
        if is_chat {
            rows::needed(tokenizer.as_ref(), "--chat-template")?.chat()?;
            if !template.is_wanted {
                stderr::note_once(
                    "text prompts go through the chat template, as in the job that exported the model \
                     (--no-chat-template uses them as they are)",
                );
            }
        }
        let mut args = of_job.unwrap_or_default();
        args.extend(template.args.clone());
        let has_template = tokenizer.as_ref().is_some_and(|tokenizer| tokenizer.chat().is_ok());
        let is_undecided = has_template && !is_chat && !template.is_unwanted;
        let config = DataConfig { chat_template: is_chat, chat_template_args: args, ..DataConfig::default() };
        Ok(Self {
            tokenizer,
            config,
            vocabulary: arch.vocabulary,
            folder: PathBuf::new(),
            is_plain: template.is_unwanted,
            is_undecided,
        })
    }

    /// The same texts for the rows of a file or folder (`-`: standard input).
    #[must_use]
    pub fn of_rows(mut self, input: &Path) -> Self {
        self.folder = if input.is_dir() { input.to_owned() } else { files::parent(input).to_owned() };
        self
    }

    /// The tokens of the prompt in a row: its `prompt`, `messages` or `tokens`. Also the images among them.
    pub fn prompt(&self, row: &Row) -> Result<(Vec<u32>, Vec<Image>)> {
        if row.contains_key("tokens") {
            let tokens = self.text_prompt(row)?;
            let images = self.images(row, &tokens)?;
            return Ok((tokens, images));
        }
        if !has_images(row) {
            return Ok((self.text_prompt(row)?, Vec::new()));
        }
        rows::needed(self.tokenizer.as_ref(), "a row with images")?;
        let config = self.config_of(row);
        let placed = sequences(row, self.reading(RowKind::Prompt, &config)?, &self.folder)?;
        Ok((placed.tokens.concat(), placed.images))
    }

    /// The images of a row that has its tokens, as `generate` writes them.
    pub fn images(&self, row: &Row, tokens: &[u32]) -> Result<Vec<Image>> {
        of_tokens(row, tokens, self.tokenizer.as_ref(), &self.folder)
    }

    /// The keys of a job that reads this row: rows with images go through the chat template, which places them.
    fn config_of(&self, row: &Row) -> DataConfig {
        let is_text = row.get("prompt").is_some_and(Value::is_string);
        let is_chat = has_images(row) && !(is_text && self.is_plain);
        DataConfig { chat_template: self.config.chat_template || is_chat, ..self.config.clone() }
    }

    fn text_prompt(&self, row: &Row) -> Result<Vec<u32>> {
        let keys = ["prompt", "messages", "tokens"];
        let given: Vec<&str> = keys.into_iter().filter(|key| row.get(*key).is_some_and(|v| !v.is_null())).collect();
        let &[key] = &given[..] else {
            let what = if given.is_empty() { "none".into() } else { given.join(" and ") };
            return Err(Error::data(format!(
                "a row must have exactly one of prompt, messages and tokens (got {what})"
            )));
        };
        match (key, &row[key]) {
            ("tokens", _) => rows::tokens(row, key),
            ("prompt", Value::String(text)) => {
                let tokenizer = rows::needed(self.tokenizer.as_ref(), key)?;
                if text.is_empty() {
                    return Err(Error::data("the prompt is empty"));
                }
                if !self.config.chat_template {
                    self.mention_template();
                    return tokenizer.encode(text, true);
                }
                let placed = sequences(row, self.reading(RowKind::Prompt, &self.config)?, &self.folder)?;
                Ok(placed.tokens.concat())
            }
            (_, Value::Array(messages)) if messages.is_empty() => Err(Error::data(format!("{key} is empty"))),
            (_, Value::Array(messages)) if messages.iter().all(Value::is_object) => {
                let tokenizer = rows::needed(self.tokenizer.as_ref(), key)?;
                tokenizer.encode_chat(&row[key], &template_variables(row, &self.config.chat_template_args)?, true)
            }
            ("prompt", Value::Array(_)) => rows::tokens(row, key),
            ("prompt", other) => {
                Err(Error::data(format!("field \"prompt\" must be a string (got {})", kind_of(other))))
            }
            _ => Err(Error::data("messages must be a list of messages")),
        }
    }

    /// The tokens of `prompt` and of `response` through the chat template, as a job learns them, or `None` if texts are
    /// used as they are.
    pub fn answered(&self, row: &Row) -> Result<Option<Answered>> {
        if !self.config.chat_template && !has_images(row) {
            self.mention_template();
            return Ok(None);
        }
        let config = self.config_of(row);
        let mut placed = sequences(row, self.reading(RowKind::Demonstration, &config)?, &self.folder)?;
        let response = placed.tokens.pop().unwrap_or_default();
        Ok(Some(([placed.tokens.concat(), response], placed.images)))
    }

    fn reading<'a>(&'a self, kind: RowKind, config: &'a DataConfig) -> Result<Reading<'a>> {
        let tokenizer = rows::needed(self.tokenizer.as_ref(), "a text")?;
        Ok(Reading { config, kind, tokenizer, vocabulary: self.vocabulary })
    }

    fn mention_template(&self) {
        if self.is_undecided {
            stderr::warn_once(
                "text prompts do not go through the model's chat template; pass --chat-template if it was trained with \
                 data.chat_template = true, or --no-chat-template to leave out this line",
            );
        }
    }
}
