//! A training step on the layout of a job against one on a single rank, and the sampler against the trainer: with a
//! tiny model that has the kinds of layers of the job's actor.

use super::compare::exceeds;
use super::page::Check;
use super::replicas;
use super::saved;
use crate::comm::{Axes, records};
use crate::config::Config;
use crate::config::optim::OptimConfig;
use crate::config::rollout::RolloutConfig;
use crate::data::SftRow;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::experience::{Experience, Prompt};
use crate::launch::ranks::Ranks;
use crate::learn::packed::Tokens;
use crate::learn::{Learner, Role, score};
use crate::metrics::{Phases, keys};
use crate::model::collect::collect;
use crate::model::load::ModelFiles;
use crate::model::{Arch, Head};
use crate::rng::{Purpose, Rng};
use crate::rollout::{Engine, Hooks, requests};
use crate::sys::files::{parent, xxh3};
use crate::sys::memory;
use crate::tensor::DType;
use crate::train::methods::sft::CrossEntropy;
use crate::train::sampling::rollout_weights::RolloutWeights;
use std::path::Path;
use std::sync::Arc;

/// Lengths of the rows of the step.
const LENGTHS: [usize; 12] = [9, 33, 5, 64, 17, 3, 40, 21, 8, 55, 2, 30];
const TOKENS_MAX: usize = 128;
const PROMPTS: [usize; 3] = [5, 21, 40];
const NEW_TOKENS: usize = 12;

/// The largest relative difference of losses, gradient norms and updates in this dtype.
fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F32 { 1e-3 } else { 0.05 }
}

/// The results of a step on some layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Stepped {
    pub loss: f64,
    pub grad_norm: f64,
    /// All weights after it; empty on ranks that do not collect them.
    pub weights: Vec<f32>,
}

/// The settings of the checks.
pub struct Setting<'a> {
    pub config: &'a Config,
    pub ranks: &'a Ranks,
    pub device: Device,
    /// The directory of the tiny model.
    pub dir: &'a Path,
}

