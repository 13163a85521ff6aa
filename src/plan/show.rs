//! The plan as a table for people (100 columns), and an object for machines.

use super::choose::{Candidate, Choice, Placed};
use super::devices::Device;
use super::job::Job;
use super::memory::{KvCache, Phase, rank_of};
use super::rows::Origin;
use super::time::{Part, Stage, Time};
use crate::config;
use crate::config::job::Recompute;
use crate::config::mesh::RoleName;
use crate::data::RowTokens;
use crate::device::null::Peak;
use crate::error::format_bytes;
use crate::launch::layout::StateSwap;
use crate::mesh::Mesh;
use crate::metrics::{counted, grouped, wrapped};
use crate::model::ParamTable;
use serde_json::{Value, json};
use std::fmt::Write;

const WIDTH: usize = 100;
/// The columns of a part's name, to the left of its numbers.
const NAME: usize = 42;

/// The whole plan as text.
pub fn table(job: &Job, choice: &Choice, device: &Device, world: usize) -> String {
    let mut out = String::new();
    head(&mut out, job, choice, device, world);
    for placed in &choice.chosen.placed {
        memory(&mut out, choice, placed, device);
    }
    time(&mut out, job, choice, device);
    for placed in &choice.chosen.placed {
        arithmetic(&mut out, choice, placed);
    }
    others(&mut out, choice);
    out
}

fn line(out: &mut String, text: impl AsRef<str>) {
    out.push_str(text.as_ref().trim_end());
    out.push('\n');
}

fn rule(out: &mut String, title: &str) {
    line(out, "");
    line(out, format!("{title} {}", "-".repeat(WIDTH.saturating_sub(title.chars().count() + 1))));
}

/// Writes `lead` and text in lines of at most `WIDTH` columns. Lines after the first are indented by the length of
/// `lead`.
fn wrap(out: &mut String, lead: &str, text: &str) {
    let indent = lead.chars().count();
    for (i, text) in wrapped(text, WIDTH - indent).into_iter().enumerate() {
        let lead = if i == 0 { lead } else { "" };
        line(out, format!("{lead:<indent$}{text}"));
    }
}

fn head(out: &mut String, job: &Job, choice: &Choice, device: &Device, world: usize) {
    let config = job.config;
    let nodes = world.div_ceil(device.ranks_per_node);
    let (kind, name) = (config::name(&config.job.kind), &config.job.name);
    let each = world.min(device.ranks_per_node);
    wrap(out, "", &format!("{kind} job {name} on {} of {} ({nodes} x {each})", counted(world, "rank"), device.name));
    for (role, head, arch) in &job.archs.0 {
        let parameters = grouped(ParamTable::new(arch, *head).parameters() as u64);
        wrap(out, &format!("  {:<10} ", role.name()), &format!("{parameters} parameters, {}", arch.shape()));
    }
    images(out, job);
    if job.shape.has_rollout() && job.archs.find(RoleName::Reward).is_none() {
        line(out, "  reward     rules or services: no device memory and no device time");
    }
    step(out, job, choice);
    wrap(out, "  rows       ", &describe_rows(job));
    let [memory, link, network, host] = [device.memory, device.link, device.network, device.host].map(rate);
    let text = format!(
        "{}, {}; {memory} GB/s; ranks {link} GB/s, nodes {network} GB/s per rank, host {host} GB/s, one way",
        format_bytes(device.memory_bytes),
        describe_flops(device.flops)
    );
    wrap(out, "  device     ", &text);
    if !device.rates.is_empty() {
        wrap(out, "  rates      ", device.rates);
    }
    rule(out, "layout");
    wrap(out, "  ", &format!("{}: {}", describe_layout(&choice.chosen), choice.why));
    line(out, format!("  {} compared, {} fit", counted(choice.compared, "layout"), choice.fitting));
    if job.recomputes_logprobs(choice.chosen.layout()) {
        line(out, "  log-probabilities are recomputed before training (old_logprobs = \"recompute\")");
    }
}

/// Describes the images of rows and the tower that reads them.
fn images(out: &mut String, job: &Job) {
    let (rows, arch) = (&job.rows.drawn, job.archs.actor());
    let most = rows.iter().map(|row| row.images.tokens).max().unwrap_or(0);
    let Some(parameters) = arch.tower_parameters().filter(|_| most > 0) else { return };
    let does = if arch.sight.as_ref().is_some_and(|sight| sight.trains) { "trains" } else { "is frozen" };
    let (count, parameters) = (grouped(job.rows.images as u64), grouped(parameters as u64));
    let text =
        format!("{count} in all, up to {most} tokens in a row; the vision tower of {parameters} parameters {does}");
    wrap(out, "  images     ", &text);
}

