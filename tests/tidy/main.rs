//! The style of the house, held by tests: import levels, sizes, where `unsafe` may stand, banned names.

use std::fs;
use std::path::{Path, PathBuf};

const LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

/// Rooms by level, lowest first. A room imports only rooms of lower levels; level 5 rooms do not import each other.
const LEVELS: [&[&str]; 8] = [
    &["config", "mesh", "experience", "error", "rng"],
    &["device", "sys"],
    &["tensor"],
    &["ops", "comm"],
    &["model", "text"],
    &["data", "rollout", "reward", "advantage", "loss", "gradient", "optim", "checkpoint", "metrics"],
    &["train"],
    &["cli"],
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn files(dir: &str, endings: &[&str]) -> Vec<(PathBuf, String)> {
    fn walk(dir: &Path, endings: &[&str], out: &mut Vec<(PathBuf, String)>) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, endings, out);
            } else if endings.iter().any(|e| path.to_string_lossy().ends_with(e)) {
                let text = fs::read_to_string(&path).unwrap();
                out.push((path, text));
            }
        }
    }
    let mut out = Vec::new();
    walk(&root().join(dir), endings, &mut out);
    assert!(!out.is_empty() || dir == "cuda", "{dir} holds no source");
    out
}

/// The code of a line: without comments and string contents, roughly enough for these checks.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or("")
}

fn room_of(path: &Path) -> String {
    let relative = path.strip_prefix(root().join("src")).unwrap();
    let first = relative.components().next().unwrap().as_os_str().to_string_lossy();
    first.trim_end_matches(".rs").to_string()
}

fn level_of(room: &str) -> Option<usize> {
    LEVELS.iter().position(|rooms| rooms.contains(&room))
}

#[test]
fn every_room_has_a_level_and_imports_go_strictly_down() {
    let mut faults = Vec::new();
    for (path, text) in files("src", &[".rs"]) {
        let room = room_of(&path);
        if ["lib", "main"].contains(&room.as_str()) {
            continue;
        }
        let Some(level) = level_of(&room) else {
            faults.push(format!("{}: room {room} has no level", path.display()));
            continue;
        };
        for (number, line) in text.lines().enumerate() {
            for part in code(line).split("crate::").skip(1) {
                let target: String = part.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                // `device` (1) names DType of `tensor` (2) in no place; ops and model own their dims.
                let Some(target_level) = level_of(&target) else { continue };
                if target != room && target_level >= level {
                    faults.push(format!("{}:{}: {room} imports {target}", path.display(), number + 1));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn files_have_at_most_500_lines_and_functions_70() {
    let mut faults = Vec::new();
    for (path, text) in files("src", &[".rs"]).into_iter().chain(files("cuda", &[".cu", ".cuh"])) {
        let lines: Vec<&str> = text.lines().collect();
        if lines.len() > LINES_MAX {
            faults.push(format!("{}: {} lines", path.display(), lines.len()));
        }
        let mut start: Option<(usize, usize, String)> = None;
        for (number, line) in lines.iter().enumerate() {
            let indent = line.len() - line.trim_start().len();
            let words = code(line).trim_start();
            let opens = words.starts_with("fn ")
                || (words.contains(" fn ") && !words.contains("Fn(") && words.starts_with("pub"));
            if start.is_none() && (opens || words.starts_with("unsafe fn ") || words.starts_with("const fn ")) {
                start = Some((number, indent, words.to_string()));
            }
            if let Some((from, at, name)) = &start {
                if indent == *at && line.trim() == "}" {
                    if number - from + 1 > FUNCTION_LINES_MAX {
                        faults.push(format!("{}:{}: {} lines: {name}", path.display(), from + 1, number - from + 1));
                    }
                    start = None;
                } else if indent == *at && words.ends_with('}') {
                    start = None;
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn unsafe_stands_only_where_the_design_puts_it_and_says_why() {
    let mut faults = Vec::new();
    for (path, text) in files("src", &[".rs"]) {
        let name = path.strip_prefix(root()).unwrap().to_string_lossy().to_string();
        let allowed =
            ["src/device/", "src/comm/", "src/sys/", "src/tensor/arena.rs"].iter().any(|p| name.starts_with(p));
        let lines: Vec<&str> = text.lines().collect();
        for (number, line) in lines.iter().enumerate() {
            let words = code(line);
            let opens_block = words.contains("unsafe {") || words.contains("unsafe impl");
            if !allowed && (opens_block || words.contains("unsafe fn")) {
                faults.push(format!("{name}:{}: unsafe outside its rooms", number + 1));
            }
            let before = &lines[number.saturating_sub(8)..=number];
            if opens_block && !before.iter().any(|l| l.contains("SAFETY:")) {
                faults.push(format!("{name}:{}: no SAFETY comment", number + 1));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn no_unfinished_work_no_features_no_banned_names() {
    let mut faults = Vec::new();
    for (path, text) in files("src", &[".rs"]).into_iter().chain(files("tests", &[".rs"])) {
        let stem = path.file_stem().unwrap().to_string_lossy().to_string();
        if ["utils", "util", "helpers", "helper", "common", "misc"].contains(&stem.as_str()) {
            faults.push(format!("{}: banned name", path.display()));
        }
        for (number, line) in text.lines().enumerate() {
            for banned in [
                concat!("to", "do!("),
                concat!("unimpl", "emented!("),
                concat!("#[ig", "nore"),
                concat!("cfg(fea", "ture"),
            ] {
                if line.contains(banned) {
                    faults.push(format!("{}:{}: {banned}", path.display(), number + 1));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_number_in_the_readme_that_claims_speed_links_to_a_recorded_run() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let mut faults = Vec::new();
    for (number, line) in readme.lines().enumerate() {
        for part in line.split("](bench/runs/").skip(1) {
            let target = format!("bench/runs/{}", part.split(')').next().unwrap());
            if !root().join(&target).exists() {
                faults.push(format!("README.md:{}: {target} does not exist", number + 1));
            }
        }
        let claims = line.contains("tokens/s") || line.contains("GFLOP/s") || line.contains("x faster");
        if claims
            && line.starts_with('|')
            && !line.contains("---")
            && !line.contains("](bench/runs/")
            && !line.contains("| work")
        {
            faults.push(format!("README.md:{}: a speed without its run", number + 1));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
