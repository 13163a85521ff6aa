//! The memory of a rank of CPUs: the job itself, run on a null device (`device::null`) as that rank.

use super::case::Case;
use super::heap::{Bytes, Kind, Peak, Phase, What};
use super::job::{Job, Planned};
use super::rows::Row;
use super::shape::{Layout, fullest};
use crate::comm::abort;
use crate::config::mesh::{Placement, RoleName};
use crate::data::RowTokens;
use crate::device::null::{self, Record};
use crate::mesh::Mesh;
use crate::tensor::arena;
use std::collections::BTreeMap;
use std::ops::Range;

/// Steps that are taken at least.
const STEPS_MIN: usize = 2;

/// What a rank held.
pub(super) struct Counted {
    pub peaks: BTreeMap<Phase, Peak>,
    pub resident: usize,
    pub arena: usize,
    /// Whether the job could take its steps.
    pub ran: bool,
}

/// Runs the fullest of the ranks that have `roles`.
pub(super) fn count(case: Case, roles: &[RoleName]) -> Counted {
    let Case { job, layout, device, .. } = case;
    let part = job.archs.of(RoleName::Actor).map_or(0, |actor| fullest(actor, layout.mesh.tensor).rank);
    let stride = layout.mesh.ranks() / layout.mesh.data;
    let world = job.config.mesh.placed_ranks().unwrap_or(layout.mesh.ranks());
    let parts = job.parts(world).unwrap_or_else(|_| vec![(roles.to_vec(), 0..layout.mesh.ranks())]);
    let start = parts.iter().find(|(there, _)| there.contains(&roles[0])).map_or(0, |(_, ranks)| ranks.start);
    let planned = Planned {
        config: job.config,
        archs: job.archs,
        placements: placements(job, layout, &parts),
        rank: start + job.fullest_rank(&layout.mesh) * stride + part,
        rows: job.rows.all().iter().map(|row| tokens(job, row)).collect(),
        eval: evaluated(job),
        // What one step leaves is there in the next.
        steps: job.looked_at().max(STEPS_MIN) as u64,
    };
    let (done, usage, record) =
        arena::on_null(case.threads, device.memory_bytes, || abort::caught(|| (job.runner)(planned)));
    let Record { peaks, resident } = record;
    Counted { peaks: by_phase(job, &peaks), resident, arena: usage.peak, ran: done.is_ok() }
}

/// All placements, each with the axes of `layout` but for their data.
fn placements(job: &Job, layout: &Layout, parts: &[(Vec<RoleName>, Range<usize>)]) -> Vec<(Placement, Layout)> {
    let rest = layout.mesh.ranks() / layout.mesh.data;
    let on = |(roles, ranks): &(Vec<RoleName>, Range<usize>)| {
        let mesh = Mesh { data: ranks.len() / rest, ..layout.mesh };
        // Rewards are no models, and are with the others.
        let roles = if job.config.mesh.placement.is_empty() { RoleName::ALL.to_vec() } else { roles.clone() };
        (Placement { roles, ranks: ranks.clone() }, Layout { mesh, ..*layout })
    };
    parts.iter().map(on).collect()
}

fn tokens(job: &Job, row: &Row) -> RowTokens {
    if job.is_ppo() {
        RowTokens { all: row.prompt, response: 0 }
    } else {
        RowTokens { all: row.tokens(), response: row.response }
    }
}

fn evaluated(job: &Job) -> Vec<RowTokens> {
    job.rows.answered().iter().chain(&job.rows.evaluated()).map(|row| tokens(job, row)).collect()
}

fn by_phase(job: &Job, peaks: &BTreeMap<&'static str, null::Peak>) -> BTreeMap<Phase, Peak> {
    // A job that is refused before it holds anything has this phase, too.
    let mut all = BTreeMap::from([(Phase::Load, Peak::default())]);
    for (name, peak) in peaks {
        let phase = match *name {
            "load" => Phase::Load,
            "score" => Phase::Score,
            "checkpoint" => Phase::Checkpoint,
            "rollout" | "reward" => Phase::Rollout,
            "eval" if job.is_ppo() => Phase::Rollout,
            _ => Phase::Train,
        };
        let fuller = all.entry(phase).or_default();
        if peak.bytes >= fuller.bytes {
            *fuller = Peak { bytes: peak.bytes, parts: by_kind(&peak.parts) };
        }
    }
    all
}

fn by_kind(parts: &null::Bytes) -> Bytes {
    let mut all = Bytes::new();
    for (owner, bytes) in parts {
        let (kind, role) = match *owner {
            "weights of the actor" => (Kind::Weights, Some(RoleName::Actor)),
            "weights of the critic" => (Kind::Weights, Some(RoleName::Critic)),
            "weights of the reference" => (Kind::Weights, Some(RoleName::Reference)),
            "gradients" => (Kind::Gradients, None),
            "optimizer state" => (Kind::Moments, None),
            "gathered units" => (Kind::Gathered, None),
            "rollout weights" => (Kind::RolloutWeights, None),
            "kv cache" => (Kind::KvCache, None),
            "experience" => (Kind::Experience, None),
            "mapped files" => (Kind::Files, None),
            "rotary tables" | "program" => (Kind::Program, None),
            _ => (Kind::Activations, None),
        };
        *all.entry(What { kind, role }).or_default() += bytes;
    }
    all
}
