//! The buffers of one rank, from loading to the checkpoint, in the order in which a run takes and gives them.

use super::case::Case;
use super::cut::{Microbatch, Share};
use super::devices::GPU_PROGRAM_BYTES;
use super::heap::{Heap, Held, Kind, Phase};
use super::job::{head_of, learns};
use super::shape::{Dims, Flat};
use super::walk::{Keep, Kernels, Packed, Walk};
use crate::comm::PIECE;
use crate::config::job::Collectives;
use crate::config::mesh::RoleName;
use crate::config::optim::GradientOrder;
use crate::device::Device;
use crate::device::cuda::decode::Draw;
use crate::device::cuda::fast::WORKSPACE_BYTES;
use crate::device::cuda::{STAGING_BYTES, readback};
use crate::model::{Arch, Head};
use crate::ops::rope::RopeTable;
use crate::optim::host_state::UNITS_AT_ONCE;
use std::collections::{BTreeMap, VecDeque};

/// Draws of as many steps of decoding come to the host at a time.
const DRAWS_AT_ONCE: usize = 2;
/// Forwards that are walked in a phase: of one size, and of all sizes.
const WALKED_TIMES: usize = 2;
const WALKED: usize = 48;
/// A role on this rank.
pub(super) struct Standing {
    role: RoleName,
    dims: Dims,
    pub(super) flat: Flat,
    weights: Vec<Held>,
    gradients: Vec<Held>,
    state: Vec<Held>,
}

pub(super) struct Rank<'a> {
    pub(super) case: Case<'a>,
    pub(super) kernels: Kernels,
    pub heap: Heap,
    pub(super) roles: Vec<Standing>,
    /// Its place on the data axis: that of the fullest micro-batch.
    of_data: usize,
    walked: BTreeMap<(Phase, RoleName), Vec<Packed>>,
}

impl<'a> Rank<'a> {
    pub fn new(case: Case<'a>, kernels: Kernels, heap: Heap) -> Self {
        let of_data = case.job.fullest_rank(&case.layout.mesh);
        Self { case, kernels, heap, roles: Vec::new(), of_data, walked: BTreeMap::new() }
    }

    fn standing(&self, role: RoleName) -> Standing {
        let arch = self.case.job.archs.of(role).expect("a role that is planned has a model");
        let tensor = self.case.layout.mesh.tensor;
        let (dims, flat) = (Dims::new(arch, tensor), Flat::on(Device::Cuda, arch, role, tensor));
        Standing { role, dims, flat, weights: Vec::new(), gradients: Vec::new(), state: Vec::new() }
    }

    pub(super) fn has(&self, role: RoleName) -> Option<usize> {
        self.roles.iter().position(|standing| standing.role == role)
    }

    /// Weights, optimizer state and gradients, in the order in which a run makes them.
    pub fn load(&mut self, roles: &[RoleName]) {
        // Held to the end.
        let _ = self.heap.take_plain(Kind::Program, None, GPU_PROGRAM_BYTES);
        if self.case.job.workspace {
            let _ = self.heap.take_plain(Kind::Workspace, None, WORKSPACE_BYTES);
        }
        for bytes in self.angle_bytes(roles) {
            let _cos_and_sin = [bytes / 2; 2].map(|half| self.heap.take(Kind::Program, None, half));
        }
        for &role in roles {
            let mut standing = self.standing(role);
            standing.weights = self.weights(role, &standing.flat);
            self.roles.push(standing);
            if !learns(role) {
                self.leave(self.roles.len() - 1);
            }
        }
        for i in 0..self.roles.len() {
            if learns(self.roles[i].role) {
                self.learner(i);
            }
        }
    }

    /// What stays of a role's weights: all units, or the own range of each.
    fn weights(&mut self, role: RoleName, flat: &Flat) -> Vec<Held> {
        let (stage, ranks) = (self.case.layout.stage(), self.case.layout.zero_ranks());
        let lens = if stage < 3 { flat.units() } else { flat.own_units(ranks) };
        lens.into_iter().map(|len| self.heap.take(Kind::Weights, Some(role), 2 * len)).collect()
    }

    /// AdamW's state of what is updated here, where it does not visit.
    fn learner(&mut self, i: usize) {
        if !self.case.layout.swap.optimizer {
            let (role, bytes) = (self.roles[i].role, self.state_bytes(&self.roles[i].flat));
            let kinds = [Kind::Moments, Kind::Moments, Kind::Master];
            self.roles[i].state = kinds.map(|kind| self.heap.take(kind, Some(role), bytes)).into();
        }
    }

    /// Bytes of one vector of AdamW's state.
    fn state_bytes(&self, flat: &Flat) -> usize {
        let (stage, ranks) = (self.case.layout.stage(), self.case.layout.zero_ranks());
        4 * if stage == 0 { flat.len() } else { flat.own(ranks) }
    }

