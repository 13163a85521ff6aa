//! Everything that a resume must restore, and how it lies in a checkpoint.

use super::exchange;
use super::role::Learner;
use super::setup::Run;
use super::update::UpdateSums;
use crate::advantage::AdvantageState;
use crate::checkpoint::{self, Checkpoint, Meta, Payload};
use crate::data::{Cursor, Ledger};
use crate::error::{Error, Result};
use crate::experience::{Experience, Response};
use crate::model::export::SIDE_FILES;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The small part of a checkpoint: JSON in its manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    /// Finished steps.
    pub step: u64,
    pub cursor: Cursor,
    pub ledger: Ledger,
    /// KL controller and reward moments (ppo).
    pub advantage: Option<AdvantageState>,
    /// Optimiser steps of each learner.
    pub updates: Vec<u64>,
    /// Whether `work.bin` holds the unfinished step.
    pub has_work: bool,
}

/// A step that was interrupted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Work {
    /// In rollout: the finished responses, by (index of the prompt in the step, sample).
    Rollout(Vec<Response>),
    /// In training: the experience, where the updates stand, and what was measured so far.
    Update(UpdateWork),
}

/// The training phase of one step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct UpdateWork {
    pub experience: Vec<Experience>,
    /// KL coefficient of this step.
    pub kl_beta: f32,
    /// Minibatches done in this step, over all epochs.
    pub minibatches: usize,
    /// Sums over those, as `UpdateSums::to_row`.
    pub sums: Vec<f64>,
    /// Numbers of the step that are known already.
    pub values: Vec<(String, f64)>,
}

impl UpdateWork {
    pub fn sums(&self) -> UpdateSums {
        if self.sums.is_empty() { UpdateSums::default() } else { UpdateSums::from_row(&self.sums) }
    }
}

fn name(role: &str, what: &str, rank: usize) -> String {
    format!("{role}.{what}.rank-{rank:04}.bin")
}

/// Saves at the end of `state.step`, or within the step after it where there is `work`.
pub fn save(run: &mut Run, state: &mut State, learners: &[&Learner], work: Option<&Work>) -> Result<()> {
    run.recorder.sync()?;
    state.updates = learners.iter().map(|l| l.zero.updates).collect();
    state.has_work = work.is_some();
    let rank = run.group.rank();
    let encoded = work.filter(|_| rank == 0).map(exchange::encode);
    let masters: Vec<_> = learners.iter().map(|l| l.master()).collect();
    let side = if rank == 0 { side_files(&learners[0].role.dir)? } else { Vec::new() };
    let mut files: Vec<(String, Payload)> = Vec::new();
    for (learner, master) in learners.iter().zip(&masters) {
        let role = learner.role.name;
        files.push((name(role, "weights", rank), Payload::F32(master)));
        files.push((name(role, "m", rank), Payload::F32(&learner.zero.m)));
        files.push((name(role, "v", rank), Payload::F32(&learner.zero.v)));
    }
    if let Some(bytes) = &encoded {
        files.push(("work.bin".to_string(), Payload::Bytes(bytes)));
    }
    files.extend(side.iter().map(|(name, bytes)| (name.clone(), Payload::Bytes(bytes))));
    let roles: Vec<serde_json::Value> = learners
        .iter()
        .map(|l| {
            let ranges: Vec<[usize; 2]> = l.zero.partition().ranges().iter().map(|r| [r.start, r.end]).collect();
            let dir = l.role.dir.display().to_string();
            serde_json::json!({ "name": l.role.name, "len": l.zero.partition().len(), "ranges": ranges, "dir": dir })
        })
        .collect();
    let json = serde_json::json!({ "run": state, "roles": roles });
    let meta = Meta { mesh: run.mesh, config_hash: run.config_hash.clone() };
    let keep = run.config.checkpoint.keep_last;
    let committed = checkpoint::save(&run.checkpoints(), state.step, &run.group, &files, &json, &meta, keep);
    committed.map(|_| ())
}