fn step(out: &mut String, job: &Job, choice: &Choice) {
    let longest = job.rows.longest_row();
    let (prompt, response) = job.rows.mean();
    let samples = grouped(job.shape.samples() as u64);
    let step = match (job.shape.has_rollout(), job.rows.are_alike()) {
        (true, true) => format!("{samples} samples of {} + {} tokens", longest.prompt, longest.response),
        (true, false) => format!("{samples} samples of {prompt:.0} + {response:.0} tokens on average"),
        (false, true) => format!("{samples} rows of {} tokens", longest.all()),
        (false, false) => format!("{samples} rows of {:.0} tokens on average", prompt + response),
    };
    if job.shape.trained == 0 {
        let (prompts, dtype) = (grouped(job.shape.rows as u64), job.config.model.dtype().name());
        return wrap(
            out,
            "  step       ",
            &format!("{step}, greedy and sampled responses to {prompts} prompts; {dtype}"),
        );
    }
    let batch = job.fullest(&choice.chosen.layout().mesh);
    let batch = if job.rows.are_alike() {
        format!("micro-batches of {} rows", batch.rows)
    } else {
        format!("micro-batches of at most {} tokens", grouped(batch.tokens as u64))
    };
    let (updates, minibatch, dtype) = (job.shape.updates(), job.shape.minibatch, job.config.model.dtype().name());
    let again = match choice.recompute {
        Recompute::Auto | Recompute::None => "",
        Recompute::Attention => ", attention recomputed",
        Recompute::Block => ", recomputed",
    };
    wrap(
        out,
        "  step       ",
        &format!("{step}, {} of {minibatch}; {batch}; {dtype}{again}", counted(updates, "update")),
    );
}

/// Describes the source of the lengths of rows.
fn describe_rows(job: &Job) -> String {
    let rows = &job.rows.drawn;
    let range = |of: fn(&RowTokens) -> usize| {
        let (least, most) = (rows.iter().map(of).min().unwrap_or(0), rows.iter().map(of).max().unwrap_or(0));
        if least == most { format!("{most} tokens") } else { format!("{least} to {most} tokens") }
    };
    let (what, lengths) =
        if job.shape.has_rollout() { ("prompts", range(|row| row.prompt)) } else { ("rows", range(|row| row.all())) };
    let read = match &job.rows.origin {
        Origin::Longest(why) if why.is_empty() => "all counted as the longest that the job allows".into(),
        Origin::Longest(why) => {
            format!("all counted as the longest that the job allows, because lengths could not be read: {why}")
        }
        Origin::Given => "lengths from the command line".into(),
        Origin::Drawn => format!("lengths of the first {} {what} of the job: {lengths}", rows.len()),
        Origin::Sampled => format!("lengths of {} {what} spread over the job's data: {lengths}", rows.len()),
    };
    let responses = range(|row| row.response);
    if job.expected().is_some() {
        let expected = job.config.rollout.response_tokens_expected;
        let from = &job.rows.expected_from;
        let from = if from.is_empty() { "rollout.response_tokens_expected" } else { from };
        return format!(
            "{read}; responses of {expected} tokens are expected ({from}): the time is theirs, and the memory is that of \
             the longest, {responses}"
        );
    }
    if !job.shape.has_rollout() || matches!(job.rows.origin, Origin::Longest(_) | Origin::Given) {
        return read;
    }
    if job.rows.responses_are_given {
        return format!("{read}; responses from the command line: {responses}");
    }
    format!(
        "{read}; response lengths are not known in advance, so all count as the longest: {responses} \
         (set others with rollout.response_tokens_expected or --response-tokens)"
    )
}

fn describe_layout(candidate: &Candidate) -> String {
    if let [one] = &candidate.placed[..] {
        return one.layout.describe();
    }
    let parts = candidate.placed.iter().map(|placed| {
        let roles: Vec<&str> = placed.roles.iter().map(|role| role.name()).collect();
        format!("{} on {}..{}: {}", roles.join(" and "), placed.ranks.start, placed.ranks.end, placed.layout.describe())
    });
    parts.collect::<Vec<_>>().join("; ")
}

/// Units of 1e9, with at least two digits.
fn rate(amount: f64) -> String {
    let giga = amount / 1e9;
    if giga >= 10.0 { format!("{giga:.0}") } else { format!("{giga:.1}") }
}

fn describe_flops(flops: f64) -> String {
    if flops >= 1e12 { format!("{} TFLOP/s", rate(flops / 1e3)) } else { format!("{} GFLOP/s", rate(flops)) }
}

