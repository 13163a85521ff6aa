//! Builds the shared library in which the kernels of `cuda/` run on the CPU.

use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A change to a source that a fact must notice: (file, what stands there once, what is put there instead).
pub type Fault = (&'static str, &'static str, &'static str);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The library of all kernels, with faults planted; built where it is not there yet.
pub fn library(faults: &[Fault]) -> PathBuf {
    let (cuda, own) = (root().join("cuda"), root().join("tests/kernels/emulation"));
    let mut headers: Vec<(String, String)> = sources(&cuda, &["cuh"]);
    headers.extend(sources(&own, &["h"]));
    let mut units = sources(&cuda, &["cu"]);
    for (file, from, to) in faults {
        let place = headers.iter_mut().chain(&mut units).find(|(name, _)| name == file);
        let (_, text) = place.unwrap_or_else(|| panic!("no source {file}"));
        assert_eq!(text.matches(from).count(), 1, "{file} has another number of `{from}` than one");
        *text = text.replace(from, to);
    }
    for (name, text) in &mut units {
        register(name, text);
    }
    units.extend(sources(&own, &["cpp"]));
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulation");
    let key = |text: &str| {
        let all = headers.iter().fold(Sha256::new(), |hash, (name, text)| hash.chain_update(name).chain_update(text));
        all.chain_update(text).finalize().iter().take(8).fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    };
    let objects: Vec<PathBuf> = std::thread::scope(|scope| {
        let compile = |(name, text): &(String, String)| {
            let dir = tmp.join(key(text));
            let object = dir.join("unit.o");
            if !object.exists() {
                fs::create_dir_all(&dir).expect("a directory for the emulation");
                for (name, text) in &headers {
                    fs::write(dir.join(name), text).expect("a header");
                }
                let source = dir.join(format!("{name}.cpp"));
                fs::write(&source, text).expect("a source");
                let made = dir.join(format!("unit.{}.o", std::process::id()));
                compile(&dir, &source, &made);
                fs::rename(&made, &object).expect("an object");
            }
            object
        };
        let running: Vec<_> = units.iter().map(|unit| scope.spawn(move || compile(unit))).collect();
        running.into_iter().map(|thread| thread.join().expect("a source of the emulation compiles")).collect()
    });
    let names: String = objects.iter().map(|object| object.display().to_string()).collect();
    let library = tmp.join(format!("kernels-{}.so", key(&names)));
    if !library.exists() {
        let made = tmp.join(format!("kernels.{}.so", std::process::id()));
        run(Command::new("g++").arg("-shared").arg("-o").arg(&made).args(&objects));
        fs::rename(&made, &library).expect("a library");
    }
    library
}

fn compile(dir: &Path, source: &Path, object: &Path) {
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-DEMULATED"]);
    run(command.arg("-I").arg(dir).arg("-c").arg(source).arg("-o").arg(object));
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|e| panic!("{command:?}: {e} (g++ is needed)"));
    assert!(status.success(), "{command:?}: {status}");
}

/// Files of a directory by ending: (name, text), in order of their names.
fn sources(dir: &Path, endings: &[&str]) -> Vec<(String, String)> {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut files: Vec<(String, String)> = entries
        .filter_map(|entry| {
            let path = entry.expect("an entry").path();
            let ending = path.extension()?.to_str()?;
            let name = path.file_name()?.to_str()?.to_owned();
            endings.contains(&ending).then(|| (name, fs::read_to_string(&path).expect("a source")))
        })
        .collect();
    files.sort();
    files
}

/// Lets the host find every kernel of a source.
fn register(file: &str, text: &mut String) {
    let names: Vec<String> = text
        .lines()
        .filter_map(|line| {
            let rest = line.strip_prefix("KERNEL ")?;
            // Launch bounds may stand between.
            let rest = rest
                .strip_prefix("__launch_bounds__")
                .map_or(rest, |rest| rest.split_once(')').map_or(rest, |(_, after)| after));
            Some(rest.trim_start().split('(').next().unwrap_or_default().trim().to_owned())
        })
        .collect();
    assert!(!names.is_empty(), "{file} has no kernel");
    for name in names {
        let _ = write!(text, "\nstatic emulated::Registered<&{name}> registered_{name}(\"{name}\");");
    }
    text.push('\n');
}
