//! A frozen base in nf4 (arXiv:2305.14314). Its products are those with the dequantized matrices. With few rows a GPU
//! reads the codes; otherwise the whole unit is dequantized.

use super::UnitValues;
use super::partition::{Partition, Shards};
use crate::comm::Group;
use crate::device::cuda::{self, Arg, Memory, owned_by};
use crate::device::{Device, null};
use crate::model::params::{ParamSpec, ParamTable};
use crate::sys::lock::lock;
use crate::tensor::nf4::{Held, Nf4, Place, dequantize};
use crate::tensor::{DType, Flat, Piece, Slice, SliceMut};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The quantized units of a base: the layers. Embedding and head are not quantized.
pub struct QuantizedUnits {
    /// By unit.
    pub units: Vec<Option<Arc<QuantizedUnit>>>,
    /// The unit that was dequantized last.
    cache: Mutex<Option<(usize, Arc<UnitValues>)>>,
}

/// A unit in nf4.
pub struct QuantizedUnit {
    /// The part of the unit in the flat vector: all of it, or the experts that this rank computes.
    range: Range<usize>,
    /// The flat range of each matrix, and its place in `words`.
    matrices: Arc<Vec<(Range<usize>, Place)>>,
    /// Codes and scales of all matrices, two bytes a word: all of them, or this rank's share. Shares are equally long.
    words: Flat,
    /// Norms and biases, whole on each rank.
    pub vectors: Arc<Vec<UnitValues>>,
}

/// Whether a parameter of a unit is quantized.
fn is_quantized(table: &ParamTable, unit: usize, spec: &ParamSpec) -> bool {
    table.is_quantized(unit) && spec.is_projection()
}

impl ParamTable {
    /// Whether the matrices of a unit are quantized in a base in nf4: those of layers are.
    pub fn is_quantized(&self, unit: usize) -> bool {
        (self.embedding_unit() + 1..self.units().len() - 1).contains(&unit)
    }
}

/// A matrix without values, for a plan. The scales of a whole matrix are quantized, too.
fn planned_place(spec: &ParamSpec, start: usize) -> Place {
    let (n, k) = spec.dims();
    Place::new([n, k], ((n, k) == spec.full_dims()).then_some((0.0, 0)), start)
}