fn gib(bytes: usize) -> String {
    let digits = if bytes >= 10 << 20 { 2 } else { 4 };
    if bytes == 0 { String::new() } else { format!("{:.digits$}", bytes as f64 / f64::from(1 << 30)) }
}

/// The ranks of `placed`, if there are several parts.
fn ranks_of(choice: &Choice, placed: &Placed, word: &str) -> String {
    let several = choice.chosen.placed.len() > 1;
    if several { format!(" {word} ranks {}..{}", placed.ranks.start, placed.ranks.end) } else { String::new() }
}

fn memory(out: &mut String, choice: &Choice, placed: &Placed, device: &Device) {
    let whose = ranks_of(choice, placed, "on");
    rule(out, &format!("memory of a rank{whose}, GiB in use at the peak of each phase"));
    let memory = &placed.memory;
    let mut row = |name: &str, cell: &dyn Fn(Phase) -> String| {
        let cells = Phase::ALL.map(|phase| format!("{:>10}", cell(phase)));
        line(out, format!("{name:<32} {}", cells.join(" ")));
    };
    row("tensor", &|phase| phase.name().to_string());
    let mut owners: Vec<&str> = memory.peaks.values().flat_map(|peak| peak.parts.keys().copied()).collect();
    owners.sort_by_key(|owner| (rank_of(owner), *owner));
    owners.dedup();
    for owner in owners {
        row(owner, &|phase| gib(memory.bytes_of(phase, owner)));
    }
    row("all", &|phase| gib(memory.peaks.get(&phase).map_or(0, |peak| peak.bytes)));
    let (phase, peak) = memory.peak();
    let mut text = format!(
        "peak {} in {}, {:.0} % of {}",
        format_bytes(peak.bytes as u64),
        phase.name(),
        100.0 * peak.bytes as f64 / memory.limit as f64,
        format_bytes(memory.limit)
    );
    if memory.resident > peak.bytes {
        let _ = write!(text, "; resident with memory kept for reuse: {}", format_bytes(memory.resident as u64));
    }
    wrap(out, "", &text);
    if !memory.stages.bytes.is_empty() {
        let of = |(i, bytes): &(usize, f64)| format!("stage {i} {}", format_bytes(*bytes as u64));
        let all: Vec<String> = memory.stages.bytes.iter().map(of).collect();
        wrap(out, "", &format!("the table has the fullest stage: {}", all.join(", ")));
        let of = |(i, seconds): &(usize, f64)| format!("stage {i} {seconds:.3} s");
        let all: Vec<String> = memory.stages.seconds.iter().map(of).collect();
        wrap(out, "", &format!("a step without the wait for other stages: {}", all.join(", ")));
    }
    if let Some(kv) = memory.kv {
        let KvCache { token_bytes, samples, at_once, batches, bytes_wanted, .. } = kv;
        let (token_bytes, plural) = (grouped(token_bytes as u64), if batches == 1 { "" } else { "es" });
        let text = format!(
            "kv cache: {token_bytes} bytes per token; {at_once} of {samples} samples at once, {batches} batch{plural}; \
             all at once would take {}",
            format_bytes(bytes_wanted as u64)
        );
        wrap(out, "", &text);
    }
    if let Some(KvCache { samples, at_once, batches, .. }) = memory.kv_expected {
        let plural = if batches == 1 { "" } else { "es" };
        line(
            out,
            format!("with the expected lengths: {at_once} of {samples} samples at once, {batches} batch{plural}"),
        );
    }
    if memory.host > 0 {
        let what = if device.is_cpu() { "memory-mapped files" } else { "pinned host memory" };
        let ranks = placed.ranks.len().min(device.ranks_per_node);
        let [each, all] = [memory.host, memory.host * ranks].map(|bytes| format_bytes(bytes as u64));
        line(out, format!("{what}: up to {each} per rank, {all} for the {ranks} in a node"));
    }
}

