//! The verb: the table of the reference workload from a config.json alone, as text and for machines.

use super::models::{NAMED, REFERENCE, llama2_7b, small};
use crate::cli::fixture::Fixture;
use crate::process::Ended;
use serde_json::Value;

/// A folder `planned` with nothing but a config.json.
fn fixture(config: &Value) -> Fixture {
    let fixture = Fixture::new();
    fixture.write("planned/config.json", config.to_string());
    fixture
}

/// The reference workload on 16 A800-80G, with a reward model, and with fewer prompts than it has, which are planned
/// sooner.
fn reference(fixture: &Fixture, more: &[&str]) -> Ended {
    let model = fixture.path("planned").display().to_string();
    let roles = ["actor", "critic", "reference"].map(|role| format!("model.{role}={model}"));
    let fewer = "rollout.prompts_per_step=128";
    let arguments = [fewer, "--ranks", "16", "--gpu", "a800-80g", "--reward-model", &model];
    fixture.run(&[&["plan", REFERENCE][..], &roles.each_ref().map(String::as_str), &arguments, more].concat())
}

/// The table of that job. Only a line with a long name has more than 100 columns.
fn table(fixture: &Fixture, more: &[&str]) -> String {
    let table = reference(fixture, more).well().stdout;
    for line in table.lines().filter(|line| !line.contains("a-long-name")) {
        assert!(line.chars().count() <= 100, "{line}");
    }
    table
}

#[test]
fn the_reference_workload_has_every_phase_tensor_and_second() {
    let table = table(&fixture(&llama2_7b()), &[]);
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
        " bytes per token",
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
}

#[test]
fn no_line_is_longer_than_100_columns_and_no_part_loses_the_end_of_its_name() {
    let long = format!("job.name={}", "a-long-name-of-a-job-".repeat(6));
    let place = "mesh.placement=[{ roles = [\"actor\", \"reference\"], ranks = \"0..8\" }, \
                 { roles = [\"critic\", \"reward\"], ranks = \"8..16\" }]";
    let fixture = fixture(&llama2_7b());
    table(&fixture, &[&NAMED[..], &[place]].concat());
    let table = table(&fixture, &[&NAMED[..], &["mesh.offload=[\"optimizer\",\"roles\"]", &long]].concat());
    for name in ["train: gather over zero", "train in and out"] {
        assert!(table.contains(name), "{name:?} is not in\n{table}");
    }
}

#[test]
fn the_json_output_agrees_with_the_table() {
    let ended = reference(&fixture(&llama2_7b()), &[&NAMED[..], &["--json"]].concat()).well();
    let plan: Value = serde_json::from_str(&ended.stdout).expect("JSON");
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
fn keys_in_8_bits_need_half_of_the_cache_and_halve_the_bytes_of_attention_in_decoding() {
    let fixture = fixture(&llama2_7b());
    let [model, fp8] = ["model", "fp8"].map(|kv| {
        let kv = format!("rollout.kv_dtype={kv}");
        let ended = reference(&fixture, &[&NAMED[..], &["--json", &kv]].concat()).well();
        let plan: Value = serde_json::from_str(&ended.stdout).expect("JSON");
        let placed = &plan["chosen"]["placed"][0];
        let parts = placed["parts"].as_array().expect("parts").iter();
        let mut read = parts.filter(|part| part["stage"] == "decode" && part["name"] == "attention");
        let read = read.next().and_then(|part| part["bytes"].as_f64()).unwrap_or_else(|| panic!("{}", placed["parts"]));
        let cache = &placed["memory"]["kv_cache"];
        (cache["token_bytes"].as_u64().expect("bytes"), cache["bytes"].as_u64().expect("bytes"), read)
    });
    // A byte for each value, and one for each head of 128 values.
    assert_eq!((fp8.0 * 256, fp8.1 * 256), (model.0 * 129, model.1 * 129));
    assert!((fp8.2 / model.2 - 129.0 / 256.0).abs() < 1e-3, "{} of {} bytes", fp8.2, model.2);
}

#[test]
fn a_job_that_does_not_fit_exits_with_2_and_lists_layouts_that_fit() {
    let ended = reference(&fixture(&llama2_7b()), &["mesh.zero=0", "mesh.tensor=1"])
        .refused(2, &["the job does not fit 16 ranks of a800-80g"]);
    assert!(ended.hinted("it fits with mesh.zero = ").stdout.is_empty());
}

#[test]
fn missing_models_gpus_and_kernels_are_named() {
    let fixture = fixture(&small());
    reference(&fixture, &["model.critic=nosuch"]).refused(65, &["model.critic"]);
    let ended = fixture.run(&["plan", "job.toml", "model.actor=planned", "--ranks", "1", "--gpu", "abacus"]);
    ended.refused(2, &["unknown GPU type `abacus`"]).hinted("a800-80g");
    let masked = ["plan", "job.toml", "model.actor=planned", "rollout.top_k=5", "rollout.keep_sampling_mask=true"];
    fixture.run(&[&masked[..], &["--gpu", "cpu"]].concat()).well();
    let words = "GPUs do not support rollout.keep_sampling_mask = true: no kernel masks logits yet";
    fixture.run(&[&masked[..], &["--gpu", "h100"]].concat()).refused(2, &[words]).hinted("set job.device = \"cpu\"");
}

/// The CPU is measured during the test, so this only checks that every number is present and positive, and that no
/// operation is faster than the peaks.
#[test]
fn a_plan_for_this_cpu_measures_its_peaks() {
    let ended = fixture(&small()).run(&["plan", "job.toml", "model.actor=planned", "--json"]).well();
    let plan: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    for key in ["flops", "memory_bytes_per_s", "memory_bytes"] {
        assert!(plan["device"][key].as_f64() > Some(0.0), "{key}");
    }
    for stage in ["prefill", "decode", "scoring", "training"] {
        assert!(plan["chosen"]["seconds"][stage].as_f64() > Some(0.0), "{stage}");
    }
    let placed = &plan["chosen"]["placed"][0];
    for part in placed["parts"].as_array().expect("parts") {
        assert!((0.0..=1.0).contains(&part["efficiency"].as_f64().expect("a number")), "{part}");
    }
    assert!(placed["memory"]["resident_bytes"].as_u64() > Some(100_000_000));
    let tight = ["plan", "job.toml", "model.actor=planned", "mesh.arena_bytes_max=1000000"];
    fixture(&small()).run(&tight).refused(2, &["the job does not fit 1 rank of cpu"]).hinted("GPUs (plan --gpu)");
}
