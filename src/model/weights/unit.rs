//! The values of one unit of the parameter table, or of this rank's range of it, in the working dtype.

use super::pack::{narrow, widen};
use crate::comm::Group;
use crate::device::Device;
use crate::device::cuda::{Arg, HostCopy};
use crate::model::params::{ParamId, ParamSpec, ParamTable};
use crate::tensor::arena::Buffer;
use crate::tensor::{DType, FLAT_ALIGN, Flat, Layout, Piece, Slice, SliceMut, Weight, convert, copy};
use std::ops::Range;
use std::sync::Arc;

/// The number of elements that are on the host at a time during an upload to a GPU: enough for all threads.
const UPLOADED: usize = 1 << 21;

#[derive(Debug)]
pub struct UnitValues {
    table: Arc<ParamTable>,
    /// Their range in the flat vector.
    range: Range<usize>,
    /// The values of the range, followed by padding if ranks gather the unit.
    values: Flat,
    /// For bf16 values on the CPU.
    copies: Option<RowCopies>,
    /// The copy in pinned host memory, for values of a GPU that were offloaded before.
    host_copy: Option<HostCopy>,
}

/// An f32 copy of every parameter in row layout, end to end, and the start of each.
#[derive(Debug)]
struct RowCopies {
    values: Buffer,
    starts: Vec<(ParamId, usize)>,
}

impl RowCopies {
    fn start(&self, id: ParamId) -> Option<usize> {
        self.starts.iter().find(|(other, _)| *other == id).map(|(_, start)| *start)
    }
}

impl UnitValues {
    /// A whole unit with unspecified values.
    pub fn scratch(table: &Arc<ParamTable>, unit: usize, dtype: DType) -> Self {
        Self::of_range(table, table.units()[unit].clone(), dtype)
    }

    /// The part `range` of a unit, whole parameters with unspecified values, in memory of `padded_len` elements, padded
    /// by `Partition` for `gather`.
    pub fn padded_scratch(table: &Arc<ParamTable>, range: Range<usize>, dtype: DType, padded_len: usize) -> Self {
        Self::new(table, range, padded_len, dtype, true)
    }

    /// The part `range` of a unit with unspecified values, without the f32 copies that layers need.
    pub(super) fn part_scratch(table: &Arc<ParamTable>, range: Range<usize>, dtype: DType) -> Self {
        check_cut(&range);
        let len = range.len();
        Self::new(table, range, len, dtype, false)
    }

    /// A unit whose values are elsewhere.
    pub(super) fn absent(table: &Arc<ParamTable>, unit: usize, dtype: DType) -> Self {
        let start = table.units()[unit].start;
        Self::part_scratch(table, start..start, dtype)
    }

    /// The part `range` of a unit with unspecified values: whole parameters.
    pub(super) fn of_range(table: &Arc<ParamTable>, range: Range<usize>, dtype: DType) -> Self {
        let len = range.len();
        Self::new(table, range, len, dtype, true)
    }

    fn new(table: &Arc<ParamTable>, range: Range<usize>, padded_len: usize, dtype: DType, is_copied: bool) -> Self {
        assert!(padded_len >= range.len(), "elements {range:?} in memory of {padded_len}");
        let values = Flat::weights(table.device(), dtype, padded_len);
        let copies = matches!(values, Flat::Bf16(..)).then(|| {
            let (mut starts, mut len) = (Vec::new(), 0);
            for (id, _) in table.parts(&range).filter(|(id, _)| is_copied && table.spec(*id).layout == Layout::Row) {
                starts.push((id, len));
                len += table.spec(id).len;
            }
            RowCopies { values: Buffer::scratch(len), starts }
        });
        Self { table: table.clone(), range, values, copies, host_copy: None }
    }

    /// Replaces all values. `fill` writes the values of one range of the flat vector after another, in f32 or bf16 on
    /// the host. Values for a GPU are uploaded a few MiB at a time.
    ///
    /// # Errors
    /// The error of `fill`.
    pub(in crate::model) fn filled<E>(
        mut self,
        mut fill: impl FnMut(Range<usize>, SliceMut) -> Result<(), E>,
    ) -> Result<Self, E> {
        let range = self.range.clone();
        let SliceMut::Cuda(mut view) = self.slice_mut() else {
            fill(range, self.slice_mut())?;
            self.refresh();
            return Ok(self);
        };
        let mut bits = vec![0; UPLOADED.min(range.len())];
        for start in range.clone().step_by(UPLOADED) {
            let part = start..(start + UPLOADED).min(range.end);
            let bits = &mut bits[..part.len()];
            fill(part.clone(), SliceMut::Bf16(bits))?;
            view.reborrow().part(part.start - range.start..part.end - range.start).write_bits(bits);
        }
        Ok(self)
    }

