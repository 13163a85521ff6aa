//! Refusals, with what would fit.

use super::choose::{Candidate, candidate};
use super::devices::Device;
use super::job::{Archs, Job};
use super::shape::{Layout, Swap};
use crate::config::Config;
use crate::config::job::JobKind;
use crate::config::mesh::{Auto, Offload};
use crate::config::model::DTypeName;
use crate::error::{Error, format_bytes};
use crate::mesh::Mesh;
use crate::tensor::DType;

/// Parts of a misfit's memory that are named.
const NAMED: usize = 3;

/// Why a candidate does not fit.
pub fn misfit(candidate: &Candidate) -> String {
    let memory = &candidate.fullest().memory;
    let (phase, peak) = memory.peak();
    if peak.bytes as u64 > memory.limit {
        return format!("does not fit: {} in {}", format_bytes(peak.bytes as u64), phase.name());
    }
    let why = memory.failed.as_ref().map(|error| error.message.as_str());
    format!("does not fit: {}", why.unwrap_or("no room for one sample's keys and values"))
}

/// The axes that the job names cannot be laid out on `world` ranks; `smallest` is the smallest part of them that roles
/// have to themselves.
pub fn no_layout(job: &Job, world: usize, smallest: usize) -> Error {
    let mesh = &job.config.mesh;
    let legal = |t: &usize| job.archs.roles().iter().all(|(_, arch)| arch.check_tensor(*t).is_ok());
    let tensors: Vec<String> =
        (1..=smallest).filter(|t| smallest.is_multiple_of(*t)).filter(legal).map(|t| t.to_string()).collect();
    if let Auto::Is(tensor) = mesh.tensor
        && !legal(&tensor)
    {
        let refused = job.archs.roles().into_iter().find_map(|(role, arch)| {
            let name = role.name();
            arch.check_tensor(tensor).err().map(|error| Error::usage(format!("mesh.{} ({name})", error.message)))
        });
        let error = refused.unwrap_or_else(|| Error::usage(format!("mesh.tensor = {tensor} is refused")));
        return error.hint(format!("on {world} ranks mesh.tensor can be {}", tensors.join(", ")));
    }
    if let Auto::Is(n) = job.config.rollout.tensor
        && (job.archs.actor.check_tensor(n).is_err() || !smallest.is_multiple_of(n))
    {
        return Error::usage(format!("rollout.tensor = {n} on {smallest} ranks and {} heads", job.archs.actor.heads))
            .hint(format!("it may be {}", tensors.join(", ")));
    }
    let words = |axis: Auto| if let Auto::Is(n) = axis { n.to_string() } else { "auto".into() };
    let [data, pipeline, sequence, tensor] = [mesh.data, mesh.pipeline, mesh.sequence, mesh.tensor].map(words);
    let fixed = [mesh.pipeline, mesh.sequence, mesh.tensor].map(|axis| if let Auto::Is(n) = axis { n } else { 1 });
    let rest = fixed.iter().product::<usize>().max(1);
    let data_max = if let Auto::Is(n) = mesh.data { n } else { smallest.div_ceil(rest) };
    Error::usage(format!(
        "mesh {data} data x {pipeline} pipeline x {sequence} sequence x {tensor} tensor does not divide {world} ranks{}",
        if smallest == world { String::new() } else { format!(" in parts of {smallest}") }
    ))
    .hint(format!("mesh.tensor may be {} here; or plan {} ranks", tensors.join(", "), data_max * rest))
}

/// Nothing of what was tried fits.
pub fn nothing_fits(job: &Job, world: usize, device: &Device, threads: usize, misfits: &[Candidate]) -> Error {
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
        format!("{} for the keys and values of one sample beside the rest", format_bytes(sample as u64))
    };
    let ways = ways(job, world, device, threads);
    let hint = if ways.is_empty() {
        "use shorter rows, a smaller model, or devices with more memory".to_string()
    } else {
        format!("it fits with {}", ways.join("; or with "))
    };
    Error::usage(format!(
        "the job does not fit {world} ranks of {}: with {} a rank needs {what}, and has {limit}",
        device.name,
        least.layout().words()
    ))
    .hint(hint)
}

