//! Rotary frequencies against transformers.

use crate::parity::golden::{directory, gap};
use rlhf_hpc::model::Arch;
use serde_json::{Map, Value, json};

fn config(rope: &Value) -> Map<String, Value> {
    let config = json!({
        "model_type": "llama", "hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 10,
        "intermediate_size": 8, "max_position_embeddings": 131072, "head_dim": 24, "rope_parameters": rope,
    });
    config.as_object().unwrap().clone()
}

#[test]
fn rotary_frequencies_of_every_scaling_equal_transformers() {
    let cases: Value = serde_json::from_slice(&std::fs::read(directory("rope.json")).unwrap()).unwrap();
    let cases = cases.as_array().unwrap();
    assert_eq!(cases.len(), 5);
    for case in cases {
        let rope = &Arch::from_config(&config(&case["rope_parameters"])).unwrap().rotations().unwrap()[0];
        let theirs: Vec<f32> =
            case["inverse_frequencies"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
        let ours = &rope.inverse_frequencies;
        let relative: Vec<f32> = ours.iter().zip(&theirs).map(|(a, b)| a / b).collect();
        assert!(gap(&relative, &[1.0; 12]) < 1e-5, "{}: {ours:?} {theirs:?}", case["rope_parameters"]);
        assert!((f64::from(rope.attention_factor) - case["attention_factor"].as_f64().unwrap()).abs() < 1e-6);
    }
}

#[test]
fn both_spellings_of_rope_scaling_mean_the_same() {
    let five = json!({"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
    let mut four = config(&Value::Null);
    four.remove("rope_parameters");
    four.insert("rope_theta".into(), json!(5e5));
    for name in ["rope_type", "type"] {
        let mut scaling = five.clone();
        let kind = scaling.as_object_mut().unwrap().remove("rope_type").unwrap();
        scaling.as_object_mut().unwrap().remove("rope_theta");
        scaling[name] = kind;
        four.insert("rope_scaling".into(), scaling);
        assert_eq!(Arch::from_config(&four).unwrap().ropes, Arch::from_config(&config(&five)).unwrap().ropes);
    }
}

#[test]
fn rope_scaling_replaces_rope_parameters_and_a_setting_that_would_be_lost_is_rejected() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096});
    let both = |parameters: Value, scaling: &Value| {
        let mut both = config(&parameters);
        both.insert("rope_scaling".into(), scaling.clone());
        Arch::from_config(&both).map(|arch| arch.ropes).map_err(|error| error.to_string())
    };
    let alone = Arch::from_config(&config(&yarn)).unwrap().ropes;
    assert_eq!(both(json!({"rope_type": "default", "rope_theta": 1e4}), &yarn).unwrap(), alone);
    assert_eq!(both(yarn.clone(), &json!({})).unwrap(), alone);
    for (parameters, words) in [
        (json!({"rope_type": "default", "rope_theta": 1e6}), "rope_scaling.rope_theta must be set"),
        (json!({"rope_type": "linear", "factor": 2.0}), "rope_parameters.rope_type must be \"default\""),
        (json!({"full_attention": {"rope_theta": 1e6}}), "rope_parameters must be the same for all layers"),
    ] {
        let error = both(parameters, &yarn).unwrap_err();
        assert!(error.contains(words), "{words} in {error}");
    }
}

/// A scaling, a key of it, a value, and the error.
const WRONG: [(&str, &str, f64, &str); 12] = [
    ("llama3", "low_freq_factor", 4.0, "high_freq_factor must be above low_freq_factor, 4 (got 4)"),
    ("llama3", "low_freq_factor", 8.0, "high_freq_factor must be above low_freq_factor, 8 (got 4)"),
    ("llama3", "low_freq_factor", 0.0, "low_freq_factor must be above 0 (got 0)"),
    ("llama3", "high_freq_factor", -1.0, "high_freq_factor must be above 0 (got -1)"),
    ("llama3", "original_max_position_embeddings", 0.0, "original_max_position_embeddings must be above 0 (got 0)"),
    ("llama3", "factor", 0.5, "factor must be at least 1"),
    ("yarn", "original_max_position_embeddings", -4.0, "original_max_position_embeddings must be above 0 (got -4)"),
    ("yarn", "beta_fast", -1.0, "beta_fast must be above 0 (got -1)"),
    ("yarn", "beta_slow", -1.0, "beta_slow must be above 0 (got -1)"),
    ("yarn", "attention_factor", 0.0, "attention_factor must be above 0 (got 0)"),
    ("yarn", "llama_4_scaling_beta", 0.5, "llama_4_scaling_beta must be 0 in this family"),
    ("default", "rope_theta", 1.0, "rope_theta must be above 1 (got 1)"),
];

#[test]
fn a_number_of_a_scaling_that_means_nothing_is_rejected_and_named() {
    let rope = |kind: &str| {
        json!({"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0})
    };
    for (kind, key, value, words) in WRONG {
        let mut rope = rope(kind);
        assert!(Arch::from_config(&config(&rope)).is_ok(), "{kind}");
        rope[key] = json!(value);
        let error = Arch::from_config(&config(&rope)).expect_err(words).to_string();
        assert!(error.contains(words), "{words} is not in {error}");
    }
    // As in transformers, 0 means the default.
    let mut zero = rope("yarn");
    zero["beta_fast"] = json!(0);
    zero["beta_slow"] = json!(0.0);
    let ropes = |rope: &Value| Arch::from_config(&config(rope)).expect("a model").ropes;
    assert_eq!(ropes(&zero), ropes(&rope("yarn")));
}

#[test]
fn the_original_length_of_the_model_replaces_that_of_its_scaling() {
    for kind in ["llama3", "yarn"] {
        let rope = |original: u32| {
            json!({"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": original,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0})
        };
        let mut both = config(&rope(32));
        both.insert("original_max_position_embeddings".into(), json!(64));
        let ropes = |config| Arch::from_config(config).expect("a model").ropes;
        assert_eq!(ropes(&both), ropes(&config(&rope(64))), "{kind}");
    }
}
