//! A played run, for looking at: it writes to standard error as a real one does. `RUN_DIR=/tmp/run cargo test --release
//! --test metrics -- --ignored --nocapture`, on a terminal or not; then `python tests/metrics/read_back.py /tmp/run`.

use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rlhf_hpc::config::metrics::MetricsConfig;
use rlhf_hpc::metrics::{Banner, Finish, Phase, Phases, Recorder, memory_peak_bytes, stderr_is_terminal};

use crate::sample;
use crate::terminal::banner;

#[test]
fn a_run_on_a_pipe_shows_one_line_a_step() {
    let dir = tempfile::tempdir().unwrap();
    let played = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "show::a_played_run_is_shown_and_recorded", "--nocapture"])
        .env("RUN_DIR", dir.path())
        .env("PAUSE_MS", "0")
        .output()
        .unwrap();
    let shown = String::from_utf8(played.stderr).unwrap();
    assert!(played.status.success(), "{shown}");
    let lines = |start: &str| shown.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!((lines("step "), lines("eval ")), (60, 7), "{shown}");
    assert!(!shown.contains(['\r', '\x1b']), "a pipe gets no control characters");
    assert_eq!(std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap().lines().count(), 67);
}

#[test]
#[ignore = "started by `a_run_on_a_pipe_shows_one_line_a_step`, and by hand"]
fn a_played_run_is_shown_and_recorded() {
    let run_dir = PathBuf::from(std::env::var("RUN_DIR").expect("RUN_DIR says where the run is recorded"));
    let pause = Duration::from_millis(std::env::var("PAUSE_MS").map_or(5, |ms| ms.parse().unwrap()));
    let start = Instant::now();
    let config = MetricsConfig::default();
    let mut recorder = Recorder::open(&run_dir, &config, 0, stderr_is_terminal()).unwrap();
    recorder.cut_back(0).unwrap();
    recorder.banner(&Banner { resumed_from: None, ..banner() });
    recorder.eval(0, &[("eval_accuracy_greedy", 0.412), ("eval_accuracy_sampled", 0.381)]).unwrap();
    for step in 1..=60 {
        let mut phases = Phases::start();
        let done = 1.0 - (-(step as f64) / 20.0).exp() + 0.03 * (step as f64 * 1.7).sin();
        for (phase, weight) in [(Phase::Rollout, 4), (Phase::Reward, 1), (Phase::Score, 2), (Phase::Train, 5)] {
            phases.time(phase, || {
                let bar = recorder.phase(phase.name(), 8);
                for _ in 0..8 {
                    sleep(pause * weight / 8);
                    bar.inc(1);
                }
            });
        }
        let batch = [sample(step, 5), sample(step + 1, 9), sample(step + 2, 3)];
        recorder.rollouts(step, &batch, 42, "sha256:0123").unwrap();
        recorder.samples(step, &batch).unwrap();
        let mut values = vec![
            ("reward_mean", done),
            ("kl_mean", 0.02 * done),
            ("entropy", 1.2 - 0.8 * done),
            ("clip_ratio", 0.04 * done),
            ("value_loss", 0.3 - 0.2 * done),
            ("response_tokens_mean", 6.0 + done),
            ("logprob_gap_max", 0.0),
            ("policy_loss", if step == 7 { f64::NAN } else { -0.01 * done }),
            ("memory_peak_bytes", memory_peak_bytes() as f64),
        ];
        values.extend(phases.values(3072));
        recorder.step(step, &values).unwrap();
        if step % 10 == 0 {
            let accuracy = 0.412 + 0.35 * done;
            recorder
                .eval(step, &[("eval_accuracy_greedy", accuracy), ("eval_accuracy_sampled", accuracy - 0.06)])
                .unwrap();
        }
    }
    let finish = Finish {
        steps: 60,
        seconds: start.elapsed().as_secs_f64(),
        ledger: vec![("trained".into(), 1920), ("filtered: too_long".into(), 12), ("deferred".into(), 0)],
        notes: vec![("export".into(), run_dir.join("export").display().to_string())],
    };
    recorder.finish(&finish).unwrap();
}