impl QuantizedUnit {
    /// This rank's share of a unit of `table`. `matrix` returns the tensor rank's part of a matrix, and `fill` fills a
    /// range of other values.
    ///
    /// # Errors
    /// The errors of both.
    pub fn build<E>(
        table: &Arc<ParamTable>,
        unit: usize,
        dtype: DType,
        shards: &Shards,
        mut matrix: impl FnMut(&ParamSpec) -> Result<Nf4<'static>, E>,
        mut fill: impl FnMut(UnitValues) -> Result<UnitValues, E>,
    ) -> Result<Self, E> {
        let (mut matrices, mut vectors, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        let held = shards.partition.shared(unit);
        for (id, range) in table.parts(&held) {
            let spec = table.spec(id);
            if !is_quantized(table, unit, spec) {
                vectors.push(fill(UnitValues::of_range(table, range, dtype))?);
                continue;
            }
            let nf4 = matrix(spec)?;
            let place = nf4.place(bytes.len());
            bytes.resize(place.end, 0);
            place.write(&nf4.view(), &mut bytes);
            matrices.push((range, place));
        }
        let share = share(bytes.len(), shards, unit);
        bytes.resize(bytes.len().max(share.end), 0);
        Ok(Self {
            range: held,
            matrices: Arc::new(matrices),
            words: words(table.device(), &bytes[share]),
            vectors: Arc::new(vectors),
        })
    }

    /// A unit of a plan, which has no values.
    pub fn planned(table: &Arc<ParamTable>, unit: usize, dtype: DType, shards: &Shards) -> Self {
        let (mut matrices, mut vectors, mut end) = (Vec::new(), Vec::new(), 0);
        let held = shards.partition.shared(unit);
        for (id, range) in table.parts(&held) {
            if is_quantized(table, unit, table.spec(id)) {
                let place = planned_place(table.spec(id), end);
                end = place.end;
                matrices.push((range, place));
            } else {
                vectors.push(UnitValues::of_range(table, range, dtype));
            }
        }
        let words = Flat::weights(table.device(), DType::Bf16, share(end, shards, unit).len() / 2);
        Self { range: held, matrices: Arc::new(matrices), words, vectors: Arc::new(vectors) }
    }

    /// A job that gathers the words, of which each rank has a share.
    pub fn gathering(&self, [rank, ranks]: [usize; 2]) -> impl FnOnce(&Group) -> Self + Send + use<> {
        let each = self.words.len();
        let shares: Vec<Range<usize>> = (0..ranks).map(|rank| rank * each..(rank + 1) * each).collect();
        let mut words = Flat::weights(self.words.device(), DType::Bf16, ranks * each);
        words.all_mut().copy_from(self.words.all(), &Piece::run(0, each), &Piece::run(rank * each, each));
        let (range, matrices, vectors) = (self.range.clone(), self.matrices.clone(), self.vectors.clone());
        move |group| {
            group.gather_slice(words.all_mut(), &shares);
            Self { range, matrices, words, vectors }
        }
    }

    /// The whole unit, of which ranks hold different experts: this one those in `words`, or a share of them. A collective
    /// of all ranks of `partition`.
    ///
    /// # Panics
    /// If the unit has norms or biases.
    pub fn with_all_experts(&self, group: &Group, partition: &Partition, unit: usize, is_share: bool) -> Self {
        assert!(self.vectors.is_empty(), "experts have matrices only");
        let (parts, [place, sharing]) = (partition.parts(unit), partition.sharing(unit));
        let own_len = self.words.len() * if is_share { sharing } else { 1 };
        let own: Vec<u64> = [own_len as u64].into_iter().chain(self.matrices.iter().flat_map(numbers)).collect();
        let all = group.all_gather_numbers(&own);
        // Neighbours have different parts, which are laid end to end.
        let mut end = 0;
        let begins = all[..parts].iter().map(|numbers| {
            end += numbers[0] as usize;
            end - numbers[0] as usize
        });
        let begins: Vec<usize> = begins.collect();
        // Each rank sends an equal share of its part.
        let share = |len: usize, place: usize| place * len / sharing..(place + 1) * len / sharing;
        let from = |(rank, numbers): (usize, &Vec<u64>)| {
            let (begin, share) = (begins[rank % parts], share(numbers[0] as usize, rank / parts));
            begin + share.start..begin + share.end
        };
        let from: Vec<Range<usize>> = all.iter().enumerate().map(from).collect();
        let sent = if is_share { 0..self.words.len() } else { share(own_len, place) };
        let mut words = Flat::weights(self.words.device(), DType::Bf16, end);
        group.slice_to_all(self.words.all(), &vec![sent; all.len()], words.all_mut(), &from);
        let (range, mut matrices) = (partition.unit(unit), Vec::with_capacity(parts * self.matrices.len()));
        for (part, (numbers, begin)) in all[..parts].iter().zip(begins).enumerate() {
            let mut end = begin * size_of::<u16>();
            for ((own, place), numbers) in self.matrices.iter().zip(numbers[1..].chunks_exact(3)) {
                let place = Place::new([place.n, place.k], nested(numbers), end);
                end = place.end;
                let start = range.start + part * self.range.len() + own.start - self.range.start;
                matrices.push((start..start + own.len(), place));
            }
        }
        Self { range, matrices: Arc::new(matrices), words, vectors: self.vectors.clone() }
    }

    /// The bytes of all shares of this rank's part of the unit, without padding.
    pub fn shared_bytes(&self) -> usize {
        self.matrices.last().map_or(0, |(_, place)| place.end) + self.vectors_bytes()
    }

    fn vectors_bytes(&self) -> usize {
        self.vectors.iter().map(UnitValues::bytes).sum()
    }

    pub fn bytes(&self) -> usize {
        self.words.bytes() + self.vectors_bytes()
    }

    /// The addresses of everything on a GPU.
    pub fn addresses(&self) -> impl Iterator<Item = Arg> {
        let words = if let Flat::Cuda(memory, _) = &self.words { Some(memory.arg()) } else { None };
        words.into_iter().chain(self.vectors.iter().filter_map(UnitValues::address))
    }

    /// A matrix whose products with `rows` rows read its codes.
    pub fn codes(&self, spec: &ParamSpec, rows: usize) -> Option<cuda::nf4::Nf4<'_>> {
        let Slice::Cuda(words) = self.words.all() else { return None };
        let (_, place) = self.matrices.iter().find(|(range, _)| *range == spec.range())?;
        Some(cuda::nf4::Nf4::new(place, words)).filter(|nf4| nf4.has_product(rows))
    }

