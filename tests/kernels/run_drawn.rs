//! What `bench/drawn.py` has found among jobs that it draws: each the smallest job that showed it.

use crate::jobs::{CONFIG, binary, prepare};
use crate::{faults, on_a_real_gpu};
use std::path::Path;
use std::process::Command;

/// How a job ends, and what it says.
fn said(at: &Path, sets: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(binary());
    command.current_dir(at).args(["run", "ppo.toml", "model.actor=model"]).args(sets);
    if !on_a_real_gpu() {
        command.env("RLHF_HPC_PLAYED_GPU", faults::played());
    }
    let done = command.output().expect("the binary starts");
    (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
}

/// A sample of up to 40 tokens behind a prompt, which has no more than 24.
const ONE_OF_TWO_PAGES: [&str; 4] =
    ["job.steps=1", "rollout.prompts_per_step=1", "rollout.samples_per_prompt=1", "rollout.response_tokens_max=40"];

/// Pages are of 32 tokens, of a layer with a head of 64 for keys and for values: 8 KiB in bf16, 16 KiB in f32.
#[test]
fn a_cache_too_small_for_the_longest_row_and_stop_tokens_that_no_model_knows_are_refused_before_the_first_step() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    prepare(at, CONFIG);
    for (name, device, page) in [("gpu", "job.device=gpu", 8192), ("cpu", "job.device=cpu", 16384)] {
        let own = [device.to_string(), format!("job.dir={name}"), format!("rollout.kv_bytes_max={}", 2 * page - 1)];
        let mut sets = ONE_OF_TWO_PAGES.to_vec();
        sets.extend(own.iter().map(String::as_str));
        let (code, text) = said(at, &sets);
        assert_eq!(code, Some(2), "{text}");
        let words = format!("error: rollout.kv_bytes_max is {}, keys and values of the longest row", 2 * page - 1);
        assert!(text.contains(&words) && text.contains(&format!("take {} bytes", 2 * page)), "{text}");
        assert!(!text.contains("step 1"), "{text}");
        let enough = format!("rollout.kv_bytes_max={}", 2 * page);
        let (code, text) = said(at, &[&sets[..], &[&enough]].concat());
        assert_eq!(code, Some(0), "what is needed is enough: {text}");
        let (code, text) = said(at, &[device, "rollout.stop_token_ids=[5, 264]"]);
        assert_eq!(code, Some(2), "{text}");
        assert!(
            text.starts_with("error: rollout.stop_token_ids has 264, the vocabulary of model.actor ends at 263"),
            "{text}"
        );
    }
}
