//! The quantities of a batch, computed by the functions of a job.
//!
//! Each quantity is computed from the numbers that the other system had before it, so that one difference does not
//! hide the next. Where the file lacks them, our own numbers are used.

use super::rows::{Numbers, Quantity, Rows};
use super::settings::Settings;
use crate::advantage::{self, AdvantageState};
use crate::comm::Group;
use crate::config::method::ppo::{Aggregation, Correction, Estimator, KlIn, PpoConfig};
use crate::experience::Experience;
use crate::learn::packed::PackedRow;
use crate::loss::aggregation::{self, Totals};
use crate::loss::policy::PolicySums;
use crate::loss::value::value_loss;
use crate::train::methods::policy_columns::PolicyColumns;
use std::collections::BTreeMap;

/// A batch with the settings that it is computed with.
#[derive(Clone)]
pub struct Case {
    pub settings: Settings,
    pub rows: Rows,
}

/// A result, or the reason why it cannot be computed.
pub type Known<T> = Result<T, String>;
pub type Found = Known<Numbers>;

impl Case {
    /// Computes a quantity without a model.
    pub fn compute(&self, quantity: Quantity) -> Found {
        match quantity {
            Quantity::Kl | Quantity::Rewards => {
                let samples = self.with_rewards()?;
                let of = |s: Experience| if quantity == Quantity::Kl { s.kl } else { s.rewards };
                Ok(Numbers::Tokens(samples.into_iter().map(of).collect()))
            }
            Quantity::Returns | Quantity::Advantages => {
                let samples = self.with_advantages(true)?;
                let of = |s: Experience| if quantity == Quantity::Returns { s.returns } else { s.advantages };
                Ok(Numbers::Tokens(samples.into_iter().map(of).collect()))
            }
            Quantity::PolicyLoss => Ok(Numbers::One(self.terms()?.policy)),
            Quantity::KlLoss => self.terms()?.kl.map(Numbers::One).ok_or_else(|| missing("ref_logprobs")),
            Quantity::EntropyLoss => self.terms()?.entropy.map(Numbers::One).ok_or_else(|| missing("entropy")),
            Quantity::Loss => self.loss().map(Numbers::One),
            Quantity::ValueLoss => self.value_loss().map(Numbers::One),
            _ => Err("it is computed by a model".into()),
        }
    }

    /// The samples with `kl` and `rewards` from their scores.
    fn with_rewards(&self) -> Known<Vec<Experience>> {
        let ppo = &self.settings.config.ppo;
        let mut samples = self.rows.samples.clone();
        let has_old = !samples[0].response.logprobs.is_empty();
        if ppo.kl_in == KlIn::Reward && ppo.kl_coef != 0.0 && samples[0].ref_logprobs.is_empty() {
            return Err(missing("ref_logprobs"));
        }
        if !has_old && !samples[0].ref_logprobs.is_empty() {
            return Err(missing("old_logprobs"));
        }
        self.check_groups()?;
        for sample in &mut samples {
            let n = sample.mask.len();
            sample.response.logprobs.resize(n, 0.0);
            sample.values.resize(n, 0.0);
        }
        let (mut state, weights) = (AdvantageState::new(ppo), BTreeMap::new());
        advantage::compute_rewards(ppo, &self.settings.details, &weights, &mut state, &mut samples)
            .map_err(|e| e.message)?;
        Ok(samples)
    }

    /// Compares of samples need all of a prompt.
    fn check_groups(&self) -> Known<()> {
        let estimator = self.settings.config.ppo.advantage;
        if estimator.has_greedy() || estimator == Estimator::Gdpo {
            return Err("the format has no greedy responses and no scores of each reward".into());
        }
        if !self.rows.has_scores {
            return Err(missing("scores"));
        }
        if !estimator.is_grouped() {
            return Ok(());
        }
        if !self.rows.has_groups {
            return Err(missing("group"));
        }
        let given = &self.settings.config.given;
        let wanted = self.settings.config.rollout.samples_per_prompt;
        let is_known = given.iter().any(|key| key == "rollout.samples_per_prompt");
        let groups = || self.rows.samples.chunk_by(|a, b| a.response.prompt == b.response.prompt);
        match groups().find(|group| group.len() < 2 || (is_known && group.len() != wanted)) {
            Some(group) => Err(format!("a group has only {} of its samples in the file", group.len())),
            None => Ok(()),
        }
    }

    /// The samples with advantages: those of the file, unless `again` or if it has none.
    pub fn with_advantages(&self, again: bool) -> Known<Vec<Experience>> {
        let mut samples = self.rows.samples.clone();
        if !again && !samples[0].advantages.is_empty() {
            return Ok(samples);
        }
        let ppo = &self.settings.config.ppo;
        if ppo.advantage.has_critic() && samples[0].values.is_empty() {
            return Err(missing("values"));
        }
        if samples[0].rewards.is_empty() {
            samples = self.with_rewards()?;
        }
        advantage::compute_advantages(ppo, &self.settings.details, &mut samples);
        Ok(samples)
    }

    /// The rows of each mean of the loss.
    fn parts(&self) -> Vec<Vec<usize>> {
        let all: Vec<usize> = (0..self.rows.samples.len()).collect();
        if !self.settings.mean_of_microbatches {
            return vec![all];
        }
        let mut parts: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for row in all {
            parts.entry(self.rows.microbatch[row]).or_default().push(row);
        }
        parts.into_values().collect()
    }

    pub fn has_one_mean(&self) -> bool {
        self.parts().len() == 1
    }

