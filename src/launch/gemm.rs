//! `job.gemm`: the backend of GEMMs on a GPU, our exact kernels or cuBLASLt. `auto` chooses the one with the shorter
//! step. To predict it, two GEMMs are timed at the start, with the shapes of this job on this rank.

use super::ranks::Ranks;
use super::self_test::SelfTest;
use super::step_shape::StepShape;
use crate::checkpoint;
use crate::comm::{Group, records};
use crate::config::Config;
use crate::config::job::{Gemm, Recompute};
use crate::device::cuda::matmul::{self, Addend, Matrix, MatrixMut, Way};
use crate::device::cuda::{Memory, fast, gpu};
use crate::dtype::DType::{Bf16, F32};
use crate::error::{Error, Result};
use crate::model::{Arch, TensorPart};
use crate::sys::host::median;
use serde::{Deserialize, Serialize};

/// The share of a step's seconds that cuBLASLt must save, because exact GEMMs give more guarantees.
const WORTH: f64 = 0.05;
/// The number of samples of each timing; the median is used.
const SAMPLES: usize = 3;
/// The columns of the head that are timed, and the rows of logits.
const HEAD_COLUMNS_MAX: usize = 16384;
const HEAD_ROWS_MAX: usize = 4096;

/// The chosen backend of GEMMs, and the part of it that checkpoints save.
#[derive(Default, Serialize, Deserialize)]
pub struct GemmChoice {
    /// Whether GEMMs of many rows use cuBLASLt.
    pub fast: bool,
    /// The measurements of this run, or of the run that it resumes.
    pub measured: Option<Times>,
    /// Whether cuBLASLt was opened, even if only for timing. An open cuBLASLt keeps its workspace.
    #[serde(skip)]
    pub is_open: bool,
    /// The backend and the reason, for the banner.
    #[serde(skip)]
    pub description: String,
}

/// Seconds of two GEMMs, times the number of passes in a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    pub tokens: usize,
    pub exact_s: f64,
    pub cublaslt_s: f64,
}

impl Times {
    /// Computes the seconds of `trained` forward and backward passes, and of `forwards` forward passes, for exact GEMMs
    /// and for cuBLASLt.
    fn new(tokens: usize, [forward, backward]: [[f64; 2]; 2], trained: f64, forwards: [f64; 2]) -> Self {
        let of = |i: usize| trained * (forward[i] + backward[i]) + forwards[i] * forward[i];
        Self { tokens, exact_s: of(0), cublaslt_s: of(1) }
    }

    /// Whether cuBLASLt saves enough.
    pub fn is_cublaslt_worth_it(&self) -> bool {
        self.cublaslt_s <= (1.0 - WORTH) * self.exact_s
    }

    pub fn describe(&self) -> String {
        let Self { tokens, exact_s, cublaslt_s } = self;
        let [exact, cublaslt] = [exact_s, cublaslt_s].map(|seconds| format!("{:.3} ms", 1e3 * seconds));
        format!(
            "two GEMMs, for all passes of {tokens} tokens in a step: {exact} exact, {cublaslt} cublaslt with the forwards it adds"
        )
    }
}

/// Chooses the backend of GEMMs, the same on all ranks, and sets it in the configuration. All ranks with GPUs call
/// this.
pub fn choose(config: &mut Config, ranks: &Ranks, checked: Option<&SelfTest>, shape: &StepShape) -> Result<GemmChoice> {
    let chosen = decide(config, ranks, checked, shape)?;
    fast::turn(chosen.fast).map_err(Error::usage)?;
    config.job.gemm = if chosen.fast { Gemm::Cublaslt } else { Gemm::Exact };
    Ok(chosen)
}

fn decide(config: &Config, ranks: &Ranks, checked: Option<&SelfTest>, shape: &StepShape) -> Result<GemmChoice> {
    let (all, asked) = (&ranks.all, config.job.gemm);
    let exact = |description: String| Ok(GemmChoice { description, ..GemmChoice::default() });
    if asked == Gemm::Exact {
        return exact("exact".into());
    }
    let tested = || all.agree(checked.map_or(Ok(()), SelfTest::fast).map_err(|e| e.hint("set job.gemm = \"exact\"")));
    let library = match found(all).and_then(|library| tested().map(|()| library)) {
        Ok(library) => library,
        Err(error) if asked == Gemm::Cublaslt => return all.agree(Err(error.within("job.gemm = \"cublaslt\""))),
        Err(error) => return exact(format!("exact, because {}", error.message)),
    };
    let (fast, measured, began) = match saved(config, all) {
        _ if asked == Gemm::Cublaslt => (true, None, ""),
        Some(GemmChoice { fast, measured, .. }) => (fast, measured, ", as at the start of the run"),
        None => {
            let times = times(config, ranks, shape)?;
            (times.is_cublaslt_worth_it(), Some(times), "")
        }
    };
    let rows = fast::EXACT_ROWS_MAX;
    let by_cublaslt = format!("cublaslt{began}: GEMMs of more than {rows} rows by {library}");
    let description = if fast { by_cublaslt } else { format!("exact{began}") };
    Ok(GemmChoice { fast, measured, is_open: true, description })
}

