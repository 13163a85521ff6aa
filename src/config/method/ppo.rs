//! `[ppo]`: the estimator, the losses, and the division of a batch of experience.

use super::interface::{MethodConfig, Need, RowKind, Shared, Uses};
use crate::config::limits::{self, ABOVE_0, COUNT, FINITE, SAMPLES, TOKENS};
use crate::config::name;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// The estimator of advantages from rewards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Estimator {
    /// Generalized advantage estimation with a critic, whitened. arXiv:1506.02438
    #[default]
    Gae,
    /// Discounted sum of rewards, whitened over the batch, no critic. arXiv:2501.03262
    #[serde(rename = "reinforce++")]
    ReinforcePp,
    /// Score minus the mean of its group, whitened over the batch. arXiv:2501.03262
    #[serde(rename = "reinforce++-baseline")]
    ReinforcePpBaseline,
    /// Score minus the mean of the others in its group. arXiv:2402.14740
    Rloo,
    /// Score minus the mean of its group, over the group's standard deviation. arXiv:2402.03300
    Grpo,
    /// Score minus the mean of its group. arXiv:2503.20783
    DrGrpo,
    /// Each reward over the group's standard deviation by itself, then their weighted sum, whitened over the batch.
    /// arXiv:2601.05242
    Gdpo,
    /// Score minus the score of the greedy response to the same prompt. arXiv:2310.10505
    Remax,
    /// Score minus the mean score of the batch (FlashREINFORCE, Hu et al. 2026).
    FlashReinforce,
}

impl Estimator {
    /// Whether a critic is trained and its values are needed.
    pub fn has_critic(self) -> bool {
        self == Self::Gae
    }

    /// Whether a score is compared with the other samples of its prompt, which requires at least two samples.
    pub fn is_grouped(self) -> bool {
        !matches!(self, Self::Gae | Self::ReinforcePp | Self::Remax | Self::FlashReinforce)
    }

    /// Whether each prompt also gets a greedy response, whose score is the baseline of the samples.
    pub fn has_greedy(self) -> bool {
        self == Self::Remax
    }

    /// Whether advantages are whitened over the whole batch.
    pub fn is_whitened(self) -> bool {
        matches!(self, Self::Gae | Self::ReinforcePp | Self::ReinforcePpBaseline | Self::Gdpo)
    }
}

/// Per-token estimate of the KL divergence from d = logprob - reference logprob.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// d
    #[default]
    K1,
    /// d^2 / 2
    K2,
    /// exp(-d) - 1 + d
    K3,
}

impl KlEstimator {
    /// The estimate and its derivative with respect to `d` = logprob - reference logprob. Estimates are clamped to +-10
    /// (k2 and k3 from above) and flat there, so that one outlier cannot dominate a batch. Reward and loss both use
    /// this.
    pub fn estimate(self, d: f64) -> (f64, f64) {
        let (kl, slope) = match self {
            Self::K1 => (d, 1.0),
            Self::K2 => (0.5 * d * d, d),
            // exp(-d) - 1 without the cancellation near d = 0.
            Self::K3 => ((-d).exp_m1() + d, -(-d).exp_m1()),
        };
        if kl.abs() > 10.0 { (kl.clamp(-10.0, 10.0), 0.0) } else { (kl, slope) }
    }
}

/// The place of the KL penalty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlIn {
    /// -beta * kl is added to the reward of each token.
    #[default]
    Reward,
    /// + kl_coef * mean kl is added to the policy loss.
    Loss,
    /// Only measured, if a reference is loaded.
    None,
}

/// The policy loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLossKind {
    /// PPO's clipped ratio per token. arXiv:1707.06347
    #[default]
    Clip,
    /// One ratio per sequence. arXiv:2507.18071
    Gspo,
    /// Clipped importance weight outside the gradient. arXiv:2506.13585
    Cispo,
    /// A sigmoid gate instead of the clip, softer or harder by the advantage's sign. arXiv:2511.20347
    Sapo,
    /// The ratio as a weight outside the gradient, and no loss at tokens whose ratio leaves the range.
    /// arXiv:2607.07508
    Masked,
    /// The ratio as a weight outside the gradient, and no loss at sequences that are too far from the sampler
    /// (FlashREINFORCE, Hu et al. 2026).
    SequenceTrust,
}

