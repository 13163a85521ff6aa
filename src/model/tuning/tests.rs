//! Settings of jobs for the tiny models of tests/golden/models. `adapter_files` compares the same rules with PEFT.

use super::*;
use crate::error::Kind;
use crate::model::ParamTable;
use crate::model::{Arch, Head};
use std::path::Path;
use std::sync::Arc;

/// Two layers of width 40 with 20 columns of keys, with biases.
fn llama(head: Head) -> Vec<Param> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama3");
    ParamTable::new(&Arch::load(&dir).expect("a model"), head).shapes()
}

fn settings(text: &str) -> LoraConfig {
    let settings: LoraConfig = toml::from_str(text).expect(text);
    settings.check().expect(text);
    settings
}

#[test]
fn a_job_selects_modules_by_names_patterns_and_layers() {
    let params = llama(Head::LanguageModel);
    for (text, count, one, rank, scale) in [
        ("rank = 4", 14, "model.layers.1.mlp.up_proj", 4, 8.0),
        ("rank = 4\ntargets = \"All-Linear\"\nlayers = [1]", 7, "model.layers.1.mlp.up_proj", 4, 8.0),
        ("rank = 4\ntargets = [\"self_attn.q_proj\", \"down_proj\"]", 4, "model.layers.0.mlp.down_proj", 4, 8.0),
        ("rank = 4\nalpha = 3\ntargets = \".*[.]1[.].*_proj\"", 7, "model.layers.1.self_attn.q_proj", 4, 0.75),
        ("rank = 4\nrslora = true\nexclude = [\"q_proj\"]", 12, "model.layers.1.self_attn.k_proj", 4, 16.0),
        ("rank = 4\nexclude = \"model.layers.0.*\"", 7, "model.layers.1.self_attn.k_proj", 4, 8.0),
        ("rank = 4\nlayers = [\"0-1\"]\nrank_pattern = { k_proj = 2 }", 14, "model.layers.1.self_attn.k_proj", 2, 16.0),
        ("rank = 4\nalpha_pattern = { \"1.*up_proj\" = 1.0 }", 14, "model.layers.1.mlp.up_proj", 4, 0.25),
        ("rank = 4\ntrain_also = [\"mlp\"]", 8, "model.layers.0.self_attn.v_proj", 4, 8.0),
    ] {
        let tuning = Tuning::lora(&settings(text), "lora", &params).expect(text);
        assert_eq!(tuning.adapters.len(), count, "{text}");
        assert_eq!(tuning.adapters[one], Adapter { rank, scale }, "{text}");
    }
}

#[test]
fn modules_that_train_whole_have_no_adapter_and_a_value_head_always_trains() {
    let text = "rank = 4\ntrain_also = [\"norm\", \"lm_head\", \"layers.0.mlp.up_proj\"]";
    let tuning = Tuning::lora(&settings(text), "lora", &llama(Head::LanguageModel)).expect("it matches");
    let whole: Vec<&str> = tuning.whole.iter().map(String::as_str).collect();
    let up = ["model.layers.0.mlp.up_proj.bias", "model.layers.0.mlp.up_proj.weight"];
    assert_eq!(whole, ["lm_head.weight", up[0], up[1], "model.norm.weight"]);
    assert!(!tuning.adapters.contains_key("model.layers.0.mlp.up_proj") && tuning.adapters.len() == 13);
    let tuning = Tuning::lora(&settings("rank = 4"), "lora", &llama(Head::Value)).expect("it matches");
    assert!(tuning.whole.iter().eq(["score.weight"]), "{:?}", tuning.whole);
}

