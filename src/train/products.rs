//! `job.products`: who computes matrix products on a GPU. Under `auto` it is the one with which a whole step takes less time, as
//! far as its products say: they are measured at the start, with the shapes of this job on this rank.

use super::check::Checked;
use super::products_time::{Measured, measure};
use crate::checkpoint;
use crate::comm::Group;
use crate::config::Config;
use crate::config::job::{JobKind, Products};
use crate::config::mesh::RoleName;
use crate::device::Device;
use crate::device::cuda::fast;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::model::{Arch, Head, ParamTable, TensorPart};
use crate::plan::Archs;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// What fast products must save of a step's seconds: exact ones promise more.
const WORTH: f64 = 0.05;

/// How matrix products are computed.
pub struct Chosen {
    /// Whether those of many rows are cuBLASLt's.
    pub fast: bool,
    /// For the banner: by what, and why.
    pub words: String,
    /// What was measured, by this run or by the one that began it.
    pub measured: Option<Times>,
}

/// Seconds of a step's products, for as many tokens as a micro-batch has.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    pub tokens: usize,
    pub exact_s: f64,
    pub fast_s: f64,
}

impl Times {
    /// Whether fast products are worth what they cost.
    pub fn are_fast_worth_it(&self) -> bool {
        self.fast_s <= (1.0 - WORTH) * self.exact_s
    }

    /// For the banner.
    pub fn words(&self) -> String {
        let Self { tokens, exact_s, fast_s } = self;
        let [exact, fast] = [exact_s, fast_s].map(|seconds| format!("{:.3} ms", 1e3 * seconds));
        format!("a step's products of {tokens} tokens: {exact} exact, {fast} fast with what that adds")
    }
}

/// How often the tokens of a step go through products of many rows, in passes of the actor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Passes {
    /// Forward and backward.
    pub trained: f64,
    /// Forward alone, with exact products and with fast ones.
    pub forwards: [f64; 2],
}

impl Passes {
    /// Of the job on `mesh`, with models of these shapes.
    pub fn of(config: &Config, archs: &Archs, mesh: &Mesh, rollout: &Mesh) -> Self {
        let again = if config.gradient.recompute { 1.0 } else { 0.0 };
        if config.job.kind == JobKind::Sft {
            return Self { trained: 1.0, forwards: [again; 2] };
        }
        let size = |arch: &Arch, head| ParamTable::new(arch, head).parameters() as f64;
        let whole = size(&archs.actor, Head::LanguageModel);
        let of = |role: RoleName, head| archs.of(role).map_or(0.0, |arch| size(arch, head) / whole);
        let (critic, reference) = (of(RoleName::Critic, Head::Value), of(RoleName::Reference, Head::LanguageModel));
        let trained = config.ppo.epochs as f64 * (1.0 + critic);
        let old = |fast| f64::from(u8::from(config.ppo.recomputes_old_logprobs(mesh, rollout, fast)));
        // Critic and reference score what was drawn, too.
        Self { trained, forwards: [false, true].map(|fast| again * trained + critic + reference + old(fast)) }
    }

    /// Seconds of all of them.
    pub fn times(&self, measured: &Measured) -> Times {
        let of = |i: usize| {
            let [forward, backward] = [measured.forward[i], measured.backward[i]];
            self.trained * (forward + backward) + self.forwards[i] * forward
        };
        Times { tokens: measured.tokens, exact_s: of(0), fast_s: of(1) }
    }
}

/// The layouts of training and of the rollout.
pub type Layouts<'a> = (&'a Mesh, &'a Mesh);

/// Who computes matrix products, the same on all ranks, as the configuration says afterwards; none on CPUs. All ranks call this
/// when their GPUs have started.
///
/// # Errors
/// `Usage` where the job asks for `fast` and a rank has no cuBLASLt; `Fault` where that computes other things than the CPU.
pub fn settle(
    config: &mut Config,
    all: &Group,
    device: Device,
    checked: Option<&Checked>,
    layouts: Layouts,
) -> Result<Option<Chosen>> {
    let chosen = choose(config, all, device, checked, layouts)?;
    if let Some(chosen) = &chosen {
        config.job.products = if chosen.fast { Products::Fast } else { Products::Exact };
    }
    Ok(chosen)
}

fn choose(
    config: &Config,
    all: &Group,
    device: Device,
    checked: Option<&Checked>,
    layouts: Layouts,
) -> Result<Option<Chosen>> {
    if device == Device::Cpu {
        return Ok(None);
    }
    let asked = config.job.products;
    let exact = |words: String| Chosen { fast: false, words, measured: None };
    if asked == Products::Exact {
        fast::turn(false).map_err(Error::usage)?;
        return Ok(Some(exact("exact".into())));
    }
    let library = match found(all).and_then(|library| same(all, checked).map(|()| library)) {
        Ok(library) => library,
        Err(error) if asked == Products::Fast => {
            return all.agree(Err(error.within("job.products = \"fast\"")));
        }
        Err(error) => return Ok(Some(exact(format!("exact, as {}", error.message)))),
    };
    let rows = fast::EXACT_ROWS_MAX;
    let words = |fast: bool, began: &str| {
        if fast { format!("fast{began}: those of more than {rows} rows by {library}") } else { format!("exact{began}") }
    };
    let chosen = if asked == Products::Fast {
        Chosen { fast: true, words: words(true, ""), measured: None }
    } else if let Some(Kept { fast, measured }) = kept(config, all) {
        Chosen { fast, words: words(fast, ", as the run began"), measured }
    } else {
        let times = times(config, all, layouts)?;
        let fast = times.are_fast_worth_it();
        Chosen { fast, words: words(fast, ""), measured: Some(times) }
    };
    fast::turn(chosen.fast).map_err(Error::usage)?;
    Ok(Some(chosen))
}

