//! `[ppo]`: the estimator, the losses, and how a batch of experience is cut.

use serde::{Deserialize, Serialize};

use super::limits;
use crate::error::{Error, Result};
use crate::mesh::Mesh;

/// How rewards become advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
}

impl Estimator {
    /// Whether a critic is trained and its values are needed.
    pub fn has_critic(self) -> bool {
        self == Self::Gae
    }

    /// Whether a score is compared with the other samples of its prompt, so that at least two are needed.
    pub fn is_grouped(self) -> bool {
        !matches!(self, Self::Gae | Self::ReinforcePp)
    }

    /// Whether advantages are whitened over the whole batch.
    pub fn is_whitened(self) -> bool {
        matches!(self, Self::Gae | Self::ReinforcePp | Self::ReinforcePpBaseline)
    }
}

/// Per-token estimate of the KL divergence from d = logprob - reference logprob.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The estimate and its derivative by `d` = logprob - reference logprob. Estimates are clamped to +-10 (k2 and k3
    /// from above), and flat there, so that one outlier cannot own a batch. Both the reward and the loss use this.
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

/// Where the KL penalty acts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlIn {
    /// -beta * kl is added to the reward of each token.
    #[default]
    Reward,
    /// + kl_coef * mean kl is added to the policy loss.
    Loss,
    /// Measured where a reference is loaded, used nowhere.
    None,
}

/// The policy loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLossKind {
    /// PPO's clipped ratio per token. arXiv:1707.06347
    #[default]
    Clip,
    /// One ratio per sequence. arXiv:2507.18071
    Gspo,
    /// Clipped importance weight outside the gradient. arXiv:2506.13585
    Cispo,
}

/// How token losses become one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

/// What follows the last token of a response that was cut by length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// Nothing: its value is 0, as if the response had ended by itself.
    #[default]
    Zero,
    /// What the critic expects after the last token.
    Bootstrap,
}

/// Weight for tokens whose sampler was not the policy that the ratio is taken against.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Correction {
    #[default]
    None,
    /// Truncated importance sampling: the weight is clamped to [low, high].
    Tis,
    /// The weight where it lies in [low, high], else 0.
    Icepop,
    /// The clamped weight, for sequences whose geometric mean weight lies in [low, high], else 0.
    SequenceMask,
}

/// Where the log-probabilities before the update come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogprobs {
    /// `rollout` where rollout and training compute bitwise alike, else `recompute`.
    #[default]
    Auto,
    /// As they were when the tokens were sampled.
    Rollout,
    /// Of one more forward in the training layout.
    Recompute,
}

table! {
    /// `[ppo]`.
    pub struct PpoConfig {
        /// gae | reinforce++ | reinforce++-baseline | rloo | grpo | dr-grpo.
        pub advantage: Estimator = Estimator::Gae,
        /// Discount per token, in [0, 1]; gae and reinforce++ only, the others use 1. arXiv:1506.02438
        pub gamma: f32 = 1.0,
        /// Bias against variance of gae, in [0, 1]; 1 is Monte Carlo. arXiv:1506.02438
        pub lambda: f32 = 1.0,
        /// What a cut response is followed by: zero | bootstrap (gae only).
        pub truncation: Truncation = Truncation::Zero,
        /// Whether whitening divides by the standard deviation; false only subtracts the mean.
        pub advantage_std: bool = true,

        /// clip | gspo | cispo.
        pub loss: PolicyLossKind = PolicyLossKind::Clip,
        /// token | sequence | sequence_sum_fixed: what the policy's sum over a minibatch is divided by (`loss::aggregation`); gspo is always
        /// `sequence`, and the value loss always a mean over tokens.
        pub aggregation: Aggregation = Aggregation::Token,
        /// The ratio is clipped from below at 1 - clip_low. arXiv:1707.06347
        pub clip_low: f32 = 0.2,
        /// The ratio is clipped from above at 1 + clip_high. arXiv:2503.14476, section 3.1
        pub clip_high: f32 = 0.2,
        /// Bound c > 1 on the ratio for negative advantages; 0: off. arXiv:1912.09729
        pub dual_clip: f32 = 0.0,
        /// Largest step of a value from its old one that the value loss rewards; 0: off. arXiv:1707.06347
        pub value_clip: f32 = 0.2,
        /// Weight of the entropy bonus, which is added to what is maximised: of softmax(logits / temperature) over the whole vocabulary,
        /// before filters and penalties, aggregated as the policy loss is; 0: off.
        pub entropy_coef: f32 = 0.0,
        /// none | tis | icepop | sequence_mask: weight for tokens sampled from a filtered or older distribution.
        pub correction: Correction = Correction::None,
        /// Smallest importance weight that `correction` lets through.
        pub correction_low: f32 = 0.5,
        /// Largest importance weight that `correction` lets through.
        pub correction_high: f32 = 5.0,

        /// Weight beta of the KL penalty (the first value, where `kl_target` adapts it).
        pub kl_coef: f32 = 0.01,
        /// k1 | k2 | k3; in the loss k2 or k3. http://joschu.net/blog/kl-approx.html
        pub kl_estimator: KlEstimator = KlEstimator::K1,
        /// reward | loss | none.
        pub kl_in: KlIn = KlIn::Reward,
        /// KL per token that beta is steered to; 0: beta is fixed. arXiv:1909.08593, section 2.2
        pub kl_target: f32 = 0.0,
        /// Samples over which the steering acts.
        pub kl_horizon: f32 = 10_000.0,

        /// Range that the (shaped) score of a sample is clipped to.
        pub reward_clip: [f32; 2] = [-10.0, 10.0],
        /// Whether scores are divided by their running standard deviation after their running mean is subtracted.
        pub reward_normalize: bool = false,
        /// Tokens before `overlong_tokens_max` in which the penalty grows from 0 to its factor; 0: off. arXiv:2503.14476
        pub overlong_buffer_tokens: usize = 0,
        /// Response length, in tokens, at which the full overlong penalty is reached; 0: `rollout.response_tokens_max`.
        pub overlong_tokens_max: usize = 0,
        /// The full overlong penalty, in units of score.
        pub overlong_penalty: f32 = 1.0,
        /// c for responses cut by length: the score is multiplied by c where c >= 0, set to c where c < 0; 1: off.
        /// arXiv:2505.24864
        pub truncated_score_coef: f32 = 1.0,

        /// Passes over each batch of experience.
        pub epochs: usize = 1,
        /// Samples per optimizer step, over all ranks.
        pub minibatch_samples: usize = 128,
        /// Tokens (prompt and response) in one forward and backward pass on a rank.
        pub microbatch_tokens_max: usize = 16_384,
        /// Where l_old comes from: auto | rollout | recompute.
        pub old_logprobs: OldLogprobs = OldLogprobs::Auto,
    }
}

