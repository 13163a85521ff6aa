//! Model families: tiny models of each, the facts that `info` prints, and the reasons for families without support.

use super::command;
use super::fixture::Fixture;
use rlhf_hpc::model::families::Family;
use serde_json::{Value, json};
use std::path::Path;

/// The config.json of a model in the fixture.
fn config(fixture: &Fixture, dir: &str) -> Value {
    serde_json::from_slice(&fixture.read(&format!("{dir}/config.json"))).expect("JSON")
}

#[test]
fn a_tiny_model_of_every_family_reads_and_answers_with_the_given_tokenizer() {
    let fixture = Fixture::new();
    for name in Family::names().chain(["gemma3", "mistral3", "qwen3_5_moe"]) {
        let made = fixture.run(&["init", "--like", name, "--tiny", "--tokenizer", "tokenizer", "--out", name]).well();
        let parameters = made.stderr.split([':', ' ']).find_map(|word| word.parse::<usize>().ok());
        assert!(parameters.is_some_and(|n| (100_000..400_000).contains(&n)), "{}", made.stderr);
        let answered = fixture.run(&["generate", "--model", name, "--prompt", "1+1=", "--max-new-tokens", "2"]).well();
        assert!(!answered.stderr.contains("not used"), "{name}: {}", answered.stderr);
    }
    let moe = config(&fixture, "qwen3_5_moe");
    assert_eq!(moe["model_type"], "qwen3_5_moe_text", "the tokenizer has no image tokens");
    let (gemma, inside) = (config(&fixture, "gemma3_text"), config(&fixture, "gemma3"));
    assert_eq!(gemma, inside, "the language model alone");
    assert_eq!(gemma["architectures"], json!(["Gemma3ForCausalLM"]));
    assert_eq!((&gemma["vocab_size"], &gemma["eos_token_id"]), (&json!(264), &json!(1)));
}

#[test]
fn a_model_like_another_one_has_its_shape_or_its_kinds_of_layers_in_small_sizes() {
    let fixture = Fixture::new();
    let big = json!({
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"width": 1152},
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
            "max_position_embeddings": 131_072, "sliding_window": 1024, "query_pre_attn_scalar": 256,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}
        }
    });
    fixture.write("big/config.json", big.to_string());
    fixture.run(&["init", "--like", "big", "--tiny", "--out", "small"]).well();
    let small = config(&fixture, "small");
    for (key, value) in [
        ("architectures", json!(["Gemma3ForCausalLM"])),
        ("hidden_size", json!(64)),
        ("num_hidden_layers", json!(6)),
        ("num_key_value_heads", json!(1)),
        ("sliding_window", json!(4)),
        ("query_pre_attn_scalar", json!(256)),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 8.0})),
        ("text_config", Value::Null),
    ] {
        assert_eq!(small[key], value, "{key}");
    }
    let around = json!({"model_type": "gemma3", "vision_config": {"width": 1152}, "text_config": small});
    fixture.write("around.json", around.to_string());
    fixture.run(&["init", "--config", "around.json", "--out", "inside"]).well();
    assert_eq!(config(&fixture, "inside"), small);
    fixture.run(&["init", "--like", "model", "--out", "same"]).well();
    assert_eq!(config(&fixture, "same"), config(&fixture, "model"));
    for (line, words, hint) in [
        ("--like nothing --tiny", "model_type \"nothing\" is not supported", "gemma3_text, gemma3, mistral3"),
        ("--like llama4 --tiny", "mixtures of experts", "use one of llama"),
        ("--like org/model --tiny", "org/model does not exist", "rlhf-hpc download org/model"),
    ] {
        let line = format!("init {line} --out none");
        fixture.run(&line.split(' ').collect::<Vec<_>>()).refused(65, &[words]).hinted(hint);
    }
    for (line, words) in [
        ("--like qwen3", "--like qwen3 needs --tiny"),
        ("--config config.json --tiny", "--tiny needs --like"),
        ("--config config.json --like qwen3", "either --config or --like"),
        ("--tiny", "either --config or --like"),
    ] {
        let line = format!("init {line} --out none");
        fixture.run(&line.split(' ').collect::<Vec<_>>()).refused(2, &[words]);
    }
}

/// A golden model, and lines of `info` about it.
const KNOWN: [(&str, &[&str]); 7] = [
    (
        "gemma3-old",
        &[
            "family     gemma3_text, inside gemma3, Gemma3ForCausalLM",
            "parameters 9,050, all of them active for each token",
            "head       language model, tied to the embedding; vocabulary 131",
            "layers     1 with a window of 7 tokens, rope with theta 20",
            "           1 with all earlier tokens, rope with theta 300, linear scaling by 3",
            "weights    28 tensors, 17.7 KiB in BF16; 1 file",
            "not used   23 tensors, 2.1 KiB, of other parts (images); copied to exports",
        ],
    ),
    (
        "qwen3_moe",
        &[
            "parameters 39,288, 24,168 active for each token",
            "mlp        6 experts of width 35 (silu) in 2 layers; 3 for each token, weights sum to 1",
            "           width 11 (silu) in 1 layer",
        ],
    ),
    (
        "qwen3_next",
        &[
            "mlp        6 experts of width 11 (silu) in 2 layers; 3 for each token, weights are probabilities; one of width \
             35 with a gate for all tokens",
            "           2 with the gated delta rule, 6 states of 7 x 5 on 3 key heads, convolutions of 4 tokens",
            "weights    78 tensors, 59.0 KiB in F16; 1 file",
            "not used   2 tensors, 66 bytes, of layers that predict further tokens; copied to exports",
        ],
    ),
    (
        "gpt_oss",
        &[
            "heads      4 on 2 of keys and values, head dim 8, with sinks",
            "mlp        8 experts with biases of width 13 (silu with alpha 1.702, within 1.5); 3 for each token, weights sum to 1",
            "layers     2 with a window of 9 tokens, rope with theta 300, yarn by 8 from 16 tokens",
            "           1 with all earlier tokens, rope with theta 300, yarn by 8 from 16 tokens",
        ],
    ),
    ("gemma2", &["soft caps  attention scores at 1.5, logits at 2.5", "ends with  2"]),
    (
        "phi3-long",
        &[
            "context    128 tokens",
            "layers     2 with all earlier tokens, rope with theta 300 on 12 of 16 columns, LongRoPE: short factors in \
             jobs with rows of up to 16 tokens, else long factors",
        ],
    ),
    ("reward", &["head       one score per token; vocabulary 131", "tokenizer  none (no tokenizer.json)"]),
];

