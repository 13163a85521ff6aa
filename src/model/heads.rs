//! Results of the hidden state: logits, log-probabilities and values. Only the requested rows go through a head.

use super::arch::Head;
use super::transformer::Transformer;
use super::weights::{Gradients, Unit, Weights};
use crate::ops::linear_divergence::{self, Divergence, Divergences};
use crate::ops::linear_logprob::{self, Extra, HeadPart, Targets, TokenLoss};
use crate::ops::matmul;
use crate::ops::{rows as picked, softcap, value_head};
use crate::tensor::{Flat, Indices, Tensor, Weight, WeightMut};

/// A teacher for some tokens: a model with the same vocabulary on the same ranks, its hidden states, and its weight.
pub struct Teacher<'a> {
    model: &'a Transformer,
    weights: &'a Weights,
    h: Tensor,
    weight: f32,
}

/// Teachers, and how a student is compared with them.
pub struct DistillTargets<'a> {
    pub teachers: Vec<Teacher<'a>>,
    pub divergence: Divergence,
    pub temperature: f32,
}

impl DistillTargets<'_> {
    /// Calls `work` with the heads of all teachers.
    fn with_teachers<R>(&self, work: impl FnOnce(linear_divergence::Teachers) -> R) -> R {
        let units: Vec<Unit> = self.teachers.iter().map(|teacher| teacher.model.head_unit(teacher.weights)).collect();
        let all: Vec<linear_divergence::Teacher> = self
            .teachers
            .iter()
            .zip(&units)
            .map(|(Teacher { model, h, weight, .. }, unit)| linear_divergence::Teacher {
                h,
                w: unit.weight(model.head),
                softcap: model.arch.logit_softcap,
                weight: *weight,
            })
            .collect();
        work(linear_divergence::Teachers { all: &all, divergence: self.divergence, temperature: self.temperature })
    }
}

