//! One optimizer step of PPO: from a minibatch of experience to new weights.

use super::sft::CrossEntropy;
use crate::comm::{Axes, Group};
use crate::config::Config;
use crate::config::method::ppo::{Aggregation, Correction, PolicyLossKind};
use crate::data::SftRow;
use crate::error::Result;
use crate::experience::Experience;
use crate::learn::packed::{PackedRow, Tokens};
use crate::learn::sums::{Sums, larger};
use crate::learn::{Learner, MicroBatch, Objective, Pass};
use crate::loss::aggregation::{self, Totals};
use crate::loss::correction;
use crate::loss::policy::{PolicySums, PolicyTokens, policy_loss};
use crate::loss::value::value_loss;
use crate::metrics::keys;
use crate::model::Head;
use std::ops::Range;

/// The counts that divide sums: tokens that are learned from, and optimizer steps.
const POLICY_TOKENS: &str = "policy_tokens";
const VALUE_TOKENS: &str = "value_tokens";
const ACTOR_STEPS: &str = "actor_steps";
const CRITIC_STEPS: &str = "critic_steps";

/// Keys of a model's loss, steps, norm of the gradient, its maximum, and learning rate.
const OF_ACTOR: [&str; 5] = [keys::LOSS, ACTOR_STEPS, keys::GRAD_NORM_ACTOR, keys::GRAD_NORM_ACTOR_MAX, keys::LR_ACTOR];
const OF_CRITIC: [&str; 5] =
    [keys::VALUE_LOSS, CRITIC_STEPS, keys::GRAD_NORM_CRITIC, keys::GRAD_NORM_CRITIC_MAX, keys::LR_CRITIC];

/// The update metrics of a step: keys, and the counts that divide their sums.
pub const REPORTED: &[(&str, &str)] = &[
    (keys::LOSS, ACTOR_STEPS),
    (keys::POLICY_LOSS, ACTOR_STEPS),
    (keys::ENTROPY, POLICY_TOKENS),
    (keys::CLIP_RATIO, POLICY_TOKENS),
    (keys::POLICY_KL, POLICY_TOKENS),
    (keys::KL_LOSS, POLICY_TOKENS),
    (keys::PTX_LOSS, ACTOR_STEPS),
    (keys::LOGPROB_GAP_MAX, ""),
    (keys::GRAD_NORM_ACTOR, ACTOR_STEPS),
    (keys::GRAD_NORM_ACTOR_MAX, ""),
    (keys::LR_ACTOR, ACTOR_STEPS),
    (keys::VALUE_LOSS, CRITIC_STEPS),
    (keys::VALUE_CLIP_RATIO, VALUE_TOKENS),
    (keys::GRAD_NORM_CRITIC, CRITIC_STEPS),
    (keys::GRAD_NORM_CRITIC_MAX, ""),
    (keys::LR_CRITIC, CRITIC_STEPS),
];

/// Values that stay the same over the minibatches of a step.
#[derive(Clone, Copy)]
pub struct Update<'a> {
    pub config: &'a Config,
    pub axes: &'a Axes,
    /// KL coefficient in force.
    pub kl_beta: f32,
    /// Pretraining rows of this minibatch, which the actor learns together with the samples (PPO-ptx,
    /// arXiv:2203.02155).
    pub texts: &'a [SftRow],
}

impl Update<'_> {
    /// One optimizer step of each model on this rank, which holds all samples and computes its own micro-batches.
    pub fn minibatch<'l>(
        &self,
        actor: impl Into<Option<&'l mut Learner>>,
        critic: Option<&'l mut Learner>,
        samples: &[&Experience],
    ) -> Result<Sums> {
        let mut sums = Sums::default();
        for learner in actor.into().into_iter().chain(critic) {
            let [_, steps, norm, norm_max, lr] = keys_of(learner);
            sums.add(&self.with(learner, samples, |learner, objectives| {
                learner.learn(self.axes, self.config.ppo.microbatch_tokens_max, objectives)
            })?);
            let report = learner.report;
            let of_step = [(steps, 1.0), (norm, report.grad_norm), (norm_max, report.grad_norm), (lr, report.lr)];
            sums.add(&Sums::from_list(of_step));
        }
        Ok(sums)
    }

    /// Accumulates the gradient of the actor or the critic over the minibatch. All ranks of its mesh call this.
    pub fn gradient(&self, learner: &mut Learner, samples: &[&Experience]) -> Sums {
        self.with(learner, samples, |learner, objectives| {
            learner.accumulate(self.axes, self.config.ppo.microbatch_tokens_max, objectives)
        })
    }

    /// Runs `work` with the objectives of the actor or the critic:
    ///
    /// actor: policy loss of the samples + ptx_coef * mean over the tokens of texts of -l; critic: value loss.
    fn with<R>(
        &self,
        learner: &mut Learner,
        samples: &[&Experience],
        work: impl FnOnce(&mut Learner, &[&dyn Objective]) -> R,
    ) -> R {
        let mut totals = Totals::default();
        for sample in samples {
            totals.add_mask(&sample.mask);
        }
        let Self { config, axes, kl_beta, texts } = *self;
        if learner.role.weights.table.head() == Head::Value {
            return work(learner, &[&ValueObjective { config, samples, totals }]);
        }
        let tokens: usize = texts.iter().map(|text| text.tokens.len().saturating_sub(1)).sum();
        let weights = [config.ppo.ptx_coef, 1.0].map(|coef| coef / tokens.max(1) as f32);
        let texts = CrossEntropy { rows: texts.iter().map(|text| (text, weights)).collect() };
        work(learner, &[&PolicyObjective { config, axes, kl_beta, samples, totals }, &texts])
    }
}

