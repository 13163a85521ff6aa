//! ZeRO-1 (arXiv:1910.02054, section 5.1): gradients are reduce-scattered, each rank updates its range of the flat
//! parameters with its share of AdamW's state, and the updated ranges are gathered.

use super::partition::{BLOCK, Partition};
use crate::comm::Group;
use crate::config::optim::{GradientOrder, OptimConfig};
use crate::error::{Error, Result};
use crate::ops;
use crate::ops::adamw::Hyper;
use crate::tensor::arena::Buffer;
use std::ops::Range;

/// AdamW's state of this rank's range.
#[derive(Debug)]
pub struct Zero1 {
    config: OptimConfig,
    partition: Partition,
    own: Range<usize>,
    /// Parts of `own` with and without weight decay, in order; they cover it.
    parts: Vec<Part>,
    /// First and second moments of `own`.
    pub m: Buffer,
    pub v: Buffer,
    /// f32 copy of `own`, where the weights themselves are bf16.
    pub master: Option<Buffer>,
    /// Updates made so far.
    pub updates: u64,
}

#[derive(Clone, Debug, PartialEq)]
struct Part {
    /// Relative to the start of the own range.
    range: Range<usize>,
    decays: bool,
}

/// What one update did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepStats {
    /// Global norm of the gradient before clipping; equal bits for any number of ranks, given equal gradients.
    pub grad_norm: f64,
    /// What the gradient was multiplied with: 1 unless it was clipped.
    pub clip_scale: f32,
}

impl Zero1 {
    /// Fresh state over `len` flat f32 parameters. `vectors` are the flat ranges of norms and biases, ascending and
    /// disjoint: they have no weight decay unless `config.decay_vectors`.
    pub fn new(config: &OptimConfig, len: usize, group: &Group, vectors: &[Range<usize>]) -> Self {
        let partition = Partition::new(len, group.size());
        let own = partition.of(group.rank());
        let exempt = if config.decay_vectors || config.weight_decay == 0.0 { &[] } else { vectors };
        Self {
            config: config.clone(),
            parts: parts(&own, exempt),
            m: Buffer::zeros(own.len()),
            v: Buffer::zeros(own.len()),
            master: None,
            updates: 0,
            partition,
            own,
        }
    }

    /// As `new`, for weights that are not f32: the state keeps an f32 copy of this rank's range of `params`.
    pub fn with_master(config: &OptimConfig, params: &[f32], group: &Group, vectors: &[Range<usize>]) -> Self {
        let mut state = Self::new(config, params.len(), group, vectors);
        let mut master = Buffer::scratch(state.own.len());
        master.copy_from_slice(&params[state.own.clone()]);
        state.master = Some(master);
        state
    }

    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// This rank's range of the flat parameters.
    pub fn own(&self) -> Range<usize> {
        self.own.clone()
    }

    /// One update of f32 parameters. `grads` holds this rank's sums on entry and is scratch afterwards; `params` is
    /// equal on all ranks before and after.
    ///
    /// # Errors
    /// `Fault`, the same on all ranks, if the gradient is not finite; then neither parameters nor state have changed.
    pub fn step(
        &mut self,
        params: &mut [f32],
        grads: &mut [f32],
        group: &Group,
        lr: f64,
        order: GradientOrder,
    ) -> Result<StepStats> {
        assert_eq!((params.len(), self.master.is_some()), (self.partition.len(), false));
        let stats = self.reduce(grads, group, order)?;
        self.update(&mut params[self.own.clone()], &grads[self.own.clone()], lr, stats.clip_scale);
        group.all_gather(params, self.partition.ranges());
        Ok(stats)
    }

    /// One update of the f32 master of this rank's range; `publish(range, master)` writes the weights made from it,
    /// and gathering them is the caller's.
    ///
    /// # Errors
    /// As `step`.
    ///
    /// # Panics
    /// If the state was made without a master.
    pub fn step_master(
        &mut self,
        grads: &mut [f32],
        group: &Group,
        lr: f64,
        order: GradientOrder,
        publish: impl FnOnce(Range<usize>, &[f32]),
    ) -> Result<StepStats> {
        let stats = self.reduce(grads, group, order)?;
        let mut master = self.master.take().expect("the state has a master");
        self.update(&mut master, &grads[self.own.clone()], lr, stats.clip_scale);
        publish(self.own.clone(), &master);
        self.master = Some(master);
        Ok(stats)
    }

