//! kill -9 at any moment.

use crate::checkpoint::{LEN, save_step, weights};
use rlhf_hpc::checkpoint::{SavedVector, newest, resume};
use rlhf_hpc::comm::Group;
use serde_json::json;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Set in the processes that the test starts: where the checkpoints are.
const ROOT: &str = "CHECKPOINT_ROOT";

/// Resumes from the newest checkpoint and commits step after step until it is killed, printing each.
fn save_until_killed(root: &Path) {
    let from = resume(root, &Group::one()).expect("whole or absent").map_or(0, |c| c.manifest.step);
    let mut said = std::io::stdout();
    writeln!(said, "began after {from}").expect("the parent reads");
    for step in from + 1.. {
        // Every other step is saved twice, so that replacing one is killed too.
        for _ in 0..=step % 2 {
            save_step(root, step, 2).expect("saves");
        }
        writeln!(said, "committed {step}").expect("the parent reads");
    }
}

#[test]
fn a_kill_at_any_moment_loses_no_committed_checkpoint() {
    match std::env::var_os(ROOT) {
        Some(root) => save_until_killed(Path::new(&root)),
        None => killed(30),
    }
}

#[test]
#[ignore = "long: a thousand kills"]
fn a_thousand_kills_lose_no_committed_checkpoint() {
    killed(1000);
}

fn killed(lives: u64) {
    let root = tempfile::tempdir().expect("a directory");
    let mut committed = 0;
    let mut kills_inside = 0;
    for life in 0..lives {
        let mut child = Command::new(std::env::current_exe().expect("this program has a path"))
            .args(["--exact", "checkpoint::kill::a_kill_at_any_moment_loses_no_committed_checkpoint", "--nocapture"])
            .env(ROOT, root.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let began = lines.by_ref().map_while(Result::ok).find(|l| l.contains("began after"));
        let began = began.expect("the child finds its checkpoint whole");
        let from: u64 = began.split_whitespace().last().and_then(|n| n.parse().ok()).expect("a number");
        assert!(from >= committed, "life {life} began after {from}, {committed} was committed");
        // 0 to 40 ms in uneven steps: a save takes a few ms.
        std::thread::sleep(Duration::from_micros(life * 104_729 % 40_000));
        child.kill().expect("the child is ours");
        child.wait().expect("the child is ours");
        let last = lines.map_while(Result::ok).filter_map(|l| l.strip_prefix("committed ")?.parse().ok()).max();
        committed = last.unwrap_or(0).max(from);
        kills_inside += u32::from(crate::names(root.path()).iter().any(|n| n.starts_with('.')));
        if committed == 0 {
            continue;
        }
        let checkpoint = newest(root.path()).expect("whole").expect("what was committed is there");
        assert!(checkpoint.manifest.step >= committed && checkpoint.skipped.is_empty(), "{checkpoint:?}");
        let mut values = vec![0.0; LEN];
        SavedVector::open(&checkpoint, "actor", LEN)
            .and_then(|saved| saved.read(0..LEN, &mut values))
            .expect("covered");
        assert_eq!(values, weights(checkpoint.manifest.step, LEN));
        assert_eq!(checkpoint.manifest.state["step"], json!(checkpoint.manifest.step));
    }
    assert!(committed > 0, "some checkpoints were committed");
    assert!(u64::from(kills_inside) > lives / 12, "only {kills_inside} of {lives} kills hit a save");
}
