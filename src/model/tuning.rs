//! The parameters of a model that train: adapters of its matrices, and parameters that train whole. The rules for names
//! are those of PEFT 0.21.

use super::names::{EMBEDDING, LM_HEAD};
use super::naming::Naming;
use crate::config::lora::{AdapterInit, Layers, LoraConfig, Modules, end_of_name, layer_range, whole_name};
use crate::error::{Error, Kind, Result};
use regex::Regex;
use std::collections::{BTreeMap, BTreeSet};

/// What of a model trains. The rest is frozen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tuning {
    /// The adapters by the name of their matrix without ".weight": "model.layers.0.self_attn.q_proj".
    pub adapters: BTreeMap<String, Adapter>,
    /// The names (with ".weight" or ".bias") of the parameters that train whole.
    pub whole: BTreeSet<String>,
    /// The initial values of A.
    pub init: AdapterInit,
}

impl Tuning {
    /// Whether of each matrix of a layer's `count` experts either all experts train theirs or none does.
    pub(super) fn has_equal_experts(&self, count: usize) -> bool {
        let mut trained: BTreeMap<[&str; 2], usize> = BTreeMap::new();
        for (layer, of_expert) in self.whole.iter().filter_map(|name| name.split_once(".experts.")) {
            // A tensor of all experts has no number.
            if let Some((_, matrix)) = of_expert.split_once('.').filter(|(e, _)| e.parse::<usize>().is_ok()) {
                *trained.entry([layer, matrix]).or_default() += 1;
            }
        }
        trained.values().all(|experts| *experts == count)
    }
}

/// y = W x + b + s B (A x), with A (rank, inputs) and B (outputs, rank).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adapter {
    pub rank: usize,
    /// s: alpha / rank, or alpha / sqrt(rank) with rslora (arXiv:2312.03732).
    pub scale: f32,
}

/// The names of an adapter's parameters, A and B.
pub(super) fn adapter_names(module: &str) -> [String; 2] {
    ["lora_A", "lora_B"].map(|matrix| format!("{module}.{matrix}.weight"))
}

/// A parameter of a model: its name, its whole shape, and whether it is the matrix of a linear layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    pub name: String,
    pub shape: Vec<usize>,
    pub is_linear: bool,
}

/// The source of settings, which decides how errors name them, and how strict names are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Origin<'a> {
    /// A job, with the name of the table. Each entry must have an effect.
    Job(&'a str),
    /// The `adapter_config.json` of PEFT, which ignores entries without effect.
    File,
}

impl Origin<'_> {
    fn key(self, key: &str) -> String {
        let of_peft = match key {
            "rank" => "r",
            "targets" => "target_modules",
            "exclude" => "exclude_modules",
            "layers" => "layers_to_transform",
            "train_also" => "modules_to_save",
            other => other,
        };
        match self {
            Self::Job(table) => format!("{table}.{key}"),
            Self::File => of_peft.to_string(),
        }
    }

    fn wrong(self, message: String) -> Error {
        Error::new(if self == Self::File { Kind::Data } else { Kind::Usage }, message)
    }
}

/// The modules of a model.
struct Model<'a> {
    params: &'a [Param],
    /// Modules with parameters, in order, with (outputs, inputs) if an adapter is possible.
    modules: Vec<(&'a str, Option<(usize, usize)>)>,
}

/// The module of a parameter: its name without the last part.
pub(super) fn module_of(param: &str) -> &str {
    param.rsplit_once('.').map_or(param, |(module, _)| module)
}

/// The modules that contain a parameter: its own, then those around it.
fn modules_around(param: &str) -> impl Iterator<Item = &str> {
    param.rmatch_indices('.').map(|(at, _)| &param[..at])
}

