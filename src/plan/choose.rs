//! The choice of a job's layout on a number of ranks.
//!
//! Axes that the job sets are used as they are. For `"auto"` axes every legal layout is tried.
//!
//! - On GPUs, the layout with the fastest predicted step that fits is chosen. Within 2 % of it, the choice is the
//!   layout with the fewest stages, then the fewest tensor ranks, then the least swapping, then the lowest ZeRO stage.
//! - On CPUs, predictions depend on the other load of the machine, and every start of a job must choose the same
//!   layout. The choice is the layout with the fewest tensor ranks and the lowest stage that fits, on one pipeline stage.
//!
//! `gradient.recompute = "auto"` is the least recomputation that fits: on GPUs in the layout that is chosen with full
//! recomputation, on CPUs in any layout.

pub use super::candidate::{Candidate, Placed};
use super::devices::Device;
use super::job::{Job, RolesOnRanks};
use super::null::count;
use super::refuse;
use super::rows::Origin;
use super::time::Stage;
use crate::config::job::Recompute;
use crate::config::mesh::{Auto, Offload};
use crate::config::model::Quantize;
use crate::config::optim::GradientOrder;
use crate::device::{self, cpu::pool::pool};
use crate::error::Result;
use crate::launch::gpu;
use crate::launch::layout::{Layout, StateSwap, Swap};
use crate::mesh::Mesh;

/// The ratio below which predictions count as equal.
const TIE: f64 = 1.02;
/// The most pipeline stages that are tried.
const STAGES_MAX: usize = 16;
/// The highest ZeRO stage that is tried with several pipeline stages: higher ones reduce or gather for each micro-batch.
const ZERO_OF_STAGES: usize = 1;
/// The number of runners-up that are kept.
const SHOWN: usize = 6;

/// A layout that was not chosen, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct RunnerUp {
    pub candidate: Candidate,
    pub why: String,
}

/// The layout of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    pub chosen: Candidate,
    /// The job's value, or the choice for `"auto"`.
    pub recompute: Recompute,
    pub why: String,
    pub runners_up: Vec<RunnerUp>,
    /// The number of layouts that were compared, and of layouts that fit.
    pub compared: usize,
    pub fitting: usize,
}

/// The layout of `job` on `world` ranks of `device`, and what is recomputed.
///
/// # Errors
/// `Usage` if the job's axes are not possible, with possible values, or if nothing fits, with changes that would fit.
pub fn choose(job: &Job, world: usize, device: &Device) -> Result<Choice> {
    resident(choose_recompute(job, world, device)?, job, world, device)
}

fn choose_recompute(job: &Job, world: usize, device: &Device) -> Result<Choice> {
    if job.config.gradient.recompute != Recompute::Auto {
        return choose_layout(job, world, device);
    }
    let with = |recompute| recomputing(job, recompute, |job| choose_layout(job, world, device));
    if device.is_cpu() {
        return with(least_recompute(job, world, device));
    }
    let (choice, parts) = (with(Recompute::Block)?, job.parts(world)?);
    let layout = choice.chosen.layout();
    let fits =
        |recompute: &Recompute| recomputing(job, *recompute, |job| candidate(job, &parts, layout, device).fits());
    match LESS.into_iter().find(fits) {
        Some(recompute) => recomputing(job, recompute, |job| recount(choice, job, world, device)),
        None => Ok(choice),
    }
}

/// The same choice with the optimizer's state on the GPU for all updates of a step, if the plan offloads it and
/// training has enough memory for it.
fn resident(mut choice: Choice, job: &Job, world: usize, device: &Device) -> Result<Choice> {
    let layout = *choice.chosen.layout();
    if device.is_cpu()
        || !layout.swap.has_state()
        || job.config.mesh.offload.contains(&Offload::Optimizer)
        || job.shape.updates() < 2
    {
        return Ok(choice);
    }
    let (parts, layout) =
        (job.parts(world)?, Layout { swap: Swap { state: StateSwap::BetweenSteps, ..layout.swap }, ..layout });
    let found = recomputing(job, choice.recompute, |job| candidate(job, &parts, &layout, device));
    if found.is_better(&choice.chosen) {
        choice.chosen = found;
    }
    Ok(choice)
}