#[test]
fn info_prints_the_facts_about_a_model() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
    for (name, lines) in KNOWN {
        let printed = command::run(&golden, &["info", name]).well();
        for line in lines {
            assert!(printed.stdout.lines().any(|printed| printed == *line), "{line}\n{}", printed.stdout);
        }
        assert!(printed.stderr.is_empty() && !printed.stdout.contains("warning"), "{name}: {}", printed.stderr);
    }
    let fixture = Fixture::new();
    fixture.edit("model/config.json", |config| config["strange"] = json!(1));
    let printed = fixture.run(&["info", "model"]).well().stdout;
    for line in [
        "tokenizer  264 tokens (the model embeds 8 more), with a chat template",
        "ends with  1 \"<|end|>\", 0 \"<|begin|>\"",
        "warning    model/config.json: unknown key, not used: strange",
    ] {
        assert!(printed.lines().any(|printed| printed == line), "{line}\n{printed}");
    }
    for (name, words) in [
        ("gemma2", "all of it runs on GPUs, with mesh.tensor = 1, 2"),
        ("ministral3", "all of it runs on GPUs, with mesh.tensor = 1, 2"),
        ("gpt_oss", "(sinks of attention, biases of experts) has no GPU kernel"),
        ("mixtral", "the number of experts must be a multiple of 8"),
        ("qwen3_next", "all of it runs on GPUs, with mesh.tensor = 1"),
        ("glm4_moe", "e_score_correction_bias has no GPU kernel"),
        ("qwen3_moe", "all of it runs on GPUs, with mesh.tensor = 1, 2"),
        ("qwen3", "all of it runs on GPUs, with mesh.tensor = 1, 2"),
    ] {
        fixture.run(&["init", "--like", name, "--tiny", "--out", name]).well();
        let printed = fixture.run(&["info", name]).well().stdout;
        assert!(printed.lines().any(|line| line.starts_with("gpus ") && line.contains(words)), "{printed}");
    }
    fixture.run(&["info", "tokenizer"]).refused(65, &["tokenizer has no config.json"]);
    fixture.run(&["info", "org/name"]).refused(65, &["org/name does not exist"]).hinted("rlhf-hpc download org/name");
}

#[test]
fn the_error_for_a_family_without_support_names_what_is_missing() {
    let fixture = Fixture::new();
    for (model_type, class, missing) in [
        ("t5", "T5ForConditionalGeneration", "it has an encoder and a decoder"),
        ("bart", "BartForConditionalGeneration", "it has an encoder and a decoder"),
        ("llama4_text", "Llama4ForCausalLM", "mixtures of experts"),
        ("qwen4_exp", "Qwen4ExpForConditionalGeneration", "hyper-connections"),
        ("deepseek_v32", "DeepseekV32ForCausalLM", "sparse attention"),
        ("deepseek_v4", "DeepseekV4ForCausalLM", "sparse attention"),
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM", "sparse attention"),
        ("kimi_k2", "DeepseekV3ForCausalLM", "its tokenizer is Python code"),
        ("nemotron_h", "NemotronHForCausalLM", "Mamba layers"),
        ("gemma4_text", "Gemma4ForCausalLM", "E2B, E4B"),
        ("gpt2", "GPT2LMHeadModel", "LayerNorm"),
    ] {
        fixture.edit("model/config.json", |config| {
            (config["model_type"], config["architectures"]) = (json!(model_type), json!([class]));
        });
        let refused = fixture.run(&["generate", "--model", "model", "--prompt", "1+1="]);
        let of_class = format!("architecture \"{class}\" is not supported: ");
        let of_type = format!("model_type \"{model_type}\" is not supported: ");
        if class == "DeepseekV3ForCausalLM" {
            refused.refused(65, &[&of_type, missing]).hinted("use one of llama");
        } else {
            refused.refused(65, &[&of_class, missing]).hinted("use one of Llama");
        }
        fixture.edit("model/config.json", |config| drop(config.as_object_mut().unwrap().remove("architectures")));
        fixture.run(&["info", "model"]).refused(65, &[&of_type, missing]).hinted("use one of llama");
    }
    let around = json!({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}});
    fixture.write("around/config.json", around.to_string());
    let refused = fixture.run(&["info", "around"]);
    refused.refused(65, &["model_type \"gemma4\" with text_config is not supported: ", "E2B, E4B"]).hinted("gemma3");
}

#[test]
fn the_error_for_a_row_that_is_too_long_for_the_short_factors_of_long_rope_names_the_limit_that_it_exceeds() {
    let fixture = Fixture::new();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/phi3-long");
    fixture.jsonl("long.jsonl", &[json!({"tokens": vec![3; 17]})]);
    let model = model.to_str().expect("text");
    let refused = fixture.run(&["logprobs", "--model", model, "--input", "long.jsonl"]);
    refused.refused(65, &["at most original_max_position_embeddings = 16 tokens (got 17)"]).hinted("help families");
}
