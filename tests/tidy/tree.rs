//! What every folder must hold, and what no file may name.

use super::none;
use super::source::{files, root, walk};
use std::fs;
use std::os::unix::fs::PermissionsExt;

fn read(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn every_folder_of_tests_is_a_part_of_a_target() {
    let manifest: toml::Table = read("Cargo.toml").parse().unwrap();
    let targets = manifest["test"].as_array().unwrap().iter().map(|test| test["path"].as_str().unwrap());
    let roots = targets.map(|path| format!("{path}\n{}", read(path))).collect::<Vec<_>>().concat();
    for file in files("tests", &["/mod.rs", "/main.rs"]).into_iter().filter(|file| file.name.matches('/').count() == 2)
    {
        let folder = file.name.split('/').nth(1).unwrap();
        let is_named = roots.contains(&format!("\nmod {folder};")) || roots.contains(&file.name);
        assert!(is_named, "with autotests = false a folder that no target names never runs: {folder}");
    }
    assert!(!manifest.contains_key("features"), "the design has no cargo features");
}

#[test]
fn every_golden_has_the_script_that_makes_it_and_is_small() {
    let dir = root().join("tests/golden");
    let mut faults = Vec::new();
    for path in fs::read_dir(&dir).unwrap().flatten().map(|entry| entry.path()) {
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        if stem != "__pycache__" && !dir.join(format!("{stem}.py")).is_file() {
            faults.push(format!("tests/golden/{stem}: there is no {stem}.py that makes it"));
        }
    }
    walk(&dir, &mut |path| {
        let bytes = fs::metadata(path).unwrap().len();
        if bytes > 400 << 10 {
            faults.push(format!("{}: {bytes} bytes", path.display()));
        }
    });
    none(&faults);
}

#[test]
fn scripts_that_are_run_by_name_can_be_executed() {
    let mut faults = Vec::new();
    walk(&root(), &mut |path| {
        let text = fs::read(path).unwrap_or_default();
        let is_script = text.starts_with(b"#!") && path.extension().is_none_or(|e| e == "sh");
        if is_script && fs::metadata(path).unwrap().permissions().mode() & 0o111 == 0 {
            faults.push(format!("{} is not executable", path.display()));
        }
    });
    none(&faults);
}

#[test]
fn no_file_names_the_place_where_it_was_written() {
    // Put together here, so that this file does not name them.
    let places = [concat!("/", "work/"), concat!("..", "/shared"), concat!("/root", "/"), concat!("index", "-url")];
    let mut faults = Vec::new();
    walk(&root(), &mut |path| {
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        let Ok(text) = fs::read_to_string(path) else { return };
        for (number, line) in text.lines().enumerate() {
            for place in places {
                // `jobs/quickstart/work/` is a path of the project.
                let named = line.match_indices(place).any(|(at, _)| {
                    !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '}' || c == '.')
                });
                if named {
                    faults.push(format!("{name}:{}: names {place}", number + 1));
                }
            }
            let registry = line.trim().strip_prefix("source = \"");
            if registry.is_some_and(|r| r != "registry+https://github.com/rust-lang/crates.io-index\"")
                && name == "Cargo.lock"
            {
                faults.push(format!("{name}:{}: {line}", number + 1));
            }
        }
    });
    none(&faults);
}

#[test]
fn every_number_in_the_readme_that_claims_speed_links_to_a_recorded_run() {
    let mut faults = Vec::new();
    for (number, line) in read("README.md").lines().enumerate() {
        for part in line.split("](bench/runs/").skip(1) {
            let target = format!("bench/runs/{}", part.split([')', '#']).next().unwrap());
            if !root().join(&target).exists() {
                faults.push(format!("README.md:{}: {target} does not exist", number + 1));
            }
        }
        let claims = ["tokens/s", "GFLOP/s", "x faster"].iter().any(|unit| line.contains(unit));
        let is_row = line.starts_with('|') && !line.contains("---") && !line.contains("| work");
        if claims && is_row && !line.contains("](bench/runs/") {
            faults.push(format!("README.md:{}: a speed without its run", number + 1));
        }
    }
    none(&faults);
}
