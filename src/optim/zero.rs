//! The ZeRO optimizer (arXiv:1910.02054): each rank keeps AdamW's state of its ranges of the parameters and updates
//! them. `Gradients` and `Weights` do the collectives before and after.

use super::host_state::{HostState, Vector};
use crate::comm::Group;
use crate::config::optim::OptimConfig;
use crate::device::cuda::adamw::Decays;
use crate::device::cuda::{ViewMut, owned_by};
use crate::device::{Device, cuda, null};
use crate::model::Weights;
use crate::model::partition::{BLOCK, Partition};
use crate::ops;
use crate::ops::adamw::Update;
use crate::sys::trace;
use crate::tensor::arena::Buffer;
use crate::tensor::{Flat, Slice, SliceMut};
use std::ops::Range;
use std::sync::Arc;

/// AdamW's state of this rank's ranges, laid end to end in the order of the units.
#[derive(Debug)]
pub struct Zero {
    config: OptimConfig,
    partition: Arc<Partition>,
    /// For each unit: parts of the own range by their weight decay, in order and without gaps.
    parts: Vec<Vec<Part<f32>>>,
    /// For each unit: parts of the own range by the number of ranks that hold a copy. Empty if nothing is copied.
    copies: Vec<Vec<Part<usize>>>,
    /// The pipeline stage that counts each unit.
    stages: Vec<usize>,
    /// The same parts for GPU kernels. Empty on the CPU.
    decays: Vec<Decays>,
    /// The vectors by `Vector`. No master if the weights are their own, and no average if `ema_beta` is 0.
    vectors: [Option<Flat>; 4],
    /// Replaces `vectors` if they are offloaded to the host between updates.
    host: Option<HostState>,
    /// Updates made so far.
    pub updates: u64,
}

/// A stretch of an own range, counted from the range's start.
#[derive(Clone, Debug, PartialEq)]
struct Part<T> {
    range: Range<usize>,
    is: T,
}

impl Zero {
    /// Creates the state of the own ranges of `partition` for updates on `device`. Between updates it is on the device
    /// `on`, which is `device` or the CPU. It is all zeros, except for a master on the same device, whose values are
    /// unspecified. `vectors` are the flat ranges of norms and biases, ascending and disjoint. They have no weight
    /// decay unless `config.decay_vectors`.
    pub fn new(
        [device, on]: [Device; 2],
        config: &OptimConfig,
        partition: Arc<Partition>,
        vectors: &[Range<usize>],
        has_master: bool,
    ) -> Self {
        let (averages, len) = (config.ema_beta > 0.0, partition.own_len());
        let host = (on != device).then(|| HostState::zeros(&partition, averages));
        let room = |is_kept: bool, make: fn(Device, usize) -> Flat| {
            (is_kept && on == device).then(|| owned_by("optimizer state", || make(device, len)))
        };
        let [m, v, average] = [true, true, averages].map(|is_kept| room(is_kept, Flat::zeros));
        let decay = config.weight_decay as f32;
        let exempt = if config.decay_vectors || decay == 0.0 { &[] } else { vectors };
        let exempt: Vec<_> = exempt.iter().map(|range| Part { range: range.clone(), is: 0.0 }).collect();
        let parts: Vec<_> = (0..partition.units()).map(|u| parts(&partition.own(u), decay, &exempt)).collect();
        let of_gpu = if device == Device::Cuda { &parts[..] } else { &[] };
        let ends = |parts: &Vec<Part<f32>>| parts.iter().map(|part| (part.range.end, part.is)).collect::<Vec<_>>();
        let decays = of_gpu.iter().map(|parts| Decays::from_parts(&ends(parts))).collect();
        Self {
            config: config.clone(),
            parts,
            decays,
            copies: vec![Vec::new(); partition.units()],
            stages: vec![0; partition.units()],
            vectors: [room(has_master, Flat::scratch), m, v, average],
            host,
            updates: 0,
            partition,
        }
    }