impl PolicyLossKind {
    /// Whether the loss of a token depends on the other tokens of its sequence.
    pub fn is_of_sequences(self) -> bool {
        matches!(self, Self::Gspo | Self::SequenceTrust)
    }

    /// Whether the ratio is defined against the distribution that the tokens were sampled from.
    pub fn is_against_sampler(self) -> bool {
        matches!(self, Self::Masked | Self::SequenceTrust)
    }
}

/// The aggregation of token losses to one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// Sum over tokens / tokens of the whole minibatch.
    #[default]
    Token,
    /// Mean over the tokens of each sequence, then over sequences.
    Sequence,
    /// Sum over tokens / (sequences * longest allowed response). arXiv:2503.20783
    SequenceSumFixed,
}

/// The value after the last token of a response that was truncated by its length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// 0, as if the response had ended by itself.
    #[default]
    Zero,
    /// The critic's value after the last token.
    Bootstrap,
}

/// The correction of tokens that were sampled with other probabilities than the ratio's old ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Correction {
    #[default]
    None,
    /// Truncated importance sampling: the weight is clamped to [low, high].
    Tis,
    /// The weight if it is in [low, high], else 0.
    Icepop,
    /// The clamped weight for sequences whose geometric mean weight is in [low, high], else 0.
    SequenceMask,
}

/// The source of the log-probabilities before the update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OldLogprobs {
    /// `rollout` if rollout and training are bit-identical, else `recompute`.
    #[default]
    Auto,
    /// The log-probabilities at sampling.
    Rollout,
    /// The log-probabilities of another forward in the training layout.
    Recompute,
}

table! {
    /// `[ppo]`.
    pub struct PpoConfig {
        pub advantage: Estimator = Estimator::Gae,
        pub gamma: f32 = 1.0 => 0.0..=1.0,
        pub lambda: f32 = 1.0 => 0.0..=1.0,
        pub lambda_alpha: f32 = 0.0 => 0.0..=FINITE,
        pub critic_lambda: f32 = -1.0 => -1.0..=1.0,
        pub truncation: Truncation = Truncation::Zero,
        pub advantage_std: bool = true,

        pub loss: PolicyLossKind = PolicyLossKind::Clip,
        pub aggregation: Aggregation = Aggregation::Token,
        pub clip_low: f32 = 0.2 => 0.0..=1.0,
        pub clip_high: f32 = 0.2 => 0.0..=FINITE,
        pub dual_clip: f32 = 0.0 => 0.0..=FINITE,
        pub sapo_tau_positive: f32 = 1.0 => ABOVE_0..=FINITE,
        pub sapo_tau_negative: f32 = 1.05 => ABOVE_0..=FINITE,
        pub sequence_kl_max: f32 = 0.003 => 0.0..=FINITE,
        pub mask_truncated: bool = false,
        pub value_clip: f32 = 0.2 => 0.0..=FINITE,
        pub entropy_coef: f32 = 0.0 => -FINITE..=FINITE,
        pub correction: Correction = Correction::None,
        pub correction_low: f32 = 0.5 => 0.0..=FINITE,
        pub correction_high: f32 = 5.0 => 0.0..=FINITE,

        pub kl_coef: f32 = 0.01 => 0.0..=FINITE,
        pub kl_estimator: KlEstimator = KlEstimator::K1,
        pub kl_in: KlIn = KlIn::Reward,
        pub kl_weighted: bool = false,
        pub kl_target: f32 = 0.0 => 0.0..=FINITE,
        pub kl_horizon: f32 = 10_000.0 => 1.0..=FINITE,

        pub reward_clip: [f32; 2] = [-10.0, 10.0],
        pub reward_normalize: bool = false,
        pub overlong_buffer_tokens: usize = 0 => 0.0..=TOKENS,
        pub overlong_tokens_max: usize = 0 => 0.0..=TOKENS,
        pub overlong_penalty: f32 = 1.0 => 0.0..=FINITE,
        pub truncated_score_coef: f32 = 1.0 => -FINITE..=1.0,

        pub ptx_coef: f32 = 0.0 => 0.0..=FINITE,
        pub critic_warmup_steps: u64 = 0 => 0.0..=COUNT,

        pub epochs: usize = 1 => 1.0..=10_000.0,
        pub critic_epochs: usize = 0 => 0.0..=10_000.0,
        pub minibatch_samples: usize = 128 => 1.0..=SAMPLES,
        #[serde(with = "crate::config::auto")]
        #[schemars(with = "crate::config::mesh::Auto")]
        pub microbatch_tokens_max: usize = 16_384 => 1.0..=TOKENS,
        pub old_logprobs: OldLogprobs = OldLogprobs::Auto,
    }
}

