//! The checked-in numbers of OpenRLHF (tests/golden/openrlhf.json; its header names revision and torch version).

use serde_json::Value;

pub struct Golden {
    root: Value,
}

pub struct Case<'a> {
    root: &'a Value,
    case: &'a Value,
}

impl Golden {
    pub fn load() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/openrlhf.json");
        Self { root: serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap() }
    }

    /// All cases of a name; at least one, so that a test cannot pass by comparing nothing.
    pub fn cases(&self, name: &str) -> Vec<Case<'_>> {
        let all = self.root["cases"].as_array().unwrap();
        let cases: Vec<_> =
            all.iter().filter(|c| c["name"] == name).map(|case| Case { root: &self.root, case }).collect();
        assert!(!cases.is_empty(), "no case {name}");
        cases
    }
}

impl<'a> Case<'a> {
    pub fn inputs(&self) -> &'a Value {
        &self.root["inputs"][self.case["in"].as_u64().unwrap() as usize]
    }

    pub fn rows(&self, name: &str) -> Vec<Vec<f32>> {
        rows(&self.inputs()[name])
    }

    pub fn masks(&self, name: &str) -> Vec<Vec<u8>> {
        self.inputs()[name].as_array().unwrap().iter().map(mask).collect()
    }

    pub fn row(&self, name: &str) -> Vec<f32> {
        row(&self.inputs()[name])
    }

    pub fn out(&self) -> &'a Value {
        &self.case["out"]
    }

    pub fn out_rows(&self, name: &str) -> Vec<Vec<f32>> {
        rows(&self.case["out"][name])
    }

    pub fn grad_rows(&self, name: &str) -> Vec<Vec<f32>> {
        rows(&self.case["grad"][name])
    }

    pub fn arg(&self, name: &str) -> Option<f64> {
        self.case["args"][name].as_f64()
    }

    pub fn flag(&self, name: &str) -> Option<bool> {
        self.case["args"][name].as_bool()
    }

    pub fn word(&self, name: &str) -> Option<&'a str> {
        self.case["args"][name].as_str()
    }

    pub fn pair(&self, name: &str) -> Option<[f32; 2]> {
        let pair = self.case["args"][name].as_array()?;
        Some([pair[0].as_f64()? as f32, pair[1].as_f64()? as f32])
    }

    pub fn args(&self) -> &'a Value {
        &self.case["args"]
    }
}

pub fn row(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

pub fn rows(value: &Value) -> Vec<Vec<f32>> {
    value.as_array().unwrap().iter().map(row).collect()
}

pub fn mask(value: &Value) -> Vec<u8> {
    value.as_array().unwrap().iter().map(|x| u8::from(x == &Value::Bool(true) || x.as_u64() == Some(1))).collect()
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
