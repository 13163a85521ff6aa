//! Saved checkpoints are read back, and old ones are removed when newer ones are committed.

use crate::checkpoint::{LEN, manifest, save_step, weights};
use crate::names;
use rlhf_hpc::checkpoint::{Checkpoint, Keep, Payload, SavedVector, newest, resume, save};
use rlhf_hpc::comm::Group;
use serde_json::json;
use std::cell::RefCell;

#[test]
fn a_saved_checkpoint_reads_back_bit_for_bit() {
    let root = tempfile::tempdir().expect("a directory");
    let dir = save_step(root.path(), 5, 3).expect("saves");
    assert_eq!(dir, root.path().join("step-5"));
    let checkpoint = newest(root.path()).expect("readable").expect("one is there");
    assert_eq!((checkpoint.manifest.step, checkpoint.skipped.len()), (5, 0));
    assert_eq!(checkpoint.manifest.state, json!({ "step": 5, "kl_coef": 5.1 }));
    assert_eq!(&checkpoint.file("cursor.bin").expect("listed")[..], b"row 7");
    let bytes = checkpoint.file("actor.rank-0000.bin").expect("listed");
    assert_eq!(bytemuck::cast_slice::<u8, f32>(&bytes), weights(5, LEN));
    assert!(checkpoint.file("nothing.bin").expect_err("not listed").message.contains("nothing.bin"));
    assert_eq!(Checkpoint::open(&root.path().join("latest")).expect("the link leads there").manifest.step, 5);
}

#[test]
fn each_file_is_on_disk_before_its_source_is_freed() {
    let root = tempfile::tempdir().expect("a directory");
    let seen = RefCell::new(Vec::new());
    let there = || -> usize { std::fs::read_dir(root.path().join(".step-1.partial")).map_or(0, Iterator::count) };
    let note = || seen.borrow_mut().push(there());
    let files = ["a.bin", "b.bin", "c.bin"].map(|name| (name.to_string(), Payload::bytes(b"words").and_then(&note)));
    save(root.path(), &Group::one(), &files, manifest(1, json!({})), Keep::default()).expect("saves");
    assert_eq!(*seen.borrow(), [1, 2, 3], "files that were there");
}

#[test]
fn an_empty_or_missing_directory_has_no_checkpoint() {
    let root = tempfile::tempdir().expect("a directory");
    assert!(newest(root.path()).expect("readable").is_none());
    assert!(newest(&root.path().join("none")).expect("no error").is_none());
    assert!(resume(&root.path().join("none"), &Group::one()).expect("no error").is_none());
}

#[test]
fn any_range_of_a_vector_is_assembled_from_its_shards() {
    let root = tempfile::tempdir().expect("a directory");
    let values = weights(1, 1000);
    let cuts = [0, 10, 10, 400, 1000];
    let files: Vec<(String, Payload)> = (0..4)
        .map(|r| {
            let payload = Payload::shards("actor.m", [(cuts[r], &values[cuts[r]..cuts[r + 1]])], 1000);
            (format!("actor.m.rank-{r:04}.bin"), payload)
        })
        .collect();
    save(root.path(), &Group::one(), &files, manifest(1, json!({})), Keep::default()).expect("saves");
    let checkpoint = newest(root.path()).expect("readable").expect("one is there");
    assert_eq!(checkpoint.vector_len("actor.m"), Some(1000));
    let vector = |name, len| SavedVector::open(&checkpoint, name, len);
    for range in [0..1000, 0..10, 5..15, 399..401, 700..700, 999..1000] {
        let mut out = vec![f32::NAN; range.len()];
        vector("actor.m", 1000).and_then(|saved| saved.read(range.clone(), &mut out)).expect("covered");
        assert_eq!(out, values[range]);
    }
    let other = vector("actor.m", 999).expect_err("another length");
    assert!(other.message.contains("must have 999 elements (got 1000)"), "{other}");
    let none = vector("critic.m", 999).expect_err("another vector");
    assert!(none.message.contains("was not saved"), "{none}");
}

