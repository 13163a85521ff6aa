//! Jobs on models whose norms, caps, ropes and files differ from those of Llama.

use crate::resume::job::{Job, place, signal, verb};
use serde_json::Value;
use std::path::Path;

/// Makes `out`, a model of the shape of the golden one `name`, for the tokenizer of the other tests.
pub fn make(name: &str, out: &str) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name).join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(golden).expect("checked in")).expect("JSON");
    for (key, value) in [("vocab_size", 272.into()), ("eos_token_id", 0.into()), ("initializer_range", 0.2.into())] {
        config[key] = value;
    }
    // New weights are not in f16.
    let dtype = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    config[dtype] = "float32".into();
    std::fs::write(place().join(format!("{out}.json")), config.to_string()).expect("writes");
    verb(&format!("init --config {out}.json --tokenizer tokenizer --out {out}"));
}

#[test]
fn ppo_on_other_families_samples_as_it_trains_and_resumes_bitwise_after_a_kill() {
    for name in [
        "gemma2",
        "olmo3",
        "phi3-long",
        "qwen3_5_text",
        "mixtral",
        "qwen3_moe",
        "glm4_moe",
        "qwen3_next",
        "qwen3_5_moe_text",
    ] {
        make(name, name);
        let sets = format!("model.actor={name} job.steps=20 checkpoint.every_steps=4 rollout.response_tokens_max=16");
        let job = |run: &str| Job::ppo(&format!("{name}-{run}")).with(&sets);
        let (whole, ended) = (job("whole"), job("whole").run());
        // All keys of config.json are used.
        assert!(ended.code == Some(0) && !ended.stderr.contains("unknown key"), "{name}: {}", ended.stderr);
        assert_eq!(whole.numbers("logprob_gap_max"), [0.0; 20], "{name}");
        let has_experts = name == "mixtral" || name.contains("moe") || name == "qwen3_next";
        assert_eq!(whole.numbers("experts_equal_ratio"), vec![1.0; if has_experts { 20 } else { 0 }], "{name}");
        let killed = job("killed");
        let mut running = killed.start();
        running.wait_until(|| killed.metrics().len() >= 6);
        signal("KILL", running.pid());
        assert_ne!(running.end().code, Some(0), "{name} was killed");
        killed.done().assert_same(&whole);
    }
}
