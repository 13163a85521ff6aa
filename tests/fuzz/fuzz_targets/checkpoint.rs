//! Checkpoints: the manifest and the vectors that it lists.

use crate::place;
use rlhf_hpc::checkpoint::{Checkpoint, SavedVector};
use rlhf_hpc::comm::Group;
use rlhf_hpc::sys::files::xxh3;
use std::fs;

/// Reads a manifest, whose hash is made here, and the vectors in its files. The second part of the input is a file.
pub fn run(data: &[u8]) {
    let [manifest, file] = place::cut(data);
    let manifest = manifest.unwrap_or_default();
    let hash = xxh3(manifest);
    place::write("k/manifest.json", &[format!("{{\"xxh3\":\"{hash}\",\n").as_bytes(), manifest].concat());
    place::write_all(["k/a.bin"], [file]);
    let Ok(checkpoint) = Checkpoint::open(&place::path("k")) else { return };
    drop(checkpoint.verify(&Group::one()));
    drop(checkpoint.file("a.bin"));
    let vectors = checkpoint.manifest.files.iter().filter_map(|entry| entry.shard.as_ref());
    for shard in vectors {
        let Ok(vector) = SavedVector::open(&checkpoint, &shard.vector, shard.len) else { continue };
        let mut values = vec![0.0; shard.len.min(64)];
        drop(vector.read(0..values.len(), &mut values));
    }
}

/// A manifest of one vector in two files.
pub fn seeds() -> Vec<Vec<u8>> {
    let shard = r#"{"vector": "actor.weights", "ranges": [[0, 2], [2, 4]], "len": 4}"#;
    let manifest = format!(
        r#""format": 3, "step": 7, "ranks": 1, "mesh": [1, 1, 1, 1], "config_hash": "h", "state": {{"config": "", "x": 1.5}},
        "files": [{{"name": "a.bin", "bytes": 16, "xxh3": "0", "shard": {shard}}}]}}"#
    );
    // `verify` ends at a wrong hash, and the vectors are read all the same.
    drop(fs::remove_file(place::path("k/a.bin")));
    vec![place::join(&[manifest.as_bytes(), &[1; 16]])]
}