    fn gradients(&mut self, i: usize, copies: usize) -> Vec<Held> {
        let (stage, ranks) = (self.case.layout.stage(), self.case.layout.zero_ranks());
        let flat = &self.roles[i].flat;
        let lens = if stage >= 2 { flat.own_units(ranks) } else { flat.units() };
        let role = self.roles[i].role;
        let all = (0..copies).flat_map(|_| lens.iter());
        all.map(|len| self.heap.take(Kind::Gradients, Some(role), 4 * len)).collect()
    }

    /// Bytes of each rotary table: models of one shape share one.
    fn angle_bytes(&self, roles: &[RoleName]) -> Vec<usize> {
        let archs: Vec<&Arch> = roles.iter().filter_map(|role| self.case.job.archs.of(*role)).collect();
        let key = |arch: &Arch| (arch.rope.clone(), arch.head_dim, arch.context);
        let longest = self.case.job.rows.tokens_max();
        let is_first = |i: usize| archs[..i].iter().all(|other| key(other) != key(archs[i]));
        let first = (0..archs.len()).filter(|&i| is_first(i));
        let held = |arch: &Arch| RopeTable::held(longest, arch.context);
        first.map(|i| held(archs[i]) * archs[i].head_dim * size_of::<f32>()).collect()
    }

    // ---- phases ----

    fn packed(&self, batch: &Microbatch) -> Packed {
        let sequence = self.case.layout.mesh.sequence;
        Packed {
            tokens: batch.tokens.div_ceil(sequence),
            head_rows: batch.learned.div_ceil(sequence),
            longest: batch.longest.div_ceil(sequence),
        }
    }

    /// Whether a forward of `role` over `packed` is walked in `phase`: a size that comes again and again takes what it left
    /// behind, and of many sizes the first ones leave enough behind; one that is larger than all before always counts.
    pub(super) fn is_due(&mut self, phase: Phase, role: RoleName, packed: Packed) -> bool {
        let walked = self.walked.entry((phase, role)).or_default();
        let times = walked.iter().filter(|other| **other == packed).count();
        let largest = walked.iter().all(|other| other.tokens < packed.tokens);
        let due = largest || (times < WALKED_TIMES && walked.len() < WALKED);
        if due {
            walked.push(packed);
        }
        due
    }

    pub fn score(&mut self, step: usize) {
        self.heap.enter(Phase::Score);
        let share = self.case.job.scoring_of(step, &self.case.layout.mesh).swap_remove(self.of_data);
        for i in 0..self.roles.len() {
            let role = self.roles[i].role;
            if role == RoleName::Actor && !self.case.job.recomputes_logprobs(self.case.layout) {
                continue;
            }
            self.come(i);
            for batch in &share.microbatches {
                let packed = self.packed(batch);
                if !self.is_due(Phase::Score, role, packed) {
                    continue;
                }
                self.walk(i, |walk| {
                    let kept = walk.forward(packed.tokens, Keep::Nothing);
                    match head_of(role) {
                        Head::LanguageModel => walk.logprobs(packed.head_rows),
                        Head::Value => walk.values(packed.head_rows),
                    }
                    walk.done(kept);
                });
            }
            if !learns(role) {
                self.leave(i);
            }
        }
        for i in 0..self.roles.len() {
            if learns(self.roles[i].role) {
                self.come(i);
            }
        }
    }

    /// The minibatches of a step: of each, the gradient and the update of one learner, then of the next.
    pub fn train(&mut self, step: usize) {
        self.heap.enter(Phase::Train);
        // Of several updates all but the first find the gradients of all learners there.
        for i in (0..self.roles.len()).filter(|_| self.case.job.updates() > 1) {
            self.take_gradients(i);
        }
        for mut shares in self.case.job.training_of(step, &self.case.layout.mesh) {
            let share = shares.swap_remove(self.of_data);
            for i in 0..self.roles.len() {
                if learns(self.roles[i].role) {
                    self.minibatch(i, &share);
                    self.update(i);
                }
            }
        }
    }

    /// The longest row of the eval split, where it is longer than all that train: nothing is kept of its forward.
    pub fn evaluate(&mut self) {
        let (Some(row), Some(actor)) = (self.case.job.rows.evaluated(), self.has(RoleName::Actor)) else { return };
        let sequence = self.case.layout.mesh.sequence;
        self.walk(actor, |walk| {
            let kept = walk.forward(row.tokens().div_ceil(sequence), Keep::Nothing);
            walk.logprobs(row.learned.div_ceil(sequence));
            walk.done(kept);
        });
    }

    /// Gradients take memory of a GPU when they are first needed.
    fn take_gradients(&mut self, i: usize) {
        if learns(self.roles[i].role) && self.roles[i].gradients.is_empty() {
            self.roles[i].gradients = self.gradients(i, 1);
        }
    }

    /// What gradients take of a GPU goes before it is needed for something else: the rollout, the export.
    pub(super) fn free_gradients(&mut self) {
        for i in 0..self.roles.len() {
            let gradients = std::mem::take(&mut self.roles[i].gradients);
            self.heap.give_all(gradients);
        }
    }

