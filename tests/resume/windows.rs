//! A job whose layers have sliding windows.

use crate::cli::command;
use crate::resume::job::{Job, place, verb};
use serde_json::{Map, Value, json};

const SETS: &str = "job.steps=1 checkpoint.every_steps=0 rollout.prompts_per_step=4 rollout.response_tokens_max=120 \
                    rollout.stop_token_ids=[] rollout.prefill_tokens_max=32 ppo.microbatch_tokens_max=256";

#[test]
fn a_job_with_windows_has_a_smaller_cache_and_a_log_probability_gap_of_0() {
    let config = std::fs::read_to_string(place().join("config.json")).expect("it was made");
    let config: Map<String, Value> = serde_json::from_str(&config).expect("an object");
    let bytes = [256, 20].map(|window| {
        let model = format!("window-{window}");
        let mut config = config.clone();
        let keys = json!({
            "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "use_sliding_window": true,
            "sliding_window": window, "layer_types": ["sliding_attention", "full_attention"],
        });
        config.extend(keys.as_object().expect("an object").clone());
        std::fs::write(place().join(format!("{model}.json")), Value::from(config).to_string()).expect("writes");
        verb(&format!("init --config {model}.json --tokenizer tokenizer --out {model}"));
        let actor = format!("model.actor={model}");
        let job = Job::ppo(&model).with(SETS).with(&actor).done();
        assert_eq!(job.numbers("logprob_gap_max"), [0.0], "{model}");
        let plan = ["plan", "job.toml", "--ranks", "1", "--json", &actor].into_iter().chain(SETS.split_whitespace());
        let plan = command::run(place(), &plan.collect::<Vec<_>>()).well();
        let plan: Value = serde_json::from_str(&plan.stdout).expect("JSON");
        let cache = &plan["chosen"]["placed"][0]["memory"]["kv_cache"];
        cache["bytes"].as_u64().expect("bytes")
    });
    // One of two layers keeps windows of 20 keys instead of up to 140.
    assert!(bytes[1] < bytes[0], "{bytes:?}");
}
