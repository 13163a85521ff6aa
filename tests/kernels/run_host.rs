//! Whole jobs that offload state to host memory, and the GPU memory that a rank may use.

use crate::jobs::{CONFIG, assert_same, calls, command, emulated, metrics, number, output_text, prepared, well, with};
use crate::skip_on_a_real_gpu;
use serde_json::json;
use std::path::Path;
use std::process::Command;

const OFFLOAD: &str = "mesh.offload=[\"optimizer\",\"roles\"]";

/// The config.json of a model whose weights and state use more memory than the rest of a step.
fn deep() -> String {
    with(CONFIG, &json!({"num_hidden_layers": 6}))
}

#[test]
fn offloading_changes_no_bit_saves_gpu_memory_and_is_automatic_or_required_if_memory_is_short() {
    let dir = prepared(&deep());
    let at = dir.path();
    // Schedules that do not depend on job.steps.
    let ppo = "run ppo.toml optim.actor.schedule=constant optim.critic.schedule=constant";
    let job = |more: &str| command(1, at, &format!("{ppo} {more}"));
    well(&mut job(&format!("job.dir=away job.steps=3 {OFFLOAD}")));
    well(&mut job("job.dir=here mesh.offload=[]"));
    let (here, away) = (metrics(at, "here"), metrics(at, "away"));
    let peaks = [&here, &away].map(|steps| number(&steps[1], "memory_peak_bytes"));
    eprintln!("peak bytes of the GPU: {} here, {} with state on the host", peaks[0], peaks[1]);
    assert!(peaks[1] * 4.0 < peaks[0] * 3.0, "{peaks:?}: offload saves a quarter at least");
    let pinned = [&here, &away].map(|steps| number(&steps[1], "memory_pinned_bytes"));
    // Both runs use some pinned memory for sampled tokens and losses.
    assert!(pinned[1] - pinned[0] > peaks[0] - peaks[1], "{pinned:?} pinned, {peaks:?} of the GPU");
    assert!(away[0]["time_offload_s"].as_f64().is_some_and(|s| s > 0.0), "{}", away[0]);
    assert!(here[0]["time_offload_s"].is_null(), "nothing was moved: {}", here[0]);
    let asked: Vec<f64> = away.iter().map(|step| number(step, "memory_requests")).collect();
    assert!(asked[0] > 0.0 && asked[1] == asked[2], "from the second step on the driver is asked for none: {asked:?}");
    let tokens: Vec<f64> = away.iter().map(|step| number(step, "tokens")).collect();
    assert!(tokens.iter().any(|n| *n != tokens[0]), "steps of one size prove little: {tokens:?}");
    // The run resumes with offloading.
    well(&mut job(&format!("job.dir=here job.steps=3 {OFFLOAD}")));
    assert_same(at, "here", "away");
    // State that fits only on the host is offloaded automatically. So an error needs an explicit empty list, or a limit
    // below the memory with offloading.
    for (offload, limit, said) in [
        ("mesh.offload=[]", peaks[0] / 3.0, "gradients and optimizer state need"),
        (OFFLOAD, peaks[1] * 0.98, " for optimizer state does not fit"),
    ] {
        let refused = format!("{offload} job.dir=refused mesh.arena_bytes_max={}", limit as u64);
        let done = job(&refused).output().expect("it starts");
        let text = output_text(&done);
        assert_eq!(done.status.code(), Some(2), "{text}");
        let who = text.contains("weights of the actor ") && text.contains("mesh.offload");
        assert!(text.contains(said) && who, "{limit}: {text}");
    }
    if skip_on_a_real_gpu() {
        return;
    }
    // One and a half times the planned memory with offloaded state. A sixteenth is reserved for libraries.
    let text = well(job("job.dir=tight job.steps=3").env("EMULATED_BYTES", (9 << 20).to_string()));
    assert!(text.contains(" optimizer state: "), "{text}");
    assert_same(at, "tight", "away");
    let tight = metrics(at, "tight");
    assert!(number(&tight[1], "memory_pinned_bytes") > pinned[0] + f64::from(6 << 20), "{pinned:?}, {}", tight[1]);
    assert!(number(&tight[1], "memory_peak_bytes") * 4.0 < peaks[0] * 3.0, "{peaks:?}, {}", tight[1]);
}

#[test]
fn ranks_that_shard_state_offload_it_bitwise() {
    let Some(dir) = emulated(&with(CONFIG, &json!({"num_hidden_layers": 3}))) else { return };
    let at = dir.path();
    for (name, more) in [("here", "mesh.offload=[]"), ("away", OFFLOAD)] {
        well(&mut command(2, at, &format!("run ppo.toml mesh.data=2 mesh.zero=2 job.steps=1 job.dir={name} {more}")));
    }
    assert_same(at, "here", "away");
}

