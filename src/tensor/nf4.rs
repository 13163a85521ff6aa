//! Matrices in nf4, the format of QLoRA (arXiv:2305.14314) and bitsandbytes. `device::cpu::nf4` describes it.
//!
//! There is one definition of a weight: bf16(table[code] x scale). In f32 it is that bf16 value. So products with a
//! quantized matrix have the bits of products with the dequantized one.

use super::{Layout, SliceMut};
use crate::device::cpu::nf4::{self as cpu, Scales};
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;

pub use crate::device::cpu::nf4::{BLOCK, Held, Matrix, NESTED_BLOCK, Place, TABLE};

/// A quantized matrix of n outputs and k inputs, in memory or in a mapped file.
#[derive(Clone, Debug)]
pub struct Nf4<'a> {
    pub n: usize,
    pub k: usize,
    /// Two codes a byte, the first in the high half. The matrix is flattened by rows.
    pub codes: Cow<'a, [u8]>,
    pub scales: Absmax<'a>,
}

/// The scale of each block of 64 values: its largest magnitude.
#[derive(Clone, Debug)]
pub enum Absmax<'a> {
    F32(Cow<'a, [f32]>),
    Nested(Nested<'a>),
}

/// Scales that are quantized in turn (double quantization): map[code] x largest + offset.
#[derive(Clone, Debug)]
pub struct Nested<'a> {
    pub codes: Cow<'a, [u8]>,
    /// The largest magnitude of each block of 256 scales, less the offset.
    pub largest: Cow<'a, [f32]>,
    /// The value of each code.
    pub map: Box<[f32; 256]>,
    /// About the mean of the scales.
    pub offset: f32,
    /// The index of the first scale in its block of 256.
    first: usize,
}

/// The number of values that one task quantizes at a time: whole blocks.
const CHUNK: usize = 1 << 14;

impl Nf4<'static> {
    /// Quantizes a matrix. `source` fills a slice with row-major values from an index on; it is asked for a few at a
    /// time. Returns `None` if a value is NaN or infinite.
    pub fn quantize(n: usize, k: usize, source: &(dyn Fn(usize, &mut [f32]) + Sync)) -> Option<Self> {
        let len = n * k;
        let (mut codes, mut scales) = (vec![0; len.div_ceil(2)], vec![0.0; len.div_ceil(BLOCK)]);
        let chunks = codes.par_chunks_mut(CHUNK / 2).zip(scales.par_chunks_mut(CHUNK / BLOCK)).enumerate();
        let is_finite = chunks.map_init(Vec::new, |values, (i, (codes, scales))| {
            values.resize(CHUNK.min(len - i * CHUNK), 0.0);
            source(i * CHUNK, values);
            cpu::quantize(values, codes, scales);
            values.iter().all(|x| x.is_finite())
        });
        let is_finite = is_finite.reduce(|| true, |a, b| a && b);
        is_finite.then(|| Self { n, k, codes: codes.into(), scales: Absmax::F32(scales.into()) })
    }
}

