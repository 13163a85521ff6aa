//! Errors for jobs that do not fit, with changes that would fit.

use super::choose::{Candidate, candidate, divisors, fixed, is_legal, layouts};
use super::devices::Device;
use super::job::Job;
use crate::config;
use crate::config::job::Recompute;
use crate::config::mesh::{Auto, Offload, RoleName};
use crate::error::{Error, Result, format_bytes};
use crate::launch::layout::{Layout, Swap};
use crate::mesh::Mesh;
use crate::tensor::DType;
use crate::train::Archs;
use std::fmt::Display;

/// The number of parts of the memory that an error names.
const NAMED: usize = 3;

/// The reason why a candidate does not fit.
pub fn misfit(candidate: &Candidate) -> String {
    let memory = &candidate.fullest().memory;
    let (phase, peak) = memory.peak();
    if peak.bytes as u64 > memory.limit {
        return format!("does not fit: {} in {}", format_bytes(peak.bytes as u64), phase.name());
    }
    let why = memory.failed.as_ref().map(|error| error.message.as_str());
    format!("does not fit: {}", why.unwrap_or("not enough memory for one sample's KV cache"))
}

/// Rejects numbers of tensor ranks, in training or in the rollout, over which a model of `roles` cannot be sharded on
/// `ranks` ranks.
///
/// # Errors
/// `Usage`, naming the key and the possible numbers.
pub fn check_cuts(
    archs: &Archs,
    roles: &[RoleName],
    ranks: usize,
    [tensor, sequence, expert, rollout, pipeline]: [usize; 5],
) -> Result<()> {
    let divides = |size: usize| ranks.is_multiple_of(size * sequence);
    for (role, _, arch) in archs.0.iter().filter(|(role, ..)| roles.contains(role)) {
        let name = role.name();
        arch.check_tensor_where(tensor, divides)
            .map_err(|error| Error { message: format!("mesh.{} ({name})", error.message), ..error })?;
        arch.check_sequence(sequence)
            .map_err(|error| Error { message: format!("mesh.{} ({name})", error.message), ..error })?;
        arch.check_expert(expert, *role == RoleName::Actor)
            .map_err(|error| Error { message: format!("mesh.{} ({name})", error.message), ..error })?;
        if *role != RoleName::Rollout {
            arch.check_pipeline(pipeline).map_err(|error| error.within(name))?;
        }
        if matches!(role, RoleName::Actor | RoleName::Rollout) {
            arch.check_tensor_where(rollout, |size| ranks.is_multiple_of(size))
                .map_err(|error| Error { message: format!("rollout.{}", error.message), ..error })?;
        }
    }
    Ok(())
}

/// The error if the job's axes are not possible on `world` ranks; `smallest` is the smallest part of them that roles
/// have to themselves.
pub fn no_layout(job: &Job, world: usize, smallest: usize) -> Error {
    let (mesh, rollout) = (&job.config.mesh, &job.config.rollout);
    let [tensor, sequence, pipeline, of_rollout] =
        [mesh.tensor, mesh.sequence, mesh.pipeline, rollout.tensor].map(|axis| fixed(axis).unwrap_or(1));
    let cuts = [tensor, sequence, mesh.expert, of_rollout, pipeline * mesh.pipeline_chunks];
    let cuts = check_cuts(job.archs, &RoleName::ALL, smallest, cuts);
    if let Err(error) = cuts.and_then(|()| rollout.layout(&Mesh::data_only(smallest)).map(drop)) {
        return error;
    }
    let tensors = divisors(smallest).filter(|t| is_legal(job, *t));
    let tensors: Vec<String> = tensors.map(|t| t.to_string()).collect();
    let any_of = if tensors.len() == 1 { "" } else { "one of " };
    let words = |axis: Auto| fixed(axis).map_or("auto".into(), |n| n.to_string());
    let [data, pipeline, sequence, tensor] = [mesh.data, mesh.pipeline, mesh.sequence, mesh.tensor].map(words);
    let rest = [mesh.pipeline, mesh.sequence, mesh.tensor].map(|axis| fixed(axis).unwrap_or(1));
    let rest = rest.iter().product::<usize>().max(1);
    let data_max = fixed(mesh.data).unwrap_or(smallest.div_ceil(rest));
    Error::usage(format!(
        "mesh {data} data x {pipeline} pipeline x {sequence} sequence x {tensor} tensor does not divide {world} ranks{}",
        if smallest == world { String::new() } else { format!(" in parts of {smallest}") }
    ))
    .hint(format!("set mesh.tensor to {any_of}{}, or plan {} ranks", tensors.join(", "), data_max * rest))
}