/// Whether `name` is `end`, or ends with it after a dot.
fn is_named(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The names of a module: its own, and those inside a model that also sees images.
fn names_of(module: &str) -> [String; 3] {
    [Naming::Plain, Naming::Inner, Naming::Outer].map(|naming| naming.in_files(module))
}

/// Whether one of the names of a module is `end`, or ends with it after a dot.
fn is_called(module: &str, end: &str) -> bool {
    names_of(module).iter().any(|name| is_named(name, end))
}

/// The layer of a module: 3 of "model.layers.3.mlp.up_proj".
fn layer_of(module: &str) -> Option<usize> {
    module.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// Whether a parameter is the head of a value or reward model, which always trains.
fn is_value_head(name: &str) -> bool {
    name != LM_HEAD && !name.starts_with("model.")
}

impl<'a> Model<'a> {
    fn new(params: &'a [Param]) -> Self {
        let mut modules: Vec<(&str, Option<(usize, usize)>)> = Vec::new();
        for Param { name, shape, is_linear } in params {
            let module = module_of(name);
            if modules.last().is_none_or(|(last, _)| *last != module) {
                modules.push((module, None));
            }
            if let (true, [outputs, inputs]) = (is_linear, &shape[..]) {
                modules.last_mut().expect("it was added").1 = Some((*outputs, *inputs));
            }
        }
        Self { params, modules }
    }

    fn layers(&self) -> usize {
        self.modules.iter().filter_map(|(module, _)| layer_of(module)).max().map_or(0, |last| last + 1)
    }

    /// The last names of modules: `q_proj, k_proj, ...`.
    fn last_names(&self, only_linear: bool) -> String {
        let mut names: Vec<&str> = Vec::new();
        for (module, dims) in &self.modules {
            let last = module.rsplit('.').next().unwrap_or(module);
            if !names.contains(&last) && (dims.is_some() || !only_linear) {
                names.push(last);
            }
        }
        names.join(", ")
    }

    /// The names of the parameters within modules that `selects` accepts by their names.
    fn within(&self, selects: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let is_selected = |param: &&Param| modules_around(&param.name).any(&selects);
        self.params.iter().filter(is_selected).map(|param| param.name.clone()).collect()
    }

    /// Whether the language-model head is the embedding.
    fn is_tied(&self) -> bool {
        !self.params.iter().any(|param| param.name == LM_HEAD || is_value_head(&param.name))
    }
}

/// Selects modules by their names.
enum Selector {
    AllLinear,
    None,
    Pattern(Regex),
    Names(Vec<String>),
}

impl Selector {
    fn new(key: &str, modules: &Modules) -> Result<Self> {
        Ok(match modules {
            all if all.is_all_linear() => Self::AllLinear,
            none if none.is_none() => Self::None,
            Modules::Pattern(pattern) => Self::Pattern(whole_name(key, pattern)?),
            Modules::Names(names) => Self::Names(names.clone()),
        })
    }

    fn selects(&self, module: &str, is_linear: bool) -> bool {
        match self {
            Self::AllLinear => is_linear,
            Self::None => false,
            Self::Pattern(pattern) => names_of(module).iter().any(|module| pattern.is_match(module)),
            Self::Names(names) => names.iter().any(|name| is_called(module, name)),
        }
    }

    /// Whether a name of the list is the whole name of the module. PEFT then selects it in any layer.
    fn is_whole_name(&self, module: &str) -> bool {
        matches!(self, Self::Names(names) if names_of(module).iter().any(|module| names.contains(module)))
    }
}

/// One value of the matching modules, from `rank_pattern` or `alpha_pattern`.
struct Pattern<T> {
    text: String,
    regex: Regex,
    value: T,
}

fn patterns<T: Copy>(key: &str, all: &[(String, T)]) -> Result<Vec<Pattern<T>>> {
    let compiled =
        |(text, value): &(String, T)| Ok(Pattern { text: text.clone(), regex: end_of_name(key, text)?, value: *value });
    all.iter().map(compiled).collect()
}

fn first_match<'a, T>(patterns: &'a [Pattern<T>], module: &str) -> Option<&'a Pattern<T>> {
    let names = names_of(module);
    patterns.iter().find(|pattern| names.iter().any(|module| pattern.regex.is_match(module)))
}

impl Tuning {
    /// The tuning that the settings of a job ask for in a model with these `params`. `table` is the name of the
    /// settings' table. The head of a value or reward model trains whole.
    ///
    /// # Errors
    /// `Usage`, naming the key and the value: names or patterns that match nothing, layers that the model lacks, a rank
    /// above the smaller side of its matrix, and targets that are not linear layers.
    pub fn lora(settings: &LoraConfig, table: &str, params: &[Param]) -> Result<Self> {
        Self::derive(settings, Origin::Job(table), params)
    }

