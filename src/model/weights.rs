//! The values of a model's parameters and of their gradients, each one flat buffer in the order of the table.

use super::params::{ParamId, ParamSpec, ParamTable};
use crate::device::cpu::copy;
use crate::tensor::arena::Buffer;
use crate::tensor::{DType, FLAT_ALIGN, Layout, PANEL, Values, Weight, WeightMut};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Elements that one task converts between dtypes.
const CHUNK: usize = 1 << 16;

#[derive(Clone, Debug)]
enum Store {
    F32(Buffer),
    /// `flat` holds two bf16 a float; `rows` an f32 copy of every parameter in row layout.
    Bf16 {
        flat: Buffer,
        rows: Buffer,
    },
}

/// All parameters of one model, in the working dtype.
#[derive(Clone, Debug)]
pub struct Weights {
    pub table: Arc<ParamTable>,
    store: Store,
    /// Offset of each row-layout parameter in `rows`, by parameter.
    row_offsets: Arc<Vec<usize>>,
}

impl Weights {
    /// All zeros.
    pub fn zeros(table: Arc<ParamTable>, dtype: DType) -> Self {
        let mut rows = 0;
        let mut row_offsets = Vec::with_capacity(table.specs().len());
        for spec in table.specs() {
            row_offsets.push(rows);
            rows += if spec.layout == Layout::Row { spec.len } else { 0 };
        }
        let store = match dtype {
            DType::F32 => Store::F32(Buffer::zeros(table.len())),
            DType::Bf16 => Store::Bf16 { flat: Buffer::zeros(table.len() / 2), rows: Buffer::zeros(rows) },
        };
        Self { table, store, row_offsets: Arc::new(row_offsets) }
    }

