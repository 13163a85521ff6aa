//! What another system may do differently: changes of the settings or the rows of a batch, each with its name.

use super::compute::Case;
use crate::advantage::details::{GroupStd, Whitening};
use crate::advantage::whitening;
use crate::config::method::ppo::{Aggregation, Correction, Estimator, KlEstimator, KlIn, PolicyLossKind};
use crate::config::name;

/// A change of a batch. Its text is the cause of a difference if the change removes it.
pub struct Change {
    pub text: String,
    pub apply: Box<dyn Fn(&mut Case)>,
}

fn change(text: impl Into<String>, apply: impl Fn(&mut Case) + 'static) -> Change {
    Change { text: text.into(), apply: Box::new(apply) }
}

/// All changes of a case, of which some have no effect.
pub fn all(case: &Case) -> Vec<Change> {
    [kl(case), masks(case), means(case), advantages(case), losses(case), temperatures(case)]
        .into_iter()
        .flatten()
        .collect()
}

fn kl(case: &Case) -> Vec<Change> {
    let ours = case.settings.config.ppo.kl_estimator;
    let estimators = [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3].into_iter().filter(|one| *one != ours);
    let mut found: Vec<Change> = estimators
        .map(|one| {
            let text = format!("KL estimator {} instead of {}", name(&one), name(&ours));
            change(text, move |case| case.settings.config.ppo.kl_estimator = one)
        })
        .collect();
    found.push(change("KL with policy and reference exchanged", |case| {
        for (i, sample) in case.rows.samples.iter_mut().enumerate() {
            std::mem::swap(&mut sample.response.logprobs, &mut sample.ref_logprobs);
            if let Some(logprobs) = case.rows.logprobs.get_mut(i) {
                logprobs.clone_from(&sample.response.logprobs);
            }
        }
    }));
    found.push(change("no KL (coefficient 0)", |case| case.settings.config.ppo.kl_coef = 0.0));
    let is_weighted = case.settings.config.ppo.kl_weighted;
    let text =
        if is_weighted { "KL in the loss not weighted by the ratio" } else { "KL in the loss weighted by the ratio" };
    found.push(change(text, move |case| case.settings.config.ppo.kl_weighted = !is_weighted));
    for kl_in in [KlIn::Reward, KlIn::Loss, KlIn::None] {
        let text = format!("KL in another place (ppo.kl_in = {:?} instead of {:?})", name(&kl_in), {
            name(&case.settings.config.ppo.kl_in)
        });
        found.push(change(text, move |case| case.settings.config.ppo.kl_in = kl_in));
    }
    found
}

fn masks(case: &Case) -> Vec<Change> {
    let shift = |left: bool| {
        move |case: &mut Case| {
            for sample in &mut case.rows.samples {
                let n = sample.mask.len();
                let from = |t: usize| if left { Some(t + 1).filter(|t| *t < n) } else { t.checked_sub(1) };
                sample.mask = (0..n).map(|t| from(t).map_or(0, |t| sample.mask[t])).collect();
            }
        }
    };
    let mut found = vec![
        change("mask shifted by one token to the left", shift(true)),
        change("mask shifted by one token to the right", shift(false)),
        change("the last token of each response (EOS) is masked", |case| without_end(case, false)),
    ];
    if !case.settings.end_tokens.is_empty() && !case.rows.lines.is_empty() {
        found.push(change("the end token (EOS) is masked", |case| without_end(case, true)));
    }
    found.push(change("padding is counted as response", |case| {
        case.rows.samples.iter_mut().for_each(|sample| sample.mask.fill(1));
    }));
    found
}

/// Masks the last token of each row, only if it is an end token if `known`.
fn without_end(case: &mut Case, known: bool) {
    let (rows, ends) = (&mut case.rows, &case.settings.end_tokens);
    for (i, sample) in rows.samples.iter_mut().enumerate() {
        let Some(last) = sample.mask.iter().rposition(|m| *m != 0) else { continue };
        let is_end = !known || {
            let line = &rows.lines[i];
            let at = line.columns.binary_search(&last).ok().map(|at| line.tokens[line.prompt_tokens + at]);
            at.is_some_and(|token| ends.contains(&token))
        };
        if is_end {
            sample.mask[last] = 0;
        }
    }
}

