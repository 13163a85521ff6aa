//! The entries of `data.prompts`: shards, which are used as they are, and files of rows, which are sharded into the run
//! directory. Also the choice of rows for training.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::cut::{Entries, Entry, RowTokens, cuts_an_image};
use super::encode::{ALL_FIELDS, shard_rows};
use super::feed::{Cursor, Feed, Stratum};
use super::hashes::Hashes;
use super::input::{InputFile, check_entry, input_files, is_rows};
use super::ledger::Ledger;
use super::rows::{self, Reading};
use super::shape::Fields;
use super::shard::{self, FileHash, Shard};
use super::source::{Document, Source};
use super::split::{TEST, TRAIN, check_training_splits, describe};
use super::split::{no_such_split, none_to_evaluate, prompt_hash, splits_of};
use crate::comm::Group;
use crate::config::data::{DataConfig, Order, SplitBy};
use crate::config::method::RowKind;
use crate::error::{Error, Result};
use crate::sys::files::xxh3;
use serde::{Deserialize, Serialize};

/// The rows of a job: training rows, in order, and held-out rows. Every rank opens the same rows and gets the same
/// ones.
#[derive(Debug)]
pub struct Rows {
    pub(super) sources: Arc<[Source]>,
    pub(super) feed: Feed,
    pub(super) eval: Vec<Entry>,
    pub(super) kind: RowKind,
    /// The rows of `data.pretrain`.
    pub(super) pretrain: Option<Box<Rows>>,
    /// The rows of `data.eval_sets`, which are all held out, and their names.
    pub(super) eval_sets: Vec<(String, Rows)>,
    pub(super) filtered: Vec<Filtered>,
}

/// A document that is never handed out.
#[derive(Debug)]
pub(super) struct Filtered {
    /// The index of its source.
    pub source: usize,
    pub document: u64,
    /// The rule that filtered it.
    pub rule: &'static str,
}

/// The version of the conversion of rows to tokens. Shards of another version are not used again.
const ENCODING: &str = "rows 2";

/// The shards of a job's sources.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The prefixes of the shards, in the order of `data.prompts` and `data.split.eval_files`.
    prefixes: Vec<PathBuf>,
    /// Instead of shards: rows of which only the length is known.
    lengths: Option<[Vec<RowTokens>; 2]>,
    /// The shards of `data.pretrain`.
    pretrain: Option<Box<Prepared>>,
    /// The shards of each of `data.eval_sets`.
    pub(super) eval_sets: Vec<Prepared>,
}

/// Finds the shards of all sources, and shards files of rows into `cache` unless that was done before. A changed file
/// or other keys result in another shard. All ranks of `group` call this, and the first one shards. `hashes` detects
/// changed files.
pub fn prepare(reading: Reading<'_>, cache: &Path, hashes: &mut Hashes, group: &Group) -> Result<Prepared> {
    let mut prepared = Prepared::find(reading, cache, hashes, group)?;
    let Reading { config, vocabulary, .. } = reading;
    let make = || -> Result<()> {
        for (name, prefix) in names(config).zip(&prepared.prefixes) {
            if is_rows(Path::new(name)) && Shard::open(prefix, vocabulary).is_err() {
                shard_rows(reading, &[(Path::new(name), None)], &kept_fields(reading), prefix)?;
            }
        }
        Ok(())
    };
    group.agree(if group.rank() == 0 { make() } else { Ok(()) })?;
    if let Some(config) = &config.of_pretrain() {
        let texts = prepare(reading.of_pretrain(config), cache, hashes, group);
        prepared.pretrain = Some(Box::new(texts.map_err(|e| e.within("data.pretrain"))?));
    }
    prepared.eval_sets = config.each_eval_set(|config| prepare(Reading { config, ..reading }, cache, hashes, group))?;
    Ok(prepared)
}

/// Fields of rows that the job needs after sharding. Rewards get all fields of a prompt.
fn kept_fields(Reading { config, kind, .. }: Reading<'_>) -> Vec<String> {
    if kind.spec().keeps_fields() {
        return vec![ALL_FIELDS.into()];
    }
    let is_curriculum = config.order == Order::Curriculum;
    is_curriculum.then(|| config.curriculum_field.clone()).into_iter().collect()
}

