//! The layouts of a run: the job's values, and the plan's choices for `"auto"`.

use super::choose;
use super::devices::Device;
use super::job::{Job, no_place};
use super::microbatch;
use super::null::count;
use super::refuse::check_cuts;
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
use crate::sys::memory;
use crate::train::{self, Archs};

/// Placements with their layouts, and the expectations of the plan.
type Resolved = (Vec<(Placement, Layout)>, Expectations);

/// The placements of a run of `roles` and their layouts, on this host's CPUs or on `gpu`. The result is the same on all
/// ranks. All ranks call this.
///
/// # Errors
/// `Usage` if the job's layout is not possible, or if nothing fits, with changes that would fit.
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
    // Errors about the job's own axes are reported before errors of the plan.
    let named = placements.iter().try_for_each(|placement| axes.resolve(placement.ranks.len()).map(drop));
    let is_open = ranks > 1 && [axes.tensor, axes.pipeline, axes.zero].contains(&Auto::Auto);
    let archs = train::planned_archs(config, None)?;
    let asked = config;
    let mut config = microbatch::resolved(asked, &archs, ranks, device);
    // CPUs use weights in place, and the job alone decides about offloading.
    let is_planned = is_open || !device.is_cpu();
    let choice = is_planned.then(|| choose::choose(&Job::new(&config, &archs, None), ranks, device));
    let is_tight = matches!(choice, Some(Err(_)));
    if is_open && is_tight {
        named?;
    }
    let choice = choice.and_then(Result::ok);
    if let Some(choice) = &choice {
        config = microbatch::grown(asked, &config, &archs, choice, ranks, device)?;
    }
    let microbatch_tokens = microbatch::is_open(asked).then(|| train::shape(&config).microbatch_tokens_max);
    if config.gradient.recompute == Recompute::Auto {
        config.gradient.recompute = match &choice {
            Some(choice) => choice.recompute,
            None if device.is_cpu() => choose::least_recompute(&Job::new(&config, &archs, None), ranks, device),
            None => Recompute::Block,
        };
    }
    let config = &config;
    let chosen = choice.map(|choice| *choice.chosen.layout());
    if let Some(chosen) = chosen.filter(|_| is_open) {
        (axes.tensor, axes.zero) = (Auto::Is(chosen.mesh.tensor), Auto::Is(chosen.zero));
        axes.pipeline = Auto::Is(chosen.mesh.pipeline);
    }
    let swap = chosen.map_or_else(|| Swap::from_offload(&config.mesh.offload), |chosen| chosen.swap);
    let chosen = chosen.filter(|_| !device.is_cpu() && config.rollout.tensor == Auto::Auto);
    let tensor_of_rollout = chosen.map_or(config.rollout.tensor, |chosen| Auto::Is(chosen.rollout_tensor));
    let of = |placement: Placement| {
        let mesh = axes.resolve(placement.ranks.len())?;
        let zero = axes.stage()?;
        config.gradient.check_layout(&mesh, zero)?;
        config.gradient.check_chunks(axes.pipeline_chunks)?;
        let wanted = RolloutConfig { tensor: tensor_of_rollout, ..config.rollout.clone() };
        let samples = [RoleName::Actor, RoleName::Rollout].iter().any(|role| placement.roles.contains(role));
        let rollout = if samples { wanted.layout(&mesh)? } else { mesh };
        let cuts = [mesh.tensor, mesh.sequence, mesh.expert, rollout.tensor, mesh.pipeline * axes.pipeline_chunks];
        check_cuts(&archs, &placement.roles, placement.ranks.len(), cuts)?;
        Ok((placement, Layout { mesh, zero, chunks: axes.pipeline_chunks, rollout_tensor: rollout.tensor, swap }))
    };
    let of_ranks = |placement: Placement| {
        let index = format!("mesh.placement, ranks {}..{}", placement.ranks.start, placement.ranks.end);
        let placed: Result<_> = of(placement);
        if config.mesh.placement.is_empty() { placed } else { placed.map_err(|error| error.within(index)) }
    };
    let placed: Vec<(Placement, Layout)> = placements.into_iter().map(of_ranks).collect::<Result<_>>()?;
    // Memory of a GPU is reserved before rows are known.
    let longest = Job::new(config, &archs, None);
    let expected = if device.is_cpu() { Vec::new() } else { expect(&longest, &placed, device) };
    let recompute = config.gradient.recompute;
    let count = Some(counter(archs, placed.clone(), device.clone()));
    let gpu_flops = (!device.is_cpu()).then_some(device.flops);
    Ok((placed, Expectations { expected, is_tight, count, gpu_flops, recompute, microbatch_tokens }))
}

/// Counts for given rows.
fn counter(archs: Archs, placed: Vec<(Placement, Layout)>, device: Device) -> Count {
    Box::new(move |config, fast, [rows, eval], images| {
        let rows = Rows::from_tokens(config, &train::shape(config), archs.actor().context, rows, eval);
        let rows = Rows { images, ..rows };
        let job = Job::new(config, &archs, Some(rows));
        let [fast, workspace] = fast.unwrap_or([job.fast, job.workspace]);
        expect(&Job { fast, workspace, ..job }, &placed, &device)
    })
}

/// The memory of a rank of each placement.
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

/// Changes a job for several ranks into one for a single rank, for a dry run that was started alone. It first checks
/// the placement and the axes. Returns the number of ranks that the job needs, if this world lacks them.
///
/// # Errors
/// `Usage` if the layout is not possible.
pub fn do_without_ranks(config: &mut Config, roles: &[RoleName], world: &World) -> Result<Option<usize>> {
    let ranks = config.mesh.ranks_min();
    if world.size > 1 || ranks == 1 {
        return Ok(None);
    }
    let placements = check_roles(config, roles, config.mesh.placements(ranks)?)?;
    placements.iter().try_for_each(|placement| config.mesh.resolve(placement.ranks.len()).map(drop))?;
    config.mesh.reduce_to_one_rank();
    (config.rollout.tensor, config.rollout.data) = (Auto::Auto, Auto::Auto);
    Ok(Some(ranks))
}

/// Rejects placements that leave out a role that the job needs.
fn check_roles(config: &Config, roles: &[RoleName], placements: Vec<Placement>) -> Result<Vec<Placement>> {
    if config.mesh.placement.is_empty() {
        return Ok(placements);
    }
    if let [_] = roles {
        let kind = config::name(&config.job.kind);
        return Err(Error::usage(format!("mesh.placement does not support {kind} jobs, which have one role"))
            .hint("remove mesh.placement"));
    }
    // The mesh describes the actor's placement.
    for role in roles.iter().rev().filter(|role| **role != RoleName::Actor) {
        if !placements.iter().any(|placement| placement.roles.contains(role)) {
            return Err(no_place(*role));
        }
    }
    Ok(placements)
}
