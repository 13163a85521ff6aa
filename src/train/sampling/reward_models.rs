//! Reward models and judges in the loop. A reward model scores the last token of prompt and response, on all ranks that
//! hold it.

use super::judges::Judge;
use crate::config::reward::{JudgeConfig, ModelRewardConfig, RewardConfig};
use crate::data::PromptSource;
use crate::error::{Error, Result};
use crate::experience::{Experience, Finish};
use crate::launch::run::Run;
use crate::learn::Role;
use crate::learn::packed::Tokens;
use crate::learn::score;
use crate::model::{Arch, Head};
use crate::reward::{Lookup, Scored};
use crate::text::Tokenizer;
use crate::train::models::JobModel;
use std::sync::Arc;

/// The reward models and judges of this rank.
pub struct RewardModels {
    models: Vec<RewardModel>,
    judges: Vec<Judge>,
}

struct RewardModel {
    role: Role,
    config: ModelRewardConfig,
    /// `None` if the model has the actor's tokenizer. Otherwise texts are tokenized again with this one.
    tokenizer: Option<Tokenizer>,
}

/// Rejects a reward model in place of a judge and vice versa, a model whose rows cannot be made, and a model whose
/// scores cannot be normalized.
pub fn check(config: &RewardConfig, JobModel { spec, arch }: &JobModel, actor: &Arch) -> Result<()> {
    let dir = spec.dir.display();
    let (key, what, hint) = match spec.head {
        Head::Value => (
            "reward.models",
            "must hold a reward model (got a language model)",
            "train a reward model with job.kind = \"reward_model\", or name this model in reward.judge",
        ),
        Head::LanguageModel => {
            ("reward.judge", "must hold a language model (got a reward model)", "name it in reward.models instead")
        }
    };
    if arch.head != spec.head {
        return Err(Error::data(format!("{key}: {dir} {what}")).hint(hint));
    }
    let [own, other] = [arch, actor].map(|arch| arch.vocabulary);
    if own != other && Tokenizer::find(&spec.dir)?.is_none() {
        let what = format!(
            "{key}: {dir} has a vocabulary of {own} tokens and no tokenizer, but model.actor has {other} tokens"
        );
        return Err(Error::data(what).hint("put the model's own tokenizer into its directory"));
    }
    let normalizes = config.models.iter().any(|model| model.dir == spec.dir && model.normalize);
    let is_known = arch.reward_mean_std.is_some_and(|(_, std)| std > 0.0);
    if spec.head == Head::Value && normalizes && !is_known {
        return Err(Error::data(format!("{key}: {dir}/config.json must have a mean and a positive std of its scores"))
            .hint("set normalize = false, or train the model with data.eval_split, which measures both"));
    }
    Ok(())
}

impl RewardModels {
    /// Takes the models from the `roles` of this rank, in the order of reward.models and reward.judge. A model with the
    /// actor's tokenizer reads the actor's tokens. All ranks call this.
    pub fn new(run: &Run, mut roles: Vec<Role>, actor: &Arc<Tokenizer>, source: &PromptSource) -> Result<Self> {
        let reward = &run.config.reward;
        let judges = roles.split_off(reward.models.len().min(roles.len()));
        let data = &run.config.data;
        let rows: (Lookup, _) = (Arc::new(source.lookup(data)), source.columns(data)?);
        let judge = |(i, (role, config)): (usize, (Role, &JudgeConfig))| {
            Judge::new(run, role, config, config.name(reward.models.len() + i), actor, &rows)
        };
        let judges = judges.into_iter().zip(&reward.judge).enumerate().map(judge).collect::<Result<_>>()?;
        let with_config = |(role, config): (Role, &ModelRewardConfig)| {
            Ok(RewardModel { role, config: config.clone(), tokenizer: actor.find_other(&config.dir)? })
        };
        let models = roles.into_iter().zip(&reward.models).map(with_config).collect::<Result<_>>()?;
        Ok(Self { models, judges })
    }

    /// Adds the weighted scores of `samples`. All ranks that hold the models call this.
    ///
    /// # Errors
    /// `Data` if a text is longer than a model's context. For judges see `Judge::score`.
    pub fn score(&mut self, run: &Run, samples: &[Experience], scored: &mut [Scored]) -> Result<()> {
        for (i, RewardModel { role, config, tokenizer }) in self.models.iter_mut().enumerate() {
            // Only the last token is scored, so all tokens count as prompt.
            let tokens: Vec<Vec<u32>> =
                samples.iter().map(|sample| tokens(sample, tokenizer.as_ref())).collect::<Result<_>>()?;
            let rows = samples.iter().zip(tokens).map(|(sample, tokens)| Tokens {
                prompt_tokens: tokens.len(),
                tokens: tokens.into(),
                masks: &[],
                images: sample.images(),
            });
            let rows: Vec<Tokens> = rows.collect();
            let (longest, context) = (rows.iter().map(|row| row.tokens.len()).max().unwrap_or(0), role.arch().context);
            if longest > context {
                let dir = config.dir.display();
                return Err(Error::data(format!(
                    "{dir}: a prompt with its response has {longest} tokens, but this reward model has a context of \
                     {context}"
                ))
                .hint("lower data.prompt_tokens_max or rollout.response_tokens_max"));
            }
            let (mean, std) = role.arch().reward_mean_std.filter(|_| config.normalize).unwrap_or((0.0, 1.0));
            run.onload(role);
            let found = score::values(role, &run.ranks.axes, &rows, run.config.ppo.microbatch_tokens_max);
            run.offload_weights(role);
            let name = config.name(i);
            for (scored, value) in scored.iter_mut().zip(found) {
                let score = (value[0] - mean) / std;
                scored.score += config.weight * score;
                scored.parts.insert(name.clone(), score);
            }
        }
        self.judges.iter_mut().try_for_each(|judge| judge.score(run, samples, scored))?;
        if run.config.reward.sources() > 1 {
            for Scored { parts, extra, .. } in scored {
                extra.extend(parts.iter().map(|(name, score)| (name.clone(), *score)));
            }
        }
        Ok(())
    }
}

/// Tokens of prompt and response. With another tokenizer, their texts are tokenized again, and its end token is added
/// if the response has one.
fn tokens(sample: &Experience, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
    let Some(tokenizer) = tokenizer else { return Ok(sample.tokens()) };
    if !sample.images().is_empty() {
        return Err(Error::data("a reward model that reads images needs the actor's tokenizer"));
    }
    let mut tokens = tokenizer.encode(&format!("{}{}", sample.prompt.text, sample.response.text), true)?;
    if sample.response.finish == Finish::Stop {
        tokens.extend(tokenizer.eos_ids().first());
    }
    Ok(tokens)
}
