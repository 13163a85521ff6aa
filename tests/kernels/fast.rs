//! GEMMs in the `fast` mode: cuBLASLt's results compared with f64, the choice of the implementation, and the
//! allocations per call (none). cuBLASLt is emulated along with the kernels (`emulation/cublaslt.cpp`); on a real GPU
//! it is the machine's own.

use crate::matmul::{Bf16Matrix, Written, bits, forward_holds, gradients_hold, onto_is_a_copy_and_a_sum};
use crate::{device, emulation, model, on_a_real_gpu, skip};
use rlhf_hpc::device::cuda::graph::Graphs;
use rlhf_hpc::device::cuda::matmul::{Addend, Matrix, MatrixMut, Tile, Way, backward_input, backward_weight, forward};
use rlhf_hpc::device::cuda::{Gpu, Memory, fast};
use rlhf_hpc::dtype::DType;
use std::ffi::{CStr, c_char};
use std::sync::MutexGuard;

/// Rows at the threshold of the mode, at the bounds of size classes and beyond, odd and even.
const ROWS: [usize; 6] = [1, 65, 72, 97, 130, 200];

/// The mode, turned on for one test. `None` if a real GPU has no cuBLASLt.
struct Fast {
    gpu: &'static Gpu,
    _one: MutexGuard<'static, ()>,
}

impl Fast {
    fn on() -> Option<Self> {
        let (gpu, one) = device();
        match fast::turn(true) {
            Ok(()) => Some(Self { gpu, _one: one }),
            Err(why) if on_a_real_gpu() => {
                skip(&why);
                None
            }
            Err(why) => panic!("the emulated cuBLASLt: {why}"),
        }
    }
}

impl Drop for Fast {
    fn drop(&mut self) {
        fast::turn(false).expect("the mode was on");
    }
}

/// How often `work` calls functions of the emulated library or GEMMs of a form. 0 with a real library.
fn grown<const N: usize>(names: [&CStr; N], work: impl FnOnce()) -> Option<[u64; N]> {
    let counts = || {
        names.map(|name| {
            // SAFETY: the function reads the name.
            emulation::with_function("emulated_calls", |count: unsafe extern "C" fn(*const c_char) -> u64| unsafe {
                count(name.as_ptr())
            })
        })
    };
    if on_a_real_gpu() {
        work();
        return None;
    }
    let before = counts();
    work();
    let after = counts();
    Some(std::array::from_fn(|i| after[i] - before[i]))
}

#[test]
fn gemms_and_gradients_equal_f64_with_and_without_bias_and_accumulation() {
    let Some(_on) = Fast::on() else { return };
    for (m, (n, k)) in ROWS.into_iter().zip([(1, 8), (33, 24), (64, 136), (77, 40), (40, 264), (131, 64)]) {
        // A bias has the result's dtype. Some strides allow only narrow stores.
        for (dtype, with, gap) in [
            (DType::Bf16, [false, false], 0),
            (DType::Bf16, [true, true], 3),
            (DType::Bf16, [true, false], 8),
            (DType::F32, [false, true], 1),
            (DType::F32, [false, false], 0),
        ] {
            forward_holds((m, n, k), [8, 0, gap], dtype, with, Way::Fast);
        }
        gradients_hold((m, n, k), Way::Fast);
    }
}

#[test]
fn a_gemm_added_to_another_matrix_equals_a_copy_and_a_gemm_added_in_place() {
    let Some(_on) = Fast::on() else { return };
    let (m, n, k) = (90, 44, 136);
    let (x, w, bias) = (Bf16Matrix::new(1, m, k, k), Bf16Matrix::new(2, n, k, k), Bf16Matrix::new(3, 1, n, n));
    // For another alignment, the library may choose another order of additions.
    for (dtype, within) in [(DType::Bf16, 1e-2), (DType::F32, 1e-5)] {
        // A bias has the result's dtype.
        let bias = |has: bool| (has && dtype == DType::Bf16).then(|| bias.memory.view(DType::Bf16));
        onto_is_a_copy_and_a_sum(
            (m, n),
            dtype,
            within,
            |y, has| forward(Way::Fast, x.matrix(), w.matrix(), bias(has), Addend::Result, y),
            |c, y, has| forward(Way::Fast, x.matrix(), w.matrix(), bias(has), Addend::Matrix(c), y),
        );
    }
}

#[test]
fn a_recomputed_layer_has_the_same_gradients_and_copies_no_residual_stream() {
    let Some(on) = Fast::on() else { return };
    for arch in [model::llama(), model::qwen3()] {
        let before = on.gpu.counts.within.get();
        let [kept, again] = [false, true].map(|recompute| model::gradients(&arch, &[0, 30, 71, 110], recompute));
        assert_eq!(on.gpu.counts.within.get(), before, "the residual stream is not copied");
        let largest = kept.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        let apart = kept.iter().zip(&again).fold(0.0, |most: f32, (a, b)| most.max((a - b).abs()));
        // The library's algorithms may differ in the last bits, depending on how a sum is accumulated.
        assert!(largest > 0.0 && apart <= 0.01 * largest, "gradients of up to {largest}, {apart} apart");
        println!("gradients of up to {largest}, {apart} apart");
    }
}

