//! The style of the house, held by tests: import levels, cycles between files, dead files, sizes, where `unsafe` may stand, banned names, and what every
//! folder must hold.

mod cycles;
mod source;
mod tree;

use source::{code, files, functions, named_rooms};

const LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

/// Modules by level, lowest first. A module imports only modules of lower levels; level 5 modules do not import each other.
const LEVELS: [&[&str]; 11] = [
    &["config", "mesh", "experience", "dtype", "error", "rng"],
    &["device", "sys"],
    &["tensor"],
    &["ops", "comm"],
    &["model", "text"],
    &["data", "rollout", "reward", "advantage", "loss", "optim", "checkpoint", "metrics"],
    &["learn"],
    &["launch"],
    &["train"],
    &["plan"],
    &["cli"],
];

/// The nouns of level 0 may name each other; between other modules of one level there is no way.
const NOUNS: usize = 0;

fn level_of(module: &str) -> Option<usize> {
    LEVELS.iter().position(|modules| modules.contains(&module))
}

fn none(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn every_module_has_a_level_and_imports_go_strictly_down() {
    let mut faults = Vec::new();
    for file in files("src", &[".rs"]) {
        let module = file.name["src/".len()..].split('/').next().unwrap().trim_end_matches(".rs");
        if ["lib", "main"].contains(&module) {
            continue;
        }
        let Some(level) = level_of(module) else {
            faults.push(format!("{}: module {module} has no level", file.name));
            continue;
        };
        for (line, target) in named_rooms(&file) {
            let Some(target_level) = level_of(&target) else { continue };
            let down = target_level < level || (level == NOUNS && target_level == NOUNS);
            if target != module && !down {
                faults.push(format!(
                    "{}:{line}: {module} (level {level}) imports {target} (level {target_level})",
                    file.name
                ));
            }
        }
    }
    none(&faults);
}

#[test]
fn files_have_at_most_500_lines_and_functions_70() {
    let mut faults = Vec::new();
    let rust = ["src", "tests", "bench"].into_iter().flat_map(|dir| files(dir, &[".rs"]));
    let others =
        ["cuda", "jobs", "tests", "bench"].into_iter().flat_map(|dir| files(dir, &[".cu", ".cuh", ".py", ".sh"]));
    for file in rust.chain(others) {
        let lines = file.lines().len();
        if lines > LINES_MAX {
            faults.push(format!("{}: {lines} lines", file.name));
        }
        for (line, length, head) in functions(&file) {
            if length > FUNCTION_LINES_MAX {
                faults.push(format!("{}:{line}: {length} lines: {head}", file.name));
            }
        }
    }
    none(&faults);
}

#[test]
fn unsafe_stands_only_where_the_design_puts_it_and_says_why() {
    let mut faults = Vec::new();
    for file in files("src", &[".rs"]) {
        let allowed = ["src/device/", "src/comm/", "src/sys/", "src/tensor/arena.rs"];
        let allowed = allowed.iter().any(|p| file.name.starts_with(p));
        let lines = file.lines();
        for (number, words) in code(&file.text).lines().enumerate() {
            let is_unsafe = words.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
            if is_unsafe && !allowed {
                faults.push(format!("{}:{}: unsafe outside its modules", file.name, number + 1));
            }
            let opens = words.contains("unsafe {") || words.contains("unsafe impl");
            let before = &lines[number.saturating_sub(8)..=number];
            if opens && !before.iter().any(|l| l.contains("SAFETY:")) {
                faults.push(format!("{}:{}: no SAFETY comment", file.name, number + 1));
            }
        }
    }
    none(&faults);
}

#[test]
fn no_unfinished_work_no_features_no_banned_names() {
    let mut faults = Vec::new();
    for file in ["src", "tests", "bench"].into_iter().flat_map(|dir| files(dir, &[".rs"])) {
        for part in file.name.trim_end_matches(".rs").split('/') {
            if ["utils", "util", "helpers", "helper", "common", "misc"].contains(&part) {
                faults.push(format!("{}: banned name {part}", file.name));
            }
        }
        for (number, line) in code(&file.text).lines().enumerate() {
            let words: String = line.split_whitespace().collect();
            for banned in ["todo!(", "unimplemented!(", "dbg!(", "cfg(feature", "#[cfg(any())"] {
                if words.contains(banned) {
                    faults.push(format!("{}:{}: {banned}", file.name, number + 1));
                }
            }
        }
    }
    none(&faults);
}

#[test]
fn a_test_is_left_aside_only_for_tests_long_sh() {
    let mut faults = Vec::new();
    for file in ["src", "tests", "bench"].into_iter().flat_map(|dir| files(dir, &[".rs"])) {
        for (number, line) in file.lines().iter().enumerate().filter(|(_, line)| line.trim().starts_with("#[ignore")) {
            if !line.contains("#[ignore = \"long: ") {
                faults.push(format!("{}:{}: {}", file.name, number + 1, line.trim()));
            }
        }
    }
    none(&faults);
}
