//! Judges in the loop: language models that read prompt and response in a template and write a score, on all ranks that
//! hold them.

use super::rollout_weights::RolloutWeights;
use super::shares::{own_share, prompts_of};
use crate::comm::records;
use crate::config::reward::{JudgeConfig, OnFailure};
use crate::config::rollout::RolloutConfig;
use crate::device::null;
use crate::error::{Error, Kind, Result};
use crate::experience::{Experience, Prompt};
use crate::launch::run::Run;
use crate::learn::Role;
use crate::metrics::Phases;
use crate::reward::{Lookup, Scored};
use crate::rng::{Purpose, Rng};
use crate::rollout::{self, Engine, Hooks, Model, Stop};
use crate::text::Tokenizer;
use regex::{Captures, Regex};
use serde_json::{Map, Value, json};
use std::sync::{Arc, LazyLock};

/// A field of a row in a template.
static FIELD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\{(\w+)\}").expect("it compiles"));
/// A score, or the reason why there is none.
type Found = std::result::Result<f32, String>;
/// The maximum length of an answer without a score in an error message.
const TEXT_CHARS_MAX: usize = 200;

/// A judge on this rank.
pub struct Judge {
    role: Role,
    config: JudgeConfig,
    name: String,
    weights: RolloutWeights,
    engine: Engine,
    sampling: RolloutConfig,
    stop: Arc<Stop>,
    tokenizer: Arc<Tokenizer>,
    pattern: Regex,
    rows: Lookup,
    /// Whether this is a plan, which has no texts.
    is_planned: bool,
}

impl Judge {
    /// Opens the judge. `name`: the name of its scores. `columns`: the fields of the rows. All ranks that hold the
    /// judge call this.
    pub fn new(
        run: &Run,
        role: Role,
        config: &JudgeConfig,
        name: String,
        actor: &Arc<Tokenizer>,
        (rows, columns): &(Lookup, Vec<String>),
    ) -> Result<Self> {
        let known = |name: &str| ["prompt", "response", "label"].contains(&name) || columns.iter().any(|c| c == name);
        let unknown = FIELD.captures_iter(&config.prompt).map(|found| found[1].to_string()).find(|name| !known(name));
        let is_planned = null::is_active();
        if let Some(unknown) = unknown.filter(|_| !is_planned) {
            return Err(Error::usage(format!(
                "reward.judge.prompt has the field {{{unknown}}}, but rows have no such field"
            ))
            .hint(format!("use prompt, response, label, or one of the fields of the rows: {columns:?}")));
        }
        let sampling = RolloutConfig {
            samples_per_prompt: 1,
            response_tokens_max: config.tokens_max,
            ignore_eos: is_planned,
            batch_max: run.config.rollout.batch_max,
            prefill_tokens_max: run.config.rollout.prefill_tokens_max,
            kv_bytes_max: run.config.rollout.kv_bytes_max,
            graphs: run.config.rollout.graphs,
            temperature: 0.0,
            ..RolloutConfig::default()
        };
        let tokenizer = Tokenizer::find(&config.dir)?.map_or_else(|| Arc::clone(actor), Arc::new);
        Ok(Self {
            weights: RolloutWeights::new(&role, &run.ranks.axes, &run.ranks.rollout_axes)?,
            engine: Engine::new(&sampling, run.memory_free()),
            stop: Arc::new(Stop::of_model(&sampling, &role.arch().eos_tokens, Some(&tokenizer))),
            pattern: Regex::new(&config.pattern).map_err(|e| Error::usage(format!("reward.judge.pattern: {e}")))?,
            config: config.clone(),
            rows: Arc::clone(rows),
            role,
            name,
            sampling,
            tokenizer,
            is_planned,
        })
    }

    /// Adds the weighted scores of `samples`. For each, the judge writes a greedy answer, and the pattern finds a
    /// number in it. All ranks that hold the judge call this with the same samples.
    ///
    /// # Errors
    /// `Service` if an answer has no score, or if the judge's input exceeds its context, and `on_failure` is stop.
    /// `Stopped` if a rank was asked to stop meanwhile: the resumed run scores the samples again.
    pub fn score(&mut self, run: &Run, samples: &[Experience], scored: &mut [Scored]) -> Result<()> {
        let own = prompts_of(run, &(0..samples.len()));
        let found = own.clone().zip(self.answers(run, &samples[own])?).collect();
        let mine: Vec<(usize, Found)> = own_share(found, &run.ranks.rollout_axes.tensor);
        for (i, score) in records::gather(&run.ranks.axes.all, &mine)? {
            let scored = &mut scored[i];
            match score {
                Ok(score) => {
                    scored.score += self.config.weight * score;
                    scored.parts.insert(self.name.clone(), score);
                }
                Err(why) if run.config.reward.on_failure == OnFailure::Drop => {
                    scored.failed = scored.failed.take().or(Some(format!("{}: {why}", self.name)));
                }
                Err(why) => {
                    let (name, id) = (&self.name, samples[i].prompt.id);
                    return Err(Error::service(format!(
                        "reward.judge: \"{name}\" failed on a response to prompt {id}: {why}"
                    ))
                    .hint(
                        "check reward.judge.pattern, raise reward.judge.tokens_max for longer answers, or set \
                         reward.on_failure = \"drop\" to drop such responses",
                    ));
                }
            }
        }
        Ok(())
    }

