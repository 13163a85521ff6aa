//! The inputs of a replay: what the run recorded, the checkpoint to begin from, and the settings.

use crate::checkpoint::{self, Checkpoint};
use crate::config::mesh::Auto;
use crate::config::method::ppo::{Estimator, OldLogprobs};
use crate::config::reward::RewardConfig;
use crate::config::{self, Config};
use crate::error::{Error, Result};
use crate::metrics::recorded::{self, RecordedStep};
use crate::metrics::{Line, jsonl};
use crate::train;
use std::path::{Path, PathBuf};

/// What the user asked for.
pub struct Asked<'a> {
    pub run: Option<&'a Path>,
    pub step: Option<u64>,
    pub update: Option<usize>,
    pub with: &'a [String],
}

/// A step to compute again.
pub struct Prepared {
    /// The run that recorded it.
    pub dir: PathBuf,
    pub step: u64,
    pub update: Option<usize>,
    /// The keys of --with.
    pub with: Vec<String>,
    /// The settings of the run, with the changes.
    pub config: Config,
    /// The settings of the run, with the values that it chose.
    pub recorded: Config,
    /// The line of the step in metrics.jsonl.
    pub line: Line,
    /// Whether the step has samples.
    pub has_samples: bool,
    pub keeps_scores: bool,
    /// The settings that the run had at this step and does not have now.
    pub other_settings: Option<String>,
    start: Option<Checkpoint>,
}

/// Keys that a replay cannot change, or tables of them, and why.
const FIXED: &[(&str, &str)] = &[
    ("rollout", "the samples are those of the record"),
    ("data", "the rows are those of the record"),
    ("job.seed", "the samples are those of the record"),
    ("job.kind", "the record is that of another kind of job"),
    ("model.actor", "the record and the checkpoint are those of this model"),
    ("model.adapter", "the record and the checkpoint are those of this model"),
    ("job.dir", "it has no effect on a step"),
    ("job.name", "it has no effect on a step"),
    ("job.export", "it has no effect on a step"),
    ("eval", "it has no effect on a step"),
    ("metrics", "it has no effect on a step"),
    ("checkpoint", "it has no effect on a step"),
    ("mesh.async_updates_max", "a replay samples nothing"),
];
/// Keys of these tables that a replay uses.
const FREE: &[&str] = &["checkpoint.changed_inputs"];
/// The keys of the layout.
const LAYOUT: [&str; 5] = ["data", "pipeline", "sequence", "tensor", "zero"];

