//! World = data x pipeline x sequence x tensor, tensor fastest.

use crate::error::{Error, Result};

/// The arrangement of the ranks. Axes of size one are legal everywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    pub data: usize,
    pub pipeline: usize,
    pub sequence: usize,
    pub tensor: usize,
}

impl Mesh {
    /// A mesh whose only axis is data.
    pub fn data_only(data: usize) -> Self {
        Self { data, pipeline: 1, sequence: 1, tensor: 1 }
    }

    pub fn ranks(&self) -> usize {
        self.data * self.pipeline * self.sequence * self.tensor
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
        let axes = [("tensor", self.tensor), ("sequence", self.sequence), ("data", self.data)];
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
        )
    }
}