/// config.json and the tokenizer files, so that a checkpoint can be exported without the directory it began from.
fn side_files(dir: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    for name in SIDE_FILES {
        let path = dir.join(name);
        if path.exists() {
            files.push(((*name).to_string(), std::fs::read(&path).map_err(|e| Error::io("read", &path, &e))?));
        }
    }
    Ok(files)
}

/// The newest checkpoint of the run that verifies, if there is one; the same on all ranks.
pub fn newest(run: &Run) -> Result<Option<Checkpoint>> {
    run.group.agree(checkpoint::newest(&run.checkpoints()))
}

/// Restores the learners' weights and optimiser state, and gives the rest.
pub fn restore(run: &Run, from: &Checkpoint, learners: &mut [&mut Learner]) -> Result<(State, Option<Work>)> {
    let restored = restore_here(run, from, learners);
    run.group.agree(restored)
}

fn restore_here(run: &Run, from: &Checkpoint, learners: &mut [&mut Learner]) -> Result<(State, Option<Work>)> {
    let malformed = |what: &str| Error::data(format!("checkpoint {}: {what}", from.dir().display()));
    let json = from.state();
    let state: State = serde_json::from_value(json["run"].clone()).map_err(|e| malformed(&format!("its state is {e}")))?;
    let roles = json["roles"].as_array().ok_or_else(|| malformed("it names no roles"))?;
    if roles.len() != learners.len() || state.updates.len() != learners.len() {
        let (saved, needed) = (roles.len(), learners.len());
        return Err(malformed(&format!("it holds {saved} learning models, this job has {needed}"))
            .hint("give the run a job.dir of its own, or the ppo.advantage it was saved with"));
    }
    for ((learner, role), updates) in learners.iter_mut().zip(roles).zip(&state.updates) {
        let ranges: Vec<[usize; 2]> = serde_json::from_value(role["ranges"].clone())
            .map_err(|e| malformed(&format!("its ranges are malformed: {e}")))?;
        let len = learner.zero.partition().len() as u64;
        if role["len"].as_u64() != Some(len) || role["name"].as_str() != Some(learner.role.name) {
            let held = format!("{} of {} numbers", role["name"], role["len"]);
            return Err(malformed(&format!("it holds {held}, this job needs {} of {len}", learner.role.name))
                .hint("the model's shape changed: give the run a job.dir of its own"));
        }
        learner.restore(*updates, |what, range, out| read_flat(from, learner_name(role), what, &ranges, range, out))?;
    }
    run.group.barrier();
    for learner in learners.iter_mut() {
        learner.publish(&run.group);
    }
    let work = if state.has_work { Some(exchange::decode(&from.file("work.bin")?)?) } else { None };
    Ok((state, work))
}

fn learner_name(role: &serde_json::Value) -> &str {
    role["name"].as_str().unwrap_or_default()
}

/// Reads `range` of a flat buffer that is cut into one file a rank (of as many ranks as saved it).
pub fn read_flat(
    from: &Checkpoint,
    role: &str,
    what: &str,
    ranges: &[[usize; 2]],
    range: std::ops::Range<usize>,
    out: &mut [f32],
) -> Result<()> {
    for (rank, &[start, end]) in ranges.iter().enumerate() {
        let (from_index, to_index) = (range.start.max(start), range.end.min(end));
        if from_index >= to_index {
            continue;
        }
        let file = name(role, what, rank);
        let bytes = from.file(&file)?;
        let part = bytes.get((from_index - start) * 4..(to_index - start) * 4);
        let part = part.ok_or_else(|| Error::data(format!("checkpoint file {file} has {} bytes, needed {}", bytes.len(), (end - start) * 4)))?;
        let target = &mut out[from_index - range.start..to_index - range.start];
        for (value, raw) in target.iter_mut().zip(part.chunks_exact(4)) {
            *value = f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
        }
    }
    Ok(())
}