/// Keys of the model's loss, steps, norm of the gradient, its maximum, and learning rate.
fn keys_of(learner: &Learner) -> [&'static str; 5] {
    match learner.role.weights.table.head() {
        Head::LanguageModel => OF_ACTOR,
        Head::Value => OF_CRITIC,
    }
}

fn pack(samples: &[&Experience], rows: &[usize]) -> PackedRow {
    rows.iter().map(|&i| Tokens::from_sample(samples[i])).collect()
}

/// One value for each token that a packed row predicts.
fn column(samples: &[&Experience], rows: &[usize], of: fn(&Experience) -> &[f32]) -> Vec<f32> {
    rows.iter().flat_map(|&i| of(samples[i])).copied().collect()
}

/// L = sum_t w_t f_t policy_loss(l_t, l_old_t, A_t) - entropy_coef mean(H) + kl_coef mean(KL), with l_t the
/// log-probability of token t, w_t its weight in the aggregation, f_t its importance weight, A_t its advantage
/// (`loss::policy`).
struct PolicyObjective<'a> {
    config: &'a Config,
    axes: &'a Axes,
    kl_beta: f32,
    samples: &'a [&'a Experience],
    totals: Totals,
}

impl Objective for PolicyObjective<'_> {
    fn lengths(&self) -> Vec<usize> {
        self.samples.iter().map(|sample| sample.length()).collect()
    }

    fn pack(&self, rows: &[usize]) -> PackedRow {
        pack(self.samples, rows)
    }

    fn loss(&self, MicroBatch { rows, whole, own }: &MicroBatch, pass: Pass) -> Sums {
        let Config { ppo, rollout, .. } = self.config;
        let all = self.columns(rows);
        let columns = all.select(own);
        let mut found = PolicySums::default();
        let logprobs = pass.run(|head| {
            // The ratio is that of the whole sequence, so all its log-probabilities are needed before any derivative.
            let slopes = (ppo.loss == PolicyLossKind::Gspo).then(|| {
                let (logprobs, entropy) = head.logprobs_and_entropies(rollout.temperature);
                let (of_sequences, slopes) = self.sequence_loss(whole, &all, &logprobs, &entropy);
                found = of_sequences;
                slopes.map(|slopes| own.select(&slopes))
            });
            let mut loss = |range: Range<usize>, l: &[f32], h: &[f32], dl: &mut [f32], dh: &mut [f32]| match &slopes {
                Some([by_logprob, by_entropy]) => {
                    dl.copy_from_slice(&by_logprob[range.clone()]);
                    dh.copy_from_slice(&by_entropy[range]);
                }
                None => found += policy_loss(ppo, self.kl_beta, &columns.tokens(range, l, h), dl, dh),
            };
            head.token_loss(rollout.temperature, &mut loss)
        });
        let learned = logprobs.iter().zip(&columns.old_logprobs).zip(&columns.weights).filter(|(_, w)| **w != 0.0);
        let gaps = learned.map(|((a, b), _)| f64::from((a - b).abs()));
        Sums::from_list([
            (keys::LOSS, found.loss),
            (keys::POLICY_LOSS, found.policy_loss),
            (POLICY_TOKENS, found.tokens as f64),
            (keys::CLIP_RATIO, found.clipped as f64),
            (keys::POLICY_KL, found.policy_kl),
            (keys::ENTROPY, found.entropy),
            (keys::KL_LOSS, found.kl),
            (keys::LOGPROB_GAP_MAX, gaps.fold(0.0, larger)),
        ])
    }
}

