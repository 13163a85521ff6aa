//! What adapters may name: the modules and the parameters of a model, by their names in the classes of transformers 5.
//!
//! There a router is a parameter `gate.weight`, and the matrices of all experts are two parameters. In transformers 4
//! routers and the matrices of experts were linear layers. For some families, PEFT 0.21 takes their old names for
//! these parameters, and "all-linear" selects them.

use super::names::LM_HEAD;
use super::naming::{Naming, TOWER};
use crate::config::lora::{Modules, end_of_name, whole_name};
use crate::error::Result;
use regex::Regex;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A parameter of a model: its name, its whole shape, and whether it is the matrix of a linear layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    pub name: String,
    pub shape: Vec<usize>,
    pub is_linear: bool,
    /// What it is a part of, if it is of a router or of experts.
    pub fused: Option<Arc<Fused>>,
}

/// A router, or the matrices of all experts of a layer that are one parameter in transformers 5.
#[derive(Debug, PartialEq, Eq)]
pub struct Fused {
    /// `model.layers.0.mlp.experts.gate_up_proj`, or of a router its module, `model.layers.0.mlp.gate`.
    pub module: String,
    /// The number of experts; `None` for a router.
    pub experts: Option<usize>,
    /// The outputs and inputs of each matrix.
    pub dims: [usize; 2],
    /// The last names of its linear layers in transformers 4, if PEFT takes them for it.
    pub old: &'static [&'static str],
}

impl Fused {
    /// The name of the parameter.
    pub(super) fn parameter(&self) -> String {
        match self.experts {
            Some(_) => self.module.clone(),
            None => format!("{}.weight", self.module),
        }
    }

    /// The module of the adapter of one expert, given that of one of its matrices:
    /// `model.layers.0.mlp.experts.3.gate_up_proj` for `model.layers.0.mlp.experts.3.up_proj`.
    pub(super) fn of_expert(&self, matrix: &str) -> String {
        format!("{}.{}", module_of(matrix), last_name(&self.module))
    }

    /// The names of its linear layers in transformers 4, with the modules of transformers 5 around them.
    fn old_modules(&self) -> impl Iterator<Item = String> {
        let around = module_of(&self.module);
        self.old.iter().map(move |old| format!("{around}.{old}"))
    }
}

/// The module of a parameter: its name without the last part.
pub(super) fn module_of(param: &str) -> &str {
    param.rsplit_once('.').map_or(param, |(module, _)| module)
}

/// The last part of a name.
pub(super) fn last_name(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

/// The modules that contain a parameter: its own, then those around it.
fn modules_around(param: &str) -> impl Iterator<Item = &str> {
    param.rmatch_indices('.').map(|(at, _)| &param[..at])
}

/// Whether `name` is `end`, or ends with it after a dot.
pub(super) fn is_named(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The names of a module: its own, and those inside a model that also sees images.
pub(super) fn names_of(module: &str) -> [String; 4] {
    [Naming::Plain, Naming::Inner, Naming::Outer, Naming::Beside].map(|naming| naming.in_files(module))
}

/// Whether one of the names of a module is `end`, or ends with it after a dot.
pub(super) fn is_called(module: &str, end: &str) -> bool {
    names_of(module).iter().any(|name| is_named(name, end))
}

/// The layer of a module: 3 of "model.layers.3.mlp.up_proj".
pub(super) fn layer_of(module: &str) -> Option<usize> {
    module.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// Whether a parameter is the head of a value or reward model, which always trains.
pub(super) fn is_value_head(name: &str) -> bool {
    name != LM_HEAD && !name.starts_with("model.")
}

/// A module with parameters.
pub(super) struct Module<'a> {
    pub name: &'a str,
    /// (outputs, inputs) if it is a linear layer.
    pub dims: Option<(usize, usize)>,
    /// What it is a part of, if it is no module of its own in transformers 5.
    pub fused: Option<&'a Fused>,
}

impl Module<'_> {
    /// Whether names of modules may mean it: expert matrices, and routers by their old names, are parameters.
    pub(super) fn is_module(&self) -> bool {
        !self.name.contains(".experts") && self.fused.is_none_or(|fused| fused.old.is_empty())
    }
}

/// The modules of a model.
pub(super) struct Model<'a> {
    pub params: &'a [Param],
    /// In order.
    pub modules: Vec<Module<'a>>,
    /// The routers, and the parameters of experts.
    pub fused: Vec<&'a Fused>,
    /// All old names.
    pub old: BTreeSet<&'static str>,
}

impl<'a> Model<'a> {
    pub(super) fn new(params: &'a [Param]) -> Self {
        let mut modules: Vec<Module> = Vec::new();
        let mut all: Vec<&Fused> = Vec::new();
        for Param { name, shape, is_linear, fused } in params {
            let module = module_of(name);
            if modules.last().is_none_or(|last| last.name != module) {
                modules.push(Module { name: module, dims: None, fused: fused.as_deref() });
            }
            if let (true, [outputs, inputs]) = (is_linear, &shape[..]) {
                modules.last_mut().expect("it was added").dims = Some((*outputs, *inputs));
            }
            let is_new = |fused: &&Fused| all.last().is_none_or(|last| last.module != fused.module);
            all.extend(fused.as_deref().filter(is_new));
        }
        let old = all.iter().flat_map(|fused| fused.old.iter().copied()).collect();
        Self { params, modules, fused: all, old }
    }

