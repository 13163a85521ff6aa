//! The architecture of a model, read from the config.json of a Hugging Face directory (transformers 4 and 5 spellings).

use super::bitsandbytes::{self, QUANTIZATION};
use super::block_spec::{AttentionSpec, BlockSpec, DeltaSpec, ExpertsSpec, Feed, NormSpec, Scoring};
use super::blocks::{Blocks, positive};
use super::config_json::{self, GENERATION, OF_JOB, Reader};
use super::corrections::Corrections;
use super::expert_files::ExpertForm;
use super::families::{Embedded, Family, Number, Windows};
use super::family_keys::{BIDIRECTIONAL, FURTHER_LAYERS};
use super::file_rows::HeadRows;
use super::files::{self, Checkpoint};
use super::mxfp4;
use super::names::{EMBEDDING, LM_HEAD};
use super::naming::{TOWER, is_other};
use super::rope::Rope;
use super::tuning::Tuning;
use super::vision_spec::{Sight, VisionSpec};
use super::wrapper::Wrapper;
use crate::config::limits::VOCABULARY_MAX;
use crate::dtype::{DType, round_bf16};
use crate::error::Result;
use crate::ops::rope::Rotation;
use crate::sys::files::read_object;
use crate::sys::stderr;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Limits above any real model. They bound what a damaged config.json can make the program allocate.
const LAYERS_MAX: usize = 10_000;
const WIDTH_MAX: usize = 1 << 20;

/// The head on top of the last hidden state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// Logits over the vocabulary.
    LanguageModel,
    /// One number per token, no bias: critics and reward models.
    Value,
}

/// The factor on embeddings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbedScale {
    value: f32,
    /// Whether it has the dtype of weights.
    is_rounded: bool,
}

impl EmbedScale {
    /// The factor for weights of `dtype`.
    pub fn of(self, dtype: DType) -> f32 {
        match dtype {
            DType::Bf16 if self.is_rounded => f32::from_bits(u32::from(round_bf16(self.value)) << 16),
            _ => self.value,
        }
    }
}

/// One architecture; families differ only in these fields.
#[derive(Clone, Debug, PartialEq)]
pub struct Arch {
    pub family: &'static Family,
    /// The head of the weights, according to the directory.
    pub head: Head,
    pub vocabulary: usize,
    /// The vocabulary in the files, if the last rows of it are left off.
    pub padded_from: Option<usize>,
    /// Width of the hidden state, d.
    pub width: usize,
    /// The layers.
    pub blocks: Vec<BlockSpec>,
    /// Longest row of tokens. With LongRoPE it decides the frequencies (`for_rows`).
    pub context: usize,
    /// `max_position_embeddings`
    pub positions: usize,
    pub norm: NormSpec,
    /// The head shares the embedding's matrix.
    pub tied: bool,
    /// The rotary embeddings of the layers (`AttentionSpec::rope`).
    pub ropes: Vec<Rope>,
    pub embed_scale: EmbedScale,
    /// The factor on logits, and their soft cap.
    pub logit_scale: f32,
    pub logit_softcap: Option<f32>,
    /// Whether the files have one tensor for the matrices of all experts.
    pub has_stacked_experts: bool,
    /// Numbers by which routers choose experts.
    pub corrections: Corrections,
    /// Standard deviation of new weights.
    pub init_std: f32,
    pub bos_token: Option<u32>,
    /// Tokens that end a response: from generation_config.json if it names any, else from config.json.
    pub eos_tokens: Vec<u32>,
    pub pad_token: Option<u32>,
    /// The value head's tensor is `{value_head}.weight`.
    pub value_head: String,
    /// Mean and standard deviation of a reward model's scores on its eval data (`mean`, `std`).
    pub reward_mean_std: Option<(f32, f32)>,
    /// config.json as read. An export keeps its keys.
    pub source: Map<String, Value>,
    /// The model around the language model.
    pub wrapper: Option<Wrapper>,
    /// The directory with tensors outside the language model, which an export copies.
    pub others: Option<PathBuf>,
    /// The vision tower, if the model has one that is known.
    pub sight: Option<Sight>,
    /// What of the model trains; `None` if all of it does.
    pub tuning: Option<Arc<Tuning>>,
}

impl Arch {
    /// Reads `config.json`, and the end tokens of `generation_config.json`, of a model directory. Prints warnings.
    ///
    /// # Errors
    /// `Data` if the file is missing or describes an unsupported model; `Io` if it cannot be read.
    pub fn load(dir: &Path) -> Result<Self> {
        let (arch, warnings) = Self::read(dir)?;
        for text in warnings {
            stderr::warn_once(&text);
        }
        Ok(arch)
    }

