//! The metrics of a step, and the memory plan.

use super::rollout_weights::rollout_bytes;
use super::update::REPORTED;
use crate::advantage::AdvantageStats;
use crate::config::optim::GradientOrder;
use crate::device::Device;
use crate::experience::{Experience, Finish};
use crate::launch::gpu;
use crate::launch::limits::KV_CACHE;
use crate::launch::run::Run;
use crate::learn::Role;
use crate::learn::sums::Sums;
use crate::learn::tree_sum::waiting_max;
use crate::metrics::keys::{self, Metrics, named};
use crate::model::TensorPart;
use crate::ops::attention::PAGE;
use crate::rollout::new_tokens_max;
use crate::rollout::scheduler::{Spec, pages_wanted};
use crate::tensor::DType;

/// Numbers that are known before training begins.
pub fn rollout_values(stats: &AdvantageStats, samples: &[Experience], kl_beta: f32) -> Metrics {
    let n = samples.len() as f64;
    let (mut tokens, mut responses, mut cut, mut values) = (0usize, 0usize, 0usize, 0.0);
    for sample in samples {
        tokens += sample.length();
        responses += sample.response.tokens.len();
        cut += usize::from(sample.response.finish == Finish::Length);
        values += sample.values.iter().map(|v| f64::from(*v)).sum::<f64>();
    }
    let mut all = vec![
        (keys::REWARD_MEAN, stats.reward_mean),
        (keys::REWARD_STD, stats.reward_std),
        (keys::SCORE_MEAN, stats.score_mean),
        (keys::KL_MEAN, stats.kl_mean),
        (keys::KL_COEF, f64::from(kl_beta)),
        (keys::ADVANTAGE_MEAN, stats.advantage_mean),
        (keys::ADVANTAGE_STD, stats.advantage_std),
        (keys::RETURN_MEAN, stats.return_mean),
        (keys::SAMPLES, n),
        (keys::TOKENS, tokens as f64),
        (keys::RESPONSE_TOKENS_MEAN, responses as f64 / n),
        (keys::RESPONSE_TRUNCATED_RATIO, cut as f64 / n),
    ];
    if samples.iter().any(|s| !s.values.is_empty()) {
        all.push((keys::VALUE_MEAN, values / responses.max(1) as f64));
    }
    named(all)
}

/// Means over the updates of a step, and the largest gap and norms; `kl_in_loss`: whether the loss has a KL term.
pub fn update_values(sums: &Sums, kl_in_loss: bool) -> Metrics {
    let mut values = sums.means(REPORTED);
    values.retain(|(key, _)| kl_in_loss || *key != keys::KL_LOSS);
    named(values)
}

/// Planned bytes of one rank by purpose that stay from the first step to the last: of the models `roles`, of which `learned` are
/// trained; with `more` of the method's own.
pub fn memory_plan(
    run: &Run,
    roles: &[Role],
    learned: &[&'static str],
    more: &[(&'static str, usize)],
) -> Vec<(&'static str, usize)> {
    let (config, ranks) = (&run.config, run.ranks.axes.zero.size());
    let flat = |role: &Role| role.weights.table.len();
    let learners = || roles.iter().filter(|role| learned.contains(&role.name)).map(flat);
    let (all, trained): (usize, usize) = (roles.iter().map(flat).sum(), learners().sum());
    let master = if config.model.dtype() == DType::Bf16 { 4 } else { 0 };
    // Learners make their gradients one after the other.
    let waiting = match config.gradient.order {
        GradientOrder::Fast => 0,
        GradientOrder::Fixed => {
            learners().max().unwrap_or(0) * waiting_max(config.gradient.chunks, run.ranks.axes.data.size())
        }
    };
    // Sharded from stage `stage` on.
    let sharded = run.ranks.layout().stage;
    let of = |stage: usize, elements: usize| if sharded >= stage { elements.div_ceil(ranks) } else { elements };
    let mut plan = vec![
        ("weights", of(3, all) * config.model.dtype().bytes()),
        ("gradients", (of(2, trained) + waiting) * 4),
        ("optimizer", of(1, trained) * (8 + master)),
    ];
    plan.extend_from_slice(more);
    plan
}

/// The same of the rollout.
pub fn rollout_memory(run: &Run, actor: &Role) -> Vec<(&'static str, usize)> {
    let rollout_weights = rollout_bytes(run, actor);
    let rollout_weights = (rollout_weights > 0).then_some(("rollout weights", rollout_weights));
    rollout_weights.into_iter().chain([(KV_CACHE, kv_cache_bytes(run, actor))]).collect()
}

/// Rows of the banner about the rollout.
pub fn rollout_notes(run: &Run) -> Vec<(String, String)> {
    let mut notes = Vec::new();
    let fast = run.machine.gemm.as_ref().is_some_and(|gemm| gemm.fast);
    let text = match run.recomputes_old_logprobs() {
        true => Some("recomputed by a forward of training (time_old_logprobs_s, sampler_gap_max)"),
        false if fast => Some("as drawn, with other bits than training's (logprob_gap_max)"),
        false => None,
    };
    notes.extend(text.map(|text| ("old logprobs".to_string(), text.to_string())));
    if run.machine.device == Device::Cuda {
        notes.push(("decoding".to_string(), gpu::decoding(&run.config, &run.ranks.rollout_axes)));
    }
    let text = run.ranks.layout().rollout_reason.as_ref().filter(|_| run.ranks.axes.all.size() > 1);
    notes.extend(text.map(|text| ("rollout".to_string(), text.clone())));
    notes
}

/// The most bytes of the rollout's KV cache: of the longest rows, as many as run at once.
fn kv_cache_bytes(run: &Run, actor: &Role) -> usize {
    let (config, arch) = (&run.config, actor.arch());
    let rollout = &config.rollout;
    let samples = rollout.prompts_per_step.div_ceil(run.ranks.layout().rollout.data) * rollout.samples_per_prompt;
    let prompt_tokens = config.data.prompt_tokens_max;
    let new_tokens_max = new_tokens_max(rollout, prompt_tokens, arch.context);
    let spec =
        |sample: usize| Spec { group: sample / rollout.samples_per_prompt.max(1), prompt_tokens, new_tokens_max };
    let pages = pages_wanted((0..samples).map(spec), rollout.batch_max);
    let heads = TensorPart::of(&run.ranks.rollout_axes.tensor).kv_heads(arch).len();
    let page = 2 * arch.layers * heads * arch.head_dim * PAGE * size_of::<f32>();
    let bytes = pages * page;
    if rollout.kv_bytes_max > 0 { bytes.min(rollout.kv_bytes_max as usize) } else { bytes }
}
