//! A pass of a packed row through a model: forward, head with its loss, backward.

use super::packed::PackedRow;
use super::role::Role;
use super::routing::RouterLoss;
use crate::config::job::Recompute;
use crate::model::{DistillTargets, Gradients, Head, Saved, Teacher, Transformer, Weights};
use crate::ops::linear_divergence::Divergences;
use crate::ops::linear_logprob::{Extra, TokenLoss};
use crate::sys::trace::{self, Category};
use crate::tensor::{Flat, Tensor};

/// A span of a part of a pass of `row`.
fn pass_span(name: &'static str, row: &PackedRow) -> trace::Open {
    let sizes = || [row.tokens.len(), row.cu_seqlens.len().saturating_sub(1)];
    trace::span(Category::Pass, name, "tokens sequences", sizes)
}

/// A forward and backward that adds its gradient to `grads`.
pub struct Pass<'a> {
    pub(super) role: &'a Role,
    pub(super) row: &'a PackedRow,
    pub(super) saved: Saved,
    pub(super) grads: &'a mut Gradients,
    pub(super) router_loss: RouterLoss,
}

impl Pass<'_> {
    /// Runs the forward, then `head`, then the backward. Returns the result of `head`.
    ///
    /// # Panics
    /// If `head` calls none of the functions of [`HeadPass`] that compute a gradient.
    pub fn run<R>(self, head: impl FnOnce(&mut HeadPass) -> R) -> R {
        let Pass { role, row, mut saved, grads, router_loss } = self;
        let Role { transformer: model, weights, .. } = role;
        let PackedRow { pictures, tokens, positions, .. } = row;
        let forward = || model.forward_seeing(weights, pictures, tokens, positions, row.keys(), Some(&mut saved));
        let span = pass_span("forward", row);
        let (hidden, experts) = model.routers.traced(|| model.routers.counted(forward));
        // A stage knows the experts of its layers alone.
        let experts = if model.is_whole() { experts } else { Vec::new() };
        drop(span);
        let mut pass = HeadPass { model, weights, row, hidden, experts, grads: Some(grads), dhidden: None };
        let span = pass_span("head and loss", row);
        let found = head(&mut pass);
        drop(span);
        let dhidden = pass.dhidden.expect("a head with a gradient");
        let grads = pass.grads.expect("set above");
        let _span = pass_span("backward", row);
        let backward = || model.backward(weights, saved, &row.cu_seqlens, dhidden, grads);
        model.routers.with_slope(router_loss.slope(role), backward);
        found
    }
}

/// The forward of a chunk without the head, for `backward_stage`.
pub(super) fn forward_stage(role: &Role, chunk: usize, row: &PackedRow, recompute: Recompute) -> Saved {
    let Role { transformer: model, weights, .. } = role;
    let mut saved = Saved::new(recompute);
    let PackedRow { pictures, tokens, positions, .. } = row;
    let _span = pass_span("forward", row);
    let rows = [&tokens[..], &positions[..]];
    let forward = || model.forward_stage(weights, chunk, pictures, rows, row.keys(), Some(&mut saved));
    model.routers.counted(forward);
    saved
}

/// The backward of a chunk without the head. Adds its gradient to `grads`.
pub(super) fn backward_stage(
    role: &Role,
    row: &PackedRow,
    saved: Saved,
    router_loss: &RouterLoss,
    grads: &mut Gradients,
) {
    let Role { transformer: model, weights, .. } = role;
    let _span = pass_span("backward", row);
    let backward = || model.backward_stage(weights, saved, &row.cu_seqlens, grads);
    model.routers.with_slope(router_loss.slope(role), backward);
}

/// A forward of a chunk without a backward or a head, on any stage.
pub fn relay(role: &Role, chunk: usize, row: &PackedRow) {
    let Role { transformer: model, weights, .. } = role;
    let _span = pass_span("forward", row);
    let PackedRow { pictures, tokens, positions, .. } = row;
    drop(model.forward_stage(weights, chunk, pictures, [tokens, positions], row.keys(), None));
}

/// The hidden states of a packed row, with the head that follows them. Results are those of the tokens that the row
/// predicts (`PackedRow::rows`), in order.
pub struct HeadPass<'a> {
    model: &'a Transformer,
    weights: &'a Weights,
    row: &'a PackedRow,
    /// (tokens, d)
    hidden: Tensor,
    /// A hash of the experts of each token, if the model has experts.
    experts: Vec<u32>,
    /// `None` in a forward without a backward.
    grads: Option<&'a mut Gradients>,
    /// The gradient of `hidden`, after the head's backward.
    dhidden: Option<Tensor>,
}