/// The error if no layout fits.
pub fn nothing_fits(job: &Job, world: usize, device: &Device, misfits: &[Candidate]) -> Error {
    let Some(least) = misfits.iter().min_by_key(|c| c.fullest().memory.peak().1.bytes) else {
        return Error::fault("no layout was compared");
    };
    let memory = &least.fullest().memory;
    let (phase, peak) = memory.peak();
    let limit = format_bytes(memory.limit);
    let what = if peak.bytes as u64 > memory.limit {
        let mut parts: Vec<(&&str, &usize)> = peak.parts.iter().collect();
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(**bytes));
        let named: Vec<String> =
            parts.iter().take(NAMED).map(|(what, bytes)| format!("{what} {}", format_bytes(**bytes as u64))).collect();
        format!("{} in {} ({})", format_bytes(peak.bytes as u64), phase.name(), named.join(", "))
    } else if let Some(error) = &memory.failed {
        return error.clone();
    } else {
        let sample = memory.kv.map_or(0, |kv| kv.bytes_wanted / kv.samples.max(1));
        format!("{} for the KV cache of one sample in addition to the rest", format_bytes(sample as u64))
    };
    let ways = ways(job, world, device);
    let hint = if ways.is_empty() {
        let more = if device.is_cpu() { "GPUs (plan --gpu)" } else { "devices with more memory" };
        format!("use shorter rows, a smaller model, or {more}")
    } else {
        format!("it fits with {}", ways.join(", or with "))
    };
    let plural = if world == 1 { "" } else { "s" };
    Error::usage(format!(
        "the job does not fit {world} rank{plural} of {}: with {} a rank needs {what}, but has {limit}",
        device.name,
        least.layout().describe()
    ))
    .hint(hint)
}

/// Single changes with which the job fits.
fn ways(job: &Job, world: usize, device: &Device) -> Vec<String> {
    let config = job.config;
    let set = |key: &str, value: &dyn Display| vec![format!("{key}={value}")];
    let larger = |axis: Auto, most: usize| fixed(axis).map_or(0..0, |n| n + 1..most + 1);
    // The first entry of each list that fits is suggested: keys, of which the first is named, and a number of ranks.
    let mut lists: Vec<Vec<(Vec<String>, usize)>> = Vec::new();
    lists.push(larger(config.mesh.zero, 3).map(|stage| (set("mesh.zero", &stage), world)).collect());
    let tensors = larger(config.mesh.tensor, world).filter(|tensor| world.is_multiple_of(*tensor));
    let tensor = |n| ([set("mesh.tensor", &n), set("mesh.data", &"auto")].concat(), world);
    lists.push(tensors.map(tensor).collect());
    if config.gradient.recompute != Recompute::Block {
        lists.push(vec![(set("gradient.recompute", &"\"block\""), world)]);
    }
    let key = format!("{}.microbatch_tokens_max", config::name(&config.job.kind));
    let halves = std::iter::successors(Some(job.shape.microbatch_tokens_max / 2), |tokens| Some(tokens / 2));
    let halves = halves.take_while(|tokens| *tokens >= job.rows.longest_row().all().max(1));
    lists.push(halves.map(|tokens| (set(&key, &tokens), world)).collect());
    if device.is_cpu() && config.mesh.offload.is_empty() {
        lists.push(vec![(set("mesh.offload", &"[\"optimizer\", \"roles\"]"), world)]);
    }
    if config.model.dtype() == DType::F32 {
        lists.push(vec![(set("model.dtype", &"bf16"), world)]);
    }
    if config.mesh.placement.is_empty() {
        lists.push([2, 4, 8, 16].map(|times| (set("mesh.data", &"auto"), times * world)).to_vec());
    }
    let first = |list: Vec<(Vec<String>, usize)>| {
        let (sets, ranks) = list.into_iter().find(|(sets, ranks)| fits(sets, *ranks, job, device))?;
        let named = || sets[0].replacen('=', " = ", 1);
        Some(if ranks == world { named() } else { format!("{ranks} ranks") })
    };
    lists.into_iter().filter_map(first).collect()
}

/// Whether any layout of the job with other keys fits.
pub fn fits(sets: &[String], world: usize, job: &Job, device: &Device) -> bool {
    let Ok(config) = config::parse(&job.config.to_toml(), sets) else { return false };
    let rows = Some(job.rows.clone());
    let job = Job { fast: job.fast, workspace: job.workspace, ..Job::new(&config, job.archs, rows) };
    let Ok(parts) = job.parts(world) else { return false };
    let Ok(all) = layouts(&job, world, device) else { return false };
    let both = !device.is_cpu() && job.shape.has_rollout();
    let swap = Swap::from_offload(if both { &[Offload::Optimizer, Offload::Roles] } else { &config.mesh.offload });
    // It is enough to try the layout with the least memory.
    let zero = all.iter().map(|layout| layout.zero).max();
    let is_least = |layout: &&Layout| {
        let is_rollout_alike = layout.rollout_tensor == layout.mesh.tensor || fixed(config.rollout.tensor).is_some();
        Some(layout.zero) == zero && is_rollout_alike
    };
    all.iter().filter(is_least).any(|layout| candidate(&job, &parts, &Layout { swap, ..*layout }, device).fits())
}
