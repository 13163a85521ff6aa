//! `[lora]`: low-rank adapters (arXiv:2106.09685). The matrices that get one, their ranks, and their scales.

use super::limits::{self, ABOVE_0, FINITE};
use super::mesh::RoleName;
use crate::error::{Error, Result};
use regex::Regex;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use toml::{Table, Value};

/// The word for all linear layers but the heads.
pub const ALL_LINEAR: &str = "all-linear";
/// More than the width of any model.
const RANK_MAX: f64 = 65_536.0;

/// Modules, by their names in the classes of transformers: `model.layers.0.self_attn.q_proj`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(untagged, try_from = "Value")]
#[schemars(!try_from)]
pub enum Modules {
    /// `"all-linear"`; "" for none; else a regular expression that matches whole names.
    Pattern(String),
    /// Whole names, or the parts of a name after one of its dots.
    Names(Vec<String>),
}

impl TryFrom<Value> for Modules {
    type Error = String;

    fn try_from(value: Value) -> std::result::Result<Self, String> {
        let names = |all: &[Value]| all.iter().map(|one| one.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>();
        let read = match &value {
            Value::String(pattern) => Some(Self::Pattern(pattern.clone())),
            Value::Array(all) => names(all).map(Self::Names),
            _ => None,
        };
        read.ok_or_else(|| format!("invalid value: {value}, expected a string or a list of strings"))
    }
}

impl Modules {
    pub fn none() -> Self {
        Self::Pattern(String::new())
    }

    pub fn is_none(&self) -> bool {
        matches!(self, Self::Pattern(pattern) if pattern.is_empty())
    }

    /// Whether it is the word for all linear layers. PEFT ignores its case, too.
    pub fn is_all_linear(&self) -> bool {
        matches!(self, Self::Pattern(word) if word.eq_ignore_ascii_case(ALL_LINEAR))
    }
}

/// Values of modules by regular expressions of the ends of their names. The first match counts. A job has them in
/// alphabetical order, in which PEFT saves them, too.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "BTreeMap<String, T>", into = "BTreeMap<String, T>")]
pub struct Patterns<T: Clone>(pub Vec<(String, T)>);

impl<T: Clone> From<BTreeMap<String, T>> for Patterns<T> {
    fn from(all: BTreeMap<String, T>) -> Self {
        Self(all.into_iter().collect())
    }
}

impl<T: Clone> From<Patterns<T>> for BTreeMap<String, T> {
    fn from(all: Patterns<T>) -> Self {
        all.0.into_iter().collect()
    }
}

impl<T: Clone + JsonSchema> JsonSchema for Patterns<T> {
    fn schema_name() -> Cow<'static, str> {
        "Patterns".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        BTreeMap::<String, T>::json_schema(generator)
    }
}

/// Indices of layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(untagged, try_from = "Value")]
#[schemars(!try_from)]
pub enum Layers {
    One(usize),
    /// `"0-15"`, both ends included.
    Range(#[schemars(regex(pattern = r"^[0-9]+-[0-9]+$"))] String),
}

impl TryFrom<Value> for Layers {
    type Error = String;

    fn try_from(value: Value) -> std::result::Result<Self, String> {
        match value {
            Value::Integer(n @ 0..) => Ok(Self::One(n as usize)),
            Value::String(range) if layer_range(&range).is_some() => Ok(Self::Range(range)),
            other => Err(format!("invalid value: {other}, expected an index or a range \"0-15\"")),
        }
    }
}

impl Layers {
    pub fn indices(&self) -> RangeInclusive<usize> {
        match self {
            Self::One(index) => *index..=*index,
            Self::Range(range) => layer_range(range).expect("it was checked"),
        }
    }
}

/// The layers of `A-B`, or of a single index.
pub fn layer_range(text: &str) -> Option<RangeInclusive<usize>> {
    let index = |digits: &str| digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?;
    let (first, last): (usize, usize) = match text.split_once('-') {
        Some((first, last)) => (index(first)?, index(last)?),
        None => (index(text)?, index(text)?),
    };
    (first <= last).then_some(first..=last)
}

/// The initial values of A. B starts at 0, so that a new adapter changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AdapterInit {
    /// Uniform in +-1/sqrt(inputs).
    #[default]
    Uniform,
    /// Normal with mean 0 and standard deviation 1/rank.
    Gaussian,
}