impl<'a> HeadPass<'a> {
    /// Runs a forward without a backward, on the last stage.
    pub fn forward(role: &'a Role, row: &'a PackedRow) -> Self {
        let Role { transformer: model, weights, .. } = role;
        let _span = pass_span("forward", row);
        let PackedRow { pictures, tokens, positions, .. } = row;
        let hidden = model.forward_seeing(weights, pictures, tokens, positions, row.keys(), None);
        Self { model, weights, row, hidden, experts: Vec::new(), grads: None, dhidden: None }
    }

    /// A hash of the experts of each token before a predicted one, if the model has experts. Not in a forward without a
    /// backward.
    pub fn experts(&self) -> Vec<u32> {
        let of_rows = self.row.rows.iter().filter(|_| !self.experts.is_empty());
        of_rows.map(|row| self.experts[*row as usize]).collect()
    }

    /// Log-probabilities of the predicted tokens at `temperature`.
    pub fn logprobs(&self, temperature: f32) -> Vec<f32> {
        self.logprobs_on_device(temperature, Extra::Nothing).later().into_values()
    }

    /// Log-probabilities, and the entropies of the distributions.
    pub fn logprobs_and_entropies(&self, temperature: f32) -> (Vec<f32>, Vec<f32>) {
        let mut logprobs = self.logprobs_on_device(temperature, Extra::Entropy).later().into_values();
        let entropies = logprobs.split_off(self.row.rows.len());
        (logprobs, entropies)
    }

    /// Log-probabilities on the model's device, followed by the values of `extra`.
    pub fn logprobs_on_device(&self, temperature: f32, extra: Extra) -> Flat {
        let PackedRow { rows, .. } = self.row;
        self.model.logprobs_on_device(self.weights, &self.hidden, rows, self.row.targets(), temperature, extra)
    }

    /// Values of the value head.
    pub fn values(&self) -> Vec<f32> {
        self.values_on_device().later().into_values()
    }

    pub fn values_on_device(&self) -> Flat {
        self.model.values_on_device(self.weights, &self.hidden, &self.row.rows)
    }

    /// The head's output for each predicted token: a log-probability, or a value.
    pub fn outputs(&self) -> Vec<f32> {
        match self.weights.table.head() {
            Head::LanguageModel => self.logprobs(1.0),
            Head::Value => self.values(),
        }
    }

    /// The distributions after the predicted tokens as those of a teacher with this weight.
    pub fn teacher(&self, weight: f32) -> Teacher<'a> {
        self.model.teacher(self.weights, &self.hidden, &self.row.rows, weight)
    }

    /// Divergences from the distributions of teachers, and log-probabilities of the predicted tokens.
    pub fn divergences(&self, targets: &DistillTargets) -> (Divergences, Vec<f32>) {
        self.model.divergences(self.weights, &self.hidden, &self.row.rows, &self.row.targets, targets)
    }

    /// Computes log-probabilities and entropies, calls `loss` for their derivatives, and runs the head's backward.
    /// Returns the log-probabilities.
    pub fn token_loss(&mut self, temperature: f32, loss: &mut TokenLoss) -> Vec<f32> {
        let (grads, targets) = (self.grads.as_mut().expect("a pass with a backward"), self.row.targets());
        let (dhidden, logprobs, _) =
            self.model.logprobs_backward(self.weights, &self.hidden, &self.row.rows, targets, temperature, loss, grads);
        self.dhidden = Some(dhidden);
        logprobs
    }

    /// Runs the head's backward from the derivatives of the loss by each of `outputs`.
    pub fn backward(&mut self, derivatives: &[f32]) {
        match self.weights.table.head() {
            Head::LanguageModel => {
                self.token_loss(1.0, &mut |range, _, _, dlogprobs, _| dlogprobs.copy_from_slice(&derivatives[range]));
            }
            Head::Value => {
                let grads = self.grads.as_mut().expect("a pass with a backward");
                let rows = &self.row.rows;
                self.dhidden = Some(self.model.values_backward(self.weights, &self.hidden, rows, derivatives, grads));
            }
        }
    }

    /// `divergences`, and the head's backward of sum_t (ce (-log-probability) + scale divergence), `weights` = [ce,
    /// scale].
    pub fn divergence_loss(&mut self, targets: &DistillTargets, weights: [f32; 2]) -> (Divergences, Vec<f32>) {
        let grads = self.grads.as_mut().expect("a pass with a backward");
        let PackedRow { rows, targets: tokens, .. } = self.row;
        let (dhidden, found, logprobs) =
            self.model.divergences_backward(self.weights, &self.hidden, rows, tokens, targets, weights, grads);
        self.dhidden = Some(dhidden);
        (found, logprobs)
    }
}
