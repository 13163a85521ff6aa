//! Checkpoints that several ranks write together.

use crate::Test;
use crate::collectives::values;
use rlhf_hpc::checkpoint::{Keep, Manifest, Payload, resume, save};
use rlhf_hpc::comm::World;
use rlhf_hpc::error::Kind;
use rlhf_hpc::mesh::Mesh;
use serde_json::json;
use std::path::{Path, PathBuf};

pub const TESTS: &[Test] = &[
    Test { name: "a rank that cannot write stops all ranks and no checkpoint is lost", ranks: &[3], check: one_fails },
    Test { name: "all ranks load the previous checkpoint if a shard is damaged", ranks: &[2], check: damaged },
];

const LEN: usize = 3 * 4096 + 1000;

/// One directory for all ranks; rank 0 removes it in the end.
pub struct Shared(PathBuf, World);

impl Shared {
    pub fn new(world: &World) -> Self {
        let mut path = Vec::new();
        if world.rank == 0 {
            let dir = tempfile::tempdir().expect("a directory").keep();
            path = dir.to_str().expect("a temporary path is UTF-8").as_bytes().to_vec();
        }
        world.group().broadcast_bytes(0, &mut path);
        Self(String::from_utf8(path).expect("rank 0 wrote it").into(), world.clone())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.1.group().barrier();
        if self.1.rank == 0 {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

fn save_step(world: &World, root: &Shared, step: u64, name: &str) -> rlhf_hpc::error::Result<PathBuf> {
    let all = values(step as usize, LEN);
    let (start, end) = (world.rank * LEN / world.size, (world.rank + 1) * LEN / world.size);
    let files = [(name.to_string(), Payload::shards("actor", [(start, &all[start..end])], LEN))];
    let manifest = Manifest::new(step, &Mesh::data_only(world.size), "c0ffee", json!({ "step": step }));
    save(&root.0, &world.group(), &files, manifest, Keep { last: 3, best: None })
}

fn own_name(world: &World) -> String {
    format!("actor.rank-{:04}.bin", world.rank)
}

fn one_fails(world: &World) {
    let root = Shared::new(world);
    save_step(world, &root, 1, &own_name(world)).expect("saves");
    let last = world.size - 1;
    let name = if world.rank == last { "../such.bin".to_string() } else { own_name(world) };
    let error = save_step(world, &root, 2, &name).expect_err("the last rank's name is refused");
    assert!(error.message.starts_with(&format!("rank {last} (")) && error.message.contains("../such.bin"), "{error}");
    let error = save_step(world, &root, 2, "same.bin").expect_err("all ranks use one name");
    assert!(error.kind == Kind::Fault && error.message.contains("same.bin"), "{error}");
    world.group().barrier();
    let left: Vec<_> = std::fs::read_dir(&root.0).expect("there").map(|e| e.expect("an entry").file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?} has more than step-1 and latest");
    assert_eq!(resume(&root.0, &world.group()).expect("readable").expect("there").manifest.step, 1);
}

fn damaged(world: &World) {
    let root = Shared::new(world);
    for step in [1, 2] {
        save_step(world, &root, step, &own_name(world)).expect("saves");
    }
    if world.rank == 0 {
        let path = root.0.join("step-2/actor.rank-0001.bin");
        let mut bytes = std::fs::read(&path).expect("reads");
        bytes[99] ^= 4;
        std::fs::write(&path, bytes).expect("writes");
    }
    world.group().barrier();
    let checkpoint = resume(&root.0, &world.group()).expect("step 1 is whole").expect("there");
    assert_eq!((checkpoint.manifest.step, checkpoint.skipped.len()), (1, 1));
    assert!(checkpoint.skipped[0].contains("actor.rank-0001.bin"), "{:?}", checkpoint.skipped);
}