impl Nf4<'_> {
    /// Quantizes the scales, too.
    #[must_use]
    pub fn double_quantized(self) -> Self {
        let scales = match self.scales {
            Absmax::F32(scales) => Absmax::Nested(Nested::quantize(&scales)),
            nested @ Absmax::Nested(_) => nested,
        };
        Self { scales, ..self }
    }

    /// A copy in memory.
    pub fn into_owned(self) -> Nf4<'static> {
        let scales = match self.scales {
            Absmax::F32(scales) => Absmax::F32(scales.into_owned().into()),
            Absmax::Nested(Nested { codes, largest, map, offset, first }) => {
                let (codes, largest) = (codes.into_owned().into(), largest.into_owned().into());
                Absmax::Nested(Nested { codes, largest, map, offset, first })
            }
        };
        Nf4 { n: self.n, k: self.k, codes: self.codes.into_owned().into(), scales }
    }

    /// Some rows as a matrix.
    ///
    /// # Panics
    /// If they do not begin at a block of 64 values.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>) -> Nf4<'_> {
        let values = rows.start * self.k..rows.end * self.k;
        assert!(values.start.is_multiple_of(BLOCK), "nf4: row {} of {} values begins in a block", rows.start, self.k);
        let blocks = values.start / BLOCK..values.end.div_ceil(BLOCK);
        let scales = match &self.scales {
            Absmax::F32(scales) => Absmax::F32(Cow::Borrowed(&scales[blocks])),
            Absmax::Nested(nested) => {
                let first = nested.first + blocks.start;
                let largest = first / NESTED_BLOCK..(nested.first + blocks.end).div_ceil(NESTED_BLOCK);
                Absmax::Nested(Nested {
                    codes: Cow::Borrowed(&nested.codes[blocks]),
                    largest: Cow::Borrowed(&nested.largest[largest]),
                    map: nested.map.clone(),
                    offset: nested.offset,
                    first: first % NESTED_BLOCK,
                })
            }
        };
        Nf4 {
            n: rows.len(),
            k: self.k,
            codes: Cow::Borrowed(&self.codes[values.start / 2..values.end.div_ceil(2)]),
            scales,
        }
    }

    /// A copy of a held part, with scales in f32. `None` if a block is not whole in it.
    pub fn held(&self, held: &Held) -> Option<Nf4<'static>> {
        let (k, columns) = (held.columns.len(), held.columns.clone());
        if ![self.k, columns.start, columns.end].iter().all(|at| at.is_multiple_of(BLOCK)) {
            return None;
        }
        let (mut codes, mut scales, view) = (Vec::new(), Vec::new(), self.view());
        let rows = held.rows.iter().cloned().flatten();
        let n = rows.clone().count();
        for row in rows {
            let (start, end) = (row * self.k + columns.start, row * self.k + columns.end);
            codes.extend_from_slice(&self.codes[start / 2..end / 2]);
            scales.extend((start / BLOCK..end / BLOCK).map(|block| view.scales.at(block)));
        }
        Some(Nf4 { n, k, codes: codes.into(), scales: Absmax::F32(scales.into()) })
    }

    /// A view for kernels of the CPU.
    pub fn view(&self) -> Matrix<'_> {
        let scales = match &self.scales {
            Absmax::F32(scales) => Scales::F32(scales),
            Absmax::Nested(Nested { codes, largest, map, offset, first }) => {
                Scales::Nested { codes, largest, map, offset: *offset, first: *first }
            }
        };
        Matrix { k: self.k, codes: &self.codes, scales }
    }

    /// The places of its parts in a run of bytes, from byte `start` on.
    pub fn place(&self, start: usize) -> Place {
        let nested = match &self.scales {
            Absmax::F32(_) => None,
            Absmax::Nested(nested) => Some((nested.offset, nested.first)),
        };
        Place::new([self.n, self.k], nested, start)
    }

    /// The scale of each block.
    pub fn absmax(&self) -> Vec<f32> {
        let view = self.view();
        (0..(self.n * self.k).div_ceil(BLOCK)).map(|block| view.scales.at(block)).collect()
    }

    /// Fills a slice with row-major values from an index on, on the calling thread: a source for `pack`.
    pub fn read(&self, start: usize, to: &mut [f32]) {
        cpu::dequantize(&self.view(), start, to);
    }
}

/// Fills a slice on the CPU with the elements from index `start` on of a held part in a layout, padding included: by all
/// threads. In panels, `start` and the number of elements are multiples of `FLAT_ALIGN`.
pub fn dequantize(matrix: &Matrix, held: &Held, layout: Layout, start: usize, to: SliceMut) {
    match (layout, to) {
        (Layout::Row, SliceMut::F32(to)) => cpu::dequantize_rows(matrix, held, start, to),
        (Layout::Row, SliceMut::Bf16(to)) => cpu::dequantize_rows(matrix, held, start, to),
        (Layout::Panel, SliceMut::F32(to)) => cpu::dequantize_panels(matrix, held, start, to),
        (Layout::Panel, SliceMut::Bf16(to)) => cpu::dequantize_panels(matrix, held, start, to),
        (_, SliceMut::Cuda(_)) => panic!("nf4: a GPU dequantizes with its own kernel"),
    }
}

impl Nested<'static> {
    /// Quantizes scales about their mean.
    pub fn quantize(scales: &[f32]) -> Self {
        let sum: f64 = scales.iter().map(|&scale| f64::from(scale)).sum();
        Self::quantize_about(scales, (sum / scales.len().max(1) as f64) as f32)
    }

    /// Quantizes scales about `offset`.
    pub fn quantize_about(scales: &[f32], offset: f32) -> Self {
        let map = Box::new(cpu::dynamic_map());
        let (codes, largest) = cpu::quantize_scales(scales, offset, &map);
        Self { codes: codes.into(), largest: largest.into(), map, offset, first: 0 }
    }
}

impl<'a> Nested<'a> {
    /// Scales from their parts.
    pub fn new(codes: Cow<'a, [u8]>, largest: Cow<'a, [f32]>, map: Box<[f32; 256]>, offset: f32) -> Self {
        Self { codes, largest, map, offset, first: 0 }
    }
}
