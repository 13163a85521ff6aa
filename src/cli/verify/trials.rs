//! The cause of a difference to a dump, which has no weights: changes of this model that make its results fit.

use super::compare::{Comparison, compare};
use super::computation::Computation;
use crate::comm::Axes;
use crate::error::Result;
use crate::model::collect::{append_bytes, store_whole};
use crate::model::pack::unpack;
use crate::model::rope::Scaling;
use crate::model::{Arch, Transformer, Weights};

/// The thetas of ropes that models have.
const THETAS: [f64; 14] = [500.0, 1e3, 1e4, 2e4, 5e4, 1e5, 1.5e5, 5e5, 1e6, 1.5e6, 5e6, 8e6, 1e7, 1e8];
/// The largest relative difference of weights of nearby steps of training.
const STALE: f64 = 0.1;

/// A model whose results differ from those of `theirs`.
pub struct Trials<'a> {
    pub model: &'a Transformer,
    pub weights: &'a mut Weights,
    pub ours: &'a Computation,
    pub theirs: &'a Computation,
    pub found: &'a Comparison,
    pub growth: &'a [f64],
}

impl Trials<'_> {
    /// Names the cause, or describes where the difference begins if no trial fits.
    ///
    /// # Errors
    /// The errors of `compare`.
    pub fn causes(&mut self) -> Result<Vec<String>> {
        let Some(first) = self.found.gaps.iter().position(|gap| !gap.is_explained()) else { return Ok(Vec::new()) };
        let last = self.ours.hidden.len();
        if first == 0 {
            return Ok(vec![self.of_embedding()]);
        }
        if first == last {
            return Ok(vec![
                "the head: all hidden states agree, so its matrix, a scale or a cap of logits differs".into(),
            ]);
        }
        if self.spares_token_0()
            && let Some(cause) = self.of_rope(first)?
        {
            return Ok(vec![cause]);
        }
        if let Some(cause) = self.of_transposes(first - 1)? {
            return Ok(vec![cause]);
        }
        let begins = format!(
            "layer {} computes something else; compare its weights with --against MODEL2, the directory that the dump was made of",
            first - 1
        );
        let of_positions =
            "token 0 agrees in all layers and later ones do not: rope, mask or window, or weights of queries or keys";
        Ok(vec![if self.spares_token_0() { format!("{of_positions}; {begins}") } else { begins }])
    }

    /// Whether token 0 agrees in all hidden states. It attends to itself only, and the rope does not turn it.
    fn spares_token_0(&self) -> bool {
        let states = &self.found.gaps[..self.ours.hidden.len()];
        states.iter().all(|gap| gap.rows[0] <= gap.allowed)
    }

    fn of_embedding(&self) -> String {
        let (a, b) = (&self.ours.hidden[0], &self.theirs.hidden[0]);
        let scale = b.iter().zip(a).map(|(b, a)| f64::from(*b) * f64::from(*a)).sum::<f64>()
            / a.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>().max(1e-60);
        let rest: f64 = b.iter().zip(a).map(|(b, a)| (f64::from(*b) - scale * f64::from(*a)).powi(2)).sum();
        let norm: f64 = b.iter().map(|b| f64::from(*b).powi(2)).sum();
        let gap = &self.found.gaps[0];
        if (rest / norm.max(1e-60)).sqrt() <= gap.allowed {
            return format!(
                "the embeddings are {scale:.6} times as large in the dump: the scale of embeddings differs"
            );
        }
        if gap.gap < STALE {
            return format!(
                "stale weights: the embeddings already differ by {:.1e} of their norm; the dump is of another training step",
                gap.gap
            );
        }
        "the embeddings already differ: the dump is of another model".into()
    }

    /// Whether the model with this architecture gives the results of the dump.
    fn fits(&self, arch: &Arch) -> Result<bool> {
        self.agrees(&Transformer::new(arch, &self.weights.table))
    }

    fn agrees(&self, model: &Transformer) -> Result<bool> {
        let trial = Computation::forward("trial", (model, &*self.weights), &Axes::one(), &self.ours.ids);
        Ok(compare(&trial, self.theirs, self.growth)?.first().is_none())
    }

    /// Other thetas, and ropes without scaling.
    fn of_rope(&self, first: usize) -> Result<Option<String>> {
        let arch = &self.model.arch;
        let rows = &self.found.gaps[first].rows;
        let half = rows.len() / 2;
        let mean = |rows: &[f64]| rows.iter().sum::<f64>() / rows.len().max(1) as f64;
        let grows = format!(
            "the differences grow with the position ({:.1e} over the first half of the tokens, {:.1e} over the second)",
            mean(&rows[..half]),
            mean(&rows[half..])
        );
        for theta in THETAS.into_iter().filter(|theta| arch.ropes.iter().any(|rope| rope.theta != *theta)) {
            let mut other = arch.clone();
            other.ropes.iter_mut().for_each(|rope| rope.theta = theta);
            if self.fits(&other)? {
                let ours = arch.ropes[0].theta;
                return Ok(Some(format!("rope_theta: {grows}; ours is {ours}, theirs fits theta {theta}")));
            }
        }
        if arch.ropes.iter().any(|rope| rope.scaling != Scaling::None) {
            let mut other = arch.clone();
            other.ropes.iter_mut().for_each(|rope| rope.scaling = Scaling::None);
            if self.fits(&other)? {
                return Ok(Some(format!("rope_scaling: {grows}; theirs fits a rope without scaling")));
            }
        }
        Ok(None)
    }

    /// Square matrices of a layer, each transposed.
    fn of_transposes(&mut self, layer: usize) -> Result<Option<String>> {
        let table = self.weights.table.clone();
        let of_layer = format!("model.layers.{layer}.");
        for (index, spec) in table.specs().iter().enumerate() {
            let (n, k) = spec.dims();
            if n != k || n == 1 || !spec.name.starts_with(&of_layer) {
                continue;
            }
            let rows = unpack(spec, &self.weights.to_master(spec.range()));
            let transposed: Vec<f32> = (0..n * k).map(|i| rows[i % k * k + i / k]).collect();
            self.store(index, &transposed);
            let fits = self.agrees(self.model);
            self.store(index, &rows);
            if fits? {
                return Ok(Some(format!("{} is transposed: theirs fits its transpose", spec.name)));
            }
        }
        Ok(None)
    }

    fn store(&mut self, index: usize, rows: &[f32]) {
        let mut bytes = Vec::with_capacity(rows.len() * self.weights.dtype().bytes());
        append_bytes(self.weights.dtype(), rows, &mut bytes);
        store_whole(self.weights, index, &bytes);
    }
}