impl Prepared {
    /// Like `prepare`, for shards that exist.
    pub(super) fn find(reading: Reading<'_>, cache: &Path, hashes: &mut Hashes, group: &Group) -> Result<Self> {
        let Reading { config, kind, tokenizer, vocabulary } = reading;
        group.agree(config.check().and_then(|()| names(config).try_for_each(|name| check_entry(name))))?;
        let files = group.agree(names(config).map(|name| files_of(name)).collect::<Result<Vec<_>>>())?;
        let paths: Vec<PathBuf> = files.iter().flatten().map(|file| file.path.clone()).collect();
        let eval_sets =
            config.each_eval_set(|config| Self::find(Reading { config, ..reading }, cache, hashes, group))?;
        let hashes = hashes.hash_files(&paths, group)?;
        let DataConfig { prompt_key, response_key, label_key, messages_key, chat_template, .. } = config;
        let spec = kind.spec();
        let response_key = (spec.fields() == Fields::Response).then_some(response_key);
        let by_kind = if spec.names_shards() { format!(" {kind:?}") } else { String::new() };
        let DataConfig { chosen_key, rejected_key, margin_key, .. } = config;
        let pair_keys = (spec.fields() == Fields::Sides).then_some((chosen_key, rejected_key, margin_key));
        let keys = (prompt_key, response_key, pair_keys, label_key, messages_key, chat_template, kept_fields(reading));
        let args = if config.chat_template_args.is_empty() {
            String::new()
        } else {
            format!(" {:?}", config.chat_template_args)
        };
        let template = if config.template.is_empty() { String::new() } else { format!(" {:?}", config.template) };
        let rule = describe(&config.split);
        let images = tokenizer.images().map_or(String::new(), |images| format!(" {}", images.recipe()));
        let recipe = tokenizer.recipe();
        let how = format!("{ENCODING} {recipe} {vocabulary} {keys:?} {rule}{by_kind}{args}{template}{images}");
        let prefix = |(name, files): (&String, &Vec<InputFile>)| {
            let path = Path::new(name);
            if files.is_empty() {
                return path.to_owned();
            }
            let contents = files.iter().map(|file| {
                let split = file.split.as_deref().unwrap_or_default();
                format!("{split}{} ", hashes[&file.path].xxh3)
            });
            let recipe = format!("{}{how}", contents.collect::<String>());
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or("rows");
            cache.join(format!("{stem}-{}", xxh3(recipe.as_bytes())))
        };
        let prefixes = names(config).zip(&files).map(prefix).collect();
        Ok(Self { prefixes, lengths: None, pretrain: None, eval_sets })
    }

    /// Rows of these lengths, in this order, to train on and to evaluate. Their tokens are all 0.
    pub fn of_lengths(train: Vec<RowTokens>, eval: Vec<RowTokens>) -> Self {
        Self { prefixes: Vec::new(), lengths: Some([train, eval]), pretrain: None, eval_sets: Vec::new() }
    }

    /// The existing files of the sources. A shard made from JSONL has no key, because it is not an input of the job.
    pub fn files(&self, config: &DataConfig) -> Vec<SourceFile> {
        let mut files = Vec::new();
        let prompts = (0..config.prompts.len()).map(|i| format!("data.prompts[{i}]"));
        let keys = prompts.chain((0..eval_files(config).len()).map(|i| format!("data.split.eval_files[{i}]")));
        for ((name, prefix), mut key) in names(config).zip(&self.prefixes).zip(keys) {
            // A folder that can no longer be listed has nothing to hash.
            let rows = files_of(name).unwrap_or_default();
            let own = if rows.is_empty() { key.clone() } else { std::mem::take(&mut key) };
            files.extend(rows.into_iter().map(|InputFile { path, .. }| {
                let file = path.strip_prefix(name).map_or(String::new(), |file| file.display().to_string());
                SourceFile { key: own.clone(), file, path }
            }));
            for (suffix, path) in shard::files(prefix).filter(|(_, path)| path.is_file()) {
                files.push(SourceFile { key: key.clone(), file: suffix.to_owned(), path });
            }
        }
        if let (Some(texts), Some(config)) = (&self.pretrain, config.of_pretrain()) {
            let rename = |file: SourceFile| SourceFile { key: file.key.replace("prompts", "pretrain"), ..file };
            files.extend(texts.files(&config).into_iter().map(rename));
        }
        for ((set, config), rows) in config.eval_sets.iter().zip(config.of_eval_sets()).zip(&self.eval_sets) {
            let key = format!("data.eval_sets.{}.prompts", set.name);
            let rename = |file: SourceFile| SourceFile { key: file.key.replace("data.prompts", &key), ..file };
            files.extend(rows.files(&config).into_iter().map(rename));
        }
        files
    }

