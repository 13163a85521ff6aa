//! What is read off the hidden state: logits, log-probabilities, values. Only the rows asked for go through a head.

use super::arch::Head;
use super::transformer::Transformer;
use super::weights::{Gradients, Unit, Weights};
use crate::ops::linear_logprob::{self, Extra, TokenLoss};
use crate::ops::matmul::{self, Into};
use crate::ops::{rows as picked, value_head};
use crate::tensor::{Flat, Indices, Tensor};

impl Transformer {
    fn head_unit<'a>(&self, w: &'a Weights) -> Unit<'a> {
        w.unit(w.table.unit_of(self.head))
    }

    /// The logits of the tokens whose rows of the head this rank holds, for `sample`.
    pub fn logits_part(&self, w: &Weights, hidden: &Tensor, rows: &[u32]) -> Tensor {
        self.logits_of(w, &gather(hidden, rows))
    }

    /// The same of all rows of hidden.
    pub(super) fn logits_of(&self, w: &Weights, h: &Tensor) -> Tensor {
        check_head(w, Head::LanguageModel);
        let unit = self.head_unit(w);
        let head = unit.weight(self.head);
        // f32 on every device: what is drawn and what is scored are of the same logits.
        let mut logits = h.statistics(h.rows(), head.n);
        matmul::forward(h, head, None, &mut logits, Into::Overwrite);
        logits
    }

    /// (log-probability of `targets[i]` after row `rows[i]`, entropy there or nothing) at `temperature`.
    pub fn logprobs(
        &self,
        w: &Weights,
        hidden: &Tensor,
        rows: &[u32],
        targets: &[u32],
        temperature: f32,
        entropy: bool,
    ) -> (Vec<f32>, Vec<f32>) {
        let kind = if entropy { Extra::Entropy } else { Extra::Nothing };
        let mut logprobs = self.logprobs_on_device(w, hidden, rows, targets, temperature, kind).later().take();
        let entropies = logprobs.split_off(rows.len());
        (logprobs, entropies)
    }

    /// The same on the device of `hidden`; the values of `kind` follow the log-probabilities.
    pub fn logprobs_on_device(
        &self,
        w: &Weights,
        hidden: &Tensor,
        rows: &[u32],
        targets: &[u32],
        temperature: f32,
        kind: Extra,
    ) -> Flat {
        check_head(w, Head::LanguageModel);
        self.check_targets(rows, targets);
        let len = if kind == Extra::Nothing { rows.len() } else { 2 * rows.len() };
        let mut scored = Flat::scratch(hidden.device(), len);
        let mut both = scored.slice_mut(0..len);
        let (logprobs, extra) = both.split_at(rows.len());
        let unit = self.head_unit(w);
        let head = unit.weight(self.head);
        let h = gather(hidden, rows);
        self.with_head_part(|part| {
            linear_logprob::forward_part(&h, head, part, targets, temperature, logprobs, kind, extra);
        });
        scored
    }

    /// One pass over the head: log-probabilities and entropies of the rows, the `loss` that is local to them, the
    /// head's gradient (added) and the gradient of hidden. Returns (dhidden (t, d), log-probabilities, entropies).
    pub fn logprobs_backward(
        &self,
        w: &Weights,
        hidden: &Tensor,
        rows: &[u32],
        targets: &[u32],
        temperature: f32,
        loss: &mut TokenLoss,
        grads: &mut Gradients,
    ) -> (Tensor, Vec<f32>, Vec<f32>) {
        check_head(w, Head::LanguageModel);
        self.check_targets(rows, targets);
        let h = gather(hidden, rows);
        let mut dh = h.like(h.rows(), h.width());
        let (mut logprobs, mut entropy) = (vec![0.0; rows.len()], vec![0.0; rows.len()]);
        let unit = w.table.unit_of(self.head);
        grads.begin(unit);
        let values = w.unit(unit);
        self.prefetch_backward(w);
        self.with_head_part(|part| {
            let (head, dw) = (values.weight(self.head), grads.weight_mut(self.head));
            let (l, e) = (&mut logprobs, &mut entropy);
            linear_logprob::forward_backward_part(&h, head, part, targets, temperature, loss, l, e, &mut dh, dw);
        });
        grads.finish(unit);
        self.tensor.sum_slice(dh.slice_mut());
        (scatter(&dh, rows, hidden.rows()), logprobs, entropy)
    }

    /// The value (or reward) at each of `rows`.
    pub fn values(&self, w: &Weights, hidden: &Tensor, rows: &[u32]) -> Vec<f32> {
        self.values_on_device(w, hidden, rows).later().take()
    }

    /// The same where hidden lies.
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
}

impl Transformer {
    fn check_targets(&self, rows: &[u32], targets: &[u32]) {
        assert_eq!(rows.len(), targets.len(), "a target for each row");
        let v = self.arch.vocabulary;
        if let Some(target) = targets.iter().find(|&&target| target as usize >= v) {
            panic!("target {target} is outside the vocabulary of {v}");
        }
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

/// The transpose of `gather`: a tensor of `t` rows, zero but for `rows`, which sum what belongs to them.
fn scatter(dy: &Tensor, rows: &[u32], t: usize) -> Tensor {
    let mut dx = dy.zeros_like(t, dy.width());
    picked::scatter(dy, rows, &mut dx);
    dx
}
