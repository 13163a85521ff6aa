//! The keys of two config.json that differ.

use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Keys without an effect on a forward.
const IGNORED: &[&str] = &[
    "_name_or_path",
    "_attn_implementation",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "mean",
    "num_labels",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "reward_mean",
    "reward_std",
    "rlhf_hpc",
    "std",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

/// A key with its two values; `None` where it is absent.
pub type Difference = (String, Option<Value>, Option<Value>);

/// The keys that a forward reads and whose values differ. Keys of inner objects have the objects' names
/// before them. Keys of the rope do not, because files of transformers 4 have them outside.
pub fn differences(a: &Map<String, Value>, b: &Map<String, Value>) -> Vec<Difference> {
    let [a, b] = [a, b].map(|config| {
        let mut flat = BTreeMap::new();
        flatten("", config, &mut flat);
        flat
    });
    let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let of = |flat: &BTreeMap<String, Value>, key: &String| flat.get(key).cloned();
    let differ = |key: &&String| !is_same(a.get(*key), b.get(*key));
    keys.into_iter().filter(differ).map(|key| (key.clone(), of(&a, key), of(&b, key))).collect()
}

fn flatten(before: &str, object: &Map<String, Value>, flat: &mut BTreeMap<String, Value>) {
    for (key, value) in object {
        match value {
            _ if IGNORED.contains(&key.as_str()) => {}
            Value::Object(inner) if key == "rope_parameters" || key == "rope_scaling" => flatten(before, inner, flat),
            // A rope without scaling has no type in older files.
            Value::String(kind) if key == "rope_type" && kind == "default" => {}
            Value::Object(inner) => flatten(&format!("{before}{key}."), inner, flat),
            _ => drop(flat.insert(format!("{before}{key}"), value.clone())),
        }
    }
}

/// Whether two values are equal. Numbers may be written in two ways, and null is as absent.
fn is_same(a: Option<&Value>, b: Option<&Value>) -> bool {
    let [a, b] = [a, b].map(|value| value.filter(|value| !value.is_null()));
    match (a.and_then(Value::as_f64), b.and_then(Value::as_f64)) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

/// `rope_theta is 10000 in a and 1000000 in b`
pub fn describe((key, a, b): &Difference, names: [&str; 2]) -> String {
    let shown = |value: &Option<Value>| match value {
        None => "absent".to_owned(),
        Some(value) => match value.as_f64() {
            Some(number) => format!("{number}"),
            None => value.to_string(),
        },
    };
    format!("{key} is {} in {} and {} in {}", shown(a), names[0], shown(b), names[1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_of_the_rope_are_the_same_in_both_spellings_and_keys_without_effect_are_left_out() {
        let object = |value: Value| value.as_object().expect("an object").clone();
        let old = object(json!({"rope_theta": 10000, "rms_norm_eps": 1e-5, "torch_dtype": "float32", "x": null}));
        let new = json!({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rms_norm_eps": 1e-5});
        let found = differences(&old, &object(new));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(describe(&found[0], ["a", "b"]), "rope_theta is 10000 in a and 1000000 in b");
    }
}
