//! What of a model gets an adapter by the settings of a job, or of a file of PEFT.

use super::names::{EMBEDDING, LM_HEAD};
use super::targets::{Fused, Model, Module, Selector, is_called, layer_of, module_of};
use crate::config::lora::{Layers, LoraConfig, Modules};
use crate::error::{Error, Kind, Result};
use std::collections::BTreeSet;

/// The source of settings, which decides how errors name them, and how strict names are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Origin<'a> {
    /// A job, with the name of the table. Each entry must have an effect.
    Job(&'a str),
    /// The `adapter_config.json` of PEFT, which ignores entries without effect.
    File,
}

impl Origin<'_> {
    pub(super) fn key(self, key: &str) -> String {
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

    pub(super) fn wrong(self, message: String) -> Error {
        Error::new(if self == Self::File { Kind::Data } else { Kind::Usage }, message)
    }
}

/// A matrix that gets an adapter.
pub(super) struct Chosen<'a> {
    /// Its module, or the parameter of all experts.
    pub module: &'a str,
    /// Outputs and inputs.
    pub dims: [usize; 2],
    /// The names that patterns of ranks and alphas may match.
    pub names: Vec<String>,
    /// Whether a job limits its rank: not for routers and gates, which have few outputs.
    pub is_limited: bool,
    /// How often rank and alpha count: once for each linear layer of transformers 4 that it has replaced.
    pub times: usize,
}

/// Settings that select matrices of a model.
pub(super) struct Choice<'a> {
    pub settings: &'a LoraConfig,
    pub origin: Origin<'a>,
    pub model: &'a Model<'a>,
    /// The parameters that train whole.
    pub whole: &'a BTreeSet<String>,
    pub targets: Selector,
    pub exclude: Selector,
}

impl<'a> Choice<'a> {
    fn is_file(&self) -> bool {
        self.origin == Origin::File
    }

    /// Whether `target_parameters` names a parameter.
    fn is_parameter(&self, parameter: &str) -> bool {
        self.settings.target_parameters.iter().any(|name| is_called(parameter, name))
    }

    fn in_layers(&self, module: &str) -> bool {
        let layers: BTreeSet<usize> = self.settings.layers.iter().flat_map(Layers::indices).collect();
        layers.is_empty() || layer_of(module).is_some_and(|layer| layers.contains(&layer))
    }

