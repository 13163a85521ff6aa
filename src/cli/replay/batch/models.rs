//! The models of a batch: their forward passes, and the norms of their gradients.

use super::compute::{Case, Found, Known, missing};
use super::rows::{Line, Numbers, Quantity};
use crate::cli::rows;
use crate::comm::Axes;
use crate::config::job::GradientConfig;
use crate::config::method::ppo::Aggregation;
use crate::config::optim::OptimConfig;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::experience::{Experience, Prompt, Response};
use crate::learn::packed::Tokens;
use crate::learn::{Learner, Role, score};
use crate::model::load::ModelFiles;
use crate::model::{Arch, Head};
use crate::train::methods::update::Update;
use std::borrow::Cow;
use std::path::Path;

/// The models that are here. Each computes in f32 on the CPU.
pub struct Models {
    pub actor: Option<Learner>,
    pub reference: Option<Role>,
    pub critic: Option<Learner>,
    axes: Axes,
}

impl Models {
    pub fn open(actor: Option<&Path>, reference: Option<&Path>, critic: Option<&Path>) -> Result<Self> {
        let axes = Axes::one();
        let role = |name: &'static str, dir: &Path, head: Head| -> Result<Role> {
            let arch = Arch::load(dir)?;
            let files = ModelFiles { dir, adapter: None, arch: &arch, head };
            Role::load(Device::Cpu, name, &files, None, DType::F32, 0, &axes, 0)
        };
        let learner = |role: Role| -> Result<Learner> {
            let (optim, gradient) = (OptimConfig::with_lr(0.0), GradientConfig::default());
            Learner::new(Device::Cpu, role, &optim, &gradient, 1, &axes, 0)
        };
        let reference = reference.map(|dir| role("reference", dir, Head::LanguageModel)).transpose()?;
        let actor = actor.map(|dir| role("actor", dir, Head::LanguageModel).and_then(learner)).transpose()?;
        let critic = critic.map(|dir| role("critic", dir, Head::Value).and_then(learner)).transpose()?;
        Ok(Self { actor, reference, critic, axes })
    }

    /// Rejects tokens outside the vocabulary of a model, and rows longer than its context.
    pub fn check(&self, lines: &[Line], numbers: &[usize]) -> Result<()> {
        let learners = [&self.actor, &self.critic].into_iter().flatten().map(|learner| &learner.role);
        for role in learners.chain(&self.reference) {
            for (line, row) in lines.iter().zip(numbers) {
                rows::check(&line.tokens, role.arch())
                    .map_err(|e| e.within(format!("row {row} of input_ids, {} {}", role.name, role.dir.display())))?;
            }
        }
        Ok(())
    }

    /// Computes a quantity of a batch, by a model if one is needed.
    pub fn compute(&mut self, case: &Case, quantity: Quantity) -> Found {
        match quantity {
            Quantity::Logprobs | Quantity::RefLogprobs | Quantity::Values => self.forward(quantity, case),
            Quantity::GradNorm => self.grad_norm(case),
            Quantity::CriticGradNorm => self.critic_grad_norm(case),
            of_numbers => case.compute(of_numbers),
        }
    }

    /// Log-probabilities or values of each column that has a token.
    pub fn forward(&self, quantity: Quantity, case: &Case) -> Found {
        let role = match quantity {
            Quantity::RefLogprobs => self.reference.as_ref(),
            Quantity::Values => self.critic.as_ref().map(|critic| &critic.role),
            _ => self.actor.as_ref().map(|actor| &actor.role),
        };
        let role = role.ok_or("no model is given")?;
        let lines = lines(case)?;
        let tokens = |line: &'_ Line| Tokens {
            tokens: line.tokens.clone().into(),
            prompt_tokens: line.prompt_tokens,
            masks: &[],
            images: Cow::Borrowed(&[]),
        };
        let tokens: Vec<Tokens> = lines.iter().map(tokens).collect();
        let config = &case.settings.config;
        let most = config.ppo.microbatch_tokens_max;
        let mut found = match quantity {
            Quantity::Values => score::values(role, &self.axes, &tokens, most),
            _ => score::logprobs(role, &self.axes, &tokens, config.rollout.temperature, most),
        };
        // The value after the last token is of no column.
        found.iter_mut().zip(lines).for_each(|(values, line)| values.truncate(line.columns.len()));
        let spread = |(values, (line, sample)): (Vec<f32>, (&Line, &Experience))| {
            let mut row = vec![0.0; sample.mask.len()];
            line.columns.iter().zip(values).for_each(|(column, value)| row[*column] = value);
            row
        };
        Ok(Numbers::Tokens(found.into_iter().zip(lines.iter().zip(&case.rows.samples)).map(spread).collect()))
    }

    fn grad_norm(&mut self, case: &Case) -> Found {
        let actor = self.actor.as_mut().ok_or("no model is given")?;
        let samples = case.with_advantages(false)?;
        if samples[0].response.logprobs.is_empty() {
            return Err(missing("old_logprobs"));
        }
        case.check_correction()?;
        let norm = norm(actor, case, &samples, &self.axes)?;
        let all: Vec<usize> = (0..samples.len()).collect();
        Ok(Numbers::One(norm * case.scale(case.settings.config.ppo.aggregation_in_force(), &all)))
    }

    fn critic_grad_norm(&mut self, case: &Case) -> Found {
        let critic = self.critic.as_mut().ok_or("no critic is given")?;
        let samples = case.with_advantages(case.rows.samples[0].returns.is_empty())?;
        if samples[0].values.is_empty() {
            return Err(missing("values"));
        }
        if case.settings.value_aggregation != Aggregation::Token {
            return Err("a job's value loss is a mean over tokens".into());
        }
        let norm = norm(critic, case, &samples, &self.axes)?;
        let (all, settings): (Vec<usize>, _) = ((0..samples.len()).collect(), &case.settings);
        Ok(Numbers::One(norm * settings.value_loss_coef * case.scale(settings.value_aggregation, &all)))
    }
}