    pub(super) fn derive(settings: &LoraConfig, origin: Origin, params: &[Param]) -> Result<Self> {
        let model = Model::new(params);
        check_layers(settings, origin, &model)?;
        let whole = whole(&settings.train_also, origin, &model)?;
        let [targets, exclude] = [("targets", &settings.targets), ("exclude", &settings.exclude)]
            .map(|(key, modules)| Selector::new(&origin.key(key), modules));
        let (targets, exclude) = (targets?, exclude?);
        if let Origin::Job(_) = origin {
            check_names(&settings.targets, &targets, &origin.key("targets"), &model)?;
            check_names(&settings.exclude, &exclude, &origin.key("exclude"), &model)?;
        }
        let layers: BTreeSet<usize> = settings.layers.iter().flat_map(Layers::indices).collect();
        let in_layers = |module: &str| layers.is_empty() || layer_of(module).is_some_and(|i| layers.contains(&i));
        // In transformers 5 experts are no modules, and PEFT skips them unless their tensors are named.
        let is_skipped = |module: &str| origin == Origin::File && module.contains(".experts.");
        let chosen = model.modules.iter().filter(|(module, dims)| {
            let is_linear = dims.is_some();
            !is_skipped(module)
                && targets.selects(module, is_linear)
                && (targets.is_whole_name(module) || in_layers(module))
                && !exclude.selects(module, is_linear)
                && !whole.contains(&format!("{module}.weight"))
        });
        let chosen: Vec<_> = chosen.collect();
        if chosen.is_empty() {
            return Err(none_chosen(settings, origin, &model));
        }
        let adapters = adapters(settings, origin, &chosen)?;
        Ok(Self { adapters, whole, init: settings.init })
    }

    /// The tuning that trains all parameters but those of the `frozen` entries, which are the names of modules or the
    /// parts of such a name after a dot, `layers.A-B`, `attention`, or `norms`. `key` is the name of the list.
    ///
    /// # Errors
    /// `Usage`: an entry that matches nothing, or nothing is left to train.
    pub fn freeze(frozen: &[String], key: &str, params: &[Param]) -> Result<Self> {
        let model = Model::new(params);
        let mut all = BTreeSet::new();
        for entry in frozen {
            let range = entry.strip_prefix("layers.").and_then(layer_range);
            let found = model.within(|module| match (entry.as_str(), &range) {
                ("attention", _) => is_named(module, "self_attn") || is_named(module, "linear_attn"),
                // The older name of Mixtral's.
                ("mlp", _) => is_named(module, "mlp") || is_named(module, "block_sparse_moe"),
                ("norms", _) => module.ends_with("norm"),
                (_, Some(range)) => layer_of(module).is_some_and(|layer| range.contains(&layer)),
                (name, None) => is_named(module, name),
            });
            let last = model.layers().saturating_sub(1);
            if let Some(range) = range.filter(|range| *range.end() > last) {
                let end = range.end();
                return Err(Error::usage(format!("{key} must name layers up to {last}, the last one (got {end})")));
            }
            if found.is_empty() {
                return Err(Error::usage(format!("{key} must name modules of the model (got {entry:?})"))
                    .hint(format!("use layers.A-B, attention, norms, mlp, or one of {}", model.last_names(false))));
            }
            all.extend(found);
        }
        let whole: BTreeSet<String> =
            params.iter().map(|param| &param.name).filter(|name| !all.contains(*name)).cloned().collect();
        Error::need(!whole.is_empty(), format!("{key} must leave something to train (got {frozen:?})"))?;
        Ok(Self { whole, ..Self::default() })
    }
}

/// Rejects layers that the model lacks.
fn check_layers(settings: &LoraConfig, origin: Origin, model: &Model) -> Result<()> {
    let layers = model.layers();
    match settings.layers.iter().map(|layers| *layers.indices().end()).max() {
        Some(last) if last >= layers => Err(origin.wrong(format!(
            "{} must be at most {}, the last layer of the model (got {last})",
            origin.key("layers"),
            layers.saturating_sub(1)
        ))),
        _ => Ok(()),
    }
}

/// The parameters that train whole: those in the modules that `names` lists, and the head of a value model.
fn whole(names: &[String], origin: Origin, model: &Model) -> Result<BTreeSet<String>> {
    let key = origin.key("train_also");
    let mut all = model.within(|module| match origin {
        Origin::Job(_) => names.iter().any(|name| is_called(module, name)),
        // PEFT needs no dot before the name.
        Origin::File => names_of(module).iter().any(|module| names.iter().any(|name| module.ends_with(name.as_str()))),
    });
    let is_unused = |name: &&String| model.within(|module| is_called(module, name)).is_empty();
    if let (Origin::Job(_), Some(name)) = (origin, names.iter().find(is_unused)) {
        let error = Error::usage(format!("{key} must name modules of the model (got {name:?})"));
        let head = if model.is_tied() { "; its head is the embedding" } else { "" };
        return Err(error.hint(format!("use one of {}{head}", model.last_names(false))));
    }
    if model.is_tied() && all.contains(EMBEDDING) {
        return Err(origin.wrong(format!(
            "{key} must not name the embedding of a model whose head is the embedding: PEFT would train only one of both"
        )));
    }
    all.extend(model.params.iter().map(|param| &param.name).filter(|name| is_value_head(name)).cloned());
    Ok(all)
}

