//! The required contents of every folder, and the names that no file may contain.

use super::none;
use super::source::{code, files, root, walk};
use std::fs;
use std::os::unix::fs::PermissionsExt;

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
    none(faults);
}

#[test]
fn scripts_that_are_run_by_name_are_executable() {
    let mut faults = Vec::new();
    walk(&root(), &mut |path| {
        let text = fs::read(path).unwrap_or_default();
        let is_script = text.starts_with(b"#!") && path.extension().is_none_or(|e| e == "sh");
        if is_script && fs::metadata(path).unwrap().permissions().mode() & 0o111 == 0 {
            faults.push(format!("{} is not executable", path.display()));
        }
    });
    none(faults);
}

#[test]
fn no_file_names_the_place_where_it_was_written() {
    // Concatenated, so that this file does not contain them.
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
    none(faults);
}

#[test]
fn every_number_in_the_readme_that_claims_speed_links_to_a_recorded_run() {
    let mut faults = Vec::new();
    for (number, line) in fs::read_to_string(root().join("README.md")).unwrap().lines().enumerate() {
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
    none(faults);
}

/// Every source is reached: a Rust file by a `mod`, a kernel's file by the host's code or another kernel's, a golden by
/// a test.
#[test]
fn no_file_is_dead() {
    let rust: Vec<_> = ["src", "tests"].into_iter().flat_map(|dir| files(dir, &[".rs"])).collect();
    let declares = |parent: &str, stem: &str| {
        let declaration = format!("mod {stem};");
        rust.iter().any(|file| file.name == parent && code(&file.text).contains(&declaration))
    };
    let mut faults = Vec::new();
    for file in &rust {
        let path = file.name.trim_end_matches(".rs").trim_end_matches("/mod");
        let (dir, stem) = path.rsplit_once('/').unwrap();
        let mut parents =
            ["mod", "lib", "main", "library", "program"].map(|name| format!("{dir}/{name}.rs")).into_iter();
        let is_root = ["lib", "main"].contains(&stem) || (dir == "tests" && file.name == format!("tests/{stem}.rs"));
        if !is_root && !parents.any(|parent| declares(&parent, stem)) && !declares(&format!("{dir}.rs"), stem) {
            faults.push(format!("{}: no `mod {stem};`", file.name));
        }
    }
    let kernels = files("cuda", &[".cu", ".cuh"]);
    for file in &kernels {
        let name = &file.name["cuda/".len()..];
        let (by, words) = match name.strip_suffix(".cu") {
            // Names of its kernels, without the sizes in the names of a family.
            Some(_) => {
                let kernels = file.text.lines().filter_map(|line| line.strip_prefix("KERNEL "));
                let kernels = kernels.filter_map(|line| match line.strip_prefix("__launch_bounds__") {
                    Some(bounds) => bounds.split_once(") ")?.1.split('(').next(),
                    None => line.split('(').next(),
                });
                (&rust, kernels.map(|name| format!("\"{}", name.trim_end_matches(char::is_numeric))).collect())
            }
            None => (&kernels, vec![format!("\"{name}\"")]),
        };
        let is_named = |word: &String| by.iter().any(|other| other.name != file.name && other.text.contains(word));
        if !words.iter().any(is_named) {
            faults.push(format!("{}: nobody names any of {words:?}", file.name));
        }
    }
    let scripts = files("tests/golden", &[".py"]);
    for name in scripts.iter().map(|file| &file.name["tests/golden/".len()..]) {
        let stem = name.trim_end_matches(".py");
        // A script that checks a result, and makes no golden, is named in the records of the runs it checked.
        let is_named = rust.iter().any(|file| file.text.contains(&format!("golden/{stem}")))
            || files("bench/runs", &[".md"]).iter().any(|file| file.text.contains(name));
        if !is_named {
            faults.push(format!("tests/golden/{name}: no test and no record names it"));
        }
    }
    none(faults);
}