impl PpoConfig {
    /// The aggregation in force: losses of sequences are means over sequences.
    pub fn aggregation_in_force(&self) -> Aggregation {
        if self.loss.is_of_sequences() { Aggregation::Sequence } else { self.aggregation }
    }

    /// The passes of the actor over the samples of a step, and those of the critic.
    pub fn epochs_in_force(&self) -> [usize; 2] {
        let critic = if self.critic_epochs > 0 { self.critic_epochs } else { self.epochs };
        [self.epochs, if self.advantage.has_critic() { critic } else { 0 }]
    }

    /// The lambdas of "gae" for a response of which `tokens` are learned: the policy's and the critic's.
    ///
    /// lambda_policy = max(0, 1 - 1 / (alpha tokens)) with alpha = `lambda_alpha` (arXiv:2504.05118).
    pub fn lambdas(&self, tokens: usize) -> [f64; 2] {
        let (fixed, alpha) = (f64::from(self.lambda), f64::from(self.lambda_alpha));
        let policy = if alpha > 0.0 { (1.0 - 1.0 / (alpha * tokens.max(1) as f64)).max(0.0) } else { fixed };
        let critic = if self.critic_lambda < 0.0 { fixed } else { f64::from(self.critic_lambda) };
        [policy, critic]
    }

    /// Rejects combinations of these keys that have no meaning.
    pub fn check_keys(&self) -> Result<()> {
        let (low, high) = (self.correction_low, self.correction_high);
        Error::need(
            high >= low,
            format!("ppo.correction_high must be at least ppo.correction_low = {low} (got {high})"),
        )?;
        let clip = self.dual_clip;
        Error::need(
            clip == 0.0 || (clip > 1.0 && clip.is_finite()),
            format!("ppo.dual_clip must be 0 (off) or above 1 (got {clip})"),
        )?;
        let critic = self.critic_lambda;
        Error::need(
            critic == -1.0 || critic >= 0.0,
            format!("ppo.critic_lambda must be between 0 and 1, or -1 for ppo.lambda (got {critic})"),
        )?;
        let [low, high] = self.reward_clip;
        Error::need(low < high, format!("ppo.reward_clip must be [low, high] with low < high (got [{low}, {high}])"))?;
        if self.kl_in == KlIn::Loss && self.kl_estimator == KlEstimator::K1 {
            return Err(Error::usage(
                "ppo.kl_in = \"loss\" does not support ppo.kl_estimator = \"k1\", whose gradient does not lower the KL",
            )
            .hint("set ppo.kl_estimator = \"k2\" or \"k3\""));
        }
        if self.loss == PolicyLossKind::Gspo && self.kl_weighted {
            return Err(Error::usage(
                "ppo.kl_weighted weights the KL of tokens, but ppo.loss = \"gspo\" has one ratio per sequence",
            )
            .hint("set ppo.kl_weighted = false, or ppo.loss = \"clip\""));
        }
        if self.loss == PolicyLossKind::Gspo && self.correction != Correction::None {
            return Err(Error::usage(
                "ppo.correction weights tokens, but ppo.loss = \"gspo\" has one ratio per sequence",
            )
            .hint("set ppo.correction = \"none\", or ppo.loss = \"clip\""));
        }
        let (longest, buffer) = (self.overlong_tokens_max, self.overlong_buffer_tokens);
        Error::need(
            longest == 0 || longest >= buffer,
            format!("ppo.overlong_tokens_max must be at least ppo.overlong_buffer_tokens = {buffer} (got {longest})"),
        )?;
        Error::need(
            self.critic_warmup_steps == 0 || self.advantage.has_critic(),
            "ppo.critic_warmup_steps above 0 needs ppo.advantage = \"gae\"; other estimators have no critic to warm up",
        )?;
        Error::need(
            !self.reward_normalize || self.advantage != Estimator::Gdpo,
            "ppo.reward_normalize must be false with ppo.advantage = \"gdpo\", which scales each reward by itself",
        )?;
        Error::need(
            self.kl_target <= 0.0 || self.kl_in != KlIn::None,
            "ppo.kl_target adapts ppo.kl_coef, which ppo.kl_in = \"none\" does not use",
        )
    }
}

