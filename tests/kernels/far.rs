//! Tensors as large as those of real jobs: what lies beyond 2^31 and 2^32 values, and beyond 2^32 bytes, becomes what
//! the same values become in a small tensor, bit by bit.
//!
//! The emulated GPU keeps only the touched parts of memory from 256 MiB on, and runs only the named blocks of grids of
//! more than 4096 blocks. On a real GPU all blocks run; tests for which it has too little memory are skipped.

mod attention;
mod products;
mod rows;

use crate::emulation;
use crate::{bf16, device, numbers, on_a_real_gpu, skip};
use rlhf_hpc::device::cuda::{Memory, View, gpu};
use rlhf_hpc::dtype::DType;
use std::collections::BTreeSet;

/// The limits of 32-bit numbers: bytes of f32 and of bf16 (as values), signed and unsigned numbers of values.
const BOUNDS: [usize; 3] = [1 << 30, 1 << 31, 1 << 32];
/// Values of a far tensor: its last blocks lie beyond all bounds, the last one is not whole.
const VALUES: usize = (1 << 32) + 3 * 8192 + 1000;

/// Whether the GPU has `bytes` of free memory. An emulated GPU always has.
fn has_room(bytes: usize) -> bool {
    let fits = bytes < gpu().free_bytes();
    if !fits {
        skip(&format!("this GPU has no {bytes} bytes left"));
    }
    fits
}

/// Runs `work`; the emulated GPU runs only these blocks of its large grids.
fn only<R>(blocks: &[usize], work: impl FnOnce() -> R) -> R {
    if on_a_real_gpu() {
        return work();
    }
    let blocks: Vec<u64> = blocks.iter().map(|block| *block as u64).collect::<BTreeSet<_>>().into_iter().collect();
    let choose = |blocks: &[u64]| {
        // SAFETY: it copies the numbers; no launch is under way.
        emulation::with_function("emulated_choose", |choose: unsafe extern "C" fn(*const u64, u64)| unsafe {
            choose(blocks.as_ptr(), blocks.len() as u64);
        });
    };
    choose(&blocks);
    let done = work();
    choose(&[]);
    done
}

/// Groups of `each` rows with up to `width` values per row: the first and the last, and the groups before and after
/// each bound.
fn met(rows: usize, each: usize, width: usize) -> BTreeSet<usize> {
    let within = BOUNDS.iter().filter(|bound| **bound < rows * width);
    let beside = within.flat_map(|bound| [(bound - 1) / width / each, bound / width / each]);
    beside.chain([0, (rows - 1) / each]).collect()
}

/// The bytes of values of a dtype.
fn bits(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => bytemuck::cast_slice(values).to_vec(),
        DType::Bf16 => bytemuck::cast_slice(&bf16(values)).to_vec(),
    }
}

/// Writes bytes from value `at` on.
fn put(memory: &mut Memory, dtype: DType, at: usize, bytes: &[u8]) {
    let len = bytes.len() / dtype.bytes();
    memory.view_mut(dtype).part(at..at + len).write_bits(bytes);
}

/// The bytes of `len` values from `at` on.
fn get(view: View, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len * view.dtype().bytes()];
    view.part(at..at + len).read_bits(&mut bytes);
    bytes
}

/// A tensor of a far test: its dtype and the values of a row.
type Wide = (DType, usize);

/// Far tensors of `rows` rows, of which the groups of `each` rows that meet bounds have values, and small ones of these
/// rows alone.
struct Pair<const N: usize> {
    tensors: [Wide; N],
    rows: Vec<usize>,
    /// The first row and the number of rows of each group.
    groups: Vec<(usize, usize)>,
    far: [Memory; N],
    near: [Memory; N],
}

