//! The driver: calls, reasons why a GPU cannot be used, and the source of the kernels.

use crate::{device, emulation, skip, skip_on_a_real_gpu, skip_without_cubins};
use rlhf_hpc::device::cuda::Stream;
use rlhf_hpc::device::cuda::embedded::{CUBINS, KERNELS, units};
use std::ffi::{c_int, c_void};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The binary on the emulated GPU, with a driver for CUDA up to `cuda`: 12020 is 12.2.
fn command(cuda: &str, cache: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlhf-hpc"));
    command.env("XDG_CACHE_HOME", cache).envs(emulation::environment()).env("EMULATED_CUDA", cuda).args(args);
    command
}

/// The output of a program there, and whether it succeeds.
fn said(command: &mut Command) -> (bool, String) {
    let out = command.output().expect("it starts");
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (out.status.success(), text)
}

fn written(command: &mut Command) -> String {
    let (succeeds, text) = said(command);
    assert!(succeeds, "{command:?}\n{text}");
    text
}

/// A test of this target in a process of its own, on a GPU that is late.
fn test(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the path of this target"));
    command.args([name, "--exact"]).env(emulation::LATE, "1").env(emulation::LIBRARY, emulation::gpu());
    command
}

#[test]
fn offloaded_values_are_correct_on_a_gpu_that_copies_as_late_or_as_early_as_possible() {
    if skip_on_a_real_gpu() {
        return;
    }
    let [back, updates, go_on] = [
        "offload::offloaded_values_return_unchanged_and_their_memory_is_reused_meanwhile",
        "offload::updates_of_offloaded_state_equal_those_of_state_on_the_gpu",
        "offload::kernels_overlap_with_offloading_and_the_next_owner_of_the_memory_waits",
    ];
    for (name, early) in [(back, "0"), (updates, "0"), (go_on, "0"), (go_on, "1")] {
        let (held, text) = said(test(name).env("EMULATED_EARLY", early));
        assert!(held && text.contains("running 1 test"), "{name}, early {early}:\n{text}");
    }
}

fn line<'a>(text: &'a str, name: &str) -> &'a str {
    text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in\n{text}"))
}

#[test]
fn info_shows_the_gpus_and_loads_the_embedded_cubins() {
    if skip_without_cubins() {
        return;
    }
    let cache = tempfile::tempdir().expect("a directory");
    let text = written(&mut command("13000", cache.path(), &["info"]));
    assert_eq!(line(&text, "cuda"), "cuda       driver of CUDA 13.0, 2 GPUs");
    assert_eq!(line(&text, "loaded"), "loaded     the binary's cubins for sm_80");
    let gpu = "GPU 1 at 0000:af:00.0: Emulated GPU, 1.0 GiB, 108 multiprocessors, capability 8.0, NUMA node unknown";
    let lt = format!("cublaslt   12.8.3 ({})", emulation::gpu().display());
    assert_eq!(line(&text, "cublaslt"), lt);
    assert!(text.contains(gpu) && text.contains(", GPU 0 at 0000:3b:00.0\n"), "{text}");
    assert_eq!(fs::read_dir(cache.path()).expect("a directory").count(), 0, "nothing was compiled");
}

#[test]
fn gpus_of_8_x_and_9_0_load_cubins_and_newer_ones_load_ptx_without_nvrtc() {
    if skip_without_cubins() {
        return;
    }
    let cache = tempfile::tempdir().expect("a directory");
    for (capability, code) in [
        ("86", "cubins for sm_80"),
        ("90", "cubins for sm_90a"),
        ("100", "PTX, compiled by a driver for CUDA 13.0 for sm_100"),
        ("120", "PTX, compiled by a driver for CUDA 13.0 for sm_120"),
    ] {
        let mut info = command("13000", cache.path(), &["info"]);
        let text = written(info.env("EMULATED_CAPABILITY", capability).env("RLHF_NVRTC", "/nowhere/libnvrtc.so"));
        assert_eq!(line(&text, "loaded"), format!("loaded     the binary's {code}"));
    }
}

#[test]
fn info_shows_the_registers_and_the_local_memory_that_the_driver_gives_each_kernel() {
    if skip_without_cubins() {
        return;
    }
    let cache = tempfile::tempdir().expect("a directory");
    let text = written(&mut command("13000", cache.path(), &["info", "--kernels"]));
    assert!(text.contains("As the driver loads them on Emulated GPU, the binary's cubins for sm_80."), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("| ")).count(), KERNELS.len() + 1);
    for kernel in KERNELS {
        let row = line(&text, &format!("| {} | 40 | ", kernel.name));
        assert!(row.ends_with(" | 8 |"), "{row}");
    }
}

