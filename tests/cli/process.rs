//! Events from the system: signals, limits, links, files that change, and streams without a reader.

use super::command::program;
use super::fixture::Fixture;
use crate::process::{Ended, Running, launched};
use crate::resume::job::signal;
use rlhf_hpc::checkpoint::newest;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The program, started by a shell command.
fn in_shell(fixture: &Fixture, before: &str, arguments: &str, redirected: &str) -> Ended {
    let line = format!("{before} exec {} {arguments} {redirected}", env!("CARGO_BIN_EXE_rlhf-hpc"));
    let mut shell = launched(Path::new("bash"), 0);
    shell.args(["-c", &line]).current_dir(fixture.root());
    Running::new(shell).end()
}

#[test]
fn an_argument_that_is_not_utf8_is_named() {
    let fixture = Fixture::new();
    let bad = OsStr::from_bytes(b"job.dir=r\xffun");
    let mut command = program(fixture.root(), 0);
    command.arg("run").arg("job.toml").arg(bad);
    Running::new(command).end().refused(2, &["job.dir=r\u{fffd}un", "is not UTF-8"]);
}

#[test]
fn a_lock_that_is_a_link_is_neither_followed_nor_changed() {
    let fixture = Fixture::new();
    fixture.write("precious", "precious");
    fs::create_dir_all(fixture.path("run")).unwrap();
    for target in ["../precious", "../new"] {
        std::os::unix::fs::symlink(target, fixture.path("run/run.lock")).unwrap();
        fixture.job(&[]).refused(2, &["run.lock must be a file of this run (got a symbolic link)"]).hinted("job.dir");
        assert_eq!(fixture.text("precious"), "precious");
        assert!(!fixture.path("new").exists());
        fs::remove_file(fixture.path("run/run.lock")).unwrap();
    }
}

#[test]
fn a_dry_run_follows_no_link_and_changes_nothing() {
    let fixture = Fixture::new();
    fixture.write("precious/data/rows", "precious");
    let link = |to: &str, at: &str| std::os::unix::fs::symlink(to, fixture.path(at)).unwrap();
    let dry = || fixture.run(&["run", "job.toml", "--dry-run"]);
    let before = fixture.files(".");
    link("precious", ".run.dry-run");
    dry().refused(2, &[".run.dry-run must be a directory of dry runs (got a symbolic link)"]).hinted("remove it");
    fs::remove_file(fixture.path(".run.dry-run")).unwrap();
    // Leftovers of a killed dry run, whose run no longer exists.
    fs::create_dir(fixture.path(".run.dry-run")).unwrap();
    fs::create_dir(fixture.path("run")).unwrap();
    link("../run/metrics.jsonl", ".run.dry-run/metrics.jsonl");
    link("../precious/data", ".run.dry-run/data");
    dry().well();
    assert!(!fixture.path(".run.dry-run").exists() && !fixture.path("run/metrics.jsonl").exists());
    // A run directory that is a link, with dangling links in it.
    fs::rename(fixture.path("run"), fixture.path("elsewhere")).unwrap();
    fs::create_dir(fixture.path("elsewhere/checkpoints")).unwrap();
    link("elsewhere", "run");
    link("step-9", "elsewhere/checkpoints/latest");
    dry().well();
    assert!(fixture.path("run").is_symlink() && fixture.path("elsewhere/checkpoints/latest").is_symlink());
    fs::remove_file(fixture.path("run")).unwrap();
    fs::remove_dir_all(fixture.path("elsewhere")).unwrap();
    assert_eq!(fixture.files("."), before);
    fixture.write("run/export/notes.txt", "mine");
    dry().refused(2, &["contains notes.txt, which is not part of an export"]);
    assert!(!fixture.path(".run.dry-run").exists(), "a refused dry run leaves nothing");
}

#[test]
fn a_file_linked_from_outside_the_model_directory_is_neither_saved_nor_exported() {
    let fixture = Fixture::new();
    fixture.write("secret", "{{ messages }}");
    let link = |to: &str, at: &str| std::os::unix::fs::symlink(to, fixture.path(at)).unwrap();
    link("../secret", "model/chat_template.jinja");
    fs::rename(fixture.path("model/tokenizer.json"), fixture.path("model/own")).unwrap();
    link("own", "model/tokenizer.json");
    let ended = fixture.job(&["job.steps=1"]).well();
    ended.assert(0, &["model/chat_template.jinja is a link to "]);
    for dir in ["run/export", "run/checkpoints/step-1"] {
        assert!(!fixture.path(&format!("{dir}/chat_template.jinja")).exists(), "{dir}");
        assert_eq!(fixture.read(&format!("{dir}/tokenizer.json")), fixture.read("model/own"), "{dir}");
    }
}