    /// Sets the pipeline stage that counts each unit.
    #[must_use]
    pub fn with_stages(mut self, stages: Vec<usize>) -> Self {
        self.stages = stages;
        self
    }

    /// Sets the flat ranges, ascending and disjoint, of which `copies` ranks of the tensor axis hold the same values.
    /// Each counts once in the global norm.
    #[must_use]
    pub fn with_copies(mut self, copied: &[(Range<usize>, usize)]) -> Self {
        let copied: Vec<_> = copied.iter().map(|(range, is)| Part { range: range.clone(), is: *is }).collect();
        if copied.iter().any(|part| part.is != 1) {
            let partition = &self.partition;
            self.copies = (0..partition.units()).map(|u| parts(&partition.own(u), 1, &copied)).collect();
        }
        self
    }

    /// The partition that this rank updates.
    pub fn partition(&self) -> &Arc<Partition> {
        &self.partition
    }

    /// The buffers of state on the CPU.
    pub fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        self.vectors.iter().flatten().filter_map(Flat::buffer)
    }

    pub fn buffers_mut(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.vectors.iter_mut().flatten().filter_map(Flat::buffer_mut)
    }

    pub fn bytes(&self) -> usize {
        let here: usize = self.vectors.iter().flatten().map(Flat::bytes).sum();
        here + self.host.as_ref().map_or(0, HostState::bytes)
    }

    /// The global norm of a gradient, of which `own(unit)` are this rank's sums, and its clip factor: 1 unless the norm
    /// is above the limit. The partition is over the ranks of `zero`. The ranks of `pipeline` hold other units, those of
    /// `tensor` other parts of the same parameters. The norm is bit-identical for any number of ranks, given equal
    /// gradients. A collective.
    pub fn measure<'a>(
        &self,
        own: impl Fn(usize) -> Slice<'a>,
        zero: &Group,
        pipeline: &Group,
        tensor: &Group,
    ) -> (f64, f32) {
        let mut square = [self.over_stages(&self.squares(own, zero), pipeline)];
        tensor.all_reduce_sum_f64(&mut square);
        let (norm, limit) = (square[0].sqrt(), self.config.clip_norm);
        let clips = limit > 0.0 && norm > limit;
        (norm, if clips { (limit / (norm + 1e-6)) as f32 } else { 1.0 })
    }

    /// The sum of the squares of all stages, in the order of units and blocks.
    fn over_stages(&self, squares: &[f64], pipeline: &Group) -> f64 {
        if pipeline.size() == 1 {
            return squares.iter().sum();
        }
        let of_stages = pipeline.all_gather_numbers(squares);
        if pipeline.is_null() {
            return squares.iter().sum();
        }
        let mut rest: Vec<_> = of_stages.iter().map(|squares| squares.iter()).collect();
        let (partition, mut sum) = (&self.partition, 0.0);
        for (u, stage) in self.stages.iter().enumerate() {
            let count: usize = partition.cuts(u).iter().map(|cut| cut.len().div_ceil(BLOCK)).sum();
            rest[*stage].by_ref().take(count).for_each(|square| sum += square);
        }
        sum
    }

    /// Sums of squares over the ranks of the partition: f64 sums of whole blocks, in the order of units and blocks.
    fn squares<'a>(&self, own: impl Fn(usize) -> Slice<'a>, zero: &Group) -> Vec<f64> {
        let partition = &self.partition;
        let counted = || (0..partition.units()).filter(|u| partition.is_counted(*u));
        let units: Vec<_> = counted().map(|u| (own(u), self.copies[u].as_slice())).collect();
        let mine = blocks(&units);
        if partition.ranks() == 1 || zero.is_null() {
            return mine;
        }
        let all = zero.all_gather_numbers(&mine);
        let mut of_ranks: Vec<_> = all.iter().map(|squares| squares.iter()).collect();
        let mut sum = Vec::with_capacity(all.iter().map(Vec::len).sum());
        for u in counted() {
            for (squares, cut) in of_ranks.iter_mut().zip(partition.cuts(u)) {
                squares.by_ref().take(cut.len().div_ceil(BLOCK)).for_each(|square| sum.push(*square));
            }
        }
        sum
    }

    /// Begins an update with learning rate `lr` of a gradient that is scaled by `clip_scale`. Then call `apply` once
    /// for every unit.
    pub fn begin(&mut self, lr: f64, clip_scale: f32) -> Update {
        self.updates += 1;
        let t = self.updates as f64;
        let [beta1, beta2] = self.config.betas;
        Update {
            lr: lr as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            eps: self.config.eps as f32,
            bias1: (1.0 - beta1.powf(t)) as f32,
            bias2: (1.0 - beta2.powf(t)) as f32,
            grad_scale: clip_scale,
        }
    }

    /// Updates the own range of a unit of `weights`, and its master if it has one, from the sums `grads`.
    pub fn apply(&mut self, update: Update, unit: usize, weights: &mut Weights, grads: Slice) {
        let own = self.partition.own(unit);
        let _span = trace::operation(null::OPTIMIZER, "unit values", || [unit, own.len()]);
        match weights.local_mut(unit).part_mut(&own) {
            SliceMut::Cuda(values) => self.apply_cuda(update, unit, values, grads),
            SliceMut::F32(values) => self.apply_f32(update, unit, values, grads.f32()),
            SliceMut::Bf16(_) => {
                let mut master =
                    self.vectors[Vector::Master as usize].take().expect("the state of bf16 weights has a master");
                let values = master.slice_mut(self.partition.held(unit)).f32();
                self.apply_f32(update, unit, values, grads.f32());
                weights.store_master(own, values);
                self.vectors[Vector::Master as usize] = Some(master);
            }
        }
    }

    fn apply_f32(&mut self, update: Update, unit: usize, params: &mut [f32], grads: &[f32]) {
        let held = self.partition.held(unit);
        assert!(params.len() == held.len() && grads.len() == held.len(), "unit {unit}: ranges of another length");
        let [_, Some(m), Some(v), average] = &mut self.vectors else { panic!("the state is not here") };
        let [m, v] = [m, v].map(|moments| moments.slice_mut(held.clone()).f32());
        for Part { range, is: weight_decay } in &self.parts[unit] {
            let at = || range.clone();
            ops::adamw::step(&mut params[at()], &grads[at()], &mut m[at()], &mut v[at()], &update, *weight_decay);
        }
        if let Some(average) = average {
            ops::adamw::average(params, self.config.ema_beta as f32, average.slice_mut(held).f32());
        }
    }

    /// Updates the own range of a unit on the GPU: the master, and the bf16 `weights` with it.
    ///
    /// # Panics
    /// If the state has no master, or is not on the GPU.
    pub fn apply_cuda(&mut self, update: Update, unit: usize, weights: ViewMut, grads: Slice) {
        let (decays, beta) = (&self.decays[unit], self.config.ema_beta as f32);
        let step = |mut p: ViewMut, m: ViewMut, v: ViewMut, average: Option<ViewMut>| {
            cuda::adamw::step(p.reborrow(), grads.cuda(), m, v, weights, decays, &update);
            if let Some(average) = average {
                cuda::adamw::average(p.as_view(), beta, average);
            }
        };
        if let Some(host) = &mut self.host {
            return host.update(unit, |[p, m, v, average]| step(p, m, v, (beta > 0.0).then_some(average)));
        }
        let held = self.partition.held(unit);
        let [Some(p), Some(m), Some(v), average] = &mut self.vectors else { panic!("the state has no master") };
        let [p, m, v] = [p, m, v].map(|state| state.slice_mut(held.clone()).cuda());
        step(p, m, v, average.as_mut().map(|average| average.slice_mut(held).cuda()));
    }

    /// Ends an update, after `apply_cuda` for every unit.
    pub fn finish_update(&mut self) {
        if let Some(host) = &mut self.host {
            host.finish_update();
        }
    }

    /// Keeps state in host memory resident on the GPU from its next update until `offload`.
    pub fn keep_resident(&mut self) {
        if let Some(host) = &mut self.host {
            host.keep_resident();
        }
    }

    /// Offloads resident state, after the last update of a step.
    pub fn offload(&mut self) {
        if let Some(host) = &mut self.host {
            host.offload();
        }
    }

    /// Whether a moving average of the master weights is kept.
    pub fn has_average(&self) -> bool {
        self.config.ema_beta > 0.0
    }

    /// Begins the average of a part of the own range of a unit with its master, or with `weights` without a master.
    pub fn begin_average(&mut self, unit: usize, part: Range<usize>, weights: &Weights) {
        let first = part.start - self.partition.own(unit).start;
        let values = match self.state(Vector::Master, unit) {
            Some(master) => master.part(first..first + part.len()).to_host(),
            None => weights.local(unit).part(&part).to_host(),
        };
        self.set_state(Vector::Average, unit, first, &values);
    }

    /// Sets the master of a part of the own range of a unit to `weights`, if there is a master.
    pub fn set_master(&mut self, unit: usize, part: Range<usize>, weights: &Weights) {
        let first = part.start - self.partition.own(unit).start;
        match (weights.local(unit).part(&part), &mut self.vectors[Vector::Master as usize]) {
            (Slice::Cuda(values), Some(master)) => {
                let start = self.partition.held(unit).start + first;
                cuda::copy::cast(values, master.slice_mut(start..start + part.len()).cuda());
            }
            _ => self.set_state(Vector::Master, unit, first, &weights.to_master(part)),
        }
    }

    /// The state of the own range of a unit, on any device. `None` for a master if the weights are their own.
    pub fn state(&self, what: Vector, unit: usize) -> Option<Slice<'_>> {
        match &self.host {
            Some(host) => (what != Vector::Average || self.has_average()).then(|| host.slice(what, unit)),
            None => self.vectors[what as usize].as_ref().map(|vector| vector.slice(self.partition.held(unit))),
        }
    }

    /// Sets the state of the own range of a unit, from its element `at` on. Does nothing for a master that does not
    /// exist.
    ///
    /// # Panics
    /// If there are more values than the range has left.
    pub fn set_state(&mut self, what: Vector, unit: usize, at: usize, values: &[f32]) {
        let held = self.partition.held(unit);
        assert!(at + values.len() <= held.len(), "unit {unit}: {} values from {at} on", values.len());
        if let Some(host) = &mut self.host {
            return host.write(what, unit, at, values);
        }
        if let Some(vector) = &mut self.vectors[what as usize] {
            vector.write(held.start + at..held.start + at + values.len(), values);
        }
    }
}

