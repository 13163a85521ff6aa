//! The verb: the table of the reference workload from a config.json alone, as text and for machines.

use super::models::{llama2_7b, small};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

pub fn plan(job: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlhf-hpc"));
    command.arg("plan").arg(job).args(arguments).stdin(Stdio::null());
    command.output().expect("the program starts")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// A folder `model` with nothing but a config.json.
fn fixture(config: &Value) -> TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    fs::create_dir(dir.path().join("model")).expect("a folder");
    fs::write(dir.path().join("model/config.json"), config.to_string()).expect("a file");
    dir
}

/// The reference workload on 16 A800-80G, with a reward model.
fn reference(dir: &TempDir, more: &[&str]) -> Output {
    let model = dir.path().join("model").display().to_string();
    let roles = ["actor", "critic", "reference"].map(|role| format!("model.{role}={model}"));
    let mut arguments: Vec<&str> = roles.iter().map(String::as_str).collect();
    arguments.extend(["--ranks", "16", "--gpu", "a800-80g", "--reward-model", &model]);
    arguments.extend(more);
    plan(&Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/llama2-7b.toml"), &arguments)
}

#[test]
fn the_reference_workload_has_every_phase_tensor_and_second_in_100_columns() {
    let ended = reference(&fixture(&llama2_7b()), &[]);
    let table = text(&ended.stdout);
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    for words in [
        "on 16 ranks of a800-80g (2 x 8)",
        "6,738,415,616 parameters",
        "reward",
        "load    rollout      score      train checkpoint",
        "weights of the actor",
        "gradients",
        "optimizer state",
        "activations",
        "kv cache",
        "524,288 bytes a token",
        "64.0 GiB",
        "prefill",
        "decode",
        "scoring",
        "training",
        "communication exposed",
        "floor",
        "predicted",
        "arithmetic",
        "312 TFLOP/s",
        "runners-up",
        "slower",
    ] {
        assert!(table.contains(words), "{words:?} is not in\n{table}");
    }
    for line in table.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
}

#[test]
fn no_line_is_longer_than_100_columns_and_no_part_loses_the_end_of_its_name() {
    let long = format!("job.name={}", "a-long-name-of-a-job-".repeat(6));
    let place = "mesh.placement=[{ roles = [\"actor\", \"reference\"], ranks = \"0..8\" }, \
                 { roles = [\"critic\", \"reward\"], ranks = \"8..16\" }]";
    let fixture = fixture(&llama2_7b());
    let fewer = "rollout.prompts_per_step=128";
    for more in [&["mesh.zero=1", "mesh.offload=[\"optimizer\",\"roles\"]", &long, fewer][..], &[place, fewer]] {
        let ended = reference(&fixture, more);
        let table = text(&ended.stdout);
        assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
        for line in table.lines().filter(|line| !line.contains("a-long-name")) {
            assert!(line.chars().count() <= 100, "{line}");
        }
        let names = ["train: gather over zero", "train in and out"];
        for name in names.iter().filter(|_| more.len() == 4) {
            assert!(table.contains(name), "{name:?} is not in\n{table}");
        }
    }
}

#[test]
fn the_object_for_machines_says_the_same() {
    let ended = reference(&fixture(&llama2_7b()), &["--json", "rollout.prompts_per_step=128"]);
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    let plan: Value = serde_json::from_slice(&ended.stdout).expect("JSON");
    let chosen = &plan["chosen"];
    assert_eq!((&plan["ranks"], &chosen["fits"]), (&Value::from(16), &Value::from(true)));
    let stages = ["prefill", "decode", "scoring", "training", "communication_exposed", "host_memory"];
    let mut sum = 0.0;
    for stage in stages {
        let (seconds, floor) = (&chosen["seconds"][stage], &chosen["floors"][stage]);
        assert!(seconds.as_f64() >= floor.as_f64(), "{stage}");
        sum += seconds.as_f64().expect("seconds");
    }
    assert!((sum - chosen["step_s"].as_f64().expect("seconds")).abs() < 1e-6);
    let placed = &chosen["placed"][0];
    let phases = placed["memory"]["phases"].as_object().expect("phases");
    assert_eq!(phases.len(), 5);
    for (phase, memory) in phases {
        let tensors = memory["tensors"].as_object().expect("tensors").values();
        let all: u64 = tensors.map(|bytes| bytes.as_u64().expect("bytes")).sum();
        assert_eq!(memory["bytes"].as_u64(), Some(all), "{phase}");
    }
    assert_eq!(placed["memory"]["kv_cache"]["token_bytes"], 524_288);
    let busy = |part: &Value| part["floor_s"].as_f64().expect("a number") / part["efficiency"].as_f64().expect("one");
    for part in placed["parts"].as_array().expect("parts").iter().filter(|p| p["stage"] == "training") {
        assert!((busy(part) - part["busy_s"].as_f64().expect("seconds")).abs() < 1e-9, "{part}");
    }
}

#[test]
fn a_job_that_does_not_fit_ends_with_2_and_says_what_would_fit() {
    let ended = reference(&fixture(&llama2_7b()), &["mesh.zero=0", "mesh.tensor=1", "rollout.prompts_per_step=128"]);
    let said = text(&ended.stderr);
    assert_eq!((ended.status.code(), ended.stdout.is_empty()), (Some(2), true), "{said}");
    assert!(said.contains("error: the job does not fit 16 ranks of a800-80g"), "{said}");
    assert!(said.contains("hint: it fits with mesh.zero = "), "{said}");
}

#[test]
fn models_and_gpus_that_are_not_there_are_named() {
    let fixture = fixture(&small());
    let ended = reference(&fixture, &["model.critic=nosuch"]);
    assert_eq!(ended.status.code(), Some(65));
    assert!(text(&ended.stderr).contains("model.critic"), "{}", text(&ended.stderr));
    let job = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/llama2-7b.toml");
    let model = format!("model.actor={}", fixture.path().join("model").display());
    let ended = plan(&job, &[&model, "--gpu", "abacus"]);
    assert_eq!(ended.status.code(), Some(65), "the critic's directory is missing");
}

/// The CPU is measured on the spot: all that is held here is that every number is there and positive.
#[test]
fn a_plan_for_this_cpu_measures_its_peaks() {
    let fixture = fixture(&small());
    let job = fixture.path().join("job.toml");
    let words = r#"
[job]
kind = "ppo"
steps = 1
threads = 1
[model]
actor = "model"
[data]
prompts = ["prompts"]
prompt_tokens_max = 32
[rollout]
prompts_per_step = 8
response_tokens_max = 16
[reward]
rule = "exact"
[ppo]
minibatch_samples = 8
microbatch_tokens_max = 512
"#;
    fs::write(&job, words).expect("a file");
    let ended = plan(&job, &["--json"]);
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    let plan: Value = serde_json::from_slice(&ended.stdout).expect("JSON");
    for key in ["flops", "memory_bytes_per_s", "memory_bytes"] {
        assert!(plan["device"][key].as_f64() > Some(0.0), "{key}");
    }
    for stage in ["prefill", "decode", "scoring", "training"] {
        assert!(plan["chosen"]["seconds"][stage].as_f64() > Some(0.0), "{stage}");
    }
    assert!(plan["chosen"]["placed"][0]["memory"]["resident_bytes"].as_u64() > Some(100_000_000));
}
