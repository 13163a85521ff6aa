//! nf4: four bits a value, and one scale, the largest magnitude, for each block of 64 values (arXiv:2305.14314). The
//! format is that of bitsandbytes, bit for bit.
//!
//! A matrix is its rows end to end, cut into blocks; the last block may be short. A byte has the codes of two values,
//! the first in its high half. A value is bf16(TABLE[code] x scale), rounded to nearest even.
//!
//! Scales may be quantized again: a code of 8 bits each, and one f32, the largest magnitude, for each block of 256
//! scales. Such a scale is map[code] x largest + offset, each operation rounded.

use super::pool::{Shares, pool};
use super::vector::{Kernel, Vector, run_in};
use crate::device::simd::{Level, level, leveled};
use crate::dtype::round_bf16;
use std::ops::Range;

/// The number of values with one scale.
pub const BLOCK: usize = 64;
/// The number of quantized scales with one largest magnitude.
pub const NESTED_BLOCK: usize = 256;
/// The value of each code.
pub const TABLE: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];
/// The number of values below which one thread does it all.
const SERIAL_MAX: usize = 1 << 15;
/// The number of rows in a panel.
const PANEL: usize = 32;

/// For each code but the last, the largest value that does not get the next code.
const BOUNDS: [f32; 15] = {
    let mut bounds = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        bounds[i] = f32::midpoint(TABLE[i], TABLE[i + 1]);
        i += 1;
    }
    bounds
};
/// The smallest divisor of a block.
const SCALE_MIN: f32 = 1e-38;

/// The largest magnitude.
#[inline(always)]
fn largest_of(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, x| if x.abs() > max { x.abs() } else { max })
}

leveled! {
    fn quantize_blocks(values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        let blocks = values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK / 2));
        for ((values, codes), scale) in blocks.zip(scales) {
            *scale = largest_of(values);
            // A missing value counts as 0. bitsandbytes divides a short block, and multiplies others.
            let mut scaled = [0.0; BLOCK];
            if values.len() < BLOCK {
                *scale = scale.max(SCALE_MIN);
                scaled.iter_mut().zip(values).for_each(|(to, x)| *to = x / *scale);
            } else {
                let inverse = 1.0 / scale.max(SCALE_MIN);
                scaled.iter_mut().zip(values).for_each(|(to, x)| *to = x * inverse);
            }
            let code = scaled.map(|x| BOUNDS.iter().map(|&bound| u8::from(x > bound)).sum::<u8>());
            for (byte, pair) in codes.iter_mut().zip(code.chunks_exact(2)) {
                *byte = pair[0] << 4 | pair[1];
            }
        }
    }
}

/// Quantizes consecutive finite values from the start of a block on: two codes a byte, and a scale for each block. The
/// code is that of the nearest table value.
///
/// # Panics
/// If the codes or scales have another number.
pub fn quantize(values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
    let (len, blocks) = (values.len(), values.len().div_ceil(BLOCK));
    assert_eq!((codes.len(), scales.len()), (len.div_ceil(2), blocks), "nf4: room for {len} values");
    let (level, codes) = (level(), Shares::new(codes));
    pool().parts(scales, 1, len < SERIAL_MAX, &|blocks, scales| {
        let values = &values[blocks.start * BLOCK..(blocks.end * BLOCK).min(len)];
        let at = blocks.start * BLOCK / 2;
        // SAFETY: the blocks of different shares do not overlap, and lie within the codes.
        let codes = unsafe { codes.slice(at..at + values.len().div_ceil(2)) };
        quantize_blocks(level, values, codes, scales);
    });
}

/// The 8-bit map of quantized scales, ascending: for each power of ten from 10^-6 to 1 and either sign, the midpoints of
/// 2^i equal parts of 0.1 to 1; also 0 and 1 (arXiv:2110.02861).
pub fn dynamic_map() -> [f32; 256] {
    let mut map = [0.0; 256];
    let mut len = 1;
    for i in 0..7 {
        let parts: usize = 1 << i;
        let step = (1.0 - 0.1) / parts as f32;
        // As torch.linspace: from either end, with fused multiply-adds.
        let bound = |j: usize| match j {
            _ if j < parts.div_ceil(2) => step.mul_add(j as f32, 0.1),
            _ => (-step).mul_add((parts - j) as f32, 1.0),
        };
        for j in 0..parts {
            let value = f32::midpoint(bound(j), bound(j + 1)) * 10f64.powi(i - 6) as f32;
            (map[len], map[len + 1]) = (value, -value);
            len += 2;
        }
    }
    map[len] = 1.0;
    map.sort_by(f32::total_cmp);
    map
}