    /// Compares every shard with its sidecar, if it has one. `found` holds the hashes of its files.
    pub fn check(&self, config: &DataConfig, found: &BTreeMap<PathBuf, FileHash>) -> Result<()> {
        names(config).zip(&self.prefixes).try_for_each(|(name, prefix)| {
            let checked = shard::check(prefix, found);
            if !is_rows(Path::new(name)) {
                return checked;
            }
            let hint = format!("remove {}.*, and the next start shards {name} again", prefix.display());
            checked.map_err(|e| e.hint(hint))
        })?;
        self.eval_sets.iter().zip(config.of_eval_sets()).try_for_each(|(rows, config)| rows.check(&config, found))?;
        let texts = self.pretrain.as_ref().zip(config.of_pretrain());
        texts.map_or(Ok(()), |(texts, config)| texts.check(&config, found))
    }
}

/// A file of a source, and its name in the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    pub key: String,
    /// The suffix of the file, such as `.bin`. Empty for a file of rows.
    pub file: String,
    pub path: PathBuf,
}

impl Rows {
    /// Opens all sources, applies splits and cuts long prompts, and begins the ledger. Row ids count from `first_id`.
    /// Rows that are in `eval_sets` are not used for training.
    pub(super) fn open_from(
        first_id: u64,
        reading: Reading<'_>,
        prepared: &Prepared,
        seed: u64,
        eval_sets: &[(String, Self)],
    ) -> Result<Self> {
        let config = reading.config;
        if let Some([train, eval]) = &prepared.lengths {
            return Self::of_lengths(reading, train, eval, seed);
        }
        let sources = open_sources(reading, prepared, first_id)?;
        let mut ledger = Ledger { rows: sources.iter().map(|s| s.shard.documents() as u64).sum(), ..Ledger::default() };
        for (_, rows) in eval_sets {
            ledger.add(rows.ledger());
        }
        let mut filtered = Vec::new();
        let [train, evaluated] = select(config, &sources, eval_sets, &mut filtered)?;

        let mut strata = Vec::new();
        for (s, source) in sources.iter().enumerate().filter(|(_, source)| source.split != Some(TEST)) {
            if !config.weights.is_empty() || strata.is_empty() {
                let weight = config.weights.get(s).copied().unwrap_or(1.0);
                strata.push(Stratum { weight, ..Stratum::default() });
            }
            if let Some(stratum) = strata.last_mut() {
                for &document in &train[s] {
                    match entries_of(source.document(document), reading)? {
                        Ok(entries) => {
                            if config.order == Order::Curriculum {
                                stratum.keys.push(curriculum_key(config, source.document(document))?);
                            }
                            stratum.rows.push(stratum.entries.len() as u32);
                            stratum.entries.extend(entries);
                        }
                        Err(rule) => filtered.push(Filtered { source: s, document, rule }),
                    }
                }
            }
        }
        let mut eval = Vec::new();
        for (s, source) in sources.iter().enumerate() {
            for &document in &evaluated[s] {
                match entries_of(source.document(document), reading)? {
                    Ok(entries) => {
                        ledger.held_out += 1;
                        eval.extend(entries);
                    }
                    Err(_) => filtered.push(Filtered { source: s, document, rule: "eval_split_too_long" }),
                }
            }
        }
        for Filtered { rule, .. } in &filtered {
            ledger.filter(rule, 1);
        }
        if eval.is_empty() && (!config.eval_split.is_empty() || config.only_evaluates && !sources.is_empty()) {
            return Err(none_to_evaluate(config, &ledger));
        }
        let feed = Feed::new(config, strata, seed, ledger)?;
        let pretrain = match (&prepared.pretrain, &config.of_pretrain()) {
            (Some(texts), Some(config)) => {
                Some(Box::new(Self::open_from(0, reading.of_pretrain(config), texts, seed, &[])?))
            }
            _ => None,
        };
        Ok(Self { sources: sources.into(), feed, eval, kind: reading.kind, pretrain, eval_sets: Vec::new(), filtered })
    }

