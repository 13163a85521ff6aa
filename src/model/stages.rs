//! The stages of a pipeline: each is some layers in a row, or several chunks of layers. The embedding belongs to the
//! first, the final norm and the head to the last. Chunk c of stage i of p is part c p + i of the model.

use super::arch::Arch;
use super::layer_units::LayerUnits;
use super::params::ParamTable;
use crate::comm::{Axes, Links};
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// Where the values of a unit are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Here,
    /// Here too: the tied embedding, which the first stage counts and saves.
    Copy,
    /// On another stage.
    Away,
}

impl Arch {
    /// Rejects more parts (stages, or their chunks) than layers.
    ///
    /// # Errors
    /// `Usage`.
    pub fn check_pipeline(&self, parts: usize) -> Result<()> {
        let layers = self.blocks.len();
        if parts <= layers {
            return Ok(());
        }
        Err(Error::usage(format!(
            "mesh.pipeline x mesh.pipeline_chunks must be at most the {layers} layers of the model (got {parts})"
        ))
        .hint("lower mesh.pipeline or mesh.pipeline_chunks"))
    }
}

impl ParamTable {
    /// The layers of each of `count` parts of the model: of nearly equal cost, the head's included.
    ///
    /// # Panics
    /// If there are fewer layers than parts.
    pub fn parts_of_layers(&self, count: usize) -> Vec<Range<usize>> {
        let LayerUnits { layers, head, .. } = self.layer_units();
        cut(&layers.iter().map(|(_, cost)| *cost).collect::<Vec<_>>(), *head, count)
    }

    /// The layers of each chunk of stage `rank` of `size`.
    pub fn chunks_of_layers(&self, rank: usize, size: usize, chunks: usize) -> Vec<Range<usize>> {
        self.parts_of_layers(size * chunks).into_iter().skip(rank).step_by(size).collect()
    }

    /// Where each unit is, for stage `rank` of `size`, each with `chunks` chunks.
    pub fn places(&self, rank: usize, size: usize, chunks: usize) -> Vec<Place> {
        let count = self.units().len();
        if size == 1 {
            return vec![Place::Here; count];
        }
        let own = self.chunks_of_layers(rank, size, chunks);
        let LayerUnits { layers, is_tied, .. } = self.layer_units();
        let mut places = vec![Place::Away; count];
        own.into_iter().flat_map(|own| &layers[own]).for_each(|(units, _)| places[units.clone()].fill(Place::Here));
        if rank == 0 {
            places[..=self.embedding_unit()].fill(Place::Here);
        }
        if rank + 1 == size {
            places[count - 1] = Place::Here;
            if *is_tied {
                places[self.embedding_unit()] = Place::Copy;
            }
        }
        places
    }

    /// The stage of `size` that counts and saves each unit.
    pub fn stages_of_units(&self, size: usize, chunks: usize) -> Vec<usize> {
        let mut stages = vec![0; self.units().len()];
        for rank in 0..size {
            let own =
                self.places(rank, size, chunks).into_iter().enumerate().filter(|(_, place)| *place == Place::Here);
            own.for_each(|(unit, _)| stages[unit] = rank);
        }
        stages
    }

    /// Whether the head is the embedding.
    pub fn is_tied(&self) -> bool {
        self.layer_units().is_tied
    }
}

/// A rank's stage of a model.
#[derive(Clone, Debug)]
pub(super) struct Stage {
    pub rank: usize,
    pub size: usize,
    /// The layers of each chunk.
    pub chunks: Vec<Range<usize>>,
    pub links: Arc<Links>,
}

impl Stage {
    pub fn new(table: &ParamTable, axes: &Axes) -> Self {
        let (rank, size) = (axes.pipeline.rank(), axes.pipeline.size());
        Self { rank, size, chunks: table.chunks_of_layers(rank, size, axes.chunks), links: axes.links.clone() }
    }

    /// Whether a chunk begins with the embedding.
    pub fn is_first(&self, chunk: usize) -> bool {
        self.rank == 0 && chunk == 0
    }

    /// Whether a chunk ends with the head.
    pub fn is_last(&self, chunk: usize) -> bool {
        self.rank + 1 == self.size && chunk + 1 == self.chunks.len()
    }
}

/// Cuts layers of these costs into `count` ranges whose most expensive one, with `head` added to the last, is as cheap
/// as possible. The first ones are the shortest: they hold the most activations.
fn cut(costs: &[usize], head: usize, count: usize) -> Vec<Range<usize>> {
    assert!((1..=costs.len()).contains(&count), "{count} stages of {} layers", costs.len());
    let cut_below = |limit: usize| {
        let (mut parts, mut end) = (Vec::with_capacity(count), costs.len());
        for left in (0..count).rev() {
            // Each earlier part needs a layer, and the first part takes the rest.
            let (mut start, mut sum) = (end, if left + 1 == count { head } else { 0 });
            while start > left && (start == end || left == 0 || sum + costs[start - 1] <= limit) {
                start -= 1;
                sum += costs[start];
            }
            if sum > limit {
                return None;
            }
            parts.push(start..end);
            end = start;
        }
        parts.reverse();
        Some(parts)
    };
    let most = costs.iter().sum::<usize>() + head;
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = usize::midpoint(low, high);
        if cut_below(middle).is_some() { high = middle } else { low = middle + 1 }
    }
    cut_below(high).expect("the sum of all costs is enough")
}

#[cfg(test)]
mod tests {
    use super::cut;

    #[test]
    fn stages_are_cut_by_cost_and_the_head_counts_as_layers() {
        let lens = |costs: &[usize], head, count| -> Vec<usize> {
            let parts = cut(costs, head, count);
            let ends: Vec<usize> = parts.iter().flat_map(|part| [part.start, part.end]).collect();
            assert!(ends[0] == 0 && ends[ends.len() - 1] == costs.len(), "{parts:?}");
            assert!(ends[1..ends.len() - 1].chunks(2).all(|ends| ends[0] == ends[1]), "{parts:?}");
            parts.iter().map(ExactSizeIterator::len).collect()
        };
        assert_eq!(lens(&[5; 8], 0, 4), [2, 2, 2, 2]);
        // A head of two layers.
        assert_eq!(lens(&[5; 10], 10, 4), [3, 3, 3, 1]);
        // A head of more than a stage leaves the last stage one layer.
        assert_eq!(lens(&[5; 8], 40, 4), [1, 1, 5, 1]);
        assert_eq!(lens(&[5; 7], 0, 4), [1, 2, 2, 2]);
        assert_eq!(lens(&[1, 1, 1, 9], 0, 2), [3, 1]);
        assert_eq!(lens(&[3, 4], 100, 1), [2]);
        assert_eq!(lens(&[3, 4], 100, 2), [1, 1]);
        for count in 1..=6 {
            let costs = [7, 1, 3, 9, 2, 4];
            let most = |parts: &[std::ops::Range<usize>]| {
                let of = |(i, part): (usize, &std::ops::Range<usize>)| {
                    costs[part.clone()].iter().sum::<usize>() + if i + 1 == parts.len() { 5 } else { 0 }
                };
                parts.iter().enumerate().map(of).max().unwrap_or_default()
            };
            // No single move of a border is better.
            let found = cut(&costs, 5, count);
            for border in 1..count {
                for step in [-1isize, 1] {
                    let mut other = found.clone();
                    let at = other[border].start.saturating_add_signed(step);
                    (other[border - 1].end, other[border].start) = (at, at);
                    if other.iter().all(|part| part.start < part.end) {
                        assert!(most(&other) >= most(&found), "{found:?} against {other:?}");
                    }
                }
            }
        }
    }
}
