//! The measurements of each update in a file, and their comparison with those of another replay of the step.

use super::table::{short, shown, table};
use crate::error::{Error, Result};
use crate::launch::replay::Update;
use crate::sys::files;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The contents of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saved {
    step: u64,
    updates: Vec<Update>,
}

impl Saved {
    pub fn new(step: u64, updates: &[Update]) -> Self {
        Self { step, updates: updates.to_vec() }
    }

    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|e| Error::io("read", path, &e))?;
        serde_json::from_slice(&bytes).map_err(|e| {
            Error::data(format!("{}: {e}", path.display())).hint("pass a file that replay --save has written")
        })
    }

    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).expect("numbers are JSON");
        files::write_atomic(path, format!("{text}\n").as_bytes())
    }

    /// Rejects the file of another step.
    pub fn check(&self, step: u64) -> Result<()> {
        Error::need(self.step == step, format!("--against must be a replay of step {step} (got step {})", self.step))
    }

    /// For each update that both have: the metric with the largest difference, and for each model the parameter whose
    /// gradient differs most.
    pub fn compared(&self, other: &Self) -> String {
        let mut rows = Vec::new();
        for (i, (here, there)) in self.updates.iter().zip(&other.updates).enumerate() {
            let update = (i + 1).to_string();
            rows.extend(row(&update, "metric", &there.metrics, &here.metrics));
            for (role, norms) in &here.gradient_norms {
                let others = there.gradient_norms.get(role);
                rows.extend(others.and_then(|others| row(&update, &format!("gradient of the {role}"), others, norms)));
            }
        }
        let mut text = String::from("\nlargest differences of each update from --against\n");
        table(&mut text, &["update", "of", "largest in", "against", "here", "relative"], rows.into_iter());
        text
    }
}

/// The row of the number with the largest difference, as a share of the larger number.
fn row(update: &str, what: &str, there: &BTreeMap<String, f64>, here: &BTreeMap<String, f64>) -> Option<Vec<String>> {
    let share = |a: f64, b: f64| if a == b { 0.0 } else { (a - b).abs() / a.abs().max(b.abs()) };
    let both = here.iter().filter_map(|(key, b)| there.get(key).map(|a| (key, *a, *b, share(*a, *b))));
    let (key, a, b, most) = both.max_by(|x, y| x.3.total_cmp(&y.3))?;
    let cells = if most == 0.0 {
        ["none: equal to the bit".to_owned(), String::new(), String::new(), String::new()]
    } else {
        [key.clone(), shown(a), shown(b), short(most)]
    };
    Some([update.to_owned(), what.to_owned()].into_iter().chain(cells).collect())
}
