//! Tests of several ranks with a GPU each: this target starts itself again under mpirun.

use crate::{device, emulation, on_a_real_gpu};
use rlhf_hpc::comm::{World, shutdown};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Set where a process is one of the ranks.
const RANK: &str = "RLHF_HPC_KERNELS_RANK";

/// How long a test may take on so many ranks, in seconds.
const PATIENCE_S: &str = "240";

/// That of the bundle in whose bin/ this target lies, else this machine's, which a machine with a GPU may lack.
fn launcher() -> Option<PathBuf> {
    let own = std::env::current_exe().expect("the path of this target");
    let bundled = own.parent().and_then(Path::parent).map(|bundle| bundle.join("mpirun")).filter(|path| path.exists());
    bundled.or_else(|| (!on_a_real_gpu()).then(|| PathBuf::from("mpirun")))
}

/// Runs `check` together on as many ranks as `worlds` name, in turn: each has an emulated GPU of its own, or all share the real
/// one. `test` is the path of the calling test in this target.
pub fn together(test: &str, worlds: &[usize], check: fn(&World)) {
    if std::env::var_os(RANK).is_some() {
        let (_gpu, _one) = device();
        let world = World::start().expect("this rank joins");
        // A rank that fails must end the others, which wait for it.
        if catch_unwind(AssertUnwindSafe(|| check(&world))).is_err() {
            std::process::exit(1);
        }
        world.group().barrier();
        shutdown();
        return;
    }
    let Some(launcher) = launcher() else {
        eprintln!("skipped: several ranks on a real GPU need the launcher of a bundle");
        return;
    };
    for ranks in worlds {
        let mut command = Command::new(&launcher);
        command
            .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--timeout", PATIENCE_S])
            .args(["-n", &ranks.to_string()])
            .arg(std::env::current_exe().expect("the path of this target"))
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env("OMPI_MCA_mpi_yield_when_idle", "1")
            .env(RANK, "1");
        if !on_a_real_gpu() {
            command.env(emulation::LIBRARY, emulation::gpu()).env("RLHF_NCCL_LIB", emulation::gpu());
        }
        let done = command.output().expect("mpirun starts");
        let said = [done.stdout, done.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
        assert!(done.status.success(), "{test} on {ranks} ranks: {}\n{said}", done.status);
        assert_eq!(said.matches("running 1 test").count(), *ranks, "there is no test {test}:\n{said}");
    }
}