    fn of_lengths(reading: Reading<'_>, train: &[RowTokens], eval: &[RowTokens], seed: u64) -> Result<Self> {
        let config = DataConfig { order: Order::Sequential, weights: Vec::new(), ..reading.config.clone() };
        let entries = |rows: &[RowTokens], first: usize| {
            rows.iter().zip(first as u64..).map(|(row, i)| Entry::of_length(row, i)).collect::<Vec<_>>()
        };
        let rows = (0..train.len() as u32).collect();
        let stratum = Stratum { entries: entries(train, 0), rows, weight: 1.0, ..Stratum::default() };
        let ledger = Ledger { rows: train.len() as u64, ..Ledger::default() };
        let feed = Feed::new(&config, vec![stratum], seed, ledger)?;
        let pretrain = reading.config.of_pretrain().map(|config| {
            let longest = RowTokens { prompt: config.prompt_tokens_max, ..RowTokens::default() };
            Self::of_lengths(reading.of_pretrain(&config), &[longest], &[], seed).map(Box::new)
        });
        let (kind, pretrain, eval_sets, filtered) = (reading.kind, pretrain.transpose()?, Vec::new(), Vec::new());
        Ok(Self {
            sources: Arc::default(),
            feed,
            eval: entries(eval, train.len()),
            kind,
            pretrain,
            eval_sets,
            filtered,
        })
    }

    /// These rows, and the rows of each of `data.eval_sets`.
    pub(super) fn with_sets(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(self.eval_sets.iter().map(|(_, rows)| rows))
    }

    /// The document of a row. `None` for rows of which only the length is known.
    pub(super) fn document(&self, entry: &Entry) -> Option<Document<'_>> {
        Some(self.sources.get(entry.source as usize)?.document(entry.document))
    }

    /// The file and line of a row, or its index in a shard that does not list them.
    pub(super) fn line_of(&self, entry: &Entry) -> Result<String> {
        self.sources[entry.source as usize].document(entry.document).line()
    }

    /// Whether any row has images.
    pub fn have_images(&self) -> bool {
        self.with_sets().any(|rows| rows.sources.iter().any(|source| source.shard.has_images()))
            || self.pretrain.as_ref().is_some_and(|texts| texts.have_images())
    }

    /// The number of images in all shards.
    pub fn count_images(&self) -> usize {
        self.with_sets().flat_map(|rows| &*rows.sources).map(|source| source.shard.count_images()).sum()
    }

    /// Rows (or pieces of long prompts) in an epoch.
    pub fn epoch_rows(&self) -> u64 {
        self.feed.epoch_entries()
    }

    pub fn cursor(&self) -> &Cursor {
        &self.feed.cursor
    }

    pub fn ledger(&self) -> &Ledger {
        &self.feed.ledger
    }

    /// Counts prompts whose samples a step did not learn from.
    pub fn drop_groups(&mut self, groups: u64) {
        self.feed.ledger.groups_dropped += groups;
    }

    /// Counts samples that a step left out.
    pub fn drop_samples(&mut self, samples: u64) {
        self.feed.ledger.samples_dropped += samples;
    }

    pub fn restore(&mut self, cursor: &Cursor, ledger: &Ledger) -> Result<()> {
        self.feed.restore(cursor, ledger)
    }

    /// The number of tokens of the longest row, held-out rows included.
    pub fn longest(&self) -> usize {
        self.with_sets().flat_map(|rows| rows.feed.entries().chain(&rows.eval)).map(Entry::tokens).max().unwrap_or(0)
    }
}

pub(super) fn eval_files(config: &DataConfig) -> &[String] {
    if config.split.by == SplitBy::File { &config.split.eval_files } else { &[] }
}

/// The sources that train, then the held-out sources.
fn names(config: &DataConfig) -> impl Iterator<Item = &String> {
    config.prompts.iter().chain(eval_files(config))
}

/// The files of rows of an entry. Empty for a shard.
pub(super) fn files_of(name: &str) -> Result<Vec<InputFile>> {
    if is_rows(Path::new(name)) { input_files(Path::new(name)) } else { Ok(Vec::new()) }
}

fn open_sources(reading: Reading<'_>, prepared: &Prepared, mut first_id: u64) -> Result<Vec<Source>> {
    let Reading { config, tokenizer, vocabulary, .. } = reading;
    let by_file = config.split.by == SplitBy::File;
    let train = config.prompts.iter().map(|name| (name, TRAIN));
    let test = eval_files(config).iter().map(|name| (name, TEST));
    let mut sources = Vec::new();
    for ((name, split), prefix) in train.chain(test).zip(&prepared.prefixes) {
        let shard = Shard::open(prefix, vocabulary)?;
        shard.check_tokenizer(tokenizer.sha256())?;
        if shard.has_images() {
            shard.check_images(&tokenizer.images().map_err(|e| e.within(name))?.recipe())?;
        }
        check_training_splits(config, reading.kind, name, &shard)?;
        let documents = shard.documents() as u64;
        let (index, split) = (sources.len() as u32, by_file.then_some(split));
        sources.push(Source { name: name.clone(), shard, index, first_id, split });
        first_id += documents;
    }
    Ok(sources)
}