fn means(case: &Case) -> Vec<Change> {
    let named = |one: Aggregation| match one {
        Aggregation::Token => "token mean (ppo.aggregation = \"token\")",
        Aggregation::Sequence => "sequence mean (ppo.aggregation = \"sequence\")",
        Aggregation::SequenceSumFixed => "sum over a constant length (ppo.aggregation = \"sequence_sum_fixed\")",
    };
    let mut found = Vec::new();
    let all = [Aggregation::Token, Aggregation::Sequence, Aggregation::SequenceSumFixed];
    for (of, ours) in
        [("", case.settings.config.ppo.aggregation), (" of the value loss", case.settings.value_aggregation)]
    {
        for one in all.into_iter().filter(|one| *one != ours) {
            let text = format!("{}{of} instead of {}", named(one), named(ours));
            found.push(change(text, move |case| match of {
                "" => case.settings.config.ppo.aggregation = one,
                _ => case.settings.value_aggregation = one,
            }));
        }
    }
    let lengths = [
        (case.rows.samples[0].mask.len(), "sum over the columns of the batch as length"),
        (1, "sum over the tokens of a sequence, then a mean over sequences"),
    ];
    for (length, what) in lengths {
        let text = format!("{what} instead of {}", named(case.settings.config.ppo.aggregation));
        found.push(change(text, move |case| {
            case.settings.config.ppo.aggregation = Aggregation::SequenceSumFixed;
            case.settings.config.rollout.response_tokens_max = length;
        }));
    }
    let columns = case.rows.samples[0].mask.len();
    for (length, what) in [(columns, "a constant length"), (1, "nothing")] {
        let text = format!("sum over all tokens, divided by {what} and not by the sequences");
        found.push(change(text, move |case| {
            case.settings.config.ppo.aggregation = Aggregation::SequenceSumFixed;
            case.settings.config.rollout.response_tokens_max = length;
            case.settings.loss_sequences = Some(1.0);
        }));
    }
    let is_mean = case.settings.mean_of_microbatches;
    let text =
        if is_mean { "one mean instead of means of micro-batches" } else { "means of micro-batches, then their mean" };
    found.push(change(text, move |case| case.settings.mean_of_microbatches = !is_mean));
    found.push(change("the totals of this batch divide the loss", |case| {
        (case.settings.loss_tokens, case.settings.loss_sequences) = (None, None);
    }));
    found.push(change("value loss without the factor 1/2", |case| case.settings.value_loss_coef *= 2.0));
    found.push(change("value loss with another factor 1/2", |case| case.settings.value_loss_coef *= 0.5));
    found
}

fn advantages(case: &Case) -> Vec<Change> {
    let (ours, details) = (case.settings.config.ppo.advantage, case.settings.details);
    let whitenings = [
        (Whitening::None, "no whitening of advantages"),
        (Whitening::Population, "advantages whitened"),
        (Whitening::Sample, "whitening with the unbiased standard deviation"),
    ];
    let mut found: Vec<Change> = whitenings
        .into_iter()
        .map(|(one, text)| change(text, move |case| case.settings.details.whitening = one))
        .collect();
    let divides = case.settings.config.ppo.advantage_std;
    let text = if divides { "whitening without the division by the deviation" } else { "whitening with the division" };
    found.push(change(text, move |case| case.settings.config.ppo.advantage_std = !divides));
    let estimators =
        [Estimator::Grpo, Estimator::DrGrpo, Estimator::Rloo, Estimator::ReinforcePpBaseline, Estimator::ReinforcePp];
    for one in estimators.into_iter().filter(|one| *one != ours) {
        let text = match (ours, one) {
            (Estimator::Grpo, Estimator::DrGrpo) => "standard deviation of the group not divided by (dr-grpo)".into(),
            (Estimator::DrGrpo, Estimator::Grpo) => "divided by the standard deviation of the group (grpo)".into(),
            (_, one) => format!("estimator {} instead of {}", name(&one), name(&ours)),
        };
        found.push(change(text, move |case| case.settings.config.ppo.advantage = one));
    }
    let stds = [
        (GroupStd::Sample, "unbiased standard deviation of the group"),
        (GroupStd::Population, "population standard deviation of the group"),
        (GroupStd::Batch, "standard deviation of the whole batch"),
    ];
    for (one, text) in stds.into_iter().filter(|(one, _)| *one != details.group_std) {
        found.push(change(text, move |case| case.settings.details.group_std = one));
    }
    for epsilon in [1e-4, 1e-5, 1e-6, 1e-8, 1e-9, 0.0] {
        let text = format!("epsilon {epsilon:e} of the group's deviation instead of {:e}", details.group_epsilon);
        found.push(change(text, move |case| case.settings.details.group_epsilon = epsilon));
    }
    for bound in [f32::MAX, 10.0, 5.0, 1.0] {
        let text = if bound == f32::MAX { "scores not clipped".into() } else { format!("scores clipped to +-{bound}") };
        found.push(change(text, move |case| case.settings.config.ppo.reward_clip = [-bound, bound]));
    }
    found
}