#[test]
fn settings_that_do_not_fit_the_model_are_rejected_with_their_key_and_value() {
    let params = llama(Head::LanguageModel);
    for (text, message, hint) in [
        (
            "targets = [\"q_proj\", \"c_attn\"]",
            "lora.critic.targets must list names of modules (got \"c_attn\"",
            "q_proj, k_",
        ),
        ("targets = [\".*q_proj\"]", "targets must list names of modules", "a regular expression is one string"),
        (
            "targets = \"q_proj\"",
            "targets must match whole names of modules (got \"q_proj\"",
            "model.layers.0.self_attn",
        ),
        ("exclude = [\"out_proj\"]", "lora.critic.exclude must list names of modules", "o_proj"),
        (
            "targets = [\"embed_tokens\"]",
            "targets must match linear layers of layers only (got model.embed_tokens)",
            "adapters of embeddings and heads are not supported; lora.critic.train_also trains it whole",
        ),
        ("targets = [\"q_proj\", \"lm_head\"]", "(got lm_head)", "train_also trains it whole"),
        ("targets = \".*\"", "(got model.embed_tokens)", "not supported"),
        ("targets = [\"norm\"]", "(got model.norm)", "train_also trains it whole"),
        (
            "targets = [\"q_proj\"]\nexclude = [\"q_proj\"]",
            "targets must match linear layers that",
            "o_proj, gate_proj",
        ),
        ("layers = [\"1-2\"]", "lora.critic.layers must be at most 1, the last layer of the model (got 2)", ""),
        (
            "train_also = [\"embed\"]",
            "train_also must name modules of the model (got \"embed\")",
            "embed_tokens, input_layernorm, q_proj",
        ),
        (
            "rank = 21",
            "lora.critic.rank must be at most 20, the smaller side of model.layers.0.self_attn.k_proj (20 x 40)",
            "",
        ),
        ("rank_pattern = { v_proj = 30 }", "lora.critic.rank_pattern.\"v_proj\" must be at most 20", ""),
        (
            "rank_pattern = { \"proj\" = 2 }",
            "rank_pattern must match the ends of names of targets (got \"proj\"",
            "model.layers.0",
        ),
        ("targets = [\"q_proj\"]\nalpha_pattern = { k_proj = 2 }", "alpha_pattern must match", "q_proj, model"),
    ] {
        let rank = if text.starts_with("rank = ") { "" } else { "rank = 4\n" };
        let error = Tuning::lora(&settings(&format!("{rank}{text}")), "lora.critic", &params).expect_err(text);
        assert!(error.message.contains(message), "{text}: {}", error.message);
        assert!(error.hint.clone().unwrap_or_default().contains(hint), "{text}: {:?}", error.hint);
        assert_eq!(error.kind, Kind::Usage);
    }
}

/// The parameters of a model of tests/golden/models.
fn golden(name: &str) -> Vec<Param> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
    ParamTable::new(&Arch::load(&dir).expect("a model"), Head::LanguageModel).shapes()
}

/// Layers 0 and 2 of qwen3_moe and all of mixtral, 1 and 2 of glm4_moe have experts, and the latter shared ones.
#[test]
fn a_job_selects_routers_and_experts_by_old_names_and_parameters() {
    for (model, text, wanted) in [
        ("qwen3_moe", "targets = [\"gate\"]", "0.mlp.gate 4; 2.mlp.gate 4"),
        ("qwen3_moe", "targets = [\"gate\"]\nrank_pattern = { gate = 2 }\nlayers = [2]", "2.mlp.gate 2"),
        ("mixtral", "targets = [\"w1\", \"w3\"]\nlayers = [1]", "1.mlp.experts.gate_up_proj 8"),
        (
            "mixtral",
            "targets = \"\"\ntarget_parameters = [\"0.mlp.experts.gate_up_proj\"]",
            "0.mlp.experts.gate_up_proj 4",
        ),
        ("glm4_moe", "targets = [\"shared_experts.up_proj\"]\nlayers = [1]", "1.mlp.shared_experts.up_proj 4"),
        ("glm4_moe", "targets = [\"down_proj\"]\nlayers = [\"0-1\"]", "1.mlp.experts.down_proj 4"),
        ("glm4_moe", "targets = [\"0.mlp.down_proj\"]", "0.mlp.down_proj 4"),
        ("glm4_moe", "exclude = \".*(attn|down_proj|mlp.gate).*\"\nlayers = [2]", "2.mlp.experts.gate_up_proj 8"),
        (
            "qwen3_moe",
            "exclude = [\"gate_up_proj\", \"mlp.gate\"]\nlayers = [0]",
            "0.mlp.experts.down_proj 4; 0.self_attn.k_proj 4; \
             0.self_attn.o_proj 4; 0.self_attn.q_proj 4; 0.self_attn.v_proj 4",
        ),
        ("gpt_oss", "targets = []\ntarget_parameters = [\"router.weight\"]\nlayers = [0]", "0.mlp.router 4"),
        ("qwen3_next", "targets = [\"shared_expert_gate\"]\nlayers = [2]", "2.mlp.shared_expert_gate 4"),
    ] {
        let tuning = Tuning::lora(&settings(&format!("rank = 4\n{text}")), "lora", &golden(model)).expect(text);
        let found: Vec<String> = tuning
            .adapters
            .iter()
            .map(|(module, of)| format!("{} {}", module.trim_start_matches("model.layers."), of.rank))
            .collect();
        assert_eq!(found.join("; "), wanted, "{model}: {text}");
    }
    for (model, text, message, hint) in [
        ("qwen3_moe", "targets = [\"gate_proj\"]", "lora.targets must name both gate_proj and up_proj, or none", ""),
        (
            "qwen3_moe",
            "targets = [\"w1\"]",
            "must list names of modules (got \"w1\"",
            "and routers, down_proj, gate, gate_proj",
        ),
        (
            "mixtral",
            "target_parameters = [\"experts.up_proj\"]",
            "target_parameters must list names of parameters",
            "mlp.gate.weight",
        ),
        ("llama3", "target_parameters = [\"gate.weight\"]", "(got \"gate.weight\", which matches none)", "no experts"),
        ("llama3", "target_parameters = [\"q_proj.weight\"]", "must not name what lora.targets selects", ""),
        ("gpt_oss", "target_parameters = [\"gate_up_proj_bias\"]", "must name matrices of layers only", ""),
        (
            "gpt_oss",
            "targets = [\"router\"]",
            "(got model.layers.0.mlp.router)",
            "lora.target_parameters = [\"model.layers.0.mlp.router.weight\"]",
        ),
        ("gpt_oss", "targets = [\"gate_up_proj\"]", "lora.targets must match linear layers that", ""),
        (
            "qwen3_moe",
            "rank = 13\ntargets = [\"gate_proj\", \"up_proj\"]",
            "lora.rank must be at most 12, half of the smaller side",
            "",
        ),
    ] {
        let rank = if text.starts_with("rank = ") { "" } else { "rank = 4\n" };
        let error = Tuning::lora(&settings(&format!("{rank}{text}")), "lora", &golden(model)).expect_err(text);
        assert!(error.message.contains(message), "{text}: {}", error.message);
        assert!(error.hint.clone().unwrap_or_default().contains(hint), "{text}: {:?}", error.hint);
    }
}