/// The kinds of partial recomputation, the least first.
const LESS: [Recompute; 2] = [Recompute::None, Recompute::Attention];

/// The least recomputation with which a job on CPUs fits in some layout; full recomputation if it fits in none.
pub fn least_recompute(job: &Job, world: usize, device: &Device) -> Recompute {
    let fits = |recompute: &Recompute| recomputing(job, *recompute, |job| refuse::fits(&[], world, job, device));
    LESS.into_iter().find(fits).unwrap_or(Recompute::Block)
}

/// Calls `plan` with the job that recomputes `recompute`.
fn recomputing<R>(job: &Job, recompute: Recompute, plan: impl FnOnce(&Job) -> R) -> R {
    let mut config = job.config.clone();
    config.gradient.recompute = recompute;
    plan(&Job { config: &config, ..job.clone() })
}

/// Chooses the layout. On CPUs a run assumes the longest rows that the job allows, because it has not read its data
/// yet, and longer rows may follow. So on CPUs, known lengths affect the layout only if nothing fits otherwise. They
/// always affect memory and time.
fn choose_layout(job: &Job, world: usize, device: &Device) -> Result<Choice> {
    if device.is_cpu() && matches!(job.rows.origin, Origin::Drawn | Origin::Sampled) {
        job.check()?;
        let longest = Job::new(job.config, job.archs, None);
        let choice = choose_among(&longest, world, device);
        let choice = choice.and_then(|choice| recount(choice, job, world, device));
        if let Ok(choice) = choice
            && choice.chosen.fits()
        {
            return Ok(choice);
        }
    }
    choose_among(job, world, device)
}

/// The same choice with the memory and time of `job`'s rows and recomputation.
///
/// # Errors
/// `Usage` if a role has no placement.
pub fn recount(mut choice: Choice, job: &Job, world: usize, device: &Device) -> Result<Choice> {
    let parts = job.parts(world)?;
    let again = |layout: &Layout| candidate(job, &parts, layout, device);
    choice.recompute = job.config.gradient.recompute;
    choice.chosen = again(choice.chosen.layout());
    for other in &mut choice.runners_up {
        let fitted = other.candidate.fits();
        other.candidate = again(other.candidate.layout());
        if fitted {
            let fits = other.candidate.fits();
            other.why = if fits { slower(&choice.chosen, &other.candidate) } else { refuse::misfit(&other.candidate) };
        }
    }
    Ok(choice)
}

fn choose_among(job: &Job, world: usize, device: &Device) -> Result<Choice> {
    job.check()?;
    let parts = job.parts(world)?;
    let mut all = candidates(job, &parts, &layouts(job, world, device)?, device);
    if !device.is_cpu() && job.shape.has_rollout() {
        let short: Vec<Candidate> = all.iter().filter(|found| found.is_short(job)).cloned().collect();
        all.extend(offloading(job, &parts, &short, device));
    }
    let compared = all.len();
    let (mut fitting, misfits): (Vec<Candidate>, Vec<Candidate>) = all.into_iter().partition(Candidate::fits);
    let count = fitting.len();
    let Some(best) = best(&fitting, device) else {
        return Err(refuse::nothing_fits(job, world, device, &misfits));
    };
    let chosen = fitting.swap_remove(best);
    let fastest = fitting.iter().min_by(|a, b| a.step_s().total_cmp(&b.step_s()));
    let why = match fastest.filter(|fastest| fastest.step_s() < chosen.step_s()) {
        _ if device.is_cpu() => "the fewest tensor ranks and the lowest ZeRO stage that fit".to_string(),
        None => "the fastest predicted layout that fits".to_string(),
        Some(fastest) => format!(
            "predicted within {:.0} % of the fastest layout that fits ({:.1} s), which has {}",
            100.0 * (TIE - 1.0),
            fastest.step_s(),
            less_plain(fastest, &chosen)
        ),
    };
    let runners_up = runners_up(&chosen, fitting, misfits);
    let recompute = job.config.gradient.recompute;
    Ok(Choice { chosen, recompute, why, runners_up, compared, fitting: count })
}

