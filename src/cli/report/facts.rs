//! The most important numbers of a run, and the use of its data rows.

use super::numbers::{short, unit_of};
use super::source::{Source, is_result, keys_of, title_of};
use super::text::{escape, put};
use crate::data::Ledger;
use crate::error::format_bytes;
use crate::metrics::adapter_ratios::{MatrixRatio, RoleRatios};
use crate::metrics::keys::{self, Unit};
use crate::metrics::{count, counted, duration, grouped, is_graded, number, percent};

/// The most important numbers of a run.
pub fn about(source: &Source, is_named: bool) -> String {
    let setting = |key: &str| source.config.get(key).map_or("", String::as_str);
    let mut out = String::from("<div class=\"about-run\">");
    if is_named {
        put!(out, "<h3>{}</h3>", escape(&source.name));
    }
    let words = [
        ("", setting("job.kind")),
        ("model ", setting("model.actor")),
        ("in ", &source.dir.to_string_lossy()),
        ("seed ", setting("job.seed")),
    ];
    let words = words.into_iter().filter(|(_, value)| !value.is_empty());
    put!(
        out,
        "<p class=\"sub\">{}</p><dl class=\"facts\">",
        words.map(|(name, value)| format!("{name}{}", escape(value))).collect::<Vec<_>>().join(" · ")
    );
    for (label, value) in facts(source) {
        put!(out, "<div><dt>{}</dt><dd>{}</dd></div>", escape(&label), escape(&value));
    }
    out + "</dl></div>\n"
}

fn facts(source: &Source) -> Vec<(String, String)> {
    let setting = |key: &str| source.config.get(key).map_or("", String::as_str);
    let values = |key: &str| source.values(key);
    let total = |key: &str| values(key).iter().sum::<f64>();
    let mut facts: Vec<(String, String)> = Vec::new();
    let mut put = |label: &str, value: Option<String>| facts.extend(value.map(|value| (label.to_string(), value)));
    let change = |key: &str| {
        let (values, unit) = (values(key), unit_of(key));
        let shown = |x: f64| if unit == Unit::Ratio { percent(x) } else { number(x) };
        let (first, last) = (*values.first()?, *values.last()?);
        Some(if values.len() > 1 { format!("{} → {}", shown(first), shown(last)) } else { shown(last) })
    };
    put("reward", change(keys::REWARD_MEAN));
    put("loss", change(keys::LOSS));
    let mut rewards = values(keys::EVAL_REWARD_MEAN).into_iter().zip(values(keys::EVAL_ACCURACY_GREEDY));
    let is_graded = rewards.any(|(reward, share)| is_graded(reward, share));
    put("held-out reward", change(keys::EVAL_REWARD_MEAN).filter(|_| is_graded));
    let results = keys_of(std::slice::from_ref(source)).into_iter().filter(|key| is_result(key));
    // Shares of correct answers mean something only if each reward is 0 or 1.
    let results = results.filter(|key| !(is_graded && unit_of(key) == Unit::Ratio));
    for key in results.filter(|key| unit_of(key) == Unit::Ratio || key == keys::EVAL_LOSS).take(2) {
        put(&format!("held-out {}", title_of(&key).to_lowercase()), change(&key));
    }
    let is_distilled = source.config.get("job.kind").is_some_and(|kind| kind == "distill");
    let other = if is_distilled { "teachers" } else { "reference" };
    put(&format!("KL to the {other}"), change(keys::KL_MEAN));
    put("margin", change(keys::MARGIN_MEAN));
    let of = source
        .config
        .get("job.steps")
        .filter(|steps| *steps != "0" && setting("job.kind") != "eval")
        .map_or(String::new(), |steps| format!(" of {steps}"));
    put("steps", Some(format!("{}{of}", grouped(source.step()))));
    let restarts = source.restarts().len();
    put("restarts", (restarts > 0).then(|| restarts.to_string()));
    let seconds = total(keys::TIME_STEP_S) + total(keys::EVAL_TIME_S);
    put("time in steps and evaluations", (seconds > 0.0).then(|| duration(seconds)));
    let tokens = total(keys::TOKENS);
    put("training tokens", (tokens > 0.0).then(|| count(tokens)));
    put("tokens/s, median", median(values(keys::TOKENS_PER_S)).map(count));
    put("share of peak FLOP/s, median", median(values(keys::MFU)).map(percent));
    let largest = |key: &str| values(key).into_iter().reduce(f64::max);
    let start = largest(keys::MEMORY_START_BYTES).unwrap_or(0.0);
    let peak = largest(keys::MEMORY_PEAK_BYTES).map(|peak| format_bytes((peak - start).max(0.0) as u64));
    let planned = largest(keys::MEMORY_PLANNED_BYTES).map(|planned| format_bytes(planned as u64));
    let label = planned.map_or("memory per rank".to_string(), |planned| format!("memory per rank ({planned} planned)"));
    put(&label, peak);
    facts
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// The number of adapters in the table of a model.
const ADAPTERS_MAX: usize = 10;

/// The adapters of a model that are largest relative to their matrices.
pub fn adapters(role: &RoleRatios) -> String {
    let mut out = String::from("<table class=\"rows\"><tr><th>matrix</th><th>ratio</th></tr>");
    let all = role.by_ratio();
    for MatrixRatio { name, ratio } in all.iter().take(ADAPTERS_MAX) {
        put!(out, "<tr><td>{}</td><td>{}</td></tr>", escape(name), number(*ratio));
    }
    let about = "The norm of the adapter's change of a matrix, divided by the norm of the frozen matrix";
    put!(out, "</table><p class=\"note\">{about}. The model has {}.</p>", counted(all.len(), "adapter"));
    out
}

/// The use of the data rows.
pub fn rows(ledger: &Ledger) -> String {
    let mut rows =
        vec![("trained".to_string(), ledger.trained), ("trained, truncated".to_string(), ledger.truncated.rows)];
    rows.extend(ledger.filtered.iter().map(|(rule, rows)| (format!("filtered: {rule}"), *rows)));
    let others = [("held out for evaluation", ledger.held_out), ("deferred: not used yet", ledger.deferred)];
    rows.extend(others.map(|(name, rows)| (name.to_string(), rows)));
    let mut out = String::from("<table class=\"rows\"><tr><th></th><th>rows</th><th></th></tr>");
    let whole = ledger.rows.max(1) as f64;
    for (name, rows) in rows.into_iter().filter(|(_, rows)| *rows > 0) {
        let share = rows as f64 / whole;
        let bar = format!(
            "<svg viewBox=\"0 0 100 8\" preserveAspectRatio=\"none\"><rect class=\"bar\" width=\"{}\" height=\"8\"/></svg>",
            short(share * 100.0, 4)
        );
        put!(out, "<tr><td>{}</td><td>{}</td><td>{bar}{}</td></tr>", escape(&name), grouped(rows), percent(share));
    }
    put!(out, "<tr><td>all</td><td>{}</td><td></td></tr></table>", grouped(ledger.rows));
    put!(
        out,
        "<p class=\"note\">{} prompts or demonstrations were used, including repeats in later epochs.</p>",
        grouped(ledger.handed_out)
    );
    if ledger.samples_dropped > 0 {
        let dropped = grouped(ledger.samples_dropped);
        put!(
            out,
            "<p class=\"note\">{dropped} samples were dropped, because a reward failed on them or on another sample of their prompt.</p>"
        );
    }
    if ledger.groups_dropped > 0 {
        let dropped = grouped(ledger.groups_dropped);
        put!(out, "<p class=\"note\">rollout.dynamic_sampling dropped the samples of {dropped} prompts.</p>");
    }
    out
}