#[test]
fn gemms_of_few_rows_stay_exact_and_all_do_if_the_mode_is_off() {
    let Some(on) = Fast::on() else { return };
    let (n, k) = (40, 264);
    let (x, w, bias) = (Bf16Matrix::new(1, 65, k, k), Bf16Matrix::new(2, n, k, k), Bf16Matrix::new(3, 1, n, n));
    let run = |m: usize, exact: bool, biased: bool| {
        let mut y = Written::new(4, m, n, n, DType::F32);
        let bias = biased.then(|| bias.memory.view(DType::Bf16));
        let way = if exact { Way::Exact(Tile::for_shape(m, n)) } else { Way::Chosen };
        forward(way, x.rows(0, m), w.matrix(), bias, Addend::Nothing, y.matrix());
        bits(&y.read())
    };
    // cuBLASLt adds no bias of bf16 to a result of f32.
    for (m, biased, is_fast) in [(1, false, false), (64, false, false), (65, true, false), (65, false, true)] {
        let mut got = Vec::new();
        let asked = grown([c"forward"], || got = run(m, false, biased));
        assert_eq!(asked.unwrap_or([u64::from(is_fast)]), [u64::from(is_fast)], "{m} rows, bias {biased}");
        assert!(is_fast || got == run(m, true, biased), "{m} rows, bias {biased}");
    }
    drop(on);
    let (_gpu, _one) = device();
    assert!(!fast::is_on());
    let mut got = Vec::new();
    let asked = grown([c"forward"], || got = run(65, false, false));
    assert!(asked.unwrap_or_default() == [0] && got == run(65, true, false));
}

#[test]
fn hidden_states_and_gradients_of_models_are_close_to_the_cpus_also_with_tied_heads() {
    let Some(_on) = Fast::on() else { return };
    let asked = grown([c"forward", c"input", c"weight"], || model::follow_the_cpu(&[0, 30, 30, 71, 110]));
    assert!(asked.unwrap_or([1; 3]).iter().all(|products| *products > 0), "not by cuBLASLt: {asked:?}");
}

#[test]
fn a_call_with_known_shapes_creates_nothing() {
    let Some(_on) = Fast::on() else { return };
    let (n, k) = (24, 32);
    let (x, dy, w) = (Bf16Matrix::new(1, 130, k, k), Bf16Matrix::new(2, 130, n, n), Bf16Matrix::new(3, n, k, k));
    let mut y = Memory::scratch(4 * 130 * 32);
    let mut dw = Memory::zeros(4 * n * k);
    let mut pass = || {
        for m in 65..=130 {
            let y_of = |y: &mut Memory, width: usize| {
                forward_or_input(y, (x.rows(0, m), dy.rows(0, m)), w.matrix(), m, width);
            };
            y_of(&mut y, n);
            y_of(&mut y, k);
            backward_weight(Way::Chosen, dy.rows(0, m), x.rows(0, m), MatrixMut::new(dw.view_mut(DType::F32), n, k));
        }
    };
    let made = [
        c"cublasLtCreate",
        c"cublasLtMatmulDescCreate",
        c"cublasLtMatrixLayoutCreate",
        c"cublasLtMatmulAlgoGetHeuristic",
    ];
    pass();
    let usage = rlhf_hpc::device::cuda::gpu().usage();
    // A real library may choose the algorithm again for another number of rows.
    assert_eq!(grown(made, &mut pass).unwrap_or_default(), [0; 4]);
    assert_eq!(rlhf_hpc::device::cuda::gpu().usage().in_use, usage.in_use);
}

/// y (m, n) = x W^T, or dx (m, k) = dy W, by the width of the result.
fn forward_or_input(y: &mut Memory, (x, dy): (Matrix, Matrix), w: Matrix, m: usize, width: usize) {
    let y = MatrixMut::new(y.view_mut(DType::Bf16).part(0..m * width), m, width);
    if width == w.rows {
        forward(Way::Fast, x, w, None, Addend::Nothing, y);
    } else {
        backward_input(Way::Fast, dy, w, y, false);
    }
}

#[test]
fn a_gemm_runs_in_stream_order_and_again_at_each_replay_of_a_graph() {
    let Some(_on) = Fast::on() else { return };
    let (m, n, k) = (70, 24, 40);
    let (mut x, w) = (Bf16Matrix::new(1, m, k, k), Bf16Matrix::new(2, n, k, k));
    let other = Bf16Matrix::new(5, m, k, k);
    let mut y = Written::new(3, m, n, n, DType::Bf16);
    // Both descriptors are created here, and get another number of rows after the capture.
    forward(Way::Chosen, x.matrix(), w.matrix(), None, Addend::Nothing, y.matrix());
    let mut graphs = Graphs::default();
    graphs
        .capture((), || forward(Way::Chosen, x.matrix(), w.matrix(), None, Addend::Nothing, y.matrix()))
        .expect("a graph");
    let mut fewer = Written::new(6, 66, n, n, DType::Bf16);
    forward(Way::Chosen, x.rows(0, 66), w.matrix(), None, Addend::Nothing, fewer.matrix());
    y.matrix().values.clear();
    x.memory.view_mut(DType::Bf16).copy_from(other.memory.view(DType::Bf16));
    graphs.replay(&());
    y.check("replayed", true, |_, _| 0.0, |i, j| (0..k).map(|c| (other.at(i, c), w.at(j, c))).collect());
    x.memory.view_mut(DType::Bf16).clear();
    graphs.replay(&());
    assert!(y.read().iter().all(|y| *y == 0.0));
}
