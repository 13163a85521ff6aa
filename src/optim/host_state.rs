//! AdamW's state in pinned host memory. It is onloaded to the GPU unit by unit for an update.
//!
//! While a unit is updated, the next one is onloaded and the one before is offloaded. So the GPU holds the state of at
//! most [`UNITS_AT_ONCE`] consecutive units. If it is kept resident for the updates of a step, the first update onloads
//! it and `offload` ends that.

use crate::device::cuda::{HostCopy, Memory, ViewMut, owned_by};
use crate::model::partition::Partition;
use crate::tensor::{DType, Slice, arena, copy};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

/// The current unit, the one before and the one after.
pub const UNITS_AT_ONCE: usize = 3;

/// A vector of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vector {
    /// f32 copy of the weights.
    Master,
    /// First moments.
    First,
    /// Second moments.
    Second,
    /// Moving average of the master weights, if one is kept.
    Average,
}

impl Vector {
    /// The vectors of every learner.
    pub const ALL: [Self; VECTORS] = [Self::Master, Self::First, Self::Second];

    /// Its name in a checkpoint.
    pub fn name(self) -> &'static str {
        ["weights", "m", "v", "ema"][self as usize]
    }
}

const VECTORS: usize = 3;

#[derive(Debug)]
pub struct HostState {
    /// The vectors of each unit in the order of `Vector`, end to end.
    units: Vec<HostCopy>,
    lens: Vec<usize>,
    /// Vectors per unit: 3, or 4 with the average.
    vectors: usize,
    /// Their memory on the GPU.
    onloading: Option<(usize, Memory)>,
    offloading: VecDeque<(usize, Memory)>,
    /// The GPU memory of each unit, from its first update until `offload`, if it is kept.
    resident: Vec<Option<Memory>>,
    keeps_resident: bool,
}

impl HostState {
    /// Zeros, for the own ranges of `partition`.
    pub fn zeros(partition: &Partition, averages: bool) -> Self {
        let vectors = VECTORS + usize::from(averages);
        let lens: Vec<usize> = (0..partition.units()).map(|u| partition.own(u).len()).collect();
        let units = lens.iter().map(|len| HostCopy::zeros(vectors * len * size_of::<f32>())).collect();
        let resident = lens.iter().map(|_| None).collect();
        Self { units, lens, vectors, onloading: None, offloading: VecDeque::new(), resident, keeps_resident: false }
    }

    /// Keeps onloaded state resident from now on, until `offload`.
    pub fn keep_resident(&mut self) {
        self.keeps_resident = true;
    }

    /// Offloads resident state.
    pub fn offload(&mut self) {
        let start = Instant::now();
        for unit in 0..self.units.len() {
            if let Some(memory) = self.resident[unit].take() {
                self.begin_offload(unit, memory);
            }
        }
        arena::count_moving(start);
        self.finish_update();
    }

    pub fn bytes(&self) -> usize {
        self.vectors * self.lens.iter().sum::<usize>() * size_of::<f32>()
    }

    fn place(&self, what: Vector, unit: usize) -> Range<usize> {
        let len = self.lens[unit];
        let at = what as usize * len;
        at..at + len
    }

    /// The values of a vector in a unit.
    ///
    /// # Panics
    /// If they are on the GPU.
    pub fn slice(&self, what: Vector, unit: usize) -> Slice<'_> {
        assert!(self.resident[unit].is_none(), "optimizer state must not be read while it is on the GPU");
        Slice::F32(&self.units[unit].as_f32()[self.place(what, unit)])
    }

    /// Replaces values of a vector in a unit, from its element `at` on.
    ///
    /// # Panics
    /// If there are more values than space.
    pub fn write(&mut self, what: Vector, unit: usize, at: usize, values: &[f32]) {
        let place = self.place(what, unit);
        copy(values, &mut self.units[unit].as_f32_mut()[place][at..at + values.len()]);
    }

    /// Calls `work` with master weights, first and second moments of a unit on the GPU, and the average, which may be
    /// empty. All units follow in order; then call `finish_update`.
    pub fn update(&mut self, unit: usize, work: impl FnOnce([ViewMut; VECTORS + 1])) {
        let start = Instant::now();
        let mut memory = match (self.resident[unit].take(), self.onloading.take()) {
            (Some(memory), _) => memory,
            (_, Some((onloading, memory))) if onloading == unit => memory,
            _ => self.onload(unit),
        };
        self.free_but(1);
        if unit + 1 < self.units.len() && self.resident[unit + 1].is_none() {
            self.onloading = Some((unit + 1, self.onload(unit + 1)));
        }
        let len = self.lens[unit];
        self.units[unit].wait();
        let mut state = memory.view_mut(DType::F32);
        let (mut p, mut moments) = state.split_at(len);
        let (m, mut rest) = moments.split_at(len);
        let (v, average) = rest.split_at(len);
        arena::count_moving(start);
        work([p.reborrow(), m, v, average]);
        if self.keeps_resident {
            self.resident[unit] = Some(memory);
            return;
        }
        let start = Instant::now();
        self.begin_offload(unit, memory);
        arena::count_moving(start);
    }

    fn begin_offload(&mut self, unit: usize, memory: Memory) {
        self.units[unit].begin_offload(&memory);
        self.offloading.push_back((unit, memory));
    }

    fn onload(&mut self, unit: usize) -> Memory {
        owned_by("optimizer state", || self.units[unit].onload())
    }

    /// Frees the GPU memory of all offloaded units except the last `most`.
    fn free_but(&mut self, most: usize) {
        let free = self.offloading.len().saturating_sub(most);
        for (unit, memory) in self.offloading.iter_mut().take(free) {
            self.units[*unit].release(memory);
        }
    }

    /// Ends an update: waits until all state is on the host.
    pub fn finish_update(&mut self) {
        let start = Instant::now();
        for (unit, mut memory) in self.offloading.drain(..) {
            self.units[unit].release(&mut memory);
            self.units[unit].finish();
        }
        arena::count_moving(start);
    }
}
