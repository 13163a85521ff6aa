//! Gathers a model that is sharded over ranks on the first rank: parameter by parameter, some rows at a time, in the
//! order of files. Every rank sends the values that it alone has, and holds at most one piece of the others' values.
//!
//! Values on GPUs are copied to the host piece by piece, because the files need them there, and are sent by MPI.

use super::Weights;
use super::moves::without;
use super::pack::{pack_f32, unpack_rows, widen};
use super::partition::Partition;
use crate::comm::Axes;
use crate::model::arch::Arch;
use crate::model::decode::stored;
use crate::model::params::{ParamId, ParamSpec, ParamTable};
use crate::model::part::TensorPart;
use crate::tensor::{DType, Layout, PANEL};
use safetensors::Dtype;
use std::ops::Range;

/// The number of elements gathered at a time.
const PIECE: usize = 1 << 20;

/// Calls `take` on the first rank of `axes` with all rows of all parameters of the weights' table, in order. Its
/// arguments are the index of the parameter in the table and the row-major values of some rows. All ranks of `axes` call
/// this.
pub fn collect(arch: &Arch, weights: &Weights, axes: &Axes, mut take: impl FnMut(usize, &[f32])) {
    let mut collector = Collector::new(arch, weights, axes);
    for index in 0..weights.table.specs().len() {
        collector.parameter(index, |rows| take(index, rows));
    }
}

/// Collects parameters of weights in any order.
pub struct Collector<'a> {
    weights: &'a Weights,
    axes: &'a Axes,
    /// The tables of all tensor ranks.
    tables: Vec<ParamTable>,
    partitions: Vec<Partition>,
    /// The stage that counts each unit.
    stages: Vec<usize>,
    staging: Staging,
}

impl<'a> Collector<'a> {
    pub fn new(arch: &Arch, weights: &'a Weights, axes: &'a Axes) -> Self {
        let size = axes.tensor.size();
        let part = |rank| weights.table.for_part(arch, TensorPart { rank, size });
        let tables: Vec<ParamTable> = (0..size).map(part).collect();
        let [sharing, experts] = if weights.is_sharded() { [axes.zero.size(), axes.expert.size()] } else { [1; 2] };
        let partition =
            |table: &ParamTable| Partition::with_experts(table.units(), table.units_of_experts(), 0, sharing, experts);
        let partitions = tables.iter().map(partition).collect();
        let stages = weights.table.stages_of_units(axes.pipeline.size(), axes.chunks);
        Self { weights, axes, tables, partitions, stages, staging: Staging::default() }
    }

    /// Calls `take` on the first rank with all rows of parameter `index`, some at a time. All ranks call this.
    pub fn parameter(&mut self, index: usize, mut take: impl FnMut(&[f32])) {
        let Self { weights, axes, tables, partitions, stages, staging } = self;
        let specs: Vec<&ParamSpec> = tables.iter().map(|table| &table.specs()[index]).collect();
        let unit = tables[0].unit_of(ParamId::own(index));
        let (n, width) = specs[0].full_dims();
        let each = (PIECE / width.max(1) / PANEL).max(1) * PANEL;
        for first in (0..n).step_by(each) {
            let rows = first..(first + each).min(n);
            let takes = takes(&specs, &rows);
            staging.bring(weights, (unit, stages[unit]), axes, partitions, &takes);
            if axes.all.rank() == 0 {
                take(staging.put_together(weights.dtype(), &takes, &rows, width));
            }
        }
    }
}

/// Appends row-major values of weights of `dtype` to `bytes`, in the format of files of that type.
pub fn append_bytes(dtype: DType, rows: &[f32], bytes: &mut Vec<u8>) {
    match dtype {
        DType::F32 => bytes.extend_from_slice(bytemuck::cast_slice(rows)),
        DType::Bf16 => bytes.extend(rows.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes())),
    }
}

/// Stores this rank's part of a whole parameter. `bytes` are all of its row-major values, as `append_bytes` writes
/// weights of the same type. Call `Weights::release` after the last parameter.
pub fn store_whole(weights: &mut Weights, index: usize, bytes: &[u8]) {
    let table = weights.table.clone();
    let (spec, mut room) = (&table.specs()[index], Vec::new());
    let source = stored(if weights.dtype() == DType::F32 { Dtype::F32 } else { Dtype::BF16 }, bytes);
    for start in (0..spec.len).step_by(PIECE) {
        let part = start..(start + PIECE).min(spec.len);
        room.resize(part.len(), 0.0);
        pack_f32(spec, &source, part.clone(), &mut room);
        weights.store_master(spec.offset + part.start..spec.offset + part.end, &room);
    }
}

/// Rows of a parameter that come from one tensor rank.
struct Take<'a> {
    tensor: usize,
    spec: &'a ParamSpec,
    /// The rows, as indices among the rows that the rank holds.
    held: Range<usize>,
    /// The first of these rows in the whole parameter.
    row: usize,
}

