//! The layouts of a run: what the job sets, and for `"auto"` what the plan chooses.

use super::choose::{self, Candidate, Choice};
use super::devices::Device;
use super::job::{Job, no_place};
use super::microbatch;
use super::null::count;
use super::rows::Rows;
use crate::comm::World;
use crate::config::job::Recompute;
use crate::config::mesh::{Auto, Placement, RoleName};
use crate::config::rollout::RolloutConfig;
use crate::config::{self, Config};
use crate::device::cpu::pool::pool;
use crate::error::{Error, Result};
use crate::launch::gpu::GpuOfRanks;
use crate::launch::layout::{Count, Expectations, Expected, Layout, Swap};
use crate::mesh::Mesh;
use crate::sys::memory;
use crate::train::{self, Archs};

/// Placements with their layouts, and what the plan says of them.
type Resolved = (Vec<(Placement, Layout)>, Expectations);

/// The placements of a run of `roles` and their layouts, on this host's CPUs or on `gpu`. The same on all ranks, who all call this.
///
/// # Errors
/// `Usage` where the job cannot be laid out, or nothing fits, with what would.
pub fn layouts(config: &Config, roles: &[RoleName], world: &World, gpu: Option<&GpuOfRanks>) -> Result<Resolved> {
    let free = memory::available_bytes() / world.local_size.max(1) as u64;
    // The fullest host decides for all.
    let least = -world.group().max(-(free as f64));
    let device = gpu.map_or_else(
        || Device::cpu(least as u64, world.local_size),
        |gpu| Device::gpu_of(&gpu.name, gpu.memory_bytes, gpu.ranks_per_node, world.size),
    );
    let device = Device { threads: pool().threads(), ..device };
    let placements = config.mesh.placements(world.size).and_then(|placements| check_roles(config, roles, placements));
    // An error that all ranks agree on names no rank.
    world.group().agree(placements.and_then(|placements| on(config, placements, &device)))
}

fn on(config: &Config, placements: Vec<Placement>, device: &Device) -> Result<Resolved> {
    let mut axes = config.mesh.clone();
    let ranks: usize = placements.iter().map(|placement| placement.ranks.len()).sum();
    // Errors of the job's own axes come before those of the plan.
    let named = placements.iter().try_for_each(|placement| axes.resolve(placement.ranks.len()).map(drop));
    let is_open = ranks > 1 && (axes.tensor == Auto::Auto || axes.zero == Auto::Auto);
    let archs = train::planned_archs(config, None);
    let asked = config;
    let config = &microbatch::resolved(asked, archs.as_ref().ok(), ranks, device);
    let choose = |archs| choose::choose(&Job::new(config, archs, None), ranks, device);
    // CPUs use weights where they are, and what waits is what the job says.
    let chosen = (is_open || !device.is_cpu()).then(|| archs.as_ref().map_err(Error::clone).and_then(choose));
    let config = &match (&chosen, &archs) {
        (Some(Ok(choice)), Ok(archs)) => microbatch::grown(asked, config, archs, choice, ranks, device)?,
        _ => config.clone(),
    };
    let microbatch_tokens = microbatch::is_open(asked).then(|| train::shape(config).microbatch_tokens_max);
    let config = &with_recompute(config, chosen.as_ref(), archs.as_ref().ok(), ranks, device);
    let chosen = chosen.map(|choice| choice.map(|choice| choice.chosen));
    let mut is_tight = false;
    match &chosen {
        Some(Ok(chosen)) if is_open => {
            axes.tensor = Auto::Is(chosen.layout().mesh.tensor);
            axes.zero = Auto::Is(chosen.layout().zero);
        }
        Some(Err(error)) if is_open => {
            named?;
            let tensor = axes.resolve(placements[0].ranks.len())?.tensor;
            let archs = archs.as_ref().map_err(Error::clone)?;
            is_tight = archs.0.iter().all(|(.., arch)| arch.check_tensor(tensor).is_ok());
            if !is_tight {
                return Err(error.clone());
            }
        }
        Some(Err(_)) => is_tight = !device.is_cpu(),
        _ => {}
    }
    let chosen = chosen.and_then(Result::ok);
    let swap = chosen.as_ref().map_or_else(|| Swap::of(&config.mesh.offload), |chosen| chosen.layout().swap);
    let chosen = chosen.as_ref().filter(|_| !device.is_cpu() && config.rollout.tensor == Auto::Auto);
    let tensor_of_rollout = chosen.map_or(config.rollout.tensor, |chosen| Auto::Is(chosen.layout().rollout_tensor));
    let rollout_reason = chosen.zip(archs.as_ref().ok()).map(|(chosen, archs)| why_so(config, archs, chosen, device));
    let of = |placement: Placement| {
        let mesh = axes.resolve(placement.ranks.len())?;
        let zero = axes.stage()?;
        config.gradient.check_layout(&mesh, zero)?;
        let wanted = RolloutConfig { tensor: tensor_of_rollout, ..config.rollout.clone() };
        let samples = [RoleName::Actor, RoleName::Rollout].iter().any(|role| placement.roles.contains(role));
        let rollout = if samples { wanted.layout(&mesh)? } else { mesh };
        archs.as_ref().map_or(Ok(()), |archs| check_cuts(archs, &placement, &mesh, &rollout))?;
        Ok((placement, Layout { mesh, zero, rollout_tensor: rollout.tensor, swap }))
    };
    let of_ranks = |placement: Placement| {
        let index = format!("mesh.placement, ranks {}..{}", placement.ranks.start, placement.ranks.end);
        let placed: Result<_> = of(placement);
        if config.mesh.placement.is_empty() { placed } else { placed.map_err(|error| error.within(index)) }
    };
    let placed: Vec<(Placement, Layout)> = placements.into_iter().map(of_ranks).collect::<Result<_>>()?;
    // Memory of a GPU is reserved before rows are known.
    let longest = archs.as_ref().ok().filter(|_| !device.is_cpu());
    let expected = longest.map_or(Vec::new(), |archs| expect(&Job::new(config, archs, None), &placed, device));
    let count = archs.ok().map(|archs| counter(archs, placed.clone(), device.clone()));
    let gpu_flops = (!device.is_cpu()).then_some(device.flops);
    let recompute = config.gradient.recompute;
    Ok((placed, Expectations { expected, is_tight, rollout_reason, count, gpu_flops, recompute, microbatch_tokens }))
}

