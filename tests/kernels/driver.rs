//! The way to a real GPU, over a driver that is played on the CPU (`driver/played.cpp`): the same facts, in a process of their own.

use crate::{carried, emulation};
use rlhf_hpc::device::cuda::carried::{CUBINS, units};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A directory that holds the played libcuda.so.1.
fn library() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/driver/played.cpp");
    let key = Sha256::digest(fs::read(&source).expect("the played driver"));
    let key = u64::from_le_bytes(key[..8].try_into().expect("eight bytes"));
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("driver-{key:016x}"));
    let library = dir.join("libcuda.so.1");
    if !library.exists() {
        fs::create_dir_all(&dir).expect("a directory");
        let made = tempfile::NamedTempFile::new_in(&dir).expect("a file").into_temp_path();
        let mut command = Command::new("g++");
        command.args(["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-o"]);
        let status = command.arg(&made).arg(&source).status().expect("g++ is needed");
        assert!(status.success(), "{command:?}: {status}");
        made.persist(&library).expect("a library");
    }
    dir
}

/// What a program writes where the played driver is the machine's. `cuda` is the newest that it knows: 12020 is 12.2.
fn under(program: &str, cuda: &str, cache: &Path, args: &[&str]) -> String {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", library()).env("PLAYED_CUDA", cuda).env("XDG_CACHE_HOME", cache);
    command.env("PLAYED_KERNELS", emulation::library(&[])).env("RLHF_HPC_KERNELS", "gpu");
    let out = command.args(args).output().expect("it starts");
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(out.status.success(), "{program} {args:?}: {}\n{text}", out.status);
    text
}

/// A driver takes nothing but machine code, so there must be a compiler of CUDA, now or when this was built.
fn is_there_machine_code() -> bool {
    !CUBINS.is_empty() || carried::nvrtc().is_some()
}

#[test]
fn the_facts_of_the_played_gpu_are_those_of_the_driver() {
    if !is_there_machine_code() {
        return;
    }
    let cache = tempfile::tempdir().expect("a directory");
    if CUBINS.is_empty() {
        let nvrtc = carried::nvrtc().expect("one of the two is there");
        carried::all_but_one(&carried::compiled(&nvrtc, "sm_80"), &cache.path().join("rlhf-hpc"));
    }
    let this = std::env::current_exe().expect("a test has a program");
    let this = this.to_str().expect("a path is text");
    let text = under(this, "13000", cache.path(), &["graph::", "residual::"]);
    let passed = text.split(" passed").next().and_then(|before| before.split_whitespace().next_back());
    assert!(passed.and_then(|n| n.parse::<usize>().ok()).is_some_and(|n| n >= 10), "{text}");
}

fn line<'a>(text: &'a str, name: &str) -> &'a str {
    text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in\n{text}"))
}

#[test]
fn info_shows_the_gpus_and_takes_the_cubins_that_the_binary_carries() {
    if CUBINS.is_empty() {
        return;
    }
    let cache = tempfile::tempdir().expect("a directory");
    let text = under(env!("CARGO_BIN_EXE_rlhf-hpc"), "13000", cache.path(), &["info"]);
    assert_eq!(line(&text, "cuda"), "cuda       driver of CUDA 13.0, 2 GPUs");
    assert_eq!(line(&text, "loaded"), "loaded     the binary's cubins for sm_80");
    let gpu = "GPU 1 at 0000:af:00.0: Played GPU, 1.0 GiB, 108 multiprocessors, capability 8.0, NUMA node unknown";
    assert!(text.contains(gpu) && text.contains(", GPU 0 at 0000:3b:00.0\n"), "{text}");
    assert_eq!(fs::read_dir(cache.path()).expect("a directory").count(), 0, "nothing was compiled");
}

#[test]
fn a_driver_that_refuses_the_cubins_gets_those_of_nvrtc_and_the_next_start_finds_them() {
    let Some(nvrtc) = carried::nvrtc() else { return };
    let (major, minor) = nvrtc.version;
    // Cubins of CUDA 13 are of ABI 8, and no driver of CUDA 12 takes them.
    let carried_fits = CUBINS.iter().all(|cubin| cubin.bytes[8] < 8) && !CUBINS.is_empty();
    if carried_fits || major > 12 {
        return;
    }
    let (cache, all) = (tempfile::tempdir().expect("a directory"), units().count());
    carried::all_but_one(&carried::compiled(&nvrtc, "sm_80"), &cache.path().join("rlhf-hpc"));
    for compiled in [1, 0] {
        let text = under(env!("CARGO_BIN_EXE_rlhf-hpc"), "12020", cache.path(), &["info"]);
        let (loaded, kept) = (line(&text, "loaded"), all - compiled);
        let counts = format!("for sm_80: {compiled} sources compiled now, {kept} taken from the disk");
        assert!(
            loaded.starts_with(&format!("loaded     NVRTC {major}.{minor}")) && loaded.contains(&counts),
            "{loaded}"
        );
        let why = if CUBINS.is_empty() { "carries no cubins" } else { "CUDA_ERROR_INVALID_IMAGE" };
        assert!(loaded.contains(why), "{loaded}");
    }
}