impl PolicyObjective<'_> {
    /// The loss of whole sequences from the log-probabilities and entropies of this rank's tokens. Returns sums, and
    /// the derivatives by the log-probability and the entropy of every token of the row. Ranks of the sequence axis
    /// compute the same derivatives. Each sequence counts on one of them.
    fn sequence_loss(
        &self,
        row: &PackedRow,
        columns: &PolicyColumns,
        logprobs: &[f32],
        entropy: &[f32],
    ) -> (PolicySums, [Vec<f32>; 2]) {
        let sequence: &Group = &self.axes.sequence;
        let [logprobs, entropy] = [logprobs, entropy].map(|mine| row.gather(sequence, mine));
        let mut sums = PolicySums::default();
        let (mut dl, mut dh) = (vec![0.0; logprobs.len()], vec![0.0; logprobs.len()]);
        for (i, ends) in row.row_offsets.windows(2).enumerate() {
            let r = ends[0]..ends[1];
            let tokens = columns.tokens(r.clone(), &logprobs[r.clone()], &entropy[r.clone()]);
            let found = policy_loss(&self.config.ppo, self.kl_beta, &tokens, &mut dl[r.clone()], &mut dh[r]);
            if i % sequence.size() == sequence.rank() {
                sums += found;
            }
        }
        (sums, [dl, dh])
    }

    fn columns(&self, rows: &[usize]) -> PolicyColumns {
        let (ppo, longest) = (&self.config.ppo, self.config.rollout.response_tokens_max);
        let (mut factors, mut weights) = (Vec::new(), Vec::new());
        for Experience { mask, response, .. } in rows.iter().map(|&i| self.samples[i]) {
            aggregation::weights(ppo.aggregation_in_force(), mask, self.totals, longest, &mut weights);
            if ppo.correction != Correction::None {
                let range = [ppo.correction_low, ppo.correction_high];
                let (old, sampled) = (&response.logprobs, &response.sample_logprobs);
                correction::factors(ppo.correction, range, old, sampled, mask, &mut factors);
            }
        }
        let column = |of| column(self.samples, rows, of);
        PolicyColumns {
            old_logprobs: column(|s| &s.response.logprobs),
            ref_logprobs: column(|s| &s.ref_logprobs),
            advantages: column(|s| &s.advantages),
            factors,
            weights,
        }
    }
}

/// The inputs of the policy loss for each token that a row predicts. Columns that do not exist are empty.
struct PolicyColumns {
    old_logprobs: Vec<f32>,
    ref_logprobs: Vec<f32>,
    advantages: Vec<f32>,
    /// Importance weights.
    factors: Vec<f32>,
    /// Weights of the tokens in the loss.
    weights: Vec<f32>,
}

impl PolicyColumns {
    /// The columns of the tokens that the part `row` predicts.
    fn select(&self, row: &PackedRow) -> Self {
        let Self { old_logprobs, ref_logprobs, advantages, factors, weights } = self;
        let all = [old_logprobs, ref_logprobs, advantages, factors, weights];
        let [old_logprobs, ref_logprobs, advantages, factors, weights] = all.map(|column| row.select(column));
        Self { old_logprobs, ref_logprobs, advantages, factors, weights }
    }

    /// The tokens `range` with the policy's outputs.
    fn tokens<'a>(&'a self, range: Range<usize>, logprobs: &'a [f32], entropy: &'a [f32]) -> PolicyTokens<'a> {
        let part = |x: &'a Vec<f32>| if x.is_empty() { &x[..] } else { &x[range.clone()] };
        PolicyTokens {
            logprobs,
            old_logprobs: part(&self.old_logprobs),
            advantages: part(&self.advantages),
            ref_logprobs: part(&self.ref_logprobs),
            entropy,
            factors: part(&self.factors),
            weights: part(&self.weights),
        }
    }
}

/// L = mean over response tokens of value_loss(v_t, v_old_t, R_t) (`loss::value`), independent of the policy's
/// aggregation.
struct ValueObjective<'a> {
    config: &'a Config,
    samples: &'a [&'a Experience],
    totals: Totals,
}

impl Objective for ValueObjective<'_> {
    fn lengths(&self) -> Vec<usize> {
        self.samples.iter().map(|sample| sample.length()).collect()
    }

    fn pack(&self, rows: &[usize]) -> PackedRow {
        pack(self.samples, rows)
    }

    fn loss(&self, MicroBatch { rows, own, .. }: &MicroBatch, pass: Pass) -> Sums {
        let column = |of| column(self.samples, rows, of);
        let mut weights = Vec::new();
        for &i in *rows {
            aggregation::weights(Aggregation::Token, &self.samples[i].mask, self.totals, 1, &mut weights);
        }
        let [old_values, returns, weights] =
            [column(|s| &s.values), column(|s| &s.returns), weights].map(|x| own.select(&x));
        let found = pass.run(|head| {
            let values = head.values();
            let mut dvalues = vec![0.0; values.len()];
            let found = value_loss(self.config.ppo.value_clip, &values, &old_values, &returns, &weights, &mut dvalues);
            head.backward(&dvalues);
            found
        });
        Sums::from_list([
            (keys::VALUE_LOSS, found.loss),
            (VALUE_TOKENS, found.tokens as f64),
            (keys::VALUE_CLIP_RATIO, found.clipped as f64),
        ])
    }

    fn loss_key(&self) -> &'static str {
        keys::VALUE_LOSS
    }
}