/// Rejects names, or a pattern, that no module matches.
fn check_names(modules: &Modules, selector: &Selector, key: &str, model: &Model) -> Result<()> {
    let known = format!("the linear layers are {}", model.last_names(true));
    let has = |selects: &dyn Fn(&str) -> bool| model.modules.iter().any(|(module, _)| selects(module));
    match modules {
        Modules::Names(names) => {
            let unmatched = names.iter().find(|name| !has(&|module| is_called(module, name)));
            unmatched.map_or(Ok(()), |name| {
                Err(Error::usage(format!("{key} must list names of modules (got {name:?}, which matches none)"))
                    .hint(format!("{known}; a regular expression is one string instead of a list")))
            })
        }
        Modules::Pattern(pattern) if !modules.is_none() && !has(&|module| selector.selects(module, true)) => {
            Err(Error::usage(format!("{key} must match whole names of modules (got {pattern:?}, which matches none)"))
                .hint(format!("a whole name is model.layers.0.self_attn.q_proj; {known}")))
        }
        Modules::Pattern(_) => Ok(()),
    }
}

fn none_chosen(settings: &LoraConfig, origin: Origin, model: &Model) -> Error {
    let value = match &settings.targets {
        Modules::Pattern(pattern) => format!("{pattern:?}"),
        Modules::Names(names) => format!("{names:?}"),
    };
    let [targets, exclude, layers, also] = ["targets", "exclude", "layers", "train_also"].map(|key| origin.key(key));
    origin
        .wrong(format!(
            "{targets} must match linear layers that {exclude}, {layers} and {also} leave (got {value}, which matches none)"
        ))
        .hint(format!("the linear layers are {}", model.last_names(true)))
}

/// The adapters of the chosen modules.
fn adapters(
    settings: &LoraConfig,
    origin: Origin,
    chosen: &[&(&str, Option<(usize, usize)>)],
) -> Result<BTreeMap<String, Adapter>> {
    let [rank_key, alpha_key] = ["rank_pattern", "alpha_pattern"].map(|key| origin.key(key));
    let ranks = patterns(&rank_key, &settings.rank_pattern.0)?;
    let alphas = patterns(&alpha_key, &settings.alpha_pattern.0)?;
    let mut all = BTreeMap::new();
    for (module, dims) in chosen {
        let Some((outputs, inputs)) = dims else {
            let is_embedding = *module == module_of(EMBEDDING) || *module == module_of(LM_HEAD);
            let also = origin.key("train_also");
            return Err(origin
                .wrong(format!("{} must match linear layers of layers only (got {module})", origin.key("targets")))
                .hint(if is_embedding {
                    format!("adapters of embeddings and heads are not supported; {also} trains it whole")
                } else {
                    format!("{also} trains it whole")
                }));
        };
        let of_rank = first_match(&ranks, module);
        let rank = of_rank.map_or(settings.rank, |pattern| pattern.value);
        let alpha = first_match(&alphas, module).map_or(settings.alpha, |pattern| pattern.value);
        let side = *outputs.min(inputs);
        if rank > side && origin != Origin::File {
            let key = of_rank.map_or(origin.key("rank"), |pattern| format!("{rank_key}.{:?}", pattern.text));
            return Err(origin.wrong(format!(
                "{key} must be at most {side}, the smaller side of {module} ({outputs} x {inputs}) (got {rank})"
            )));
        }
        let divisor = if settings.rslora { (rank as f64).sqrt() } else { rank as f64 };
        all.insert((*module).to_owned(), Adapter { rank, scale: (alpha / divisor) as f32 });
    }
    if let Origin::Job(_) = origin {
        let unmatched = |regex: &Regex| !all.keys().any(|module| regex.is_match(module));
        let of_ranks = ranks.iter().filter(|pattern| unmatched(&pattern.regex)).map(|p| (&rank_key, &p.text));
        let of_alphas = alphas.iter().filter(|pattern| unmatched(&pattern.regex)).map(|p| (&alpha_key, &p.text));
        if let Some((key, text)) = of_ranks.chain(of_alphas).next() {
            return Err(origin
                .wrong(format!("{key} must match the ends of names of targets (got {text:?}, which matches none)"))
                .hint(format!("the targets are {}", listed(&all))));
        }
    }
    Ok(all)
}

/// The first names of adapters.
fn listed(all: &BTreeMap<String, Adapter>) -> String {
    let first: Vec<&str> = all.keys().take(3).map(String::as_str).collect();
    format!("{}{}", first.join(", "), if all.len() > 3 { ", ..." } else { "" })
}

#[cfg(test)]
mod tests;
