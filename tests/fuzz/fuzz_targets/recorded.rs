//! The records of a run: steps in HDF5, and `metrics.jsonl`.

use crate::place;
use rlhf_hpc::experience::{Experience, Prompt, Response};
use rlhf_hpc::metrics::step_file::StepFile;
use rlhf_hpc::metrics::{jsonl, rollouts};
use std::fs;
use std::io;
use std::sync::LazyLock;

/// The checksum at the end of a recorded step. Without it every change is noticed at once.
const SEAL_BYTES: usize = 32;

/// Reads a recorded step with edits as its reader does: in a child process, whose time is limited. HDF5 may crash or
/// run into a limit there. A panic of this program is a failure. libFuzzer does not see the child's coverage, so the
/// input is a list of edits of a good file: two bytes for the place and one for its new value each.
pub fn run(data: &[u8]) {
    let mut file = RECORDED.clone();
    for edit in data.chunks_exact(3) {
        let at = usize::from(edit[0]) << 8 | usize::from(edit[1]);
        let len = file.len();
        file[at % len] = edit[2];
    }
    let path = place::write("step-1.h5", &file);
    // SAFETY: the child calls no code that waits for another thread of the parent, and does not return.
    match unsafe { libc::fork() } {
        0 => {
            for (what, limit) in [(libc::RLIMIT_CPU, 5), (libc::RLIMIT_CORE, 0)] {
                let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit + 1 };
                // SAFETY: reads one value.
                unsafe { libc::setrlimit(what, &raw const limit) };
            }
            for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGABRT, libc::SIGXCPU] {
                // SAFETY: libFuzzer's handlers would report a crash of HDF5.
                unsafe { libc::signal(signal, libc::SIG_DFL) };
            }
            let read = || {
                let Ok(file) = StepFile::open(&path, 1) else { return };
                let samples = file.samples().map_or(0, |samples| samples.len());
                drop(file.scores());
                drop(file.experience());
                (0..samples.min(8)).for_each(|i| drop(file.tokens(i)));
            };
            let hook: Box<dyn Fn(&std::panic::PanicHookInfo) + Send + Sync> = Box::new(|panic| eprintln!("{panic}"));
            std::panic::set_hook(hook);
            let code = i32::from(std::panic::catch_unwind(read).is_err());
            // SAFETY: ends the child without its parent's handlers.
            unsafe { libc::_exit(code) };
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for the child that was just made. libFuzzer's clock interrupts the wait.
            while unsafe { libc::waitpid(child, &raw mut status, 0) } != child {
                assert_eq!(io::Error::last_os_error().kind(), io::ErrorKind::Interrupted);
            }
            assert!(!libc::WIFEXITED(status) || libc::WEXITSTATUS(status) == 0, "reading a recorded step panicked");
        }
    }
}

/// No edits.
pub fn seeds() -> Vec<Vec<u8>> {
    vec![Vec::new(), vec![0, 8, 1]]
}

static RECORDED: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let sample = Experience {
        prompt: Prompt { text: "1 + 1?".to_owned(), label: "2".to_owned(), tokens: vec![1, 2], ..Prompt::default() },
        response: Response {
            tokens: vec![3, 4],
            logprobs: vec![-1.0; 2],
            sample_logprobs: vec![-1.0; 2],
            text: "2".to_owned(),
            ..Response::default()
        },
        scores: [("rule".to_owned(), 1.0)].into(),
        kl: vec![0.5; 2],
        ref_logprobs: vec![-1.0; 2],
        values: vec![0.0; 2],
        rewards: vec![0.0; 2],
        advantages: vec![1.0; 2],
        returns: vec![1.0; 2],
        mask: vec![1; 2],
        ..Experience::default()
    };
    rollouts::write(&place::path("run"), 1, &[sample], (0, ""), 0).expect("a step is recorded");
    let mut bytes = fs::read(rollouts::step_path(&place::path("run"), 1)).expect("a recorded step");
    bytes.truncate(bytes.len() - SEAL_BYTES);
    bytes
});

/// Reads the lines of `metrics.jsonl`, as a report and as a resume do.
pub fn metrics(data: &[u8]) {
    let path = place::write("metrics.jsonl", data);
    drop(jsonl::lines(&path));
    let Ok(mut file) = jsonl::MetricsFile::open(&path) else { return };
    drop((file.damage(), file.lines()));
    drop(file.cut_back(3));
}

pub fn metrics_seeds() -> Vec<Vec<u8>> {
    let line = |step: u64| jsonl::Line::new(step, 1.5e9, &[("reward/mean", 0.5), ("loss", 1e-9)]).to_json();
    vec![format!("{}\n{}\n{}\n", line(1), line(2), line(5)).into_bytes(), b"{\"step\": 1, \"x\": null}\n{\"st".to_vec()]
}