impl Setting<'_> {
    /// Runs all checks. All ranks call this.
    ///
    /// # Errors
    /// The errors of loading the tiny model, the same on all ranks.
    pub fn checks(&self) -> Result<Vec<Check>> {
        let all = &self.ranks.all;
        let arch = all.agree(Arch::load(self.dir))?;
        let (axes, layout) = (&self.ranks.axes, self.ranks.layout());
        let mut one = all.agree(self.learner(&arch, &Axes::one(), 0))?;
        let before = weights_of(&one.role, &Axes::one());
        let alone = Self::step(&mut one, &Axes::one())?;
        let mut checks = vec![self.same_on_all(&alone)?];
        drop(one);
        let fits = arch.check_tensor(layout.mesh.tensor.max(layout.rollout_tensor));
        let fits = fits.and_then(|()| arch.check_pipeline(layout.mesh.pipeline * layout.chunks));
        if let Err(error) = fits {
            checks.push(Check::skipped("sharded step", format!("the tiny model is too small: {}", error.message)));
            return Ok(checks);
        }
        let mut learner = all.agree(self.learner(&arch, axes, layout.zero))?;
        let sharded = Self::step(&mut learner, axes)?;
        checks.push(match axes.all.size() {
            1 => Check::skipped("sharded step", "one rank"),
            _ => compare(&sharded, &alone, &before, &layout.describe(), self.config.model.dtype()),
        });
        let wrong = replicas::distinct(all, &replicas::unlike_others(&learner.role.weights, axes)?)?;
        checks.push(replicas_check(&wrong, axes.all.size()));
        checks.push(self.sampler(&arch, &learner)?);
        let other = all.agree(self.allocated(&arch, axes, layout.zero))?;
        checks.push(saved::check(parent(self.dir), self.ranks, learner, other, |learner| {
            Self::step(learner, axes).map(drop)
        })?);
        Ok(checks)
    }

    /// A learner whose weights and state come from a checkpoint.
    fn allocated(&self, arch: &Arch, axes: &Axes, stage: usize) -> Result<Learner> {
        let dtype = self.config.model.dtype();
        let role = Role::allocate(self.device, "actor", &self.files(arch), None, dtype, axes, stage)?;
        Learner::new(self.device, role, &self.optim(), &self.config.gradient, 100, axes, stage)
    }

    /// With so large an eps the update is smooth in the gradient, so rounding errors stay small.
    fn optim(&self) -> OptimConfig {
        let actor = self.config.optim.actor.clone();
        OptimConfig { clip_norm: 0.0, eps: 1.0, lr: 0.1, warmup_ratio: 0.0, ..actor }
    }

    fn files<'a>(&'a self, arch: &'a Arch) -> ModelFiles<'a> {
        ModelFiles { dir: self.dir, adapter: None, arch, head: Head::LanguageModel }
    }

    fn role(&self, arch: &Arch, axes: &Axes, stage: usize) -> Result<Role> {
        Role::load(self.device, "actor", &self.files(arch), None, self.config.model.dtype(), 0, axes, stage)
    }

    fn learner(&self, arch: &Arch, axes: &Axes, stage: usize) -> Result<Learner> {
        let role = self.role(arch, axes, stage)?;
        Learner::new(self.device, role, &self.optim(), &self.config.gradient, 100, axes, stage)?.with_masters()
    }

    /// A step on the same rows on every layout.
    fn step(learner: &mut Learner, axes: &Axes) -> Result<Stepped> {
        let rows = rows(learner.role.arch().vocabulary);
        let count: usize = rows.iter().map(|row| row.tokens.len() - 1).sum();
        let weights = [1.0 / count as f32, 0.0];
        let objective = CrossEntropy { rows: rows.iter().map(|row| (row, weights)).collect() };
        let sums = learner.learn(axes, TOKENS_MAX, &[&objective])?;
        let loss = sums.get(keys::LOSS);
        Ok(Stepped { loss, grad_norm: learner.report.grad_norm, weights: weights_of(&learner.role, axes) })
    }

    /// Compares the steps that all ranks made alone: they are equal to the bit on any processor.
    fn same_on_all(&self, alone: &Stepped) -> Result<Check> {
        let mine = vec![xxh3(bytemuck::cast_slice(&alone.weights))];
        let hashes = records::gather(&self.ranks.all, &[mine])?;
        let host = |rank: usize| &self.ranks.world.hosts[rank];
        let wrong = replicas::outvoted(&hashes).into_iter().map(|(rank, _)| {
            format!(
                "rank {rank} ({}) computes another step than the other ranks: its processor or memory is faulty",
                host(rank)
            )
        });
        let wrong: Vec<String> = wrong.collect();
        let name = "step";
        if !alone.loss.is_finite() {
            return Ok(Check::failed(name, format!("the loss is {}", alone.loss)));
        }
        let every = if hashes.len() > 1 { format!("; {} ranks agree to the bit", hashes.len()) } else { String::new() };
        let text = || format!("loss {:.4}, gradient norm {:.4}{every}", alone.loss, alone.grad_norm);
        Ok(Check::of_faults(name, &wrong, text))
    }

    /// Samples with the weights of the rollout, and scores the tokens with those of training.
    fn sampler(&self, arch: &Arch, learner: &Learner) -> Result<Check> {
        if self.ranks.rollout_is_apart() {
            return Ok(Check::skipped("sampler", "the rollout has ranks of its own"));
        }
        let (all, axes, rollout) = (&self.ranks.all, &self.ranks.axes, &self.ranks.rollout_axes);
        let weights = all.agree(RolloutWeights::new(&learner.role, axes, rollout))?;
        let prompts: Vec<Prompt> = PROMPTS.iter().map(|len| prompt(*len, arch.vocabulary)).collect();
        let config = RolloutConfig {
            response_tokens_max: NEW_TOKENS,
            ignore_eos: true,
            graphs: false,
            kv_bytes_max: 0,
            ..RolloutConfig::default()
        };
        let gathered = weights.gather(&learner.role, &mut Phases::start());
        let sampled = (|| {
            let requests = requests(&prompts, &config, &Arc::default(), arch.context)?;
            let memory = memory::available_bytes() / 4 / self.ranks.world.local_size.max(1) as u64;
            let mut hooks = Hooks::default();
            let rng = Rng::new(7, Purpose::Sample);
            let outcome = Engine::new(&config, memory).generate(gathered.model(), rng, 0, &requests, &mut hooks)?;
            outcome.complete().ok_or_else(|| Error::fault("a response did not finish"))
        })();
        let responses = all.agree(sampled)?;
        drop(gathered);
        let samples: Vec<Experience> = prompts
            .iter()
            .zip(&responses)
            .map(|(prompt, response)| Experience {
                prompt: prompt.clone(),
                response: response.clone(),
                ..Experience::default()
            })
            .collect();
        let score = |role: &Role| {
            let tokens: Vec<Tokens> = samples.iter().map(Tokens::from_sample).collect();
            score::logprobs(role, axes, &tokens, 1.0, TOKENS_MAX).concat()
        };
        let trained = score(&learner.role);
        let sampled: Vec<f32> = responses.iter().flat_map(|response| response.logprobs.clone()).collect();
        let stale = all.agree(self.role(arch, axes, self.ranks.layout().zero))?;
        let before = score(&stale);
        let is_exact = self.device == Device::Cpu
            && rollout.tensor.size() == axes.tensor.size()
            && [axes.sequence.size(), axes.expert.size()] == [1, 1];
        Ok(sampler(&sampled, &trained, &before, is_exact, self.config.model.dtype()))
    }
}

