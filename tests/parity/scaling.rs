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
