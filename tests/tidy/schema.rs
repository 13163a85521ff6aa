//! The JSON schema of a job agrees with the program: every key, its default, and its allowed values.

use super::source::files;
use rlhf_hpc::config::{Config, schema};
use serde_json::Value;

/// Keys without a default.
const REQUIRED: [&str; 3] = ["job.kind", "model.actor", "data.prompts"];

/// The errors of a value according to the schema, whose keywords are all supported here.
fn faults(schema: &Value, value: &Value, path: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (keyword, asked) in schema.as_object().expect("a schema is an object") {
        let number = || value.as_f64().zip(asked.as_f64());
        let holds = match keyword.as_str() {
            "type" => match asked.as_str().expect("one type") {
                "object" => value.is_object(),
                "array" => value.is_array(),
                "string" => value.is_string(),
                "boolean" => value.is_boolean(),
                "integer" => value.is_i64() || value.is_u64(),
                "number" => value.is_number(),
                other => panic!("{path}: the type {other}"),
            },
            "enum" => asked.as_array().is_some_and(|words| words.contains(value)),
            "const" => asked == value,
            "anyOf" => asked.as_array().is_some_and(|any| any.iter().any(|one| faults(one, value, path).is_empty())),
            "minimum" => number().is_none_or(|(x, low)| x >= low),
            "exclusiveMinimum" => number().is_none_or(|(x, low)| x > low),
            "maximum" => number().is_none_or(|(x, high)| x <= high),
            "if" => {
                let is_so = faults(asked, value, path).is_empty();
                found.extend(schema.get("else").filter(|_| !is_so).into_iter().flat_map(|of| faults(of, value, path)));
                true
            }
            "minItems" => value.as_array().is_none_or(|list| list.len() as u64 >= asked.as_u64().expect("a count")),
            "maxItems" => value.as_array().is_none_or(|list| list.len() as u64 <= asked.as_u64().expect("a count")),
            "required" => {
                asked.as_array().expect("names").iter().all(|key| !value[key.as_str().expect("a name")].is_null())
            }
            "items" => {
                let each = value.as_array().into_iter().flatten();
                found.extend(each.flat_map(|one| faults(asked, one, path)));
                true
            }
            "properties" => {
                for (key, inner) in value.as_object().into_iter().flatten() {
                    match asked.get(key) {
                        Some(of) => found.extend(faults(of, inner, &format!("{path}.{key}"))),
                        None if schema["additionalProperties"] == false => {
                            found.push(format!("{path}.{key} is unknown"));
                        }
                        None => {}
                    }
                }
                true
            }
            // Unknown keys of a table are found with its "properties"; some tables take any, with values of one type.
            "additionalProperties" if asked.is_boolean() => true,
            "additionalProperties" => {
                let each = value.as_object().into_iter().flatten();
                found.extend(each.flat_map(|(key, one)| faults(asked, one, &format!("{path}.{key}"))));
                true
            }
            "else" | "$schema" | "title" | "description" | "default" | "examples" | "pattern" => true,
            other => panic!("{path}: the keyword {other}"),
        };
        if !holds {
            found.push(format!("{path} = {value}: {keyword} {asked}"));
        }
    }
    found
}

fn job(text: &str) -> Value {
    serde_json::to_value(text.parse::<toml::Table>().expect("TOML")).expect("JSON")
}

