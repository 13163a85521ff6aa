//! `[mesh]`: how the ranks of the world are arranged.

use crate::error::{Error, Result};
use crate::mesh::Mesh;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number, or `"auto"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Auto {
    #[default]
    Auto,
    Is(usize),
}

impl Serialize for Auto {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Is(n) => serializer.serialize_u64(*n as u64),
        }
    }
}

impl<'de> Deserialize<'de> for Auto {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Auto;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("\"auto\" or a whole number")
            }
            fn visit_i64<E: serde::de::Error>(self, n: i64) -> std::result::Result<Auto, E> {
                usize::try_from(n).map(Auto::Is).map_err(|_| E::invalid_value(serde::de::Unexpected::Signed(n), &self))
            }
            fn visit_u64<E: serde::de::Error>(self, n: u64) -> std::result::Result<Auto, E> {
                Ok(Auto::Is(n as usize))
            }
            fn visit_str<E: serde::de::Error>(self, s: &str) -> std::result::Result<Auto, E> {
                if s == "auto" { Ok(Auto::Auto) } else { Err(E::invalid_value(serde::de::Unexpected::Str(s), &self)) }
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// What may wait outside of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// AdamW's moments and master weights, between updates.
    Optimizer,
    /// Weights of models that are not trained (reference, reward), between their forwards.
    Roles,
}

/// A part that a model plays, or the reward functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoleName {
    Actor,
    Critic,
    Reference,
    Reward,
}

/// Some roles on some ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    pub roles: Vec<RoleName>,
    /// World ranks `"from..to"`, the end excluded.
    pub ranks: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MeshConfig {
    /// Ranks that hold copies of the model and share the batch; auto: all that the other axes leave.
    pub data: Auto,
    /// Stages that the layers are cut into. Only 1 so far.
    pub pipeline: Auto,
    /// Ranks that share each sequence: ring attention, arXiv:2310.01889.
    pub sequence: Auto,
    /// Ranks that share each matrix, arXiv:1909.08053; auto: the fewest with which the job fits.
    pub tensor: Auto,
    /// What is sharded over data x sequence (ZeRO, arXiv:1910.02054): 0 nothing, 1 the optimizer's state, 2 gradients too,
    /// 3 weights too; auto: the lowest from 1 up with which the job fits.
    pub zero: Auto,
    /// Roles on rank ranges of their own that work at the same time; empty: every role on every rank.
    pub placement: Vec<Placement>,
    /// What waits outside of device memory while it is not needed: optimizer, roles. On a CPU: in memory-mapped files
    /// under job.dir.
    pub offload: Vec<Offload>,
    /// Bytes that tensors of one rank may take. 0: no limit but the machine's.
    pub arena_bytes_max: u64,
    /// Seconds that a rank waits in one collective before the job is ended with the names of those who wait; 0: forever.
    pub collective_timeout_s: f64,
}

impl Default for MeshConfig {
    fn default() -> Self {
        Self {
            data: Auto::Auto,
            pipeline: Auto::Is(1),
            sequence: Auto::Is(1),
            tensor: Auto::Auto,
            zero: Auto::Auto,
            placement: Vec::new(),
            offload: Vec::new(),
            arena_bytes_max: 0,
            collective_timeout_s: 600.0,
        }
    }
}

impl MeshConfig {
    /// The mesh on `world` ranks.
    ///
    /// # Errors
    /// `Usage` if an axis is not built yet, or if the product of the axes is not `world`.
    pub fn resolve(&self, world: usize) -> Result<Mesh> {
        for (key, axis) in [("pipeline", self.pipeline), ("sequence", self.sequence), ("tensor", self.tensor)] {
            if !matches!(axis, Auto::Auto | Auto::Is(1)) {
                let Auto::Is(n) = axis else { unreachable!("auto is matched above") };
                return Err(Error::usage(format!("mesh.{key} = {n}, but this version shards over the data axis only"))
                    .hint(format!("set mesh.{key} = 1")));
            }
        }
        if let Auto::Is(stage @ (0 | 2..)) = self.zero {
            return Err(Error::usage(format!(
                "mesh.zero = {stage}, but this version shards the optimizer's state (stage 1)"
            ))
            .hint("set mesh.zero = 1"));
        }
        if !(self.collective_timeout_s >= 0.0 && self.collective_timeout_s.is_finite()) {
            return Err(Error::usage(format!("mesh.collective_timeout_s = {} is no time", self.collective_timeout_s))
                .hint("0 means no limit"));
        }
        let mesh = Mesh::data_only(if let Auto::Is(n) = self.data { n } else { world });
        mesh.check(world)?;
        Ok(mesh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_that_do_not_fit_or_do_not_exist_yet_are_refused_by_name() {
        let parse = |text: &str| toml::from_str::<MeshConfig>(text);
        let mesh = |text: &str, world| parse(text).expect("parses").resolve(world);
        assert_eq!(mesh("", 3), Ok(Mesh::data_only(3)));
        assert_eq!(mesh("data = 2\ntensor = 1", 2), Ok(Mesh::data_only(2)));
        let error = mesh("data = 4", 2).expect_err("4 is not 2").to_string();
        assert!(error.contains("needs 4 ranks, mpirun started 2"), "{error}");
        assert!(mesh("tensor = 8", 8).expect_err("not yet").message.contains("mesh.tensor = 8"));
        assert!(mesh("zero = 3", 1).expect_err("not yet").message.contains("mesh.zero = 3"));
        assert!(mesh("zero = 0", 1).expect_err("not built").message.contains("mesh.zero = 0"));
        assert!(mesh("data = 0", 1).is_err());
        for bad in ["data = \"all\"", "data = -1", "data = 1.5", "tenser = 1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_mesh_table_survives_being_written_and_read() {
        let config = MeshConfig { data: Auto::Is(4), ..MeshConfig::default() };
        let text = toml::to_string(&config).expect("serialises");
        assert_eq!(toml::from_str::<MeshConfig>(&text).expect("parses"), config);
    }
}
