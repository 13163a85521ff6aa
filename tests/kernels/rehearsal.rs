//! `tests/gpu.sh` from start to end over a machine that is played, at tiny sizes: what a GPU will meet are the same lines.
//! `tests/rehearsal.sh` does the same with a whole bundle on a bare system.

use crate::driver;
use rlhf_hpc::device::cuda::carried::CUBINS;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

/// Few prompts, short responses: each kernel is played thread by thread.
const TINY: &str = "job.steps=2 rollout.prompts_per_step=2 rollout.response_tokens_max=4 ppo.minibatch_samples=2 \
                    eval.every_steps=0";

fn script(path: &Path, text: &str) {
    fs::write(path, format!("#!/bin/sh\n{text}\n")).expect("a script");
    fs::set_permissions(path, Permissions::from_mode(0o755)).expect("a script that can be started");
}

/// What `bench/bundle.sh` makes, but for MPI, which is this machine's.
fn bundle(at: &Path) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in ["bin", "quickstart"] {
        fs::create_dir_all(at.join(folder)).expect("a folder");
    }
    symlink(env!("CARGO_BIN_EXE_rlhf-hpc"), at.join("bin/rlhf-hpc")).expect("the binary");
    symlink(std::env::current_exe().expect("a test has a program"), at.join("bin/kernels")).expect("the facts");
    for name in ["model.json", "ppo.toml", "sft.toml"] {
        fs::copy(sources.join("jobs/quickstart").join(name), at.join("quickstart").join(name)).expect("the quickstart");
    }
    fs::copy(sources.join("bench/peers/gpu.py"), at.join("gpu.py")).expect("the script");
    for name in ["gpu.sh", "gpu_verbs.sh"] {
        fs::copy(sources.join("tests").join(name), at.join(name)).expect("the script");
    }
    fs::write(at.join("BUNDLE"), "a bundle of the tests\n").expect("a file");
    fs::write(at.join("environment.sh"), "").expect("a file");
    script(&at.join("rlhf-hpc"), r#"exec "$(dirname "$(readlink -f "$0")")/bin/rlhf-hpc" "$@""#);
    // One rank has to do without it.
    let refuses = r#"case " $* " in *" -n 1 "*) exit 9 ;; esac"#;
    script(&at.join("mpirun"), &format!("{refuses}\n{}", r#"exec mpirun --allow-run-as-root "$@""#));
}

/// The report of a run with these variables, and its exit code.
fn run(at: &Path, env: &[(&str, &str)]) -> (Option<i32>, String) {
    let played = at.join("played");
    driver::machine(&played);
    // Notes what python3 is asked for, and asks the next one in PATH.
    let (path, asked) = (at.join("path"), at.join("asked"));
    fs::create_dir_all(&path).expect("a folder");
    let python = format!("echo \"$*\" >>'{}'\nPATH=${{PATH#*:}}\nexec python3 \"$@\"", asked.display());
    script(&path.join("python3"), &python);
    let path = format!("{}:{}", path.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new("bash");
    command.arg(at.join("bundle/gpu.sh")).arg(at.join("report.md")).current_dir(at);
    command.env("PATH", path).env("LD_LIBRARY_PATH", &played).env("PLAYED_KERNELS", played.join("libcublasLt.so.12"));
    command.env("OMPI_MCA_mpi_yield_when_idle", "1").env("GPU_SH_SMALL", "1").env("GPU_SH_PPO", TINY);
    command.env("GPU_SH_RANKS", "2").env("GPU_SH_ROOMS", "^(copy|visit)$").envs(env.iter().copied());
    let done = command.output().expect("bash starts");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!said.contains("unbound") && !said.contains("syntax") && !said.contains("not found"), "{said}");
    (done.status.code(), fs::read_to_string(at.join("report.md")).expect("a report"))
}

#[test]
fn every_section_of_gpu_sh_runs_and_says_how_it_ended() {
    if CUBINS.is_empty() || crate::on_a_real_gpu() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    bundle(&dir.path().join("bundle"));
    fs::create_dir(dir.path().join("path")).expect("a folder");
    let sanitizer =
        "while [ \"${1#-}\" != \"$1\" ]; do shift; done\n\"$@\" && echo '========= ERROR SUMMARY: 0 errors'";
    script(&dir.path().join("path/compute-sanitizer"), sanitizer);
    let (code, report) = run(dir.path(), &[("GPU_SH_SLOW", "9")]);
    assert_eq!(code, Some(0), "{report}");
    let row = |start: &str| report.lines().find(|line| line.starts_with(&format!("| {start}"))).unwrap_or_default();
    for section in
        ["Machine", "PPO, one rank, exact", "PPO, one rank, fast", "PPO, 2 ranks |", "PPO, 2 ranks on 2 GPUs, NCCL"]
    {
        assert!(row(section).ends_with("| passed |"), "{section}\n{report}");
    }
    assert!(row("Verbs").contains("| passed, logprobs 0.0") && row("Verbs").contains(", reward 0.0"), "{report}");
    for part in ["attention", "streaming", "head", "decode", "train", "products"] {
        assert!(row(&format!("Speed: {part} ")).contains("| passed, "), "{part}\n{report}");
    }
    let checked = row("Memcheck").split_once("| passed, ").expect("a row").1;
    assert!(!checked.starts_with("0 facts") && report.contains("\n========= ERROR SUMMARY: 0 errors"), "{report}");
    assert!(row("Kernel facts").contains(" in 2 rooms, rooms with failures: none"), "{report}");
    for target in [
        "attention forward, 64 tokens, 4 heads of 128 over 1 | 60 % of product | ",
        "attention backward, 64 tokens, 4 heads of 128 over 1 | 50 % of product | ",
        "decode attention, 2 x 64 keys, 4 heads over 1 | 85 % of copy | ",
        "log-softmax fused with the head, 64 x 64 x 64 | 70 % of product | ",
        "decode 7B, 1 x 3 tokens, graphs | 75 % of copy | ",
        "training step 1B, 4 x 24 tokens, fast | 45 % of product | ",
    ] {
        assert!(row(target).ends_with(" % | too small to tell |"), "{target}\n{report}");
    }
    assert!(report.contains("**Nothing failed.**") && !report.contains("FAILED"), "{report}");
    // Beside the facts, so that a slow disk has its files at hand, and where it is needed.
    let asked = fs::read_to_string(dir.path().join("asked")).expect("python3 was asked");
    assert_eq!(asked.lines().filter(|line| *line == "-c import torch").count(), 2, "{asked}");
    let record = fs::read_to_string(dir.path().join("report.jsonl")).expect("the record");
    assert!(record.lines().count() > 40, "{record}");
}

#[test]
fn a_part_that_hangs_and_one_that_fails_lose_themselves_alone() {
    if CUBINS.is_empty() || crate::on_a_real_gpu() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let bundle_at = dir.path().join("bundle");
    bundle(&bundle_at);
    let cases = r#"case "$*" in
    *"--part head"*) exec sleep 600 ;;
    *"--part decode"*) echo "error: an illegal address" >&2; exit 1 ;;
    corpus*) exit 1 ;;
esac"#;
    let binary = r#"exec "$(dirname "$(readlink -f "$0")")/bin/rlhf-hpc" "$@""#;
    script(&bundle_at.join("rlhf-hpc"), &format!("{cases}\n{binary}"));
    let (code, report) = run(dir.path(), &[("GPU_SH_SECONDS", "90"), ("GPU_SH_ROOMS", "^residual$")]);
    assert_eq!(code, Some(1), "{report}");
    for row in [
        "| Speed: head | 30 | not ended within its time, 0 works |",
        "| exit code 1, 0 works |",
        "**Failures: 3.**",
        "- bench cuda --part decode: exit code 1",
        "- bench cuda --part head: not ended within its time",
        "- the quickstart's model and data",
        "error: an illegal address",
    ] {
        assert!(report.contains(row), "no {row} in\n{report}");
    }
    assert!(report.contains("| Speed: streaming | ") && report.contains("| 85 % of copy | "), "{report}");
}
