//! The one table of what a line of `metrics.jsonl` may carry: name, section, unit and meaning of every key.
//!
//! Lines are written in the order of this table. TensorBoard shows a key as `section/key`.

/// Numbers of a step or an evaluation, by their names in `metrics.jsonl`.
pub type Metrics = Vec<(String, f64)>;

pub fn named(values: impl IntoIterator<Item = (&'static str, f64)>) -> Metrics {
    values.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}

/// What a number counts. The unit also stands at the end of most names (`_s`, `_bytes`, `_tokens_`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    One,
    /// A whole number of things.
    Count,
    /// Share of a whole, 0 to 1.
    Ratio,
    /// Natural-log units per token.
    Nats,
    Tokens,
    TokensPerSecond,
    Seconds,
    Bytes,
}

impl Unit {
    /// Whether whole values are written without a decimal point.
    pub(super) fn is_whole(self) -> bool {
        matches!(self, Self::Count | Self::Tokens | Self::Bytes)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    pub name: &'static str,
    pub section: &'static str,
    pub unit: Unit,
    pub meaning: &'static str,
}

macro_rules! table {
    ($($constant:ident = $name:literal, $section:literal, $unit:ident, $meaning:literal;)*) => {
        $(#[doc = $meaning] pub const $constant: &str = $name;)*

        /// Every key, in the order in which lines are written.
        pub const TABLE: &[Key] = &[
            $(Key { name: $name, section: $section, unit: Unit::$unit, meaning: $meaning },)*
        ];
    };
}

table! {
    STEP = "step", "run", Count, "The step, from 1; 0 for an evaluation before the first step.";
    TIME_UNIX_S = "time_unix_s", "run", Seconds, "When the line was written, seconds since 1970 (UTC).";
    RESTARTS = "restarts", "run", Count,
        "How often the run was resumed before the line was written, as far as the lines before it tell; not there before the first time.";

    REWARD_MEAN = "reward_mean", "reward", One,
        "Mean over samples of the score after normalisation and length penalties, before group shaping, clip and KL.";
    REWARD_STD = "reward_std", "reward", One, "Standard deviation over samples of the same.";
    REWARD_CLIPPED_RATIO = "reward_clipped_ratio", "reward", Ratio,
        "Share of samples whose reward ppo.reward_clip has cut, after group shaping.";
    EQUAL_GROUPS_RATIO = "equal_groups_ratio", "reward", Ratio,
        "Share of prompts whose samples all have the same reward: with an estimator that compares them they teach nothing.";
    SCORE_MEAN = "score_mean", "reward", One, "Mean over samples of what the reward function returned.";
    SCORE_GREEDY_MEAN = "score_greedy_mean", "reward", One,
        "Mean over samples of the score of the greedy response to their prompt, which is the baseline (ppo.advantage = \"remax\").";
    ACCURACY = "accuracy", "reward", Ratio,
        "Share of predictions that are right: next tokens (sft), chosen above rejected (preference jobs), labels of steps (step_reward), \
         rewards above beta times the KL where desirable and below where not (kto).";
    CHOSEN_REWARD_MEAN = "chosen_reward_mean", "reward", One, "Mean reward of the chosen responses.";
    REJECTED_REWARD_MEAN = "rejected_reward_mean", "reward", One, "Mean reward of the rejected responses.";
    DESIRABLE_REWARD_MEAN = "desirable_reward_mean", "reward", One, "Mean reward of the desirable responses (kto).";
    UNDESIRABLE_REWARD_MEAN = "undesirable_reward_mean", "reward", One, "Mean reward of the undesirable responses (kto).";
    MARGIN_MEAN = "margin_mean", "reward", One, "Mean of the chosen response's reward less the rejected one's.";

    LOSS = "loss", "loss", Nats, "The loss that model.actor learns by: of the step's updates the mean.";
    POLICY_LOSS = "policy_loss", "loss", One, "Policy loss of a minibatch, as ppo.aggregation divides it; mean over the step's updates.";
    VALUE_LOSS = "value_loss", "loss", One,
        "Value loss of a minibatch, mean over its response tokens whatever ppo.aggregation says; mean over the step's updates.";
    CE_MEAN = "ce_mean", "loss", Nats, "Mean cross-entropy of the rows' response tokens, in distill jobs: the part of loss that distill.ce_coef weighs.";
    KL_LOSS = "kl_loss", "loss", Nats, "KL term of the loss before its coefficient, where the KL is in the loss.";
    PTX_LOSS = "ptx_loss", "loss", Nats,
        "Mean cross-entropy of the next tokens of data.pretrain, before its coefficient; mean over the step's updates.";

    KL_MEAN = "kl_mean", "policy", Nats, "Mean KL estimate against the reference per response token, at sampling; kto: that of its loss, per response; \
         distill: the mean divergence from the teachers (distill.divergence), of sampled tokens its estimate.";
    KL_COEF = "kl_coef", "policy", One, "Coefficient of the KL penalty used in this step.";
    ENTROPY = "entropy", "policy", Nats,
        "Mean entropy of the trained distribution, softmax(logits / rollout.temperature) over the whole vocabulary, before top_k, \
         top_p, min_p and penalties, or over the tokens that rollout.keep_sampling_mask keeps: per response token that is learned from, \
         in the forward before each update of the step.";
    CLIP_RATIO = "clip_ratio", "policy", Ratio, "Share of response tokens whose clipped policy term was the smaller.";
    VALUE_CLIP_RATIO = "value_clip_ratio", "policy", Ratio,
        "Share of response tokens whose clipped value term was the larger.";
    POLICY_KL = "policy_kl", "policy", Nats, "Mean of l_old - l: how far the updates of this step moved the policy.";
    LOGPROB_GAP_MAX = "logprob_gap_max", "policy", Nats,
        "Largest |l_old - l(training forward)| on the first minibatch, before its update: 0 where l_old has training's bits. Not so \
         with GEMMs by cuBLASLt (job.gemm), nor where ppo.old_logprobs = \"rollout\" takes those of another layout.";
    SAMPLER_GAP_MAX = "sampler_gap_max", "policy", Nats,
        "Largest |l(rollout) - l_old|, where old log-probabilities are recomputed: rounding of another layout (mesh.sequence > 1, \
         another rollout.tensor than mesh.tensor) or of cuBLASLt; coarser in bf16.";
    ADVANTAGE_MEAN = "advantage_mean", "policy", One, "Mean advantage over response tokens, before whitening.";
    ADVANTAGE_STD = "advantage_std", "policy", One, "Standard deviation of the advantage, before whitening.";
    VALUE_MEAN = "value_mean", "policy", One, "Mean value over response tokens, at sampling.";
    RETURN_MEAN = "return_mean", "policy", One,
        "Mean over samples of the sum of the rewards: shaped, clipped, with the KL where it is in the reward.";

    GRAD_NORM = "grad_norm", "optim", One,
        "Global gradient norm of model.actor before the clip, mean over the step's updates: in every kind of job.";
    GRAD_NORM_ACTOR = "grad_norm_actor", "optim", One,
        "The same as grad_norm, where rollouts are learned from.";
    GRAD_NORM_ACTOR_MAX = "grad_norm_actor_max", "optim", One, "The largest of the same.";
    GRAD_NORM_CRITIC = "grad_norm_critic", "optim", One,
        "Global gradient norm of the critic before the clip, mean over the step's updates.";
    GRAD_NORM_CRITIC_MAX = "grad_norm_critic_max", "optim", One, "The largest of the same.";
    LR = "lr", "optim", One, "Learning rate of model.actor, mean over the step's updates: in every kind of job.";
    LR_ACTOR = "lr_actor", "optim", One, "The same as lr, where rollouts are learned from.";
    LR_CRITIC = "lr_critic", "optim", One, "Learning rate of the critic, mean over the step's updates.";

    SAMPLES = "samples", "rollout", Count, "Samples that this step learned from.";
    SAMPLES_DROPPED = "samples_dropped", "rollout", Count,
        "Samples that this step did not learn from, as a reward failed on them or on others of their prompt.";
    GROUPS_DROPPED = "groups_dropped", "rollout", Count,
        "Prompts whose samples this step did not learn from, as rollout.dynamic_sampling has it.";
    SCORE_SAMPLED_MEAN = "score_sampled_mean", "reward", One,
        "score_mean over all samples, those that rollout.dynamic_sampling dropped included.";
    ROLLOUT_OCCUPANCY = "rollout_occupancy", "rollout", Ratio,
        "Tokens drawn by the places that forwards had for them: rollout.batch_max each, or as many as the rank has responses to draw.";
    ROLLOUT_PREFIX_HIT_RATIO = "rollout_prefix_hit_ratio", "rollout", Ratio,
        "Share of the responses' prompt tokens that were not read for them, as another response had read the same ones.";
    ROLLOUT_PROMPTS_STOLEN = "rollout_prompts_stolen", "rollout", Count,
        "Prompts that ranks answered beyond their equal shares (rollout.work_stealing).";
    ROLLOUT_PREEMPTIONS = "rollout_preemptions", "rollout", Count,
        "How often a response gave its KV pages to others and was read again, over all ranks.";
    ROLLOUT_LAG_MEAN = "rollout_lag_mean", "rollout", Count,
        "Updates by which the weights that drew a token were behind those that learn from it (mesh.async_updates_max), the mean.";
    ROLLOUT_ROUNDS = "rollout_rounds", "rollout", Count, "How often this step asked for more prompts, the first time included.";
    RESPONSE_TOKENS_MEAN = "response_tokens_mean", "rollout", Tokens, "Mean length of a response.";
    RESPONSE_TRUNCATED_RATIO = "response_truncated_ratio", "rollout", Ratio,
        "Share of responses that were cut by length.";
    TOKENS = "tokens", "rollout", Tokens, "Tokens of prompts and responses that this step learned from.";
    EPOCH = "epoch", "rollout", One, "Passes over the data so far.";

    TIME_ROLLOUT_S = "time_rollout_s", "time", Seconds, "Sampling the responses.";
    IDLE_TAIL_S = "idle_tail_s", "time", Seconds,
        "How long ranks waited, on average, for the one that ended its rollout last; a part of time_rollout_s.";
    TIME_REWARD_S = "time_reward_s", "time", Seconds, "Waiting for rewards.";
    TIME_SCORE_S = "time_score_s", "time", Seconds, "Forward passes of reference and critic over the samples.";
    TIME_OLD_LOGPROBS_S = "time_old_logprobs_s", "time", Seconds,
        "The extra forward of the actor where old log-probabilities are recomputed.";
    TIME_TRAIN_S = "time_train_s", "time", Seconds, "Forward, backward and optimizer steps.";
    TIME_OFFLOAD_S = "time_offload_s", "time", Seconds,
        "Moving what mesh.offload names out of memory and back; a part of the phases.";
    TIME_RESHARD_S = "time_reshard_s", "time", Seconds,
        "Moving weights between the layouts of training and rollout, where they differ.";
    TIME_COMM_EXPOSED_S = "time_comm_exposed_s", "time", Seconds,
        "Time of the step in which a rank stood still for others, collectives included (not those within CUDA graphs); of the rank \
         with the most.";
    TIME_TRAIN_SLOWEST_RATIO = "time_train_slowest_ratio", "time", One,
        "Time that the slowest rank worked in training, without waiting, by the mean over ranks.";
    IDLE_RATIO_ACTOR = "idle_ratio_actor", "time", Ratio,
        "Share of the step for which the ranks of the actor's place waited for other places.";
    IDLE_RATIO_CRITIC = "idle_ratio_critic", "time", Ratio, "The same of a place that begins with the critic.";
    IDLE_RATIO_REFERENCE = "idle_ratio_reference", "time", Ratio, "The same of a place that begins with the reference.";
    IDLE_RATIO_REWARD = "idle_ratio_reward", "time", Ratio, "The same of a place that begins with the reward.";
    IDLE_RATIO_ROLLOUT = "idle_ratio_rollout", "time", Ratio, "The same of a place that begins with the rollout.";
    TIME_STEP_S = "time_step_s", "time", Seconds, "The whole step on the wall clock.";
    TOKENS_PER_S = "tokens_per_s", "time", TokensPerSecond,
        "Tokens of prompts and responses over all ranks, by the whole step's time.";
    ROLLOUT_TOKENS_PER_S = "rollout_tokens_per_s", "time", TokensPerSecond,
        "Sampled tokens over all ranks, by the rollout's time.";

    TIME_PER_TOKEN_MS = "time_per_token_ms", "time", One, "time_rollout_s by the sampled tokens of all ranks, in milliseconds.";
    MFU = "mfu", "time", Ratio,
        "Model FLOPs of the step by time_step_s and the peak of all devices: forwards of rollout and scores, three for each training \
         pass; other models count as model.actor does, recomputed activations not. The peak of a CPU is measured at the start, a \
         GPU's is its maker's.";

    RESHARD_BYTES = "reshard_bytes", "memory", Bytes,
        "Weights that a rank received between the layouts of training and rollout; of the rank with the most.";
    MEMORY_START_BYTES = "memory_start_bytes", "memory", Bytes,
        "Resident memory of the largest rank just before its models, with tokenizer and data open: what `plan` does not count.";
    MEMORY_PLANNED_BYTES = "memory_planned_bytes", "memory", Bytes,
        "What the plan expects the fullest rank to take, as banner and end say it: compare memory_peak_bytes - memory_start_bytes.";
    MEMORY_PEAK_BYTES = "memory_peak_bytes", "memory", Bytes,
        "Peak memory of the largest rank since the checks of the start: resident on a CPU; with job.device = \"gpu\", in use of its \
         GPU.";
    MEMORY_ARENA_PEAK_BYTES = "memory_arena_peak_bytes", "memory", Bytes,
        "Peak use of the planned arena on the largest rank so far; with a GPU, of the arena there.";
    MEMORY_HOST_PEAK_BYTES = "memory_host_peak_bytes", "memory", Bytes,
        "With a GPU: peak resident memory of the host on the largest rank so far.";
    MEMORY_PINNED_BYTES = "memory_pinned_bytes", "memory", Bytes,
        "With a GPU: pinned memory of the host in which mesh.offload keeps what waits; of the rank with the most.";
    MEMORY_REQUESTS = "memory_requests", "memory", Count,
        "With a GPU: how often its driver was asked for memory since the start, of the GPU or pinned; steady steps add none.";

    GPU_GRAPH_LAUNCHES = "gpu_graph_launches", "run", Count,
        "With a GPU: CUDA graphs, which are steps of decoding, that a rank has launched since the start; of the rank with the most.";
    GPU_HOST_WAITS = "gpu_host_waits", "run", Count,
        "With a GPU: how often the host has waited since the start until its GPU had nothing to do; of the rank with the most.";

    EVAL_ACCURACY_GREEDY = "eval_accuracy_greedy", "eval", Ratio,
        "Share of evaluation prompts whose greedy answer is right.";
    EVAL_ACCURACY_SAMPLED = "eval_accuracy_sampled", "eval", Ratio,
        "Share of evaluation prompts whose sampled answer is right.";
    EVAL_PASS_AT_K = "eval_pass_at_K", "eval", Ratio,
        "Estimated probability that of K samples of an evaluation prompt one at least is right, from eval.samples_per_prompt (arXiv:2107.03374).";
    EVAL_AVG_AT_K = "eval_avg_at_K", "eval", Ratio,
        "Mean over evaluation prompts of the share of their K samples that are right; K is eval.samples_per_prompt.";
    EVAL_MAJORITY_AT_K = "eval_majority_at_K", "eval", Ratio,
        "Share of evaluation prompts whose most frequent answer among K samples is right, of as frequent ones the first drawn.";
    EVAL_ACCURACY = "eval_accuracy", "eval", Ratio, "`accuracy` on the evaluation split.";
    EVAL_MARGIN_MEAN = "eval_margin_mean", "eval", One, "`margin_mean` on the evaluation split.";
    EVAL_REWARD_MEAN = "eval_reward_mean", "eval", One, "Mean score of greedy responses on the evaluation split.";
    EVAL_LOSS = "eval_loss", "eval", Nats, "`loss` on the evaluation split.";
    EVAL_KL_MEAN = "eval_kl_mean", "eval", Nats, "`kl_mean` of a distill job on the evaluation split.";
    EVAL_RESPONSE_TOKENS_MEAN = "eval_response_tokens_mean", "eval", Tokens,
        "Mean length of a greedy response on the evaluation split.";
    EVAL_SAMPLES = "eval_samples", "eval", Count, "Evaluation prompts whose answers were scored.";
    EVAL_TIME_S = "eval_time_s", "eval", Seconds, "The whole evaluation.";
}

/// What stands before the K of [`EVAL_PASS_AT_K`] and its like, where that is a number.
pub const EVAL_PASS_AT: &str = "eval_pass_at_";
pub const EVAL_AVG_AT: &str = "eval_avg_at_";
pub const EVAL_MAJORITY_AT: &str = "eval_majority_at_";
/// What stands before `NAME/accuracy_greedy`, which is [`EVAL_ACCURACY_GREEDY`] of the set NAME of `data.eval_sets`.
pub const EVAL_OF_SET: &str = "eval/";

/// The row of a key, which a set and a number of samples may be part of.
pub fn find(name: &str) -> Option<&'static Key> {
    let row = of_set(name).map_or(name.to_string(), |(_, of_split)| format!("eval_{of_split}"));
    TABLE.get(rank(&row))
}

/// The set that a key is of, and what it is called of the eval split, without `eval_`.
pub fn of_set(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(EVAL_OF_SET)?.split_once('/')
}

/// The position of `name` in a line: its row, or behind all rows for a key of the user's own (`extra_logs` of a reward) and of a set.
pub fn rank(name: &str) -> usize {
    let is_number = |k: &str| !k.is_empty() && k.bytes().all(|byte| byte.is_ascii_digit());
    let of_samples = |prefix: &&str| name.strip_prefix(*prefix).is_some_and(is_number);
    let prefix = [EVAL_PASS_AT, EVAL_AVG_AT, EVAL_MAJORITY_AT].into_iter().find(of_samples);
    let is_row = |key: &Key| prefix.map_or(key.name == name, |prefix| key.name.strip_prefix(prefix) == Some("K"));
    TABLE.iter().position(is_row).unwrap_or(TABLE.len())
}

pub fn is_eval(name: &str) -> bool {
    name.starts_with("eval_") || name.starts_with(EVAL_OF_SET)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_stands_once_in_the_table() {
        for (i, key) in TABLE.iter().enumerate() {
            assert_eq!(rank(key.name), i, "{} stands twice", key.name);
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
        for key in TABLE {
            assert_eq!(key.name.ends_with("_s") && !key.name.ends_with("_per_s"), key.unit == Unit::Seconds, "{key:?}");
            assert_eq!(key.name.ends_with("_per_s"), key.unit == Unit::TokensPerSecond, "{key:?}");
            assert_eq!(key.name.ends_with("_bytes"), key.unit == Unit::Bytes, "{key:?}");
            assert_eq!(is_eval(key.name), key.section == "eval", "{key:?}");
        }
    }
}
