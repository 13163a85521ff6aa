//! Embeds the kernels in the binary: always the sources of `cuda/`, and their cubins and PTX if there is a compiler.
//!
//! The compiler is the nvcc that RLHF_NVCC names, else the NVRTC that RLHF_NVRTC names, else the nvcc of CUDA_HOME,
//! CUDA_PATH, PATH or /usr/local/cuda. RLHF_REQUIRE_NVCC=1 ends the build if no nvcc is found. Cubins are compiled
//! again only when a source changes.

#[path = "src/device/cuda/nvrtc.rs"]
mod nvrtc;

use nvrtc::Nvrtc;
use std::collections::hash_map::{DefaultHasher, HashMap};
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

const ARCHS: [&str; 2] = ["sm_80", "sm_90a"];
/// The architecture whose PTX is embedded, as every newer GPU's driver compiles it.
const PTX: &str = "sm_80";
const SETTINGS: [&str; 5] = ["RLHF_NVCC", "RLHF_NVRTC", "RLHF_REQUIRE_NVCC", "CUDA_HOME", "CUDA_PATH"];

enum Compiler {
    Nvcc { path: PathBuf, version: String },
    Nvrtc(Nvrtc),
}

struct Source {
    name: String,
    path: String,
    text: String,
    /// Whether it holds kernels, rather than code that they share.
    is_unit: bool,
}

/// A compiled cubin: its source, its architecture, its file, and the compiler's report. Its PTX is next to it.
struct Made<'a> {
    source: &'a str,
    arch: &'a str,
    file: PathBuf,
    report: String,
}

fn main() {
    let dir = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("cuda");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    println!("cargo::rerun-if-changed={}", dir.display());
    for file in ["build.rs", "src/device/cuda/nvrtc.rs"] {
        println!("cargo::rerun-if-changed={file}");
    }
    for setting in SETTINGS {
        println!("cargo::rerun-if-env-changed={setting}");
    }
    let sources = sources(&dir);
    let required = setting("RLHF_REQUIRE_NVCC").is_some_and(|value| value != "0");
    let compiler = find();
    if required && !matches!(compiler, Ok(Compiler::Nvcc { .. })) {
        fail("RLHF_REQUIRE_NVCC is set, but nvcc was not found: set RLHF_NVCC to its path");
    }
    let (made, words) = match compiler.and_then(|compiler| Ok((compile(&compiler, &sources, &out)?, compiler.name()))) {
        Ok(done) => done,
        Err(why) if required || setting("RLHF_NVCC").or(setting("RLHF_NVRTC")).is_some() => fail(&why),
        Err(why) => {
            let first = why.lines().next().unwrap_or_default();
            if first != NONE {
                println!("cargo::warning=no cubins in the binary: {first}");
            }
            (Vec::new(), first.to_owned())
        }
    };
    fs::write(out.join("embedded.rs"), tables(&sources, &made, &words)).expect("OUT_DIR can be written");
}

/// The reason why a build without CUDA has no cubins.
const NONE: &str = "the build machine had no nvcc";

fn fail(why: &str) -> ! {
    for line in why.lines() {
        println!("cargo::error={line}");
    }
    std::process::exit(1);
}

