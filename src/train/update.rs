//! One optimizer step of PPO: from a minibatch of experience to new weights.

use super::sft;
use crate::comm::{Axes, Group};
use crate::config::Config;
use crate::config::ppo::{Aggregation, Correction, PolicyLossKind};
use crate::data::SftRow;
use crate::error::Result;
use crate::experience::Experience;
use crate::learn::Learner;
use crate::learn::accumulation::accumulate;
use crate::learn::packed::{PackedRow, Tokens};
use crate::learn::sums::{Sums, larger};
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
            let [loss, steps, norm, norm_max, lr] = match learner.role.weights.table.head() {
                Head::LanguageModel => OF_ACTOR,
                Head::Value => OF_CRITIC,
            };
            sums.add(&self.gradient(learner, samples));
            let part = |rows: &[usize]| {
                let (samples, texts) = split(samples, rows);
                let mut row: PackedRow = samples.into_iter().map(Tokens::from_sample).collect();
                for i in texts {
                    row.push(&self.texts[i].tokens, 1);
                }
                row.shard(&self.axes.sequence)
            };
            learner.step_if_finite(self.axes, sums.get(loss), part)?;
            let report = learner.report;
            let of_step = [(steps, 1.0), (norm, report.grad_norm), (norm_max, report.grad_norm), (lr, report.lr)];
            sums.add(&Sums::from_list(of_step));
        }
        Ok(sums)
    }

    /// Accumulates the gradient of the actor or the critic over the minibatch. All ranks of its mesh call this.
    pub fn gradient(&self, learner: &mut Learner, samples: &[&Experience]) -> Sums {
        let (microbatch, texts) = match learner.role.weights.table.head() {
            Head::LanguageModel => {
                (Self::policy_microbatch as fn(&Self, &mut Learner, &[&Experience], Totals) -> Sums, self.texts)
            }
            Head::Value => (Self::value_microbatch as _, &[][..]),
        };
        let mut totals = Totals::default();
        for sample in samples {
            totals.add_mask(&sample.mask);
        }
        let tokens_max = self.config.ppo.microbatch_tokens_max;
        let lengths = samples.iter().map(|sample| sample.length()).chain(texts.iter().map(|text| text.tokens.len()));
        let (lengths, passes) = (lengths.collect::<Vec<_>>(), if texts.is_empty() { 1 } else { 2 });
        accumulate(learner, self.axes, &lengths, tokens_max, passes, |learner, rows, pass| {
            let (samples, chosen) = split(samples, rows);
            match pass {
                0 => microbatch(self, learner, &samples, totals),
                _ => self.text_microbatch(learner, &chosen),
            }
        })
    }

    /// + ptx_coef * cross-entropy of the pretraining tokens, a mean over those of the minibatch
    fn text_microbatch(&self, actor: &mut Learner, chosen: &[usize]) -> Sums {
        let row = sft::pack(self.texts, chosen).shard(&self.axes.sequence);
        let tokens: usize = self.texts.iter().map(|text| text.tokens.len().saturating_sub(1)).sum();
        let weights = |weight: f32| vec![weight / tokens.max(1) as f32; row.rows.len()];
        sft::microbatch(actor, &row, &weights(self.config.ppo.ptx_coef), &weights(1.0))
    }

    fn policy_microbatch(&self, actor: &mut Learner, samples: &[&Experience], totals: Totals) -> Sums {
        let whole = PolicyBatch::new(self.config, samples, totals);
        let batch = whole.part(whole.row.shard(&self.axes.sequence));
        let (row, temperature) = (&batch.row, self.config.rollout.temperature);
        let (ppo, mut found) = (&self.config.ppo, PolicySums::default());
        let logprobs = actor.backward(row, |model, w, hidden, grads| {
            // The ratio is that of the whole sequence, so all its log-probabilities are needed before any derivative.
            let slopes = (ppo.loss == PolicyLossKind::Gspo).then(|| {
                let (logprobs, entropy) = model.logprobs(w, hidden, &row.rows, row.masked_targets(), temperature, true);
                let (of_sequences, slopes) = self.sequence_loss(&whole, &logprobs, &entropy);
                found = of_sequences;
                slopes.map(|slopes| row.select(&slopes))
            });
            let mut loss = |range: Range<usize>, l: &[f32], h: &[f32], dl: &mut [f32], dh: &mut [f32]| match &slopes {
                Some([by_logprob, by_entropy]) => {
                    dl.copy_from_slice(&by_logprob[range.clone()]);
                    dh.copy_from_slice(&by_entropy[range]);
                }
                None => found += policy_loss(ppo, self.kl_beta, &batch.tokens(range, l, h), dl, dh),
            };
            let targets = row.masked_targets();
            let (dhidden, logprobs, _) =
                model.logprobs_backward(w, hidden, &row.rows, targets, temperature, &mut loss, grads);
            (dhidden, logprobs)
        });
        let [old_logprobs, .., weights] = &batch.columns;
        let learned = logprobs.iter().zip(old_logprobs).zip(weights).filter(|(_, w)| **w != 0.0);
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

    /// The loss of whole sequences from the log-probabilities and entropies of this rank's tokens. Returns sums, and
    /// the derivatives by the log-probability and the entropy of every token of the row. Ranks of the sequence axis
    /// compute the same derivatives. Each sequence counts on one of them.
    fn sequence_loss(&self, whole: &PolicyBatch, logprobs: &[f32], entropy: &[f32]) -> (PolicySums, [Vec<f32>; 2]) {
        let sequence: &Group = &self.axes.sequence;
        let [logprobs, entropy] = [logprobs, entropy].map(|mine| whole.row.gather(sequence, mine));
        let mut sums = PolicySums::default();
        let (mut dl, mut dh) = (vec![0.0; logprobs.len()], vec![0.0; logprobs.len()]);
        for (i, ends) in whole.row.row_offsets.windows(2).enumerate() {
            let r = ends[0]..ends[1];
            let tokens = whole.tokens(r.clone(), &logprobs[r.clone()], &entropy[r.clone()]);
            let found = policy_loss(&self.config.ppo, self.kl_beta, &tokens, &mut dl[r.clone()], &mut dh[r]);
            if i % sequence.size() == sequence.rank() {
                sums += found;
            }
        }
        (sums, [dl, dh])
    }

    fn value_microbatch(&self, critic: &mut Learner, samples: &[&Experience], totals: Totals) -> Sums {
        let whole: PackedRow = samples.iter().copied().map(Tokens::from_sample).collect();
        let row = &whole.shard(&self.axes.sequence);
        let column = |of: fn(&Experience) -> &[f32]| samples.iter().flat_map(|sample| of(sample)).copied().collect();
        let (returns, old_values): (Vec<f32>, Vec<f32>) = (column(|s| &s.returns), column(|s| &s.values));
        let mut weights = Vec::new();
        for sample in samples {
            // A mean over tokens, independent of the policy's aggregation.
            aggregation::weights(Aggregation::Token, &sample.mask, totals, 1, &mut weights);
        }
        let [old_values, returns, weights] = [old_values, returns, weights].map(|x| row.select(&x));
        let found = critic.backward(row, |model, w, hidden, grads| {
            let values = model.values(w, hidden, &row.rows);
            let mut dvalues = vec![0.0; values.len()];
            let found = value_loss(self.config.ppo.value_clip, &values, &old_values, &returns, &weights, &mut dvalues);
            (model.values_backward(w, hidden, &row.rows, &dvalues, grads), found)
        });
        Sums::from_list([
            (keys::VALUE_LOSS, found.loss),
            (VALUE_TOKENS, found.tokens as f64),
            (keys::VALUE_CLIP_RATIO, found.clipped as f64),
        ])
    }
}

