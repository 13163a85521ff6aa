//! The page about pandas: its code runs on a run, and each name in it is a column of a run's files.

use super::command::rows;
use super::fixture::Fixture;
use crate::process::{Running, launched};
use hdf5::File;
use regex::Regex;
use std::collections::BTreeSet;
use std::path::Path;

/// Names that the code itself makes, and words of pandas.
const OWN: &str = "step i score_ finish stop length stop_string response_tokens reward_smooth position mean std count all answers eval eval_ of index score";

#[test]
fn the_code_of_the_page_about_pandas_reads_the_files_of_a_run() {
    let fixture = Fixture::new();
    for (dir, seed) in [("runs/a", "5"), ("runs/b", "6")] {
        fixture.job(&[&format!("job.dir={dir}"), &format!("job.seed={seed}"), "eval.every_steps=1"]).well();
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cli/help/results.md");
    let text = std::fs::read_to_string(&page).expect("the page");
    let mut known: BTreeSet<String> = OWN.split(' ').map(str::to_owned).collect();
    for line in rows(&fixture.text("runs/a/metrics.jsonl")) {
        known.extend(line.as_object().expect("an object").keys().cloned());
    }
    for line in rows(&fixture.text("runs/a/eval/step-1.jsonl")) {
        known.extend(line.as_object().expect("an object").keys().cloned());
        known.extend(line["answers"][0].as_object().expect("an answer").keys().cloned());
    }
    let file = File::open(fixture.path("runs/a/rollouts.h5")).expect("HDF5");
    known.extend(file.group("step_000001").and_then(|group| group.member_names()).expect("data sets"));
    let blocks = Regex::new("(?ms)^```python\n(.*?)^```").unwrap();
    let name = Regex::new(r#""([a-z_]+)""#).unwrap();
    let code: String = blocks.captures_iter(&text).map(|block| block[1].to_owned()).collect();
    let used: BTreeSet<&str> = name.captures_iter(&code).map(|found| found.get(1).unwrap().as_str()).collect();
    let unknown: Vec<&&str> = used.iter().filter(|name| !known.contains(**name)).collect();
    assert!(used.len() > 25 && unknown.is_empty(), "{unknown:?}");

    // Machines of the tests need not have pandas.
    let has_pandas = Running::new({
        let mut command = launched(Path::new("python3"), 0);
        command.args(["-c", "import pandas, h5py, matplotlib"]);
        command
    });
    if has_pandas.end().code == Some(0) {
        let mut command = launched(Path::new("python3"), 0);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/page_code.py");
        let ended = Running::new({
            command.arg(script).args([&page, fixture.root()]);
            command
        });
        assert!(ended.end().well().stdout.contains("== 8 blocks"));
    }
}