/// The job with what it is to recompute where that is open: all, where nothing fits.
fn with_recompute(
    config: &Config,
    choice: Option<&Result<Choice>>,
    archs: Option<&Archs>,
    ranks: usize,
    device: &Device,
) -> Config {
    let mut chosen = config.clone();
    if config.gradient.recompute == Recompute::Auto {
        chosen.gradient.recompute = match (choice, archs) {
            (Some(Ok(choice)), _) => choice.recompute,
            (_, Some(archs)) if device.is_cpu() => {
                choose::least_recompute(&Job::new(config, archs, None), ranks, device)
            }
            (_, known) => known.is_some().into(),
        };
    }
    chosen
}

/// Counts for given rows.
fn counter(archs: Archs, placed: Vec<(Placement, Layout)>, device: Device) -> Count {
    Box::new(move |config, fast, rows, eval| {
        let rows = Rows::of(config, &train::shape(config), archs.actor().context, rows, eval);
        let job = Job::new(config, &archs, Some(rows));
        let [fast, workspace] = fast.unwrap_or([job.fast, job.workspace]);
        expect(&Job { fast, workspace, ..job }, &placed, &device)
    })
}

/// What a rank of each placement holds.
fn expect(job: &Job, placed: &[(Placement, Layout)], device: &Device) -> Vec<Option<Expected>> {
    let of = |(placement, layout): &(Placement, Layout)| {
        let there = job.archs.0.iter().map(|(role, ..)| *role);
        let roles: Vec<RoleName> = there.filter(|role| placement.roles.contains(role)).collect();
        (!roles.is_empty()).then(|| {
            let (memory, time) = count(job, layout, device, &roles);
            // The rates of a CPU rank are declared for one thread.
            let threads = if device.is_cpu() { device.threads.max(1) as f64 } else { 1.0 };
            Expected { step_s: time.step_s() / threads, ..memory.expected(device.is_cpu()) }
        })
    };
    placed.iter().map(of).collect()
}