impl MethodConfig for PpoConfig {
    fn title(&self) -> String {
        let of_estimator = match self.advantage {
            Estimator::Gae => "PPO",
            Estimator::ReinforcePp => "REINFORCE++",
            Estimator::ReinforcePpBaseline => "REINFORCE++-baseline",
            Estimator::Rloo => "RLOO",
            Estimator::Grpo => "GRPO",
            Estimator::DrGrpo => "Dr. GRPO",
            Estimator::Gdpo => "GDPO",
            Estimator::Remax => "ReMax",
            Estimator::FlashReinforce => "FlashREINFORCE",
        };
        match self.loss {
            PolicyLossKind::Clip => of_estimator.to_string(),
            PolicyLossKind::SequenceTrust if self.advantage == Estimator::FlashReinforce => of_estimator.to_string(),
            PolicyLossKind::Masked => format!("{of_estimator} with the masked-ratio loss"),
            PolicyLossKind::SequenceTrust => format!("{of_estimator} with a trust region of sequences"),
            other => format!("{of_estimator} with the {} loss", name(&other).to_uppercase()),
        }
    }

    /// Without a KL and without a named reference, no reference model is loaded.
    fn uses(&self, shared: &Shared) -> Uses {
        Uses {
            samples: true,
            reference: self.kl_in != KlIn::None || !shared.model.reference.as_os_str().is_empty(),
            critic: self.advantage.has_critic(),
            greedy: self.advantage.has_greedy(),
            ratios: true,
            rollout_ranks: true,
            eval_sets: true,
            pretrain: Some(("ppo.ptx_coef", self.ptx_coef)),
            ..Uses::rows(RowKind::Prompt)
        }
    }

    fn check(&self, Shared { reward, rollout, optim, .. }: &Shared) -> Result<()> {
        reward.check()?;
        rollout.check()?;
        self.check_keys()?;
        optim.critic.check("optim.critic")?;
        let (buffer, shortest) =
            (self.overlong_buffer_tokens, rollout.response_tokens_schedule.iter().map(|[_, n]| *n).min());
        Error::need(
            shortest.is_none_or(|shortest| shortest >= buffer as u64),
            format!(
                "ppo.overlong_buffer_tokens = {buffer} must be at most each length of rollout.response_tokens_schedule"
            ),
        )?;
        let (prompts, samples) = (rollout.prompts_per_step, rollout.samples_per_prompt);
        let (all, most) = (prompts * samples, limits::SAMPLES_MAX);
        Error::need(
            all <= most,
            format!(
                "rollout.prompts_per_step x rollout.samples_per_prompt must be at most {most} responses per step (got \
                 {prompts} x {samples} = {all})"
            ),
        )?;
        if self.advantage.is_grouped() && samples < 2 {
            let name = name(&self.advantage);
            return Err(Error::usage(format!(
                "rollout.samples_per_prompt must be at least 2 with ppo.advantage = \"{name}\" (got {samples})"
            ))
            .hint("raise rollout.samples_per_prompt: this estimator compares the samples of a prompt"));
        }
        Error::need(rollout.temperature > 0.0, "rollout.temperature must be above 0 in a ppo job (got 0)")
    }

