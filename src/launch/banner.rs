//! The banner of a run: what will run where, and why.

use super::gemm::GemmChoice;
use super::gpu;
use super::layout::{Expected, Layout, Swap, describe_zero};
use super::run::Run;
use crate::config;
use crate::config::mesh::Placement;
use crate::device::{self, Device};
use crate::error::format_bytes;
use crate::metrics::{Banner, BannerModel};

/// What a method needs in addition to its models.
#[derive(Default)]
pub struct Needs {
    /// Bytes that the rollouts of a step take of the disk at most.
    pub rollouts: u64,
    pub notes: Vec<(String, String)>,
}

impl Run {
    pub fn banner(&mut self, steps: u64, resumed_from: Option<u64>, models: Vec<BannerModel>, needs: Needs) {
        let hosts = gpu::alike(&self.ranks.world.hosts).into_iter();
        let devices = match self.device {
            Device::Cpu => vec![device::describe()],
            Device::Cuda => gpu::describe(&self.ranks.all),
        };
        let notes = self.notes().into_iter().chain(needs.notes).chain(self.describe_rollouts(needs.rollouts)).collect();
        let Expected { taken, groups, .. } = self.expected_of_fullest().cloned().unwrap_or_default();
        self.recorder.banner(&Banner {
            job_kind: config::name(&self.config.job.kind),
            job_name: self.config.job.name.clone(),
            run_dir: self.config.job.dir.display().to_string(),
            seed: self.config.job.seed,
            steps,
            resumed_from,
            hosts: hosts.map(|(name, ranks)| (name.clone(), ranks.len())).collect(),
            threads_per_rank: device::cpu::pool::pool().threads(),
            devices: [devices, self.device_rows.clone()].concat(),
            meshes: self.of_placements(|layout| layout.mesh.to_string()),
            models,
            memory_planned: taken,
            memory: groups.into_iter().map(|(name, bytes)| (name.to_string(), bytes as u64)).collect(),
            notes,
        });
    }

    /// `describe` of each placement's layout; with its roles where there are several.
    fn of_placements(&self, describe: impl Fn(&Layout) -> String) -> Vec<String> {
        let of = |(placement, layout): (&Placement, &Layout)| {
            let roles: Vec<&str> = placement.roles.iter().map(|role| role.name()).collect();
            format!("{} on {}..{}: {}", roles.join(", "), placement.ranks.start, placement.ranks.end, describe(layout))
        };
        match &self.ranks.layouts[..] {
            [one] => vec![describe(one)],
            all => self.ranks.placements.iter().zip(all).map(of).collect(),
        }
    }

    fn describe_rollouts(&self, rollout_bytes: u64) -> Option<(String, String)> {
        let metrics = &self.config.metrics;
        let kept = match metrics.rollouts_keep_last {
            0 => "all are kept".to_string(),
            kept => format!("the last {kept} are kept"),
        };
        let every = match metrics.rollouts_every_steps {
            1 => "each step".to_string(),
            every => format!("every {every} steps"),
        };
        let description = format!("at most {} on the disk for {every}, {kept}", format_bytes(rollout_bytes));
        (rollout_bytes > 0).then(|| ("rollouts.h5".to_string(), description))
    }

    fn notes(&self) -> Vec<(String, String)> {
        let stages = self.of_placements(|layout| describe_zero(&layout.mesh, layout.zero)).into_iter().enumerate();
        let mut notes: Vec<(String, String)> =
            stages.map(|(i, description)| (if i == 0 { "zero" } else { "" }.to_string(), description)).collect();
        if let Some(GemmChoice { description, measured, .. }) = &self.gemm {
            notes.push(("gemm".to_string(), description.clone()));
            notes.extend(measured.map(|times| ("measured".to_string(), times.describe())));
        }
        if self.device == Device::Cuda && self.ranks.layout().swap != Swap::default() {
            let waiting = match (self.ranks.layout().swap.optimizer, self.ranks.layout().swap.roles) {
                (true, true) => "optimizer state, and weights of idle roles",
                (true, false) => "optimizer state",
                _ => "weights of idle roles",
            };
            let pinned = self.plan.expected.iter().flatten().map(|expected| expected.host).max().unwrap_or(0);
            let description = format!("{waiting}, {} of the host's memory pinned", format_bytes(pinned as u64));
            notes.push(("host".to_string(), description));
        }
        notes
    }
}