/// Quantizes scales without their mean `offset` by a map: a code for each, and the largest magnitude of each block of
/// 256. The code is that of the nearest value of the map.
pub fn quantize_scales(scales: &[f32], offset: f32, map: &[f32; 256]) -> (Vec<u8>, Vec<f32>) {
    let (mut codes, mut largest) = (Vec::with_capacity(scales.len()), Vec::new());
    let bounds: Vec<f32> = map.windows(2).map(|pair| f32::midpoint(pair[0], pair[1])).collect();
    for block in scales.chunks(NESTED_BLOCK) {
        let centered: Vec<f32> = block.iter().map(|scale| scale - offset).collect();
        let max = largest_of(&centered);
        let inverse = 1.0 / max.max(SCALE_MIN);
        codes.extend(centered.iter().map(|x| bounds.partition_point(|&bound| x * inverse > bound) as u8));
        largest.push(max);
    }
    (codes, largest)
}

/// The scales of the blocks of a matrix.
#[derive(Clone, Copy, Debug)]
pub enum Scales<'a> {
    F32(&'a [f32]),
    /// `first` is the index of the first scale in its block of 256.
    Nested {
        codes: &'a [u8],
        largest: &'a [f32],
        map: &'a [f32; 256],
        offset: f32,
        first: usize,
    },
}

impl Scales<'_> {
    #[inline(always)]
    pub fn at(&self, block: usize) -> f32 {
        match *self {
            Self::F32(scales) => scales[block],
            Self::Nested { codes, largest, map, offset, first } => {
                map[usize::from(codes[block])] * largest[(block + first) / NESTED_BLOCK] + offset
            }
        }
    }
}

/// A matrix of rows of `k` values.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub k: usize,
    pub codes: &'a [u8],
    pub scales: Scales<'a>,
}

/// The places of a matrix's parts in a run of bytes, each a multiple of 16.
#[derive(Clone, Debug)]
pub struct Place {
    pub n: usize,
    pub k: usize,
    /// With quantized scales: their offset, and the index of the first one in its block of 256.
    pub nested: Option<(f32, usize)>,
    /// The 16 values of codes and, with quantized scales, the 256 values of their codes; f32.
    pub tables: usize,
    /// The scales or, if they are quantized, the largest magnitude of each block of 256; f32.
    pub scales: usize,
    /// The codes of quantized scales.
    pub scale_codes: usize,
    pub codes: usize,
    pub end: usize,
}

impl Place {
    /// The places of an (n, k) matrix from byte `start` on.
    pub fn new([n, k]: [usize; 2], nested: Option<(f32, usize)>, start: usize) -> Self {
        let blocks = (n * k).div_ceil(BLOCK);
        let (table, scales, scale_codes) = match nested {
            Some((_, first)) => (TABLE.len() + 256, (blocks + first).div_ceil(NESTED_BLOCK), blocks),
            None => (TABLE.len(), blocks, 0),
        };
        let mut end = start;
        let [tables, scales, scale_codes, codes] =
            [size_of::<f32>() * table, size_of::<f32>() * scales, scale_codes, (n * k).div_ceil(2)].map(|bytes| {
                let at = end;
                end = (at + bytes).next_multiple_of(16);
                at
            });
        Self { n, k, nested, tables, scales, scale_codes, codes, end }
    }

    pub fn bytes(&self) -> usize {
        self.end - self.tables
    }

    /// The matrix in `bytes`.
    pub fn matrix<'a>(&self, bytes: &'a [u8]) -> Matrix<'a> {
        let floats = |start: usize, end: usize| bytemuck::cast_slice::<u8, f32>(&bytes[start..end]);
        let scales = match self.nested {
            None => Scales::F32(floats(self.scales, self.codes)),
            Some((offset, first)) => {
                let map = floats(self.tables + size_of_val(&TABLE), self.scales).first_chunk().expect("256 values");
                let (codes, largest) = (&bytes[self.scale_codes..self.codes], floats(self.scales, self.scale_codes));
                Scales::Nested { codes, largest, map, offset, first }
            }
        };
        Matrix { k: self.k, codes: &bytes[self.codes..self.end], scales }
    }

    /// Copies a matrix to its place in `bytes`.
    pub fn write(&self, matrix: &Matrix, bytes: &mut [u8]) {
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(self.tables, bytemuck::cast_slice(&TABLE));
        put(self.codes, matrix.codes);
        match matrix.scales {
            Scales::F32(scales) => put(self.scales, bytemuck::cast_slice(scales)),
            Scales::Nested { codes, largest, map, .. } => {
                put(self.tables + size_of_val(&TABLE), bytemuck::cast_slice(map));
                put(self.scales, bytemuck::cast_slice(largest));
                put(self.scale_codes, codes);
            }
        }
    }
}

