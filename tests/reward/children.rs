//! The end of the processes that a Python reward starts.

use crate::reward::python::{Job, score};
use crate::reward::{comes_true, config};
use rlhf_hpc::reward::{Reward, RewardContext};
use std::path::{Path, PathBuf};

/// Starts a daemon (two forks, a session of its own, and the pipe of the answers) that records its id.
const DAEMON: &str = r#"
import os, time
def noted():
    return os.path.getsize("pids") if os.path.exists("pids") else 0
def daemon():
    before = noted()
    if os.fork():
        while noted() == before:
            time.sleep(0.01)
        return
    os.setsid()
    if os.fork() == 0:
        with open("pids", "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(1000)
    os._exit(0)
"#;

#[test]
fn daemons_of_a_reward_are_killed_with_it_and_other_processes_are_not() {
    let mut other =
        std::process::Command::new("sleep").arg("1000").stdout(std::process::Stdio::null()).spawn().unwrap();
    let attempts = [
        ("time.sleep(1000)", 2),
        ("os._exit(3)", 2),
        ("os.kill(os.getpid(), 11)", 2),
        ("raise RuntimeError()", 2),
        ("return [1, 2]", 1),
    ];
    let outcomes = attempts.map(|(end, attempts)| {
        let job = Job::new(&format!("{DAEMON}\ndef f(completions, **kwargs):\n    daemon()\n    {end}"));
        let outcome = job.score("timeout_s = 6.0\nretries = 1");
        let pids = std::fs::read_to_string(job.path("pids")).unwrap_or_default();
        let alive = pids.lines().filter(|pid| !is_dead(pid)).count();
        (end, attempts, outcome.is_ok(), pids.lines().count(), alive)
    });
    let other_lives = other.try_wait().unwrap().is_none();
    other.kill().unwrap();
    other.wait().unwrap();
    for (end, attempts, is_ok, started, alive) in outcomes {
        assert_eq!((is_ok, started, alive), (attempts == 1, attempts, 0), "{end}");
    }
    assert!(other_lives, "a process that is no reward's was killed");
}

fn is_dead(pid: &str) -> bool {
    // A zombie has ended: only init has not reaped it.
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat"));
    stat.map_or(true, |s| s.contains(") Z") || s.contains(") X"))
}

#[test]
fn a_killed_trainer_leaves_no_child_process() {
    // The trainer that this test starts and kills.
    if let Some(dir) = std::env::var_os("REWARD_TEST_DIR") {
        let mut reward =
            Reward::new(&config("python = \"reward.py\""), &PathBuf::from(dir), &RewardContext::default()).unwrap();
        score(&mut reward).unwrap_err();
        return;
    }
    let job = Job::new(
        r#"
import os, time
def f(completions, **kwargs):
    with open("new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("new", "pid")
    time.sleep(1000)
"#,
    );
    let mut trainer = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "reward::children::a_killed_trainer_leaves_no_child_process"])
        .env("REWARD_TEST_DIR", job.dir.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    comes_true("the function is called", || job.path("pid").exists());
    let pid = std::fs::read_to_string(job.path("pid")).unwrap();
    assert!(!is_dead(&pid));
    trainer.kill().unwrap();
    trainer.wait().unwrap();
    comes_true("the child is dead", || is_dead(&pid));
}
