//! Faults that are planted in the kernels, each of which a fact must notice: so the facts are known to look.
//!
//! A fact runs once more in a child process, on kernels with the fault. Each room states its faults beside its facts.

use crate::emulation::{self, Fault, LIBRARY};
use std::io::{Read, Seek};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a fact may take with a fault.
const PATIENCE: Duration = Duration::from_secs(100);

/// Runs `fact` (its path in this target, as `residual::a_sum_is_rounded_once`) on kernels with a fault, which it must notice in
/// these `words`: those of its assertion, or of the emulated GPU. Kernels that the fault may touch are compiled as the fact asks for
/// them: it ends at the first one that it lacks, and begins anew with it.
///
/// # Panics
/// If it passes, if it fails otherwise, if there is no such fact, or if the source does not hold the faulty text's original
/// exactly once.
pub fn noticed(fact: &str, fault: Fault, words: &str) {
    if crate::on_a_real_gpu() {
        eprintln!("skipped: faults are planted on the emulated GPU");
        return;
    }
    let mut asked: Vec<String> = Vec::new();
    loop {
        let (library, left_out) = emulation::library_of(&[fault], |kernel| asked.iter().any(|name| name == kernel));
        let [said, complained] = failed(fact, fault, &library);
        assert!(said.contains("running 1 test"), "there is no fact {fact}:\n{said}");
        let lacks = complained.lines().filter(|line| line.contains("there is no such kernel"));
        let lacks =
            lacks.flat_map(|line| left_out.iter().filter(move |name| line.contains(&format!("kernel {name},"))));
        let lacks: Vec<String> = lacks.cloned().collect();
        if lacks.is_empty() {
            let (file, from, to) = fault;
            let how = format!("{fact} with `{to}` for `{from}` in {file}");
            assert!(complained.contains(words), "{how} fails, not by `{words}`:\n{complained}");
            return;
        }
        asked.extend(lacks);
    }
}

/// What a child process writes, to both of its outputs, that runs `fact` on a library and must fail.
fn failed(fact: &str, fault: Fault, library: &Path) -> [String; 2] {
    let mut outputs = [(); 2].map(|()| tempfile::tempfile().expect("a file"));
    let [said, complained] = outputs.each_ref().map(|file| Stdio::from(file.try_clone().expect("a handle")));
    let own = std::env::current_exe().expect("the path of this target");
    let mut child = Command::new(own)
        .args([fact, "--exact", "--nocapture", "--test-threads=1"])
        .env(LIBRARY, library)
        // Where it failed is nobody's question, and takes longer to find out than many a fact.
        .env("RUST_BACKTRACE", "0")
        .stdout(said)
        .stderr(complained)
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
    let (file, from, to) = fault;
    assert!(!status.success(), "{fact} passes with `{to}` for `{from}` in {file}");
    outputs.each_mut().map(|file| {
        let mut text = Vec::new();
        file.rewind().and_then(|()| file.read_to_end(&mut text)).expect("what it wrote");
        String::from_utf8_lossy(&text).into_owned()
    })
}

/// Nor is it noticed that the first run lacks the kernels.
#[test]
fn a_change_that_changes_nothing_is_not_noticed() {
    if crate::on_a_real_gpu() {
        return;
    }
    let fault = ("residual.cu", "#include \"common.cuh\"", "#include \"common.cuh\"  // the same");
    let words = unnoticed("residual::a_sum_is_rounded_once", fault, "8 values");
    assert!(words.starts_with("residual::a_sum_is_rounded_once passes with "), "{words}");
}

/// Why `noticed` does not hold.
fn unnoticed(fact: &str, fault: Fault, words: &str) -> String {
    let why = std::panic::catch_unwind(|| noticed(fact, fault, words)).expect_err("it does not hold");
    crate::words(&*why)
}

#[test]
fn a_fact_that_fails_in_other_words_has_not_noticed_its_fault() {
    if crate::on_a_real_gpu() {
        return;
    }
    let fault = ("residual.cu", "at >= len", "at + 8 >= len");
    let words = unnoticed("residual::a_sum_is_rounded_once", fault, "which is no address of the GPU");
    assert!(words.contains(" fails, not by `which is no address of the GPU`") && words.contains("8 values"), "{words}");
}
