//! Builds the shared library in which the kernels of `cuda/` run on the CPU.

use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// A change to a source that a fact must notice: (file, what stands there once, what is put there instead).
pub type Fault = (&'static str, &'static str, &'static str);

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// One build at a time: facts ask from several threads.
static BUILDING: Mutex<()> = Mutex::new(());

/// The library of all kernels, with faults planted; built where it is not there yet.
pub fn library(faults: &[Fault]) -> PathBuf {
    let _one = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let (cuda, own) = (root().join("cuda"), root().join("tests/kernels/emulation"));
    let mut headers: Vec<(String, String)> = sources(&cuda, &["cuh"]);
    headers.extend(sources(&own, &["h"]));
    let mut units = sources(&cuda, &["cu"]);
    units.extend(sources(&own, &["cu"]));
    for (file, from, to) in faults {
        let place = headers.iter_mut().chain(&mut units).find(|(name, _)| name == file);
        let (_, text) = place.unwrap_or_else(|| panic!("no source {file}"));
        assert_eq!(text.matches(from).count(), 1, "{file} has another number of `{from}` than one");
        *text = text.replace(from, to);
    }
    for (name, text) in &mut units {
        *text = format!("#line 1 \"{name}\"\n{}", with_shared_variables(text));
        register(name, text);
    }
    units.extend(sources(&own, &["cpp"]));
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulation");
    let objects: Vec<PathBuf> = std::thread::scope(|scope| {
        let compile = |(name, text): &(String, String)| {
            let included = included(text, &headers);
            let flags = [FLAGS, WARNINGS, CHECKS].concat().join(" ");
            let dir = tmp.join(key(included.iter().flat_map(|(name, text)| [name, text]).chain([text, &flags])));
            let object = dir.join("unit.o");
            if !object.exists() {
                fs::create_dir_all(&dir).expect("a directory for the emulation");
                for (name, text) in included {
                    fs::write(dir.join(name), text).expect("a header");
                }
                let source = dir.join(format!("{name}.cpp"));
                fs::write(&source, text).expect("a source");
                let made = dir.join(format!("unit.{}.o", std::process::id()));
                compile(&dir, &source, &made, Path::new(name).extension().is_some_and(|ending| ending == "cu"));
                fs::rename(&made, &object).expect("an object");
            }
            object
        };
        let running: Vec<_> = units.iter().map(|unit| scope.spawn(move || compile(unit))).collect();
        running.into_iter().map(|thread| thread.join().expect("a source of the emulation compiles")).collect()
    });
    let names: String = objects.iter().map(|object| object.display().to_string()).collect();
    let library = tmp.join(format!("kernels-{}.so", key([&names])));
    if !library.exists() {
        let made = tmp.join(format!("kernels.{}.so", std::process::id()));
        run(Command::new("g++").args(["-shared", "-pthread", "-o"]).arg(&made).args(&objects));
        fs::rename(&made, &library).expect("a library");
    }
    library
}

/// What stands for texts in a path.
pub fn key<'a>(texts: impl IntoIterator<Item = &'a String>) -> String {
    let hash = texts.into_iter().fold(Sha256::new(), |hash, text| hash.chain_update(text).chain_update([0]));
    hash.finalize().iter().take(8).fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// The headers that `text` includes, and those that these include: nothing else can change what it compiles to.
pub fn included<'a>(text: &str, headers: &'a [(String, String)]) -> Vec<&'a (String, String)> {
    let mut found: Vec<&(String, String)> = Vec::new();
    let mut open = vec![text];
    while let Some(text) = open.pop() {
        for line in text.lines().filter(|line| line.starts_with("#include \"")) {
            let header = headers.iter().find(|(name, _)| line.contains(&format!("\"{name}\"")));
            let header = header.unwrap_or_else(|| panic!("no header for `{line}`"));
            if !found.contains(&header) {
                found.push(header);
                open.push(&header.1);
            }
        }
    }
    found
}

/// No products fused into sums behind the source's back: every machine has the same results.
const FLAGS: &[&str] = &["-std=c++17", "-O2", "-g1", "-march=x86-64-v3", "-ffp-contract=off", "-fPIC", "-DEMULATED"];
const WARNINGS: &[&str] = &["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi"];
/// Hooks at each load and store, and checks of what C++ leaves undefined, answered by `memory.cpp`. Warnings are the
/// business of the real compilers: these checks make some of their own.
const CHECKS: &[&str] = &[
    "-w",
    "-fsanitize=thread,alignment,bounds,shift-exponent,signed-integer-overflow,integer-divide-by-zero",
    "--param=tsan-instrument-func-entry-exit=0",
];

fn compile(dir: &Path, source: &Path, object: &Path, is_kernel: bool) {
    let mut command = Command::new("g++");
    command.args(FLAGS).args(if is_kernel { CHECKS } else { WARNINGS });
    run(command.arg("-I").arg(dir).arg("-c").arg(source).arg("-o").arg(object));
}

pub fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|e| panic!("{command:?}: {e} (g++ is needed)"));
    assert!(status.success(), "{command:?}: {status}");
}

/// Files of a directory by ending: (name, text), in order of their names.
pub fn sources(dir: &Path, endings: &[&str]) -> Vec<(String, String)> {
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

/// Declarations `SHARED type name[..];` as the emulation has them: variables in the arena of a block, whose bounds it knows.
fn with_shared_variables(text: &str) -> String {
    let rewritten = |line: &str| {
        let declaration = line.trim_start().strip_prefix("SHARED ")?;
        let (declaration, rest) = declaration.split_once(';')?;
        // `float room[33]`: the name ends where the dims begin.
        let (before, dims) = declaration.split_at(declaration.find('[').unwrap_or(declaration.len()));
        let (kind, name) = before.trim_end().rsplit_once(' ')?;
        let declared = format!("typedef {kind} {name}_variable{dims}; SHARED_VARIABLE({name}_variable, {name});{rest}");
        let simple = !dims.contains(',') && !kind.contains([',', '(']);
        assert!(simple, "one variable to a line, without attributes: `{line}`");
        Some(declared)
    };
    text.lines().map(|line| rewritten(line).unwrap_or_else(|| line.to_owned()) + "\n").collect()
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