/// One sum of squares per block of each unit. If parts of a unit are copied, each copy counts for its share.
fn blocks(units: &[(Slice, &[Part<usize>])]) -> Vec<f64> {
    // For each run: its values, the index of its first block, and its copies.
    let (mut runs, mut taken) = (Vec::new(), Vec::new());
    let mut first = 0;
    for &(own, copies) in units {
        let whole = [Part { range: 0..own.len(), is: 1 }];
        for Part { range, is: copies } in if copies.is_empty() { &whole } else { copies } {
            for run in runs_of(range) {
                taken.push((first + run.start / BLOCK, run.len().div_ceil(BLOCK), *copies));
                runs.push(own.part(run));
            }
        }
        first += own.len().div_ceil(BLOCK);
    }
    let squares = ops::norm::sums_of_each(&runs, BLOCK);
    if squares.is_empty() {
        return squares;
    }
    let (mut sums, mut squares) = (vec![0.0; first], squares.into_iter());
    for (at, count, copies) in taken {
        for (sum, square) in sums[at..at + count].iter_mut().zip(&mut squares) {
            *sum += square / copies as f64;
        }
    }
    sums
}

/// Splits a range at the borders of whole blocks.
fn runs_of(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let (start, end) = (range.start.next_multiple_of(BLOCK), range.end / BLOCK * BLOCK);
    let all = if start <= end { [range.start..start, start..end, end..range.end] } else { [range.clone(), 0..0, 0..0] };
    all.into_iter().filter(|run| !run.is_empty())
}