/// Refuses numbers of tensor ranks that a model of the placement cannot be sharded over, in training or in the rollout.
fn check_cuts(archs: &Archs, placement: &Placement, mesh: &Mesh, rollout: &Mesh) -> Result<()> {
    let divides = |size: usize| placement.ranks.len().is_multiple_of(size * mesh.sequence);
    for (role, _, arch) in archs.0.iter().filter(|(role, ..)| placement.roles.contains(role)) {
        let name = role.name();
        arch.check_tensor_where(mesh.tensor, divides)
            .map_err(|error| Error { message: format!("mesh.{} ({name})", error.message), ..error })?;
        if matches!(role, RoleName::Actor | RoleName::Rollout) {
            arch.check_tensor_where(rollout.tensor, |size| placement.ranks.len().is_multiple_of(size))
                .map_err(|error| Error { message: format!("rollout.{}", error.message), ..error })?;
        }
    }
    Ok(())
}

/// The tensor size that the plan has chosen for the rollout, compared with training's own.
fn why_so(config: &Config, archs: &Archs, candidate: &Candidate, device: &Device) -> String {
    let (chosen, main) = (candidate.layout(), candidate.main());
    let training = chosen.mesh.tensor;
    if chosen.rollout_tensor == training {
        return format!("tensor {training}, as in training: no other is predicted to be faster by more than 2 %");
    }
    let job = Job::new(config, archs, None);
    let parts = candidate.placed.iter().map(|placed| (placed.roles.clone(), placed.ranks.clone()));
    let layout = Layout { rollout_tensor: training, ..*chosen };
    let other = choose::candidate(&job, &parts.collect::<Vec<_>>(), &layout, device);
    let reason = if other.fits() {
        format!("{:.3} s of a step are predicted, {:.3} s with {training}", candidate.step_s(), other.step_s())
    } else {
        format!("with {training} it does not fit")
    };
    format!("tensor {} on {} ranks, {training} in training: {reason}", chosen.rollout_tensor, main.ranks.len())
}

/// Refuses placements that leave out a role which the job needs.
fn check_roles(config: &Config, roles: &[RoleName], placements: Vec<Placement>) -> Result<Vec<Placement>> {
    if config.mesh.placement.is_empty() {
        return Ok(placements);
    }
    if let [_] = roles {
        let kind = config::name(&config.job.kind);
        return Err(
            Error::usage(format!("mesh.placement is set, a {kind} job has one role")).hint("leave mesh.placement out")
        );
    }
    // The mesh is that of the actor's placement.
    for role in roles.iter().rev().filter(|role| **role != RoleName::Actor) {
        if !placements.iter().any(|placement| placement.roles.contains(role)) {
            return Err(no_place(*role));
        }
    }
    Ok(placements)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn tensor_ranks_that_a_model_cannot_be_cut_into_are_refused_by_their_key_on_every_device() {
        let dir = tempfile::tempdir().expect("a directory");
        let model = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 96,
            "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 32, "max_position_embeddings": 64
        });
        std::fs::write(dir.path().join("config.json"), model.to_string()).expect("a file");
        let refused = |training: usize, rollout: usize, device: &Device| {
            let text = format!(
                "[job]\nkind = \"ppo\"\nsteps = 1\n[model]\nactor = {:?}\n[data]\nprompts = [\"x\"]",
                dir.path()
            );
            let sets = [format!("mesh.tensor={training}"), "mesh.zero=1".into(), format!("rollout.tensor={rollout}")];
            let placement = Placement { roles: RoleName::ALL.to_vec(), ranks: 0..2 };
            on(&config::parse(&text, &sets).expect("a job"), vec![placement], device)
        };
        for device in [Device::cpu(8 << 30, 2), Device::gpu_of("A100", 40 << 30, 2, 2)] {
            for (training, rollout, reason) in [
                (2, 1, "mesh.tensor = 2 does not divide the model's 3 attention heads (actor)"),
                (1, 2, "rollout.tensor = 2 does not divide the model's 3"),
            ] {
                let error = refused(training, rollout, &device).err().expect(reason);
                assert!(error.message.starts_with(reason), "{error}");
                assert_eq!((error.exit_code(), error.hint.as_deref()), (2, Some("tensor can be 1")));
            }
            assert!(refused(1, 1, &device).is_ok());
        }
    }
}