/// The part of a matrix that a rank holds: some runs of its rows, and a range of its columns.
#[derive(Clone, Debug)]
pub struct Held<'a> {
    pub rows: &'a [Range<usize>],
    pub columns: Range<usize>,
}

impl Held<'_> {
    fn rows(&self) -> impl Iterator<Item = usize> {
        self.rows.iter().cloned().flatten()
    }
}

/// A value of a dequantized matrix: f32, or a bf16 in its u16.
pub trait Value: Copy + Default + Send + Sync + bytemuck::Pod {
    const IS_BF16: bool;
    fn of_bf16(bits: u16) -> Self;
}

impl Value for f32 {
    const IS_BF16: bool = false;
    #[inline(always)]
    fn of_bf16(bits: u16) -> Self {
        Self::from_bits(u32::from(bits) << 16)
    }
}

impl Value for u16 {
    const IS_BF16: bool = true;
    #[inline(always)]
    fn of_bf16(bits: u16) -> Self {
        bits
    }
}

/// Values from index `start` of the flattened matrix on.
#[inline(always)]
fn flat<T: Value>(matrix: &Matrix, start: usize, to: &mut [T]) {
    let (mut at, mut rest) = (start, to);
    while !rest.is_empty() {
        let (now, after) = rest.split_at_mut((BLOCK - at % BLOCK).min(rest.len()));
        let scale = matrix.scales.at(at / BLOCK);
        let values = TABLE.map(|x| T::of_bf16(round_bf16(x * scale)));
        for (i, to) in (at..).zip(now.iter_mut()) {
            let byte = matrix.codes[i / 2];
            *to = values[usize::from(if i % 2 == 0 { byte >> 4 } else { byte & 15 })];
        }
        at += now.len();
        rest = after;
    }
}

leveled! {
    fn flat_f32(matrix: &Matrix, start: usize, to: &mut [f32]) {
        flat(matrix, start, to);
    }
}

/// Values from index `start` of the flattened matrix on, on the calling thread.
pub fn dequantize(matrix: &Matrix, start: usize, to: &mut [f32]) {
    flat_f32(level(), matrix, start, to);
}

/// Elements from index `start` on of the held part in row layout, padding included.
pub fn dequantize_rows<T: Value>(matrix: &Matrix, held: &Held, start: usize, to: &mut [T]) {
    let width = held.columns.len();
    pool().parts(to, BLOCK, to.len() < SERIAL_MAX, &|range, to| {
        let (first, mut skip) = ((start + range.start) / width, (start + range.start) % width);
        let (mut rows, mut rest) = (held.rows().skip(first), to);
        while !rest.is_empty() {
            let (now, after) = rest.split_at_mut((width - skip).min(rest.len()));
            match rows.next() {
                Some(row) => flat(matrix, row * matrix.k + held.columns.start + skip, now),
                None => now.fill(T::default()),
            }
            (rest, skip) = (after, 0);
        }
    });
}

/// Elements from index `start` on of the held part in panels of 32 rows, padding included. `start` and their number are
/// multiples of 64.
///
/// A panel has the columns one after the other, each with its 32 lanes. In bf16 two neighboring columns interleave.
pub fn dequantize_panels<T: Value>(matrix: &Matrix, held: &Held, start: usize, to: &mut [T]) {
    let level = level();
    let panel = PANEL * held.columns.len().next_multiple_of(2);
    pool().parts(to, TILE, to.len() < SERIAL_MAX, &|range, to| {
        let (mut at, mut rest) = (start + range.start, to);
        while !rest.is_empty() {
            let (now, after) = rest.split_at_mut((panel - at % panel).min(rest.len()));
            PanelRows::new(matrix, held, at / panel).fill(level, at % panel, now);
            at += now.len();
            rest = after;
        }
    });
}

/// The elements of a block of columns in a panel.
const TILE: usize = BLOCK * PANEL;

