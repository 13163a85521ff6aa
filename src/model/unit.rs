//! The values of one unit of the parameter table, or of this rank's range of it, in the working dtype.

use super::bf16::{narrow, widen};
use super::params::{ParamId, ParamSpec, ParamTable};
use crate::comm::Group;
use crate::device::Device;
use crate::device::cuda::{Arg, Home, Memory, View, ViewMut};
use crate::device::null;
use crate::tensor::arena::Buffer;
use crate::tensor::{DType, FLAT_ALIGN, Layout, Piece, Slice, Values, Weight, Words, WordsMut};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Elements that one task converts between dtypes.
const CHUNK: usize = 1 << 16;
/// Elements that are at the host at a time on their way to a GPU: enough for all threads.
const UPLOADED: usize = 1 << 21;

#[derive(Debug)]
pub struct UnitValues {
    table: Arc<ParamTable>,
    /// What they are of the flat vector.
    range: Range<usize>,
    store: Store,
    /// Where values of the GPU wait that have left it.
    home: Option<Home>,
}

#[derive(Debug)]
enum Store {
    F32(Buffer),
    /// `flat` holds two bf16 a float.
    Bf16 {
        flat: Buffer,
        rows: Rows,
    },
    /// bf16 on the GPU.
    Cuda(Memory),
}

/// An f32 copy of every parameter in row layout, end to end; and where each begins.
#[derive(Debug)]
struct Rows {
    values: Buffer,
    places: Vec<(ParamId, usize)>,
}

impl UnitValues {
    /// Unspecified values of all of a unit.
    pub fn scratch(table: &Arc<ParamTable>, unit: usize, dtype: DType) -> Self {
        let range = table.units()[unit].clone();
        if table.device() == Device::Cuda {
            return Self::on_gpu(table, range);
        }
        let (mut places, mut len) = (Vec::new(), 0);
        for (id, _) in parts(table, &range) {
            let spec = table.spec(id);
            if spec.layout == Layout::Row && dtype == DType::Bf16 {
                places.push((id, len));
                len += spec.len;
            }
        }
        Self::new(table, range, dtype, places, len)
    }

    /// Unspecified values of `range`.
    fn on_gpu(table: &Arc<ParamTable>, range: Range<usize>) -> Self {
        let memory = Memory::scratch(range.len() * DType::Bf16.bytes());
        Self { table: table.clone(), range, store: Store::Cuda(memory), home: None }
    }

    /// Values of `range` on a GPU: `fill` gives the host's bf16 of a range of the flat vector after another, each a few MiB.
    ///
    /// # Errors
    /// That of `fill`.
    ///
    /// # Panics
    /// If the table is not laid out for a GPU.
    pub fn upload<E>(
        table: &Arc<ParamTable>,
        range: Range<usize>,
        mut fill: impl FnMut(Range<usize>, &mut [u16]) -> Result<(), E>,
    ) -> Result<Self, E> {
        assert_eq!(table.device(), Device::Cuda, "weights that lie on the CPU");
        let mut values = Self::on_gpu(table, range.clone());
        let mut bits = vec![0; UPLOADED.min(range.len())];
        for start in range.clone().step_by(UPLOADED) {
            let part = start..(start + UPLOADED).min(range.end);
            let bits = &mut bits[..part.len()];
            fill(part.clone(), bits)?;
            values.cuda_at_mut(&part).write_bits(bits);
        }
        Ok(values)
    }

    /// All zeros.
    pub fn zeros(table: &Arc<ParamTable>, unit: usize, dtype: DType) -> Self {
        let mut values = Self::scratch(table, unit, dtype);
        values.clear();
        values
    }

    /// Zeros of `range`, a part of a unit, without the f32 copies that layers need.
    pub(super) fn part(table: &Arc<ParamTable>, range: Range<usize>, dtype: DType) -> Self {
        let mut values = Self::part_scratch(table, range, dtype);
        values.clear();
        values
    }

    /// The same of unspecified values.
    pub(super) fn part_scratch(table: &Arc<ParamTable>, range: Range<usize>, dtype: DType) -> Self {
        check_cut(&range);
        match table.device() {
            Device::Cuda => Self::on_gpu(table, range),
            Device::Cpu => Self::new(table, range, dtype, Vec::new(), 0),
        }
    }

    fn new(
        table: &Arc<ParamTable>,
        range: Range<usize>,
        dtype: DType,
        places: Vec<(ParamId, usize)>,
        rows: usize,
    ) -> Self {
        let store = match dtype {
            DType::F32 => Store::F32(Buffer::scratch(range.len())),
            DType::Bf16 => Store::Bf16 {
                flat: Buffer::scratch(range.len() / 2),
                rows: Rows { values: Buffer::scratch(rows), places },
            },
        };
        Self { table: table.clone(), range, store, home: None }
    }

