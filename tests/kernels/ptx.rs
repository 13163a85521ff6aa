//! What nvcc makes of the kernels, executed on the CPU: a library like the emulation's, in which the machine of `ptx/`
//! runs their PTX. So the facts of kernels hold for the instructions that a GPU gets, not for the sources alone.

mod hardware;
mod own;
mod shapes;

use crate::emulation::{self, Fault, for_each, included, key, once, root, run, sources};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A source and its PTX, and of each of its kernels the kinds of its parameters.
struct Compiled {
    name: String,
    text: PathBuf,
    kinds: Vec<(String, String)>,
}

/// The nvcc of RLHF_NVCC, else of CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda. None for facts on a real GPU.
fn nvcc() -> Option<PathBuf> {
    let found = if crate::on_a_real_gpu() { None } else { named().or_else(installed) };
    if found.is_none() {
        eprintln!("skipped: no nvcc");
    }
    found
}

fn named() -> Option<PathBuf> {
    std::env::var_os("RLHF_NVCC").filter(|path| !path.is_empty()).map(PathBuf::from)
}

fn installed() -> Option<PathBuf> {
    let roots =
        ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(|root| Path::new(&root).join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = roots.chain(std::env::split_paths(&path)).chain([PathBuf::from("/usr/local/cuda/bin")]);
    dirs.map(|dir| dir.join("nvcc")).find(|path| path.is_file())
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("ptx")
}

/// Kinds of parameters (`p` a pointer, `i` an integer, `f` a number) of the kernels of a preprocessed source.
fn kinds(text: &str) -> Vec<(String, String)> {
    let kind = |parameter: &str| {
        let is_float = parameter.split_whitespace().any(|word| word == "float" || word == "double");
        if parameter.contains('*') {
            'p'
        } else if is_float {
            'f'
        } else {
            'i'
        }
    };
    let heads = text.split("extern \"C\" void ").skip(1).filter_map(|head| head.split_once('('));
    let heads = heads.filter_map(|(name, rest)| {
        let parameters = rest.split(')').next()?.split(',').filter(|p| !p.trim().is_empty());
        Some((name.trim().to_owned(), parameters.map(kind).collect()))
    });
    heads.collect()
}

/// The PTX of every source, with faults planted, and of what tests the machine itself.
fn compile(nvcc: &Path, arch: &str, flags: &[&str], faults: &[Fault]) -> Vec<Compiled> {
    let (cuda, own) = (root().join("cuda"), root().join("tests/kernels/emulation"));
    let mut headers = sources(&cuda, &["cuh"]);
    headers.extend(sources(&own, &["h"]));
    let mut units = sources(&cuda, &["cu"]);
    units.extend(sources(&own, &["cu"]));
    emulation::plant(faults, headers.iter_mut().chain(&mut units));
    for_each(&units, |(name, text)| {
        let mut included = included(text, &headers);
        let emulated = headers.iter().find(|(name, _)| name == "emulate.h").expect("it is there");
        included.push(emulated);
        let how = format!("{} {arch} {}", nvcc.display(), flags.join(" "));
        let dir = directory().join(key(included.iter().flat_map(|(name, text)| [name, text]).chain([text, &how])));
        let (made, heads) = (dir.join("unit.ptx"), dir.join("unit.i"));
        once(&made, |aside| {
            fs::create_dir_all(&dir).expect("a directory");
            for (name, text) in included {
                fs::write(dir.join(name), text).expect("a header");
            }
            let source = dir.join(name);
            fs::write(&source, text).expect("a source");
            let mut command = Command::new("g++");
            command.args(["-E", "-P", "-std=c++17", "-DEMULATED", "-x", "c++", "-I"]).arg(&dir);
            run(command.arg("-o").arg(&heads).arg(&source));
            let mut command = Command::new(nvcc);
            command.args(["-ptx", "-lineinfo", "-std=c++17"]).args(flags).arg(format!("-arch={arch}"));
            run(command.arg("-I").arg(&dir).arg("-o").arg(aside).arg(&source));
        });
        let heads = fs::read_to_string(heads).expect("what the preprocessor made");
        Compiled { name: name.clone(), text: made, kinds: kinds(&heads) }
    })
}

/// PTX that is written by hand: pointers are the parameters of eight bytes, numbers those of `.f32`.
fn written() -> Compiled {
    let text = root().join("tests/kernels/ptx/probe.ptx");
    let read = fs::read_to_string(&text).expect("the machine's own kernels");
    let kernels = read.split(".entry ").skip(1).map(|rest| {
        let (name, rest) = rest.split_once('(').expect("parameters");
        let parameters = rest.split(')').next().unwrap_or_default();
        let kinds = parameters.matches(".param .").count();
        let kind = |p: &str| {
            if p.starts_with("u64") {
                'p'
            } else if p.starts_with("f32") {
                'f'
            } else {
                'i'
            }
        };
        let kinds: String = parameters.split(".param .").skip(1).map(kind).take(kinds).collect();
        (name.trim().to_owned(), kinds)
    });
    Compiled { name: "probe.ptx".into(), kinds: kernels.collect(), text }
}

/// The C++ text of a table of all units and kernels.
fn table(units: &[Compiled]) -> String {
    let mut text = String::from("asm(\".section .rodata\\n\");\n");
    for (i, unit) in units.iter().enumerate() {
        let path = unit.text.display();
        let _ = writeln!(text, "asm(\".global ptx_{i}\\nptx_{i}: .incbin \\\"{path}\\\"\\n.byte 0\\n\");");
        let _ = writeln!(text, "extern \"C\" const char ptx_{i}[];");
    }
    text.push_str("asm(\".text\\n\");\nstruct Named { const char *name, *text; };\nextern \"C\" {\n");
    text.push_str("extern const Named ptx_units[], ptx_kernels[];\nconst Named ptx_units[] = {");
    for (i, unit) in units.iter().enumerate() {
        let _ = write!(text, "{{\"{}\", ptx_{i}}}, ", unit.name);
    }
    text.push_str("{0, 0}};\nconst Named ptx_kernels[] = {");
    for (name, kinds) in units.iter().flat_map(|unit| &unit.kinds) {
        let _ = write!(text, "{{\"{name}\", \"{kinds}\"}}, ");
    }
    text.push_str("{0, 0}};\n}\n");
    text
}

/// Loops over lanes become vectors; nothing is fused or left out that changes a result.
const FLAGS: &[&str] =
    &["-std=c++17", "-O3", "-march=x86-64-v3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC"];
const WARNINGS: &[&str] = &["-Wall", "-Wextra", "-Werror"];

/// The parts of the machine, and the played cuBLASLt, which needs to know the memory.
fn objects() -> Vec<PathBuf> {
    let own = root().join("tests/kernels/ptx");
    let beside = root().join("tests/kernels/emulation");
    let mut headers = sources(&own, &["h"]);
    headers.extend(sources(&beside, &["h"]).into_iter().filter(|(name, _)| name == "failing.h" || name == "pages.h"));
    let mut units = sources(&own, &["cpp"]);
    let others = sources(&beside, &["cpp"]);
    units.extend(others.into_iter().filter(|(name, _)| name == "cublaslt.cpp"));
    for_each(&units, |(name, text)| {
        let included = included(text, &headers);
        let flags = [FLAGS, WARNINGS].concat();
        let joined = flags.join(" ");
        let dir = directory().join(key(included.iter().flat_map(|(name, text)| [name, text]).chain([text, &joined])));
        let object = dir.join("unit.o");
        once(&object, |made| {
            fs::create_dir_all(&dir).expect("a directory");
            for (name, text) in included {
                fs::write(dir.join(name), text).expect("a header");
            }
            let source = dir.join(name);
            fs::write(&source, text).expect("a source");
            run(Command::new("g++").args(&flags).arg("-I").arg(&dir).arg("-c").arg(&source).arg("-o").arg(made));
        });
        object
    })
}

/// A library of all kernels as nvcc makes them for `arch`. None where there is no nvcc.
pub fn library(arch: &str, flags: &[&str], faults: &[Fault]) -> Option<PathBuf> {
    let nvcc = nvcc()?;
    let mut units = compile(&nvcc, arch, flags, faults);
    units.push(written());
    let (objects, table) = (objects(), table(&units));
    let names: Vec<String> = objects.iter().map(|object| object.display().to_string()).collect();
    let own = fs::read_to_string(&units.last().expect("the machine's own").text).expect("a text");
    let key = key([&names.join(" "), &table, &own]);
    let library = directory().join(format!("ptx-{arch}-{key}.so"));
    once(&library, |made| {
        let source = directory().join(format!("table.{key}.cpp"));
        fs::write(&source, table).expect("a table");
        let mut command = Command::new("g++");
        command.args(["-shared", "-fPIC", "-pthread", "-o"]).arg(made).arg(&source);
        run(command.args(&objects).arg("-ldl"));
    });
    Some(library)
}

/// Facts of kernels, whose names hold one of these, that run over PTX.
const FACTS: &[&str] = &[
    "adamw::",
    "attention::",
    "copy::",
    "embedding::",
    "gae::",
    "linear_logprob",
    "matmul::",
    "norm::",
    "paged_attention::",
    "rank_sum::",
    "residual::",
    "rmsnorm::",
    "rope::",
    "sample::",
    "swiglu::",
    "value_head::",
];

/// What they leave out: facts that plant faults in the emulation, and what only this has: fibers with stacks, memory
/// that may be read before anyone wrote it.
const LEFT_OUT: &[&str] = &["_noticed", "a_stack_that_grows", "memory_begins_as_nan"];

/// Runs facts of this target on a library: whether all hold, and what they write. With `--ignored` among the names only those
/// that nobody else runs.
fn ran(library: &Path, names: &[&str], beside: &[(&str, &Path)]) -> (bool, String) {
    let own = std::env::current_exe().expect("the path of this target");
    let mut command = Command::new(own);
    command.args(names).args(LEFT_OUT.iter().flat_map(|name| ["--skip", name])).env(crate::faults::LIBRARY, library);
    let out = command.envs(beside.iter().copied()).output().expect("this target starts once more");
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (out.status.success(), text)
}

/// The same of at least `least` facts, all of which must hold.
fn facts(library: &Path, names: &[&str], least: usize, beside: &[(&str, &Path)]) {
    let (hold, text) = ran(library, names, beside);
    let passed = text.split(" passed").next().and_then(|before| before.split_whitespace().next_back());
    let enough = passed.and_then(|n| n.parse::<usize>().ok()).is_some_and(|n| n >= least);
    assert!(hold && enough, "{text}");
}

/// On a GPU as rough as an A100, of which three blocks at a time run, in any order; see `hardware`.
#[test]
fn the_facts_of_kernels_hold_for_what_nvcc_makes_of_them() {
    let Some(library) = library("sm_80", &[], &[]) else { return };
    facts(&library, &["played::"], 6, &[]);
    facts(&library, FACTS, 90, &hardware::rough("a100", "3"));
    facts(&library, &["far::"], 20, &hardware::rough("a100", "3"));
}

/// Where both architectures get the same instructions, what holds for one holds for the other.
#[test]
fn both_architectures_get_the_same_instructions_or_the_facts_hold_for_either() {
    let Some(nvcc) = nvcc() else { return };
    let texts = ["sm_80", "sm_90a"].map(|arch| {
        let text = |unit: &Compiled| {
            let text = fs::read_to_string(&unit.text).expect("PTX");
            // Behind the code come names for debuggers.
            let text = text.split("\t.section").next().unwrap_or_default();
            let untold = [".target", ".loc", ".file"];
            let told = |line: &&str| !untold.iter().any(|word| line.trim_start().starts_with(word));
            (unit.name.clone(), text.lines().filter(told).collect::<Vec<_>>().join("\n"))
        };
        compile(&nvcc, arch, &[], &[]).iter().map(text).collect::<Vec<_>>()
    });
    let pairs = texts[0].iter().zip(&texts[1]);
    let others: Vec<&str> = pairs.filter(|(a, b)| a != b).map(|((name, _), _)| name.as_str()).collect();
    if !others.is_empty() {
        eprintln!("other instructions for sm_90a: {others:?}");
        facts(&library("sm_90a", &[], &[]).expect("nvcc is there"), FACTS, 90, &[]);
    }
}

/// Kernels that take a logarithm or an exponential of the compiler's library, not the host's: a rounding apart.
const OF_LIBRARIES: &[&str] = &["attention_forward_", "linear_logprob_", "paged_", "sample_rows"];

/// Without fused products, and with the host's powers of 2 and roots, the emulation and the PTX leave the same bits.
#[test]
fn the_emulation_and_the_ptx_leave_the_same_bits() {
    let Some(library) = library("sm_80", &["-fmad=false"], &[]) else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let (compared, emulation) = (dir.path().join("compared"), emulation::library(&[]));
    facts(&library, FACTS, 85, &[("PTX_BESIDE", &emulation), ("PTX_COMPARED", &compared)]);
    let lines = fs::read_to_string(&compared).expect("what was compared");
    let (mut kernels, mut equal) = (BTreeSet::new(), 0);
    for line in lines.lines() {
        let mut words = line.split(' ');
        let (Some(kernel), Some(_bytes), Some(differ), Some(apart)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            panic!("a line that was cut: {line}");
        };
        let apart: f64 = apart.parse().expect("a number");
        let rounds = OF_LIBRARIES.iter().any(|name| kernel.starts_with(name));
        assert!(
            differ == "0" || (rounds && apart < 2e-7),
            "{kernel}: {differ} bytes differ, by {apart} of the largest"
        );
        equal += usize::from(differ == "0");
        kernels.insert(kernel);
    }
    assert!(kernels.len() >= 90 && equal > 2000, "{} kernels, {equal} launches", kernels.len());
    eprintln!("{} kernels, {} launches, {equal} of them the same to the bit", kernels.len(), lines.lines().count());
}
