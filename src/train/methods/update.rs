//! One optimizer step of PPO: from a minibatch of experience to new weights.

use super::policy_columns::{self, PolicyColumns};
use super::sft::CrossEntropy;
use super::update_metrics::{self, POLICY_TOKENS, VALUE_TOKENS};
use crate::comm::Axes;
use crate::config::Config;
use crate::config::method::ppo::Aggregation;
use crate::data::SftRow;
use crate::error::Result;
use crate::experience::Experience;
use crate::learn::packed::{PackedRow, Tokens};
use crate::learn::sums::{Sums, larger};
use crate::learn::{Learner, MicroBatch, Objective, Pass};
use crate::loss::aggregation::{self, Totals};
use crate::loss::policy::{PolicySums, policy_loss};
use crate::loss::value::value_loss;
use crate::metrics::keys;
use crate::model::Head;
use std::ops::Range;

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
            sums.add(&self.with(learner, samples, |learner, objectives| {
                learner.learn(self.axes, self.config.ppo.microbatch_tokens_max, objectives)
            })?);
            sums.add(&update_metrics::of_step(learner));
            if learner.role.weights.table.head() == Head::LanguageModel {
                sums.add(&learner.measured);
            }
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

fn pack(samples: &[&Experience], rows: &[usize]) -> PackedRow {
    rows.iter().map(|&i| Tokens::from_sample(samples[i])).collect()
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
        let all = PolicyColumns::new(self.config, self.samples, rows, self.totals);
        let columns = all.select(own);
        let (mut found, mut experts) = (PolicySums::default(), Vec::new());
        let logprobs = pass.run(|head| {
            experts = head.experts();
            // The loss depends on the whole sequence, so all its log-probabilities are needed before any derivative.
            let slopes = ppo.loss.is_of_sequences().then(|| {
                let (logprobs, entropy) = head.logprobs_and_entropies(rollout.temperature);
                let (of_sequences, slopes) =
                    all.sequence_loss(ppo, self.kl_beta, whole, &self.axes.sequence, &logprobs, &entropy);
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
        let mut sums = update_metrics::same_experts(self.samples, rows, own, &experts);
        sums.add(&Sums::from_list([
            (keys::LOSS, found.loss),
            (keys::POLICY_LOSS, found.policy_loss),
            (POLICY_TOKENS, found.tokens as f64),
            (keys::CLIP_RATIO, found.clipped as f64),
            (keys::POLICY_KL, found.policy_kl),
            (keys::ENTROPY, found.entropy),
            (keys::KL_LOSS, found.kl),
            (keys::LOGPROB_GAP_MAX, gaps.fold(0.0, larger)),
        ]));
        sums
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
        let column = |of| policy_columns::column(self.samples, rows, of);
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
