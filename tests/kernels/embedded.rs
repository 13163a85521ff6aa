//! The embedded sources equal those of `cuda/`, and also compile at run time.

use crate::skip;
use rlhf_hpc::device::cuda::embedded::{self, COMPILER, CUBINS, KERNELS, PTX, SOURCES};
use rlhf_hpc::device::cuda::nvrtc::Nvrtc;
use rlhf_hpc::device::cuda::{cache, library};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// CUDA's compilers may be missing, unless the build required them.
fn required() -> bool {
    std::env::var("RLHF_REQUIRE_NVCC").is_ok_and(|value| !value.is_empty() && value != "0")
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn every_source_is_embedded_unchanged() {
    let entries = fs::read_dir(root().join("cuda")).expect("cuda/");
    let there: BTreeSet<String> =
        entries.map(|e| e.expect("an entry").file_name().into_string().expect("text")).collect();
    let carried: BTreeSet<String> = SOURCES.iter().map(|source| source.name.to_owned()).collect();
    assert_eq!(carried, there);
    for source in SOURCES {
        let text = fs::read_to_string(root().join("cuda").join(source.name)).expect("a source");
        assert!(text == source.text, "{} has changed since the build", source.name);
    }
}

#[test]
fn every_kernel_is_listed_once_with_its_source() {
    for source in SOURCES {
        let listed: Vec<&str> = KERNELS.iter().filter(|k| k.source == source.name).map(|k| k.name).collect();
        let lines = source.text.lines().filter(|line| line.starts_with("KERNEL ")).count();
        assert_eq!(listed.len(), lines, "{}: {listed:?}", source.name);
    }
    let names: BTreeSet<&str> = KERNELS.iter().map(|kernel| kernel.name).collect();
    assert!(names.len() == KERNELS.len() && names.contains("adamw_step"), "{names:?}");
}

/// The number of the architecture in a cubin's header.
fn arch(cubin: &[u8]) -> u8 {
    let flags = &cubin[48..52];
    // Since CUDA 13 (ABI 8) the second byte, before it the first.
    if cubin[8] >= 8 { flags[1] } else { flags[0] }
}

fn assert_is_cubin(cubin: &[u8], source: &str, wanted: &str) {
    let machine = u16::from_le_bytes([cubin[18], cubin[19]]);
    assert!(cubin.starts_with(b"\x7fELF") && machine == 190, "{source} for {wanted} is no cubin");
    assert_eq!(format!("sm_{}", arch(cubin)), wanted.trim_end_matches('a'), "{source}");
    for kernel in KERNELS.iter().filter(|kernel| kernel.source == source) {
        let section = format!(".text.{}\0", kernel.name);
        let found = cubin.windows(section.len()).any(|window| window == section.as_bytes());
        assert!(found, "{source} for {wanted} has no {}", kernel.name);
    }
}

#[test]
fn cubins_exist_for_every_source_and_both_architectures_or_not_at_all() {
    if CUBINS.is_empty() {
        assert!(!required() && embedded::describe().contains("no cubins"), "{}", embedded::describe());
        return skip(COMPILER);
    }
    let pairs: Vec<(&str, &str)> = CUBINS.iter().map(|cubin| (cubin.source, cubin.arch)).collect();
    let wanted: Vec<(&str, &str)> =
        embedded::units().flat_map(|unit| ["sm_80", "sm_90a"].map(|arch| (unit.name, arch))).collect();
    assert_eq!(pairs, wanted);
    for cubin in CUBINS {
        assert_is_cubin(cubin.bytes, cubin.source, cubin.arch);
    }
}

#[test]
fn no_kernel_uses_local_memory() {
    let Ok(table) = embedded::resources() else {
        assert!(!required(), "nvcc reports the resources of kernels");
        return skip("only nvcc reports the resources of kernels");
    };
    let rows: Vec<&str> = table.lines().filter(|row| row.contains(" | sm_")).collect();
    assert_eq!(rows.len(), 2 * KERNELS.len(), "each kernel on each architecture");
    let spilling: Vec<&&str> = rows.iter().filter(|row| !row.ends_with("| 0 | 0 |")).collect();
    assert!(spilling.is_empty(), "a stack or spilled registers: {spilling:?}");
}

#[test]
fn ptx_exists_for_every_source_with_all_its_kernels_if_there_are_cubins() {
    let units: Vec<&str> = embedded::units().filter(|_| !CUBINS.is_empty()).map(|unit| unit.name).collect();
    assert_eq!(PTX.iter().map(|ptx| ptx.source).collect::<Vec<_>>(), units);
    for ptx in PTX {
        let text = String::from_utf8_lossy(ptx.bytes);
        // Newer GPUs do not load PTX for sm_90a.
        assert!(text.contains("\n.target sm_80\n"), "{}", ptx.source);
        for kernel in KERNELS.iter().filter(|kernel| kernel.source == ptx.source) {
            assert!(text.contains(&format!(".entry {}(", kernel.name)), "{}", kernel.name);
        }
    }
}

/// The NVRTC of this machine.
fn nvrtc() -> Option<Nvrtc> {
    let found = library::NVRTC.open(|path| Nvrtc::open(path));
    assert!(found.is_ok() || !required(), "{found:?}");
    found.inspect_err(|why| skip(why)).ok()
}

/// A directory with the cubins of all sources for `arch`, which is kept from one run of these tests to the next.
fn compiled(nvrtc: &Nvrtc, arch: &str) -> PathBuf {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("nvrtc-{arch}"));
    let made = cache::cubins(nvrtc, arch, Some(&dir)).unwrap_or_else(|why| panic!("{why}"));
    if !made.log.is_empty() {
        fs::remove_dir_all(&dir).expect("the next run compiles again");
        panic!("for {arch} the compiler says: {}", made.log);
    }
    assert_eq!(made.list.len(), embedded::units().count());
    for (source, cubin) in &made.list {
        assert_is_cubin(cubin, source, arch);
    }
    dir
}

