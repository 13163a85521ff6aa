//! The emulated GPU: builds the shared library that replaces the driver, cuBLASLt and NCCL, with the kernels of `cuda/`
//! compiled for the CPU. This process and others use it.

use libloading::Library;
use rayon::prelude::*;
use rlhf_hpc::device::cuda::Gpu;
use rlhf_hpc::device::cuda::embedded::{CUBINS, KERNELS, Kernel};
use rlhf_hpc::error::Result;
use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Names the library of a child process of a test.
pub const LIBRARY: &str = "EMULATED_GPU";
/// A kernel that leaves zeros in a result, as a GPU that computes wrong values (emulation/failing.h).
pub const SPOILS: &str = "EMULATED_SPOILS";
/// If set, the driver of this process is as late as a real one may be, and memory is pooled as on a real GPU.
pub const LATE: &str = "EMULATED_LATE";

/// The library of this process: the given one, else one that is built if it does not exist yet.
pub fn gpu() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    std::env::var_os(LIBRARY).map_or_else(|| BUILT.get_or_init(library).clone(), PathBuf::from)
}

/// Environment variables with the path of the library, one for each library that it replaces.
const LIBRARIES: [&str; 3] = ["RLHF_CUDA_LIB", "RLHF_CUBLASLT_LIB", "RLHF_NCCL_LIB"];

/// The environment with which another process finds the emulated GPU.
pub fn environment() -> Vec<(&'static str, OsString)> {
    let library = OsString::from(gpu());
    let mut set = Vec::from(LIBRARIES.map(|name| (name, library.clone())));
    // Threads without a block sleep: many processes share the cores.
    set.push(("OMP_WAIT_POLICY", "passive".into()));
    if CUBINS.is_empty() {
        let cache = directory().join("cache");
        set.extend([("RLHF_NVRTC", library), ("XDG_CACHE_HOME", cache.into_os_string())]);
    }
    set
}

/// The same for whole jobs: only addresses of reads and writes are checked. Checks of races take a third of a job's
/// time, and tests of single kernels make them.
pub fn environment_of_jobs() -> Vec<(&'static str, OsString)> {
    [environment(), vec![("EMULATED_ADDRESSES_ONLY", "1".into())]].concat()
}

/// Set while a process opens the checking GPU. Processes that it starts meanwhile must not inherit them.
pub const CHECKED: [&str; 2] = ["CUDA_LAUNCH_BLOCKING", "RLHF_NO_CUDA_MEMORY_CACHING"];

/// Opens the emulated GPU in this process. Work is done at once and every value is an allocation of its own, unless
/// `LATE` is set. So the error of a failing kernel has its arguments, and accesses past an end are detected.
pub fn open() -> Result<Gpu> {
    let libraries = environment();
    let mut set = Vec::new();
    if std::env::var_os(LATE).is_none() {
        set.extend(CHECKED.map(|name| (name, OsString::from("1"))));
        set.push(("EMULATED_BYTES", (1u64 << 40).to_string().into()));
    }
    // SAFETY: other threads of this process wait for the GPU, or ask for variables through the standard library.
    libraries.iter().chain(&set).for_each(|(name, value)| unsafe { std::env::set_var(name, value) });
    let opened = Gpu::open(0);
    // Other processes get the variables of their tests. cuBLASLt and NCCL are opened later.
    let gone = libraries.iter().chain(&set).filter(|(name, _)| !LIBRARIES.contains(name));
    // SAFETY: as above.
    gone.for_each(|(name, _)| unsafe { std::env::remove_var(name) });
    opened
}

/// A function of the library that this process has opened.
pub fn with_function<T: Copy, R>(name: &str, call: impl FnOnce(T) -> R) -> R {
    // SAFETY: the library is open already; the caller knows the function's type.
    let library = unsafe { Library::new(gpu()) }.expect("the library of this process");
    // SAFETY: as above.
    let function = unsafe { library.get::<T>(name.as_bytes()) };
    call(*function.unwrap_or_else(|e| panic!("{name}: {e}")))
}

