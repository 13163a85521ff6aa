//! Signals while graphs run and while state waits in the host's memory: a job that is stopped, killed or held in turn ends each
//! time as the manual says, and goes on to the bits of one that nothing interrupted.

use crate::failing::{TENSOR, ZERO};
use crate::jobs::{CONFIG, TELLING, command, emulated, export, metrics};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What is sent, to which rank of the launcher (none: to the launcher), the exit code, words of the message.
type Interruption = (&'static str, Option<usize>, i32, &'static [&'static str]);

const INTERRUPTIONS: [Interruption; 4] = [
    ("USR1", None, 85, &["stopped at step ", "run the same line to go on"]),
    ("TERM", Some(1), 85, &["stopped at step ", "run the same line to go on"]),
    ("KILL", Some(1), 137, &["signal 9 (Killed)"]),
    (
        "STOP",
        Some(1),
        1,
        &["a collective took longer than 10 s", "rank 1 (", "does not answer", "rank 0 (", "waits in "],
    ),
];

fn start(at: &Path, name: &str, sets: &str) -> Child {
    let own = "run ppo.toml job.steps=6 rollout.response_tokens_max=12 checkpoint.every_steps=1 \
               mesh.collective_timeout_s=10 metrics.rollouts_every_steps=0";
    let mut command = command(2, at, &format!("{own} job.dir={name} {sets}"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(std::fs::File::create(at.join("said")).expect("a file")).spawn().expect("mpirun starts")
}

fn lines(at: &Path, name: &str) -> usize {
    std::fs::read_to_string(at.join(name).join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}

/// Lets a job that has made `from` steps make one more, interrupts it in the next, and looks at how it ends.
fn interrupted(at: &Path, name: &str, sets: &str, from: usize, (signal, rank, code, words): Interruption) {
    let mut child = start(at, name, sets);
    let since = Instant::now();
    while lines(at, name) <= from {
        assert!(since.elapsed() < Duration::from_secs(100) && child.try_wait().expect("a child").is_none(), "no step");
        std::thread::sleep(Duration::from_millis(5));
    }
    let launcher = child.id();
    let ranks = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).expect("the ranks");
    let ranks: Vec<&str> = ranks.split_whitespace().collect();
    let to = rank.map_or(launcher.to_string(), |rank| ranks[ranks.len() - 2 + rank].to_string());
    let sent = Command::new("kill").args([&format!("-{signal}"), &to]).status();
    assert!(sent.is_ok_and(|status| status.success()), "kill -{signal} {to}");
    let ended = child.wait().expect("it ends");
    let said = std::fs::read_to_string(at.join("said")).expect("what it said");
    eprintln!("{signal} to {rank:?} behind step {}: {ended}", from + 1);
    assert_eq!(ended.code(), Some(code), "{signal}: {said}");
    let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.iter().all(|word| flat.contains(word)), "{signal}: {said}");
    assert!(said.matches("error: ").count() <= 1, "{signal}: {said}");
}

fn goes_on_bitwise(sets: &str, interruptions: &[Interruption]) {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    assert!(start(at, "whole", sets).wait().expect("it ends").success());
    for interruption in interruptions {
        interrupted(at, "cut", sets, lines(at, "cut"), *interruption);
    }
    let last = start(at, "cut", sets).wait().expect("it ends");
    assert!(last.success(), "{}", std::fs::read_to_string(at.join("said")).unwrap_or_default());
    let [whole, cut] = ["whole", "cut"].map(|name| metrics(at, name));
    assert_eq!((whole.len(), cut.len()), (6, 6));
    for (a, b) in whole.iter().zip(&cut) {
        for key in TELLING {
            assert!(a[key].is_number() && a[key] == b[key], "{key}: {a} against {b}");
        }
    }
    assert!(export(at, "whole") == export(at, "cut"), "other weights");
}

#[test]
#[ignore = "long: whole jobs, six times each"]
fn a_job_goes_on_bitwise_whatever_interrupts_it() {
    goes_on_bitwise(TENSOR, &INTERRUPTIONS);
    goes_on_bitwise(ZERO, &INTERRUPTIONS);
}

#[test]
fn a_job_whose_state_and_weights_are_at_the_host_goes_on_bitwise_where_a_rank_is_killed() {
    goes_on_bitwise(ZERO, &INTERRUPTIONS[2..3]);
}