/// Layouts of `short` with offloading: of everything, with the state onloaded for each update or once for all updates of
/// a step. Where that helps, also of less.
fn offloading(job: &Job, parts: &[RolesOnRanks], short: &[Candidate], device: &Device) -> Vec<Candidate> {
    let mut all: Vec<Candidate> = Vec::new();
    let once = job.shape.updates() > 1 && !job.config.mesh.offload.contains(&Offload::Optimizer);
    let states = [Some(StateSwap::BetweenUpdates), once.then_some(StateSwap::BetweenSteps)];
    for state in states.into_iter().flatten() {
        let most = swapping(short, &[Swap { state, roles: true }]);
        let found = candidates(job, parts, &most, device);
        let helped = short.iter().zip(&found).filter(|(before, found)| found.is_better(before));
        let helped: Vec<Candidate> = helped.map(|(before, _)| before.clone()).collect();
        let less = [Swap { state, roles: false }, Swap { state: StateSwap::Never, roles: true }];
        let less = swapping(&helped, &less);
        let is_new = |layout: &Layout| !all.iter().any(|other| other.layout() == layout);
        let less: Vec<Layout> = less.into_iter().filter(is_new).collect();
        all.extend(found);
        all.extend(candidates(job, parts, &less, device));
    }
    all
}

