//! `[data]`: the source of the rows, their splits, their truncation and their order.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::limits::{COUNT, TOKENS, check_weights};
use super::reward::{FromWord, one_or_many};
use crate::error::{Error, Result};
use crate::hub;

/// The treatment of a prompt with more than `prompt_tokens_max` tokens. The ledger always counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LongPrompts {
    /// The row is filtered out.
    #[default]
    Reject,
    /// The first tokens are cut off.
    TruncateLeft,
    /// The last tokens are cut off.
    TruncateRight,
    /// The row becomes several pieces of `prompt_tokens_max` tokens that overlap by `window_overlap_tokens`.
    Window,
}

/// The order of the rows within an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The order in the files.
    Sequential,
    /// A new seeded permutation each epoch.
    #[default]
    Shuffled,
    /// Shuffled, then sorted by length within groups of `length_group_rows` rows.
    LengthGrouped,
    /// By the number in `curriculum_field`, smallest first; equal numbers are shuffled.
    Curriculum,
}

/// The source of a split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SplitBy {
    /// The splits that the shards were written with.
    #[default]
    Source,
    /// `train` and `test`, divided by a seeded hash of each row's prompt.
    Ratio,
    /// The value of `field` in each row is the name of its split.
    Field,
    /// `data.prompts` is `train`, `eval_files` is `test`.
    File,
}

table! {
    /// `[data.split]`
    pub struct SplitConfig {
        pub by: SplitBy = SplitBy::Source,
        pub eval_ratio: f64 = 0.05 => 0.0..=1.0,
        pub seed: u64 = 0 => 0.0..=i64::MAX as f64,
        pub field: String = "split".to_owned(),
        pub eval_files: Vec<String> = Vec::new(),
    }
}

table! {
    /// Held-out rows with a name and with metrics of their own.
    #[schemars(extend("required" = ["name", "prompts"]))]
    pub struct EvalSetConfig {
        pub name: String = String::new(),
        #[serde(deserialize_with = "one_or_many")]
        pub prompts: Vec<String> = Vec::new(),
        pub split: String = String::new(),
        pub prompt_key: String = String::new(),
        pub label_key: String = String::new(),
    }
}

impl FromWord for EvalSetConfig {
    const EXPECTED: &'static str = "a table with name and prompts";
    fn from_word(_: &str) -> Option<Self> {
        None
    }
}

table! {
    /// `[data]`
    pub struct DataConfig {
        pub prompts: Vec<String> = Vec::new(),
        pub pretrain: Vec<String> = Vec::new(),
        pub pretrain_key: String = "text".to_owned(),
        pub pretrain_tokens_max: usize = 1024 => 1.0..=TOKENS,
        pub weights: Vec<f64> = Vec::new(),
        pub rows_max: usize = 0 => 0.0..=COUNT,
        pub prompt_split: String = String::new(),
        pub eval_split: String = String::new(),
        #[serde(deserialize_with = "one_or_many")]
        pub eval_sets: Vec<EvalSetConfig> = Vec::new(),
        pub split: SplitConfig = SplitConfig::default(),
        pub prompt_key: String = "prompt".to_owned(),
        pub response_key: String = "response".to_owned(),
        pub chosen_key: String = "chosen".to_owned(),
        pub rejected_key: String = "rejected".to_owned(),
        pub margin_key: String = String::new(),
        pub label_key: String = String::new(),
        pub messages_key: String = "messages".to_owned(),
        pub template: String = String::new(),
        pub chat_template: bool = false,
        pub chat_template_args: Map<String, Value> = Map::new(),
        pub prompt_tokens_max: usize = 1024 => 1.0..=TOKENS,
        pub long_prompts: LongPrompts = LongPrompts::Reject,
        pub window_overlap_tokens: usize = 64 => 0.0..=TOKENS,
        pub row_tokens_max: usize = 0 => 0.0..=TOKENS,
        pub order: Order = Order::Shuffled,
        pub length_group_rows: usize = 1024 => 1.0..=COUNT,
        pub curriculum_field: String = String::new(),
        /// Whether no row is used for training. Without a named split, all rows are used for evaluation.
        #[serde(skip)]
        pub only_evaluates: bool = false,
    }
}

impl DataConfig {
    /// The job's variables for the chat template, if rows use the template.
    pub fn template_args(&self) -> Option<&Map<String, Value>> {
        self.chat_template.then_some(&self.chat_template_args)
    }

    /// Puts relative paths under `dir`, the directory of the job file. Names of the Hub become paths in the cache.
    pub fn relative_to(&mut self, dir: &Path) {
        for path in self.sources() {
            *path = hub::rows_path(dir, path).display().to_string();
        }
    }

    /// All files and shards.
    pub(super) fn sources(&mut self) -> impl Iterator<Item = &mut String> {
        let of_sets = self.eval_sets.iter_mut().flat_map(|set| &mut set.prompts);
        self.prompts.iter_mut().chain(&mut self.pretrain).chain(&mut self.split.eval_files).chain(of_sets)
    }

    /// Files and shards of prompts, including those of sets.
    pub fn all_prompts(&self) -> impl Iterator<Item = &String> {
        self.prompts.iter().chain(self.eval_sets.iter().flat_map(|set| &set.prompts))
    }

    /// The configuration for reading `pretrain`, if it is set. Long texts become several pieces: every token is used.
    pub fn of_pretrain(&self) -> Option<Self> {
        (!self.pretrain.is_empty()).then(|| Self {
            prompts: self.pretrain.clone(),
            prompt_key: self.pretrain_key.clone(),
            prompt_tokens_max: self.pretrain_tokens_max,
            long_prompts: LongPrompts::Window,
            window_overlap_tokens: 0,
            ..Self::default()
        })
    }