/// Single changes with which the job fits.
fn ways(job: &Job, world: usize, device: &Device, threads: usize) -> Vec<String> {
    let mut found = Vec::new();
    let mut attempt = |words: String, world: usize, change: &dyn Fn(&mut Config)| {
        let mut config = job.config.clone();
        change(&mut config);
        let fits = fits(&config, job.archs, job, world, device, threads);
        if fits {
            found.push(words);
        }
        fits
    };
    if let Auto::Is(stage) = job.config.mesh.zero {
        let _ = (stage + 1..=3)
            .any(|next| attempt(format!("mesh.zero = {next}"), world, &|c| c.mesh.zero = Auto::Is(next)));
    }
    if let Auto::Is(tensor) = job.config.mesh.tensor {
        let larger = (tensor + 1..=world).filter(|t| world.is_multiple_of(*t));
        let _ = larger.into_iter().any(|t| {
            attempt(format!("mesh.tensor = {t}"), world, &|c| {
                c.mesh.tensor = Auto::Is(t);
                c.mesh.data = Auto::Auto;
            })
        });
    }
    if !job.config.gradient.recompute {
        attempt("gradient.recompute = true".into(), world, &|c| c.gradient.recompute = true);
    }
    smaller_microbatches(job, world, &mut attempt);
    if device.is_cpu() && job.config.mesh.offload.is_empty() {
        let both = vec![Offload::Optimizer, Offload::Roles];
        let words = "mesh.offload = [\"optimizer\", \"roles\"]".to_string();
        attempt(words, world, &|c| c.mesh.offload.clone_from(&both));
    }
    if job.config.model.dtype() == DType::F32 {
        attempt("model.dtype = \"bf16\"".into(), world, &|c| c.model.dtype = DTypeName::Bf16);
    }
    if job.config.mesh.placement.is_empty() {
        let more = [2, 4, 8, 16].map(|times| times * world);
        let _ = more.into_iter().any(|ranks| attempt(format!("{ranks} ranks"), ranks, &|c| c.mesh.data = Auto::Auto));
    }
    found
}

/// Whether a job fits that is changed so, on so many ranks; it is remembered by these words.
type Attempt<'a> = dyn FnMut(String, usize, &dyn Fn(&mut Config)) -> bool + 'a;

/// Half the tokens of a micro-batch, and half again.
fn smaller_microbatches(job: &Job, world: usize, attempt: &mut Attempt) {
    let ppo = job.config.job.kind == JobKind::Ppo;
    let (key, now) = if ppo {
        ("ppo.microbatch_tokens_max", job.config.ppo.microbatch_tokens_max)
    } else {
        ("sft.microbatch_tokens_max", job.config.sft.microbatch_tokens_max)
    };
    let mut tokens = now / 2;
    while tokens >= job.rows.longest_row().tokens() {
        let change = |c: &mut Config| {
            if ppo { c.ppo.microbatch_tokens_max = tokens } else { c.sft.microbatch_tokens_max = tokens }
        };
        if attempt(format!("{key} = {tokens}"), world, &change) {
            return;
        }
        tokens /= 2;
    }
}

/// Whether any layout of a changed job fits.
fn fits(config: &Config, archs: &Archs, job: &Job, world: usize, device: &Device, threads: usize) -> bool {
    let job = Job { config, archs, ..job.clone() };
    let Ok(parts) = job.parts(world) else { return false };
    let smallest = parts.iter().map(|(_, ranks)| ranks.len()).min().unwrap_or(world);
    let fixed = |axis: Auto, otherwise: usize| if let Auto::Is(n) = axis { n } else { otherwise };
    let sequence = fixed(config.mesh.sequence, 1);
    let legal = |t: usize| archs.roles().iter().all(|(_, arch)| arch.check_tensor(t).is_ok());
    let tensors = if let Auto::Is(t) = config.mesh.tensor { vec![t] } else { vec![1, 2, 4, 8] };
    let stage = fixed(config.mesh.zero, 3).min(3);
    let offload = &config.mesh.offload;
    let both = !device.is_cpu() && job.is_ppo();
    let swap = Swap {
        optimizer: both || offload.contains(&Offload::Optimizer),
        roles: both || offload.contains(&Offload::Roles),
    };
    tensors.into_iter().any(|tensor| {
        let rest = tensor * sequence;
        if rest == 0 || !smallest.is_multiple_of(rest) || !legal(tensor) {
            return false;
        }
        let data = fixed(config.mesh.data, world / rest);
        let mesh = Mesh { data, pipeline: 1, sequence, tensor };
        let rollout_tensor = fixed(config.rollout.tensor, tensor);
        let layout = Layout { mesh, zero: stage, rollout_tensor, swap };
        mesh.ranks() == world && candidate(&job, &parts, &layout, device, threads).fits()
    })
}