/// The norm of the gradient of a minibatch.
fn norm(learner: &mut Learner, case: &Case, samples: &[Experience], axes: &Axes) -> Known<f64> {
    if !case.has_one_mean() {
        return Err("a mean over micro-batches has no gradient here".into());
    }
    let trimmed: Vec<Experience> = lines(case)?.iter().zip(samples).map(|(line, sample)| trim(line, sample)).collect();
    let chosen: Vec<&Experience> = trimmed.iter().collect();
    let config = &case.settings.config;
    Update { config, axes, kl_beta: config.ppo.kl_coef, texts: &[] }.gradient(learner, &chosen);
    Ok(learner.measure(axes).0)
}

fn lines(case: &Case) -> Known<&[Line]> {
    if case.rows.lines.is_empty() { Err(missing("input_ids")) } else { Ok(&case.rows.lines) }
}

/// A sample with the tokens that the model reads, without padding.
fn trim(line: &Line, sample: &Experience) -> Experience {
    fn chosen<T: Copy>(columns: &[usize], all: &[T]) -> Vec<T> {
        if all.is_empty() { Vec::new() } else { columns.iter().map(|column| all[*column]).collect() }
    }
    let pick = |all: &[f32]| chosen(&line.columns, all);
    let (prompt, response) = line.tokens.split_at(line.prompt_tokens);
    Experience {
        prompt: Prompt { tokens: prompt.to_vec(), ..Prompt::default() },
        response: Response {
            tokens: response.to_vec(),
            logprobs: pick(&sample.response.logprobs),
            sample_logprobs: pick(&sample.response.sample_logprobs),
            ..sample.response.clone()
        },
        ref_logprobs: pick(&sample.ref_logprobs),
        values: pick(&sample.values),
        advantages: pick(&sample.advantages),
        returns: pick(&sample.returns),
        mask: chosen(&line.columns, &sample.mask),
        ..Experience::default()
    }
}

/// The error of a verb that needs a model which neither the file nor an option names.
pub fn no_tokens() -> Error {
    Error::data("the file has no input_ids, so no model can read its rows")
        .hint("leave out --model, --reference and --critic")
}