    /// The configuration for reading the rows of each of `eval_sets`.
    pub fn of_eval_sets(&self) -> impl Iterator<Item = Self> {
        let key = |own: &String, of_data: &String| if own.is_empty() { of_data.clone() } else { own.clone() };
        self.eval_sets.iter().map(move |set| Self {
            prompts: set.prompts.clone(),
            pretrain: Vec::new(),
            weights: Vec::new(),
            rows_max: 0,
            prompt_split: String::new(),
            eval_split: set.split.clone(),
            eval_sets: Vec::new(),
            // All rows are used, so there is no split, and the set names the files.
            split: match self.split.by {
                SplitBy::Ratio | SplitBy::Field if !set.split.is_empty() => self.split.clone(),
                _ => SplitConfig::default(),
            },
            prompt_key: key(&set.prompt_key, &self.prompt_key),
            label_key: key(&set.label_key, &self.label_key),
            order: Order::Sequential,
            only_evaluates: true,
            ..self.clone()
        })
    }

    /// Applies `make` to each of `eval_sets`; errors start with the name of the set.
    pub fn each_eval_set<T>(&self, mut make: impl FnMut(&Self) -> Result<T>) -> Result<Vec<T>> {
        let one = |(set, config): (&EvalSetConfig, Self)| {
            make(&config).map_err(|e| {
                let message = e.message.replace("data.eval_split", "its split");
                let hint = e.hint.map(|hint| hint.replace("data.prompts", "its prompts"));
                Error { message, hint, ..e }.within(format_args!("data.eval_sets, {}", set.name))
            })
        };
        self.eval_sets.iter().zip(self.of_eval_sets()).map(one).collect()
    }

    fn check_eval_sets(&self) -> Result<()> {
        for (i, EvalSetConfig { name, prompts, .. }) in self.eval_sets.iter().enumerate() {
            let is_word = |c: char| c.is_alphanumeric() || "-_.".contains(c);
            if name.is_empty() || !name.chars().all(is_word) {
                return Err(Error::usage(format!("data.eval_sets: set {} has the invalid name {name:?}", i + 1))
                    .hint("use only letters, digits, - _ and . because metrics are called eval/NAME/..."));
            }
            let is_new = self.eval_sets[..i].iter().all(|other| other.name != *name);
            Error::need(is_new, format!("data.eval_sets has two sets named {name:?}"))?;
            Error::need(!prompts.is_empty(), format!("data.eval_sets: {name} has no prompts"))?;
        }
        Ok(())
    }

    /// Checks `data.template`.
    pub fn check_template(&self) -> Result<()> {
        let Self { template, .. } = self;
        let count = template.matches("{}").count();
        Error::need(
            template.is_empty() || count == 1,
            format!("data.template must contain {{}} once, in place of the prompt (got {template:?})"),
        )?;
        Error::need(
            template.is_empty() || !self.chat_template,
            "data.template and data.chat_template exclude each other: both say how a prompt is written",
        )
    }

    /// Checks keys that depend on each other. Types and ranges cannot do that.
    pub fn check(&self) -> Result<()> {
        let hint = "set it to shard prefixes or files of rows";
        self.check_eval_sets()?;
        self.check_template()?;
        let has_rows = !self.prompts.is_empty() || self.only_evaluates && !self.eval_sets.is_empty();
        Error::need(has_rows, "data.prompts is empty").map_err(|e| e.hint(hint))?;
        let (overlap, longest) = (self.window_overlap_tokens, self.prompt_tokens_max);
        Error::need(
            self.long_prompts != LongPrompts::Window || overlap < longest,
            format!("data.window_overlap_tokens must be below data.prompt_tokens_max = {longest} (got {overlap})"),
        )?;
        check_weights("data.weights", &self.weights, "data.prompts", self.prompts.len())?;
        Error::need(
            self.order != Order::Curriculum || !self.curriculum_field.is_empty(),
            "data.order = \"curriculum\" needs data.curriculum_field",
        )?;
        Error::need(
            self.eval_split.is_empty() || self.eval_split != self.prompt_split,
            format!(
                "data.prompt_split and data.eval_split must differ, as a row either trains or evaluates (got {:?} for both)",
                self.eval_split
            ),
        )?;
        let own =
            ["messages", "add_generation_prompt"].into_iter().find(|own| self.chat_template_args.contains_key(*own));
        let own = own.unwrap_or_default();
        Error::need(
            own.is_empty(),
            format!("data.chat_template_args must not contain {own:?}, which every row sets itself"),
        )?;
        let is_told = self.chat_template || self.chat_template_args.is_empty();
        Error::need(is_told, "data.chat_template_args needs data.chat_template = true")?;
        let ratio = self.split.eval_ratio;
        match self.split.by {
            SplitBy::Ratio => Error::need(
                ratio > 0.0 && ratio < 1.0,
                format!("data.split.eval_ratio must be between 0 and 1, both excluded (got {ratio})"),
            ),
            SplitBy::Field => {
                Error::need(!self.split.field.is_empty(), "data.split.by = \"field\" needs data.split.field")
            }
            SplitBy::File => {
                Error::need(!self.split.eval_files.is_empty(), "data.split.by = \"file\" needs data.split.eval_files")
            }
            SplitBy::Source => Ok(()),
        }
    }
}
