//! Rotary position embedding, half-split order as in Hugging Face models (arXiv:2104.09864).

use crate::device::cuda::Arg;
use crate::device::cuda::rope::Table;
use crate::device::{Device, cpu, cuda, null};
use crate::pictures::AXES;
use crate::sys::lock::lock;
use crate::tensor::{Indices, Tensor};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::thread::ThreadId;

/// The number of positions in the smallest table.
const POSITIONS_MIN: usize = 1024;

/// The rotation of the heads of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    /// e, the columns of a head.
    pub head_dim: usize,
    /// The angle per position of the first pairs of a head, any scaling included. The other pairs do not turn.
    pub inverse_frequencies: Vec<f32>,
    /// The axis of the position of each of these pairs, if positions have `AXES`; else empty.
    pub axes: Vec<u8>,
    /// The factor on cos and sin of the pairs that turn (1 for most models).
    pub attention_factor: f32,
    /// Queries at position p are multiplied by 1 + beta ln(1 + floor(p / original)): (beta, original).
    pub query_scale: Option<(f64, f64)>,
}

/// cos and sin of the positions requested so far, up to `positions_max`. A full table for a context of ten million
/// tokens would take 1.3 GB for one short row.
#[derive(Debug)]
pub struct RopeTable {
    rotation: Rotation,
    positions_max: usize,
    angles: RwLock<Arc<Angles>>,
}

/// The rows of the table so far, [position][e/2].
#[derive(Debug, Default)]
pub(super) struct Angles {
    positions: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// The factors on queries, [position]; empty if all are 1.
    query_scale: Vec<f32>,
    /// The same for GPU kernels, made at the first use.
    on_gpu: OnceLock<Table>,
    /// The bytes that they count on a null device, which does not make them.
    _held: null::Held,
}

impl RopeTable {
    /// # Panics
    /// If more pairs turn than a head has.
    pub fn new(rotation: Rotation, positions_max: usize) -> Self {
        let (pairs, half) = (rotation.inverse_frequencies.len(), rotation.head_dim / 2);
        assert!(pairs <= half, "rope: {pairs} pairs of {half} turn");
        assert!(rotation.axes.is_empty() || rotation.axes.len() == pairs, "rope: an axis for each of {pairs} pairs");
        Self { rotation, positions_max, angles: RwLock::default() }
    }

    /// A table in which all pairs of a head turn.
    pub fn whole(inverse_frequencies: &[f32], attention_factor: f32, positions_max: usize) -> Self {
        let rotation = Rotation {
            head_dim: 2 * inverse_frequencies.len(),
            inverse_frequencies: inverse_frequencies.to_vec(),
            axes: Vec::new(),
            attention_factor,
            query_scale: None,
        };
        Self::new(rotation, positions_max)
    }

    /// Creates a table like `new`, but shares it with equal tables in use, because a table for a long context is large.
    pub fn shared(rotation: Rotation, positions_max: usize) -> Arc<Self> {
        static TABLES: Mutex<Vec<(Option<ThreadId>, Weak<RopeTable>)>> = Mutex::new(Vec::new());
        // Tables of a null device have no angles.
        let null_thread = null::is_active().then(|| std::thread::current().id());
        let mut tables = lock(&TABLES);
        tables.retain(|(_, table)| table.strong_count() > 0);
        let equal = |table: &Arc<Self>| table.rotation == rotation && table.positions_max == positions_max;
        let same_device = tables.iter().filter(|(thread, _)| *thread == null_thread);
        if let Some(table) = same_device.filter_map(|(_, table)| table.upgrade()).find(equal) {
            return table;
        }
        let table = Arc::new(Self::new(rotation, positions_max));
        tables.push((null_thread, Arc::downgrade(&table)));
        table
    }

    /// The number of positions that a table holds after a first request for `positions`, at most `positions_max`. It is
    /// a power of two, so that rows that grow token by token rarely need a new table.
    pub fn held(positions: usize, positions_max: usize) -> usize {
        positions.next_power_of_two().max(POSITIONS_MIN).min(positions_max)
    }