#[test]
fn shards_that_do_not_match_their_files_are_errors() {
    let root = tempfile::tempdir().expect("a directory");
    save_step(root.path(), 1, 1).expect("saves");
    let saved = newest(root.path()).expect("readable").expect("one is there");
    let at = saved.manifest.files.iter().position(|entry| entry.shard.is_some()).expect("a vector");
    let shard = saved.manifest.files[at].shard.clone().expect("it is the file of one");
    let n = shard.len;
    // Backwards; beyond the end; more than any file has; fewer than the file has.
    for ranges in [vec![[0, n], [n, n - 1], [n - 1, n]], vec![[0, n + 1]], vec![[0, usize::MAX]; 3], vec![[0, n - 1]]] {
        let mut checkpoint = saved.clone();
        checkpoint.manifest.files[at].shard.as_mut().expect("a shard").ranges = ranges.clone();
        let error = SavedVector::open(&checkpoint, &shard.vector, n).expect_err("refused");
        assert!(error.message.contains(&shard.vector), "{ranges:?}: {error}");
    }
}

#[test]
fn the_newest_keep_last_checkpoints_stay() {
    let root = tempfile::tempdir().expect("a directory");
    for step in [1, 2, 9, 10, 11] {
        save_step(root.path(), step, 2).expect("saves");
    }
    assert_eq!(names(root.path()), ["latest", "step-10", "step-11"]);
    save_step(root.path(), 12, 0).expect("saves");
    assert_eq!(names(root.path()), ["latest", "step-10", "step-11", "step-12"]);
}

#[test]
fn the_best_checkpoint_is_kept_next_to_the_newest_and_if_its_step_is_saved_again() {
    let root = tempfile::tempdir().expect("a directory");
    let save_keeping = |step, best| {
        let keep = Keep { last: 1, best };
        save(root.path(), &Group::one(), &[], manifest(step, json!(best)), keep).expect("saves");
    };
    for (step, best, left) in [
        (1, None, &["latest", "step-1"][..]),
        (2, Some(2), &["best", "latest", "step-2"]),
        (3, Some(2), &["best", "latest", "step-2", "step-3"]),
        (4, Some(4), &["best", "latest", "step-4"]),
        (4, Some(4), &["best", "latest", "step-4", "step-4.best"]),
        (4, Some(4), &["best", "latest", "step-4", "step-4.best"]),
        (5, Some(4), &["best", "latest", "step-4.best", "step-5"]),
        (6, Some(6), &["best", "latest", "step-6"]),
    ] {
        save_keeping(step, best);
        assert_eq!(names(root.path()), left, "step {step}, the best is {best:?}");
        let open = |link: &str| Checkpoint::open(&root.path().join(link)).map(|c| c.manifest.step).ok();
        assert_eq!((open("latest"), open("best")), (Some(step), best));
    }
}

#[test]
fn a_kill_while_the_best_checkpoint_is_set_aside_loses_no_checkpoint() {
    let root = tempfile::tempdir().expect("a directory");
    let keep = Keep { last: 1, best: Some(4) };
    save(root.path(), &Group::one(), &[], manifest(4, json!(null)), keep).expect("saves");
    let dir = |name: &str| root.path().join(name);
    std::fs::rename(dir("step-4"), dir("step-4.best")).expect("renames");
    std::fs::create_dir(dir(".step-4.partial")).expect("writes");
    assert_eq!(resume(root.path(), &Group::one()).expect("readable").expect("there").manifest.step, 4);
    assert_eq!(names(root.path()), ["best", "latest", "step-4"]);
}

#[test]
fn a_second_save_of_a_step_replaces_the_first() {
    let root = tempfile::tempdir().expect("a directory");
    save_step(root.path(), 4, 3).expect("saves");
    save(root.path(), &Group::one(), &[], manifest(4, json!("second")), Keep::default()).expect("saves again");
    assert_eq!(names(root.path()), ["latest", "step-4"]);
    assert_eq!(newest(root.path()).expect("readable").expect("there").manifest.state, json!("second"));
}