impl Transformer {
    fn head_unit<'a>(&self, w: &'a Weights) -> Unit<'a> {
        w.unit(w.table.unit_of(self.head))
    }

    /// The logits of this rank's part of the vocabulary, for `sample`.
    pub fn logits_part(&self, w: &Weights, hidden: &Tensor, rows: &[u32]) -> Tensor {
        self.logits_of(w, &gather(hidden, rows))
    }

    /// The same for all rows of `h`.
    pub(super) fn logits_of(&self, w: &Weights, h: &Tensor) -> Tensor {
        check_head(w, Head::LanguageModel);
        let unit = self.head_unit(w);
        let head = unit.weight(self.head);
        // f32 on every device: sampling and scoring use the same logits.
        let mut logits = h.statistics(h.rows(), head.n);
        matmul::forward(h, head, None, &mut logits, matmul::Into::Overwrite);
        softcap::forward(self.arch.logit_softcap, &mut logits);
        logits
    }

    /// Returns, at `temperature`, the log-probability of `targets[i]` after row `rows[i]`, and the entropy there if
    /// requested.
    pub fn logprobs<'a>(
        &self,
        w: &Weights,
        hidden: &Tensor,
        rows: &[u32],
        targets: impl Into<Targets<'a>>,
        temperature: f32,
        entropy: bool,
    ) -> (Vec<f32>, Vec<f32>) {
        let kind = if entropy { Extra::Entropy } else { Extra::Nothing };
        let mut logprobs = self.logprobs_on_device(w, hidden, rows, targets, temperature, kind).later().into_values();
        let entropies = logprobs.split_off(rows.len());
        (logprobs, entropies)
    }

    /// The same on the device of `hidden`. The values of `kind` follow the log-probabilities.
    pub fn logprobs_on_device<'a>(
        &self,
        w: &Weights,
        hidden: &Tensor,
        rows: &[u32],
        targets: impl Into<Targets<'a>>,
        temperature: f32,
        kind: Extra,
    ) -> Flat {
        let targets = targets.into();
        let h = self.states(w, hidden, rows, targets.tokens);
        let len = if kind == Extra::Nothing { rows.len() } else { 2 * rows.len() };
        let mut scored = Flat::scratch(hidden.device(), len);
        let mut both = scored.slice_mut(0..len);
        let (logprobs, extra) = both.split_at(rows.len());
        let unit = self.head_unit(w);
        let head = unit.weight(self.head);
        self.with_head_part(|part| {
            linear_logprob::forward_part(&h, head, part, targets, temperature, logprobs, kind, extra, None);
        });
        scored
    }

    /// Forward and backward through the head in one pass. Computes log-probabilities and entropies of the rows, calls
    /// their `loss`, and adds the head's gradient. Returns (dhidden (t, d), log-probabilities, entropies).
    pub fn logprobs_backward<'a>(
        &self,
        w: &Weights,
        hidden: &Tensor,
        rows: &[u32],
        targets: impl Into<Targets<'a>>,
        temperature: f32,
        loss: &mut TokenLoss,
        grads: &mut Gradients,
    ) -> (Tensor, Vec<f32>, Vec<f32>) {
        let targets = targets.into();
        let h = self.states(w, hidden, rows, targets.tokens);
        let (mut logprobs, mut entropy) = (vec![0.0; rows.len()], vec![0.0; rows.len()]);
        let dhidden = self.through_head(w, &h, rows, hidden.rows(), grads, |head, part, dh, dw| {
            let (l, e) = (&mut logprobs, &mut entropy);
            linear_logprob::forward_backward_part(&h, head, part, targets, temperature, loss, None, l, e, dh, dw);
        });
        (dhidden, logprobs, entropy)
    }

    /// This model as a teacher for the tokens after `rows`.
    pub fn teacher<'a>(&'a self, w: &'a Weights, hidden: &Tensor, rows: &[u32], weight: f32) -> Teacher<'a> {
        check_head(w, Head::LanguageModel);
        Teacher { model: self, weights: w, h: gather(hidden, rows), weight }
    }

    /// The divergences of the distributions after `rows` from the teachers', and the log-probabilities of `targets`.
    pub fn divergences(
        &self,
        w: &Weights,
        hidden: &Tensor,
        rows: &[u32],
        targets: &[u32],
        distill_targets: &DistillTargets,
    ) -> (Divergences, Vec<f32>) {
        let (h, unit) = (self.states(w, hidden, rows, targets), self.head_unit(w));
        let mut logprobs = vec![0.0; rows.len()];
        let mut found = Divergences::default();
        self.with_head_part(|part| {
            let head = unit.weight(self.head);
            found = distill_targets
                .with_teachers(|all| linear_divergence::forward(&h, head, part, targets, all, &mut logprobs));
        });
        (found, logprobs)
    }

    /// The same in one pass with the gradient of sum_t (ce (-log-probability) + scale divergence), `weights` = [ce,
    /// scale]. Adds the head's gradient, and returns the gradient of hidden (t, d) first.
    pub fn divergences_backward(
        &self,
        w: &Weights,
        hidden: &Tensor,
        rows: &[u32],
        targets: &[u32],
        distill_targets: &DistillTargets,
        weights: [f32; 2],
        grads: &mut Gradients,
    ) -> (Tensor, Divergences, Vec<f32>) {
        let h = self.states(w, hidden, rows, targets);
        let (mut logprobs, mut found) = (vec![0.0; rows.len()], Divergences::default());
        let dhidden = self.through_head(w, &h, rows, hidden.rows(), grads, |head, part, dh, dw| {
            let l = &mut logprobs;
            found = distill_targets.with_teachers(|all| {
                linear_divergence::forward_backward(&h, head, part, targets, all, weights, l, dh, dw)
            });
        });
        (dhidden, found, logprobs)
    }

    /// A backward through the head from the states `h` of `rows`. `body` fills their gradient and adds that of a head that trains.
    /// Returns dhidden (t, d).
    fn through_head(
        &self,
        w: &Weights,
        h: &Tensor,
        rows: &[u32],
        t: usize,
        grads: &mut Gradients,
        body: impl FnOnce(Weight, HeadPart, &mut Tensor, Option<WeightMut>),
    ) -> Tensor {
        let mut dh = h.like(h.rows(), h.width());
        let unit = w.table.unit_of(self.head);
        grads.begin(unit);
        let values = w.unit(unit);
        self.prefetch_backward(w);
        self.with_head_part(|part| {
            let dw = (!self.head.is_frozen).then(|| grads.weight_mut(self.head));
            body(values.weight(self.head), part, &mut dh, dw);
        });
        grads.finish(unit);
        self.tensor.sum_slice(dh.slice_mut());
        scatter(&dh, rows, t)
    }

    /// The value (or reward) at each of `rows`.
    pub fn values(&self, w: &Weights, hidden: &Tensor, rows: &[u32]) -> Vec<f32> {
        self.values_on_device(w, hidden, rows).later().into_values()
    }

    /// The same on the device of `hidden`.
    pub fn values_on_device(&self, w: &Weights, hidden: &Tensor, rows: &[u32]) -> Flat {
        check_head(w, Head::Value);
        let mut values = Flat::scratch(hidden.device(), rows.len());
        let head = self.head_unit(w);
        value_head::forward(&gather(hidden, rows), head.vector(self.head), values.slice_mut(0..rows.len()));
        values
    }

    /// Adds the value head's gradient; returns dhidden (t, d).
    pub fn values_backward(
        &self,
        w: &Weights,
        hidden: &Tensor,
        rows: &[u32],
        dvalues: &[f32],
        grads: &mut Gradients,
    ) -> Tensor {
        check_head(w, Head::Value);
        assert_eq!(rows.len(), dvalues.len(), "a gradient for each row");
        let h = gather(hidden, rows);
        let mut dh = h.like(h.rows(), h.width());
        let unit = w.table.unit_of(self.head);
        grads.begin(unit);
        let dw = grads.vector_mut(self.head);
        let values = w.unit(unit);
        self.prefetch_backward(w);
        value_head::backward(&h, values.vector(self.head), dvalues, &mut dh, dw);
        grads.finish(unit);
        scatter(&dh, rows, hidden.rows())
    }

    /// The hidden states from which a language-model head predicts these targets.
    fn states(&self, w: &Weights, hidden: &Tensor, rows: &[u32], targets: &[u32]) -> Tensor {
        check_head(w, Head::LanguageModel);
        assert_eq!(rows.len(), targets.len(), "a target for each row");
        let v = self.arch.vocabulary;
        if let Some(target) = targets.iter().find(|&&target| target as usize >= v) {
            panic!("target {target} is outside the vocabulary of {v}");
        }
        gather(hidden, rows)
    }
}

fn check_head(w: &Weights, needed: Head) {
    assert_eq!(w.table.head(), needed, "the weights have another head");
}

/// The rows `rows` of x.
fn gather(x: &Tensor, rows: &[u32]) -> Tensor {
    let mut y = x.like(rows.len(), x.width());
    picked::gather(x, &Indices::on(x.device(), rows), &mut y);
    y
}

/// The transpose of `gather`: a tensor of `t` rows, in which each row of `rows` sums its gradients and the others are
/// zero.
fn scatter(dy: &Tensor, rows: &[u32], t: usize) -> Tensor {
    let mut dx = dy.zeros_like(t, dy.width());
    picked::scatter(dy, rows, &mut dx);
    dx
}