    /// The judge's scores of this rank's `samples`. All ranks that hold it call this.
    fn answers(&mut self, run: &Run, samples: &[Experience]) -> Result<Vec<Found>> {
        let (all, context) = (&run.ranks.axes.all, self.role.arch().context);
        let prompts = samples.iter().map(|sample| self.prompt(sample)).collect::<Result<Vec<Prompt>>>();
        let prompts = all.agree(prompts)?;
        let lengths: Vec<usize> = prompts.iter().map(|prompt| prompt.tokens.len()).collect();
        let fits: Vec<Prompt> = prompts.into_iter().filter(|prompt| prompt.tokens.len() < context).collect();
        let requests = all.agree(rollout::requests(&fits, &self.sampling, &self.stop, context))?;
        run.onload(&mut self.role);
        if let Some(bytes) = run.cache_bytes() {
            self.engine.allow(bytes);
        }
        let gathered = self.weights.gather(&self.role, &mut Phases::start());
        let model = Model { tokenizer: Some(&self.tokenizer), ..gathered.model() };
        let mut hooks = Hooks { stop: Some(&|| run.stop_requested_here()), ..Hooks::default() };
        let rng = Rng::new(run.config.job.seed, Purpose::Sample);
        let outcome = self.engine.generate(model, rng, 0, &requests, &mut hooks);
        drop(gathered);
        self.engine.release();
        run.offload_weights(&mut self.role);
        let unfinished = || Error::new(Kind::Stopped, "stopped before the judge had scored all responses");
        let answers = outcome.and_then(|outcome| outcome.complete().ok_or_else(unfinished));
        let mut answers = all.agree(answers)?.into_iter();
        let found = lengths.into_iter().map(|length| match length < context {
            // A plan has no texts.
            true if self.is_planned => Ok(0.0),
            true => score(&self.pattern, &answers.next().expect("one a prompt").text),
            false => Err(format!("its input has {length} tokens, but its context is {context}")),
        });
        Ok(found.collect())
    }

    /// The filled template as the judge reads it.
    fn prompt(&self, sample: &Experience) -> Result<Prompt> {
        let Prompt { id, source, .. } = &sample.prompt;
        if self.is_planned {
            // Rows of a plan have only lengths. A token mostly has three bytes or more.
            let most = self.role.arch().context.saturating_sub(self.config.tokens_max).max(1);
            let tokens = sample.tokens().len() + self.config.prompt.len().div_ceil(3);
            return Ok(Prompt { id: *id, tokens: vec![0; tokens.min(most)], ..Prompt::default() });
        }
        let text = fill(&self.config.prompt, sample, &(self.rows)(*id)?.columns);
        let tokens = if self.config.chat_template {
            self.tokenizer.encode_chat(&json!([{ "role": "user", "content": text }]), &Map::new(), true)
        } else {
            self.tokenizer.encode(&text, true)
        };
        Ok(Prompt { id: *id, source: source.clone(), tokens: tokens?, ..Prompt::default() })
    }
}

/// The template filled with the fields of a sample and of its row. A field that the row lacks is empty.
fn fill(template: &str, sample: &Experience, columns: &Map<String, Value>) -> String {
    let value = |found: &Captures| match (&found[1], columns.get(&found[1])) {
        ("prompt", _) => sample.prompt.text.clone(),
        ("response", _) => sample.response.text.clone(),
        (_, Some(Value::String(text))) => text.clone(),
        (_, Some(value)) if !value.is_null() => value.to_string(),
        ("label", _) => sample.prompt.label.clone(),
        _ => String::new(),
    };
    FIELD.replace_all(template, value).into_owned()
}

/// The number in the first group of the pattern's last match, or in the whole match.
fn score(pattern: &Regex, answer: &str) -> Found {
    let found = pattern.captures_iter(answer).last();
    let found = found.and_then(|found| found.get(1).or_else(|| found.get(0)));
    let number = found.and_then(|found| found.as_str().trim().parse().ok()).filter(|x: &f32| x.is_finite());
    number.ok_or_else(|| {
        let shown: String = answer.chars().take(TEXT_CHARS_MAX).collect();
        format!("no score in its answer {shown:?}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::reward::JudgeConfig;

    #[test]
    fn a_template_is_filled_once_with_the_fields_of_a_row() {
        let mut sample = Experience::default();
        (sample.prompt.text, sample.prompt.label) = ("1+1=".into(), "2".into());
        sample.response.text = "{label} $0".into();
        let row = json!({ "level": 7, "prompt": "another", "hint": "add", "none": null });
        let template = r#"{"a": 1} {prompt}{response} {label} {level} {hint}{none}{missing}."#;
        let filled = fill(template, &sample, row.as_object().unwrap());
        assert_eq!(filled, r#"{"a": 1} 1+1={label} $0 2 7 add."#);
    }

    #[test]
    fn the_last_match_is_the_score_and_text_that_is_not_a_number_gives_none() {
        let default = Regex::new(&JudgeConfig::default().pattern).unwrap();
        for (pattern, answer, want) in [
            (&default, "Score: 3? No.\nscore: -7.5", Some(-7.5)),
            (&default, "It deserves 7", None),
            (&default, "", None),
            (&Regex::new("yes|no|[0-9]+").unwrap(), "4", Some(4.0)),
            (&Regex::new("yes|no|[0-9]+").unwrap(), "4 yes", None),
            (&Regex::new("[0-9]+").unwrap(), &"9".repeat(60), None),
        ] {
            assert_eq!(score(pattern, answer).ok(), want, "{pattern} in {answer:?}");
        }
    }
}