/// Runs the threads of blocks in another order: 0 or 1.
pub fn set_order(order: i32) {
    // SAFETY: sets a number; no launch is under way.
    with_function("emulated_set_order", |set: unsafe extern "C" fn(i32)| unsafe { set(order) });
}

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The library of all kernels and of what they run on.
fn library() -> PathBuf {
    let (cuda, own) = (root().join("cuda"), root().join("tests/kernels/emulation"));
    let mut headers: Vec<(String, String)> = sources(&cuda, &["cuh"]);
    headers.extend(sources(&own, &["h"]));
    let mut units = sources(&cuda, &["cu"]);
    for (name, text) in &mut units {
        *text = registered(name, text);
    }
    units.extend(sources(&own, &["cpp"]));
    let flags = [FLAGS, WARNINGS, CHECKS].concat().join(" ");
    let dir = directory().join(key(headers.iter().flat_map(|(name, text)| [name, text]).chain([&flags])));
    fs::create_dir_all(&dir).expect("a directory for the emulation");
    for (name, text) in &headers {
        once(&dir.join(name), |made| fs::write(made, text).expect("a header"));
    }
    let objects: Vec<PathBuf> = units.par_iter().map(|(name, text)| object(&dir, name, text)).collect();
    let names: String = objects.iter().map(|object| object.display().to_string()).collect();
    let library = directory().join(format!("kernels-{}.so", key([&names])));
    // Direct calls: hooks are called too often for an indirect jump.
    let link = ["-shared", "-fopenmp", "-Wl,-Bsymbolic", "-o"];
    once(&library, |made| run(Command::new("g++").args(link).arg(made).args(&objects)));
    library
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulation")
}

/// Compiles a source of the emulation, together with the headers.
fn object(dir: &Path, name: &str, text: &String) -> PathBuf {
    let object = dir.join(format!("{name}-{}.o", key([text])));
    once(&object, |made| {
        let source = object.with_extension("cpp");
        fs::write(&source, text).expect("a source");
        compile(dir, &source, made, Path::new(name).extension().is_some_and(|ending| ending == "cu"));
    });
    object
}

/// Has `make` write a file that then becomes `path`, unless it is there.
fn once(path: &Path, make: impl FnOnce(&Path)) {
    if !path.exists() {
        let made = path.with_extension(format!("{}.partial", std::process::id()));
        make(&made);
        fs::rename(&made, path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }
}

/// A key for texts, for use in a path.
fn key<'a>(texts: impl IntoIterator<Item = &'a String>) -> String {
    let hash = texts.into_iter().fold(Sha256::new(), |hash, text| hash.chain_update(text).chain_update([0]));
    hash.finalize().iter().take(8).fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Flags without implicit fused multiply-adds: every machine has the same results.
const FLAGS: &[&str] =
    &["-std=c++17", "-O2", "-g1", "-march=x86-64-v3", "-ffp-contract=off", "-fPIC", "-fopenmp", "-DEMULATED"];
const WARNINGS: &[&str] = &["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi"];
/// Hooks at each load and store, and checks of undefined behaviour, both handled by `memory.cpp`. Warnings are left to
/// the real compilers, as these checks cause some.
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

/// Declarations `SHARED type name[..];` as the emulation has them: variables in the arena of a block, whose bounds it
/// knows.
fn with_shared_variables(text: &str) -> String {
    let rewritten = |line: &str| {
        let declaration = line.trim_start().strip_prefix("SHARED ")?;
        let (declaration, rest) = declaration.split_once(';')?;
        // `float name[33]`: the name ends at the dims.
        let (before, dims) = declaration.split_at(declaration.find('[').unwrap_or(declaration.len()));
        let (kind, name) = before.trim_end().rsplit_once(' ')?;
        let declared = format!("typedef {kind} {name}_variable{dims}; SHARED_VARIABLE({name}_variable, {name});{rest}");
        let simple = !dims.contains(',') && !kind.contains([',', '(']);
        assert!(simple, "one variable to a line, without attributes: `{line}`");
        Some(declared)
    };
    text.lines().map(|line| rewritten(line).unwrap_or_else(|| line.to_owned()) + "\n").collect()
}

/// The text of a source that lets the host find its kernels.
fn registered(file: &str, text: &str) -> String {
    let mut all = format!("#line 1 \"{file}\"\n{}", with_shared_variables(text));
    for Kernel { name, .. } in KERNELS.iter().filter(|kernel| kernel.source == file) {
        let _ = writeln!(all, "static emulated::Registered<&{name}> registered_{name}(\"{name}\");");
    }
    all
}