fn losses(case: &Case) -> Vec<Change> {
    let ppo = &case.settings.config.ppo;
    let kinds = [
        (PolicyLossKind::Clip, "a clipped ratio for each token"),
        (PolicyLossKind::Gspo, "one ratio for each sequence (gspo)"),
        (PolicyLossKind::Cispo, "a clipped weight outside of the gradient (cispo)"),
        (PolicyLossKind::Sapo, "a gate instead of the clip (sapo)"),
    ];
    let mut found: Vec<Change> = kinds
        .into_iter()
        .filter(|(one, _)| *one != ppo.loss)
        .map(|(one, text)| change(text, move |case| case.settings.config.ppo.loss = one))
        .collect();
    found.push(change("no clipping of the ratio", |case| {
        (case.settings.config.ppo.clip_low, case.settings.config.ppo.clip_high) = (1.0, f32::MAX);
    }));
    found.push(change("dual clip off", |case| case.settings.config.ppo.dual_clip = 0.0));
    found.push(change("value clip off", |case| case.settings.config.ppo.value_clip = 0.0));
    found.push(change("no ratio: the old log-probabilities are the new ones", |case| {
        for (sample, logprobs) in case.rows.samples.iter_mut().zip(&case.rows.logprobs) {
            sample.response.logprobs.clone_from(logprobs);
        }
    }));
    found.push(change("advantages whitened again in the loss", |case| {
        let samples = &mut case.rows.samples;
        let learned = samples.iter().flat_map(|s| s.advantages.iter().zip(&s.mask).filter(|(_, m)| **m != 0));
        let (mean, std) = whitening::moments(learned.map(|(a, _)| f64::from(*a)).collect::<Vec<_>>().into_iter());
        whitening::whiten(true, mean, std, samples);
    }));
    for one in [Correction::None, Correction::Tis, Correction::Icepop, Correction::SequenceMask] {
        let text = format!("correction {:?} instead of {:?} (ppo.correction)", name(&one), name(&ppo.correction));
        found.push(change(text, move |case| case.settings.config.ppo.correction = one));
    }
    found.push(change("no entropy bonus", |case| case.settings.config.ppo.entropy_coef = 0.0));
    found
}

fn temperatures(case: &Case) -> Vec<Change> {
    let ours = case.settings.config.rollout.temperature;
    let one = |temperature: f32| {
        let text = format!("log-probabilities at temperature {temperature} instead of {ours}");
        change(text, move |case| case.settings.config.rollout.temperature = temperature)
    };
    [1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5].into_iter().filter(|t| *t != ours).map(one).collect()
}

/// A setting with a value on a scale, which is searched for.
pub struct Dial {
    pub text: &'static str,
    pub range: [f32; 2],
    pub get: fn(&Case) -> f32,
    pub set: fn(&mut Case, f32),
}

/// A dial of keys of `[ppo]`.
macro_rules! dial {
    ($text:literal, $range:expr, $first:ident $(, $other:ident)*) => {
        Dial {
            text: $text,
            range: $range,
            get: |case| case.settings.config.ppo.$first,
            set: |case, value| {
                case.settings.config.ppo.$first = value;
                $(case.settings.config.ppo.$other = value;)*
            },
        }
    };
}

pub const DIALS: &[Dial] = &[
    dial!("gamma", [0.0, 1.0], gamma),
    dial!("lambda", [0.0, 1.0], lambda),
    dial!("upper clipping range of the ratio", [0.0, 4.0], clip_high),
    dial!("lower clipping range of the ratio", [0.0, 1.0], clip_low),
    dial!("clipping range of the ratio", [0.0, 1.0], clip_high, clip_low),
    dial!("dual clip", [1.0, 11.0], dual_clip),
    dial!("value clip", [0.0, 2.0], value_clip),
    dial!("KL coefficient", [0.0, 1.0], kl_coef),
    dial!("entropy coefficient", [0.0, 0.1], entropy_coef),
];