/// The library of every rank.
fn found(all: &Group) -> Result<String> {
    let hint = "cuBLASLt comes with CUDA, and with PyTorch (RLHF_CUBLASLT_LIB names its file); or set job.products = \"exact\"";
    let none = |why: String| Error::usage(format!("there is no cuBLASLt for this GPU: {why}")).hint(hint);
    let found = fast::open();
    let missing = all.all_gather_bytes(found.as_ref().err().map_or(&[][..], |why| why.as_bytes()));
    let missing = missing.into_iter().enumerate().find(|(_, why)| !why.is_empty());
    match (found, missing) {
        (Ok(library), None) => Ok(library),
        (Err(why), _) => Err(none(why)),
        (Ok(_), Some((rank, why))) => Err(none(format!("rank {rank}: {}", String::from_utf8_lossy(&why)))),
    }
}

/// Whether its products are what the CPU computes, on every rank.
fn same(all: &Group, checked: Option<&Checked>) -> Result<()> {
    let compared = checked.map_or(Ok(()), Checked::fast);
    all.agree(compared.map_err(|error| error.hint("set job.products = \"exact\"")))
}

/// What the slowest rank measures of this job.
fn times(config: &Config, all: &Group, (mesh, rollout): Layouts) -> Result<Times> {
    let archs = all.agree(Archs::load(config, None))?;
    let tokens = match config.job.kind {
        JobKind::Ppo => config.ppo.microbatch_tokens_max,
        JobKind::Sft => config.sft.microbatch_tokens_max,
    };
    // No rank of this axis holds more than the first.
    let part = TensorPart { rank: 0, size: mesh.tensor };
    let mut measured = measure(&archs.actor, part, tokens.div_ceil(mesh.sequence).max(1));
    let mut slowest = [measured.forward, measured.backward].concat();
    all.all_reduce_max_f64(&mut slowest);
    measured.forward.copy_from_slice(&slowest[..2]);
    measured.backward.copy_from_slice(&slowest[2..]);
    Ok(Passes::of(config, &archs, mesh, rollout).times(&measured))
}

/// What a run was begun with.
#[derive(Serialize, Deserialize)]
struct Kept {
    fast: bool,
    measured: Option<Times>,
}

/// What the newest checkpoint was saved with, if that was on GPUs. The same on all ranks, who all call this.
fn kept(config: &Config, all: &Group) -> Option<Kept> {
    let read = || {
        let state = checkpoint::peek(&config.job.dir.join("checkpoints"))?;
        serde_json::from_value::<Kept>(state["products"].clone()).ok()
    };
    let mine = if all.rank() == 0 { read() } else { None };
    let mut bytes = serde_json::to_vec(&mine).expect("numbers serialise");
    all.broadcast_bytes(0, &mut bytes);
    serde_json::from_slice(&bytes).expect("rank 0 wrote it")
}

impl Chosen {
    /// What a checkpoint keeps of it.
    pub fn state(&self) -> serde_json::Value {
        json!(Kept { fast: self.fast, measured: self.measured })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(exact_s: f64, fast_s: f64) -> Times {
        Times { tokens: 8192, exact_s, fast_s }
    }

    #[test]
    fn fast_products_must_win_by_a_twentieth() {
        assert!(times(1.0, 0.95).are_fast_worth_it() && times(1.0, 0.5).are_fast_worth_it());
        assert!(!times(1.0, 0.951).are_fast_worth_it() && !times(1.0, 1.2).are_fast_worth_it());
        assert!(!times(1.0, f64::NAN).are_fast_worth_it());
    }

    #[test]
    fn what_fast_products_cost_a_step_is_one_more_forward() {
        let measured = Measured { tokens: 8192, forward: [1.0, 0.8], backward: [2.0, 1.6] };
        // A critic as large as the actor, and a reference: 2 forwards and backwards, 2 forwards.
        let ppo = Passes { trained: 2.0, forwards: [2.0, 3.0] };
        let Times { exact_s, fast_s, .. } = ppo.times(&measured);
        assert!((exact_s - 8.0).abs() < 1e-12 && (fast_s - 7.2).abs() < 1e-12, "{exact_s} {fast_s}");
        assert!(ppo.times(&measured).are_fast_worth_it());
        // Alone, the same kernels save less than the forward takes.
        let alone = Passes { trained: 1.0, forwards: [0.0, 1.0] };
        assert!(!alone.times(&measured).are_fast_worth_it());
        let sft = Passes { trained: 1.0, forwards: [0.0; 2] };
        assert!(sft.times(&measured).are_fast_worth_it());
    }
}
