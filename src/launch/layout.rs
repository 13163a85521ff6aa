//! The layout of a job on its ranks: what the job sets, and for `"auto"` what the plan chooses.

use crate::comm::World;
use crate::config::Config;
use crate::config::mesh::{Auto, Placement, RoleName};
use crate::config::rollout::RolloutConfig;
use crate::device::cpu::pool;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::plan::case::Case;
use crate::plan::choose::Placed;
use crate::plan::shape::Swap;
use crate::plan::{self, Archs, Choice, Device, Job, Memory, Rows, Runner};
use crate::sys::memory;
use std::ops::Range;

#[derive(Clone, Debug)]
pub struct Layout {
    pub mesh: Mesh,
    /// ZeRO stage, 0 to 3.
    pub stage: usize,
    /// Of the rollout.
    pub rollout: Mesh,
    /// What is offloaded to the host's memory while it is not needed.
    pub swap: Swap,
    /// The plan finds no layout that is sure to fit. It counts the longest rows that the job allows: shorter ones may fit, and a
    /// rank that runs out of memory reports it.
    pub is_tight: bool,
    /// The rollout's tensor size and the reason, where the job leaves it to the plan.
    pub rollout_reason: Option<String>,
    /// What the plan expects a rank to hold; none where nothing fits.
    pub expected: Option<Expected>,
}

/// What the plan expects of a rank.
#[derive(Clone, Debug)]
pub struct Expected {
    placed: Placed,
    device: Device,
    /// Whether cuBLASLt computes GEMMs, and whether it keeps its workspace; none before that is known.
    fast: Option<[bool; 2]>,
    runner: Runner,
    pub memory: Memory,
}

impl Expected {
    /// Counts memory again for rows of these lengths.
    ///
    /// The layout itself is chosen for the longest rows that the job allows, before data is read: so it does not change
    /// with the data, from start to start or on a resume, and what fits still fits when rows are longer.
    pub fn count(&mut self, config: &Config, rows: Rows) {
        let Ok(archs) = Archs::load(config, None) else { return };
        let mut job = Job::new(config, &archs, Some(rows), self.runner);
        [job.fast, job.workspace] = self.fast.unwrap_or([job.fast, job.workspace]);
        let threads = pool::pool().threads();
        let case = Case { job: &job, layout: &self.placed.layout, device: &self.device, threads };
        self.memory = plan::count(case, &self.placed.roles).0;
    }
}

impl Layout {
    pub fn planned(layout: &plan::Layout) -> Self {
        let plan::Layout { mesh, zero, swap, .. } = *layout;
        let (rollout, is_tight, rollout_reason, expected) = (layout.rollout(), false, None, None);
        Self { mesh, stage: zero, rollout, swap, is_tight, rollout_reason, expected }
    }

    /// Counts memory as the chosen GEMMs need it.
    #[must_use]
    pub fn with_gemm(self, fast: Option<[bool; 2]>) -> Self {
        Self { expected: self.expected.map(|expected| Expected { fast, ..expected }), ..self }
    }

    /// The placements of a run and their layouts, on this host's CPUs or on `gpu`. The same on all ranks, who all call this.
    pub fn of_placements(
        config: &Config,
        roles: &[RoleName],
        world: &World,
        gpu: Option<&Device>,
        runner: Runner,
    ) -> Result<Vec<(Placement, Self)>> {
        let free = memory::available_bytes() / world.local_size.max(1) as u64;
        // The fullest host decides for all.
        let mut least = [-(free as f64)];
        world.group().all_reduce_max_f64(&mut least);
        let cpu = || Device::cpu(-least[0] as u64, world.local_size);
        let device = gpu.cloned().unwrap_or_else(cpu);
        let placements =
            config.mesh.placements(world.size).and_then(|placements| check_roles(config, roles, placements));
        // An error that all ranks agree on names no rank.
        world.group().agree(placements.and_then(|placements| Self::on(config, placements, &device, runner)))
    }

