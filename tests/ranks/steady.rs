//! Memory over many steps.

use crate::Fact;
use rlhf_hpc::comm::World;
use rlhf_hpc::tensor::arena;
use rlhf_hpc::{cli, config, train};
use std::path::{Path, PathBuf};

pub const FACTS: &[Fact] =
    &[Fact { name: "eight ppo steps hold no more memory than three", ranks: &[1, 2], check: steady }];

const MODEL: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 272,
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 0}"#;

/// Prompts and responses of one length each, so that every step is of the same size.
const JOB: &str = r#"
[job]
kind = "ppo"
threads = 1
export = false
[model]
actor = "model"
[data]
prompts = ["prompts.jsonl"]
[rollout]
prompts_per_step = 4
samples_per_prompt = 2
response_tokens_max = 8
ignore_eos = true
[reward]
rule = { kind = "regex", pattern = "[0-9]" }
[ppo]
epochs = 2
minibatch_samples = 4
[metrics]
rollouts_every_steps = 0
samples_every_steps = 0
[checkpoint]
every_steps = 2
"#;

fn verb(line: &str) {
    assert_eq!(cli::main(line.split(' ').map(str::to_string).collect()), 0, "{line}");
}

fn make(dir: &Path) {
    let rows = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| format!("{{\"prompt\": \"{i}+{i}=\"}}\n")).concat();
    for (name, text) in [("prompts.jsonl", rows.as_str()), ("config.json", MODEL), ("ppo.toml", JOB)] {
        std::fs::write(dir.join(name), text).expect("writes");
    }
    let dir = dir.display();
    verb(&format!("tokenizer {dir}/prompts.jsonl --vocabulary 264 --out {dir}/tokenizer"));
    verb(&format!("init --config {dir}/config.json --tokenizer {dir}/tokenizer --out {dir}/model"));
}

fn steady(world: &World) {
    let mut path = Vec::new();
    if world.rank == 0 {
        let dir = tempfile::tempdir().expect("a directory").keep();
        make(&dir);
        path = dir.to_str().expect("a temporary path is UTF-8").as_bytes().to_vec();
    }
    world.group().broadcast_bytes(0, &mut path);
    let dir = PathBuf::from(String::from_utf8(path).expect("rank 0 wrote it"));
    let held = [3, 8].map(|steps| {
        arena::trim();
        let before = arena::usage().requests;
        let sets = [format!("job.steps={steps}"), format!("job.dir=run-{steps}")];
        let config = config::load(&dir.join("ppo.toml"), &sets).expect("a job");
        let run = rlhf_hpc::launch::run::Run::open(config.clone(), &train::roles(&config), world.clone(), false)
            .expect("opens");
        train::run(run).expect("runs");
        let after = arena::usage();
        arena::Usage { requests: after.requests - before, ..after }
    });
    assert_eq!(held[0].held, held[1].held, "after 3 and after 8 steps: {held:?}");
    assert_eq!(held[0].in_use, held[1].in_use, "kept after the end: {held:?}");
    // Later steps live on what the first ones took, but for a buffer that another thread gives back late.
    let [three, eight] = held.map(|usage| usage.requests);
    assert!(three > 20 && eight < three + 5, "requests to the system in 3 and in 8 steps: {three}, {eight}");
    world.group().barrier();
    if world.rank == 0 {
        let _ = std::fs::remove_dir_all(&dir);
    }
}