    #[rustfmt::skip]
    fn needs() -> &'static [Need<Self>] {
        &[
            (
                "optim.critic model.critic ppo.lambda ppo.lambda_alpha ppo.critic_lambda ppo.truncation ppo.value_clip \
                 ppo.critic_warmup_steps ppo.critic_epochs",
                "job.kind = \"ppo\" and ppo.advantage = \"gae\", which has a critic", |ppo, _| ppo.advantage.has_critic(),
            ),
            ("ppo.lambda", "ppo.lambda_alpha = 0 or ppo.critic_lambda = -1",
                |ppo, _| ppo.lambda_alpha <= 0.0 || ppo.critic_lambda < 0.0),
            ("mesh.async_updates_max rollout.keep_sampling_mask", "job.kind = \"ppo\"", |_, _| true),
            ("ppo.gamma", "ppo.advantage = \"gae\" or \"reinforce++\"",
                |ppo, _| matches!(ppo.advantage, Estimator::Gae | Estimator::ReinforcePp)),
            ("ppo.advantage_std", "an estimator that whitens: gae, reinforce++, reinforce++-baseline or gdpo",
                |ppo, _| ppo.advantage.is_whitened()),
            ("ppo.aggregation", "a ppo.loss other than \"gspo\" and \"sequence_trust\"",
                |ppo, _| !ppo.loss.is_of_sequences()),
            ("ppo.clip_low", "ppo.loss = \"clip\", \"gspo\" or \"masked\"",
                |ppo, _| matches!(ppo.loss, PolicyLossKind::Clip | PolicyLossKind::Gspo | PolicyLossKind::Masked)),
            ("ppo.dual_clip", "ppo.loss = \"clip\" or \"gspo\"",
                |ppo, _| matches!(ppo.loss, PolicyLossKind::Clip | PolicyLossKind::Gspo)),
            ("ppo.clip_high", "a ppo.loss other than \"sapo\" and \"sequence_trust\"",
                |ppo, _| !matches!(ppo.loss, PolicyLossKind::Sapo | PolicyLossKind::SequenceTrust)),
            ("ppo.sequence_kl_max", "ppo.loss = \"sequence_trust\"",
                |ppo, _| ppo.loss == PolicyLossKind::SequenceTrust),
            ("ppo.sapo_tau_positive ppo.sapo_tau_negative", "ppo.loss = \"sapo\"",
                |ppo, _| ppo.loss == PolicyLossKind::Sapo),
            ("ppo.correction_low ppo.correction_high", "ppo.correction", |ppo, _| ppo.correction != Correction::None),
            ("ppo.kl_coef", "ppo.kl_in = \"reward\" or \"loss\"",
                |ppo, _| ppo.kl_in != KlIn::None || ppo.kl_coef == 0.0),
            ("ppo.kl_estimator", "ppo.kl_in = \"reward\" or \"loss\", or model.reference", |ppo, shared| ppo.uses(shared).reference),
            ("ppo.kl_weighted", "ppo.kl_in = \"loss\"", |ppo, _| ppo.kl_in == KlIn::Loss),
            ("ppo.kl_horizon", "ppo.kl_target above 0", |ppo, _| ppo.kl_target > 0.0),
            ("ppo.overlong_tokens_max ppo.overlong_penalty", "ppo.overlong_buffer_tokens above 0",
                |ppo, _| ppo.overlong_buffer_tokens > 0),
        ]
    }
}