#[test]
fn collectives_run_on_streams_of_the_highest_priority() {
    let (gpu, _one) = device();
    if skip_on_a_real_gpu() {
        return;
    }
    let of = |stream: Stream| {
        // SAFETY: a stream of the library.
        emulation::with_function("emulated_priority", |ask: unsafe extern "C" fn(*mut c_void) -> c_int| unsafe {
            ask(gpu.stream(stream).cast())
        })
    };
    // The emulated GPU's priorities are 0 to -5, the highest.
    assert_eq!([Stream::Tensor, Stream::Zero, Stream::Ring].map(of), [-5; 3]);
    assert_eq!([Stream::Compute, Stream::Up, Stream::Down].map(of), [0; 3]);
}

#[test]
fn the_cause_of_an_unusable_gpu_is_reported_with_a_remedy() {
    if skip_without_cubins() {
        return;
    }
    let cache = tempfile::tempdir().expect("a directory");
    let with = |args: &[&str], fails: &str| {
        let mut command = command("13000", cache.path(), args);
        said(command.env("EMULATED_FAILS", fails).env("EMULATED_MODE", "3"))
    };
    // A status that the driver's headers did not know yet is reported by its number.
    let (_, text) = with(&["info"], "cuInit:1:911");
    assert!(line(&text, "cuda").contains("none: the driver does not start: cuInit: status 911;"), "{text}");
    // Calls of the stub return a status for which it has no message.
    let (_, text) = with(&["info"], "cuInit:1:34");
    let why = "cuda       none: the driver does not start: the libcuda.so that was found first is the stub";
    assert!(line(&text, "cuda").starts_with(why) && text.contains("LD_LIBRARY_PATH"), "{text}");
    let (starts, text) = with(&["bench", "cuda", "--small"], "cuDevicePrimaryCtxRetain:1:46");
    let why = "cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE";
    assert!(!starts && text.contains(why) && text.contains("the compute mode of GPU 0 is exclusive"), "{text}");
}

/// Drivers like real ones: without a loaded kernel module (535), too old (450), or not for this machine.
#[test]
fn an_unusable_driver_means_that_the_cpu_is_used() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    let cuda = |library: &Path, status: &str| {
        let mut info = command("13000", at, &["info"]);
        let text = written(info.env("RLHF_CUDA_LIB", library).env("EMULATED_FAILS", format!("cuInit:1:{status}")));
        line(&text, "cuda").strip_prefix("cuda       none: ").unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    let why = cuda(&emulation::gpu(), "100");
    assert!(why.starts_with("the driver shows no GPU: ") && why.ends_with("; computing on the CPU"), "{why}");
    let old = at.join("libcuda.so.1");
    fs::write(at.join("old.c"), "int cuInit(unsigned flags) { return flags; }\n").expect("a source");
    let mut compiler = Command::new("gcc");
    let status =
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&old).arg(at.join("old.c")).status().expect("gcc is needed");
    assert!(status.success(), "{compiler:?}: {status}");
    let why = cuda(&old, "0");
    assert!(
        why.starts_with("the driver must be version 470 (CUDA 11.4) or newer; it lacks cuDriverGetVersion, "),
        "{why}"
    );
    assert!(why.contains("cuGraphUpload") && !why.contains("cuInit"), "{why}");
    fs::write(&old, "no library").expect("a file");
    let why = cuda(&old, "0");
    assert!(why.contains("/libcuda.so.1 is not a driver for this machine: ") && why.contains("too short"), "{why}");
}

#[test]
fn a_cublaslt_of_a_later_cuda_than_the_driver_is_not_used() {
    let cache = tempfile::tempdir().expect("a directory");
    let lt = |cuda| {
        let mut info = command(cuda, cache.path(), &["info"]);
        let text = written(info.env("RLHF_NVRTC", "/nowhere/libnvrtc.so"));
        line(&text, "cublaslt").strip_prefix("cublaslt   ").expect("its name").to_owned()
    };
    let path = emulation::gpu().display().to_string();
    assert_eq!(lt("12000"), format!("12.8.3 ({path})"));
    let found = "cuBLASLt must not be newer than the driver (found 12.8.3, driver for CUDA 11.8)";
    let why = format!("none: {path}: {found}; GEMM on a GPU is exact");
    assert_eq!(lt("11080"), why);
}

#[test]
fn a_driver_that_rejects_the_cubins_gets_those_of_nvrtc_which_are_cached() {
    // Cubins of CUDA 13 have ABI 8, which no driver of CUDA 12 loads.
    if CUBINS.is_empty() || CUBINS.iter().any(|cubin| cubin.bytes[8] < 8) {
        return skip("no cubins of CUDA 13");
    }
    let (cache, all) = (tempfile::tempdir().expect("a directory"), units().count());
    for compiled in [all, 0] {
        let mut info = command("12020", cache.path(), &["info"]);
        let text = written(info.env("RLHF_NVRTC", emulation::gpu()));
        let loaded = line(&text, "loaded");
        let counts = format!("): {compiled} sources compiled now, {} read from the cache", all - compiled);
        assert!(loaded.starts_with("loaded     NVRTC 0.1 for sm_80 (") && loaded.contains(&counts), "{loaded}");
        assert!(loaded.contains("CUDA_ERROR_INVALID_IMAGE"), "{loaded}");
    }
}