    /// The parameter by which a file of PEFT names what has an adapter: that of a router or of experts, and the matrix of a
    /// linear layer whose last name means experts. `None`: by the name of its module.
    pub(super) fn parameter(&self, module: &str) -> Option<String> {
        match self.fused.iter().find(|fused| fused.module == module) {
            Some(fused) => Some(fused.parameter()),
            None => self.old.contains(last_name(module)).then(|| format!("{module}.weight")),
        }
    }

    pub(super) fn layers(&self) -> usize {
        self.modules.iter().filter_map(|module| layer_of(module.name)).max().map_or(0, |last| last + 1)
    }

    /// The last names of modules: `q_proj, k_proj, ...`.
    pub(super) fn last_names(&self, only_linear: bool) -> String {
        let mut names: Vec<&str> = Vec::new();
        for module in &self.modules {
            let last = last_name(module.name);
            if !names.contains(&last) && (module.dims.is_some() || !only_linear) {
                names.push(last);
            }
        }
        names.join(", ")
    }

    /// The names of the parameters within modules that `selects` accepts by their names.
    pub(super) fn within(&self, selects: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let is_selected = |param: &&Param| modules_around(&param.name).any(&selects);
        self.params.iter().filter(is_selected).map(|param| param.name.clone()).collect()
    }

    /// Whether the language-model head is the embedding.
    pub(super) fn is_tied(&self) -> bool {
        !self.params.iter().any(|param| param.name == LM_HEAD || is_value_head(&param.name))
    }

    /// Whether one of the parameters of routers or experts is among `whole`.
    pub(super) fn is_whole(&self, fused: &Fused, whole: &BTreeSet<String>) -> bool {
        let is_part = |param: &&Param| param.fused.as_deref().is_some_and(|of| of.module == fused.module);
        !whole.is_empty() && self.params.iter().filter(is_part).any(|param| whole.contains(&param.name))
    }
}

/// Selects modules by their names.
pub(super) enum Selector {
    AllLinear,
    None,
    Pattern(Regex),
    Names(Vec<String>),
}

impl Selector {
    pub(super) fn new(key: &str, modules: &Modules) -> Result<Self> {
        Ok(match modules {
            all if all.is_all_linear() => Self::AllLinear,
            none if none.is_none() => Self::None,
            Modules::Pattern(pattern) => Self::Pattern(whole_name(key, pattern)?),
            Modules::Names(names) => Self::Names(names.clone()),
        })
    }

    pub(super) fn selects(&self, module: &str, is_linear: bool) -> bool {
        match self {
            // Towers are trained by name only.
            Self::AllLinear => is_linear && !module.starts_with(TOWER),
            Self::None => false,
            Self::Pattern(pattern) => names_of(module).iter().any(|module| pattern.is_match(module)),
            Self::Names(names) => names.iter().any(|name| is_called(module, name)),
        }
    }

    /// Whether it selects a module of a model with these `old` names, which mean routers and experts: the last names
    /// alone, and in files of PEFT also names that end with them.
    pub(super) fn selects_module(&self, module: &Module, old: &BTreeSet<&str>, is_file: bool) -> bool {
        let is_old = |name: &str| old.contains(if is_file { last_name(name) } else { name });
        module.is_module()
            && match self {
                Self::AllLinear => {
                    let is_tower = module.name.starts_with(TOWER);
                    module.dims.is_some() && !is_tower && !old.contains(last_name(module.name))
                }
                Self::Names(names) => names.iter().any(|name| !is_old(name) && is_called(module.name, name)),
                other => other.selects(module.name, module.dims.is_some()),
            }
    }

    /// The number of the old names of a router or of experts that it selects. Names in files of PEFT mean all layers.
    pub(super) fn old_names(&self, fused: &Fused, is_file: bool) -> usize {
        let is_selected = |(old, module): &(&&str, String)| match self {
            Self::AllLinear => true,
            Self::None => false,
            Self::Pattern(pattern) => names_of(module).iter().any(|module| pattern.is_match(module)),
            Self::Names(names) if is_file => names.iter().any(|name| is_named(name, old)),
            Self::Names(names) => names.iter().any(|name| is_called(module, name)),
        };
        fused.old.iter().zip(fused.old_modules()).filter(is_selected).count()
    }

    /// Whether a name of the list is the whole name of the module. PEFT then selects it in any layer.
    pub(super) fn is_whole_name(&self, module: &str) -> bool {
        matches!(self, Self::Names(names) if names_of(module).iter().any(|module| names.contains(module)))
    }
}

/// One value of the matching modules, from `rank_pattern` or `alpha_pattern`.
pub(super) struct Pattern<T> {
    pub text: String,
    pub regex: Regex,
    pub value: T,
}

pub(super) fn patterns<T: Copy>(key: &str, all: &[(String, T)]) -> Result<Vec<Pattern<T>>> {
    let compiled =
        |(text, value): &(String, T)| Ok(Pattern { text: text.clone(), regex: end_of_name(key, text)?, value: *value });
    all.iter().map(compiled).collect()
}

/// The first pattern that matches one of the names.
pub(super) fn first_match<'a, T>(patterns: &'a [Pattern<T>], names: &[String]) -> Option<&'a Pattern<T>> {
    let names: Vec<String> = names.iter().flat_map(|name| names_of(name)).collect();
    patterns.iter().find(|pattern| names.iter().any(|module| pattern.regex.is_match(module)))
}