fn setting(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// The files of `cuda/`, sorted by name.
fn sources(dir: &Path) -> Vec<Source> {
    let mut sources = Vec::new();
    for entry in fs::read_dir(dir).expect("cuda/").flatten() {
        let path = entry.path();
        println!("cargo::rerun-if-changed={}", path.display());
        let name = entry.file_name().to_string_lossy().into_owned();
        let ending = path.extension().and_then(|ending| ending.to_str());
        if matches!(ending, Some("cu" | "cuh")) {
            let text = fs::read_to_string(&path).expect("a source is text");
            let is_unit = ending == Some("cu");
            sources.push(Source { name, path: path.to_str().expect("a path is text").to_owned(), text, is_unit });
        }
    }
    sources.sort_by(|a, b| a.name.cmp(&b.name));
    sources
}

/// The compiler to use. The error is `NONE` if there is none.
fn find() -> Result<Compiler, String> {
    if let Some(path) = setting("RLHF_NVCC") {
        return nvcc(PathBuf::from(path));
    }
    if let Some(path) = setting("RLHF_NVRTC") {
        return Nvrtc::open(path.as_ref()).map(Compiler::Nvrtc).map_err(|why| format!("RLHF_NVRTC: {why}"));
    }
    let roots = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(setting).map(|root| Path::new(&root).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let dirs = roots.chain(env::split_paths(&path)).chain([PathBuf::from("/usr/local/cuda/bin")]);
    let found = dirs.map(|dir| dir.join("nvcc")).find(|path| path.is_file());
    found.map_or(Err(NONE.to_owned()), nvcc)
}

fn nvcc(path: PathBuf) -> Result<Compiler, String> {
    let text = run(Command::new(&path).arg("--version"))?;
    let version = text.split_whitespace().filter_map(|word| word.strip_prefix('V')).next_back();
    let version = version.unwrap_or("(unknown version)").to_owned();
    Ok(Compiler::Nvcc { path, version })
}

/// The output of a command.
fn run(command: &mut Command) -> Result<String, String> {
    let out = command.output().map_err(|e| format!("{}: {e}", command.get_program().display()))?;
    let said = [out.stdout, out.stderr].concat();
    let said = String::from_utf8_lossy(&said).trim().to_owned();
    if out.status.success() { Ok(said) } else { Err(format!("{} failed: {said}", command.get_program().display())) }
}

impl Compiler {
    fn name(&self) -> String {
        match self {
            Self::Nvcc { version, .. } => format!("nvcc {version}"),
            Self::Nvrtc(nvrtc) => format!("NVRTC {}.{}", nvrtc.version.0, nvrtc.version.1),
        }
    }

    /// Writes the PTX and the cubin of `source` for `arch`, and returns the compiler's report of its resources.
    fn compile(
        &self,
        source: &Source,
        headers: &[(&str, &str)],
        arch: &str,
        [ptx, cubin]: [&Path; 2],
    ) -> Result<String, String> {
        match self {
            Self::Nvcc { path, .. } => {
                let nvcc = |options: &[&str], from: &Path, to: &Path| {
                    let mut command = Command::new(path);
                    command.args(options).args(["-Werror", "all-warnings"]).arg(format!("-arch={arch}"));
                    run(command.arg("-o").arg(to).arg(from))
                };
                nvcc(&["-ptx", "-std=c++17"], source.path.as_ref(), ptx)?;
                nvcc(&["-cubin", "-Xptxas", "-v"], ptx, cubin)
            }
            Self::Nvrtc(nvrtc) => {
                let made = nvrtc.compile((&source.name, &source.text), headers, arch)?;
                if !made.log.is_empty() {
                    return Err(format!("{}: {}", source.name, made.log));
                }
                let written = fs::write(ptx, made.ptx).and_then(|()| fs::write(cubin, made.cubin));
                written.map_err(|e| format!("{}: {e}", cubin.display()))?;
                Ok(String::new())
            }
        }
    }
}

/// Compiles the cubins of all sources, several at a time.
fn compile<'a>(compiler: &Compiler, sources: &'a [Source], out: &Path) -> Result<Vec<Made<'a>>, String> {
    let headers: Vec<(&str, &str)> =
        sources.iter().filter(|source| !source.is_unit).map(|source| (&source.name[..], &source.text[..])).collect();
    let units: Vec<&Source> = sources.iter().filter(|source| source.is_unit).collect();
    let jobs: Vec<(&Source, &str)> = units.iter().flat_map(|unit| ARCHS.map(|arch| (*unit, arch))).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut made = Vec::new();
        while let Some((source, arch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut hash = DefaultHasher::new();
            (&headers, &source.text, compiler.name(), arch).hash(&mut hash);
            let file = out.join(format!("{}.{arch}.{:016x}.cubin", source.name, hash.finish()));
            let report = file.with_extension("txt");
            let ptx = file.with_extension("ptx");
            if !file.is_file() || !ptx.is_file() {
                let aside = file.with_extension("partial");
                let said = compiler.compile(source, &headers, arch, [&ptx, &aside])?;
                let kept = fs::write(&report, said).and_then(|()| fs::rename(&aside, &file));
                kept.map_err(|e| format!("{}: {e}", file.display()))?;
            }
            let report = fs::read_to_string(&report).map_err(|e| format!("{}: {e}", report.display()))?;
            made.push(Made { source: &source.name, arch, file, report });
        }
        Ok(made)
    };
    let threads = setting("NUM_JOBS").and_then(|n| n.parse().ok()).unwrap_or(1).clamp(1, jobs.len().max(1));
    let lists: Result<Vec<Vec<Made>>, String> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().map(|thread| thread.join().expect("the compiler's messages are errors")).collect()
    });
    let mut made: Vec<Made> = lists?.into_iter().flatten().collect();
    made.sort_by_key(|made| (made.source, made.arch));
    Ok(made)
}