/// The name of the cuBLASLt library, on every rank.
fn found(all: &Group) -> Result<String> {
    let hint = "install CUDA or PyTorch, which contain cuBLASLt, set RLHF_CUBLASLT_LIB to its file, or set job.gemm = \"exact\"";
    let none = |why: String| Error::usage(format!("there is no cuBLASLt for this GPU: {why}")).hint(hint);
    all.agree(fast::open().map_err(none))
}

/// Times GEMMs of a micro-batch on the slowest rank, with the actor's MLP and head as the first placement shards them.
fn times(config: &Config, ranks: &Ranks, shape: &StepShape) -> Result<Times> {
    let (all, layout) = (&ranks.all, &ranks.layouts[0]);
    let arch = all.agree(Arch::load(&config.model.actor))?;
    let tokens = shape.microbatch_tokens_max.div_ceil(layout.mesh.sequence).max(1);
    let part = TensorPart { rank: 0, size: layout.mesh.tensor };
    let mlp = arch.feeds().map(|mlp| mlp.cut().len(part)).max().unwrap_or(1).next_multiple_of(8);
    let head = part.widest(arch.vocabulary).clamp(1, HEAD_COLUMNS_MAX).next_multiple_of(8);
    let shapes = [[tokens, mlp, arch.width], [tokens.min(HEAD_ROWS_MAX), head, arch.width]];
    let mut seconds = [0.0; 4];
    for (mode, is_fast) in [false, true].into_iter().enumerate() {
        fast::turn(is_fast).map_err(Error::usage)?;
        for [forward, backward] in shapes.map(measure) {
            seconds[mode] += forward;
            seconds[2 + mode] += backward;
        }
    }
    gpu().trim();
    all.all_reduce_max_f64(&mut seconds);
    let [exact, fast, exact_backward, fast_backward] = seconds;
    // The number of passes of a step's tokens: forward and backward, and forward only.
    let trained = shape.trained_passes();
    let forwards = [false, true].map(|fast| {
        let again = if config.gradient.recompute == Recompute::Block { trained } else { 0 };
        let old = shape.has_rollout() && config.recomputes_old_logprobs(&layout.mesh, &layout.rollout(), fast);
        (again + shape.scored + usize::from(old)) as f64
    });
    Ok(Times::new(tokens, [[exact, fast], [exact_backward, fast_backward]], trained as f64, forwards))
}

/// Seconds of y (m, n) = x (m, k) W (n, k)^T, and of the gradients of x and W.
fn measure([m, n, k]: [usize; 3]) -> [f64; 2] {
    // GEMMs of zeros use less power, which raises the clocks.
    let filled = |len: usize| {
        let mut memory = Memory::scratch(len * Bf16.bytes());
        let values: Vec<f32> = (0..len).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        memory.view_mut(Bf16).write(&values);
        memory
    };
    let [x, w, dy] = [m * k, n * k, m * n].map(filled);
    let [x, w] = [(&x, m), (&w, n)].map(|(memory, rows)| Matrix::new(memory.view(Bf16), rows, k));
    let dy = Matrix::new(dy.view(Bf16), m, n);
    let (mut y, mut dx, mut dw) = (Memory::scratch(2 * m * n), Memory::scratch(2 * m * k), Memory::zeros(4 * n * k));
    let forward = seconds(|| {
        matmul::forward(Way::Chosen, x, w, None, Addend::Nothing, MatrixMut::new(y.view_mut(Bf16), m, n));
    });
    let backward = seconds(|| {
        matmul::backward_input(Way::Chosen, dy, w, MatrixMut::new(dx.view_mut(Bf16), m, k), false);
        matmul::backward_weight(Way::Chosen, dy, x, MatrixMut::new(dw.view_mut(F32), n, k));
    });
    [forward, backward]
}

/// The median of some samples, after a first call that selects its kernel.
fn seconds(mut work: impl FnMut()) -> f64 {
    work();
    median((0..SAMPLES).map(|_| gpu().seconds(&mut work)))
}

/// The choice in the newest checkpoint, if it was saved on GPUs. The same on all ranks. All ranks call this.
fn saved(config: &Config, all: &Group) -> Option<GemmChoice> {
    records::of_first(all, || {
        let state = checkpoint::peek(&config.job.dir.join("checkpoints"))?;
        serde_json::from_value(state["gemm"].clone()).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cublaslt_must_be_faster_by_a_twentieth_including_its_extra_forward() {
        let times = |exact_s: f64, cublaslt_s: f64| Times { tokens: 8192, exact_s, cublaslt_s };
        assert!(times(1.0, 0.95).is_cublaslt_worth_it() && times(1.0, 0.5).is_cublaslt_worth_it());
        assert!(!times(1.0, 0.951).is_cublaslt_worth_it() && !times(1.0, f64::NAN).is_cublaslt_worth_it());
        let measured = [[1.0, 0.8], [2.0, 1.6]];
        // A critic and a reference: 2 forwards and backwards, 2 forwards. Without them, the kernels save less time than
        // the forward takes.
        assert!(Times::new(8192, measured, 2.0, [2.0, 3.0]).is_cublaslt_worth_it());
        assert!(!Times::new(8192, measured, 1.0, [0.0, 1.0]).is_cublaslt_worth_it());
        assert!(Times::new(8192, measured, 1.0, [0.0; 2]).is_cublaslt_worth_it());
    }
}
