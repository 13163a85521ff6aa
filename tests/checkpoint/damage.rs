//! A damaged checkpoint is skipped by name; a save that fails loses nothing.

use crate::checkpoint::{manifest, save_step};
use crate::names;
use rlhf_hpc::checkpoint::{Keep, Payload, newest, resume, save};
use rlhf_hpc::comm::Group;
use rlhf_hpc::error::Kind;
use serde_json::json;
use std::fs;
use std::path::Path;

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).expect("reads");
    bytes[at] ^= 1;
    fs::write(path, bytes).expect("writes");
}

#[test]
fn the_newest_intact_checkpoint_is_loaded_and_skipped_ones_are_named() {
    type Damage = fn(&Path);
    let faults: [(&str, Damage); 6] = [
        ("hash", |dir| flip(&dir.join("actor.rank-0000.bin"), 4321)),
        ("bytes", |dir| fs::write(dir.join("actor.rank-0000.bin"), "short").expect("writes")),
        ("cannot open", |dir| fs::remove_file(dir.join("cursor.bin")).expect("removes")),
        ("manifest.json", |dir| flip(&dir.join("manifest.json"), 60)),
        ("manifest.json", |dir| fs::remove_file(dir.join("manifest.json")).expect("removes")),
        ("manifest.json", |dir| {
            let text = fs::read(dir.join("manifest.json")).expect("reads");
            fs::write(dir.join("manifest.json"), &text[..text.len() / 2]).expect("writes");
        }),
    ];
    for (word, damage) in faults {
        let root = tempfile::tempdir().expect("a directory");
        save_step(root.path(), 1, 3).expect("saves");
        save_step(root.path(), 2, 3).expect("saves");
        damage(&root.path().join("step-2"));
        let checkpoint = newest(root.path()).expect("step 1 is whole").expect("step 1 is there");
        assert_eq!(checkpoint.manifest.step, 1);
        assert_eq!(checkpoint.skipped.len(), 1);
        assert!(
            checkpoint.skipped[0].starts_with("step-2: ") && checkpoint.skipped[0].contains(word),
            "{checkpoint:?}"
        );
        damage(&root.path().join("step-1"));
        let error = newest(root.path()).expect_err("none is whole");
        assert!(error.kind == Kind::Data && error.message.contains("step-1") && error.message.contains("step-2"));
    }
}

#[test]
fn every_flipped_byte_of_a_manifest_is_noticed() {
    let root = tempfile::tempdir().expect("a directory");
    save_step(root.path(), 1, 3).expect("saves");
    let path = root.path().join("step-1/manifest.json");
    let bytes = fs::read(&path).expect("reads");
    for at in 0..bytes.len() {
        flip(&path, at);
        assert!(newest(root.path()).is_err(), "byte {at}");
        fs::write(&path, &bytes).expect("writes");
    }
    assert!(newest(root.path()).expect("whole again").is_some());
}

#[test]
fn leftovers_of_a_killed_run_are_removed_only_at_the_next_start() {
    let root = tempfile::tempdir().expect("a directory");
    save_step(root.path(), 1, 3).expect("saves");
    for left in [".step-2.partial", ".step-0.removing"] {
        fs::create_dir(root.path().join(left)).expect("makes");
        fs::write(root.path().join(left).join("actor.bin"), "half").expect("writes");
    }
    // The old directory of a step, whose replacement was not committed.
    save_step(root.path(), 3, 3).expect("saves");
    fs::rename(root.path().join("step-3"), root.path().join(".step-3.old")).expect("renames");
    fs::write(root.path().join("notes.txt"), "mine").expect("writes");
    assert_eq!(newest(root.path()).expect("readable").expect("there").manifest.step, 1);
    assert_eq!(names(root.path()).len(), 6, "looking changes nothing");
    assert_eq!(resume(root.path(), &Group::one()).expect("readable").expect("there").manifest.step, 3);
    assert_eq!(names(root.path()), ["latest", "notes.txt", "step-1", "step-3"]);
}

#[test]
fn a_directory_that_cannot_be_written_is_an_io_error() {
    let root = tempfile::tempdir().expect("a directory");
    let file = root.path().join("file");
    fs::write(&file, "not a directory").expect("writes");
    let error = save_step(&file.join("checkpoints"), 1, 3).expect_err("a file is in the way");
    assert_eq!(error.kind, Kind::Io);
    assert!(error.message.contains("checkpoints"), "{error}");
}

#[test]
fn names_that_leave_the_directory_and_duplicate_names_are_rejected() {
    let root = tempfile::tempdir().expect("a directory");
    save_step(root.path(), 1, 3).expect("saves");
    let elsewhere =
        ["", "..", "../x", "a/../b", "a/b/c", "a/", "/etc/passwd", ".hidden", "a/.b", "manifest.json", "a\0b"];
    let elsewhere = elsewhere.map(|name| vec![name]);
    for files in elsewhere.into_iter().chain([vec!["a.bin", "a.bin"]]) {
        let files: Vec<(String, Payload)> = files.into_iter().map(|n| (n.to_string(), Payload::bytes(b"x"))).collect();
        save(root.path(), &Group::one(), &files, manifest(2, json!({})), Keep::default()).expect_err("refused");
    }
    assert_eq!(names(root.path()), ["latest", "step-1"]);
}

#[test]
fn a_write_that_fails_midway_loses_nothing() {
    crate::alone("checkpoint::damage::a_write_that_fails_midway_loses_nothing", || {
        let root = tempfile::tempdir().expect("a directory");
        save_step(root.path(), 1, 1).expect("saves");
        crate::limit_files(16 << 10);
        let error = save_step(root.path(), 2, 1).expect_err("the shard has 80 kB");
        crate::limit_files(u64::MAX);
        assert!(error.kind == Kind::Io && error.message.starts_with("cannot write"), "{error}");
        assert!(error.message.contains("actor.rank-0000.bin"), "{error}");
        assert_eq!(names(root.path()), ["latest", "step-1"]);
        assert_eq!(newest(root.path()).expect("readable").expect("there").manifest.step, 1);
    });
}