    /// The same, with the warnings that `load` prints.
    ///
    /// # Errors
    /// The errors of `load`.
    pub fn read(dir: &Path) -> Result<(Self, Vec<String>)> {
        let config = read_object(&dir.join("config.json"))?.ok_or_else(|| files::no_model(dir))?;
        let mut arch = Self::from_config(&config).map_err(|e| e.within(dir.display()))?;
        // An error in the files is reported when they are loaded.
        let files = Checkpoint::open(dir).ok();
        arch = arch.with_others_of(dir, files.as_ref());
        arch.has_stacked_experts = arch.family.experts.is_some()
            && arch.expert_form() != ExpertForm::Columns
            && files.as_ref().is_some_and(ExpertForm::is_stacked);
        arch.corrections = Corrections::read(dir, &arch.corrected_layers())?;
        // A job whose rows are longer chooses the other frequencies.
        arch = arch.for_rows(0);
        if let Some(generation) = read_object(&dir.join(GENERATION))? {
            let tokens = Reader::for_file(GENERATION, &generation)
                .tokens("eos_token_id")
                .map_err(|e| e.within(dir.display()))?;
            if !tokens.is_empty() {
                arch.eos_tokens = tokens;
            }
        }
        let (mut warnings, vocabulary) = (Vec::new(), arch.vocabulary);
        let outside: Vec<u32> = arch.eos_tokens.extract_if(.., |id| *id as usize >= vocabulary).collect();
        if !outside.is_empty() {
            warnings.push(format!(
                "{}: eos_token_id names {outside:?}, but the vocabulary has {vocabulary} tokens: no response can end with them",
                dir.display()
            ));
        }
        if files.as_ref().is_some_and(|files| files.has(|name| arch.is_further(name))) {
            warnings.push(format!(
                "{}: the layers after layer {}, which predict further tokens, are not used; exports leave them out",
                dir.display(),
                arch.blocks.len() - 1
            ));
        }
        if mxfp4::is_set(&config, arch.family) {
            warnings.push(format!(
                "{}: experts in MXFP4 are read as bf16, and exports have them without quantization_config",
                dir.display()
            ));
        }
        let has_windows = arch.family.windows != Windows::Never;
        warnings.extend(VisionSpec::warnings(dir, &config));
        warnings.extend(config_json::warnings(dir, &Wrapper::split(&config)?.0, &arch.family.own_keys(), has_windows));
        if dir.join("adapter_config.json").exists() {
            warnings.push(format!(
                "{}: the adapter of adapter_config.json is not applied, unless --adapter or model.adapter names this \
                 directory",
                dir.display()
            ));
        }
        let has_own_head = || files.as_ref().is_some_and(|files| files.has_own_head(LM_HEAD, EMBEDDING));
        if arch.tied && arch.head == Head::LanguageModel && has_own_head() {
            // transformers 5 uses it, too.
            arch.tied = false;
            arch.source.insert("tie_word_embeddings".into(), false.into());
            warnings.push(format!(
                "{}: config.json sets tie_word_embeddings = true, but the weights contain an lm_head that differs from \
                 the embedding; using that head",
                dir.display()
            ));
        }
        Ok((arch, warnings))
    }

    /// The architecture with the tensors outside the language model in `dir`, if there may be some.
    #[must_use]
    pub fn with_others(self, dir: &Path) -> Self {
        self.with_others_of(dir, Checkpoint::open(dir).ok().as_ref())
    }

    fn with_others_of(self, dir: &Path, files: Option<&Checkpoint>) -> Self {
        let is_found = || files.is_some_and(|files| files.has(|name| self.is_other(name)));
        let has_others = self.wrapper.is_some() || (self.family.others.is_some() && is_found());
        Self { others: has_others.then(|| dir.to_owned()), ..self }
    }

    /// Whether a tensor in the files is outside the language model. An export copies it.
    pub(super) fn is_other(&self, name: &str) -> bool {
        if name.starts_with(TOWER) && self.sight.as_ref().is_some_and(|sight| sight.trains) {
            return false;
        }
        let is_further = self.family.others.is_some_and(|prefix| name.starts_with(prefix));
        is_further || (self.wrapper.is_some() && is_other(name))
    }

