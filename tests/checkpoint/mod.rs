//! Checkpoints are whole or absent: damage is found, full disks lose nothing, kill -9 loses no committed one.

mod damage;
mod kill;
mod round_trip;

use rlhf_hpc::checkpoint::{Keep, Manifest, Payload, save};
use rlhf_hpc::comm::Group;
use rlhf_hpc::error::Result;
use rlhf_hpc::mesh::Mesh;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn manifest(step: u64, state: Value) -> Manifest {
    Manifest::new(step, &Mesh::data_only(1), "c0ffee", state)
}

/// Values that identify their step.
fn weights(step: u64, len: usize) -> Vec<f32> {
    (0..len as u64).map(|i| ((i * 7919 + step * 104_729) % 100_003) as f32 * 0.37).collect()
}

const LEN: usize = 20_000;

/// Commits a checkpoint of `step` as a group of one.
fn save_step(root: &Path, step: u64, keep_last: usize) -> Result<PathBuf> {
    let values = weights(step, LEN);
    let files = [
        ("actor.rank-0000.bin".to_string(), Payload::shards("actor", [(0, &values[..])], LEN)),
        ("cursor.bin".to_string(), Payload::bytes(b"row 7")),
    ];
    let state = json!({ "step": step, "kl_coef": 0.1 + step as f64 });
    save(root, &Group::one(), &files, manifest(step, state), Keep { last: keep_last, best: None })
}