    pub fn dtype(&self) -> DType {
        self.slice().dtype()
    }

    /// The address of the values on a GPU; `None` on the CPU.
    pub fn address(&self) -> Option<Arg> {
        match &self.values {
            Flat::Cuda(memory, _) => Some(memory.arg()),
            _ => None,
        }
    }

    pub fn device(&self) -> Device {
        self.table.device()
    }

    /// Their range in the flat vector.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The bytes of the values, f32 copies included.
    pub fn bytes(&self) -> usize {
        self.values.bytes() + self.copies.as_ref().map_or(0, |copies| size_of_val::<[f32]>(&copies.values))
    }

    /// Copies values of a GPU to pinned host memory, if they `have_changed` since the last offload, and frees their GPU
    /// memory. Values on the CPU stay.
    pub(super) fn offload(&mut self, have_changed: bool) {
        let Flat::Cuda(memory, _) = &mut self.values else { return };
        match &mut self.host_copy {
            _ if memory.bytes() == 0 => {}
            Some(host_copy) => host_copy.offload(memory, have_changed),
            None => self.host_copy = Some(HostCopy::offload_from(memory)),
        }
    }

    pub(super) fn is_offloaded(&self) -> bool {
        matches!(&self.values, Flat::Cuda(memory, _) if self.host_copy.is_some() && memory.bytes() == 0)
    }

    /// Starts to copy offloaded values back to the GPU.
    pub(super) fn onload(&mut self) {
        if self.is_offloaded()
            && let (Flat::Cuda(memory, _), Some(host_copy)) = (&mut self.values, &mut self.host_copy)
        {
            *memory = host_copy.onload();
        }
    }

    /// Makes the compute stream wait until onloaded values have arrived.
    pub(super) fn wait(&self) {
        if let Some(host_copy) = &self.host_copy {
            host_copy.wait();
        }
    }