    fn on(
        config: &Config,
        placements: Vec<Placement>,
        device: &Device,
        runner: Runner,
    ) -> Result<Vec<(Placement, Self)>> {
        let mut axes = config.mesh.clone();
        let ranks: usize = placements.iter().map(|placement| placement.ranks.len()).sum();
        // Errors of the job's own axes come before those of the plan.
        let named = placements.iter().try_for_each(|placement| axes.resolve(placement.ranks.len()).map(drop));
        let is_open = ranks > 1 && (axes.tensor == Auto::Auto || axes.zero == Auto::Auto);
        let archs = Archs::load(config, None);
        let choice =
            archs.as_ref().map_err(Error::clone).and_then(|archs| plan::choose(config, archs, ranks, device, runner));
        let mut is_tight = false;
        match &choice {
            Ok(choice) if is_open => {
                axes.tensor = Auto::Is(choice.layout().mesh.tensor);
                axes.zero = Auto::Is(choice.layout().zero);
            }
            Err(error) if is_open => {
                named?;
                let tensor = axes.resolve(placements[0].ranks.len())?.tensor;
                let archs = archs.as_ref().map_err(Error::clone)?;
                is_tight = archs.roles().iter().all(|(_, arch)| arch.check_tensor(tensor).is_ok());
                if !is_tight {
                    return Err(error.clone());
                }
            }
            Err(_) => is_tight = !device.is_cpu(),
            Ok(_) => {}
        }
        let swap = choice.as_ref().map_or_else(|_| plan::choose::asked(config), |choice| choice.layout().swap);
        // CPUs use weights where they are.
        let chosen = choice.as_ref().ok().filter(|_| !device.is_cpu() && config.rollout.tensor == Auto::Auto);
        let tensor_of_rollout = chosen.map_or(config.rollout.tensor, |choice| Auto::Is(choice.layout().rollout_tensor));
        let why = chosen.zip(archs.as_ref().ok()).map(|(choice, archs)| why_so(config, archs, choice, device, runner));
        let placed = choice.map(|choice| choice.chosen.placed).unwrap_or_default();
        let of = |placement: Placement| {
            let mesh = axes.resolve(placement.ranks.len())?;
            let stage = axes.stage()?;
            config.gradient.check_layout(&mesh, stage)?;
            let plays = placement.roles.contains(&RoleName::Actor);
            let wanted = RolloutConfig { tensor: tensor_of_rollout, ..config.rollout.clone() };
            let rollout = if plays { wanted.layout(&mesh)? } else { mesh };
            archs.as_ref().map_or(Ok(()), |archs| check_cuts(archs, &placement, &mesh, &rollout))?;
            let rollout_reason = why.clone().filter(|_| plays);
            let placed = match &archs {
                Ok(archs) if !device.is_cpu() => {
                    on_gpu(config, archs, &placement, (mesh, stage, rollout, swap), device, runner)
                }
                _ => placed.iter().find(|placed| placed.ranks == placement.ranks).cloned(),
            };
            let expected = placed.map(|placed| Expected {
                memory: placed.memory.clone(),
                placed,
                device: device.clone(),
                fast: None,
                runner,
            });
            Ok((placement, Self { mesh, stage, rollout, swap, is_tight, rollout_reason, expected }))
        };
        let of_ranks = |placement: Placement| {
            let ranks = placement.ranks.clone();
            of(placement).map_err(|error| within(config, &ranks, error))
        };
        placements.into_iter().map(of_ranks).collect()
    }
}

fn within(config: &Config, ranks: &Range<usize>, error: Error) -> Error {
    let index = format!("mesh.placement, ranks {}..{}", ranks.start, ranks.end);
    if config.mesh.placement.is_empty() { error } else { error.within(index) }
}

/// Refuses numbers of tensor ranks that a model of the placement cannot be sharded over, in training or in the rollout.
fn check_cuts(archs: &Archs, placement: &Placement, mesh: &Mesh, rollout: &Mesh) -> Result<()> {
    let divides = |size: usize| placement.ranks.len().is_multiple_of(size * mesh.sequence);
    for (role, arch) in archs.roles().into_iter().filter(|(role, _)| placement.roles.contains(role)) {
        let name = role.name();
        arch.check_tensor_where(mesh.tensor, divides)
            .map_err(|error| Error { message: format!("mesh.{} ({name})", error.message), ..error })?;
        if role == RoleName::Actor {
            arch.check_tensor_where(rollout.tensor, |size| placement.ranks.len().is_multiple_of(size))
                .map_err(|error| Error { message: format!("rollout.{}", error.message), ..error })?;
        }
    }
    Ok(())
}