/// The rows of the minibatch: its samples, which come first, and the indices of its pretraining rows.
fn split<'e>(samples: &[&'e Experience], rows: &[usize]) -> (Vec<&'e Experience>, Vec<usize>) {
    let (own, texts): (Vec<usize>, Vec<usize>) = rows.iter().partition(|&&i| i < samples.len());
    (own.into_iter().map(|i| samples[i]).collect(), texts.into_iter().map(|i| i - samples.len()).collect())
}

/// The inputs of the actor's loss for the response tokens of one packed row.
struct PolicyBatch {
    row: PackedRow,
    /// Old log-probabilities, the reference's, advantages, importance weights, weights of the loss. Columns that do not
    /// exist are empty.
    columns: [Vec<f32>; 5],
}

impl PolicyBatch {
    fn new(config: &Config, samples: &[&Experience], totals: Totals) -> Self {
        let (ppo, longest) = (&config.ppo, config.rollout.response_tokens_max);
        let column = |of: fn(&Experience) -> &[f32]| samples.iter().flat_map(|sample| of(sample)).copied().collect();
        let (mut factors, mut weights) = (Vec::new(), Vec::new());
        for sample in samples {
            aggregation::weights(ppo.aggregation_in_force(), &sample.mask, totals, longest, &mut weights);
            if ppo.correction != Correction::None {
                let range = [ppo.correction_low, ppo.correction_high];
                let (old, sampled) = (&sample.response.logprobs, &sample.response.sample_logprobs);
                correction::factors(ppo.correction, range, old, sampled, &sample.mask, &mut factors);
            }
        }
        let [old, of_reference] = [column(|s| &s.response.logprobs), column(|s| &s.ref_logprobs)];
        let columns = [old, of_reference, column(|s| &s.advantages), factors, weights];
        Self { row: samples.iter().copied().map(Tokens::from_sample).collect(), columns }
    }

    /// The part that belongs to the tokens predicted by the part `row` of the row.
    fn part(&self, row: PackedRow) -> Self {
        Self { columns: self.columns.each_ref().map(|column| row.select(column)), row }
    }

    /// The slices of tokens `range` with the policy's current outputs.
    fn tokens<'a>(&'a self, range: Range<usize>, logprobs: &'a [f32], entropy: &'a [f32]) -> PolicyTokens<'a> {
        let part = |x: &'a Vec<f32>| if x.is_empty() { &x[..] } else { &x[range.clone()] };
        let [old_logprobs, ref_logprobs, advantages, factors, weights] = self.columns.each_ref().map(part);
        PolicyTokens { logprobs, old_logprobs, advantages, ref_logprobs, entropy, factors, weights }
    }
}