#[test]
fn ranks_that_share_a_gpu_divide_its_free_memory_and_each_gpu_is_described_once() {
    if skip_on_a_real_gpu() {
        return;
    }
    let dir = prepared(&deep());
    let at = dir.path();
    let job = "run ppo.toml --dry-run mesh.arena_bytes_max=4000000000";
    let text = well(command(3, at, job).env("EMULATED_GPUS", "2"));
    // Two GPUs of 1 GiB each, of which a sixteenth is reserved for libraries.
    for row in [
        "ranks 0, 2: Emulated GPU, 1.0 GiB at 0000:3b:00.0, 480.0 MiB per rank",
        "rank 1: Emulated GPU, 1.0 GiB at 0000:af:00.0, 960.0 MiB per rank",
    ] {
        assert!(text.contains(row), "no {row} in\n{text}");
    }
}

#[test]
fn a_rank_uses_the_memory_that_nccl_leaves_and_ranks_connect_all_to_all_only_for_a_rollout() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let sent = |job: &str| {
        let counts = at.join(format!("{job}-calls"));
        let line = format!("run --dry-run {job}.toml mesh.tensor=2 job.collectives=nccl job.check=true");
        let mut command = command(2, at, &line);
        let text = well(command.env("EMULATED_CALLS", &counts).env("EMULATED_NCCL_BYTES", "268435456"));
        // Of 1 GiB, the communicator used a quarter at its first call, and a sixteenth of the rest is reserved.
        assert!(text.contains(", 720.0 MiB per rank"), "{text}");
        calls(&counts, "0")["ncclSend"]
    };
    let [sft, ppo] = ["sft", "ppo"].map(sent);
    assert!(0 < sft && sft < ppo, "{sft} and {ppo} sends");
}

/// Whether a process has a handler for SIGUSR1.
fn listens(status: &str) -> bool {
    let caught = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigCgt:")?.trim(), 16).ok());
    caught.is_some_and(|signals| signals >> (10 - 1) & 1 == 1)
}

/// The bytes that are resident in the memory of a process's emulated GPU, of whose large ranges it is the fullest.
fn resident_in_gpu(maps: &str) -> u64 {
    let (mut is_large, mut most) = (false, 0);
    let bytes = |text: &str| text.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10);
    for line in maps.lines() {
        if let Some(text) = line.strip_prefix("Size:") {
            is_large = bytes(text) > Some(512 << 20);
        } else if let Some(text) = line.strip_prefix("Rss:").filter(|_| is_large) {
            most = most.max(bytes(text).unwrap_or(0));
        }
    }
    most
}

/// The peak resident memory of a job that ends with this exit code, without that of its emulated GPU. It is polled, and
/// the job is stopped as soon as it handles the signal.
fn resident(at: &Path, line: &str, ends: i32) -> u64 {
    let said = std::fs::File::create(at.join("said")).expect("a file");
    let mut child = command(1, at, line).stderr(said).spawn().expect("the binary starts");
    let (id, mut asked) = (child.id().to_string(), false);
    let (status, maps) = (format!("/proc/{id}/status"), format!("/proc/{id}/smaps"));
    let (mut most, mut of_gpu) = (0, 0);
    let ended = loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        if !asked && listens(&text) {
            asked = Command::new("kill").args(["-USR1", &id]).status().is_ok_and(|sent| sent.success());
        }
        let peak = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next()?.parse().ok());
        most = most.max(peak.unwrap_or(0) << 10);
        of_gpu = of_gpu.max(resident_in_gpu(&std::fs::read_to_string(&maps).unwrap_or_default()));
        if let Some(ended) = child.try_wait().expect("it is a child") {
            break ended;
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    };
    let text = || std::fs::read_to_string(at.join("said")).unwrap_or_default();
    assert_eq!(ended.code(), Some(ends), "{line}: {}", text());
    most - of_gpu
}

#[test]
fn a_gpu_checkpoint_is_written_through_a_few_host_buffers() {
    if skip_on_a_real_gpu() {
        return;
    }
    // The memory of a save is the difference to the same job without one. The signal stops it before the first step.
    let dir = prepared(&with(CONFIG, &json!({"hidden_size": 1024, "intermediate_size": 4096})));
    let at = dir.path();
    let job = "run sft.toml data.eval_split=test data.split.by=ratio data.split.eval_ratio=0.1 eval.every_steps=1 job.dir=with";
    let without = resident(at, &format!("{job}out --dry-run"), 0);
    let with = resident(at, job, 85);
    let files = std::fs::read_dir(at.join("with/checkpoints/step-0")).expect("a checkpoint");
    let bytes: u64 = files.map(|file| file.expect("a file").metadata().expect("its size").len()).sum();
    eprintln!("{bytes} bytes were saved; {without} resident without, {with} with");
    assert!(bytes > 150 << 20, "{bytes} bytes prove little");
    assert!(with < without + bytes / 4, "{with} resident, {without} without the save of {bytes} bytes");
}
