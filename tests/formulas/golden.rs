//! The checked-in numbers of OpenRLHF (tests/golden/openrlhf.json; its header names revision and torch version).

use serde::de::DeserializeOwned;
use serde_json::Value;

pub struct Case {
    pub inputs: Value,
    pub args: Value,
    pub out: Value,
    pub grad: Value,
}

/// All cases of a name; at least one, so that a test cannot pass by comparing nothing.
pub fn cases(name: &str) -> Vec<Case> {
    let golden: Value = serde_json::from_str(include_str!("../golden/openrlhf.json")).unwrap();
    let all = golden["cases"].as_array().unwrap().iter().filter(|case| case["name"] == name);
    let of = |case: &Value| {
        let inputs = case["in"].as_u64().map_or(Value::Null, |i| golden["inputs"][i as usize].clone());
        let [args, out, grad] = ["args", "out", "grad"].map(|key| case[key].clone());
        Case { inputs, args, out, grad }
    };
    let cases: Vec<_> = all.map(of).collect();
    assert!(!cases.is_empty(), "no case {name}");
    cases
}

impl Case {
    pub fn rows(&self, name: &str) -> Vec<Vec<f32>> {
        rows(&self.inputs[name])
    }

    pub fn masks(&self, name: &str) -> Vec<Vec<u8>> {
        self.inputs[name].as_array().unwrap().iter().map(mask).collect()
    }

    pub fn arg(&self, name: &str) -> Option<f64> {
        self.args[name].as_f64()
    }
}

pub fn read<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

pub fn rows(value: &Value) -> Vec<Vec<f32>> {
    read(value)
}

pub fn mask(value: &Value) -> Vec<u8> {
    value.as_array().unwrap().iter().map(|x| u8::from(x == true || x == 1)).collect()
}

/// 1e-5, relative above 1.
#[track_caller]
pub fn close(got: f64, want: f64, what: &dyn std::fmt::Display) {
    assert!((got - want).abs() <= 1e-5 * want.abs().max(1.0), "{what}: got {got}, OpenRLHF has {want}");
}

#[track_caller]
pub fn close_rows(got: &[Vec<f32>], want: &[Vec<f32>], what: &dyn std::fmt::Display) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.len(), want.len(), "{what}: row {i}");
        for (t, (&got, &want)) in got.iter().zip(want).enumerate() {
            close(f64::from(got), f64::from(want), &format!("{what}, row {i}, token {t}"));
        }
    }
}