impl PpoConfig {
    /// The aggregation in force: GSPO is defined per sequence.
    pub fn aggregation_in_force(&self) -> Aggregation {
        if self.loss == PolicyLossKind::Gspo { Aggregation::Sequence } else { self.aggregation }
    }

    /// Whether the log-probabilities before the update are computed again, in the training layout: asked for, or because
    /// `rollout` and `training` differ in the order of their sums, as they do where products are `fast`.
    pub fn recomputes_old_logprobs(&self, training: &Mesh, rollout: &Mesh, fast: bool) -> bool {
        match self.old_logprobs {
            OldLogprobs::Auto => fast || training.sequence > 1 || training.tensor != rollout.tensor,
            OldLogprobs::Rollout => false,
            OldLogprobs::Recompute => true,
        }
    }

    /// Refuses values outside their range and combinations that have no meaning.
    pub fn check(&self) -> Result<()> {
        limits::check("ppo", self)?;
        let (low, high) = (self.correction_low, self.correction_high);
        Error::need(high >= low, format!("ppo.correction_high is {high}, needed at least correction_low = {low}"))?;
        let clip = self.dual_clip;
        Error::need(
            clip == 0.0 || (clip > 1.0 && clip.is_finite()),
            format!("ppo.dual_clip is {clip}, needed 0 (off) or more than 1"),
        )?;
        let [low, high] = self.reward_clip;
        Error::need(low < high, format!("ppo.reward_clip is [{low}, {high}], needed [low, high] with low < high"))?;
        if self.kl_in == KlIn::Loss && self.kl_estimator == KlEstimator::K1 {
            return Err(Error::usage(
                "ppo.kl_in = \"loss\" with ppo.kl_estimator = \"k1\": its gradient does not lower the KL",
            )
            .hint("set ppo.kl_estimator = \"k2\" or \"k3\""));
        }
        if self.loss == PolicyLossKind::Gspo && self.correction != Correction::None {
            return Err(Error::usage(
                "ppo.correction weighs tokens, but ppo.loss = \"gspo\" has one ratio per sequence",
            )
            .hint("set ppo.correction = \"none\", or ppo.loss = \"clip\""));
        }
        let (longest, buffer) = (self.overlong_tokens_max, self.overlong_buffer_tokens);
        Error::need(
            longest == 0 || longest >= buffer,
            format!("ppo.overlong_tokens_max is {longest}, needed at least ppo.overlong_buffer_tokens = {buffer}"),
        )?;
        Error::need(
            self.kl_target <= 0.0 || self.kl_in != KlIn::None,
            "ppo.kl_target steers beta, but ppo.kl_in = \"none\" does not use it",
        )
    }
}
