//! `[mesh]`: the arrangement of the ranks.

use super::limits::{BYTES, RANKS_MAX, YEAR_S};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A number, or `"auto"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase", try_from = "toml::Value")]
#[schemars(!try_from)]
pub enum Auto {
    #[default]
    Auto,
    #[serde(untagged)]
    Is(usize),
}

impl TryFrom<toml::Value> for Auto {
    type Error = String;

    fn try_from(value: toml::Value) -> std::result::Result<Self, String> {
        match value {
            toml::Value::String(word) if word == "auto" => Ok(Self::Auto),
            toml::Value::Integer(n @ 0..) => Ok(Self::Is(n as usize)),
            other => Err(format!("invalid value: {other}, expected \"auto\" or an integer")),
        }
    }
}

/// The state that can be offloaded from device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// AdamW's moments and master weights, between updates.
    Optimizer,
    /// Weights of models that are not trained (reference, reward, teachers), between their forwards. With a GPU also
    /// the critic's weights, during the rollout.
    Roles,
}

/// The role of a model, or of the reward functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RoleName {
    Actor,
    Critic,
    Reference,
    Reward,
    Teacher,
    /// Sampling with a copy of the actor's weights.
    Rollout,
}

/// Some roles on some ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlacementConfig {
    pub roles: Vec<RoleName>,
    /// World ranks `"from..to"`, the end excluded.
    #[schemars(regex(pattern = r"^\s*[0-9]+\s*\.\.\s*[0-9]+\s*$"))]
    pub ranks: String,
}

table! {
    pub struct MeshConfig {
        pub data: Auto = Auto::Auto,
        pub pipeline: Auto = Auto::Is(1),
        pub pipeline_chunks: usize = 1 => 1.0..=64.0,
        pub sequence: Auto = Auto::Is(1),
        pub tensor: Auto = Auto::Auto,
        pub expert: usize = 1 => 1.0..=RANKS_MAX as f64,
        pub zero: Auto = Auto::Auto,
        pub placement: Vec<PlacementConfig> = Vec::new(),
        pub async_updates_max: usize = 0 => 0.0..=64.0,
        pub offload: Vec<Offload> = Vec::new(),
        pub arena_bytes_max: u64 = 0 => 0.0..=BYTES,
        pub collective_timeout_s: f64 = 600.0 => 0.0..=YEAR_S,
    }
}

impl RoleName {
    pub const ALL: [Self; 6] = [Self::Actor, Self::Critic, Self::Reference, Self::Reward, Self::Teacher, Self::Rollout];

    pub fn name(self) -> &'static str {
        match self {
            Self::Actor => "actor",
            Self::Critic => "critic",
            Self::Reference => "reference",
            Self::Reward => "reward",
            Self::Teacher => "teacher",
            Self::Rollout => "rollout",
        }
    }
}

/// A range of ranks with their roles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    pub roles: Vec<RoleName>,
    pub ranks: Range<usize>,
}

impl MeshConfig {
    /// The mesh on `world` ranks. An axis that is `"auto"` is 1, except data, which takes the remaining ranks.
    pub fn resolve(&self, world: usize) -> Result<Mesh> {
        self.stage()?;
        let pipeline = size("mesh.pipeline", self.pipeline)?.unwrap_or(1);
        let sequence = size("mesh.sequence", self.sequence)?.unwrap_or(1);
        let tensor = size("mesh.tensor", self.tensor)?.unwrap_or(1);
        let left = || world.div_ceil(pipeline * sequence * tensor);
        let data = size("mesh.data", self.data)?.unwrap_or_else(left);
        let mesh = Mesh { data, pipeline, sequence, tensor, expert: self.expert };
        if self.pipeline_chunks > 1 && pipeline == 1 {
            let message = format!("mesh.pipeline_chunks = {} needs mesh.pipeline above 1", self.pipeline_chunks);
            return Err(Error::usage(message).hint("set mesh.pipeline_chunks = 1"));
        }
        mesh.check(world)?;
        mesh.check_expert()?;
        if self.expert > 1 && self.stage()? == 0 {
            let message = format!("mesh.expert = {} needs mesh.zero of at least 1 (got 0)", self.expert);
            return Err(Error::usage(message).hint("set mesh.zero = 1"));
        }
        Ok(mesh)
    }

    /// The number of batches of a step's prompts in the rollout. If roles have ranks of their own, these score a batch
    /// while the actor generates the next one. More batches are scored sooner, but decode fewer sequences at a time.
    pub fn rollout_batches(&self, prompts: usize) -> usize {
        const BATCHES: usize = 4;
        if self.placement.len() > 1 { BATCHES.min(prompts).max(1) } else { 1 }
    }

    /// Whether the rollout is on ranks without the actor.
    pub fn rollout_is_apart(&self) -> bool {
        let has = |placement: &PlacementConfig, role| placement.roles.contains(&role);
        self.placement.iter().any(|p| has(p, RoleName::Rollout) && !has(p, RoleName::Actor))
    }

    /// Rejects a rollout that cannot run ahead.
    pub fn check_async(&self) -> Result<()> {
        let k = self.async_updates_max;
        if k == 0 {
            return Ok(());
        }
        if !self.rollout_is_apart() {
            return Err(Error::usage(format!("mesh.async_updates_max = {k} needs rollout ranks of their own")).hint(
                "put \"rollout\" in an entry of mesh.placement without the actor, or set mesh.async_updates_max = 0",
            ));
        }
        let learns = [RoleName::Critic, RoleName::Reference];
        let samples = |p: &&PlacementConfig| p.roles.contains(&RoleName::Rollout);
        match self.placement.iter().find(samples).and_then(|p| p.roles.iter().find(|role| learns.contains(role))) {
            None => Ok(()),
            Some(role) => Err(Error::usage(format!(
                "mesh.async_updates_max = {k} does not support the {} on the rollout ranks, which are a step ahead",
                role.name()
            ))
            .hint("place it with the actor, or on ranks of its own")),
        }
    }

    /// The number of ranks that the placement covers, if there is one.
    pub fn placed_ranks(&self) -> Option<usize> {
        self.placement.iter().filter_map(|placement| Some(parse_ranks(&placement.ranks)?.end)).max()
    }

    /// The least number of ranks of the job: those of the placement, or the product of the given axes.
    pub fn ranks_min(&self) -> usize {
        let size = |axis| if let Auto::Is(size) = axis { size.max(1) } else { 1 };
        let axes = || [self.data, self.pipeline, self.sequence, self.tensor].into_iter().map(size);
        self.placed_ranks().unwrap_or_else(|| axes().fold(1, usize::saturating_mul).max(self.expert))
    }

    /// Sets all axes to 1, without a placement.
    pub fn reduce_to_one_rank(&mut self) {
        (self.data, self.pipeline, self.sequence, self.tensor) = (Auto::Is(1), Auto::Is(1), Auto::Is(1), Auto::Is(1));
        (self.expert, self.async_updates_max) = (1, 0);
        self.placement.clear();
    }

    /// The placements of `world` ranks, in order: the entries of `placement`, or one with every role.
    pub fn placements(&self, world: usize) -> Result<Vec<Placement>> {
        if self.placement.is_empty() {
            return Ok(vec![Placement { roles: RoleName::ALL.to_vec(), ranks: 0..world }]);
        }
        let placement = |(i, p): (usize, &PlacementConfig)| match parse_ranks(&p.ranks) {
            Some(ranks) if !p.roles.is_empty() => Ok(Placement { roles: p.roles.clone(), ranks }),
            Some(_) => Err(Error::usage(format!("mesh.placement[{i}] has no role"))),
            None => {
                Err(Error::usage(format!("mesh.placement[{i}].ranks must be a range of ranks (got \"{}\")", p.ranks))
                    .hint("write it as \"0..8\", which excludes rank 8"))
            }
        };
        let mut placements = self.placement.iter().enumerate().map(placement).collect::<Result<Vec<_>>>()?;
        placements.sort_by_key(|placement| placement.ranks.start);
        let mut next = 0;
        for Placement { ranks, .. } in &placements {
            if ranks.start != next {
                let what = if ranks.start < next { "is in two ranges" } else { "is in no range" };
                let rank = ranks.start.min(next);
                return Err(Error::usage(format!("mesh.placement: rank {rank} {what}"))
                    .hint("put every rank in exactly one range"));
            }
            next = ranks.end;
        }
        if next != world {
            return Err(Error::usage(format!("mesh.placement covers {next} ranks, but mpirun started {world}"))
                .hint(format!("run with -n {next}, or change the last range")));
        }
        for role in RoleName::ALL {
            if placements.iter().flat_map(|placement| &placement.roles).filter(|r| **r == role).count() > 1 {
                return Err(Error::usage(format!("mesh.placement names the {} twice", role.name()))
                    .hint("put a role in a single entry"));
            }
        }
        if !placements[0].roles.contains(&RoleName::Actor) {
            return Err(Error::usage("mesh.placement must put the actor on rank 0, which writes the run's records")
                .hint("give the actor the first range"));
        }
        Ok(placements)
    }

    /// The ZeRO stage, which shards over data x sequence (arXiv:1910.02054): 0 nothing, 1 the optimizer's state, 2 also
    /// gradients, 3 also weights.
    pub fn stage(&self) -> Result<usize> {
        match self.zero {
            Auto::Auto => Ok(1),
            Auto::Is(stage @ 0..=3) => Ok(stage),
            Auto::Is(stage) => {
                Err(Error::usage(format!("mesh.zero must be between 0 and 3, or \"auto\" (got {stage})"))
                    .hint("set mesh.zero = 1, or 3 to shard weights too"))
            }
        }
    }
}

/// Parses `0..8` as a range that is not empty.
fn parse_ranks(text: &str) -> Option<Range<usize>> {
    let (start, end) = text.split_once("..")?;
    let (start, end) = (start.trim().parse().ok()?, end.trim().parse().ok()?);
    (start < end && end <= RANKS_MAX).then_some(start..end)
}

/// The size of an axis; none if it is `"auto"`.
pub(super) fn size(key: &str, axis: Auto) -> Result<Option<usize>> {
    match axis {
        Auto::Auto => Ok(None),
        Auto::Is(n @ 1..=RANKS_MAX) => Ok(Some(n)),
        Auto::Is(n) => Err(Error::usage(format!("{key} must be between 1 and {RANKS_MAX}, or \"auto\" (got {n})"))
            .hint(format!("set {key} = 1"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> MeshConfig {
        toml::from_str(text).expect("parses")
    }

    #[test]
    fn placements_cover_each_rank_once_and_the_actor_gets_the_first_ranks() {
        let placements = |text: &str| parse(&format!("placement = [{text}]")).placements(16);
        let all = parse("").placements(3).expect("everything everywhere");
        assert_eq!(all, [Placement { roles: RoleName::ALL.to_vec(), ranks: 0..3 }]);
        let actor = "{ roles = [\"actor\", \"reference\"], ranks = \"0..8\" }";
        let critic = |ranks: &str| format!("{{ roles = [\"critic\", \"reward\"], ranks = \"{ranks}\" }}");
        let two = placements(&format!("{}, {actor}", critic("8..16"))).expect("disjoint ranges");
        assert_eq!(two[0].ranks, 0..8);
        assert_eq!(two[1], Placement { roles: vec![RoleName::Critic, RoleName::Reward], ranks: 8..16 });
        for (ranks, message) in [
            ("8..15", "covers 15 ranks, but mpirun started 16"),
            ("7..16", "rank 7 is in two"),
            ("9..16", "rank 8 is in no range"),
            ("8-16", "must be a range of ranks"),
            ("16..8", "must be a range of ranks"),
        ] {
            let error = placements(&format!("{actor}, {}", critic(ranks))).expect_err(ranks);
            assert!(error.message.contains(message), "{error}");
        }
        let error = placements(&format!("{actor}, {{ roles = [\"actor\"], ranks = \"8..16\" }}")).expect_err("twice");
        assert!(error.message.contains("actor twice"), "{error}");
        assert!(placements(&critic("0..16")).expect_err("no actor").message.contains("the actor on rank 0"));
    }
}