    /// Returns a table with at least `positions` positions. The angle is the f32 product position * inverse frequency,
    /// as in `transformers`. Its cos and sin are rounded once, from f64.
    fn reaching(&self, positions: usize) -> Arc<Angles> {
        let there = self.angles.read().unwrap_or_else(PoisonError::into_inner).clone();
        if positions <= there.positions {
            return there;
        }
        assert!(
            positions <= self.positions_max,
            "rope: position {} of a table of {}",
            positions - 1,
            self.positions_max
        );
        let held = Self::held(positions, self.positions_max);
        let (mut cos, mut sin, mut query_scale) = (there.cos.clone(), there.sin.clone(), there.query_scale.clone());
        let Rotation { head_dim, inverse_frequencies, attention_factor, .. } = &self.rotation;
        let values = 2 * (head_dim / 2) + usize::from(self.rotation.query_scale.is_some());
        let (bytes, made) = (held * values * size_of::<f32>(), !null::is_active());
        for at in (there.positions..held).filter(|_| made) {
            for frequency in inverse_frequencies {
                let (s, c) = f64::from(at as f32 * frequency).sin_cos();
                cos.push(c as f32 * attention_factor);
                sin.push(s as f32 * attention_factor);
            }
            let still = head_dim / 2 - inverse_frequencies.len();
            cos.extend(std::iter::repeat_n(1.0, still));
            sin.extend(std::iter::repeat_n(0.0, still));
            let of_position =
                |(beta, original): (f64, f64)| (1.0 + beta * (1.0 + (at as f64 / original).floor()).ln()) as f32;
            query_scale.extend(self.rotation.query_scale.map(of_position));
        }
        let made = Arc::new(Angles {
            positions: held,
            cos,
            sin,
            query_scale,
            on_gpu: OnceLock::new(),
            _held: null::hold("rotary tables", bytes),
        });
        *self.angles.write().unwrap_or_else(PoisonError::into_inner) = made.clone();
        made
    }

    /// A table that contains the angles of these positions.
    pub(super) fn angles_at(&self, positions: &Indices) -> Arc<Angles> {
        self.reaching(positions.largest().map_or(0, |last| last as usize + 1))
    }

    /// Extends the table for positions that only the GPU will know.
    ///
    /// # Panics
    /// If `positions` is more than `positions_max`.
    pub fn reserve(&self, positions: usize) {
        self.reaching(positions);
    }

    /// The address of the table on a GPU, valid until it grows.
    pub fn place(&self) -> Arg {
        self.reaching(0).cuda(self.rotation.head_dim).place()
    }

    /// The number of positions in the table now.
    pub fn positions(&self) -> usize {
        self.reaching(0).positions
    }
}

impl Angles {
    pub(super) fn cuda(&self, head_dim: usize) -> &Table {
        self.on_gpu.get_or_init(|| Table::new(head_dim, &self.cos, &self.sin, &self.query_scale))
    }
}

/// Rotates q (t, heads*e) and k (t, kv_heads*e) in place. In each head x, with i < e/2, (x[i], x[i+e/2]) is rotated by
/// the angle of its row's position. Then q is multiplied by the position's factor, if there is one.
///
/// `positions` has one number for each row or, on a CPU, `AXES`: then each pair turns by the position on its axis. Equal
/// numbers of a row give the bits of one.
pub fn forward(q: &mut Tensor, k: &mut Tensor, positions: &Indices, table: &RopeTable) {
    rotate([q, k], positions, table, false);
}

/// The transpose: rotates dq and dk back, in place.
pub fn backward(dq: &mut Tensor, dk: &mut Tensor, positions: &Indices, table: &RopeTable) {
    rotate([dq, dk], positions, table, true);
}

fn rotate(both: [&mut Tensor; 2], positions: &Indices, table: &RopeTable, back: bool) {
    let Rotation { head_dim, axes, .. } = &table.rotation;
    let (head_dim, half) = (*head_dim, head_dim / 2);
    let has_axes = both[0].rows() > 0 && positions.len() == AXES * both[0].rows();
    let rows = positions.len() / if has_axes { AXES } else { 1 };
    assert!(!has_axes || !axes.is_empty(), "rope: this model has no axes of positions");
    for (name, x) in ["q", "k"].into_iter().zip(&both) {
        assert!(
            x.rows() == rows && half > 0 && x.width().is_multiple_of(2 * half),
            "rope: {name} is ({}, {}), which does not fit {rows} positions and head dim {}",
            x.rows(),
            x.width(),
            head_dim
        );
    }
    let angles = table.angles_at(positions);
    let scales = &angles.query_scale;
    match both[0].device() {
        Device::Cpu => {
            let angles = cpu::rope::Angles { half, cos: &angles.cos, sin: &angles.sin, back };
            let [q, k] = both.map(|x| (x.width(), x.data_mut()));
            for (width, x) in [(q.0, &mut *q.1), (k.0, k.1)] {
                if has_axes {
                    cpu::rope::rotate_axes(x, width, (positions, axes), angles);
                } else {
                    cpu::rope::rotate(x, width, positions, angles);
                }
            }
            if !scales.is_empty() {
                cpu::rope::scale(q.1, q.0, positions, scales);
            }
        }
        Device::Cuda => {
            let [q, k] = both.map(Tensor::cuda_mut);
            assert!(!has_axes, "rope: there is no kernel for axes of positions");
            cuda::rope::rotate(q, k, rows, positions.cuda(), angles.cuda(head_dim), back);
        }
    }
}
