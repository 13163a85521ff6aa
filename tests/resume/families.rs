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

/// The corrections of routers in the files of a model: their names and bytes. With `sets`, they get new values.
fn corrections(file: &Path, sets: bool) -> Vec<(String, Vec<u8>)> {
    let mut bytes = std::fs::read(file).expect("a file of weights");
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("its length")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..start]).expect("JSON");
    let mut found = Vec::new();
    for (name, tensor) in header.as_object().expect("tensors") {
        if name.ends_with("e_score_correction_bias") {
            assert_eq!(tensor["dtype"], "F32", "{name}");
            let at = |i: usize| start + tensor["data_offsets"][i].as_u64().expect("a number") as usize;
            let values = &mut bytes[at(0)..at(1)];
            if sets {
                for (i, value) in values.chunks_exact_mut(4).enumerate() {
                    value.copy_from_slice(&(7.0 + 0.05 * (1.7 * i as f32).sin()).to_le_bytes());
                }
            }
            found.push((name.clone(), values.to_vec()));
        }
    }
    if sets {
        std::fs::write(file, bytes).expect("writes");
    }
    found
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
        "deepseek_v3",
        "gpt_oss",
    ] {
        make(name, name);
        // bf16 would have one number for all of them.
        let corrected = corrections(&place().join(name).join("model.safetensors"), true);
        assert_eq!(corrected.is_empty(), !["glm4_moe", "deepseek_v3"].contains(&name), "{name}");
        let sets = format!("model.actor={name} job.steps=20 checkpoint.every_steps=4 rollout.response_tokens_max=16");
        let job = |run: &str| Job::ppo(&format!("{name}-{run}")).with(&sets);
        let (whole, ended) = (job("whole"), job("whole").run());
        // All keys of config.json are used.
        assert!(ended.code == Some(0) && !ended.stderr.contains("unknown key"), "{name}: {}", ended.stderr);
        assert_eq!(whole.numbers("logprob_gap_max"), [0.0; 20], "{name}");
        let has_experts =
            name == "mixtral" || name.contains("moe") || ["qwen3_next", "deepseek_v3", "gpt_oss"].contains(&name);
        assert_eq!(whole.numbers("experts_equal_ratio"), vec![1.0; if has_experts { 20 } else { 0 }], "{name}");
        let killed = job("killed");
        let mut running = killed.start();
        running.wait_until(|| killed.metrics().len() >= 6);
        signal("KILL", running.pid());
        assert_ne!(running.end().code, Some(0), "{name} was killed");
        killed.done().assert_same(&whole);
        let exported = place().join(format!("{name}-exported"));
        let run = whole.checkpoints();
        verb(&format!("export {} --out {}", run.parent().expect("a run").display(), exported.display()));
        assert_eq!(corrections(&exported.join("model.safetensors"), false), corrected, "{name}");
    }
}