/// Splits `own` at the borders of the `marked` flat ranges, relative to its start. Between them it is `plain`.
fn parts<T: Copy>(own: &Range<usize>, plain: T, marked: &[Part<T>]) -> Vec<Part<T>> {
    let mut parts = Vec::new();
    let mut push = |start: usize, end: usize, is| {
        if start < end {
            parts.push(Part { range: start - own.start..end - own.start, is });
        }
    };
    let mut at = own.start;
    for Part { range, is } in marked {
        let (start, end) = (range.start.clamp(at, own.end), range.end.clamp(at, own.end));
        push(at, start, plain);
        push(start, end, *is);
        at = end;
    }
    push(at, own.end, plain);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_own_range_and_only_vectors_are_exempt_from_decay() {
        for own in [0..0, 0..50, 7..40, 25..26, 100..120] {
            let exempt = [3..10, 20..30, 30..31, 45..60];
            let marked = exempt.clone().map(|range| Part { range, is: false });
            let mut end = 0;
            for Part { range, is: decays } in parts(&own, true, &marked) {
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
    fn a_gradient_above_the_limit_is_scaled_to_it() {
        let config = OptimConfig { weight_decay: 0.1, ..OptimConfig::with_lr(0.1) };
        let alone = Group::one();
        let mut state = Zero::new([Device::Cpu; 2], &config, Arc::new(Partition::whole(&[0..2, 2..4])), &[], false);
        let mut params = [1.0, 2.0, 3.0, 4.0];
        let grads = [3.0, 0.0, 4.0, 0.0];
        let (norm, clip_scale) = state.measure(|u| Slice::F32(&grads[2 * u..2 * u + 2]), &alone, &alone, &alone);
        assert_eq!(norm, 5.0);
        assert!((clip_scale - 0.2).abs() < 1e-6);
        let update = state.begin(0.1, clip_scale);
        for u in 0..2 {
            state.apply_f32(update, u, &mut params[2 * u..2 * u + 2], &grads[2 * u..2 * u + 2]);
        }
        let first = |what, u| state.state(what, u).expect("it is here").f32()[0];
        assert!((first(Vector::First, 0) - 0.1 * 0.6).abs() < 1e-6);
        assert!((first(Vector::Second, 1) - 0.05 * 0.64).abs() < 1e-6);
        // The first update of Adam is lr in the gradient's direction, and the decay is lr x decay x p.
        assert!((params[0] - (1.0 - 0.1 - 0.01)).abs() < 1e-5 && (params[1] - (2.0 - 0.02)).abs() < 1e-6);
        assert!(state.measure(|_| Slice::F32(&[f32::NAN, 0.0]), &alone, &alone, &alone).0.is_nan());
    }

    #[test]
    fn parameters_on_several_ranks_count_once_in_the_norm() {
        let own: Vec<f32> = (0..3 * BLOCK + 100).map(|i| (i % 17) as f32 - 8.0).collect();
        let units = [0..BLOCK, BLOCK..own.len()];
        let partition = Arc::new(Partition::whole(&units));
        let state = Zero::new([Device::Cpu; 2], &OptimConfig::with_lr(0.1), partition, &[], false);
        let copied = [(50..BLOCK + 30, 4), (2 * BLOCK..own.len(), 2)];
        let state = state.with_copies(&copied);
        let alone = Group::one();
        let of = |range: &Range<usize>| own[range.clone()].iter().map(|x| f64::from(x * x)).sum::<f64>();
        let want = of(&(0..own.len())) - 0.75 * of(&copied[0].0) - 0.5 * of(&copied[1].0);
        let (norm, _) = state.measure(|u| Slice::F32(&own[units[u].clone()]), &alone, &alone, &alone);
        assert!((norm - want.sqrt()).abs() < 1e-9 * norm, "{norm} against {}", want.sqrt());
    }
}
