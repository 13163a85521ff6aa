//! The table of all metrics in a line of `metrics.jsonl`: name, section, unit and meaning of each key.
//!
//! Lines are written in the order of this table. The keys of methods (`config::method`) follow the others of their
//! section. TensorBoard shows a key as `section/key`.

use crate::config::method;
use std::sync::LazyLock;

pub use crate::config::metric::{Key, Unit};

/// Numbers of a step or an evaluation, by their names in `metrics.jsonl`.
pub type Metrics = Vec<(String, f64)>;

pub fn named(values: impl IntoIterator<Item = (&'static str, f64)>) -> Metrics {
    values.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}

macro_rules! table {
    ($($constant:ident = $name:literal, $section:literal, $unit:ident, $meaning:literal;)*) => {
        $(#[doc = $meaning] pub const $constant: &str = $name;)*

        /// The keys that are not of one method alone.
        const SHARED: &[Key] = &[
            $(Key { name: $name, section: $section, unit: Unit::$unit, meaning: $meaning },)*
        ];
    };
}

table! {
    STEP = "step", "run", Count, "The step, from 1. An evaluation before the first step has 0.";
    TIME_UNIX_S = "time_unix_s", "run", Seconds, "The time at which the line was written, in seconds since 1970 (UTC).";
    RESTARTS = "restarts", "run", Count,
        "The number of resumes before this line, as far as earlier lines show. Absent before the first resume.";

    REWARD_MEAN = "reward_mean", "reward", One,
        "Mean score over samples after normalization and length penalties, before group shaping, clip and KL.";
    REWARD_STD = "reward_std", "reward", One, "Standard deviation over samples of the scores in reward_mean.";
    REWARD_CLIPPED_RATIO = "reward_clipped_ratio", "reward", Ratio,
        "Share of samples whose reward ppo.reward_clip has changed, after group shaping.";
    EQUAL_GROUPS_RATIO = "equal_groups_ratio", "reward", Ratio,
        "Share of prompts whose samples all have the same reward. Estimators that compare samples learn nothing from them.";
    SCORE_MEAN = "score_mean", "reward", One, "Mean over samples of the score that the reward returned.";
    SCORE_GREEDY_MEAN = "score_greedy_mean", "reward", One,
        "Mean over samples of the score of the greedy response to their prompt, the baseline of ppo.advantage = \"remax\".";
    ACCURACY = "accuracy", "reward", Ratio,
        "Share of right predictions. sft: next tokens. Preference jobs: the chosen reward is above the rejected one. step_reward: \
         labels of steps. kto: the reward is above beta times the KL if the response is desirable, below if it is not.";
    CHOSEN_REWARD_MEAN = "chosen_reward_mean", "reward", One, "Mean reward of the chosen responses.";
    REJECTED_REWARD_MEAN = "rejected_reward_mean", "reward", One, "Mean reward of the rejected responses.";
    MARGIN_MEAN = "margin_mean", "reward", One, "Mean difference between the chosen and the rejected reward of a pair.";

    LOSS = "loss", "loss", Nats, "Loss of model.actor, mean over the updates of the step.";
    POLICY_LOSS = "policy_loss", "loss", One,
        "Policy loss of a minibatch, divided as ppo.aggregation sets; mean over the updates of the step.";
    VALUE_LOSS = "value_loss", "loss", One,
        "Value loss of a minibatch, always a mean over its response tokens; mean over the updates of the step.";
    KL_LOSS = "kl_loss", "loss", Nats, "KL term of the loss before its coefficient, if the KL is in the loss.";
    PTX_LOSS = "ptx_loss", "loss", Nats,
        "Mean cross-entropy of the next tokens of data.pretrain before its coefficient; mean over the updates of the step.";

    ROUTER_AUX_LOSS = "router_aux_loss", "loss", One,
        "Load-balancing loss of the routers of model.actor before model.router_aux_loss_coef, which adds it to the loss: E times the sum over experts of \
         the mean number of times that a token chose it and its mean probability; mean over the updates of the step. Even loads give the number of experts of a token.";

    ROUTER_ENTROPY = "router_entropy", "experts", Nats,
        "Mean entropy of the routers' probabilities of model.actor over tokens and layers, before each update of the step.";
    EXPERTS_EQUAL = "experts_equal_ratio", "experts", Ratio,
        "Share of the sampled tokens that chose the same experts in sampling and in the training forward, in every layer, on the first minibatch, \
         before its update. Absent on several stages of a pipeline.";
    EXPERT_LOAD_MAX = "expert_load_max", "experts", One,
        "The largest load of an expert. Loads are over all layers: how often tokens chose the expert, divided by the even share. 1 is even.";
    EXPERT_LOAD_MIN = "expert_load_min", "experts", One, "The smallest load of an expert.";
    EXPERT_LOAD_K = "expert_load_K", "experts", One, "The load of expert K.";

    KL_MEAN = "kl_mean", "policy", Nats,
        "Mean KL estimate against the reference per response token, at sampling. kto: the KL of its loss, per response. \
         distill: the mean divergence from the teachers (distill.divergence), or its estimate from sampled tokens.";
    KL_COEF = "kl_coef", "policy", One, "Coefficient of the KL penalty in this step.";
    ENTROPY = "entropy", "policy", Nats,
        "Mean entropy of the trained distribution per response token that is learned from, before each update of the step. The distribution is \
         softmax(logits / rollout.temperature) over the whole vocabulary, before top_k, top_p, min_p and penalties, or over the \
         tokens that rollout.keep_sampling_mask keeps.";
    CLIP_RATIO = "clip_ratio", "policy", Ratio,
        "Share of response tokens whose clipped policy term was the smaller one, or that the loss leaves out (masked, sequence_trust).";
    VALUE_CLIP_RATIO = "value_clip_ratio", "policy", Ratio,
        "Share of response tokens whose clipped value term was the larger one.";
    POLICY_KL = "policy_kl", "policy", Nats,
        "Mean of l_old - l, which is how far the updates of this step moved the policy.";
    LOGPROB_GAP_MAX = "logprob_gap_max", "policy", Nats,
        "Largest |l_old - l(training forward)| on the first minibatch, before its update. It is 0 if l_old has the bits of training. \
         It is not 0 with GEMMs of cuBLASLt (job.gemm), or if ppo.old_logprobs = \"rollout\" uses another layout's values.";
    SAMPLER_GAP_MAX = "sampler_gap_max", "policy", Nats,
        "Largest |l(rollout) - l_old| if old log-probabilities are recomputed: rounding of another layout (mesh.sequence > 1, or a \
         rollout.tensor other than mesh.tensor) or of cuBLASLt, coarser in bf16.";
    ADVANTAGE_MEAN = "advantage_mean", "policy", One, "Mean advantage over response tokens, before whitening.";
    ADVANTAGE_STD = "advantage_std", "policy", One, "Standard deviation of the advantage, before whitening.";
    VALUE_MEAN = "value_mean", "policy", One, "Mean value over sampled response tokens, at sampling.";
    RETURN_MEAN = "return_mean", "policy", One,
        "Mean over samples of the sum of their rewards: shaped, clipped, and with the KL if it is in the reward.";

    GRAD_NORM = "grad_norm", "optim", One,
        "Global gradient norm of model.actor before the clip, mean over the updates of the step, in every kind of job.";
    GRAD_NORM_ACTOR = "grad_norm_actor", "optim", One, "The same as grad_norm, in ppo jobs.";
    GRAD_NORM_ACTOR_MAX = "grad_norm_actor_max", "optim", One, "The largest grad_norm_actor of the step.";
    GRAD_NORM_CRITIC = "grad_norm_critic", "optim", One,
        "Global gradient norm of the critic before the clip, mean over the updates of the step.";
    GRAD_NORM_CRITIC_MAX = "grad_norm_critic_max", "optim", One, "The largest grad_norm_critic of the step.";
    ADAPTER_NORM_RATIO_MEAN = "adapter_norm_ratio_mean", "optim", One,
        "Norm of an adapter's change of a matrix of model.actor, divided by the norm of the frozen matrix: ||s B A||_F / ||W||_F, mean over \
         its adapters after the step. Measured at the first step, and at steps with an evaluation or a checkpoint.";
    ADAPTER_NORM_RATIO_MAX = "adapter_norm_ratio_max", "optim", One,
        "The largest ratio in adapter_norm_ratio_mean. adapters.json and the report name its matrix.";
    ADAPTER_NORM_RATIO_CRITIC_MEAN = "adapter_norm_ratio_critic_mean", "optim", One,
        "adapter_norm_ratio_mean of the critic's adapters.";
    ADAPTER_NORM_RATIO_CRITIC_MAX = "adapter_norm_ratio_critic_max", "optim", One,
        "adapter_norm_ratio_max of the critic's adapters.";
    LR = "lr", "optim", One, "Learning rate of model.actor, mean over the updates of the step, in every kind of job.";
    LR_ACTOR = "lr_actor", "optim", One, "The same as lr, in ppo jobs.";
    LR_CRITIC = "lr_critic", "optim", One, "Learning rate of the critic, mean over the updates of the step.";

    SAMPLES = "samples", "rollout", Count, "Samples that this step learned from.";
    SAMPLES_DROPPED = "samples_dropped", "rollout", Count,
        "Samples that this step did not learn from because a reward failed on them or on others of their prompt.";
    GROUPS_DROPPED = "groups_dropped", "rollout", Count,
        "Prompts whose samples this step did not learn from, by rollout.dynamic_sampling.";
    GROUPS_SURPLUS = "groups_surplus", "rollout", Count,
        "Prompts that rollout.dynamic_sampling answered and kept, but this step did not need. The next step takes them again.";
    SCORE_SAMPLED_MEAN = "score_sampled_mean", "reward", One,
        "score_mean over all samples, including the groups dropped by rollout.dynamic_sampling.";
    ROLLOUT_OCCUPANCY = "rollout_occupancy", "rollout", Ratio,
        "Sampled tokens divided by the decode slots of all forwards. A forward has rollout.batch_max slots, or fewer if the rank \
         has fewer responses to sample.";
    ROLLOUT_PREFIX_HIT_RATIO = "rollout_prefix_hit_ratio", "rollout", Ratio,
        "Share of prompt tokens that were not read for a response because another response had read the same ones.";
    ROLLOUT_PROMPTS_STOLEN = "rollout_prompts_stolen", "rollout", Count,
        "Prompts that ranks answered beyond their equal shares (rollout.work_stealing).";
    ROLLOUT_PREEMPTIONS = "rollout_preemptions", "rollout", Count,
        "The number of times that a response gave up its KV pages and was read again, over all ranks.";
    ROLLOUT_LAG_MEAN = "rollout_lag_mean", "rollout", Count,
        "Age of the weights that sampled a token, in steps (mesh.async_updates_max), mean over tokens.";
    ROLLOUT_ROUNDS = "rollout_rounds", "rollout", Count,
        "The number of rounds of prompts that this step sampled, from 1.";
    RESPONSE_TOKENS_MEAN = "response_tokens_mean", "rollout", Tokens, "Mean length of a response.";
    RESPONSE_TOKENS_LIMIT = "response_tokens_limit", "rollout", Tokens,
        "Length of the longest response in this step, if rollout.response_tokens_schedule is set.";
    RESPONSE_TRUNCATED_RATIO = "response_truncated_ratio", "rollout", Ratio,
        "Share of responses that were cut by length.";
    TOKENS = "tokens", "rollout", Tokens, "Prompt and response tokens that this step learned from.";
    EPOCH = "epoch", "rollout", One, "Passes over the data so far.";

    TIME_ROLLOUT_S = "time_rollout_s", "time", Seconds, "Sampling the responses.";
    IDLE_TAIL_S = "idle_tail_s", "time", Seconds,
        "Mean wait of the ranks for the one that ends its rollout last, a part of time_rollout_s.";
    TIME_REWARD_S = "time_reward_s", "time", Seconds, "Waiting for rewards.";
    TIME_SCORE_S = "time_score_s", "time", Seconds, "Forward passes of reference and critic over the samples.";
    TIME_OLD_LOGPROBS_S = "time_old_logprobs_s", "time", Seconds,
        "The extra forward of the actor if old log-probabilities are recomputed.";
    TIME_TRAIN_S = "time_train_s", "time", Seconds, "Forward, backward and optimizer steps.";
    TIME_OFFLOAD_S = "time_offload_s", "time", Seconds,
        "Moving state and weights of mesh.offload out of memory and back, a part of the phases.";
    TIME_RESHARD_S = "time_reshard_s", "time", Seconds,
        "Moving weights between the layouts of training and rollout, if they differ.";
    TIME_COMM_EXPOSED_S = "time_comm_exposed_s", "time", Seconds,
        "Time for which a rank was blocked on other ranks, collectives included except within CUDA graphs. The largest of all ranks.";
    BUBBLE_RATIO = "bubble_ratio", "time", Ratio,
        "Share of the time of micro-batches in which a rank waited for another stage of the pipeline, mean over ranks. With p equal stages \
         and m micro-batches it is (p - 1) / (m + p - 1).";
    TIME_TRAIN_SLOWEST_RATIO = "time_train_slowest_ratio", "time", One,
        "Training time of the slowest rank, without waits, divided by the mean over ranks.";
    IDLE_RATIO_ACTOR = "idle_ratio_actor", "time", Ratio,
        "Share of the step for which the ranks of the placement that begins with the actor waited for other placements.";
    IDLE_RATIO_CRITIC = "idle_ratio_critic", "time", Ratio,
        "Share of the step for which the ranks of the placement that begins with the critic waited for other placements.";
    IDLE_RATIO_REFERENCE = "idle_ratio_reference", "time", Ratio,
        "Share of the step for which the ranks of the placement that begins with the reference waited for other placements.";
    IDLE_RATIO_REWARD = "idle_ratio_reward", "time", Ratio,
        "Share of the step for which the ranks of the placement that begins with the reward waited for other placements.";
    IDLE_RATIO_ROLLOUT = "idle_ratio_rollout", "time", Ratio,
        "Share of the step for which the ranks of the placement that begins with the rollout waited for other placements.";
    TIME_STEP_S = "time_step_s", "time", Seconds, "The whole step on the wall clock.";
    TOKENS_PER_S = "tokens_per_s", "time", TokensPerSecond,
        "Prompt and response tokens of all ranks, divided by the time of the whole step.";
    ROLLOUT_TOKENS_PER_S = "rollout_tokens_per_s", "time", TokensPerSecond,
        "Sampled tokens of all ranks, divided by the time of the rollout.";

    TIME_PER_TOKEN_MS = "time_per_token_ms", "time", One,
        "time_rollout_s divided by the sampled tokens of all ranks, in milliseconds.";
    MFU = "mfu", "time", Ratio,
        "Model FLOPs of the step divided by time_step_s and the peak of all devices. The rollout and each score count as one forward, \
         a training pass as three. Other models count like model.actor, and recomputation does not count. The peak of a CPU is \
         measured at the start, and the peak of a GPU is its vendor's figure.";

    RESHARD_BYTES = "reshard_bytes", "memory", Bytes,
        "Bytes of weights that a rank received between the layouts of training and rollout. The largest of all ranks.";
    MEMORY_START_BYTES = "memory_start_bytes", "memory", Bytes,
        "Resident memory of the largest rank just before its models, with tokenizer and data open. `plan` does not count it.";
    MEMORY_PLANNED_BYTES = "memory_planned_bytes", "memory", Bytes,
        "Memory that the plan expects on the fullest rank, as in banner and summary. Compare it with memory_peak_bytes - memory_start_bytes.";
    MEMORY_PEAK_BYTES = "memory_peak_bytes", "memory", Bytes,
        "Peak memory of the largest rank since the checks of the start. On a CPU resident memory, on a GPU memory in use there. \
         It rises with the longest step so far, because buffers are kept for reuse.";
    MEMORY_ARENA_PEAK_BYTES = "memory_arena_peak_bytes", "memory", Bytes,
        "Peak use of the planned arena on the largest rank so far. With a GPU, of the arena there.";
    MEMORY_HOST_PEAK_BYTES = "memory_host_peak_bytes", "memory", Bytes,
        "With a GPU: peak resident memory of the host on the largest rank so far.";
    MEMORY_PINNED_BYTES = "memory_pinned_bytes", "memory", Bytes,
        "With a GPU: pinned host memory for mesh.offload. The largest of all ranks.";
    MEMORY_REQUESTS = "memory_requests", "memory", Count,
        "With a GPU: requests to its driver for GPU or pinned memory since the start. Steady steps add none.";

    GPU_GRAPH_LAUNCHES = "gpu_graph_launches", "run", Count,
        "With a GPU: CUDA graphs, one for each decode step, that a rank has launched since the start. The largest of all ranks.";
    GPU_HOST_WAITS = "gpu_host_waits", "run", Count,
        "With a GPU: the number of times since the start that the host waited until its GPU was idle. The largest of all ranks.";

    EVAL_ACCURACY_GREEDY = "eval_accuracy_greedy", "eval", Ratio,
        "Share of held-out prompts whose greedy answer is right.";
    EVAL_ACCURACY_SAMPLED = "eval_accuracy_sampled", "eval", Ratio,
        "Share of sampled answers to held-out prompts that are right.";
    EVAL_PASS_AT_K = "eval_pass_at_K", "eval", Ratio,
        "Estimated probability that at least one of K samples of a held-out prompt is right, from eval.samples_per_prompt samples \
         (arXiv:2107.03374).";
    EVAL_AVG_AT_K = "eval_avg_at_K", "eval", Ratio,
        "Mean over held-out prompts of the share of their K samples that are right. K is eval.samples_per_prompt.";
    EVAL_MAJORITY_AT_K = "eval_majority_at_K", "eval", Ratio,
        "Share of held-out prompts whose most frequent answer among K samples is right. Of equally frequent ones the first counts.";
    EVAL_ACCURACY = "eval_accuracy", "eval", Ratio, "`accuracy` on held-out rows.";
    EVAL_MARGIN_MEAN = "eval_margin_mean", "eval", One, "`margin_mean` on held-out rows.";
    EVAL_REWARD_MEAN = "eval_reward_mean", "eval", One, "Mean score of greedy responses to held-out prompts.";
    EVAL_LOSS = "eval_loss", "eval", Nats, "`loss` on held-out rows.";
    EVAL_KL_MEAN = "eval_kl_mean", "eval", Nats, "`kl_mean` of a distill job on held-out rows.";
    EVAL_RESPONSE_TOKENS_MEAN = "eval_response_tokens_mean", "eval", Tokens,
        "Mean length of greedy responses to held-out prompts.";
    EVAL_SAMPLES = "eval_samples", "eval", Count,
        "Held-out rows that were evaluated, or held-out prompts whose answers were scored.";
    EVAL_KV_LOGPROB_GAP_MEAN = "eval_kv_logprob_gap_mean", "eval", Nats,
        "With rollout.kv_dtype = \"fp8\": mean change of a token's log-probability by the rounding of keys and values, on up to \
         256 sampled held-out responses.";
    EVAL_KV_KL_MEAN = "eval_kv_kl_mean", "eval", Nats,
        "With rollout.kv_dtype = \"fp8\": mean KL divergence per token of the policy from the same weights without rounding of \
         keys and values, on the same responses. Estimated as e^d - 1 - d.";
    EVAL_TIME_S = "eval_time_s", "eval", Seconds, "The whole evaluation.";
}

/// The prefixes before the K of [`EVAL_PASS_AT_K`] and its like. In a line K is a number.
pub const EVAL_PASS_AT: &str = "eval_pass_at_";
pub const EVAL_AVG_AT: &str = "eval_avg_at_";
pub const EVAL_MAJORITY_AT: &str = "eval_majority_at_";
/// The same of [`EXPERT_LOAD_K`].
pub const EXPERT_LOAD: &str = "expert_load_";
/// The prefix before `NAME/accuracy_greedy`, which is [`EVAL_ACCURACY_GREEDY`] of the set NAME of `data.eval_sets`.
pub const EVAL_OF_SET: &str = "eval/";

/// Every key, in the order in which lines are written.
static TABLE: LazyLock<Vec<&'static Key>> = LazyLock::new(|| {
    let mut all: Vec<&Key> = SHARED.iter().collect();
    for key in method::metrics() {
        let last = all.iter().rposition(|other| other.section == key.section);
        all.insert(last.map_or(all.len(), |last| last + 1), key);
    }
    all
});