    /// The parameters of unit `index`. Layers of a forward or backward ask for their units in order.
    pub fn unit(&self, index: usize) -> Unit<'_> {
        assert!(index < self.table.units().len(), "unit {index} of {}", self.table.units().len());
        Unit(self)
    }

    pub fn dtype(&self) -> DType {
        match self.store {
            Store::F32(_) => DType::F32,
            Store::Bf16 { .. } => DType::Bf16,
        }
    }

    /// A matrix parameter. Row-layout matrices are f32 in either dtype.
    pub fn weight(&self, id: ParamId) -> Weight<'_> {
        let spec = self.table.spec(id);
        let (n, k) = spec.dims();
        let values = match &self.store {
            Store::Bf16 { flat, .. } if spec.layout == Layout::Panel => {
                Values::Bf16(&bytemuck::cast_slice::<f32, u16>(flat)[spec.range()])
            }
            _ => Values::F32(self.floats(id)),
        };
        Weight { n, k, layout: spec.layout, values }
    }

    /// A norm, a bias or a value head: its elements, padding excluded.
    pub fn vector(&self, id: ParamId) -> &[f32] {
        &self.floats(id)[..self.table.spec(id).elements()]
    }

    fn floats(&self, id: ParamId) -> &[f32] {
        let spec = self.table.spec(id);
        match &self.store {
            Store::F32(flat) => &flat[spec.range()],
            Store::Bf16 { rows, .. } => {
                assert_eq!(spec.layout, Layout::Row, "{} has no f32 copy", spec.name);
                &rows[self.row_offsets[id.0]..][..spec.len]
            }
        }
    }

    /// The flat f32 buffer, on which the optimizer works in place.
    ///
    /// # Panics
    /// If the dtype is not f32.
    pub fn flat_f32_mut(&mut self) -> &mut [f32] {
        match &mut self.store {
            Store::F32(flat) => flat,
            Store::Bf16 { .. } => panic!("flat_f32_mut of bf16 weights"),
        }
    }

    /// # Panics
    /// If the dtype is not f32.
    pub fn flat_f32(&self) -> &[f32] {
        match &self.store {
            Store::F32(flat) => flat,
            Store::Bf16 { .. } => panic!("flat_f32 of bf16 weights"),
        }
    }

    /// The flat bf16 buffer; call `refresh` after changing it.
    ///
    /// # Panics
    /// If the dtype is not bf16.
    pub fn flat_bf16_mut(&mut self) -> &mut [u16] {
        match &mut self.store {
            Store::Bf16 { flat, .. } => bytemuck::cast_slice_mut(flat),
            Store::F32(_) => panic!("flat_bf16_mut of f32 weights"),
        }
    }

    /// # Panics
    /// If the dtype is not bf16.
    pub fn flat_bf16(&self) -> &[u16] {
        match &self.store {
            Store::Bf16 { flat, .. } => bytemuck::cast_slice(flat),
            Store::F32(_) => panic!("flat_bf16 of f32 weights"),
        }
    }

    /// The f32 values (in f32 panel order) of a range that is cut at multiples of `FLAT_ALIGN`.
    pub fn to_master(&self, range: Range<usize>) -> Buffer {
        check_cut(&range);
        let mut out = Buffer::scratch(range.len());
        match &self.store {
            Store::F32(flat) => out.copy_from_slice(&flat[range]),
            Store::Bf16 { flat, .. } => {
                let flat: &[u16] = bytemuck::cast_slice(flat);
                for (spec, part) in self.parts(&range) {
                    let to = &mut out[part.start - range.start..part.end - range.start];
                    let pairs = to.par_chunks_mut(CHUNK).zip(flat[part].par_chunks(CHUNK));
                    pairs.for_each(|(to, from)| widen(spec.layout, from, to));
                }
            }
        }
        out
    }

    /// Stores f32 values (in f32 panel order) into a range that is cut at multiples of `FLAT_ALIGN`; rounded to nearest
    /// even in bf16.
    pub fn store_master(&mut self, range: Range<usize>, master: &[f32]) {
        check_cut(&range);
        assert_eq!(range.len(), master.len(), "store_master: a range of another length");
        let table = self.table.clone();
        match &mut self.store {
            Store::F32(flat) => flat[range].copy_from_slice(master),
            Store::Bf16 { flat, rows } => {
                let flat: &mut [u16] = bytemuck::cast_slice_mut(flat);
                for (id, part) in parts(&table, &range) {
                    let spec = table.spec(id);
                    let from = &master[part.start - range.start..part.end - range.start];
                    let pairs = flat[part.clone()].par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK));
                    pairs.for_each(|(to, from)| narrow(spec.layout, from, to));
                    if spec.layout == Layout::Row {
                        let at = self.row_offsets[id.0] + part.start - spec.offset;
                        widen(Layout::Row, &flat[part.clone()], &mut rows[at..at + part.len()]);
                    }
                }
            }
        }
    }

    /// Renews the f32 copies after `flat_bf16_mut` was written to; nothing to do in f32.
    pub fn refresh(&mut self) {
        let Store::Bf16 { flat, rows } = &mut self.store else { return };
        let flat: &[u16] = bytemuck::cast_slice(flat);
        for (spec, &at) in self.table.specs().iter().zip(self.row_offsets.iter()) {
            if spec.layout == Layout::Row {
                let pairs = rows[at..at + spec.len].par_chunks_mut(CHUNK).zip(flat[spec.range()].par_chunks(CHUNK));
                pairs.for_each(|(to, from)| widen(Layout::Row, from, to));
            }
        }
    }

    fn parts(&self, range: &Range<usize>) -> impl Iterator<Item = (&ParamSpec, Range<usize>)> {
        parts(&self.table, range).map(|(id, part)| (self.table.spec(id), part))
    }
}

/// The parameters that a flat range touches, with the part of it that lies in each.
fn parts(table: &ParamTable, range: &Range<usize>) -> impl Iterator<Item = (ParamId, Range<usize>)> {
    let Range { start, end } = *range;
    let first = table.specs().partition_point(|s| s.offset + s.len <= start);
    let touched = table.specs()[first..].iter().enumerate().take_while(move |(_, s)| s.offset < end);
    touched.map(move |(i, s)| (ParamId(first + i), start.max(s.offset)..end.min(s.offset + s.len)))
}

