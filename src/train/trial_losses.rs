//! The losses of the job itself, with its own settings, on a small model on a GPU: every derivative that the GPU makes is held to
//! the host's loss at the same log-probabilities, entropies and values. The loss itself is the host's on every device.

use super::batch::{PolicyBatch, ValueBatch, totals};
use super::losses::{CrossEntropy, PolicyLoss, Slopes, value_slopes};
use super::trial::{self, Pair, apart, numbers, within};
use super::update::Update;
use crate::comm::Axes;
use crate::config::Config;
use crate::config::job::JobKind;
use crate::config::ppo::PolicyLossKind;
use crate::device::cuda::{View, ViewMut};
use crate::error::{Error, Result};
use crate::experience::{Experience, Prompt, Response};
use crate::loss::value::value_loss;
use crate::model::{Gradients, Head};
use crate::ops::linear_logprob::TokenLoss;
use crate::tensor::{PerToken, Tensor};
use std::ops::Range;

/// f64 on both sides, rounded once: apart by the norm of the host's.
const SLOPES_APART: f64 = 1e-5;
/// Nats by which old, sampled and reference log-probabilities lie around those of the model: on both sides of all clips.
const LOG_RATIOS: [f32; 3] = [1.6, 1.2, 0.9];
/// Every so many tokens one is not learned from.
const MASKED: usize = 7;

/// Holds the losses of `config` on the GPU's model to the host's; `scored` is what the CPU's model makes of the row, and `hidden` its
/// hidden state.
///
/// # Errors
/// `Fault`, naming the loss and the derivative that differs.
pub fn compare(gpu: Pair, cpu: Pair, (hidden, scored): (&[f32], &[f32]), config: &Config) -> Result<()> {
    match (gpu.1.table.head(), config.job.kind) {
        (Head::Value, _) => value(gpu, scored, config),
        (Head::LanguageModel, JobKind::Ppo) => policy(gpu, cpu, hidden, config),
        (Head::LanguageModel, _) => cross_entropy(gpu),
    }
}

/// What a loss saw of a GPU's tokens, and what it made of them.
struct Recorded<'a> {
    loss: &'a mut dyn TokenLoss,
    ranges: Vec<Range<usize>>,
    /// Log-probabilities, entropies, and the derivatives by both.
    numbers: [Vec<f32>; 4],
}

impl TokenLoss for Recorded<'_> {
    fn on_host(&mut self, range: Range<usize>, l: &[f32], h: &[f32], dlogprobs: &mut [f32], dentropy: &mut [f32]) {
        self.loss.on_host(range, l, h, dlogprobs, dentropy);
    }

    fn on_gpu(&mut self, range: Range<usize>, l: View, h: View, mut dlogprobs: ViewMut, mut dentropy: ViewMut) {
        self.loss.on_gpu(range.clone(), l, h, dlogprobs.reborrow(), dentropy.reborrow());
        self.ranges.push(range);
        let read = [l, h, dlogprobs.as_view(), dentropy.as_view()];
        self.numbers.iter_mut().zip(read).for_each(|(all, part)| all.extend(part.to_f32()));
    }
}

/// Passes the head with `loss`, and holds its derivatives to those that `host`, the same loss, has on the host.
fn held(gpu: Pair, temperature: f32, what: &str, loss: &mut dyn TokenLoss, host: &mut dyn TokenLoss) -> Result<()> {
    let (model, w) = gpu;
    let row = trial::row(model.arch.vocabulary);
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
    let mut grads = Gradients::new(w.table.clone());
    let mut recorded = Recorded { loss, ranges: Vec::new(), numbers: Default::default() };
    let (_, scored) = model.loss_backward(w, &hidden, &row.rows, &row.targets, temperature, &mut recorded, &mut grads);
    let Recorded { ranges, numbers: [l, h, dlogprobs, dentropy], .. } = recorded;
    let told = scored.later().take();
    if told != [&l[..], &h].concat() {
        return Err(Error::fault(format!("{what} is of other log-probabilities than those that the head tells")));
    }
    let [mut a, mut b] = [(); 2].map(|()| vec![0.0; l.len()]);
    for range in ranges {
        let (a, b) = (&mut a[range.clone()], &mut b[range.clone()]);
        host.on_host(range.clone(), &l[range.clone()], &h[range], a, b);
    }
    for (by, got, want) in [("log-probabilities", dlogprobs, a), ("entropies", dentropy, b)] {
        within(|| format!("the derivative of {what} by {by}"), apart(&got, &want, 0.0), SLOPES_APART, "of its norm")?;
    }
    Ok(())
}