/// The rows of a panel.
struct PanelRows<'a> {
    matrix: &'a Matrix<'a>,
    /// The index in the flattened matrix of each lane's first held value.
    starts: [usize; PANEL],
    /// The number of lanes with a row.
    count: usize,
    columns: usize,
}

impl<'a> PanelRows<'a> {
    fn new(matrix: &'a Matrix<'a>, held: &Held, panel: usize) -> Self {
        let (mut starts, mut count) = ([0; PANEL], 0);
        for (start, row) in starts.iter_mut().zip(held.rows().skip(panel * PANEL)) {
            *start = row * matrix.k + held.columns.start;
            count += 1;
        }
        Self { matrix, starts, count, columns: held.columns.len() }
    }

    /// Elements from index `start` of the panel on.
    fn fill<T: Value>(&self, level: Level, start: usize, to: &mut [T]) {
        let (mut at, mut rest) = (start, to);
        while !rest.is_empty() {
            let (now, after) = rest.split_at_mut((TILE - at % TILE).min(rest.len()));
            let column = at / TILE * BLOCK;
            // Each lane has one scale, and all its columns.
            let is_whole = self.columns - column >= BLOCK && self.starts.iter().all(|start| start % BLOCK == 0);
            match bytemuck::try_cast_slice_mut(now) {
                Ok(words) if is_whole && size_of_val::<[f32]>(words) == TILE * size_of::<T>() => {
                    run_in(level, &Tile { rows: self, column, is_bf16: T::IS_BF16, to: words.as_mut_ptr() }, &mut []);
                }
                _ => self.part(column, at % TILE, now),
            }
            at += now.len();
            rest = after;
        }
    }

    /// Some elements of a block of columns.
    fn part<T: Value>(&self, column: usize, start: usize, to: &mut [T]) {
        let mut tile = [T::default(); TILE];
        let mut run = [T::default(); BLOCK];
        let run = &mut run[..BLOCK.min(self.columns.saturating_sub(column))];
        for (lane, start) in self.starts[..self.count].iter().enumerate() {
            flat(self.matrix, start + column, run);
            for (c, &x) in run.iter().enumerate() {
                let at = if T::IS_BF16 { c / 2 * 2 * PANEL + lane * 2 + c % 2 } else { c * PANEL + lane };
                tile[at] = x;
            }
        }
        to.copy_from_slice(&tile[start..start + to.len()]);
    }
}

/// A block of columns of a panel whose rows begin at whole blocks.
struct Tile<'a> {
    rows: &'a PanelRows<'a>,
    column: usize,
    is_bf16: bool,
    /// Room for the elements.
    to: *mut f32,
}

impl Kernel for Tile<'_> {
    #[inline(always)]
    unsafe fn work<V: Vector>(&self, _: &mut [f32]) {
        let PanelRows { matrix, starts, count, .. } = self.rows;
        // A lane without a row gets +0 from codes of 0.
        let mut scales = [0.0; PANEL];
        let mut words = [[f32::from_bits(0x7777_7777); PANEL]; BLOCK / 8];
        for lane in 0..*count {
            let at = starts[lane] + self.column;
            scales[lane] = matrix.scales.at(at / BLOCK);
            let (codes, _) = matrix.codes[at / 2..][..BLOCK / 2].as_chunks::<4>();
            for (words, code) in words.iter_mut().zip(codes) {
                words[lane] = f32::from_bits(u32::from_le_bytes(*code));
            }
        }
        for (eight, words) in words.iter().enumerate() {
            for lane in (0..PANEL).step_by(V::LANES) {
                // SAFETY: the processor has the instructions, as the caller promises; lane + V::LANES is at most PANEL;
                // the elements of a block of columns fit `to`, and no other thread writes them.
                unsafe {
                    let (words, scale) = (V::load(&raw const words[lane]), V::load(&raw const scales[lane]));
                    for pair in 0..4 {
                        let column = 8 * eight + 2 * pair;
                        let value = |shift| words.select(shift, &TABLE).mul(scale).round_bf16();
                        // The first of a byte is in its high half.
                        let (even, odd) = (value(8 * pair as u32 + 4), value(8 * pair as u32));
                        if self.is_bf16 {
                            even.join(odd).store(self.to.add(column / 2 * PANEL + lane));
                        } else {
                            even.store(self.to.add(column * PANEL + lane));
                            odd.store(self.to.add((column + 1) * PANEL + lane));
                        }
                    }
                }
            }
        }
    }
}
