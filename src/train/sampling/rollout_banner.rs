//! Rows of the banner of jobs that sample.

use crate::config::{self, Config};
use crate::launch::run::Run;
use crate::url::Url;

/// The rewards of a job: `number, style.py x 0.5, environment env.py`.
pub(super) fn rewards(Config { reward, .. }: &Config) -> String {
    let of_kind = |kind: &str, name: String| if name.starts_with(kind) { name } else { format!("{kind} {name}") };
    let joined = |urls: &[Url]| urls.iter().map(Url::to_string).collect::<Vec<_>>().join(" | ");
    let rules = reward.rule.iter().map(|rule| (config::name(&rule.kind), rule.weight));
    let python = reward.python.iter().map(|python| (python.file.clone(), python.weight));
    let http = reward.http.iter().map(|http| (joined(&http.url), http.weight));
    let models = reward.models.iter().enumerate().map(|(i, model)| (of_kind("model", model.name(i)), model.weight));
    let weighed = |(name, weight)| if weight == 1.0 { name } else { format!("{name} x {weight}") };
    let judges = reward.judge.iter().map(|judge| (of_kind("judge", judge.dir.display().to_string()), judge.weight));
    let environments = reward.environment.iter().map(|environment| {
        let files = environment.python.iter().map(|python| python.file.clone()).chain([joined(&environment.http)]);
        (format!("environment {}", files.collect::<String>()), environment.weight)
    });
    let all = rules.chain(python).chain(http).chain(models).chain(judges).chain(environments);
    all.map(weighed).collect::<Vec<_>>().join(", ")
}

/// Rows of the banner about the rollout.
pub(super) fn notes(run: &Run) -> Vec<(String, String)> {
    let old = match run.recomputes_old_logprobs() {
        true => Some("recomputed by a training forward pass (time_old_logprobs_s, sampler_gap_max)".to_string()),
        false if run.has_fast_gemm() => {
            Some("from sampling, not bit-identical with training (logprob_gap_max)".to_string())
        }
        false => None,
    };
    let layout = run.ranks.layouts_of_actor()[1];
    let (rollout, training) = (layout.rollout_tensor, layout.mesh.tensor);
    let tensor = (rollout != training).then(|| format!("tensor {rollout}, {training} in training"));
    let ahead = run.config.mesh.async_updates_max;
    let steps = if ahead == 1 { "1 step".to_string() } else { format!("{ahead} steps") };
    let lag = (ahead > 0).then(|| format!("samples with weights up to {steps} old, while other ranks learn"));
    let notes = [("old logprobs", old), ("decoding", run.decoding()), ("rollout", tensor), ("runs ahead", lag)];
    notes.into_iter().filter_map(|(name, text)| Some((name.to_string(), text?))).collect()
}
