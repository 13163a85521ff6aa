//! World = data x pipeline x sequence x tensor, tensor fastest.

use crate::error::{Error, Result};

/// The arrangement of the ranks. Axes of size one are legal everywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    pub data: usize,
    pub pipeline: usize,
    pub sequence: usize,
    pub tensor: usize,
    /// Neighbours among the data x sequence ranks that divide the experts of a layer. It adds no ranks.
    pub expert: usize,
}

impl Mesh {
    /// A mesh whose only axis is data.
    pub fn data_only(data: usize) -> Self {
        Self { data, pipeline: 1, sequence: 1, tensor: 1, expert: 1 }
    }

    pub fn ranks(&self) -> usize {
        self.data * self.pipeline * self.sequence * self.tensor
    }

    /// Rejects an expert axis that does not divide the data x sequence ranks.
    ///
    /// # Errors
    /// `Usage`.
    pub fn check_expert(&self) -> Result<()> {
        let ranks = self.data * self.sequence;
        if ranks.is_multiple_of(self.expert) {
            return Ok(());
        }
        let message = format!("mesh.expert = {} does not divide the {ranks} ranks of data x sequence", self.expert);
        Err(Error::usage(message).hint(format!("set mesh.expert to a divisor of {ranks}")))
    }

    /// Rejects a number of ranks that is not the product of the axes.
    ///
    /// # Errors
    /// `Usage`, naming the axes, the ranks they need and the ranks that were started.
    pub fn check(&self, world: usize) -> Result<()> {
        if self.ranks() == world {
            return Ok(());
        }
        // The hint changes the innermost axis that makes the product fit. Data ranks cost the least to change.
        let axes =
            [("tensor", self.tensor), ("sequence", self.sequence), ("pipeline", self.pipeline), ("data", self.data)];
        let fitting = |&(key, size): &(&'static str, usize)| {
            let rest = self.ranks() / size.max(1);
            let fits = (size > 1 || key == "data") && rest > 0 && world.is_multiple_of(rest);
            fits.then(|| format!("set mesh.{key} = {}, or run with -n {}", world / rest, self.ranks()))
        };
        let hint = axes.iter().find_map(fitting).unwrap_or_else(|| format!("run with -n {}", self.ranks()));
        Err(Error::usage(format!("mesh {self} needs {} ranks, but mpirun started {world}", self.ranks())).hint(hint))
    }
}

impl std::fmt::Display for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} data x {} pipeline x {} sequence x {} tensor",
            self.data, self.pipeline, self.sequence, self.tensor
        )?;
        if self.expert > 1 { write!(f, ", experts over {}", self.expert) } else { Ok(()) }
    }
}
