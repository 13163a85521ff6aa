//! Faults that are planted in the kernels, each of which a fact must notice: so the facts are known to look.
//!
//! A fact runs once more in a child process, on kernels with the fault. Each room states its faults beside its facts.

use crate::emulation::{self, Fault};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Names the library of kernels that a child process runs its fact on.
pub const LIBRARY: &str = "RLHF_HPC_KERNELS_LIBRARY";

/// How long a fact may take with a fault.
const PATIENCE: Duration = Duration::from_secs(100);

/// Runs `fact` (its path in this target, as `residual::a_sum_is_rounded_once`) on kernels with a fault.
///
/// # Panics
/// If it passes, if there is no such fact, or if the source does not hold the faulty text's original exactly once.
pub fn noticed(fact: &str, fault: Fault) {
    if crate::on_a_real_gpu() {
        eprintln!("skipped: faults are planted on the played GPU");
        return;
    }
    let library = emulation::library(&[fault]);
    let own = std::env::current_exe().expect("the path of this target");
    let mut child = Command::new(own)
        .args([fact, "--exact", "--nocapture", "--test-threads=1"])
        .env(LIBRARY, library)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("this target starts once more");
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child of this process") {
            break status;
        }
        if begun.elapsed() > PATIENCE {
            child.kill().and_then(|()| child.wait()).expect("a child that can be ended");
            panic!("{fact} has not ended after {PATIENCE:?} with {fault:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut output = String::new();
    std::io::Read::read_to_string(&mut child.stdout.take().expect("a pipe"), &mut output).expect("the child's lines");
    assert!(output.contains("running 1 test"), "there is no fact {fact}:\n{output}");
    let (file, from, to) = fault;
    assert!(!status.success(), "{fact} passes with `{to}` for `{from}` in {file}");
}