/// Compares log-probabilities of the sampler with those of the trainer, and with those of the trainer before its last
/// step.
pub fn sampler(sampled: &[f32], trained: &[f32], before: &[f32], is_exact: bool, dtype: DType) -> Check {
    let name = "sampler";
    let gap = |other: &[f32]| {
        let gaps = sampled.iter().zip(other).map(|(a, b)| f64::from((a - b).abs()));
        gaps.fold(0.0, |most: f64, gap| if gap > most || gap.is_nan() { gap } else { most })
    };
    let (now, most) = (gap(trained), if is_exact { 0.0 } else { tolerance(dtype) });
    let n = sampled.len();
    if now <= most {
        let text = if now == 0.0 {
            "equal those of training to the bit".into()
        } else {
            format!("are within {now:.1e} of training's")
        };
        return Check::ok(name, format!("{n} log-probabilities of sampled tokens {text}"));
    }
    if gap(before) < now / 4.0 {
        return Check::failed(
            name,
            format!(
                "stale weights: the sampler has those before the last step (log-probabilities differ by {now:.1e})"
            ),
        );
    }
    Check::failed(name, format!("log-probabilities of sampled tokens differ from training's by {now:.1e}"))
}

/// Compares a step on several ranks with the one of a single rank that began with the weights `before`.
pub fn compare(sharded: &Stepped, alone: &Stepped, before: &[f32], layout: &str, dtype: DType) -> Check {
    let (name, most) = ("sharded step", tolerance(dtype));
    let relative = |a: f64, b: f64| (a - b).abs() / b.abs().max(1e-30);
    let mut gaps = vec![
        ("loss", relative(sharded.loss, alone.loss)),
        ("gradient norm", relative(sharded.grad_norm, alone.grad_norm)),
    ];
    // Updates of bf16 weights are mostly rounding. Only the first rank has all weights.
    if dtype == DType::F32 && !sharded.weights.is_empty() {
        let norm = |f: &dyn Fn(usize) -> f32| (0..before.len()).map(|i| f64::from(f(i)).powi(2)).sum::<f64>().sqrt();
        let gap = norm(&|i| sharded.weights[i] - alone.weights[i]);
        gaps.push(("update", gap / norm(&|i| alone.weights[i] - before[i]).max(1e-30)));
    }
    let wrong: Vec<String> = gaps
        .iter()
        .filter(|(_, gap)| exceeds(*gap, most))
        .map(|(what, gap)| format!("the {what} on {layout} differs by {gap:.1e} from that of one rank"))
        .collect();
    let largest = gaps.iter().map(|(_, gap)| *gap).fold(0.0, f64::max);
    Check::of_faults(name, &wrong, || format!("{layout}: loss, gradient and update of one rank (within {largest:.1e})"))
}

