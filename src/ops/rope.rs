//! Rotary position embedding, half-split order as in Hugging Face models (arXiv:2104.09864).

use crate::device::cuda::Arg;
use crate::device::cuda::rope::Table;
use crate::device::{Device, cpu, cuda, null};
use crate::sys::lock::lock;
use crate::tensor::{Indices, Tensor};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::thread::ThreadId;

/// The number of positions in the smallest table.
const POSITIONS_MIN: usize = 1024;

/// cos and sin of the positions requested so far, up to `positions_max`. A full table for a context of ten million
/// tokens would take 1.3 GB for one short row. `inverse_frequencies` (e/2) include any scaling. `attention_factor`
/// multiplies cos and sin (1 for most models).
#[derive(Debug)]
pub struct RopeTable {
    pub head_dim: usize,
    inverse_frequencies: Vec<f32>,
    attention_factor: f32,
    positions_max: usize,
    angles: RwLock<Arc<Angles>>,
}

/// The rows of the table so far, [position][e/2].
#[derive(Debug, Default)]
pub(super) struct Angles {
    positions: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// The same for GPU kernels, made at the first use.
    on_gpu: OnceLock<Table>,
    /// The bytes that they count on a null device, which does not make them.
    _held: null::Held,
}

impl RopeTable {
    pub fn new(inverse_frequencies: &[f32], attention_factor: f32, positions_max: usize) -> Self {
        Self {
            head_dim: 2 * inverse_frequencies.len(),
            inverse_frequencies: inverse_frequencies.to_vec(),
            attention_factor,
            positions_max,
            angles: RwLock::default(),
        }
    }

    /// Creates a table like `new`, but shares it with equal tables in use, because a table for a long context is large.
    pub fn shared(inverse_frequencies: &[f32], attention_factor: f32, positions_max: usize) -> Arc<Self> {
        static TABLES: Mutex<Vec<(Option<ThreadId>, Weak<RopeTable>)>> = Mutex::new(Vec::new());
        // Tables of a null device have no angles.
        let null_thread = null::is_active().then(|| std::thread::current().id());
        let mut tables = lock(&TABLES);
        tables.retain(|(_, table)| table.strong_count() > 0);
        let equal = |table: &Arc<Self>| {
            table.inverse_frequencies == inverse_frequencies
                && table.attention_factor == attention_factor
                && table.positions_max == positions_max
        };
        let same_device = tables.iter().filter(|(thread, _)| *thread == null_thread);
        if let Some(table) = same_device.filter_map(|(_, table)| table.upgrade()).find(equal) {
            return table;
        }
        let table = Arc::new(Self::new(inverse_frequencies, attention_factor, positions_max));
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
        let (mut cos, mut sin) = (there.cos.clone(), there.sin.clone());
        let (bytes, made) = (2 * held * self.inverse_frequencies.len() * size_of::<f32>(), !null::is_active());
        for at in (there.positions..held).filter(|_| made) {
            for frequency in &self.inverse_frequencies {
                let (s, c) = f64::from(at as f32 * frequency).sin_cos();
                cos.push(c as f32 * self.attention_factor);
                sin.push(s as f32 * self.attention_factor);
            }
        }
        let made = Arc::new(Angles {
            positions: held,
            cos,
            sin,
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
        self.reaching(0).cuda(self.head_dim).place()
    }

    /// The number of positions in the table now.
    pub fn positions(&self) -> usize {
        self.reaching(0).positions
    }
}

impl Angles {
    pub(super) fn cuda(&self, head_dim: usize) -> &Table {
        self.on_gpu.get_or_init(|| Table::new(head_dim, &self.cos, &self.sin))
    }
}

/// Rotates q (t, heads*e) and k (t, kv_heads*e) in place. In each head x, with i < e/2, (x[i], x[i+e/2]) is rotated by
/// the angle of its row's position.
pub fn forward(q: &mut Tensor, k: &mut Tensor, positions: &Indices, table: &RopeTable) {
    rotate([q, k], positions, table, false);
}

/// The transpose: rotates dq and dk back, in place.
pub fn backward(dq: &mut Tensor, dk: &mut Tensor, positions: &Indices, table: &RopeTable) {
    rotate([dq, dk], positions, table, true);
}

fn rotate(both: [&mut Tensor; 2], positions: &Indices, table: &RopeTable, back: bool) {
    let (rows, half) = (positions.len(), table.head_dim / 2);
    for (name, x) in ["q", "k"].into_iter().zip(&both) {
        assert!(
            x.rows() == rows && half > 0 && x.width().is_multiple_of(2 * half),
            "rope: {name} is ({}, {}), which does not fit {rows} positions and head dim {}",
            x.rows(),
            x.width(),
            table.head_dim
        );
    }
    let angles = table.angles_at(positions);
    match both[0].device() {
        Device::Cpu => {
            let angles = cpu::rope::Angles { half, cos: &angles.cos, sin: &angles.sin, back };
            for x in both {
                let width = x.width();
                cpu::rope::rotate(x.data_mut(), width, positions, angles);
            }
        }
        Device::Cuda => {
            let [q, k] = both.map(Tensor::cuda_mut);
            cuda::rope::rotate(q, k, rows, positions.cuda(), angles.cuda(table.head_dim), back);
        }
    }
}
