//! The parameters of a model that train: adapters of its matrices, and parameters that train whole. The rules for names
//! are those of PEFT 0.21.

use super::choice::{Choice, Chosen, Origin};
use super::names::EMBEDDING;
pub use super::targets::Param;
use super::targets::{
    Fused, Model, Selector, first_match, is_called, is_named, is_value_head, layer_of, module_of, names_of, patterns,
};
use crate::config::lora::{AdapterInit, LoraConfig, Modules, layer_range};
use crate::error::{Error, Result};
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

impl Tuning {
    /// The module with the tensors of an adapter in files of PEFT, which nests the one of the first parameter of a
    /// layer's experts in that of the second.
    pub(super) fn tensor_module(&self, fused: &Fused) -> String {
        if fused.experts.is_none() {
            return fused.module.clone();
        }
        let outer = module_of(&fused.module);
        let is_inner = fused.module.ends_with(".gate_up_proj");
        let is_nested = is_inner && self.adapters.contains_key(&format!("{outer}.down_proj"));
        if is_nested { format!("{outer}.base_layer") } else { outer.to_owned() }
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
        let choice = Choice { settings, origin, model: &model, whole: &whole, targets: targets?, exclude: exclude? };
        if let Origin::Job(_) = origin {
            choice.check_names(&settings.targets, &choice.targets, "targets")?;
            choice.check_names(&settings.exclude, &choice.exclude, "exclude")?;
        }
        choice.check_parameters()?;
        let chosen = choice.chosen()?;
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

/// The adapters of what is chosen.
fn adapters(settings: &LoraConfig, origin: Origin, chosen: &[Chosen]) -> Result<BTreeMap<String, Adapter>> {
    let [rank_key, alpha_key] = ["rank_pattern", "alpha_pattern"].map(|key| origin.key(key));
    let ranks = patterns(&rank_key, &settings.rank_pattern.0)?;
    let alphas = patterns(&alpha_key, &settings.alpha_pattern.0)?;
    let mut all = BTreeMap::new();
    for Chosen { module, dims: [outputs, inputs], names, is_limited, times } in chosen {
        let of_rank = first_match(&ranks, names);
        let rank = of_rank.map_or(settings.rank * times, |pattern| pattern.value);
        let alpha = first_match(&alphas, names).map_or(settings.alpha * *times as f64, |pattern| pattern.value);
        let side = *outputs.min(inputs);
        if *is_limited && rank > side && origin != Origin::File {
            let key = of_rank.map_or(origin.key("rank"), |pattern| format!("{rank_key}.{:?}", pattern.text));
            let times = if of_rank.is_some() { 1 } else { *times };
            let (most, part, given) = (side / times, if times > 1 { "half of " } else { "" }, rank / times);
            return Err(origin.wrong(format!(
                "{key} must be at most {most}, {part}the smaller side of {module} ({outputs} x {inputs}) (got {given})"
            )));
        }
        let divisor = if settings.rslora { (rank as f64).sqrt() } else { rank as f64 };
        all.insert((*module).to_owned(), Adapter { rank, scale: (alpha / divisor) as f32 });
    }
    if let Origin::Job(_) = origin {
        let unmatched = |regex: &Regex| !chosen.iter().any(|of| of.names.iter().any(|name| regex.is_match(name)));
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
