//! The text of a replay: what was computed, a table of arrays, a table of metrics, and the verdict.

use super::compare::{Array, Found, Pair, Spot};
use super::prepare::Prepared;
use super::table::{short, shown, table};
use crate::config::Config;
use crate::config::mesh::Auto;
use crate::launch::replay::Update;
use crate::metrics::{counted, keys, one_line};
use std::fmt::Write;

/// The measurements of an update in the table of updates.
const COLUMNS: [&str; 9] = [
    keys::POLICY_LOSS,
    keys::VALUE_LOSS,
    keys::LOSS,
    keys::CLIP_RATIO,
    keys::POLICY_KL,
    keys::ENTROPY,
    keys::GRAD_NORM_ACTOR,
    keys::GRAD_NORM_CRITIC,
    keys::GRAD_NORM,
];

/// The whole text.
pub fn text(prepared: &Prepared, found: &Found) -> String {
    let mut out = head(prepared, found);
    if !found.arrays.is_empty() {
        out.push('\n');
        table(
            &mut out,
            &["array", "numbers", "differ", "largest difference", "at"],
            found.arrays.iter().map(array_row),
        );
    }
    let changes = !prepared.changes_nothing();
    if changes && !found.arrays.is_empty() {
        out.push('\n');
        let row = |array: &Array| {
            pair_row(&Pair {
                key: format!("mean of {}", array.name),
                recorded: array.means()[0],
                here: array.means()[1],
            })
        };
        table(&mut out, &["array", "recorded", "with", "difference"], found.arrays.iter().map(row));
    }
    let here = if changes { "with" } else { "here" };
    out.push('\n');
    if let Some(update) = prepared.part() {
        let row = |(key, value): (&String, &f64)| vec![key.clone(), shown(*value)];
        let made = &found.updates[found.updates.len() - 1].metrics;
        table(&mut out, &[&format!("update {update}"), here], made.iter().map(row));
    } else {
        table(&mut out, &["metric", "recorded", here, "difference"], found.metrics.iter().map(pair_row));
        updates(&mut out, &found.updates);
    }
    out.push('\n');
    out + &verdict(prepared, found)
}

fn head(prepared: &Prepared, found: &Found) -> String {
    let Prepared { dir, step, recorded, with, .. } = prepared;
    let from = match prepared.after() {
        0 => "the models of the job".to_owned(),
        after => format!("the checkpoint of step {after}"),
    };
    let mut out = format!("step {step} of {} ({}), computed from {from}\n", dir.display(), recorded.kind());
    let (was, is) = (layout(recorded), layout(&found.here));
    let of_run = if was == is { "that of the run".to_owned() } else { format!("the run had {was}") };
    let _ = writeln!(out, "layout: {is} ({of_run})");
    if !with.is_empty() {
        let _ = writeln!(out, "with: {}", with.join(" "));
    }
    if let Some(then) = &prepared.other_settings {
        let _ =
            writeln!(out, "the run had other settings at this step than at its last start; --with takes them: {then}");
    }
    if prepared.keeps_scores {
        out.push_str("scores: those of the record, because Python, a service or an environment gave them\n");
    }
    out
}

/// `data 2, sequence 1, tensor 1, zero 1, f32 on cpu`, with pipeline stages if there are any.
fn layout(config: &Config) -> String {
    let mesh = &config.mesh;
    let (data, stages) = (("data", mesh.data), ("pipeline", mesh.pipeline));
    let axes = [data, stages, ("sequence", mesh.sequence), ("tensor", mesh.tensor), ("zero", mesh.zero)];
    let axes = axes.into_iter().filter(|axis| *axis != ("pipeline", Auto::Is(1)));
    let size = |size: Auto| if let Auto::Is(n) = size { n.to_string() } else { "auto".to_owned() };
    let axes: Vec<String> = axes.map(|(name, n)| format!("{name} {}", size(n))).collect();
    let [dtype, device] = [crate::config::name(&config.model.dtype), crate::config::name(&config.job.device)];
    format!("{}, {dtype} on {device}", axes.join(", "))
}

fn array_row(array: &Array) -> Vec<String> {
    let what = counted(array.count, if array.of_tokens { "token" } else { "sample" });
    let Some(spot) = &array.largest else {
        return vec![array.name.to_owned(), what, "none".to_owned(), String::new(), String::new()];
    };
    let most = format!("{} ({} and {})", short(array.most()), shown(spot.recorded), shown(spot.here));
    vec![array.name.to_owned(), what, array.differ.to_string(), most, place(array, spot)]
}

/// `row 17, sample 0, token 3 " the"`.
fn place(array: &Array, spot: &Spot) -> String {
    let mut text = format!("sample {} of the step (row {}, sample {})", spot.sample, spot.prompt_id, spot.number);
    if array.of_tokens {
        let _ = write!(text, ", token {} \"{}\"", spot.token, one_line(&spot.text));
    }
    text
}

fn pair_row(pair: &Pair) -> Vec<String> {
    let difference = if pair.is_equal() { "none".to_owned() } else { short(pair.difference()) };
    vec![pair.key.clone(), shown(pair.recorded), shown(pair.here), difference]
}

/// A row for each update, if there are several.
fn updates(out: &mut String, updates: &[Update]) {
    let Some(first) = updates.first().filter(|_| updates.len() > 1) else { return };
    // The measurements of both models, and of an actor that does not learn yet.
    let chosen = COLUMNS.iter().filter(|key| updates.iter().any(|made| made.metrics.contains_key(**key)));
    let has_actor = first.metrics.contains_key(keys::GRAD_NORM_ACTOR);
    let chosen: Vec<&str> = chosen.copied().filter(|key| !has_actor || *key != keys::GRAD_NORM).collect();
    let value = |made: &Update, key: &str| made.metrics.get(key).map_or_else(String::new, |x| shown(*x));
    let row = |(i, made): (usize, &Update)| {
        std::iter::once((i + 1).to_string()).chain(chosen.iter().map(|key| value(made, key))).collect()
    };
    let titles: Vec<&str> = std::iter::once("update").chain(chosen.iter().copied()).collect();
    out.push('\n');
    table(out, &titles, updates.iter().enumerate().map(row));
}

fn verdict(prepared: &Prepared, found: &Found) -> String {
    let (step, update) = (prepared.step, prepared.part());
    if !prepared.changes_nothing() {
        return format!("step {step} was computed with other settings; the record is not expected to be equal\n");
    }
    let all = [
        ("sample", found.samples),
        ("array", found.arrays.len()),
        ("metric", if update.is_some() { 0 } else { found.metrics.len() }),
    ];
    let all: Vec<String> = all.into_iter().filter(|(_, n)| *n > 0).map(|(what, n)| counted(n, what)).collect();
    let what = all.join(", ");
    let is_equal = found.arrays.iter().all(|array| array.differ == 0) && (update.is_some() || found.is_equal());
    match (is_equal, found.unexplained(prepared)) {
        (true, _) => format!("equal to the bit: step {step}, {what}\n"),
        (false, None) => format!("rounding explains all differences of step {step}: {what}\n"),
        (false, Some(names)) => format!("rounding does not explain these differences of step {step}: {names}\n"),
    }
}