fn time(out: &mut String, job: &Job, choice: &Choice, device: &Device) {
    let chosen = &choice.chosen;
    let how = if device.is_cpu() { "measured here" } else { "declared" };
    rule(out, &format!("seconds of a step, with peaks and efficiencies {how}"));
    line(out, format!("{:<24} {:>12} {:>12} {:>8}", "phase", "floor", "predicted", "share"));
    let whole = chosen.step_s();
    for stage in Stage::ALL {
        let seconds = chosen.seconds_of(stage);
        if seconds == 0.0 && matches!(stage, Stage::Swapping | Stage::Bubble) {
            continue;
        }
        let floor = chosen.floor_of(stage);
        line(out, format!("{:<24} {:>12.3} {:>12.3} {:>6.0} %", stage.name(), floor, seconds, 100.0 * seconds / whole));
    }
    if let Some((seconds, floors)) = chosen.sides(Time::of_stage).zip(chosen.sides(Time::floor_of)) {
        for (side, (seconds, floor)) in ["rollout ranks", "other ranks"].iter().zip(seconds.iter().zip(floors)) {
            line(out, format!("{side:<24} {floor:>12.3} {seconds:>12.3} {:>6.0} %", 100.0 * seconds / whole));
        }
    }
    let tokens = chosen.main().time.tokens as f64;
    let (floor, speed) = (chosen.floor_s(), tokens / whole);
    line(out, format!("{:<24} {floor:>12.3} {whole:>12.3}          {speed:.0} tokens/s", "step"));
    for text in uncounted(job, chosen) {
        wrap(out, "", &text);
    }
}

/// The seconds that steps take in addition to the predicted ones, and the stages that overlap.
fn uncounted(job: &Job, chosen: &Candidate) -> Vec<String> {
    let (mut all, config) = (Vec::new(), job.config);
    if chosen.runs_ahead {
        all.push(
            "a step takes as long as the longer side, because the rollout runs ahead while other ranks learn".into(),
        );
    }
    let dynamic = &config.rollout.dynamic_sampling;
    if job.shape.has_rollout() && dynamic.is_on() {
        let (wanted, most) = (job.shape.rows, dynamic.prompts_max_factor * job.shape.rows);
        all.push(format!(
            "dynamic sampling: one round of {wanted} prompts is counted; each further round adds up to {:.3} s, and a \
             step may take up to {most} prompts",
            chosen.round_s()
        ));
    }
    let every = config.eval.every_steps;
    if every > 0 && job.shape.trained > 0 {
        let (rows, seconds) = (job.rows.evaluated.len(), chosen.evaluation_s());
        let steps = if every == 1 { "step".to_string() } else { format!("{every} steps") };
        all.push(match rows {
            0 => format!("evaluations, every {steps}, are not counted: their rows are not known"),
            _ => format!("evaluations are not counted: each adds {seconds:.3} s, every {steps}"),
        });
    }
    all
}