/// The Rust text that `src/device/cuda/embedded.rs` includes.
fn tables(sources: &[Source], made: &[Made], words: &str) -> String {
    let mut text = String::from("pub static SOURCES: &[Source] = &[\n");
    for source in sources {
        let Source { name, path, is_unit, .. } = source;
        let file = format!("text: include_str!({path:?})");
        let _ = writeln!(text, "    Source {{ name: {name:?}, {file}, is_unit: {is_unit} }},");
    }
    text.push_str("];\npub static KERNELS: &[Kernel] = &[\n");
    for source in sources.iter().filter(|source| source.is_unit) {
        for kernel in kernels(&source.text) {
            let _ = writeln!(text, "    Kernel {{ name: {kernel:?}, source: {:?} }},", source.name);
        }
    }
    let mut images = |name: &str, made: &mut dyn Iterator<Item = (&str, &str, PathBuf)>| {
        let _ = writeln!(text, "];\npub static {name}: &[Image] = &[");
        for (source, arch, file) in made {
            let bytes = format!("bytes: include_bytes!({:?})", file.to_str().expect("a path is text"));
            let _ = writeln!(text, "    Image {{ source: {source:?}, arch: {arch:?}, {bytes} }},");
        }
    };
    images("CUBINS", &mut made.iter().map(|made| (made.source, made.arch, made.file.clone())));
    let ptx = made.iter().filter(|made| made.arch == PTX);
    images("PTX", &mut ptx.map(|made| (made.source, "compute_80", made.file.with_extension("ptx"))));
    let _ = writeln!(text, "];\npub const COMPILER: &str = {words:?};");
    let _ = writeln!(text, "pub static RESOURCES: &str = {:?};", resources(sources, made, words));
    text
}

/// The resources of each kernel, as a Markdown table, from the report of `ptxas -v` below its name; empty if no
/// compiler reported any.
fn resources(sources: &[Source], made: &[Made], words: &str) -> String {
    let mut rows = HashMap::new();
    for Made { arch, report, .. } in made {
        for text in report.split("Compiling entry function '").skip(1) {
            let kernel = text.split('\'').next().unwrap_or_default();
            let (registers, shared) = (before(text, "registers"), before(text, "bytes smem"));
            let stack = before(text, "bytes stack frame");
            let spills = before(text, "bytes spill stores") + before(text, "bytes spill loads");
            let row = format!("| {kernel} | {arch} | {registers} | {shared} | {stack} | {spills} |\n");
            rows.insert((kernel, *arch), row);
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let units = sources.iter().filter(|source| source.is_unit);
    let places = units.flat_map(|source| kernels(&source.text)).flat_map(|kernel| ARCHS.map(|arch| (kernel, arch)));
    format!(
        "# Kernel resources\n\n\
         As reported by ptxas, {words}. Registers per thread, static shared memory per block in bytes, and the stack \
         and spilled\nregisters per thread in bytes.\n\n\
         | kernel | architecture | registers | shared | stack | spills |\n|---|---|---:|---:|---:|---:|\n{}",
        places.filter_map(|place| rows.remove(&place)).collect::<String>()
    )
}

/// The number before the last occurrence of `words`; 0 if there is none.
fn before(text: &str, words: &str) -> u32 {
    let place = text.rfind(words).map(|at| &text[..at]);
    place.and_then(|text| text.split_whitespace().next_back()?.parse().ok()).unwrap_or(0)
}

/// The name on a line that begins a kernel: `KERNEL name(` or `KERNEL __launch_bounds__(256) name(`.
fn name(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("KERNEL ")?;
    let rest = match rest.strip_prefix("__launch_bounds__") {
        Some(bounds) => bounds.split_once(')')?.1,
        None => rest,
    };
    let name = rest.split('(').next()?.trim();
    (!name.is_empty()).then_some(name)
}

/// The names of a source's kernels, in its order.
fn kernels(text: &str) -> Vec<&str> {
    text.lines().filter_map(name).collect()
}
