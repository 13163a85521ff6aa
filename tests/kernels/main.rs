//! The kernels of `cuda/` against the CPU's operations and naive f64 loops.
//!
//! They run on an emulated GPU, in two orders of its threads; with `RLHF_HPC_KERNELS=gpu` on a real one.

mod adamw;
mod attention;
mod attention_reference;
mod axes_check;
mod copy;
mod delta;
mod driver;
mod embedded;
mod emulation;
mod experts;
mod failing;
mod far;
mod fast;
mod graph;
mod graphs;
mod jobs;
mod linear_divergence;
mod linear_logprob;
mod linear_logprob_fused;
mod loss;
mod matmul;
mod model;
#[expect(dead_code, reason = "other targets use the rest")]
#[path = "../models.rs"]
mod models;
mod nccl;
mod nf4;
mod norm;
mod offload;
mod ops;
mod paged_attention;
mod rank_sum;
mod ranks;
mod reshard;
mod ring;
mod rollout;
mod run_adapters;
mod run_experts;
mod run_fast;
mod run_host;
mod run_layouts;
mod run_loss;
mod run_memory;
mod run_rounded;
mod run_start;
mod run_trace;
mod run_turns;
mod run_verbs;
mod sample;
mod softcap;
mod step;
#[path = "../weights.rs"]
mod weights;

use rlhf_hpc::device::cuda::embedded::{COMPILER, CUBINS};
use rlhf_hpc::device::cuda::{Gpu, Memory, gpu};
use rlhf_hpc::dtype::DType;
use rlhf_hpc::error::Error;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

static STARTED: Once = Once::new();
static ONE: Mutex<()> = Mutex::new(());

/// The GPU of the tests, for one test at a time.
pub fn device() -> (&'static Gpu, MutexGuard<'static, ()>) {
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    STARTED.call_once(|| {
        // An error that ends a test has a message, too.
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if let Some(error) = panic.payload().downcast_ref::<Error>() {
                eprintln!("{error}");
            }
            usual(panic);
        }));
        let opened = if on_a_real_gpu() {
            Gpu::open(0).unwrap_or_else(|why| panic!("RLHF_HPC_KERNELS=gpu, and there is none: {why:?}"))
        } else {
            emulation::open().unwrap_or_else(|why| panic!("the emulated GPU: {why:?}"))
        };
        rlhf_hpc::device::cuda::gpu::start(opened);
    });
    (gpu(), one)
}

/// Asserts that `body` panics with this text, in the panic's error or in its own message.
pub fn refused(wanted: &str, body: impl FnOnce()) {
    let panic = catch_unwind(AssertUnwindSafe(body)).expect_err("this must be refused");
    let error = panic.downcast_ref::<Error>().map(|error| error.message.clone());
    let text = || panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).into()));
    let words = error.or_else(text).expect("a panic has words");
    assert!(words.contains(wanted), "{words}");
}

/// Whether the tests were asked to run on a real GPU.
pub fn on_a_real_gpu() -> bool {
    std::env::var_os("RLHF_HPC_KERNELS").is_some_and(|device| device == "gpu")
}

/// Prints why the running test skips something. Libtest hides what passing tests print, but not this.
pub fn skip(why: &str) {
    let thread = std::thread::current();
    let _ = writeln!(std::io::stderr(), "skipped: {}: {why}", thread.name().unwrap_or("a test"));
}

/// Whether a test of the emulated GPU runs on a real one, and so is skipped.
pub fn skip_on_a_real_gpu() -> bool {
    if on_a_real_gpu() {
        skip("it needs the emulated GPU");
    }
    on_a_real_gpu()
}

/// Whether a test of the binary's cubins is skipped, as the build had no compiler for them.
pub fn skip_without_cubins() -> bool {
    if CUBINS.is_empty() {
        skip(COMPILER);
    }
    CUBINS.is_empty()
}

/// Runs `body` with the GPU, on the emulated one in both orders of its threads.
pub fn in_every_order(body: impl Fn()) {
    let (_gpu, _one) = device();
    if on_a_real_gpu() {
        return body();
    }
    for order in [1, 0] {
        emulation::set_order(order);
        body();
    }
}

/// Pseudo-random numbers in -1..1, the same for the same seed.
pub fn numbers(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// The nearest bf16 values, as their bits.
pub fn bf16(values: &[f32]) -> Vec<u16> {
    values.iter().map(|x| half::bf16::from_f32(*x).to_bits()).collect()
}

/// `values` on the GPU, as a dtype has them.
pub fn on_gpu(dtype: DType, values: &[f32]) -> Memory {
    match dtype {
        DType::F32 => Memory::from_values(values),
        DType::Bf16 => Memory::from_values(&bf16(values)),
    }
}

/// `values` rounded to bf16, as f32.
pub fn rounded(values: &[f32]) -> Vec<f32> {
    values.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect()
}
