//! `job.products`: who computes matrix products on a GPU. Under `auto` it is the one with which a whole step takes less time, as
//! far as its products say: they are measured at the start, with the shapes of this job on this rank.

use super::layout::Layout;
use crate::checkpoint;
use crate::comm::Group;
use crate::config::Config;
use crate::config::job::{JobKind, Products};
use crate::config::mesh::{Place, RoleName};
use crate::device::Device;
use crate::device::cuda::fast;
use crate::error::{Error, Result};
use crate::model::{Arch, Head, ParamTable, TensorPart};
use crate::plan::Archs;
use crate::plan::shape::Dims;
use crate::plan::{head_of, work};
use crate::train::check::Checked;
use crate::train::products_time::{Measured, measure};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// What fast products must save of a step's seconds: exact ones promise more.
const WORTH: f64 = 0.05;

/// How matrix products are computed.
pub struct Chosen {
    /// Whether those of many rows are cuBLASLt's.
    pub fast: bool,
    /// Whether that was opened, and keeps what it works in, be it to be timed.
    pub is_open: bool,
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

/// How often the tokens of a step go through products of many rows, in passes of the actor on one of its ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Passes {
    /// Forward and backward.
    pub trained: f64,
    /// Forward alone, a part of one where layers are computed again; with exact products and with fast ones.
    pub forwards: [f64; 2],
}

impl Passes {
    /// Of those of `roles` that the job has, with models of these shapes; `actor` is how the actor is laid out.
    pub fn of(config: &Config, archs: &Archs, roles: &[RoleName], actor: &Layout) -> Self {
        let dims = Dims::new(&archs.actor, actor.mesh.tensor);
        let again = if config.gradient.recompute { work::again_of_forward(&dims) } else { 0.0 };
        if config.job.kind == JobKind::Sft {
            return Self { trained: 1.0, forwards: [again; 2] };
        }
        let size = |arch: &Arch, head| ParamTable::new(arch, head).parameters() as f64;
        let whole = size(&archs.actor, Head::LanguageModel);
        let of = |role: RoleName| {
            let arch = archs.of(role).filter(|_| roles.contains(&role));
            arch.map_or(0.0, |arch| size(arch, head_of(role)) / whole)
        };
        let [actors, critic, reference] = [RoleName::Actor, RoleName::Critic, RoleName::Reference].map(of);
        let trained = config.ppo.epochs as f64 * (actors + critic);
        let recomputes = |fast| config.ppo.recomputes_old_logprobs(&actor.mesh, &actor.rollout, fast);
        let old = |fast| if recomputes(fast) { actors } else { 0.0 };
        // Critic and reference score what was drawn, too.
        Self { trained, forwards: [false, true].map(|fast| again * trained + critic + reference + old(fast)) }
    }

    /// Seconds of all of them on a rank that has a share of `1 / ranks` of the tokens.
    pub fn times(&self, measured: &Measured, ranks: usize) -> Times {
        let of = |i: usize| {
            let [forward, backward] = [measured.forward[i], measured.backward[i]];
            (self.trained * (forward + backward) + self.forwards[i] * forward) / ranks as f64
        };
        Times { tokens: measured.tokens, exact_s: of(0), fast_s: of(1) }
    }
}

/// Seconds of a step's products with either kind for all places of `layouts`, of which the first has the actor: they learn at the
/// same time, so that the one that takes longest counts.
pub fn slowest(config: &Config, archs: &Archs, layouts: &[(Place, Layout)], measured: &Measured) -> Times {
    let of = |(place, layout): &(Place, Layout)| {
        let passes = Passes::of(config, archs, &place.roles, &layouts[0].1);
        passes.times(measured, layout.mesh.data * layout.mesh.sequence)
    };
    let ranks = layouts[0].1.mesh.data * layouts[0].1.mesh.sequence;
    let longest = |all: Times, one: Times| Times {
        exact_s: all.exact_s.max(one.exact_s),
        fast_s: all.fast_s.max(one.fast_s),
        ..all
    };
    let all = layouts.iter().map(of).reduce(longest).expect("a job has a place");
    // As many tokens as a micro-batch has, on each of the actor's ranks.
    Times { exact_s: all.exact_s * ranks as f64, fast_s: all.fast_s * ranks as f64, ..all }
}