    /// The architecture without the last rows of its vocabulary, which no token of its tokenizer uses.
    #[must_use]
    pub fn without_padding(mut self, vocabulary: usize) -> Self {
        assert!(vocabulary <= self.vocabulary, "padding is left off, not added");
        self.padded_from = Some(self.vocabulary);
        self.source.insert("vocab_size".into(), vocabulary.into());
        Self { vocabulary, ..self }
    }

    /// The architecture for rows of up to `tokens` tokens. With LongRoPE, rows are either short ones only, or of any
    /// length; without, nothing changes.
    #[must_use]
    pub fn for_rows(self, tokens: usize) -> Self {
        match self.ropes.iter().filter_map(Rope::short_rows).min() {
            Some(short) => {
                Self { context: if tokens <= short { short.min(self.positions) } else { self.positions }, ..self }
            }
            None => self,
        }
    }

    /// The architecture with further tokens that end a response: an export names all that the job stopped at.
    #[must_use]
    pub fn ending_with(mut self, tokens: &[u32]) -> Self {
        let new: Vec<u32> = tokens.iter().filter(|id| !self.eos_tokens.contains(id)).copied().collect();
        self.eos_tokens.extend(new);
        self
    }

    /// The architecture of a model that a job trained: if its data went through the chat template, with `chat_template`
    /// as further variables, an export says so.
    #[must_use]
    pub fn asked_with(mut self, chat_template: Option<&Map<String, Value>>) -> Self {
        match chat_template {
            Some(args) => self.source.insert(OF_JOB.into(), json!({"chat_template": true, "chat_template_args": args})),
            None => self.source.shift_remove(OF_JOB),
        };
        self
    }

    /// The variables of the chat template, if the job that exported the model sent its prompts through it.
    pub fn chat_template(&self) -> Option<Map<String, Value>> {
        let of_job = self.source.get(OF_JOB)?;
        let args = || of_job["chat_template_args"].as_object().cloned().unwrap_or_default();
        (of_job["chat_template"] == true).then(args)
    }

    /// The dimensions as text: `llama, 4 layers, width 128, 4/2 heads of 32, MLP 352, vocabulary 264`.
    pub fn shape(&self) -> String {
        let Self { blocks, width, vocabulary, .. } = self;
        let (layers, AttentionSpec { heads, kv_heads, head_dim, .. }) = (blocks.len(), self.attention());
        let (name, plural) = (self.family.name, if layers == 1 { "" } else { "s" });
        let mlp = match self.feeds().find_map(Feed::experts) {
            Some(ExpertsSpec { count, top_k, width, shared, .. }) => {
                let shared = shared.map_or(String::new(), |shared| format!(" and a shared one of {}", shared.width));
                format!("{top_k} of {count} experts of {width}{shared}")
            }
            None => format!("MLP {}", blocks[0].feed.width()),
        };
        format!(
            "{name}, {layers} layer{plural}, width {width}, {heads}/{kv_heads} heads of {head_dim}, {mlp}, \
             vocabulary {vocabulary}"
        )
    }

    /// Whether equal weights give equal results. Compares everything but the special tokens, the text of config.json,
    /// the form of the files, and what trains.
    pub fn computes_as(&self, other: &Self) -> bool {
        let numbers = |arch: &Self| Self {
            bos_token: None,
            eos_tokens: Vec::new(),
            pad_token: None,
            reward_mean_std: None,
            has_stacked_experts: false,
            source: Map::new(),
            wrapper: None,
            others: None,
            sight: None,
            tuning: None,
            ..arch.clone()
        };
        numbers(self) == numbers(other)
    }