#[test]
fn frozen_modules_are_named_and_the_rest_trains_whole() {
    let params = llama(Head::LanguageModel);
    let all = params.len();
    let count = |within: &str| params.iter().filter(|param| param.name.contains(within)).count();
    for (frozen, fewer, absent, present) in [
        (&["embed_tokens"][..], 1, "model.embed_tokens.weight", "lm_head.weight"),
        (&["layers.0"], count("layers.0."), "model.layers.0.mlp.up_proj.bias", "model.layers.1.mlp.up_proj.bias"),
        (&["layers.0-1", "norm"], count("layers.") + 1, "model.norm.weight", "lm_head.weight"),
        (&["attention"], count("self_attn"), "model.layers.1.self_attn.q_proj.bias", "model.norm.weight"),
        (&["norms"], 5, "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"),
        (&["mlp.up_proj", "lm_head"], 5, "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"),
    ] {
        let frozen: Vec<String> = frozen.iter().map(|name| (*name).to_owned()).collect();
        let tuning = Tuning::freeze(&frozen, "model.freeze", &params).expect("modules");
        assert_eq!(tuning.whole.len(), all - fewer, "{frozen:?}");
        assert!(!tuning.whole.contains(absent) && tuning.whole.contains(present), "{frozen:?}");
        assert!(tuning.adapters.is_empty());
    }
    // Without the last parameter, the head, everything is in "model".
    for (frozen, message) in [
        ("embed", "model.freeze must name modules of the model (got \"embed\")"),
        ("layers.1-2", "model.freeze must name layers up to 1, the last one (got 2)"),
        ("layers.1-0", "model.freeze must name modules of the model (got \"layers.1-0\")"),
        ("", "model.freeze must name modules of the model (got \"\")"),
        ("model", "model.freeze must leave something to train (got [\"model\"])"),
    ] {
        let error =
            Tuning::freeze(&[frozen.to_owned()], "model.freeze", &params[..params.len() - 1]).expect_err(frozen);
        assert!(error.message.contains(message), "{frozen}: {}", error.message);
    }
}

#[test]
fn parts_of_one_tensor_are_frozen_and_adapted_by_its_name() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/phi3-long");
    let arch = Arch::load(&dir).expect("a model");
    let whole = ParamTable::new(&arch, Head::LanguageModel);
    let trained = |tuning: Tuning| -> Vec<String> {
        let arch = Arch { tuning: Some(Arc::new(tuning)), ..arch.clone() };
        ParamTable::new(&arch, Head::LanguageModel).specs().iter().map(|spec| spec.name.clone()).collect()
    };
    let freeze = |name: &str| Tuning::freeze(&[name.to_owned()], "model.freeze", &whole.shapes());
    let is_part = |name: &str| ["q_proj.", "k_proj.", "v_proj."].iter().any(|part| name.contains(part));
    let others: Vec<String> =
        whole.specs().iter().map(|spec| spec.name.clone()).filter(|name| !is_part(name)).collect();
    assert!(others.len() + 6 == whole.specs().len() && trained(freeze("qkv_proj").expect("a module")) == others);
    let hint = freeze("q_proj").expect_err("a part").hint.unwrap_or_default();
    assert!(hint.contains("qkv_proj"), "{hint}");
    let lora = settings("rank = 2\ntargets = [\"qkv_proj\"]\nlayers = [1]");
    let adapted = trained(Tuning::lora(&lora, "lora", &whole.shapes()).expect("it matches"));
    let names = ["qkv_proj.lora_A", "q_proj.lora_B", "k_proj.lora_B", "v_proj.lora_B"];
    assert_eq!(adapted, names.map(|name| format!("model.layers.1.self_attn.{name}.weight")));
}