    fn clear(&mut self) {
        use crate::device::cpu::copy::fill;
        match &mut self.store {
            Store::F32(flat) => fill(flat, 0.0),
            Store::Bf16 { flat, rows } => {
                fill(flat, 0.0);
                fill(&mut rows.values, 0.0);
            }
            Store::Cuda(memory) => memory.view_mut(DType::Bf16).clear(),
        }
    }

    pub fn dtype(&self) -> DType {
        match self.store {
            Store::F32(_) => DType::F32,
            Store::Bf16 { .. } | Store::Cuda(_) => DType::Bf16,
        }
    }

    /// Where the kernels of a GPU read them; `None` on the CPU.
    pub fn place(&self) -> Option<Arg> {
        match &self.store {
            Store::Cuda(memory) => Some(memory.arg()),
            _ => None,
        }
    }

    pub fn device(&self) -> Device {
        self.table.device()
    }

    /// What they are of the flat vector.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Bytes of the values, f32 copies included.
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::F32(flat) => size_of_val::<[f32]>(flat),
            Store::Bf16 { flat, rows } => size_of_val::<[f32]>(flat) + size_of_val::<[f32]>(&rows.values),
            Store::Cuda(memory) => memory.bytes(),
        }
    }

    /// Frees the memory of values of a GPU, which wait in pinned memory of the host; `have_changed`: since they left last.
    /// Values of the CPU stay.
    pub(super) fn leave(&mut self, have_changed: bool) {
        let Store::Cuda(memory) = &mut self.store else { return };
        match &mut self.home {
            _ if memory.bytes() == 0 => {}
            Some(home) => home.leave(memory, have_changed),
            None => self.home = Some(Home::of(memory)),
        }
    }

    /// Whether values have left the GPU.
    pub(super) fn is_away(&self) -> bool {
        matches!(&self.store, Store::Cuda(memory) if self.home.is_some() && memory.bytes() == 0)
    }

    /// Begins to bring values back that have left.
    pub(super) fn come(&mut self) {
        if self.is_away()
            && let (Store::Cuda(memory), Some(home)) = (&mut self.store, &mut self.home)
        {
            *memory = home.come();
        }
    }

    /// What is started from now on comes behind the copy of values that are coming back.
    pub(super) fn land(&self) {
        if let Some(home) = &self.home {
            home.land();
        }
    }

    /// The buffers of values that lie on the CPU.
    pub(super) fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        let (flat, rows) = match &self.store {
            Store::F32(flat) => (Some(flat), None),
            Store::Bf16 { flat, rows } => (Some(flat), Some(&rows.values)),
            Store::Cuda(_) => (None, None),
        };
        flat.into_iter().chain(rows)
    }

    pub(super) fn buffers_mut(&mut self) -> impl Iterator<Item = &mut Buffer> {
        let (flat, rows) = match &mut self.store {
            Store::F32(flat) => (Some(flat), None),
            Store::Bf16 { flat, rows } => (Some(flat), Some(&mut rows.values)),
            Store::Cuda(_) => (None, None),
        };
        flat.into_iter().chain(rows)
    }

    /// A matrix parameter. Row-layout matrices are f32 in either dtype.
    pub fn weight(&self, id: ParamId) -> Weight<'_> {
        let spec = self.table.spec(id);
        let (n, k) = spec.dims();
        let values = match &self.store {
            Store::Bf16 { flat, .. } if spec.layout == Layout::Panel => {
                Values::Bf16(&bytemuck::cast_slice::<f32, u16>(flat)[self.here(&spec.range())])
            }
            Store::Cuda(memory) => Values::Cuda(memory.view(DType::Bf16).part(self.here(&spec.range()))),
            _ => Values::F32(self.floats(id)),
        };
        Weight { n, k, layout: spec.layout, values }
    }

    /// A norm, a bias or a value head: its elements, padding excluded.
    pub fn vector(&self, id: ParamId) -> Slice<'_> {
        let spec = self.table.spec(id);
        match &self.store {
            Store::Cuda(memory) => {
                let start = self.here(&spec.range()).start;
                Slice::Cuda(memory.view(DType::Bf16).part(start..start + spec.elements()))
            }
            _ => Slice::Cpu(&self.floats(id)[..spec.elements()]),
        }
    }

    fn floats(&self, id: ParamId) -> &[f32] {
        let spec = self.table.spec(id);
        match &self.store {
            Store::F32(flat) => &flat[self.here(&spec.range())],
            Store::Bf16 { rows, .. } => {
                let place = rows.places.iter().find(|(other, _)| *other == id);
                let (_, at) = place.unwrap_or_else(|| panic!("{} has no f32 copy here", spec.name));
                &rows.values[*at..*at + spec.len]
            }
            Store::Cuda(_) => panic!("{} of the GPU is needed on the CPU", spec.name),
        }
    }

    /// A part of the flat vector, counted from the first value.
    fn here(&self, part: &Range<usize>) -> Range<usize> {
        let inside = self.range.start <= part.start && part.end <= self.range.end;
        assert!(inside, "elements {part:?} are not among {:?}", self.range);
        part.start - self.range.start..part.end - self.range.start
    }

    /// The values as they lie in memory.
    pub fn words(&self) -> Words<'_> {
        match &self.store {
            Store::F32(flat) => Words::F32(flat),
            Store::Bf16 { flat, .. } => Words::Bf16(bytemuck::cast_slice(flat)),
            Store::Cuda(memory) => Words::Cuda(memory.view(DType::Bf16)),
        }
    }

    /// The same. Call `refresh` after changing them.
    pub fn words_mut(&mut self) -> WordsMut<'_> {
        match &mut self.store {
            Store::F32(flat) => WordsMut::F32(flat),
            Store::Bf16 { flat, .. } => WordsMut::Bf16(bytemuck::cast_slice_mut(flat)),
            Store::Cuda(memory) => WordsMut::Cuda(memory.view_mut(DType::Bf16)),
        }
    }

    /// The bf16 values on the GPU.
    ///
    /// # Panics
    /// If they lie on the CPU.
    pub fn cuda(&self) -> View<'_> {
        match &self.store {
            Store::Cuda(memory) => memory.view(DType::Bf16),
            _ => panic!("values of the CPU are needed on the GPU"),
        }
    }

    /// # Panics
    /// If the dtype is not f32.
    pub fn f32(&self) -> &[f32] {
        match &self.store {
            Store::F32(flat) => flat,
            Store::Bf16 { .. } | Store::Cuda(_) => panic!("f32 values of bf16 weights"),
        }
    }

    /// # Panics
    /// If the dtype is not f32.
    pub fn f32_mut(&mut self) -> &mut [f32] {
        match &mut self.store {
            Store::F32(flat) => flat,
            Store::Bf16 { .. } | Store::Cuda(_) => panic!("f32 values of bf16 weights"),
        }
    }

    /// # Panics
    /// If the dtype is not bf16.
    pub fn bf16(&self) -> &[u16] {
        match &self.store {
            Store::Bf16 { flat, .. } => bytemuck::cast_slice(flat),
            Store::F32(_) => panic!("bf16 values of f32 weights"),
            Store::Cuda(_) => panic!("values of the GPU are needed on the CPU"),
        }
    }

    /// Call `refresh` after changing them.
    ///
    /// # Panics
    /// If the dtype is not bf16.
    pub fn bf16_mut(&mut self) -> &mut [u16] {
        match &mut self.store {
            Store::Bf16 { flat, .. } => bytemuck::cast_slice_mut(flat),
            Store::F32(_) => panic!("bf16 values of f32 weights"),
            Store::Cuda(_) => panic!("values of the GPU are needed on the CPU"),
        }
    }

    /// The values of a part of the flat vector, where the dtype is f32.
    pub fn f32_at(&self, part: &Range<usize>) -> &[f32] {
        &self.f32()[self.here(part)]
    }

    /// The values of a part of the flat vector, where the dtype is f32.
    pub fn f32_at_mut(&mut self, part: &Range<usize>) -> &mut [f32] {
        let here = self.here(part);
        &mut self.f32_mut()[here]
    }

    /// The bf16 values of a part of the flat vector, on the GPU.
    ///
    /// # Panics
    /// If they lie on the CPU.
    pub fn cuda_at(&self, part: &Range<usize>) -> View<'_> {
        self.cuda().part(self.here(part))
    }

    /// As `cuda_at`.
    ///
    /// # Panics
    /// As `cuda_at`.
    pub fn cuda_at_mut(&mut self, part: &Range<usize>) -> ViewMut<'_> {
        let here = self.here(part);
        match &mut self.store {
            Store::Cuda(memory) => memory.view_mut(DType::Bf16).part(here),
            _ => panic!("values of the CPU are needed on the GPU"),
        }
    }

    /// Renews the f32 copies after `bf16_mut` was written to; nothing to do in f32.
    pub fn refresh(&mut self) {
        let Store::Bf16 { flat, rows } = &mut self.store else { return };
        let flat: &[u16] = bytemuck::cast_slice(flat);
        for &(id, at) in rows.places.iter().filter(|_| !null::is_active()) {
            let spec = self.table.spec(id);
            let from = spec.offset - self.range.start;
            let pairs = rows.values[at..at + spec.len].par_chunks_mut(CHUNK);
            pairs.zip(flat[from..from + spec.len].par_chunks(CHUNK)).for_each(|(to, from)| {
                widen(Layout::Row, from, to);
            });
        }
    }

    /// Takes over the values of `other`, which lie within these, and leaves the f32 copies as they are.
    pub(super) fn take(&mut self, other: &Self) {
        let (at, len) = (self.here(&other.range).start, other.range.len());
        self.words_mut().copy_from(other.words(), &Piece::run(0, len), &Piece::run(at, len));
    }

    /// The part of these values that lies in `range`, without f32 copies.
    pub(super) fn cut(&self, range: Range<usize>) -> Self {
        let (at, len) = (self.here(&range).start, range.len());
        let mut part = Self::part_scratch(&self.table, range, self.dtype());
        part.words_mut().copy_from(self.words(), &Piece::run(at, len), &Piece::run(0, len));
        part
    }

    /// Each rank's `cuts` (from the unit's start) to all ranks.
    pub(super) fn gather(&mut self, group: &Group, cuts: &[Range<usize>]) {
        match &mut self.store {
            Store::F32(flat) => group.all_gather(flat, cuts),
            Store::Bf16 { flat, .. } => {
                group.all_gather_u16(bytemuck::cast_slice_mut(flat), cuts);
                self.refresh();
            }
            Store::Cuda(memory) => group.gather_weights(memory, cuts),
        }
    }

    /// The values of a flat range as they lie in memory, two `u16` an f32.
    pub(super) fn read_words(&self, range: &Range<usize>, out: &mut [u16]) {
        let here = self.here(range);
        match &self.store {
            Store::F32(flat) => out.copy_from_slice(bytemuck::cast_slice(&flat[here])),
            Store::Bf16 { flat, .. } => out.copy_from_slice(&bytemuck::cast_slice(flat)[here]),
            Store::Cuda(memory) => memory.view(DType::Bf16).part(here).read_bits(out),
        }
    }

    /// Writes the f32 values (in f32 panel order) of a flat range into `out`.
    pub(super) fn to_master(&self, range: &Range<usize>, out: &mut [f32]) {
        match &self.store {
            _ if null::is_active() => {}
            Store::F32(flat) => out.copy_from_slice(&flat[self.here(range)]),
            Store::Bf16 { flat, .. } => {
                let flat: &[u16] = bytemuck::cast_slice(flat);
                for (id, part) in parts(&self.table, range) {
                    let to = &mut out[part.start - range.start..part.end - range.start];
                    let layout = self.table.spec(id).layout;
                    let pairs = to.par_chunks_mut(CHUNK).zip(flat[self.here(&part)].par_chunks(CHUNK));
                    pairs.for_each(|(to, from)| widen(layout, from, to));
                }
            }
            Store::Cuda(memory) => {
                out.copy_from_slice(&memory.view(DType::Bf16).part(self.here(range)).to_f32());
            }
        }
    }

    /// Stores f32 values (in f32 panel order) into a flat range; rounded to nearest even in bf16.
    pub(super) fn store_master(&mut self, range: &Range<usize>, master: &[f32]) {
        let here = self.here(range);
        match &mut self.store {
            _ if null::is_active() => {}
            Store::F32(flat) => flat[here].copy_from_slice(master),
            Store::Bf16 { flat, rows } => {
                let flat: &mut [u16] = bytemuck::cast_slice_mut(flat);
                for (id, part) in parts(&self.table, range) {
                    let spec = self.table.spec(id);
                    let from = &master[part.start - range.start..part.end - range.start];
                    let here = part.start - self.range.start..part.end - self.range.start;
                    let pairs = flat[here.clone()].par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK));
                    pairs.for_each(|(to, from)| narrow(spec.layout, from, to));
                    if let Some((_, row)) = rows.places.iter().find(|(other, _)| *other == id) {
                        let at = row + part.start - spec.offset;
                        widen(Layout::Row, &flat[here], &mut rows.values[at..at + part.len()]);
                    }
                }
            }
            Store::Cuda(memory) => memory.view_mut(DType::Bf16).part(here).write(master),
        }
    }
}

/// The parameters that a flat range touches, with the part of it that lies in each.
pub(super) fn parts(table: &ParamTable, range: &Range<usize>) -> impl Iterator<Item = (ParamId, Range<usize>)> {
    let Range { start, end } = *range;
    let specs: &[ParamSpec] = table.specs();
    let first = specs.partition_point(|s| s.offset + s.len <= start);
    let touched = specs[first..].iter().enumerate().take_while(move |(_, s)| s.offset < end);
    touched.map(move |(i, s)| (ParamId(first + i), start.max(s.offset)..end.min(s.offset + s.len)))
}

pub(super) fn check_cut(range: &Range<usize>) {
    let aligned = range.start.is_multiple_of(FLAT_ALIGN) && range.end.is_multiple_of(FLAT_ALIGN);
    assert!(aligned, "flat range {range:?} is not cut at multiples of {FLAT_ALIGN}");
}