    /// The buffers of values on the CPU.
    pub(super) fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        self.values.buffer().into_iter().chain(self.copies.as_ref().map(|copies| &copies.values))
    }

    pub(super) fn buffers_mut(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.values.buffer_mut().into_iter().chain(self.copies.as_mut().map(|copies| &mut copies.values))
    }

    /// A matrix parameter. Row-layout matrices are f32 with either dtype.
    pub fn weight(&self, id: ParamId) -> Weight<'_> {
        let spec = self.table.spec(id);
        let (n, k) = spec.dims();
        let values = match &self.values {
            Flat::Bf16(..) if spec.layout == Layout::Row => Slice::F32(self.copy_of(id)),
            values => values.all().part(self.here(&spec.range())),
        };
        Weight { n, k, layout: spec.layout, values }
    }

    /// A norm, a bias or a value head: its elements, padding excluded.
    pub fn vector(&self, id: ParamId) -> Slice<'_> {
        let elements = 0..self.table.spec(id).elements();
        self.weight(id).values.part(elements)
    }

    fn copy_of(&self, id: ParamId) -> &[f32] {
        let spec = self.table.spec(id);
        let copies = self.copies.as_ref().and_then(|copies| Some(&copies.values[copies.start(id)?..][..spec.len]));
        copies.unwrap_or_else(|| panic!("{} has no f32 copy here", spec.name))
    }

    /// A part of the flat vector, counted from the first value here.
    fn here(&self, part: &Range<usize>) -> Range<usize> {
        let inside = self.range.start <= part.start && part.end <= self.range.end;
        assert!(inside, "elements {part:?} are not among {:?}", self.range);
        part.start - self.range.start..part.end - self.range.start
    }

    /// The values in memory order.
    pub fn slice(&self) -> Slice<'_> {
        self.values.slice(0..self.range.len())
    }

    /// The same, mutable. Call `refresh` after changing them.
    pub fn slice_mut(&mut self) -> SliceMut<'_> {
        self.values.slice_mut(0..self.range.len())
    }

    /// The values of a part of the flat vector.
    pub fn part(&self, part: &Range<usize>) -> Slice<'_> {
        self.slice().part(self.here(part))
    }

    /// A parameter and its values, given its range of the flat vector. Call `refresh` after changing them.
    pub(super) fn spec_part_mut(&mut self, range: &Range<usize>) -> (&ParamSpec, SliceMut<'_>) {
        let here = self.here(range);
        let (id, _) = self.table.parts(range).next().expect("the range of a parameter");
        (self.table.spec(id), self.values.slice_mut(here))
    }

    /// The same, mutable. Call `refresh` after changing them.
    pub fn part_mut(&mut self, part: &Range<usize>) -> SliceMut<'_> {
        let here = self.here(part);
        self.slice_mut().part(here)
    }

    /// Updates the f32 copies after bf16 values were changed. Does nothing for other values.
    pub fn refresh(&mut self) {
        let (Slice::Bf16(flat), Some(copies)) = (self.values.all(), &mut self.copies) else { return };
        for &(id, start) in &copies.starts {
            let spec = self.table.spec(id);
            let from = &flat[spec.offset - self.range.start..][..spec.len];
            convert(from, &mut copies.values[start..start + spec.len], |from, to| widen(Layout::Row, from, to));
        }
    }

    /// Copies the values of `other`, whose range lies within this one. The f32 copies stay as they are.
    pub(super) fn copy_part(&mut self, other: &Self) {
        let (at, len) = (self.here(&other.range).start, other.range.len());
        self.slice_mut().copy_from(other.slice(), &Piece::run(0, len), &Piece::run(at, len));
    }

    /// Gathers each rank's share of the padded unit, counted from the unit's start, to all ranks.
    pub(super) fn gather(&mut self, group: &Group, shares: &[Range<usize>]) {
        group.gather_slice(self.values.all_mut(), shares);
        self.refresh();
    }

    /// Reads the bits of a flat range in memory order, two `u16` for an f32.
    pub(in crate::model) fn read_bits(&self, range: &Range<usize>, out: &mut [u16]) {
        match self.part(range) {
            Slice::F32(values) => out.copy_from_slice(bytemuck::cast_slice(values)),
            Slice::Bf16(values) => out.copy_from_slice(values),
            Slice::Cuda(view) => view.read_bits(out),
        }
    }

    /// Writes the f32 values (in f32 panel order) of a flat range into `out`.
    pub(in crate::model) fn to_master(&self, range: &Range<usize>, out: &mut [f32]) {
        match self.part(range) {
            Slice::F32(values) => copy(values, out),
            Slice::Bf16(values) => {
                for (id, part) in self.table.parts(range) {
                    let at = part.start - range.start..part.end - range.start;
                    let layout = self.table.spec(id).layout;
                    convert(&values[at.clone()], &mut out[at], |from, to| widen(layout, from, to));
                }
            }
            Slice::Cuda(view) => copy(&view.to_f32(), out),
        }
    }

    /// Stores f32 values (in f32 panel order) into a flat range. For bf16 they are rounded to nearest even.
    pub(super) fn store_master(&mut self, range: &Range<usize>, master: &[f32]) {
        let here = self.here(range);
        match self.values.all_mut().part(here) {
            SliceMut::F32(values) => copy(master, values),
            SliceMut::Bf16(values) => {
                let copies = self.copies.as_mut().expect("bf16 values of the CPU have f32 copies");
                for (id, part) in self.table.parts(range) {
                    let spec = self.table.spec(id);
                    let at = part.start - range.start..part.end - range.start;
                    convert(&master[at.clone()], &mut values[at.clone()], |from, to| narrow(spec.layout, from, to));
                    if let Some(start) = copies.start(id) {
                        let row_copy = &mut copies.values[start + part.start - spec.offset..][..part.len()];
                        convert(&values[at], row_copy, |from, to| widen(Layout::Row, from, to));
                    }
                }
            }
            SliceMut::Cuda(mut view) => view.write(master),
        }
    }
}

pub(super) fn check_cut(range: &Range<usize>) {
    let aligned = range.start.is_multiple_of(FLAT_ALIGN) && range.end.is_multiple_of(FLAT_ALIGN);
    assert!(aligned, "flat range {range:?} is not cut at multiples of {FLAT_ALIGN}");
}