table! {
    /// `[lora]`. The tables of roles have the keys that differ.
    pub struct LoraConfig {
        pub rank: usize = 0 => 0.0..=RANK_MAX,
        pub alpha: f64 = 32.0 => ABOVE_0..=FINITE,
        pub targets: Modules = Modules::Pattern(ALL_LINEAR.into()),
        pub target_parameters: Vec<String> = Vec::new(),
        pub exclude: Modules = Modules::none(),
        pub rslora: bool = false,
        pub rank_pattern: Patterns<usize> = Patterns(Vec::new()),
        pub alpha_pattern: Patterns<f64> = Patterns(Vec::new()),
        pub layers: Vec<Layers> = Vec::new(),
        pub init: AdapterInit = AdapterInit::Uniform,
        pub train_also: Vec<String> = Vec::new(),
        /// `[lora.actor]`
        pub actor: RoleKeys = RoleKeys::default(),
        /// `[lora.critic]`
        pub critic: RoleKeys = RoleKeys::default(),
    }
}

/// Keys of `[lora]` for one role.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RoleKeys(Table);

impl<'de> Deserialize<'de> for RoleKeys {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let keys = Table::deserialize(from)?;
        for (key, value) in &keys {
            if ["actor", "critic"].contains(&key.as_str()) {
                return Err(D::Error::custom(format!("a role has no table {key} of its own")));
            }
            LoraConfig::deserialize(Table::from_iter([(key.clone(), value.clone())])).map_err(|e| {
                let (message, is_key) = (e.message(), e.message().starts_with("unknown field"));
                D::Error::custom(if is_key { message.into() } else { format!("{key}: {message}") })
            })?;
        }
        Ok(Self(keys))
    }
}

impl JsonSchema for RoleKeys {
    fn schema_name() -> Cow<'static, str> {
        "RoleKeys".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        schemars::json_schema!({ "type": "object", "additionalProperties": true })
    }
}

impl LoraConfig {
    /// The settings of a role: its own keys, then those of `[lora]`. A job with one model trains the actor.
    #[must_use]
    pub fn of_role(&self, role: RoleName) -> Self {
        let own = if role == RoleName::Critic { &self.critic.0 } else { &self.actor.0 };
        let shared = Self { actor: RoleKeys::default(), critic: RoleKeys::default(), ..self.clone() };
        let mut all = Table::try_from(shared).expect("settings are TOML");
        all.extend(own.clone());
        all.try_into().expect("each key was checked")
    }

    /// Whether the role trains adapters.
    pub fn is_on(&self, role: RoleName) -> bool {
        self.of_role(role).rank > 0
    }

    /// The name of the table of a role in errors: the one with the keys of its own, if it has any.
    pub fn table_of(&self, role: RoleName) -> &'static str {
        match role {
            RoleName::Critic if !self.critic.0.is_empty() => "lora.critic",
            RoleName::Actor if !self.actor.0.is_empty() => "lora.actor",
            _ => "lora",
        }
    }

    /// Rejects values that no model could use.
    pub fn check(&self) -> Result<()> {
        for role in [RoleName::Actor, RoleName::Critic] {
            self.of_role(role).check_as(self.table_of(role))?;
        }
        Ok(())
    }

    fn check_as(&self, table: &str) -> Result<()> {
        limits::check(table, self)?;
        for (key, modules) in [("targets", &self.targets), ("exclude", &self.exclude)] {
            match modules {
                Modules::Names(names) if names.iter().any(String::is_empty) => {
                    return Err(Error::usage(format!("{table}.{key} must not contain an empty name")));
                }
                Modules::Pattern(pattern) => drop(whole_name(&format!("{table}.{key}"), pattern)?),
                Modules::Names(_) => {}
            }
        }
        let is_nothing = self.targets.is_none() && self.target_parameters.is_empty();
        Error::need(!is_nothing, format!("{table}.targets must not be empty without {table}.target_parameters"))
            .map_err(|e| e.hint("set it to \"all-linear\"; rank = 0 turns adapters off"))?;
        let is_unnamed = self.target_parameters.iter().any(String::is_empty);
        Error::need(!is_unnamed, format!("{table}.target_parameters must not contain an empty name"))?;
        Error::need(!self.exclude.is_all_linear(), format!("{table}.exclude must not be \"{ALL_LINEAR}\""))?;
        for (pattern, rank) in &self.rank_pattern.0 {
            end_of_name(&format!("{table}.rank_pattern"), pattern)?;
            let is_rank = (1.0..=RANK_MAX).contains(&(*rank as f64));
            Error::need(is_rank, format!("{table}.rank_pattern.{pattern:?} must be at least 1 (got {rank})"))?;
        }
        for (pattern, alpha) in &self.alpha_pattern.0 {
            end_of_name(&format!("{table}.alpha_pattern"), pattern)?;
            let is_scale = (ABOVE_0..=FINITE).contains(alpha);
            Error::need(is_scale, format!("{table}.alpha_pattern.{pattern:?} must be above 0 (got {alpha})"))?;
        }
        Ok(())
    }
}

