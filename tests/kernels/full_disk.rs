//! Jobs on a GPU whose disk becomes full while they run: one message that names the file, and the checkpoints before stay whole.

use crate::emulation;
use crate::failing::{ZERO, directory};
use crate::jobs::binary;
use rlhf_hpc::checkpoint::{Checkpoint, newest};
use std::path::Path;
use std::process::{Command, Stdio};

/// A shell in a mount namespace of its own, with a file system of `size` at `at`/small; none where no such thing is allowed.
fn on_a_small_disk(at: &Path, size: &str, script: &str) -> Option<Command> {
    let small = at.join("small");
    std::fs::create_dir_all(&small).expect("a directory");
    let mount = format!("mount -t tmpfs -o size={size} tmpfs {}", small.display());
    let shell = |flags: &str, script: &str| {
        let mut command = Command::new("unshare");
        command.args([flags, "sh", "-c", script]).current_dir(at).stdin(Stdio::null());
        command
    };
    let allowed = |flags: &&str| shell(flags, &mount).output().is_ok_and(|done| done.status.success());
    let flags = ["-m", "-rm"].into_iter().find(allowed)?;
    Some(shell(flags, &format!("{mount} && {script}")))
}

/// Behind two checkpoints something else takes the disk but for `left` KiB; what is then there is copied to `kept`.
fn script(line: &str, left: usize) -> String {
    format!(
        "{line} & \
         while [ \"$(ls -d small/run/checkpoints/step-* 2>/dev/null | wc -l)\" -lt 2 ]; do \
         kill -0 $! || exit 99; sleep 0.02; done; \
         free=$(df --output=avail -k small | tail -1); \
         dd if=/dev/zero of=small/filler bs=1k count=$((free - {left})) 2>/dev/null; \
         wait $!; code=$?; rm -rf kept; cp -r small/run kept; exit $code"
    )
}

#[test]
#[ignore = "long: a full disk under jobs on GPUs; a job on CPUs is looked at always"]
fn a_disk_that_becomes_full_ends_a_job_with_the_file_named_and_older_checkpoints_whole() {
    let Some(dir) = directory() else { return };
    let at = dir.path();
    let one = format!("'{}'", binary().display());
    let two = format!("mpirun --allow-run-as-root --oversubscribe --bind-to none -n 2 {one}");
    let zero = ZERO.map(|set| format!("'{set}'")).join(" ");
    // Nothing left; too little for a checkpoint alone; and too little for the records of a step, in parts of it. What writes
    // those is the same without a GPU, and they are what comes next between two checkpoints.
    let records = "job.device=cpu model.dtype=f32 checkpoint.every_steps=10 metrics.tensorboard=false";
    let cases = [
        (&one, "", 0, "small/run/"),
        (&two, &zero[..], 300, "small/run/checkpoints"),
        (&one, records, 4, "small/run/"),
        (&one, records, 8, "small/run/"),
        (&one, records, 16, "small/run/"),
    ];
    for (line, sets, left, named) in cases {
        let job = "run ppo.toml job.dir=small/run model.actor=model job.steps=100000 rollout.response_tokens_max=4 \
                   checkpoint.every_steps=1 checkpoint.keep_last=2 mesh.collective_timeout_s=20";
        let Some(mut command) = on_a_small_disk(at, "40m", &script(&format!("{line} {job} {sets}"), left)) else {
            eprintln!("skipped: this system mounts no tmpfs for us");
            return;
        };
        command.envs(emulation::environment());
        command.env("RLHF_NCCL_LIB", emulation::gpu()).env("OMPI_MCA_mpi_yield_when_idle", "1");
        let done = command.output().expect("a shell starts");
        let said = String::from_utf8_lossy(&done.stderr);
        let error = said.split("error: ").last().unwrap_or_default();
        eprintln!("{left} KiB left: exit {:?}: {error}", done.status.code());
        assert_eq!(done.status.code(), Some(74), "{left} KiB left: {said}");
        assert!(said.matches("error: ").count() == 1 && error.contains(named), "{left} KiB left: {said}");
        assert!(error.contains(" are free") && error.contains("hint: ") || error.contains("No space left"), "{said}");
        let kept = at.join("kept/checkpoints");
        let left_there = newest(&kept).expect("what is there verifies").expect("earlier checkpoints are there");
        assert!(left_there.step() >= 2 && left_there.skipped.is_empty(), "step {}", left_there.step());
        let names = std::fs::read_dir(&kept).expect("it lists").flatten();
        for name in names.map(|entry| entry.file_name().to_string_lossy().into_owned()) {
            assert!(name == "latest" || name.starts_with("step-"), "{name} was left");
            Checkpoint::open(&kept.join(&name)).and_then(|open| open.verify()).expect("whole");
        }
    }
}