#[test]
fn a_full_disk_is_an_error_that_names_the_file_and_leaves_the_checkpoints_intact() {
    let fixture = Fixture::new();
    fixture.job(&["job.steps=1"]).well();
    let job = "run job.toml metrics.rollouts_every_steps=0";
    in_shell(&fixture, "ulimit -f 64;", job, "").refused(74, &["run/checkpoints/", "File too large"]);
    let left = newest(&fixture.path("run/checkpoints")).unwrap().unwrap();
    assert!(left.manifest.step == 1 && left.skipped.is_empty(), "{left:?}");
    let names = fs::read_dir(fixture.path("run/checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!names.into_iter().any(|name| name.to_string_lossy().contains("partial")));
}

#[test]
fn a_mapped_file_that_shrinks_ends_the_program_with_its_name() {
    let fixture = Fixture::new();
    let mut job = program(fixture.root(), 0);
    job.args(["run", "job.toml", "job.steps=1000000", "eval.every_steps=0", "checkpoint.every_steps=0"]);
    let mut running = Running::new(job);
    running.wait_until(|| fs::read(fixture.path("run/metrics.jsonl")).is_ok_and(|text| !text.is_empty()));
    File::options().write(true).open(fixture.path("questions.bin")).unwrap().set_len(0).unwrap();
    running.end().assert(74, &["questions.bin was truncated or became unreadable while it was mapped"]);
}

#[test]
fn a_verb_without_a_checkpoint_dies_of_signals_as_usual() {
    let fixture = Fixture::new();
    for (name, number) in [("USR1", 10), ("USR2", 12), ("HUP", 1), ("XCPU", 24), ("TERM", 15), ("INT", 2)] {
        for after_ms in [0, 20, 300] {
            let bare = program(fixture.root(), 0);
            // A shell starts background jobs with SIGINT ignored.
            let mut verb = Command::new("env");
            verb.arg("--default-signal=INT").arg(bare.get_program()).current_dir(fixture.root());
            verb.envs(bare.get_envs().filter_map(|(name, value)| Some((name, value?))));
            verb.args(["logprobs", "--model", "model", "--input", "-", "--device", "cpu"]);
            let mut running = verb.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let _open = running.stdin.take();
            // Before it executes the program the process is `env`, which may still ignore the signal.
            let exe = format!("/proc/{}/exe", running.id());
            while fs::read_link(&exe).is_ok_and(|exe| exe != Path::new(bare.get_program())) {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(after_ms));
            assert!(signal(name, running.id()));
            let ended = running.wait().unwrap();
            assert_eq!(ended.signal(), Some(number), "SIG{name} after {after_ms} ms: {ended}");
        }
    }
}

#[test]
fn a_hangup_under_nohup_stays_ignored() {
    let fixture = Fixture::new();
    let mut nohup = launched(Path::new("nohup"), 0);
    nohup.arg(env!("CARGO_BIN_EXE_rlhf-hpc")).current_dir(fixture.root());
    nohup.args(["run", "job.toml", "job.steps=1000000", "eval.every_steps=0", "checkpoint.every_steps=0"]);
    let mut running = Running::new(nohup);
    let lines = || fs::read(fixture.path("run/metrics.jsonl")).map_or(0, |text| text.len());
    running.wait_until(|| lines() > 0);
    assert!(signal("HUP", running.pid()));
    let before = lines();
    running.wait_until(|| lines() > 2 * before);
    assert!(signal("USR2", running.pid()));
    running.end().assert(85, &["(SIGUSR2) and saved a checkpoint"]);
}

#[test]
fn an_unwritable_standard_error_changes_no_exit_code() {
    let fixture = Fixture::new();
    for nowhere in ["2>&-", "2>/dev/full"] {
        for (arguments, code) in [
            ("run job.toml model.actor=nosuch", 65),
            ("run nosuch.toml", 2),
            ("run job.toml job.steps=1 job.dir=/proc/nosuch", 74),
            ("run job.toml job.steps=1", 0),
            ("tokenizer rows.jsonl --vocabulary 264 --out tokenizer2 --force", 0),
            ("--version", 0),
        ] {
            let ended = in_shell(&fixture, "", arguments, nowhere);
            assert_eq!(ended.code, Some(code), "{arguments} {nowhere}: {}{}", ended.stdout, ended.stderr);
        }
    }
}

#[test]
fn no_ancestor_of_a_reward_process_exposes_secrets_in_its_environment() {
    let fixture = Fixture::new();
    fixture.write(
        "reward.py",
        r#"
import os
def f(completions, **kwargs):
    pid = os.getppid()
    while pid > 1 and os.path.basename(os.readlink(f"/proc/{pid}/exe")) != "rlhf-hpc":
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    with open(f"/proc/{pid}/environ", "rb") as file:
        environment = file.read()
    with open("looked", "w") as file:
        file.write(f"{pid} {len(environment)}")
    assert b"hf_secret" not in environment, "the key is seen"
    return [1.0] * len(completions)
"#,
    );
    let job = "run job.toml job.steps=1 reward.rule=[] reward.python=reward.py";
    in_shell(&fixture, "export HF_TOKEN=hf_secret;", job, "").well();
    let looked = fixture.text("looked");
    assert!(!looked.starts_with("1 ") && !looked.ends_with(" 0"), "it looked at the trainer: {looked}");
}