/// The tensor size that the plan has chosen for the rollout, compared with training's own.
fn why_so(config: &Config, archs: &Archs, choice: &Choice, device: &Device, runner: Runner) -> String {
    let (chosen, main) = (choice.layout(), choice.chosen.main());
    let training = chosen.mesh.tensor;
    if chosen.rollout_tensor == training {
        return format!("tensor {training}, as in training: no other is predicted to be faster by more than 2 %");
    }
    let job = Job::new(config, archs, None, runner);
    let parts = choice.chosen.placed.iter().map(|placed| (placed.roles.clone(), placed.ranks.clone()));
    let layout = plan::Layout { rollout_tensor: training, ..*chosen };
    let threads = pool::pool().threads();
    let other = plan::choose::candidate(&job, &parts.collect::<Vec<_>>(), &layout, device, threads);
    let reason = if other.fits() {
        format!("{:.3} s of a step are predicted, {:.3} s with {training}", choice.chosen.step_s(), other.step_s())
    } else {
        format!("with {training} it does not fit")
    };
    format!("tensor {} on {} ranks, {training} in training: {reason}", chosen.rollout_tensor, main.ranks.len())
}

/// The plan of this layout on GPUs.
fn on_gpu(
    config: &Config,
    archs: &Archs,
    placement: &Placement,
    (mesh, zero, rollout, swap): (Mesh, usize, Mesh, Swap),
    device: &Device,
    runner: Runner,
) -> Option<Placed> {
    let there = archs.roles().into_iter().map(|(role, _)| role);
    let roles: Vec<RoleName> = there.filter(|role| placement.roles.contains(role)).collect();
    let layout = plan::Layout { mesh, zero, rollout_tensor: rollout.tensor, swap };
    let job = Job::new(config, archs, None, runner);
    let threads = pool::pool().threads();
    let parts = [(roles, placement.ranks.clone())];
    let is_any = !parts[0].0.is_empty();
    is_any.then(|| plan::choose::candidate(&job, &parts, &layout, device, threads).placed.swap_remove(0))
}

/// `stage 2: optimizer state and gradients sharded over 4 ranks`
pub fn describe_zero(mesh: &Mesh, stage: usize) -> String {
    let ranks = mesh.data * mesh.sequence;
    let sharded =
        ["nothing", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights"];
    let plural = if ranks == 1 { "" } else { "s" };
    format!("stage {stage}: {} sharded over {ranks} rank{plural}", sharded[stage])
}

/// Refuses placements that leave out a role which the job needs.
fn check_roles(config: &Config, roles: &[RoleName], placements: Vec<Placement>) -> Result<Vec<Placement>> {
    if config.mesh.placement.is_empty() {
        return Ok(placements);
    }
    if let [_] = roles {
        let kind = config.job.kind.name();
        return Err(
            Error::usage(format!("mesh.placement is set, a {kind} job has one role")).hint("leave mesh.placement out")
        );
    }
    // The mesh is that of the actor's placement.
    for role in roles.iter().rev().filter(|role| **role != RoleName::Actor) {
        if !placements.iter().any(|placement| placement.roles.contains(role)) {
            return Err(Error::usage(format!("mesh.placement has no place for the {}", role.name()))
                .hint("name it in the roles of one of the entries"));
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
        let placements = || vec![Placement { roles: RoleName::ALL.to_vec(), ranks: 0..2 }];
        let refused = |sets: &[&str], device: &Device| {
            let text = format!(
                "[job]\nkind = \"ppo\"\nsteps = 1\n[model]\nactor = {:?}\n[data]\nprompts = [\"x\"]",
                dir.path()
            );
            let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
            Layout::on(&config::parse(&text, &sets).expect("a job"), placements(), device, |_| Ok(()))
        };
        for device in [Device::cpu(8 << 30, 2), Device::gpu_of("A100", 40 << 30, 2)] {
            for (sets, reason) in [
                (
                    &["mesh.tensor=2", "mesh.zero=1"][..],
                    "mesh.tensor = 2 does not divide the model's 3 attention heads (actor)",
                ),
                (
                    &["mesh.tensor=1", "mesh.zero=1", "rollout.tensor=2"],
                    "rollout.tensor = 2 does not divide the model's 3",
                ),
            ] {
                let error = refused(sets, &device).expect_err(reason);
                assert!(error.message.starts_with(reason), "{error}");
                assert_eq!((error.exit_code(), error.hint.as_deref()), (2, Some("tensor can be 1")));
            }
            assert!(refused(&["mesh.tensor=1", "mesh.zero=1", "rollout.tensor=1"], &device).is_ok());
        }
    }
}