    fn minibatch(&mut self, i: usize, share: &Share) {
        let role = self.roles[i].role;
        let keep = if self.case.job.config.gradient.recompute { Keep::Input } else { Keep::Everything };
        let all = share.microbatches.iter().map(|batch| self.packed(batch)).collect::<Vec<_>>().into_iter();
        let due: Vec<Packed> = all.filter(|packed| self.is_due(Phase::Train, role, *packed)).collect();
        // They come with the first minibatch, and the sums that wait in the tree go with the last chunk of each.
        self.take_gradients(i);
        let copies = self.case.job.gradient_copies(self.case.layout.mesh.data);
        let tree = self.gradients(i, copies - 1);
        self.walk(i, |walk| {
            // A micro-batch begins while the last unit of the one before is reduced.
            for packed in due {
                let kept = walk.forward(packed.tokens, keep);
                let dhidden = match head_of(role) {
                    Head::LanguageModel => walk.logprobs_backward(packed.tokens, packed.head_rows),
                    Head::Value => walk.values_backward(packed.tokens, packed.head_rows),
                };
                walk.backward(packed.tokens, kept, dhidden);
            }
            walk.settle();
        });
        if self.case.job.config.gradient.order == GradientOrder::Fixed {
            self.sum_up_alone(i);
            self.heap.give_all(tree);
            self.sum_in_a_tree(i);
        }
    }

    /// Where GPUs are joined, the parts of other ranks that each adds to its own: those of all units are under way at once.
    fn sum_in_a_tree(&mut self, i: usize) {
        let (role, ranks) = (self.roles[i].role, self.case.layout.zero_ranks());
        if ranks == 1 || self.case.job.config.job.collectives == Collectives::Mpi {
            return;
        }
        let lens = self.roles[i].flat.units();
        let parts = lens.iter().map(|len| self.heap.take(Kind::Collectives, Some(role), (4 * len).min(PIECE)));
        let parts: Vec<Held> = parts.collect();
        self.heap.give_all(parts);
    }

    /// A GPU adds zeros to a sum, unit by unit, which nothing else makes room for where one chunk is all there is.
    fn sum_up_alone(&mut self, i: usize) {
        let (role, largest) = (self.roles[i].role, self.roles[i].flat.largest());
        if self.case.job.gradient_copies(self.case.layout.mesh.data) == 1 {
            let zeros = self.heap.take(Kind::Gradients, Some(role), 4 * largest);
            self.heap.give(zeros);
        }
    }

    fn walk(&mut self, i: usize, work: impl FnOnce(&mut Walk)) {
        let standing = &self.roles[i];
        let layout = self.case.layout;
        let zero = (layout.stage(), layout.mesh.sequence);
        work(&mut Walk::new(&mut self.heap, standing.role, (&standing.dims, &standing.flat), self.kernels, zero));
    }

    /// At the end one rank writes the whole actor from what the others send of theirs, some rows at a time and by way of the
    /// hosts: a GPU holds nothing for that beside its own weights.
    pub fn checkpoint(&mut self) {
        self.heap.enter(Phase::Checkpoint);
        self.free_gradients();
        let exports = self.case.job.config.job.export;
        if let Some(actor) = self.has(RoleName::Actor).filter(|_| exports) {
            self.come(actor);
        }
    }

    // ---- host memory ----

    /// Weights of a role that is idle go, where the layout says so.
    pub(super) fn leave(&mut self, i: usize) {
        if self.case.layout.swap.roles {
            let weights = std::mem::take(&mut self.roles[i].weights);
            self.heap.give_all(weights);
        }
    }

    /// Weights that left come back.
    fn come(&mut self, i: usize) {
        if self.roles[i].weights.is_empty() {
            let (role, flat) = (self.roles[i].role, self.roles[i].flat.clone());
            self.roles[i].weights = self.weights(role, &flat);
        }
    }

    /// State that waits comes to the GPU unit by unit, a few at a time.
    fn update(&mut self, i: usize) {
        if !self.case.layout.swap.optimizer {
            return;
        }
        let (role, flat) = (self.roles[i].role, &self.roles[i].flat);
        let stage = self.case.layout.stage();
        let units = if stage == 0 { flat.units() } else { flat.own_units(self.case.layout.zero_ranks()) };
        let mut here: VecDeque<Held> = VecDeque::new();
        for len in units {
            let gone = (here.len() == UNITS_AT_ONCE).then(|| here.pop_front()).flatten();
            self.heap.give_all(gone);
            here.push_back(self.heap.take(Kind::Moments, Some(role), 12 * len));
        }
        self.heap.give_all(here);
    }

    /// Bytes of the host's memory through which values go to a GPU and from it: uploads and downloads, draws that come while
    /// the next step runs, and losses.
    pub fn pinned(&self) -> usize {
        let rows = self.case.job.config.rollout.batch_max.min(self.case.job.samples());
        let draws = (size_of::<Draw>() * rows).next_power_of_two().max(readback::BYTES_MIN);
        STAGING_BYTES + if self.case.job.is_ppo() { DRAWS_AT_ONCE * draws } else { readback::BYTES_MIN }
    }
}