    /// The architecture that a parsed config.json describes.
    pub fn from_config(config: &Map<String, Value>) -> Result<Self> {
        let (config, wrapper) = Wrapper::split(config)?;
        let c = Reader::new(&config);
        let class = config.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
        let model_type = c.text("model_type")?;
        let (family, is_value) = Family::identify(model_type.as_deref(), class).map_err(|e| e.within("config.json"))?;
        if c.flag(BIDIRECTIONAL)?.unwrap_or(false) {
            return Err(c.wrong(BIDIRECTIONAL, "must be false: a language model sees earlier tokens only"));
        }
        if !mxfp4::is_set(&config, family) {
            bitsandbytes::is_nf4(&config)?;
        }
        let width = c.count_needed("hidden_size")?;
        let layers = c.count_needed("num_hidden_layers")?;
        let vocabulary = c.count_needed("vocab_size")?;
        for (key, value, most) in [
            ("num_hidden_layers", layers, LAYERS_MAX),
            ("hidden_size", width, WIDTH_MAX),
            ("vocab_size", vocabulary, VOCABULARY_MAX),
        ] {
            if value > most {
                return Err(c.wrong(key, &format!("must be at most {most} (got {value})")));
            }
        }
        let context = c.count("max_position_embeddings")?.unwrap_or(family.context);
        let prefix = c.text("value_head_prefix")?;
        let Blocks { blocks, ropes } = Blocks::read(&c, family, width, layers, context)?;
        // Jobs without images need no tower.
        let sight = wrapper.as_ref().and_then(|wrapper| VisionSpec::read(wrapper, width, layers).ok().flatten());
        let eps = c.number("rms_norm_eps")?.unwrap_or(family.norm_eps) as f32;
        let arch = Self {
            family,
            head: if is_value || prefix.is_some() { Head::Value } else { Head::LanguageModel },
            vocabulary,
            padded_from: None,
            width,
            blocks,
            context,
            positions: context,
            norm: NormSpec { eps, offset: family.norm_offset },
            tied: c.flag("tie_word_embeddings")?.unwrap_or(family.tied),
            ropes,
            embed_scale: embed_scale(&c, family, width)?,
            logit_scale: 1.0 / positive(&c, family.logit_divisor)?.unwrap_or(1.0),
            logit_softcap: positive(&c, family.logit_softcap)?,
            has_stacked_experts: false,
            corrections: Corrections::default(),
            init_std: c.number("initializer_range")?.unwrap_or(0.02) as f32,
            bos_token: c.tokens("bos_token_id")?.first().copied(),
            eos_tokens: c.tokens("eos_token_id")?,
            pad_token: c.tokens("pad_token_id")?.first().copied(),
            value_head: prefix.unwrap_or_else(|| "score".into()),
            reward_mean_std: c.number("mean")?.zip(c.number("std")?).map(|(m, s)| (m as f32, s as f32)),
            source: config.into_iter().filter(|(key, _)| *key != QUANTIZATION).collect(),
            wrapper,
            others: None,
            sight: sight.map(Sight::frozen),
            tuning: None,
        };
        arch.check(&Reader::new(&arch.source))?;
        Ok(arch)
    }

    fn check(&self, c: &Reader) -> Result<()> {
        for AttentionSpec { heads, kv_heads, head_dim, .. } in self.attentions() {
            if !heads.is_multiple_of(*kv_heads) {
                let what = format!("({heads}) must be a multiple of num_key_value_heads ({kv_heads})");
                return Err(c.wrong("num_attention_heads", &what));
            }
            if heads * head_dim > WIDTH_MAX {
                let what = format!("({heads}) times head_dim ({head_dim}) must be at most {WIDTH_MAX}");
                return Err(c.wrong("num_attention_heads", &what));
            }
            if !head_dim.is_multiple_of(2) {
                return Err(c.wrong("head_dim", &format!("({head_dim}) must be even for rotary embeddings")));
            }
        }
        let too_wide = |heads: usize, dim: usize| heads.saturating_mul(dim) > WIDTH_MAX;
        for DeltaSpec { key_heads, value_heads, key_dim, value_dim, .. } in self.deltas() {
            for (what, heads, dim) in [("key", *key_heads, *key_dim), ("value", *value_heads, *value_dim)] {
                if too_wide(heads, dim) {
                    let key = format!("linear_num_{what}_heads");
                    let message = format!("({heads}) times linear_{what}_head_dim ({dim}) must be at most {WIDTH_MAX}");
                    return Err(c.wrong(&key, &message));
                }
            }
        }
        let widest = |feed: &Feed| feed.width().max(feed.shared_width());
        if let Some(feed) = self.feeds().find(|feed| widest(feed) > WIDTH_MAX) {
            let is_own = feed.experts().is_some() && c.has("moe_intermediate_size");
            let key = if is_own { "moe_intermediate_size" } else { "intermediate_size" };
            return Err(c.wrong(key, &format!("must be at most {WIDTH_MAX} (got {})", widest(feed))));
        }
        let eps = self.norm.eps;
        if eps.is_nan() || eps < 0.0 {
            return Err(c.wrong("rms_norm_eps", &format!("must not be negative (got {eps})")));
        }
        if let Some(rope) = self.ropes.iter().find(|rope| rope.theta <= 1.0) {
            return Err(c.wrong("rope_theta", &format!("must be above 1 (got {})", rope.theta)));
        }
        self.rotations()?;
        let head = &self.value_head;
        if head.is_empty() || !head.chars().all(|ch| ch.is_ascii_alphanumeric() || "._".contains(ch)) {
            return Err(c.wrong("value_head_prefix", &format!("must be the name of a tensor (got \"{head}\")")));
        }
        Ok(())
    }