    /// All that is chosen. In a file of PEFT, `layers_to_transform` and `exclude_modules` do not apply to parameters.
    ///
    /// # Errors
    /// The module is no linear layer, or is named as a module and as a parameter; a part of fused layers is missing.
    pub(super) fn chosen(&self) -> Result<Vec<Chosen<'a>>> {
        let mut all = Vec::new();
        for module in &self.model.modules {
            all.extend(self.of_module(module)?);
        }
        for fused in &self.model.fused {
            all.extend(self.of_fused(fused)?);
        }
        Ok(all)
    }

    fn of_module(&self, module: &Module<'a>) -> Result<Option<Chosen<'a>>> {
        let (name, weight) = (module.name, format!("{}.weight", module.name));
        let is_target = self.targets.selects_module(module, &self.model.old, self.is_file())
            && (self.targets.is_whole_name(name) || self.in_layers(name))
            && !self.exclude.selects(name, module.dims.is_some());
        let is_parameter = module.dims.is_some() && self.is_parameter(&weight);
        let [targets, parameters] = ["targets", "target_parameters"].map(|key| self.origin.key(key));
        if is_target && is_parameter {
            return Err(self.origin.wrong(format!(
                "{parameters} must not name what {targets} selects (got {weight}, of which both give it an adapter)"
            )));
        }
        let is_kept = self.is_file() || self.in_layers(name) && !self.exclude.selects(name, true);
        if self.whole.contains(&weight) || !(is_target || is_parameter && is_kept) {
            return Ok(None);
        }
        let Some((outputs, inputs)) = module.dims else { return Err(self.not_linear(module)) };
        let names = match (is_parameter, self.is_file()) {
            (false, _) => vec![name.to_owned()],
            (true, true) => vec![weight],
            (true, false) => vec![name.to_owned(), weight],
        };
        let is_limited = outputs > 1;
        Ok(Some(Chosen { module: name, dims: [outputs, inputs], names, is_limited, times: 1 }))
    }

    fn not_linear(&self, module: &Module) -> Error {
        let [targets, also, parameters] =
            ["targets", "train_also", "target_parameters"].map(|key| self.origin.key(key));
        let name = module.name;
        let is_embedding = name == module_of(EMBEDDING) || name == module_of(LM_HEAD);
        self.origin.wrong(format!("{targets} must match linear layers of layers only (got {name})")).hint(match module
            .fused
        {
            _ if is_embedding => {
                format!("adapters of embeddings and heads are not supported; {also} trains it whole")
            }
            Some(fused) => format!("{parameters} = [\"{}\"] gives it an adapter", fused.parameter()),
            None => format!("{also} trains it whole"),
        })
    }

    fn of_fused(&self, fused: &'a Fused) -> Result<Option<Chosen<'a>>> {
        let (parameter, olds) = (fused.parameter(), self.targets.old_names(fused, self.is_file()));
        let is_kept = self.is_file()
            || self.in_layers(&fused.module)
                && !self.exclude.selects(&fused.module, true)
                && !self.exclude.selects(&parameter, true)
                && self.exclude.old_names(fused, false) == 0;
        let is_chosen = olds > 0 || self.is_parameter(&parameter);
        if !is_chosen || !is_kept || self.model.is_whole(fused, self.whole) {
            return Ok(None);
        }
        if olds > 0 && olds < fused.old.len() {
            let (targets, all) = (self.origin.key("targets"), fused.old.join(" and "));
            let message = format!("{targets} must name both {all}, or none: {parameter} has both, and one adapter");
            return Err(self.origin.wrong(message));
        }
        let names = match fused.experts {
            None if !self.is_file() => vec![fused.module.clone(), parameter],
            _ => vec![parameter],
        };
        let (is_limited, times) = (fused.experts.is_some(), olds.max(1));
        Ok(Some(Chosen { module: &fused.module, dims: fused.dims, names, is_limited, times }))
    }

    /// Rejects names, or a pattern, that nothing matches.
    pub(super) fn check_names(&self, modules: &Modules, selector: &Selector, key: &str) -> Result<()> {
        let (key, model) = (self.origin.key(key), self.model);
        let old: Vec<&str> = model.old.iter().copied().collect();
        let known = format!("the linear layers are {}", model.last_names(true));
        let known = if old.is_empty() { known } else { format!("{known}; of experts and routers, {}", old.join(", ")) };
        let has = |selector: &Selector| {
            let is_module = |module: &Module| module.is_module() && selector.selects(module.name, true);
            let is_fused =
                |fused: &&Fused| selector.old_names(fused, false) > 0 || selector.selects(&fused.module, true);
            model.modules.iter().any(is_module) || model.fused.iter().any(is_fused)
        };
        match modules {
            Modules::Names(names) => {
                let unmatched = names.iter().find(|name| !has(&Selector::Names(vec![(*name).clone()])));
                unmatched.map_or(Ok(()), |name| {
                    Err(Error::usage(format!("{key} must list names of modules (got {name:?}, which matches none)"))
                        .hint(format!("{known}; a regular expression is one string instead of a list")))
                })
            }
            Modules::Pattern(pattern) if !modules.is_none() && !has(selector) => {
                let message = format!("{key} must match whole names of modules (got {pattern:?}, which matches none)");
                Err(Error::usage(message).hint(format!("a whole name is model.layers.0.self_attn.q_proj; {known}")))
            }
            Modules::Pattern(_) => Ok(()),
        }
    }

    /// Rejects names of parameters that have no adapters here and, in a job, names that match nothing.
    pub(super) fn check_parameters(&self) -> Result<()> {
        let (key, model) = (self.origin.key("target_parameters"), self.model);
        let of_fused = || model.fused.iter().map(|fused| fused.parameter());
        for name in &self.settings.target_parameters {
            let other = model.params.iter().find(|param| {
                let is_known = param.is_linear || param.fused.is_some();
                !is_known && is_called(&param.name, name)
            });
            if let Some(param) = other {
                let message =
                    format!("{key} must name matrices of layers only (got {name:?}, which is {})", param.name);
                return Err(self.origin.wrong(message));
            }
            let is_linear = model.params.iter().any(|param| param.is_linear && is_called(&param.name, name));
            if !is_linear && !of_fused().any(|parameter| is_called(&parameter, name)) && !self.is_file() {
                let known: BTreeSet<String> = of_fused().map(|parameter| without_layer(&parameter)).collect();
                let known: Vec<String> = known.into_iter().collect();
                return Err(Error::usage(format!(
                    "{key} must list names of parameters (got {name:?}, which matches none)"
                ))
                .hint(match &known[..] {
                    [] => "the model has no experts; lora.targets names linear layers".to_string(),
                    known => format!("of experts and routers, they are {}", known.join(", ")),
                }));
            }
        }
        Ok(())
    }
}

/// The name of a parameter within its layer: `mlp.gate.weight`.
pub(super) fn without_layer(parameter: &str) -> String {
    parameter.splitn(4, '.').last().unwrap_or(parameter).to_owned()
}
