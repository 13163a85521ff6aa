//! The banner of a run: the ranks, devices, models and settings, and why they were chosen.

use super::gemm::GemmChoice;
use super::gpu;
use super::layout::{Expected, Layout, StateSwap, Swap, describe_zero};
use super::run::Run;
use crate::config::job::Recompute;
use crate::config::mesh::Placement;
use crate::device::cpu::pool::pool;
use crate::device::{self, Device};
use crate::error::format_bytes;
use crate::metrics::counted;

/// The needs of a method in addition to its models.
#[derive(Default)]
pub struct BannerRows {
    /// The most bytes of disk space that the rollouts of a step take.
    pub rollouts: u64,
    /// The training data and the method.
    pub about: Vec<(String, String)>,
    pub notes: Vec<(String, String)>,
}

impl Run {
    /// Shows the banner. `models` has the rows about the models.
    pub fn banner(&mut self, steps: u64, resumed_from: Option<u64>, models: Vec<(String, String)>, needs: BannerRows) {
        let (config, ranks, threads) = (&self.config, self.ranks.world.size, pool().threads());
        let hosts = gpu::alike(&self.ranks.world.hosts).into_iter();
        let hosts: Vec<String> = hosts.map(|(name, ranks)| format!("{name} x {}", ranks.len())).collect();
        let plural = if hosts.len() == 1 { "" } else { "s" };
        let devices = match self.device {
            Device::Cpu => vec![device::describe()],
            Device::Cuda => gpu::describe(&self.ranks.all),
        };
        let mut rows = vec![
            row("ranks", format!("{ranks} on {} host{plural}: {}", hosts.len(), hosts.join(", "))),
            row("threads", format!("{threads} per rank, {} in total", threads * ranks)),
        ];
        rows.extend(labelled("devices", [devices, self.device_rows.clone()].concat()));
        rows.extend(labelled("mesh", self.of_placements(|layout| layout.mesh.to_string())));
        rows.extend(models);
        let Expected { taken, groups, .. } = self.expected_of_fullest().cloned().unwrap_or_default();
        if !groups.is_empty() {
            let named: u64 = groups.iter().map(|(_, bytes)| *bytes as u64).sum();
            // Free lists.
            let rest = Some(("kept for reuse", taken.saturating_sub(named))).filter(|(_, bytes)| *bytes > 0);
            let groups = groups.iter().map(|(name, bytes)| (*name, *bytes as u64)).chain(rest);
            let parts = groups.map(|(name, bytes)| format!("{name} {}", format_bytes(bytes)));
            let parts = parts.collect::<Vec<_>>().join(", ");
            rows.push(row("memory", format!("{} planned per rank: {parts}", format_bytes(taken))));
        }
        rows.extend(needs.about);
        rows.extend(self.notes(steps > 0).into_iter().chain(needs.notes).chain(self.describe_rollouts(needs.rollouts)));
        let resumed = if self.dry_run { "would resume" } else { "resumed" };
        let from = resumed_from.map_or(String::new(), |step| format!(", {resumed} from step {step}"));
        let (dir, seed) = (config.job.dir.display(), config.job.seed);
        let steps_of = if steps == 0 { String::new() } else { format!(" {},", counted(steps as usize, "step")) };
        rows.extend(config.bases().map(|files| row("job", files)));
        rows.push(row("run", format!("{dir},{steps_of} seed {seed}{from}")));
        self.recorder.banner(steps, resumed_from, &rows);
    }

    /// Applies `describe` to the layout of each placement, and adds the roles if there are several placements.
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
            0 => "all kept".to_string(),
            1 => "only the last kept".to_string(),
            kept => format!("the last {kept} kept"),
        };
        let every = match metrics.rollouts_every_steps {
            1 => "each step".to_string(),
            every => format!("every {every} steps"),
        };
        let description = format!("recorded {every}, up to {} on disk each, {kept}", format_bytes(rollout_bytes));
        (rollout_bytes > 0).then(|| row("rollouts.h5", description))
    }

    fn notes(&self, trains: bool) -> Vec<(String, String)> {
        let stages =
            if trains { self.of_placements(|layout| describe_zero(&layout.mesh, layout.zero)) } else { Vec::new() };
        let mut notes: Vec<(String, String)> = labelled("zero", stages).collect();
        if let Some(GemmChoice { description, measured, .. }) = &self.gemm {
            notes.push(row("gemm", description.clone()));
            notes.extend(measured.map(|times| row("measured", times.describe())));
        }
        let again = match self.config.gradient.recompute {
            Recompute::Attention => Some("attention of each block, in the backward pass"),
            Recompute::Block => Some("each block except its input, in the backward pass"),
            Recompute::Auto | Recompute::None => None,
        };
        notes.extend(again.map(|what| row("recompute", what.to_string())));
        let tokens = self.plan.microbatch_tokens;
        notes.extend(tokens.map(|tokens| row("micro-batch", format!("at most {tokens} tokens, chosen by the plan"))));
        if self.device == Device::Cuda && self.ranks.layout().swap != Swap::default() {
            let swap = self.ranks.layout().swap;
            let state = match swap.state {
                StateSwap::Never => None,
                StateSwap::BetweenSteps => Some("optimizer state except during the updates of a step"),
                StateSwap::BetweenUpdates => Some("optimizer state"),
            };
            let roles = swap.roles.then_some("weights of idle roles");
            let waiting = state.into_iter().chain(roles).collect::<Vec<_>>().join(", and ");
            let pinned = self.plan.expected.iter().flatten().map(|expected| expected.host).max().unwrap_or(0);
            notes.push(row("host", format!("{waiting}: {} of pinned host memory", format_bytes(pinned as u64))));
        }
        notes
    }
}

fn row(label: &str, value: String) -> (String, String) {
    (label.to_string(), value)
}

/// A row for each value; the first one has the label.
fn labelled(label: &str, values: Vec<String>) -> impl Iterator<Item = (String, String)> {
    values.into_iter().enumerate().map(move |(i, value)| row(if i == 0 { label } else { "" }, value))
}