    /// The factor of a loss over these rows if other totals divide it.
    pub fn scale(&self, aggregation: Aggregation, rows: &[usize]) -> f64 {
        let totals = totals(&self.rows.samples, rows);
        let (own, other) = match aggregation {
            Aggregation::Token => (totals.tokens, self.settings.loss_tokens),
            Aggregation::Sequence | Aggregation::SequenceSumFixed => (totals.sequences, self.settings.loss_sequences),
        };
        other.map_or(1.0, |other| own as f64 / other)
    }

    fn terms(&self) -> Known<Terms> {
        let samples = self.with_advantages(false)?;
        if self.rows.logprobs.is_empty() {
            return Err(missing("logprobs"));
        }
        if samples[0].response.logprobs.is_empty() {
            return Err(missing("old_logprobs"));
        }
        self.check_correction()?;
        let parts = self.parts();
        let mut sum = Terms::default();
        for part in &parts {
            let terms = self.terms_of(&samples, part);
            let share = self.scale(self.settings.config.ppo.aggregation_in_force(), part) / parts.len() as f64;
            sum.policy += share * terms.policy;
            sum.kl = terms.kl.map(|kl| sum.kl.unwrap_or(0.0) + share * kl);
            sum.entropy = terms.entropy.map(|entropy| sum.entropy.unwrap_or(0.0) + share * entropy);
        }
        Ok(sum)
    }

    pub fn check_correction(&self) -> Known<()> {
        let is_corrected = self.settings.config.ppo.correction != Correction::None;
        let has_sampled = !self.rows.samples[0].response.sample_logprobs.is_empty();
        if is_corrected && !has_sampled { Err(missing("sample_logprobs")) } else { Ok(()) }
    }

    /// The means over the tokens of some rows, each term with coefficient 1.
    fn terms_of(&self, samples: &[Experience], rows: &[usize]) -> Terms {
        let mut config = self.settings.config.clone();
        (config.ppo.kl_in, config.ppo.entropy_coef) = (KlIn::None, 0.0);
        let of_rows: Vec<&Experience> = samples.iter().collect();
        let totals = totals(samples, rows);
        let columns = PolicyColumns::new(&config, &of_rows, rows, totals);
        let (mut packed, width) = (PackedRow::new(), samples[0].mask.len());
        for _ in rows {
            packed.push(&vec![0; width + 1], 1);
        }
        let column = |all: &[Vec<f32>]| rows.iter().flat_map(|row| all[*row].iter().copied()).collect::<Vec<f32>>();
        let logprobs = column(&self.rows.logprobs);
        let has_entropy = !self.rows.entropy.is_empty();
        let entropy = if has_entropy { column(&self.rows.entropy) } else { vec![0.0; logprobs.len()] };
        let sums = |kl_in: KlIn, entropy_coef: f32| -> PolicySums {
            let ppo = PpoConfig { entropy_coef, kl_in, ..config.ppo.clone() };
            columns.sequence_loss(&ppo, 1.0, &packed, &Group::one(), &logprobs, &entropy).0
        };
        let policy = sums(KlIn::None, 0.0).loss;
        let has_reference = !samples[0].ref_logprobs.is_empty();
        Terms {
            policy,
            kl: has_reference.then(|| sums(KlIn::Loss, 0.0).loss - policy),
            entropy: has_entropy.then(|| policy - sums(KlIn::None, 1.0).loss),
        }
    }

    /// policy term + kl_coef KL term - entropy_coef entropy.
    fn loss(&self) -> Known<f64> {
        let (terms, ppo) = (self.terms()?, &self.settings.config.ppo);
        let mut loss = terms.policy;
        if ppo.kl_in == KlIn::Loss && ppo.kl_coef != 0.0 {
            loss += f64::from(ppo.kl_coef) * terms.kl.ok_or_else(|| missing("ref_logprobs"))?;
        }
        if ppo.entropy_coef != 0.0 {
            loss -= f64::from(ppo.entropy_coef) * terms.entropy.ok_or_else(|| missing("entropy"))?;
        }
        Ok(loss)
    }

    fn value_loss(&self) -> Known<f64> {
        let Settings { config, value_aggregation, value_loss_coef, .. } = &self.settings;
        let Experience { values, returns, .. } = &self.rows.samples[0];
        let needed = [("values", values), ("returns", returns)];
        let absent = needed.iter().find(|(_, numbers)| numbers.is_empty()).map(|(name, _)| *name);
        if let Some(name) = absent.or(self.rows.new_values.is_empty().then_some("new_values")) {
            return Err(missing(name));
        }
        let (parts, longest) = (self.parts(), config.rollout.response_tokens_max);
        let mut loss = 0.0;
        for part in &parts {
            let (totals, mut sum) = (totals(&self.rows.samples, part), 0.0);
            for &row in part {
                let (sample, values, mut weights) = (&self.rows.samples[row], &self.rows.new_values[row], Vec::new());
                aggregation::weights(*value_aggregation, &sample.mask, totals, longest, &mut weights);
                let mut slopes = vec![0.0; values.len()];
                let clip = config.ppo.value_clip;
                sum += value_loss(clip, values, &sample.values, &sample.returns, &weights, &mut slopes).loss;
            }
            loss += self.scale(*value_aggregation, part) * sum / parts.len() as f64;
        }
        Ok(value_loss_coef * loss)
    }
}

/// The learned tokens and the sequences of some rows.
fn totals(samples: &[Experience], rows: &[usize]) -> Totals {
    let mut totals = Totals::default();
    for row in rows {
        totals.add_mask(&samples[*row].mask);
    }
    totals
}

/// The terms of the policy's loss, each with coefficient 1; none without their inputs.
#[derive(Default)]
struct Terms {
    policy: f64,
    kl: Option<f64>,
    entropy: Option<f64>,
}

pub fn missing(tensor: &str) -> String {
    format!("the file has no {tensor}")
}