/// The file of glu.cu in such a directory.
fn file_of_glu(dir: &Path) -> PathBuf {
    let mut paths = fs::read_dir(dir).expect("a cache").map(|entry| entry.expect("an entry").path());
    let is_it = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("glu.cu."));
    paths.find(is_it).expect("glu.cu was compiled")
}

/// Another directory with the same cubins, except for that of glu.cu.
fn all_but_one(dir: &Path, to: &Path) {
    let current = |name: &str| embedded::units().any(|unit| name.starts_with(&format!("{}.", unit.name)));
    for entry in fs::read_dir(dir).expect("a cache").map(|entry| entry.expect("an entry")) {
        let name = entry.file_name().into_string().expect("text");
        if current(&name) && !name.starts_with("glu.cu.") {
            fs::copy(entry.path(), to.join(&name)).expect("a copy");
        }
    }
}

/// Compiles for one architecture. If the build has nvcc, it compiles for both.
#[test]
fn one_of_several_concurrent_starts_compiles_and_later_ones_reuse_intact_files() {
    let Some(nvrtc) = nvrtc() else { return };
    let root = tempfile::tempdir().expect("a directory");
    let dir = root.path();
    all_but_one(&compiled(&nvrtc, "sm_80"), dir);
    let start = || cache::cubins(&nvrtc, "sm_80", Some(dir)).expect("the sources compile");
    let all =
        std::thread::scope(|scope| [(); 3].map(|()| scope.spawn(start)).map(|start| start.join().expect("it ends")));
    assert_eq!(all.iter().map(|made| made.compiled).sum::<usize>(), 1);
    let file = file_of_glu(dir);
    let mut bytes = fs::read(&file).expect("a cubin");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, &bytes).expect("a damaged cubin");
    let [damaged, again] = [start(), start()];
    assert_eq!([damaged.compiled, again.compiled], [1, 0]);
    assert!(all.iter().chain([&damaged, &again]).all(|made| made.list == all[0].list), "other cubins");
    assert!(fs::read_dir(dir).expect("a cache").all(|entry| {
        let name = entry.expect("an entry").file_name();
        !name.to_string_lossy().contains("partial")
    }));
}

#[test]
fn a_source_that_does_not_compile_fails_with_the_compilers_message() {
    let Some(nvrtc) = nvrtc() else { return };
    let why = nvrtc.compile(
        ("broken.cu", "#include \"common.cuh\"\nKERNEL broken() { no_such_name = 1; }\n"),
        &embedded::headers(),
        "sm_80",
    );
    let why = why.expect_err("it names what is not there");
    assert!(why.contains("broken.cu") && why.contains("no_such_name"), "{why}");
}