/// The sources of `rows` of a whole parameter: each element once, from the last tensor rank that holds it.
fn takes<'a>(specs: &[&'a ParamSpec], rows: &Range<usize>) -> Vec<Take<'a>> {
    let mut found = Vec::new();
    let mut missing = vec![rows.clone()];
    for (tensor, spec) in specs.iter().enumerate().rev() {
        // Ranks with other columns hold the same rows.
        let is_cut = spec.columns.len() < spec.full_dims().1;
        let mut wanted = if is_cut { vec![rows.clone()] } else { std::mem::take(&mut missing) };
        for (first, held) in spec.held_rows() {
            wanted = without(wanted, held, |rows| {
                let at = first + rows.start - held.start;
                found.push(Take { tensor, spec, held: at..at + rows.len(), row: rows.start });
                true
            });
        }
        if !is_cut {
            missing = wanted;
        }
    }
    found
}

/// Buffers of values in transfer; `f32` for its alignment, two `u16` each.
#[derive(Default)]
struct Staging {
    send: Vec<f32>,
    receive: Vec<f32>,
    /// The ranges of `receive` that hold the values of each take, in the order of its flat range. They come from
    /// several ranks.
    places: Vec<Vec<Range<usize>>>,
    flat: Vec<f32>,
    held: Vec<f32>,
    rows: Vec<f32>,
}

impl Staging {
    /// Sends this rank's values of `takes`, of a unit of a stage, to the first rank, which receives the values of all
    /// ranks.
    fn bring(
        &mut self,
        weights: &Weights,
        (unit, stage): (usize, usize),
        axes: &Axes,
        partitions: &[Partition],
        takes: &[Take],
    ) {
        let (all, size) = (&axes.all, axes.tensor.size());
        // Sequence ranks are neighbors within a stage.
        let place = |zero: usize| {
            let sequence = axes.sequence.size();
            (zero / sequence * axes.pipeline.size() + stage) * sequence + zero % sequence
        };
        let words = weights.dtype().bytes() / size_of::<u16>();
        // What each rank sends, in the order of takes and, within one, of flat ranges.
        let mut lens = vec![0; all.size()];
        let mut own = Vec::new();
        let mut pieces: Vec<(usize, usize, Range<usize>)> = Vec::new();
        for (i, take) in takes.iter().enumerate() {
            let (flat, partition) = (take.spec.flat_rows(&take.held), &partitions[take.tensor]);
            let start = partition.unit(unit).start;
            for (zero, cut) in partition.cuts(unit).iter().enumerate() {
                let part = flat.start.max(start + cut.start)..flat.end.min(start + cut.end);
                if part.start < part.end {
                    let rank = place(zero) * size + take.tensor;
                    pieces.push((i, rank, lens[rank]..lens[rank] + words * part.len()));
                    lens[rank] += words * part.len();
                    own.extend((rank == all.rank()).then_some(part));
                }
            }
        }
        let values = weights.here(unit);
        self.send.resize(lens[all.rank()].div_ceil(2), 0.0);
        let send: &mut [u16] = bytemuck::cast_slice_mut(&mut self.send);
        let mut at = 0;
        for part in own {
            values.values().read_bits(&part, &mut send[at..at + words * part.len()]);
            at += words * part.len();
        }
        let is_first = all.rank() == 0;
        let mut to = vec![0..0; all.size()];
        to[0] = 0..at;
        let mut end = 0;
        let begins = lens.iter().map(|len| {
            let start = end;
            end += if is_first { *len } else { 0 };
            start..end
        });
        let from: Vec<Range<usize>> = begins.collect();
        self.receive.resize(end.div_ceil(2), 0.0);
        let receive = bytemuck::cast_slice_mut(&mut self.receive);
        all.all_to_all(send, &to, receive, &from);
        self.places = vec![Vec::new(); takes.len()];
        for (i, rank, part) in pieces.into_iter().filter(|_| is_first) {
            self.places[i].push(from[rank].start + part.start..from[rank].start + part.end);
        }
    }

    /// Assembles the rows of the whole parameter from the received values.
    fn put_together(&mut self, dtype: DType, takes: &[Take], rows: &Range<usize>, width: usize) -> &[f32] {
        self.rows.resize(rows.len() * width, 0.0);
        let received: &[u16] = bytemuck::cast_slice(&self.receive);
        for (take, places) in takes.iter().zip(&self.places) {
            let (spec, k, len) = (take.spec, take.spec.columns.len(), take.spec.flat_rows(&take.held).len());
            self.flat.resize(len, 0.0);
            let mut at = 0;
            for place in places {
                let from = &received[place.clone()];
                match dtype {
                    DType::F32 => {
                        let flat: &mut [u16] = bytemuck::cast_slice_mut(&mut self.flat);
                        flat[at..at + from.len()].copy_from_slice(from);
                    }
                    DType::Bf16 => widen(spec.layout, from, &mut self.flat[at..at + from.len()]),
                }
                at += from.len();
            }
            let skipped = if spec.layout == Layout::Panel { take.held.start % PANEL } else { 0 };
            self.held.resize((skipped + take.held.len()) * k, 0.0);
            unpack_rows(spec, &self.flat, &mut self.held);
            let to = &mut self.rows[(take.row - rows.start) * width..];
            for (to, from) in to.chunks_mut(width).zip(self.held.chunks_exact(k).skip(skipped)) {
                to[spec.columns.clone()].copy_from_slice(from);
            }
        }
        &self.rows
    }
}