    /// The tensor name of an untied head.
    pub fn head_name(&self, head: Head) -> String {
        match head {
            Head::LanguageModel => LM_HEAD.to_owned(),
            Head::Value => format!("{}.weight", self.value_head),
        }
    }

    /// The rotations of `ropes`.
    ///
    /// # Errors
    /// `Data` if they do not fit the heads.
    pub fn rotations(&self) -> Result<Vec<Rotation>> {
        let head_dim = self.attention().head_dim;
        self.ropes.iter().map(|rope| rope.rotation(head_dim, self.context)).collect()
    }

    /// The order of the columns of rotated heads in the files, if it is another one than here.
    pub(super) fn head_rows(&self, spec: &AttentionSpec) -> Option<HeadRows> {
        let rotated = self.ropes[0].rotated(spec.head_dim);
        HeadRows::new(spec.head_dim, rotated, self.family.files.is_interleaved)
    }

    /// Whether a tensor is one of a layer after the last one, which predicts further tokens and is not used.
    pub(super) fn is_further(&self, name: &str) -> bool {
        let further = self.source.get(FURTHER_LAYERS).and_then(Value::as_u64).unwrap_or(0) as usize;
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
        let first = self.blocks.len();
        self.family.has_sigmoids() && layer.is_some_and(|layer| (first..first + further).contains(&layer))
    }

    /// The layers whose routers have corrections, each with its number of experts.
    pub(super) fn corrected_layers(&self) -> Vec<(usize, usize)> {
        let experts = self.feeds().enumerate().filter_map(|(layer, feed)| Some((layer, feed.experts()?)));
        let corrected = experts.filter(|(_, experts)| experts.scoring != Scoring::Softmax);
        corrected.map(|(layer, experts)| (layer, experts.count)).collect()
    }

    /// The last names in transformers 4 of `part` of a mixture of experts (`OldNames::of`).
    pub(super) fn old_names(&self, part: &str) -> &'static [&'static str] {
        self.family.experts.map_or(&[], |experts| experts.old_names.of(part))
    }

    /// The first adapter of experts, of a router, or of the gate of an expert that all tokens use.
    pub fn adapter_of_mixture(&self) -> Option<&str> {
        let is_such = |module: &&str| {
            let ends = [".mlp.gate", ".mlp.router", ".shared_expert_gate"];
            module.contains(".mlp.experts.") || ends.iter().any(|end| module.ends_with(end))
        };
        self.tuning.as_ref()?.adapters.keys().map(String::as_str).find(is_such)
    }

    /// The form of the experts in the files.
    pub(super) fn expert_form(&self) -> ExpertForm {
        if self.has_stacked_experts { ExpertForm::Stacked } else { self.family.files.experts }
    }

    /// The attention of the layers that have it.
    pub fn attentions(&self) -> impl Iterator<Item = &AttentionSpec> {
        self.blocks.iter().filter_map(BlockSpec::attention)
    }

    /// The attention of the first layer that has it.
    ///
    /// # Panics
    /// If no layer has it, which `Blocks::read` rejects.
    pub fn attention(&self) -> &AttentionSpec {
        self.attentions().next().expect("a layer with attention")
    }

    /// The gated delta rule of the layers that have it.
    pub fn deltas(&self) -> impl Iterator<Item = &DeltaSpec> {
        self.blocks.iter().filter_map(BlockSpec::delta)
    }

    /// The MLPs of the layers.
    pub fn feeds(&self) -> impl Iterator<Item = &Feed> {
        self.blocks.iter().map(|block| &block.feed)
    }
}

fn embed_scale(c: &Reader, family: &Family, width: usize) -> Result<EmbedScale> {
    Ok(match family.embedded {
        Embedded::AsTheyAre => EmbedScale { value: 1.0, is_rounded: false },
        Embedded::SqrtWidth => EmbedScale { value: (width as f64).sqrt() as f32, is_rounded: true },
        Embedded::Multiplied => {
            let value = positive(c, Number::Key("embedding_multiplier", Some(1.0)))?.unwrap_or(1.0);
            EmbedScale { value, is_rounded: false }
        }
    })
}