fn cross_entropy(gpu: Pair) -> Result<()> {
    let weight = 1.0 / trial::row(gpu.0.arch.vocabulary).rows.len() as f32;
    let [mut loss, mut host] = [(); 2].map(|()| CrossEntropy::new(weight));
    held(gpu, 1.0, "the cross-entropy", &mut loss, &mut host)
}

fn policy(gpu: Pair, (cpu, w): Pair, hidden: &[f32], config: &Config) -> Result<()> {
    let (ppo, drawn_at) = (&config.ppo, config.rollout.temperature);
    let temperature = if drawn_at > 0.0 { drawn_at } else { 1.0 };
    let row = trial::row(cpu.arch.vocabulary);
    let hidden = Tensor::from_slice(row.tokens.len(), cpu.arch.width, hidden);
    let logprobs = cpu.logprobs(w, &hidden, &row.rows, &row.targets, temperature, false).0;
    let samples = experience(cpu.arch.vocabulary, &logprobs);
    let samples: Vec<&Experience> = samples.iter().collect();
    let batch = PolicyBatch::new(config, &samples, totals(&samples));
    let what = format!("the policy loss ({:?})", ppo.loss).to_lowercase();
    if ppo.loss == PolicyLossKind::Gspo {
        let (model, w) = gpu;
        let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
        let (l, h) = model.logprobs(w, &hidden, &row.rows, &row.targets, temperature, true);
        let slopes = || {
            let update = Update { config, axes: &Axes::one(), kl_beta: ppo.kl_coef };
            Slopes::new(update.sequence_loss(&batch, &l, &h).1)
        };
        return held(gpu, temperature, &what, &mut slopes(), &mut slopes());
    }
    let [mut loss, mut host] = [(); 2].map(|()| PolicyLoss::new(ppo, ppo.kl_coef, &batch));
    held(gpu, temperature, &what, &mut loss, &mut host)
}

fn value((model, w): Pair, scored: &[f32], config: &Config) -> Result<()> {
    let samples = experience(model.arch.vocabulary, scored);
    let samples: Vec<&Experience> = samples.iter().collect();
    let batch = ValueBatch::new(&samples, totals(&samples));
    let row = &batch.row;
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
    let values = model.values_there(w, &hidden, &row.rows);
    let read = [&batch.old_values[..], &batch.returns, &batch.weights];
    let clip = config.ppo.value_clip;
    let mut dvalues = PerToken::scratch(hidden.device(), values.len());
    value_slopes(clip, values.slice(), read, dvalues.slice_mut());
    let (values, got) = (values.later().take(), dvalues.later().take());
    let mut want = vec![0.0; got.len()];
    value_loss(clip, &values, read[0], read[1], read[2], &mut want);
    within(|| "the derivative of the value loss".into(), apart(&got, &want, 0.0), SLOPES_APART, "of its norm")
}

/// A sample of each sequence of the row, of which the first token is the prompt; `scored` is what the CPU's model says of all others.
fn experience(vocabulary: usize, scored: &[f32]) -> Vec<Experience> {
    let mut first = 0;
    let of = |tokens: Vec<u32>| {
        let range = first..first + tokens.len() - 1;
        first = range.end;
        let around = |seed: usize, spread: f32| -> Vec<f32> {
            let offsets = numbers(seed).skip(range.start);
            scored[range.clone()].iter().zip(offsets).map(|(x, offset)| x + spread * offset).collect()
        };
        let plain = |seed: usize| -> Vec<f32> { numbers(seed).skip(range.start).take(range.len()).collect() };
        let [old, drawn, reference] = LOG_RATIOS;
        Experience {
            prompt: Prompt { tokens: tokens[..1].to_vec(), ..Prompt::default() },
            response: Response {
                tokens: tokens[1..].to_vec(),
                logprobs: around(21, old),
                sample_logprobs: around(22, drawn),
                ..Response::default()
            },
            ref_logprobs: around(23, reference),
            values: around(24, 1.0),
            advantages: plain(25),
            returns: around(26, 1.0),
            mask: range.map(|i| u8::from(i % MASKED != 2)).collect(),
            ..Experience::default()
        }
    };
    trial::sequences(vocabulary).map(of).collect()
}