/// The entries of a row, or the rule that filters it.
fn entries_of(document: Document, Reading { config, kind, .. }: Reading<'_>) -> Result<Entries> {
    match document.prompt_tokens()? {
        0 => Ok(Err("empty_document")),
        prompt => Ok(match kind.spec().entries(document, prompt, config)? {
            Ok(entries) if cuts_an_image(&entries, document, prompt)? => Err("image_cut"),
            entries => entries,
        }),
    }
}

fn curriculum_key(config: &DataConfig, document: Document) -> Result<f64> {
    let meta = document.meta()?;
    let field = &config.curriculum_field;
    let found = meta.fields.get(field).or_else(|| rows::field(&meta.fields, field));
    found.and_then(serde_json::Value::as_f64).ok_or_else(|| {
        Error::data(format!("{}: field {field:?} must hold a number", meta.source))
            .hint("shard the rows with --keep-field, or check data.curriculum_field")
    })
}

/// The documents of each source that train, excluding prompts that are in `eval_sets`, and the held-out ones. All
/// others are `filtered`.
fn select(
    config: &DataConfig,
    sources: &[Source],
    eval_sets: &[(String, Rows)],
    filtered: &mut Vec<Filtered>,
) -> Result<[Vec<Vec<u64>>; 2]> {
    let splits: Vec<Vec<(String, Vec<u64>)>> = sources
        .iter()
        .map(|source| splits_of(&config.split, source.split, &source.name, &source.shard))
        .collect::<Result<_>>()?;
    for (key, name) in [("prompt_split", &config.prompt_split), ("eval_split", &config.eval_split)] {
        if !name.is_empty() && !sources.is_empty() && !splits.iter().flatten().any(|(other, _)| other == name) {
            return Err(no_such_split(key, name, &splits));
        }
    }
    let named = |s: usize, name: &str| -> Vec<u64> {
        splits[s].iter().filter(|(other, _)| other == name).flat_map(|(_, rows)| rows.iter().copied()).collect()
    };
    let eval: Vec<Vec<u64>> = (0..sources.len())
        .map(|s| match &*config.eval_split {
            "" if config.only_evaluates => (0..sources[s].shard.documents() as u64).collect(),
            "" => Vec::new(),
            split => named(s, split),
        })
        .collect();
    let mut held_out = HashSet::new();
    for (source, rows) in sources.iter().zip(&eval) {
        for row in rows {
            held_out.insert(prompt_hash(&source.document(*row).identity()?, 0));
        }
    }
    for (_, set) in eval_sets {
        for entry in &set.eval {
            let document = set.sources[entry.source as usize].document(entry.document);
            held_out.insert(prompt_hash(&document.identity()?, 0));
        }
    }
    let mut train = Vec::with_capacity(sources.len());
    for (s, source) in sources.iter().enumerate() {
        let documents = source.shard.documents() as u64;
        let evaluates: HashSet<u64> = eval[s].iter().copied().collect();
        let of_split: HashSet<u64> = named(s, &config.prompt_split).into_iter().collect();
        let trains = |row: &u64| {
            let none = source.split == Some(TEST) || config.only_evaluates;
            !none && (config.prompt_split.is_empty() || of_split.contains(row))
        };
        let mut kept = Vec::new();
        for row in (0..documents).filter(|row| !evaluates.contains(row)) {
            let is_known = || Ok(held_out.contains(&prompt_hash(&source.document(row).identity()?, 0)));
            if !trains(&row) {
                filtered.push(Filtered { source: s, document: row, rule: "other_split" });
            } else if !held_out.is_empty() && is_known()? {
                filtered.push(Filtered { source: s, document: row, rule: "same_prompt_in_eval_split" });
            } else {
                kept.push(row);
            }
        }
        train.push(kept);
    }
    keep_first(config.rows_max, &mut train, filtered);
    Ok([train, eval])
}

/// Keeps the first `most` rows over all sources; 0 keeps all.
fn keep_first(most: usize, train: &mut [Vec<u64>], filtered: &mut Vec<Filtered>) {
    let mut left = if most == 0 { usize::MAX } else { most };
    for (source, rows) in train.iter_mut().enumerate() {
        let rest = rows.split_off(left.min(rows.len()));
        left -= rows.len();
        filtered.extend(rest.into_iter().map(|document| Filtered { source, document, rule: "rows_max" }));
    }
}
