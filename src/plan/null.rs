//! Memory and time of a rank: the job itself, run on a null device (`device::null`) as that rank.

use super::devices::Device;
use super::job::{Job, RolesOnRanks};
use super::memory::{Memory, Stages};
use super::time::Time;
use crate::comm::abort;
use crate::config::mesh::{Placement, RoleName};
use crate::data::RowTokens;
use crate::device::null::Null;
use crate::launch::layout::Layout;
use crate::model::TensorPart;
use crate::rollout::{edits_logits, forward_bytes};
use crate::tensor::arena;
use crate::train::{self, Planned, PlannedGpu};

/// The least number of steps on CPUs, because the free lists of one step are reused in the next.
const STEPS_MIN: usize = 2;

/// Memory and time of the fullest of the ranks that have `roles`. On a pipeline these are the memory of the fullest stage,
/// and the time of the slowest one with the wait for the others.
pub fn count(job: &Job, layout: &Layout, device: &Device, roles: &[RoleName]) -> (Memory, Time) {
    let stages = layout.mesh.pipeline;
    let counted: Vec<(usize, (Memory, Time))> =
        stages_looked_at(stages).map(|stage| (stage, count_stage(job, layout, device, roles, stage))).collect();
    let of_stages =
        |of: &dyn Fn(&(Memory, Time)) -> f64| counted.iter().map(|(stage, all)| (*stage, of(all))).collect();
    let (bytes, seconds) =
        (of_stages(&|(memory, _)| memory.peak().1.bytes as f64), of_stages(&|(_, time)| time.step_s()));
    let (mut fullest, mut slowest) = (counted[0].1.0.clone(), counted[0].1.1.clone());
    for (_, (memory, time)) in counted.into_iter().skip(1) {
        if (memory.fits, fullest.peak().1.bytes) < (fullest.fits, memory.peak().1.bytes) {
            fullest = memory;
        }
        if time.step_s() > slowest.step_s() {
            slowest = time;
        }
    }
    if stages > 1 {
        fullest.stages = Stages { bytes, seconds };
        slowest.wait_for_stages(stages, layout.chunks, job.microbatches(&layout.mesh));
    }
    (fullest, slowest)
}

/// The stages of `count` that are counted: those with the most activations, with the embedding or with the head.
fn stages_looked_at(count: usize) -> impl Iterator<Item = usize> {
    (0..count).filter(move |stage| count <= 4 || [0, 1, count - 1].contains(stage))
}

/// The memory of the longest responses, and the time of responses of the expected length.
fn count_stage(job: &Job, layout: &Layout, device: &Device, roles: &[RoleName], stage: usize) -> (Memory, Time) {
    let (memory, time) = count_lengths(job, layout, device, roles, stage);
    let Some((config, rows)) = job.expected() else { return (memory, time) };
    let expected = Job { config: &config, rows, ..job.clone() };
    let (at_expected, time) = count_lengths(&expected, layout, device, roles, stage);
    (Memory { kv_expected: at_expected.kv, ..memory }, time)
}

fn count_lengths(job: &Job, layout: &Layout, device: &Device, roles: &[RoleName], stage: usize) -> (Memory, Time) {
    let part = TensorPart::fullest(job.archs.actor(), layout.mesh.tensor).rank;
    let stride = layout.mesh.ranks() / layout.mesh.data;
    let world = job.config.mesh.placed_ranks().unwrap_or(layout.mesh.ranks());
    let parts = job.parts(world).unwrap_or_else(|_| vec![(roles.to_vec(), 0..layout.mesh.ranks())]);
    let start = parts.iter().find(|(there, _)| there.contains(&roles[0])).map_or(0, |(_, ranks)| ranks.start);
    let samples = job.shape.samples() / layout.rollout_data().max(1);
    let (actor, rollout) = (job.archs.actor(), &job.config.rollout);
    let forward_bytes = forward_bytes(actor, layout.rollout_tensor, rollout, samples, edits_logits(rollout)) as usize;
    let is_sampled = job.shape.has_rollout();
    let data = |row: &RowTokens| RowTokens { response: if is_sampled { 0 } else { row.response }, ..*row };
    let planned = Planned {
        config: job.config,
        archs: job.archs,
        placements: placements(job, layout, &parts),
        rank: start
            + job.fullest_rank(&layout.mesh) * stride
            + stage * layout.mesh.sequence * layout.mesh.tensor
            + part,
        rows: job.rows.drawn.iter().map(data).collect(),
        eval: job.rows.evaluated.iter().map(data).collect(),
        images: job.images_of_a_rank(layout),
        steps: job.looked_at().max(if device.is_cpu() { STEPS_MIN } else { 1 }) as u64,
        gpu: device.gpu.map(|_| PlannedGpu { fast: job.fast, workspace: job.workspace, forward_bytes }),
    };
    let on = Null { threads: device.threads, memory_bytes: device.memory_bytes, gpu: device.gpu };
    let steps = planned.steps as f64;
    let (done, usage, record) = arena::on_null(on, || abort::caught(|| train::plan(planned)));
    let time = Time::from_record(&record, steps, job.tokens_of_a_step(), device);
    (Memory::from_record(job, device, &record, usage.peak, done.err()), time)
}

/// All placements, each with the axes of `layout` except data.
fn placements(job: &Job, layout: &Layout, parts: &[RolesOnRanks]) -> Vec<(Placement, Layout)> {
    let on = |(roles, ranks): &RolesOnRanks| {
        // Rewards are not models, and are with the others.
        let roles = if job.config.mesh.placement.is_empty() { RoleName::ALL.to_vec() } else { roles.clone() };
        (Placement { roles, ranks: ranks.clone() }, layout.on_ranks(ranks.len()))
    };
    parts.iter().map(on).collect()
}
