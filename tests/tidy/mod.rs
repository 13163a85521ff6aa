//! The style rules of the repository: import levels, cycles between files, dead files, sizes, the places for `unsafe`,
//! banned names, the required parts of every folder, and a manual of every key.

mod batch;
mod gpu_script;
mod imports;
mod manual;
mod pages;
mod prose;
mod schema;
mod source;
mod tree;

use source::{File, code, files, functions};

const LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

fn none(faults: impl IntoIterator<Item = String>) {
    let faults: Vec<String> = faults.into_iter().collect();
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

fn rust() -> impl Iterator<Item = File> {
    ["src", "tests", "bench"].into_iter().flat_map(|dir| files(dir, &[".rs"]))
}

#[test]
fn files_have_at_most_500_lines_and_functions_70() {
    let mut faults = Vec::new();
    let others =
        ["cuda", "jobs", "tests", "bench"].into_iter().flat_map(|dir| files(dir, &[".cu", ".cuh", ".py", ".sh"]));
    for file in rust().chain(others) {
        let lines = file.lines().len();
        if lines > LINES_MAX {
            faults.push(format!("{}: {lines} lines", file.name));
        }
        let long = functions(&file).into_iter().filter(|(_, length, _)| *length > FUNCTION_LINES_MAX);
        faults.extend(long.map(|(line, length, head)| format!("{}:{line}: {length} lines: {head}", file.name)));
    }
    none(faults);
}

#[test]
fn unsafe_occurs_only_in_its_modules_and_with_a_safety_comment() {
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
    none(faults);
}

#[test]
fn there_is_no_unfinished_work_no_feature_no_banned_name_and_only_long_tests_are_ignored() {
    let mut faults = Vec::new();
    for file in rust() {
        let names = ["utils", "util", "helpers", "helper", "common", "misc"];
        let banned = file.name.trim_end_matches(".rs").split('/').filter(|part| names.contains(part));
        faults.extend(banned.map(|part| format!("{}: banned name {part}", file.name)));
        for (number, (line, text)) in code(&file.text).lines().zip(file.lines()).enumerate() {
            let words: String = line.split_whitespace().collect();
            let banned = ["todo!(", "unimplemented!(", "dbg!(", "cfg(feature", "#[cfg(any())"];
            let is_aside = text.trim().starts_with("#[ignore") && !text.contains("#[ignore = \"long: ");
            if is_aside || banned.iter().any(|banned| words.contains(banned)) {
                faults.push(format!("{}:{}: {}", file.name, number + 1, text.trim()));
            }
        }
    }
    none(faults);
}