/// Whether `key` is `table`, or in it.
fn is_in(key: &str, table: &str) -> bool {
    key.strip_prefix(table).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Reads the inputs of a replay on `ranks` ranks, and rejects what it cannot do. Nothing is written.
pub fn read(asked: &Asked, ranks: usize) -> Result<Prepared> {
    let usage = |what: &str| Error::usage(what.to_owned()).hint("for example `rlhf-hpc replay runs/a --step 10`");
    let dir = asked.run.ok_or_else(|| usage("replay needs a run directory"))?;
    let step = asked.step.filter(|step| *step > 0).ok_or_else(|| usage("replay needs --step, from 1"))?;
    if asked.update == Some(0) {
        return Err(usage("--update must be at least 1 (got 0)"));
    }
    let resolved = dir.join("config.resolved.toml");
    if !resolved.is_file() {
        return Err(Error::usage(format!(
            "{} is not the directory of a run: it has no config.resolved.toml",
            dir.display()
        ))
        .hint("pass the job.dir of a run"));
    }
    let dir = dir.canonicalize().map_err(|e| Error::io("resolve", dir, &e))?;
    let recorded = config::load(&resolved, &[])?;
    let keeps_scores = asks_services(&recorded.reward);
    refuse(asked.with, &recorded, keeps_scores)?;
    let weights =
        || recorded.reward.python.iter().map(|one| one.weight).chain(recorded.reward.http.iter().map(|one| one.weight));
    if keeps_scores && recorded.ppo.advantage == Estimator::Gdpo && weights().any(|weight| weight != 1.0) {
        return Err(Error::usage(
            "a replay of ppo.advantage = \"gdpo\" needs rewards of weight 1, if Python or a service scores",
        ));
    }
    if !recorded.uses().trains {
        return Err(Error::usage("an eval job has no steps to replay"));
    }
    let config = settings(&resolved, asked, ranks, &recorded, keeps_scores)?;
    let line = line_of(&dir, step)?;
    let has_samples = recorded.samples();
    let start = start_of(&dir, step)?;
    if has_samples {
        check_record(&dir, step, start.as_ref().map_or(0, |start| start.manifest.step))?;
    }
    let other_settings = if has_samples { other_settings(&dir, step)? } else { None };
    let (update, with) = (asked.update, asked.with.to_vec());
    Ok(Prepared { dir, step, update, with, config, recorded, line, has_samples, keeps_scores, other_settings, start })
}

impl Prepared {
    /// The directory of the checkpoint to begin from.
    pub fn checkpoint(&self) -> Option<&Path> {
        self.start.as_ref().map(|start| &*start.dir)
    }

    /// Whether the settings that decide results are those of the run. Another layout changes only the order of sums.
    pub fn changes_nothing(&self) -> bool {
        let is_layout = |item: &String| ["mesh.", "job.threads"].iter().any(|key| item.starts_with(key));
        self.with.iter().all(is_layout)
    }

    /// The update that is shown alone. Jobs without samples have one update in each step.
    pub fn part(&self) -> Option<usize> {
        self.update.filter(|_| self.has_samples)
    }

    /// The step after which the replay begins.
    pub fn after(&self) -> u64 {
        self.start.as_ref().map_or(0, |start| start.manifest.step)
    }
}

/// Whether scores come from services or a user's program. A replay calls neither, because they may answer otherwise.
fn asks_services(reward: &RewardConfig) -> bool {
    !reward.python.is_empty() || !reward.http.is_empty() || !reward.environment.is_empty()
}

/// Rejects changes that would change the samples, or that have no effect.
fn refuse(with: &[String], recorded: &Config, keeps_scores: bool) -> Result<()> {
    let of_scores =
        ("reward", "the scores are those of the record, because Python, a service or an environment gave them");
    let of_masks = ("ppo.mask_truncated", "the record has no mask of the truncated responses");
    let of_coefficient = ("ppo.kl_coef", "ppo.kl_target adjusts it from step to step");
    let fixed = FIXED
        .iter()
        .chain((recorded.ppo.kl_target > 0.0).then_some(&of_coefficient))
        .chain(keeps_scores.then_some(&of_scores));
    let fixed: Vec<_> = fixed.chain(recorded.ppo.mask_truncated.then_some(&of_masks)).collect();
    let wrong = |item: &String| {
        let key = item.split('=').next().unwrap_or_default().trim();
        let (_, why) = fixed.iter().find(|(table, _)| is_in(key, table)).filter(|_| !FREE.contains(&key))?;
        Some(Error::usage(format!("--with {key}: {why}")))
    };
    Error::all(with.iter().filter_map(wrong).collect())
}

/// The recorded line of a step.
fn line_of(dir: &Path, step: u64) -> Result<Line> {
    let path = dir.join("metrics.jsonl");
    let lines: Vec<Line> = jsonl::lines(&path)?.into_iter().filter(Line::is_of_step).collect();
    let steps: Vec<u64> = lines.iter().map(|line| line.step).filter(|step| *step > 0).collect();
    let found = lines.into_iter().rfind(|line| line.step == step);
    found.ok_or_else(|| match (steps.iter().min(), steps.iter().max()) {
        (Some(first), Some(last)) => {
            Error::usage(format!("step {step} is not in {}, which has steps {first} to {last}", path.display()))
        }
        _ => Error::data(format!("{} has no steps", path.display())),
    })
}

/// The newest checkpoint before `step` that does not contain a part of the updates of its next step; none if the
/// replay begins with the models of the job.
fn start_of(dir: &Path, step: u64) -> Result<Option<Checkpoint>> {
    let before = |checkpoint: &Checkpoint| checkpoint.manifest.step < step;
    for checkpoint in checkpoint::all(&dir.join("checkpoints")).into_iter().filter(before) {
        let has_work = checkpoint.manifest.state["run"]["has_work"] == true;
        if !has_work || !train::has_updates(&checkpoint.file("work.bin")?)? {
            return Ok(Some(checkpoint));
        }
    }
    Ok(None)
}

/// The settings of the start that recorded `step`, where those of the last start differ from them. They are known if
/// both starts have saved a checkpoint that is still there.
fn other_settings(dir: &Path, step: u64) -> Result<Option<String>> {
    let hash = RecordedStep::for_step(dir, step).config_hash()?;
    let all = checkpoint::all(&dir.join("checkpoints"));
    let Some(last) = all.first().filter(|last| last.manifest.config_hash != hash) else { return Ok(None) };
    let keys = |checkpoint: &Checkpoint| {
        let text = checkpoint.manifest.state["config"].as_str().unwrap_or_default();
        config::flat(&text.parse().unwrap_or_default())
    };
    let Some(then) = all.iter().find(|one| one.manifest.config_hash == hash) else {
        return Ok(Some("not known, because no checkpoint of them is there".to_owned()));
    };
    let now = keys(last);
    let is_used = |key: &str| !["job.dir", "job.name", "eval", "metrics", "checkpoint"].iter().any(|of| is_in(key, of));
    let then = keys(then).into_iter().filter(|(key, was)| is_used(key) && now.get(key) != Some(was));
    let named: Vec<String> = then.map(|(key, was)| format!("{key}={was}")).collect();
    Ok((!named.is_empty()).then(|| named.join(" ")))
}

/// Rejects a run that has not recorded the samples of `step`, or of a step between it and `start`.
fn check_record(dir: &Path, step: u64, start: u64) -> Result<()> {
    let known = recorded::steps(dir)?;
    let Some(missing) = (start + 1..=step).rev().find(|step| !known.contains(step)) else { return Ok(()) };
    let dir = dir.display();
    if known.is_empty() {
        return Err(Error::data(format!("{dir} has no rollouts.h5: the run recorded no samples"))
            .hint("set metrics.rollouts_every_steps = 1 in the job"));
    }
    if missing == step {
        let named: Vec<String> = known.iter().map(u64::to_string).collect();
        return Err(Error::usage(format!("the samples of step {step} are not recorded in {dir}")).hint(format!(
            "choose one of {} (set by metrics.rollouts_every_steps and metrics.rollouts_keep_last)",
            named.join(", ")
        )));
    }
    let from = if start == 0 { "the models of the job".to_owned() } else { format!("the checkpoint of step {start}") };
    Err(Error::data(format!(
        "step {step} needs the weights of step {}, and {dir} has only {from} before it; the samples of step {missing} \
         between them are not recorded",
        step - 1
    ))
    .hint("checkpoint.every_steps and checkpoint.keep_last keep more checkpoints, metrics.rollouts_every_steps = 1 all samples"))
}

/// The settings of the replay: those of the run with the changes.
fn settings(resolved: &Path, asked: &Asked, ranks: usize, recorded: &Config, keeps_scores: bool) -> Result<Config> {
    let mut config = config::load(resolved, asked.with)?;
    config.check()?;
    // A run of an older release does not list all keys, so all that it lists would count as given.
    let changed = config::parse(&recorded.to_toml(), asked.with)?;
    if let Some((why, keys)) = changed.unused_keys().into_iter().next() {
        let keys = keys.join(", ");
        return Err(Error::usage(format!("--with {keys}: it has no effect on this job, because it needs {why}")));
    }
    let is_given = |key: &str| asked.with.iter().any(|item| item.split('=').next().is_some_and(|k| k.trim() == key));
    let of_layout = LAYOUT.map(|name| is_given(&format!("mesh.{name}")));
    if of_layout.contains(&true) || ranks_of(recorded).is_some_and(|known| known != ranks) {
        let mesh = &mut config.mesh;
        let values = [&mut mesh.data, &mut mesh.pipeline, &mut mesh.sequence, &mut mesh.tensor, &mut mesh.zero];
        for ((value, name), given) in values.into_iter().zip(LAYOUT).zip(of_layout).filter(|(_, given)| !given) {
            *value = if ["pipeline", "sequence"].contains(&name) { Auto::Is(1) } else { Auto::Auto };
            debug_assert!(!given);
        }
        (config.rollout.data, config.rollout.tensor) = (Auto::Auto, Auto::Auto);
    }
    // The log-probabilities are computed again. A rollout that ran ahead had those of older weights.
    if recorded.mesh.async_updates_max == 0 && !is_given("ppo.old_logprobs") {
        config.ppo.old_logprobs = OldLogprobs::Recompute;
    }
    config.mesh.async_updates_max = 0;
    if keeps_scores {
        config.reward = RewardConfig::default();
    }
    let metrics = &mut config.metrics;
    (metrics.rollouts_every_steps, metrics.rollouts_keep_last, metrics.samples_every_steps) = (1, 0, 0);
    (metrics.tensorboard, metrics.report, config.job.export) = (false, false, false);
    config.checkpoint.max_hours = 0.0;
    config.given.clear();
    Ok(config)
}

/// The number of ranks of a run on one mesh.
fn ranks_of(config: &Config) -> Option<usize> {
    let mesh = &config.mesh;
    let sizes = [mesh.data, mesh.pipeline, mesh.sequence, mesh.tensor];
    let known = sizes.map(|size| if let Auto::Is(n) = size { Some(n) } else { None });
    known.into_iter().try_fold(1, |all, size| Some(all * size?)).filter(|_| mesh.placement.is_empty())
}