fn amount(value: f64, unit: &str) -> String {
    let scales = [(1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")];
    let (scale, prefix) = scales.into_iter().find(|(scale, _)| value >= *scale).unwrap_or((1e3, "k"));
    if value == 0.0 { "-".into() } else { format!("{:.1} {prefix}{unit}", value / scale) }
}

fn arithmetic(out: &mut String, choice: &Choice, placed: &Placed) {
    let whose = ranks_of(choice, placed, "of");
    rule(out, &format!("arithmetic{whose}, one rank: amount / peak = floor; / efficiency = busy; - hidden = seconds"));
    let titles = format!("{:>10} {:>9} {:>12} {:>5} {:>8} {:>8}", "FLOPs", "bytes", "peak", "eff.", "busy s", "s");
    line(out, format!("{:<42} {titles}", "part"));
    for part in &placed.time.parts {
        let Part { stage, name, work, bound, peak, efficiency, busy_s, seconds, .. } = part;
        let peak = if *bound == "stages" {
            "-".to_string()
        } else if *bound == "flops" {
            describe_flops(*peak)
        } else {
            format!("{} GB/s", rate(*peak))
        };
        let (flops, bytes) = (amount(work.flops, ""), amount(work.bytes, "B"));
        let mut name = format!("{}: {name}", short(*stage));
        if name.chars().count() > NAME {
            // Its numbers are on the next line.
            line(out, std::mem::take(&mut name));
        }
        let numbers = format!("{flops:>10} {bytes:>9} {peak:>12} {efficiency:>5.2} {busy_s:>8.3} {seconds:>8.3}");
        line(out, format!("{name:<42} {numbers}"));
    }
}

fn short(stage: Stage) -> &'static str {
    match stage {
        Stage::Exposed => "comm",
        Stage::Bubble => "bubble",
        Stage::Swapping => "host",
        Stage::Scoring => "score",
        Stage::Training => "train",
        other => other.name(),
    }
}

fn others(out: &mut String, choice: &Choice) {
    if choice.runners_up.is_empty() {
        return;
    }
    rule(out, "runners-up");
    for other in &choice.runners_up {
        let seconds = if other.candidate.fits() { format!("{:.1} s", other.candidate.step_s()) } else { "-".into() };
        let peak = format_bytes(other.candidate.fullest().memory.peak().1.bytes as u64);
        let layout = other.candidate.layout().describe();
        wrap(out, &format!("{seconds:>10} {peak:>11}  "), &format!("{layout}: {}", other.why));
    }
}

// ---- for machines ----

/// The whole plan as an object.
pub fn object(job: &Job, choice: &Choice, device: &Device, world: usize) -> Value {
    json!({
        "job": job.config.job.name, "kind": config::name(&job.config.job.kind), "ranks": world,
        "device": device_object(device),
        "rows": rows_object(job),
        "chosen": candidate(&choice.chosen), "why": choice.why,
        "compared": choice.compared, "fitting": choice.fitting,
        "runners_up": choice.runners_up.iter().map(|other| {
            let mut object = candidate(&other.candidate);
            object["why"] = json!(other.why);
            object
        }).collect::<Vec<_>>(),
    })
}

fn rows_object(job: &Job) -> Value {
    let (longest, (prompt, response)) = (job.rows.longest_row(), job.rows.mean());
    let (counted, why) = match &job.rows.origin {
        Origin::Longest(why) => ("longest", why.as_str()),
        Origin::Given => ("given", ""),
        Origin::Drawn => ("drawn", ""),
        Origin::Sampled => ("sampled", ""),
    };
    json!({
        "counted": counted, "why": why, "read": job.rows.drawn.len(), "samples": job.shape.samples(),
        "prompt": longest.prompt, "response": longest.response, "prompt_mean": prompt, "response_mean": response,
        "response_expected": job.expected().map(|_| job.config.rollout.response_tokens_expected),
        "response_expected_from": job.rows.expected_from,
    })
}

fn device_object(device: &Device) -> Value {
    json!({
        "name": device.name, "memory_bytes": device.memory_bytes, "flops": device.flops,
        "attention_flops": device.attention_flops, "memory_bytes_per_s": device.memory,
        "link_bytes_per_s": device.link, "network_bytes_per_s": device.network, "host_bytes_per_s": device.host,
        "ranks_per_node": device.ranks_per_node, "rates": device.rates,
    })
}

fn candidate(candidate: &Candidate) -> Value {
    let seconds =
        |of: &dyn Fn(Stage) -> f64| -> Value { Stage::ALL.map(|stage| (key(stage), of(stage))).into_iter().collect() };
    json!({
        "fits": candidate.fits(),
        "step_s": candidate.step_s(), "floor_s": candidate.floor_s(),
        "rollout_s": candidate.sides(Time::of_stage).map(|[rollout, _]| rollout),
        "learning_s": candidate.sides(Time::of_stage).map(|[_, learning]| learning),
        "round_s": candidate.round_s(), "evaluation_s": candidate.evaluation_s(),
        "seconds": seconds(&|stage| candidate.seconds_of(stage)),
        "floors": seconds(&|stage| candidate.floor_of(stage)),
        "placed": candidate.placed.iter().map(placed).collect::<Vec<_>>(),
    })
}

fn key(stage: Stage) -> String {
    stage.name().replace(' ', "_")
}

fn placed(placed: &Placed) -> Value {
    let layout = &placed.layout;
    let Mesh { data, pipeline, sequence, tensor, expert } = layout.mesh;
    let of_phase = |peak: &Peak| json!({ "bytes": peak.bytes, "tensors": peak.parts });
    let phases: Value = placed.memory.peaks.iter().map(|(phase, peak)| (phase.name(), of_phase(peak))).collect();
    json!({
        "roles": placed.roles.iter().map(|role| role.name()).collect::<Vec<_>>(),
        "ranks": [placed.ranks.start, placed.ranks.end],
        "mesh": { "data": data, "pipeline": pipeline, "sequence": sequence, "tensor": tensor, "expert": expert, "zero": layout.zero },
        "rollout": { "tensor": layout.rollout_tensor, "data": layout.rollout_data() },
        "swap": {
            "optimizer": layout.swap.has_state(), "roles": layout.swap.roles,
            "resident": layout.swap.state == StateSwap::BetweenSteps,
        },
        "memory": {
            "phases": phases, "peak_bytes": placed.memory.peak().1.bytes, "resident_bytes": placed.memory.resident,
            "stages": placed.memory.stages,
            "limit_bytes": placed.memory.limit, "kv_cache": placed.memory.kv,
            "kv_cache_expected": placed.memory.kv_expected, "host_bytes": placed.memory.host,
        },
        "parts": placed.time.parts.iter().map(|part| json!({
            "stage": key(part.stage), "name": part.name, "flops": part.work.flops, "bytes": part.work.bytes,
            "bound": part.bound, "peak": part.peak, "floor_s": part.floor_s, "efficiency": part.efficiency,
            "busy_s": part.busy_s, "seconds": part.seconds,
        })).collect::<Vec<_>>(),
    })
}