/// The check of replicas that differ, one sentence for each.
fn replicas_check(wrong: &[String], ranks: usize) -> Check {
    if ranks == 1 {
        return Check::skipped("replicas", "one rank");
    }
    let text = || "ranks with the same weights hold the same bits after the step".to_owned();
    Check::of_faults("replicas", wrong, text)
}

/// All weights, row-major in the order of the table, on the first rank of `axes`.
fn weights_of(role: &Role, axes: &Axes) -> Vec<f32> {
    let mut all = Vec::new();
    collect(role.arch(), &role.weights, axes, |_, rows| all.extend_from_slice(rows));
    all
}

fn token(vocabulary: usize, i: usize, at: usize) -> u32 {
    Rng::new(11, Purpose::Synthetic).below(vocabulary as u64, [i as u32, at as u32, 0, 0]) as u32
}

fn rows(vocabulary: usize) -> Vec<SftRow> {
    let row = |(i, len): (usize, &usize)| {
        let tokens: Vec<u32> = (0..*len).map(|at| token(vocabulary, i, at)).collect();
        SftRow { id: i as u64, mask: vec![1; tokens.len()], tokens, ..SftRow::default() }
    };
    LENGTHS.iter().enumerate().map(row).collect()
}

fn prompt(len: usize, vocabulary: usize) -> Prompt {
    Prompt {
        id: len as u64,
        tokens: (0..len).map(|at| token(vocabulary, 100 + len, at)).collect(),
        ..Prompt::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sampler_with_the_weights_before_the_step_is_named_stale() {
        let (now, before) = ([-1.0, -2.0, -3.0], [-1.1, -2.2, -2.9]);
        let check = |sampled: &[f32]| sampler(sampled, &now, &before, true, DType::F32);
        assert!(!check(&now).has_failed());
        assert!(check(&before).text.starts_with("stale weights: the sampler has those before the last step"));
        let other = check(&[-1.5, -2.0, -3.0]);
        assert!(other.has_failed() && !other.text.contains("stale"), "{other:?}");
        assert!(check(&[f32::NAN, -2.0, -3.0]).has_failed());
        assert!(!sampler(&[-1.0001, -2.0, -3.0], &now, &before, false, DType::F32).has_failed());
    }

    #[test]
    fn a_step_that_differs_from_one_rank_is_named_with_its_layout() {
        let alone = Stepped { loss: 2.0, grad_norm: 1.0, weights: vec![1.0, 2.0] };
        let before = [0.9, 2.1];
        let near = Stepped { loss: 2.00001, ..alone.clone() };
        assert!(!compare(&near, &alone, &before, "data 2", DType::F32).has_failed());
        let other = Stepped { weights: vec![1.0, 2.05], ..alone.clone() };
        let check = compare(&other, &alone, &before, "data 2, zero 1", DType::F32);
        assert!(check.text.starts_with("the update on data 2, zero 1 differs by 3.5e-1"), "{check:?}");
        assert!(!compare(&other, &alone, &before, "data 2", DType::Bf16).has_failed(), "bf16 rounds updates");
        assert!(compare(&Stepped { loss: f64::NAN, ..alone.clone() }, &alone, &before, "", DType::F32).has_failed());
    }
}