    fn dequantize(&self, to: &mut UnitValues) {
        null::note("dequantize", 0.0, (self.words.bytes() + to.bytes()) as f64);
        self.vectors.iter().for_each(|values| to.copy_part(values));
        for (range, place) in self.matrices.iter() {
            match (self.words.all(), to.spec_part_mut(range)) {
                (Slice::Cuda(words), (spec, SliceMut::Cuda(mut values))) => {
                    let nf4 = cuda::nf4::Nf4::new(place, words);
                    nf4.dequantize(0, values.reborrow().part(0..spec.elements()));
                    values.part(spec.elements()..spec.len).clear();
                }
                (Slice::Bf16(words), (spec, values)) => {
                    let all_rows = 0..place.n;
                    let rows = std::slice::from_ref(&all_rows);
                    let matrix = place.matrix(bytemuck::cast_slice(words));
                    dequantize(&matrix, &Held { rows, columns: 0..place.k }, spec.layout, 0, values);
                }
                _ => unreachable!("a unit of one device"),
            }
        }
        to.refresh();
    }
}

/// The numbers of a matrix's quantized scales that are not among its words, if it has such scales.
fn numbers((_, place): &(Range<usize>, Place)) -> [u64; 3] {
    place.nested.map_or([0; 3], |(offset, first)| [1, offset.to_bits().into(), first as u64])
}

/// The reverse of `numbers`.
fn nested(numbers: &[u64]) -> Option<(f32, usize)> {
    (numbers[0] == 1).then(|| (f32::from_bits(numbers[1] as u32), numbers[2] as usize))
}

/// This rank's share of the `bytes` bytes of a unit. The last shares may be longer than the rest of them.
fn share(bytes: usize, shards: &Shards, unit: usize) -> Range<usize> {
    let [rank, ranks] = if shards.weights() { shards.partition.sharing(unit) } else { [0, 1] };
    let each = bytes.div_ceil(ranks).next_multiple_of(16);
    rank * each..(rank + 1) * each
}

/// A copy of bytes on a device.
fn words(device: Device, bytes: &[u8]) -> Flat {
    if device == Device::Cuda {
        return Flat::Cuda(Memory::from_values(bytes), DType::Bf16);
    }
    let mut words = Flat::weights(device, DType::Bf16, bytes.len() / 2);
    let SliceMut::Bf16(to) = words.all_mut() else { unreachable!("two bytes a word") };
    bytemuck::cast_slice_mut(to).copy_from_slice(bytes);
    words
}

impl QuantizedUnits {
    pub fn new(units: Vec<Option<Arc<QuantizedUnit>>>) -> Self {
        Self { units, cache: Mutex::default() }
    }

    /// The dequantized values of a unit. They live as long as the result, and at least until the next request.
    pub fn values(
        &self,
        table: &Arc<ParamTable>,
        dtype: DType,
        (index, unit): (usize, &QuantizedUnit),
    ) -> Arc<UnitValues> {
        let mut cache = lock(&self.cache);
        if let Some((held, values)) = &*cache
            && *held == index
        {
            return values.clone();
        }
        // Its memory serves the next one.
        *cache = None;
        let mut values = owned_by("gathered units", || UnitValues::of_range(table, unit.range.clone(), dtype));
        unit.dequantize(&mut values);
        let values = Arc::new(values);
        *cache = Some((index, values.clone()));
        values
    }

    pub fn release(&self) {
        *lock(&self.cache) = None;
    }
}