    /// Sums `grads` over ranks into this rank's range and measures the global norm.
    fn reduce(&self, grads: &mut [f32], group: &Group, order: GradientOrder) -> Result<StepStats> {
        assert_eq!(grads.len(), self.partition.len());
        match order {
            GradientOrder::Fast => group.reduce_scatter_sum(grads, self.partition.ranges()),
            GradientOrder::Fixed => group.reduce_scatter_tree(grads, self.partition.ranges()),
        }
        let grad_norm = global_norm(&grads[self.own.clone()], group);
        if !grad_norm.is_finite() {
            return Err(Error::fault(format!("the gradient of update {} is not finite", self.updates + 1))
                .hint("lower the learning rate, or look at rewards and advantages of this step in rollouts.h5"));
        }
        let limit = self.config.clip_norm;
        let clipped = limit > 0.0 && grad_norm > limit;
        let clip_scale = if clipped { (limit / (grad_norm + 1e-6)) as f32 } else { 1.0 };
        Ok(StepStats { grad_norm, clip_scale })
    }

    fn update(&mut self, params: &mut [f32], grads: &[f32], lr: f64, grad_scale: f32) {
        self.updates += 1;
        let t = self.updates as f64;
        let [beta1, beta2] = self.config.betas;
        let hyper = Hyper {
            lr: lr as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            eps: self.config.eps as f32,
            weight_decay: self.config.weight_decay as f32,
            bias1: (1.0 - beta1.powf(t)) as f32,
            bias2: (1.0 - beta2.powf(t)) as f32,
            grad_scale,
        };
        for Part { range, decays } in &self.parts {
            let hyper = if *decays { hyper } else { Hyper { weight_decay: 0.0, ..hyper } };
            let at = || range.clone();
            ops::adamw::step(&mut params[at()], &grads[at()], &mut self.m[at()], &mut self.v[at()], &hyper);
        }
    }
}

/// sqrt of the sum of squares over all ranks' ranges: f64 sums of whole blocks, gathered and added in order.
fn global_norm(own: &[f32], group: &Group) -> f64 {
    let blocks = ops::norm::sums_of_squares(own, BLOCK);
    group.all_gather_f64(&blocks).iter().flatten().sum::<f64>().sqrt()
}

/// Cuts `own` at the borders of `exempt`, relative to its start.
fn parts(own: &Range<usize>, exempt: &[Range<usize>]) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut push = |start: usize, end: usize, decays| {
        if start < end {
            parts.push(Part { range: start - own.start..end - own.start, decays });
        }
    };
    let mut at = own.start;
    for range in exempt {
        let (start, end) = (range.start.clamp(at, own.end), range.end.clamp(at, own.end));
        push(at, start, true);
        push(start, end, false);
        at = end;
    }
    push(at, own.end, true);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_own_range_and_exempt_only_vectors() {
        for own in [0..0, 0..50, 7..40, 25..26, 100..120] {
            let exempt = [3..10, 20..30, 30..31, 45..60];
            let mut end = 0;
            for Part { range, decays } in parts(&own, &exempt) {
                assert_eq!(range.start, end);
                end = range.end;
                for i in range {
                    assert_eq!(decays, !exempt.iter().any(|e| e.contains(&(i + own.start))), "{own:?} at {i}");
                }
            }
            assert_eq!(end, own.len());
        }
    }

    #[test]
    fn a_gradient_above_the_limit_is_scaled_to_it_and_a_nan_changes_nothing() {
        let config = OptimConfig { weight_decay: 0.1, ..OptimConfig::with_lr(0.1) };
        let group = Group::one();
        let mut state = Zero1::new(&config, 4, &group, &[]);
        let mut params = [1.0, 2.0, 3.0, 4.0];
        let stats = state.step(&mut params, &mut [3.0, 0.0, 4.0, 0.0], &group, 0.1, GradientOrder::Fixed);
        let stats = stats.expect("finite");
        assert_eq!(stats.grad_norm, 5.0);
        assert!((stats.clip_scale - 0.2).abs() < 1e-6);
        assert!((state.m[0] - 0.1 * 0.6).abs() < 1e-6 && (state.v[2] - 0.05 * 0.64).abs() < 1e-6);
        // The first update of Adam is lr in the gradient's direction, and the decay is lr x decay x p.
        assert!((params[0] - (1.0 - 0.1 - 0.01)).abs() < 1e-5 && (params[1] - (2.0 - 0.02)).abs() < 1e-6);
        let before = (params, state.m.to_vec(), state.updates);
        let error = state.step(&mut params, &mut [f32::NAN, 0.0, 0.0, 0.0], &group, 0.1, GradientOrder::Fast);
        assert!(error.expect_err("NaN").message.contains("update 2 is not finite"));
        assert_eq!((params, state.m.to_vec(), state.updates), before);
    }
}