/// A candidate of each layout, in their order; threads share them.
fn candidates(job: &Job, parts: &[RolesOnRanks], layouts: &[Layout], device: &Device) -> Vec<Candidate> {
    let shares = pool().threads().min(layouts.len()).max(1);
    let of_share = |id: usize| {
        let own = layouts.iter().enumerate().skip(id).step_by(shares);
        own.map(|(i, layout)| (i, candidate(job, parts, layout, device))).collect::<Vec<_>>()
    };
    let mut found: Vec<_> = std::thread::scope(|scope| {
        let started: Vec<_> = (0..shares).map(|id| scope.spawn(move || of_share(id))).collect();
        let joined = started.into_iter().map(std::thread::ScopedJoinHandle::join);
        joined.flat_map(|found| found.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    found.sort_by_key(|(i, _)| *i);
    found.into_iter().map(|(_, candidate)| candidate).collect()
}

/// The memory and time of one job on one layout, whether it fits or not.
pub fn candidate(job: &Job, parts: &[RolesOnRanks], layout: &Layout, device: &Device) -> Candidate {
    let placed = parts.iter().map(|(roles, ranks)| {
        let layout = layout.on_ranks(ranks.len());
        let (memory, time) = count(job, &layout, device, roles);
        Placed { roles: roles.clone(), ranks: ranks.clone(), layout, memory, time }
    });
    Candidate { placed: placed.collect(), runs_ahead: job.config.mesh.async_updates_max > 0 }
}

/// The value of an axis in the job, if it is a number.
pub fn fixed(axis: Auto) -> Option<usize> {
    if let Auto::Is(n) = axis { Some(n) } else { None }
}

pub fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n).filter(move |d| n.is_multiple_of(*d))
}

/// Whether all models can be sharded over `tensor` ranks.
pub fn is_legal(job: &Job, tensor: usize) -> bool {
    job.archs.0.iter().all(|(.., arch)| arch.check_tensor(tensor).is_ok())
}

/// Every layout that the job's axes and heads allow.
pub fn layouts(job: &Job, world: usize, device: &Device) -> Result<Vec<Layout>> {
    let mesh = &job.config.mesh;
    let (sequence, chunks) = (fixed(mesh.sequence).unwrap_or(1), mesh.pipeline_chunks);
    // Parts of a placement have the same tensor and sequence axes.
    let smallest = job.parts(world)?.iter().map(|(_, ranks)| ranks.len()).min().unwrap_or(world);
    let exact = job.config.gradient.order == GradientOrder::Fixed;
    let tensors: Vec<usize> = match fixed(mesh.tensor) {
        Some(n) => vec![n],
        None if exact => vec![1],
        None => divisors(smallest).filter(|t| is_legal(job, *t)).collect(),
    };
    let mut found = Vec::new();
    let both = tensors.iter().flat_map(|tensor| pipelines(job, *tensor, smallest, device).map(move |p| (*tensor, p)));
    for (tensor, pipeline) in both {
        let rest = sequence * pipeline * tensor;
        let parts_of_layers = pipeline * if pipeline > 1 { chunks } else { 1 };
        let has_layers = job.archs.0.iter().all(|(.., arch)| arch.check_pipeline(parts_of_layers).is_ok());
        if rest == 0 || !smallest.is_multiple_of(rest) || !is_legal(job, tensor) || !has_layers {
            continue;
        }
        let data = world / rest;
        if fixed(mesh.data).is_some_and(|n| n != data) || data * rest != world {
            continue;
        }
        let mesh = Mesh { data, pipeline, sequence, tensor, expert: mesh.expert };
        let parts = job.parts(world)?;
        let fits = |ranks: usize| Mesh { data: ranks / rest, ..mesh }.check_expert().is_ok();
        if !parts.iter().all(|(_, ranks)| fits(ranks.len())) {
            continue;
        }
        let is_tried = |zero: &usize| pipeline == 1 || *zero <= ZERO_OF_STAGES || fixed(job.config.mesh.zero).is_some();
        for zero in stages(job, data * sequence).into_iter().filter(is_tried) {
            for rollout_tensor in rollouts(job, tensor, smallest, device) {
                let (chunks, swap) =
                    (if pipeline > 1 { chunks } else { 1 }, Swap::from_offload(&job.config.mesh.offload));
                found.push(Layout { mesh, zero, chunks, rollout_tensor, swap });
            }
        }
    }
    if found.is_empty() { Err(refuse::no_layout(job, world, smallest)) } else { Ok(found) }
}

/// The numbers of pipeline stages that are tried with `tensor` ranks for each matrix. On GPUs these are the powers of two,
/// within a node's tensor ranks.
fn pipelines(job: &Job, tensor: usize, ranks: usize, device: &Device) -> impl Iterator<Item = usize> + use<> {
    let config = job.config;
    let is_one = device.is_cpu()
        || config.gradient.order == GradientOrder::Fixed
        || config.model.quantize != Quantize::None
        || job.shape.trained == 0
        || tensor > device.ranks_per_node;
    let all = match fixed(config.mesh.pipeline) {
        Some(n) => vec![n],
        None if is_one => vec![1],
        None => divisors(ranks).filter(|p| p.is_power_of_two() && *p <= STAGES_MAX).collect(),
    };
    all.into_iter()
}

fn stages(job: &Job, ranks: usize) -> Vec<usize> {
    match job.config.mesh.zero {
        Auto::Is(stage) => vec![stage.min(3)],
        Auto::Auto if ranks == 1 || job.config.gradient.order == GradientOrder::Fixed => vec![1],
        Auto::Auto => vec![1, 2, 3],
    }
}

fn rollouts(job: &Job, tensor: usize, ranks: usize, device: &Device) -> Vec<usize> {
    let data = job.config.rollout.data;
    let fits = |t: &usize| matches!(data, Auto::Auto) || data == Auto::Is(ranks / *t);
    let legal = |t: &usize| job.archs.actor().check_tensor(*t).is_ok() && fits(t);
    // Whether GPU kernels support its shards.
    let reads = |t: &usize| *t == tensor || gpu::check_cut(device::Device::Cuda, job.archs.actor(), *t).is_ok();
    match job.config.rollout.tensor {
        Auto::Is(n) => vec![n].into_iter().filter(|n| *n > 0 && ranks.is_multiple_of(*n) && legal(n)).collect(),
        Auto::Auto if device.is_cpu() || !job.shape.has_rollout() => vec![tensor].into_iter().filter(fits).collect(),
        Auto::Auto => {
            let within = |t: &usize| *t <= device.ranks_per_node.max(tensor);
            divisors(ranks).filter(|t| legal(t) && reads(t) && within(t)).collect()
        }
    }
}

/// The layouts of `short` with more offloading to host memory.
fn swapping(short: &[Candidate], more: &[Swap]) -> Vec<Layout> {
    let of = |layout: &Layout, more: &Swap| Layout { swap: layout.swap.and(*more), ..*layout };
    let all = short.iter().flat_map(|found| more.iter().map(move |more| (found.layout(), of(found.layout(), more))));
    all.filter(|(before, layout)| *before != layout).map(|(_, layout)| layout).collect()
}

/// The order among layouts of equal speed.
fn plainness(candidate: &Candidate) -> (usize, usize, Swap, usize, bool, usize) {
    let layout = candidate.layout();
    let Layout { mesh, zero, rollout_tensor, swap, .. } = *layout;
    (mesh.pipeline, mesh.tensor, swap, zero, rollout_tensor != mesh.tensor, rollout_tensor)
}

fn best(fitting: &[Candidate], device: &Device) -> Option<usize> {
    let least = fitting.iter().map(Candidate::step_s).fold(f64::INFINITY, f64::min);
    let close = |candidate: &Candidate| device.is_cpu() || candidate.step_s() <= TIE * least;
    (0..fitting.len()).filter(|&i| close(&fitting[i])).min_by_key(|&i| plainness(&fitting[i]))
}

/// The best of each other (tensor, pipeline, zero); layouts that fit are first.
fn runners_up(chosen: &Candidate, fitting: Vec<Candidate>, misfits: Vec<Candidate>) -> Vec<RunnerUp> {
    let axes = |c: &Candidate| (c.layout().mesh.tensor, c.layout().mesh.pipeline, c.layout().zero);
    let mut seen = vec![axes(chosen)];
    let mut found = Vec::new();
    let mut fitting = fitting;
    fitting.sort_by(|a, b| a.step_s().total_cmp(&b.step_s()));
    // One with the chosen layout's own axes shows the effect of swapping and of KV cache batches.
    if let Some(at) = fitting.iter().position(|c| axes(c) == axes(chosen)) {
        let candidate = fitting.remove(at);
        found.push(RunnerUp { why: slower(chosen, &candidate), candidate });
    }
    let mut misfits = misfits;
    misfits.sort_by_key(|c| c.fullest().memory.peak().1.bytes);
    for candidate in fitting.into_iter().chain(misfits) {
        if found.len() == SHOWN {
            break;
        }
        if seen.contains(&axes(&candidate)) {
            continue;
        }
        seen.push(axes(&candidate));
        let why = if candidate.fits() { slower(chosen, &candidate) } else { refuse::misfit(&candidate) };
        found.push(RunnerUp { candidate, why });
    }
    found
}

/// The first property that ranks `other` after `than` among layouts of equal speed.
fn less_plain(other: &Candidate, than: &Candidate) -> &'static str {
    let ((stages, tensor, swap, zero, ..), (stages_of, tensor_of, swap_of, zero_of, ..)) =
        (plainness(other), plainness(than));
    match () {
        () if stages > stages_of => "more pipeline stages",
        () if tensor > tensor_of => "more tensor ranks",
        () if swap > swap_of => "more offloading to host memory",
        () if zero > zero_of => "a higher ZeRO stage",
        () => "another rollout layout",
    }
}

/// The stage in which `other` loses most time. If it loses none, the reason against it.
fn slower(chosen: &Candidate, other: &Candidate) -> String {
    let lost = |stage: Stage| other.seconds_of(stage) - chosen.seconds_of(stage);
    let most = Stage::ALL.into_iter().max_by(|a, b| lost(*a).total_cmp(&lost(*b))).expect("a step has stages");
    let more = 100.0 * (other.step_s() / chosen.step_s() - 1.0);
    if more <= 0.0 {
        let much = if more > -0.5 { "as fast".to_string() } else { format!("{:.0} % faster", -more) };
        return format!("{much}, with {}", less_plain(other, chosen));
    }
    let much = if more < 0.5 { "barely slower".to_string() } else { format!("{more:.0} % slower") };
    format!("{much}: {} {:.1} s more", most.name(), lost(most))
}