fn check_cut(range: &Range<usize>) {
    let aligned = range.start.is_multiple_of(FLAT_ALIGN) && range.end.is_multiple_of(FLAT_ALIGN);
    assert!(aligned, "flat range {range:?} is not cut at multiples of {FLAT_ALIGN}");
}

/// bf16 to f32, exactly. In panels two neighbouring k interleave.
fn widen(layout: Layout, from: &[u16], to: &mut [f32]) {
    let exact = |x: u16| f32::from_bits(u32::from(x) << 16);
    match layout {
        Layout::Row => to.iter_mut().zip(from).for_each(|(t, &x)| *t = exact(x)),
        Layout::Panel => {
            for (to, from) in to.chunks_exact_mut(2 * PANEL).zip(from.chunks_exact(2 * PANEL)) {
                let (even, odd) = to.split_at_mut(PANEL);
                for ((e, o), pair) in even.iter_mut().zip(odd).zip(from.chunks_exact(2)) {
                    (*e, *o) = (exact(pair[0]), exact(pair[1]));
                }
            }
        }
    }
}

/// f32 to bf16, rounded to nearest even. In panels two neighbouring k interleave.
pub(super) fn narrow(layout: Layout, from: &[f32], to: &mut [u16]) {
    match layout {
        Layout::Row => to.iter_mut().zip(from).for_each(|(t, &x)| *t = round(x)),
        Layout::Panel => {
            for (to, from) in to.chunks_exact_mut(2 * PANEL).zip(from.chunks_exact(2 * PANEL)) {
                let (even, odd) = from.split_at(PANEL);
                for (pair, (&e, &o)) in to.chunks_exact_mut(2).zip(even.iter().zip(odd)) {
                    (pair[0], pair[1]) = (round(e), round(o));
                }
            }
        }
    }
}

/// The nearest bf16, ties to even; NaN stays NaN.
#[inline]
pub(super) fn round(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16;
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded }
}

/// The parameters of one unit of the table, as layers see them.
#[derive(Clone, Copy, Debug)]
pub struct Unit<'a>(&'a Weights);

impl<'a> Unit<'a> {
    pub fn dtype(&self) -> DType {
        self.0.dtype()
    }

    /// A matrix parameter. Row-layout matrices are f32 in either dtype.
    pub fn weight(&self, id: ParamId) -> Weight<'a> {
        self.0.weight(id)
    }

    /// A norm, a bias or a value head: its elements, padding excluded.
    pub fn vector(&self, id: ParamId) -> &'a [f32] {
        self.0.vector(id)
    }
}

/// The gradients of all parameters: f32, in the order of the table.
#[derive(Clone, Debug)]
pub struct Gradients {
    pub table: Arc<ParamTable>,
    pub flat: Buffer,
}

impl Gradients {
    /// All zeros.
    pub fn new(table: Arc<ParamTable>) -> Self {
        let flat = Buffer::zeros(table.len());
        Self { table, flat }
    }

    pub fn zero(&mut self) {
        copy::fill(&mut self.flat, 0.0);
    }

    /// The backward of unit `index` is about to add to its gradients.
    pub fn begin(&mut self, index: usize) {
        assert!(index < self.table.units().len(), "unit {index} of {}", self.table.units().len());
    }

    /// The backward of unit `index` has added all that it adds.
    pub fn finish(&mut self, index: usize) {
        assert!(index < self.table.units().len(), "unit {index} of {}", self.table.units().len());
    }

    pub fn weight_mut(&mut self, id: ParamId) -> WeightMut<'_> {
        let spec = self.table.spec(id);
        let (n, k) = spec.dims();
        WeightMut { n, k, layout: spec.layout, values: &mut self.flat[spec.range()] }
    }

    /// The gradient of a norm, a bias or a value head.
    pub fn vector_mut(&mut self, id: ParamId) -> &mut [f32] {
        let spec = self.table.spec(id);
        &mut self.flat[spec.offset..spec.offset + spec.elements()]
    }
}