impl<const N: usize> Pair<N> {
    /// `None` if the GPU has too little memory.
    fn new(tensors: [Wide; N], rows: usize, each: usize) -> Option<Self> {
        let widest = tensors.iter().map(|(_, width)| *width).max().expect("tensors");
        let groups = met(rows, each, widest).into_iter().map(|g| (g * each, each.min(rows - g * each)));
        let groups: Vec<(usize, usize)> = groups.collect();
        let bytes = tensors.map(|(dtype, width)| rows * width * dtype.bytes());
        if !has_room(bytes.iter().sum()) {
            return None;
        }
        let chosen: Vec<usize> = groups.iter().flat_map(|&(first, n)| first..first + n).collect();
        let mut far = bytes.map(Memory::scratch);
        let near = std::array::from_fn(|i| {
            let ((dtype, width), far) = (tensors[i], &mut far[i]);
            // Above 0, as second moments and norms are.
            let values: Vec<f32> = numbers(i as u32 + 1, chosen.len() * width).iter().map(|x| x.abs() + 0.01).collect();
            let values = bits(dtype, &values);
            let mut rest = &values[..];
            for &(first, n) in &groups {
                let (own, behind) = rest.split_at(n * width * dtype.bytes());
                put(far, dtype, first * width, own);
                rest = behind;
            }
            Memory::from_values(&values)
        });
        Some(Self { tensors, rows: chosen, groups, far, near })
    }

    /// The numbers of the groups among all.
    fn numbers(&self, each: usize) -> Vec<usize> {
        self.groups.iter().map(|(first, _)| first / each).collect()
    }

    /// Whether both have the same bits in all rows.
    fn agree(&self, what: &str) {
        for (i, &(dtype, width)) in self.tensors.iter().enumerate() {
            let mut at = 0;
            for &(first, n) in &self.groups {
                let far = get(self.far[i].view(dtype), first * width, n * width);
                let near = get(self.near[i].view(dtype), at * width, n * width);
                let apart = far.iter().zip(&near).position(|(a, b)| a != b).map(|byte| byte / dtype.bytes());
                assert_eq!(apart, None, "{what}: tensor {i}, value of rows {first}.. of {width}");
                at += n;
            }
        }
    }
}

/// The rows of tensors: the far ones, of which some meet bounds, or the small ones, which are these alone.
#[derive(Clone, Copy)]
struct Rows<'a> {
    len: usize,
    is_far: bool,
    /// The numbers of the groups that meet bounds in the far tensors.
    met: &'a [usize],
}

impl Rows<'_> {
    /// `of` the number of each row in the far tensors.
    fn map<T>(&self, of: impl Fn(usize) -> T) -> Vec<T> {
        (0..self.len).map(|row| of(if self.is_far { row } else { self.met[row] })).collect()
    }
}

/// Does `work` over far tensors, where the blocks of rows that meet bounds run, and over small ones of the same rows.
/// `blocks` says which blocks of the grid a group of `each` rows is.
fn assert_same_bits_of<const N: usize>(
    what: &str,
    tensors: [Wide; N],
    rows: usize,
    each: usize,
    blocks: impl Fn(usize) -> Vec<usize>,
    work: impl Fn(&mut [Memory; N], Rows),
) {
    let (_gpu, _one) = device();
    let Some(mut pair) = Pair::new(tensors, rows, each) else { return };
    let chosen: Vec<usize> = pair.numbers(each).into_iter().flat_map(blocks).collect();
    only(&chosen, || work(&mut pair.far, Rows { len: rows, is_far: true, met: &pair.rows }));
    work(&mut pair.near, Rows { len: pair.rows.len(), is_far: false, met: &pair.rows });
    pair.agree(what);
}

/// The same if each block of the grid is a group.
fn assert_same_bits<const N: usize>(
    what: &str,
    tensors: [Wide; N],
    rows: usize,
    each: usize,
    work: impl Fn(&mut [Memory; N], Rows),
) {
    assert_same_bits_of(what, tensors, rows, each, |group| vec![group], work);
}

fn small(seed: u32, len: usize) -> Memory {
    Memory::from_values(&bf16(&numbers(seed, len)))
}