/// A regular expression that matches whole names.
///
/// # Errors
/// `Usage`, naming `key`: it is none, or uses what is not supported.
pub fn whole_name(key: &str, pattern: &str) -> Result<Regex> {
    compile(key, pattern, &format!(r"\A(?:{pattern})\z"))
}

/// A regular expression that matches whole names, or their parts after a dot.
///
/// # Errors
/// The errors of `whole_name`.
pub fn end_of_name(key: &str, pattern: &str) -> Result<Regex> {
    compile(key, pattern, &format!(r"\A(?:.*\.)?(?:{pattern})\z"))
}

fn compile(key: &str, pattern: &str, anchored: &str) -> Result<Regex> {
    // The pattern alone, too: anchors must not close its groups.
    Regex::new(pattern).and_then(|_| Regex::new(anchored)).map_err(|e| {
        let text = e.to_string();
        let why = text.lines().last().unwrap_or_default().trim_start_matches("error: ");
        Error::usage(format!("{key} must be a supported regular expression (got {pattern:?}): {why}"))
            .hint("it has no look-around and no backreferences; a list of names and lora.exclude may replace them")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> std::result::Result<LoraConfig, String> {
        toml::from_str(text).map_err(|e| e.message().to_string())
    }

    #[test]
    fn a_role_has_its_own_keys_and_otherwise_those_of_the_table() {
        let config = read(
            "rank = 8\nalpha = 16\ntargets = [\"q_proj\"]\nlayers = [0, \"2-3\"]\n[rank_pattern]\n\"v_proj\" = 4\n\
             [critic]\nrank = 2\nrslora = true\nexclude = \"model[.].*\"\n",
        )
        .expect("settings");
        let (actor, critic) = (config.of_role(RoleName::Actor), config.of_role(RoleName::Critic));
        assert_eq!(actor, LoraConfig { critic: RoleKeys::default(), ..config.clone() });
        let own = LoraConfig { rank: 2, rslora: true, exclude: Modules::Pattern("model[.].*".into()), ..actor.clone() };
        assert_eq!(critic, own);
        assert_eq!(actor.layers.iter().flat_map(Layers::indices).collect::<Vec<_>>(), [0, 2, 3]);
        assert_eq!([RoleName::Actor, RoleName::Critic].map(|role| config.table_of(role)), ["lora", "lora.critic"]);
        let text = toml::to_string(&config).expect("TOML");
        assert_eq!(read(&text).expect("the same"), config);
    }

    #[test]
    fn values_that_no_model_could_use_are_rejected_with_their_key() {
        for (text, message) in [
            ("targets = 3", "expected a string or a list of strings"),
            ("layers = [\"3-1\"]", "expected an index or a range"),
            ("layers = [\"+1-2\"]", "expected an index or a range"),
            ("layers = [-1]", "expected an index or a range"),
            ("init = \"pissa\"", "unknown variant `pissa`"),
            ("[critic]\nranks = 3", "unknown field `ranks`"),
            ("[critic]\nrank = \"a\"", "rank: invalid type"),
            ("[critic]\ncritic = {}", "a role has no table critic"),
        ] {
            let error = read(text).expect_err(text);
            assert!(error.contains(message), "{text}: {error}");
        }
        for (text, message) in [
            ("targets = \"(?!q)proj\"", "lora.targets must be a supported regular expression (got \"(?!q)proj\")"),
            ("targets = \"a)(b\"", "lora.targets must be a supported"),
            ("targets = \"\"", "lora.targets must not be empty"),
            ("targets = [\"\"]", "lora.targets must not contain an empty name"),
            ("exclude = \"all-linear\"", "lora.exclude must not be \"all-linear\""),
            ("rank_pattern.q_proj = 0", "lora.rank_pattern.\"q_proj\" must be at least 1 (got 0)"),
            ("alpha_pattern.q_proj = -1.5", "lora.alpha_pattern.\"q_proj\" must be above 0 (got -1.5)"),
            ("alpha = 0", "lora.alpha must be above 0 (got 0)"),
            ("critic.alpha = 0", "lora.critic.alpha must be above 0 (got 0)"),
            ("actor.rank = 100000", "lora.actor.rank must be between 0 and 65536 (got 100000)"),
        ] {
            let error = read(text).expect("it parses").check().expect_err(text);
            assert!(error.message.contains(message), "{text}: {}", error.message);
        }
    }
}