#[test]
fn the_schema_has_every_key_with_its_type_default_and_meaning_and_no_other() {
    fn below(schema: &Value, default: &Value, path: &str, keys: &mut usize) {
        let (Some(tables), Some(known)) = (schema["properties"].as_object(), default.as_object()) else {
            *keys += 1;
            assert!(schema["type"].is_string() || schema["anyOf"].is_array(), "{path} has no type");
            assert!(schema["description"].as_str().is_some_and(|words| words.len() > 10), "{path} has no words");
            if REQUIRED.contains(&&path[1..]) {
                assert!(schema.get("default").is_none(), "{path}");
            } else {
                assert_eq!(&schema["default"], default, "{path}");
                assert_eq!(faults(schema, default, path), [""; 0]);
            }
            return;
        };
        let names = |of: &serde_json::Map<String, Value>| of.keys().cloned().collect::<std::collections::BTreeSet<_>>();
        assert_eq!(names(tables), names(known), "{path}");
        // [optim] has no keys of its own.
        assert!(schema["description"].is_string() || path == ".optim", "{path} has no words");
        tables.iter().for_each(|(name, inner)| below(inner, &known[name], &format!("{path}.{name}"), keys));
    }
    let mut keys = 0;
    let mut default = job(&Config::default().to_toml());
    // It is outside of all tables, and no part of the job itself.
    default["base"] = "".into();
    below(&schema(), &default, "", &mut keys);
    assert!(keys > 100, "{keys} keys");
}

#[test]
fn every_job_in_the_tree_conforms_to_the_schema() {
    for file in files("jobs", &[".toml"]) {
        assert_eq!(faults(&schema(), &job(&file.text), ""), [""; 0], "{}", file.name);
    }
}

#[test]
fn the_schema_accepts_the_short_forms_and_rejects_the_jobs_that_a_start_rejects() {
    let of = |line: &str| {
        let required = "job.kind = \"ppo\"\nmodel.actor = \"m\"\ndata.prompts = \"p\"\n";
        faults(&schema(), &job(&format!("{required}{line}\n")), "")
    };
    for good in [
        "reward.rule = \"exact\"",
        "reward.rule = [\"exact\", { kind = \"length\", weight = 0.1 }]",
        "reward.python = { file = \"a.py\", pass_env = [\"KEY\"] }",
        "reward.http = \"http://a:1/b\"",
        "reward.http = [{ url = [\"http://a:1/b\", \"http://c:1/b\"], batch = 8 }, { url = \"http://a:1/c\", weight = 0.5 }]",
        "reward.http = { url = \"https://a/b\", header_env = [\"KEY\", \"OTHER\"] }",
        "reward.environment = { python = { file = \"a.py\", gpu = true } }",
        "mesh.placement = [{ roles = [\"actor\"], ranks = \"0..8\" }]",
        "mesh.tensor = 2",
        "lora.targets = [\"q_proj\", \"v_proj\"]",
        "lora.targets = \".*_proj\"",
        "lora.layers = 3",
        "lora.layers = [0, \"2-5\"]",
        "lora.rank_pattern = { q_proj = 4 }",
        "lora.critic.rank = 4",
        "rollout.stop = \"END\"",
        "data.eval_sets = [{ name = \"a\", prompts = \"a.jsonl\" }, { name = \"b\", prompts = [\"b\"], split = \"test\" }]",
    ] {
        assert_eq!(of(good), [""; 0], "{good}");
    }
    for bad in [
        "ppo.advantage = \"gea\"",
        "ppo.gamma = 1.5",
        "job.seed = -1",
        "job.steps = 1.5",
        "optim.actor.eps = 0.0",
        "ppo.reward_clip = [1.0]",
        "mesh.tensor = \"most\"",
        "mesh.offload = [\"all\"]",
        "reward.rule = \"exactly\"",
        "reward.python = { weight = 1.0 }",
        "reward.python = { file = \"a.py\", memory_max_gib = -1.0 }",
        "reward.http = { weight = 1.0 }",
        "rollout.max_tokens = 3",
        "data.weights = [\"1\"]",
        "data.eval_sets = [{ prompts = \"a.jsonl\" }]",
    ] {
        assert_ne!(of(bad), [""; 0], "{bad}");
    }
    assert_ne!(faults(&schema(), &job("job.kind = \"sft\""), ""), [""; 0], "keys without a default are required");
    assert_eq!(faults(&schema(), &job("base = \"a.toml\"\njob.steps = 3"), ""), [""; 0], "a base may have them");
}