/// Returns the row of a key, which may contain the name of a set and a number of samples.
pub fn find(name: &str) -> Option<&'static Key> {
    let row = of_set(name).map_or(name.to_string(), |(_, of_split)| format!("eval_{of_split}"));
    TABLE.get(rank(&row)).copied()
}

/// Splits the key of a set into the name of the set and the rest, which follows `eval_` in a key of the eval split.
pub fn of_set(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(EVAL_OF_SET)?.split_once('/')
}

/// Returns the position of `name` in a line: its row, or the end for keys of a set and of the user (`extra_logs` of a
/// reward).
pub fn rank(name: &str) -> usize {
    let is_number = |k: &str| !k.is_empty() && k.bytes().all(|byte| byte.is_ascii_digit());
    let of_samples = |prefix: &&str| name.strip_prefix(*prefix).is_some_and(is_number);
    let prefix = [EVAL_PASS_AT, EVAL_AVG_AT, EVAL_MAJORITY_AT, EXPERT_LOAD].into_iter().find(of_samples);
    let is_row = |key: &&Key| prefix.map_or(key.name == name, |prefix| key.name.strip_prefix(prefix) == Some("K"));
    TABLE.iter().position(is_row).unwrap_or(TABLE.len())
}

pub fn is_eval(name: &str) -> bool {
    name.starts_with("eval_") || name.starts_with(EVAL_OF_SET)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_in_the_table_once() {
        for (i, key) in TABLE.iter().enumerate() {
            assert_eq!(rank(key.name), i, "{} occurs twice", key.name);
        }
    }

    #[test]
    fn a_set_and_a_number_of_samples_are_part_of_a_key() {
        let of = |name| find(name).map(|key| key.name);
        assert_eq!(of("eval_pass_at_16"), Some(EVAL_PASS_AT_K));
        assert_eq!(of("eval/math/majority_at_8"), Some(EVAL_MAJORITY_AT_K));
        assert_eq!(of("eval/math/accuracy_greedy"), Some(EVAL_ACCURACY_GREEDY));
        assert_eq!([of("eval_pass_at_"), of("eval_pass_at_x"), of("eval/math/style"), of("eval/math")], [None; 4]);
        assert_eq!(rank("eval/math/accuracy_greedy"), TABLE.len());
    }

    #[test]
    fn names_end_in_their_unit_where_the_unit_has_a_suffix() {
        for key in TABLE.iter() {
            assert_eq!(key.name.ends_with("_s") && !key.name.ends_with("_per_s"), key.unit == Unit::Seconds, "{key:?}");
            assert_eq!(key.name.ends_with("_per_s"), key.unit == Unit::TokensPerSecond, "{key:?}");
            assert_eq!(key.name.ends_with("_bytes"), key.unit == Unit::Bytes, "{key:?}");
            assert_eq!(is_eval(key.name), key.section == "eval", "{key:?}");
        }
    }
}
