//! nf4 on the GPU: the values of the CPU, and the GEMM of few rows has the bits of the GEMM of the dequantized matrix.

use crate::matmul::{Bf16Matrix, Written, addend, bits};
use crate::{device, in_every_order, numbers, refused};
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::matmul::{Matrix, Tile, Way, forward};
use rlhf_hpc::device::cuda::nf4 as cuda;
use rlhf_hpc::dtype::DType::Bf16;
use rlhf_hpc::tensor::nf4::{Nf4, Place};

/// A matrix with scales in f32, and one with quantized scales.
fn quantized(n: usize, k: usize) -> [Nf4<'static>; 2] {
    let values = numbers(n as u32, n * k);
    let plain = Nf4::quantize(n, k, &|at, to| to.copy_from_slice(&values[at..at + to.len()])).expect("finite values");
    [plain.clone(), plain.double_quantized()]
}

/// A copy on the GPU, which does not begin at its first byte.
struct Copied {
    place: Place,
    memory: Memory,
}

impl Copied {
    fn new(matrix: &Nf4) -> Self {
        let place = matrix.place(48);
        let mut bytes = vec![0u8; place.end];
        place.write(&matrix.view(), &mut bytes);
        Self { place, memory: Memory::from_values(&bytes) }
    }

    fn matrix(&self) -> cuda::Nf4<'_> {
        cuda::Nf4::new(&self.place, self.memory.view(Bf16))
    }
}

fn values(matrix: &Nf4) -> Vec<f32> {
    let mut values = vec![0.0; matrix.n * matrix.k];
    matrix.read(0, &mut values);
    values
}

#[test]
fn any_range_is_dequantized_to_the_values_of_the_cpu() {
    in_every_order(|| {
        for (n, k) in [(40, 64), (9, 72), (3, 35), (280, 64)] {
            for matrix in quantized(n, k) {
                let (want, copied) = (values(&matrix), Copied::new(&matrix));
                for range in [0..n * k, 8..n * k, n * k / 16 * 8..n * k - 1, 16..16] {
                    let mut to = Memory::from_values(&vec![0xffffu16; range.len() + 8]);
                    copied.matrix().dequantize(range.start, to.view_mut(Bf16).part(0..range.len()));
                    let got = to.view(Bf16).to_f32();
                    assert_eq!(bits(&got[..range.len()]), bits(&want[range.clone()]), "({n}, {k}) {range:?}");
                    assert!(
                        got[range.len()..].iter().all(|x| x.is_nan()),
                        "({n}, {k}) {range:?}: written past its end"
                    );
                }
            }
        }
        // Rows whose first scale is not the first of its 256.
        let [_, matrix] = quantized(600, 64);
        let rows = matrix.rows(300..600);
        let mut to = Memory::from_values(&vec![0u16; 300 * 64]);
        Copied::new(&rows).matrix().dequantize(0, to.view_mut(Bf16));
        assert_eq!(bits(&to.view(Bf16).to_f32()), bits(&values(&rows)));
    });
}

#[test]
fn the_gemm_of_codes_has_the_bits_of_the_gemm_of_the_dequantized_matrix() {
    let shapes = [
        (1, 32, 64),
        (2, 40, 128),
        (7, 33, 192),
        (16, 64, 704),
        (9, 129, 64),
        (3, 31, 1024),
        (20, 40, 320),
        (65, 32, 64),
    ];
    in_every_order(|| {
        for (i, (m, n, k)) in shapes.into_iter().enumerate() {
            let (x, bias) = (Bf16Matrix::new(1, m, k, k + [0, 8][i % 2]), Bf16Matrix::new(3, 1, n, n));
            for (j, matrix) in quantized(n, k).into_iter().enumerate() {
                let copied = Copied::new(&matrix);
                let on_gpu = copied.matrix();
                let mut w = Memory::from_values(&vec![0u16; n * k]);
                on_gpu.dequantize(0, w.view_mut(Bf16));
                let w = Matrix::new(w.view(Bf16), n, k);
                let (has_bias, add) = ((i + j) % 2 == 0, i % 3 == 0);
                let given = || has_bias.then(|| bias.memory.view(Bf16));
                let [mut want, mut got] = [0, 0].map(|_| Written::new(4, m, n, n + [0, 4, 3][i % 3], Bf16));
                forward(Way::Exact(Tile::Rows16), x.matrix(), w, given(), addend(add), want.matrix());
                on_gpu.product(x.matrix(), given(), addend(add), got.matrix());
                assert_eq!(bits(&got.read()), bits(&want.read()), "({m}, {n}, {k}) bias {has_bias} add {add}");
                assert_eq!(on_gpu.has_product(m), m <= 64);
            }
        }
    });
}

#[test]
fn a_gemm_of_codes_needs_rows_of_whole_blocks() {
    let (_gpu, _one) = device();
    let ([matrix, _], x) = (quantized(8, 72), Bf16Matrix::new(1, 2, 72, 72));
    let (copied, mut y) = (Copied::new(&matrix), Written::new(2, 2, 8, 8, Bf16));
    let on_gpu = copied.matrix();
    assert!(!on_gpu.has_product(2));
    refused("nf4::product: the width of W must be a multiple of 64 (got 72)", || {
        on_gpu.product(x.matrix(), None, addend(false), y.matrix());
    });
}