/// Who computes matrix products, the same on all ranks of all places, as the configuration says afterwards; none on CPUs. All ranks
/// call this with all places when their GPUs have started.
///
/// # Errors
/// `Usage` where the job asks for `fast` and a rank has no cuBLASLt; `Fault` where that computes other things than the CPU.
pub fn settle(
    config: &mut Config,
    all: &Group,
    device: Device,
    checked: Option<&Checked>,
    layouts: &[(Place, Layout)],
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
    layouts: &[(Place, Layout)],
) -> Result<Option<Chosen>> {
    if device == Device::Cpu {
        return Ok(None);
    }
    let asked = config.job.products;
    let exact = |words: String| Chosen { fast: false, is_open: false, words, measured: None };
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
        Chosen { fast: true, is_open: true, words: words(true, ""), measured: None }
    } else if let Some(Kept { fast, measured }) = kept(config, all) {
        Chosen { fast, is_open: true, words: words(fast, ", as the run began"), measured }
    } else {
        let times = times(config, all, layouts)?;
        let fast = times.are_fast_worth_it();
        Chosen { fast, is_open: true, words: words(fast, ""), measured: Some(times) }
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
fn times(config: &Config, all: &Group, layouts: &[(Place, Layout)]) -> Result<Times> {
    let archs = all.agree(Archs::load(config, None))?;
    let mesh = &layouts[0].1.mesh;
    let tokens = match config.job.kind {
        JobKind::Ppo => config.ppo.microbatch_tokens_max,
        JobKind::Sft => config.sft.microbatch_tokens_max,
    };
    // No rank of this axis holds more than the first; places differ in their data axes alone.
    let part = TensorPart { rank: 0, size: mesh.tensor };
    let mut measured = measure(&archs.actor, part, tokens.div_ceil(mesh.sequence).max(1));
    let mut slowest_rank = [measured.forward, measured.backward].concat();
    all.all_reduce_max_f64(&mut slowest_rank);
    measured.forward.copy_from_slice(&slowest_rank[..2]);
    measured.backward.copy_from_slice(&slowest_rank[2..]);
    Ok(slowest(config, &archs, layouts, &measured))
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
    use crate::mesh::Mesh;

    fn laid_out(ranks: usize, rollout: Mesh) -> Layout {
        Layout {
            mesh: Mesh::data_only(ranks),
            stage: 1,
            rollout,
            swap: crate::plan::shape::Swap::default(),
            is_tight: false,
            rollout_words: None,
            expected: None,
        }
    }

    fn times(exact_s: f64, fast_s: f64) -> Times {
        Times { tokens: 8192, exact_s, fast_s }
    }

    #[test]
    fn fast_products_must_win_by_a_twentieth() {
        assert!(times(1.0, 0.95).are_fast_worth_it() && times(1.0, 0.5).are_fast_worth_it());
        assert!(!times(1.0, 0.951).are_fast_worth_it() && !times(1.0, 1.2).are_fast_worth_it());
        assert!(!times(1.0, f64::NAN).are_fast_worth_it());
    }

    /// PPO with a critic and a reference of the actor's shape, the actor on two ranks that sample by tensor parts, the critic on one.
    #[test]
    fn places_that_learn_at_the_same_time_choose_once_by_the_one_that_takes_longest() {
        let arch = serde_json::json!({"model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256});
        let actor = Arch::from_config(arch.as_object().expect("an object")).expect("a known family");
        let archs = Archs { critic: Some(actor.clone()), reference: Some(actor.clone()), reward: None, actor };
        let text = "[job]\nkind = \"ppo\"\nsteps = 1\n[model]\nactor = \"m\"\n[data]\nprompts = [\"p\"]\n";
        let mut config = crate::config::parse(text, &[]).expect("a job");
        config.gradient.recompute = false;
        let of = |roles: &[RoleName], ranks: std::ops::Range<usize>, rollout: Mesh| {
            let layout = laid_out(ranks.len(), rollout);
            (Place { roles: roles.to_vec(), ranks }, layout)
        };
        let actors = of(&[RoleName::Actor, RoleName::Reference], 0..2, Mesh { tensor: 2, ..Mesh::data_only(1) });
        let critic = of(&[RoleName::Critic, RoleName::Reward], 2..3, Mesh::data_only(1));
        let of_actor = Passes::of(&config, &archs, &actors.0.roles, &actors.1);
        let of_critic = Passes::of(&config, &archs, &critic.0.roles, &actors.1);
        let epochs = config.ppo.epochs as f64;
        // The rollout cuts matrices otherwise than training, so that old log-probabilities cost a forward whoever multiplies.
        assert_eq!((of_actor.trained, of_actor.forwards), (epochs, [2.0, 2.0]));
        // The critic has none of the passes of the actor, nor its head over the vocabulary.
        assert!(of_critic.trained > 0.8 * epochs && of_critic.trained < epochs, "{of_critic:?}");
        assert_eq!(of_critic.forwards[0], of_critic.forwards[1]);
        // It has all tokens on one rank: what its rank takes counts, in seconds of the actor's two.
        let measured = Measured { tokens: 8192, forward: [1.0, 0.8], backward: [2.0, 1.6] };
        let times = slowest(&config, &archs, &[actors, critic], &measured);
        let longest = of_critic.times(&measured, 1);
        assert!(
            (times.exact_s - 2.0 * longest.exact_s).abs() < 1e-9 && (times.fast_s - 2.0 * longest.fast_s).abs() < 1e-9
        );
    }

    #[test]
    fn what_fast_products_cost_a_step_is_one_more_forward() {
        let measured = Measured { tokens: 8192, forward: [1.0, 0.8], backward: [2.0, 1.6] };
        // A critic as large as the actor, and a reference: 2 forwards and backwards, 2 forwards.
        let ppo = Passes { trained: 2.0, forwards: [2.0, 3.0] };
        let Times { exact_s, fast_s, .. } = ppo.times(&measured, 1);
        assert!((exact_s - 8.0).abs() < 1e-12 && (fast_s - 7.2).abs() < 1e-12, "{exact_s} {fast_s}");
        assert!(ppo.times(&measured, 1).are_fast_worth_it());
        // Alone, the same kernels save less than the forward takes.
        let alone = Passes { trained: 1.0, forwards: [0.0, 1.0] };
        assert!(!alone.times(&measured, 1).are_fast_worth_it());
        let sft = Passes { trained: 1.0, forwards: [0.0; 2] };
        assert!(sft.times(&measured, 1).are_fast_worth_it());
    }

    #[test]
    fn a_layer_that_is_computed_again_leaves_out_the_mlps_last_product_and_the_head() {
        let shape = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 640, "hidden_size": 64,
            "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
            "max_position_embeddings": 64, "tie_word_embeddings": false,
        });
        let actor = Arch::from_config(shape.as_object().expect("an object")).expect("a model");
        let archs = Archs { actor, critic: None, reference: None, reward: None };
        let job = "[job]\nkind = \"sft\"\nsteps = 1\n[model]\nactor = \"m\"\n[data]\nprompts = [\"p\"]\n\
                   [gradient]\nrecompute = true\n";
        let of = |more: &[String]| {
            let config = crate::config::parse(job, more).expect("a job");
            Passes::of(&config, &archs, &RoleName::ALL, &laid_out(1, Mesh::data_only(1)))
        };
        // Of a layer four products of 64 x 64 and two of 64 x 192; of a forward a third of those, too, and the head's 64 x 640.
        let again = f64::from(2 * (4 * 64 + 2 * 192)) / f64::from(2 * (4 * 64 + 3 * 192) + 640);
        let Passes { trained, forwards } = of(&[]);
        assert!(trained == 1.0 && forwards.iter().all(|forward| (forward - again).abs() < 1e-12), "{forwards:?}");
        assert_eq!(of(&["gradient.recompute=false".into()]).forwards, [0.0; 2]);
    }
}
