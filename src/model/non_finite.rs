//! Finds the origin of a value that is not finite by computing a forward again.

use super::arch::Head;
use super::transformer::{Keys, Saved, Transformer};
use super::weights::Weights;
use crate::config::job::Recompute;
use crate::pictures::Picture;
use crate::tensor::Tensor;

/// Packed rows for a forward, and the tokens that go through the head.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    pub tokens: &'a [u32],
    pub positions: &'a [u32],
    pub pictures: &'a [Picture],
    pub cu_seqlens: &'a [usize],
    /// Rows of the hidden state, and the token that each predicts.
    pub rows: &'a [u32],
    pub targets: &'a [u32],
}

impl Weights {
    /// Describes the first of this rank's weights that is not finite.
    pub fn not_finite(&self) -> Option<String> {
        (0..self.table.units().len()).find_map(|unit| {
            let range = self.local(unit).range();
            let values = self.to_master(range.clone());
            let at = first(&values)?;
            Some(format!("a weight of {} is {}", self.table.name_at(range.start + at), values[at]))
        })
    }
}

impl Transformer {
    /// Describes the first result of a forward that is not finite. It names an operation or, with `recompute`, which
    /// keeps less, a layer. Computes the forward for this. All ranks that share matrices, units or rows call this.
    pub fn not_finite(&self, w: &Weights, of: Rows, recompute: impl Into<Recompute>) -> Option<String> {
        let recompute = recompute.into();
        let chunks: Vec<_> =
            (0..self.stage.chunks.len()).map(|chunk| self.chunk_not_finite(w, chunk, of, recompute)).collect();
        chunks.into_iter().flatten().next()
    }

    fn chunk_not_finite(&self, w: &Weights, chunk: usize, of: Rows, recompute: Recompute) -> Option<String> {
        let mut saved = Saved::new(recompute);
        let keys = Keys::Packed(of.cu_seqlens.into());
        let rows = [of.tokens, of.positions];
        let hidden = self.forward_stage(w, chunk, of.pictures, rows, keys, Some(&mut saved));
        let answers = hidden.as_ref().map_or(Vec::new(), |hidden| match w.table.head() {
            Head::LanguageModel => self.logprobs(w, hidden, of.rows, of.targets, 1.0, false).0,
            Head::Value => self.values(w, hidden, of.rows),
        });
        w.release();
        let (results, last) = saved.results(self.stage.chunks[chunk].start);
        let inner = results.into_iter().find_map(|(what, result)| row(result).map(|row| format!("{what}, row {row}")));
        let outer = || {
            last.and_then(row)
                .map(|row| format!("the output of the last layer, row {row}"))
                .or_else(|| hidden.as_ref().and_then(row).map(|row| format!("the final norm, row {row}")))
                .or_else(|| first(&answers).map(|i| format!("the head, row {}", of.rows[i])))
        };
        inner.or_else(outer)
    }
}

/// The index of the first value that is not finite.
pub fn first(values: &[f32]) -> Option<usize> {
    values.iter().position(|x| !x.is_finite())
}

fn row(of: &Tensor) -> Option<usize> {
    first(&of.to_host()).map(|at| at / of.width().max(1))
}
