use std::fs;

use rlhf_hpc::config::metrics::MetricsConfig;
use rlhf_hpc::error::Kind;
use rlhf_hpc::metrics::Recorder;
use rlhf_hpc::metrics::eval_rows::{self, EvalResponses, EvalRow};
use rlhf_hpc::metrics::tensorboard::files_in;

use crate::metrics::tensorboard::{Values, shown};
use crate::metrics::{Shown, sample};
use crate::names;

fn run(recorder: &mut Recorder, steps: std::ops::RangeInclusive<u64>) {
    let batch = [sample(0, 3), sample(1, 2), sample(2, 5)];
    for step in steps {
        drop(recorder.phase("rollout", 3));
        recorder.rollouts(step, &batch, 42, "hash").unwrap();
        recorder.samples(step, &batch).unwrap();
        recorder.step(step, &[("reward_mean", step as f64), ("time_step_s", 1.0)]).unwrap();
        if step % 2 == 0 {
            recorder.eval(step, &[("eval_accuracy_greedy", step as f64 / 10.0)]).unwrap();
        }
    }
}

fn config() -> MetricsConfig {
    MetricsConfig { rollouts_every_steps: 2, samples_every_steps: 3, samples_count: 1, ..MetricsConfig::default() }
}

/// metrics.jsonl and what TensorBoard shows, without the times and how often the run was resumed.
fn records(dir: &std::path::Path) -> (Vec<serde_json::Value>, Values) {
    let text = fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| {
        let mut json: serde_json::Value = serde_json::from_str(line).unwrap();
        json.as_object_mut().unwrap().retain(|key, _| !key.starts_with("time_") && key != "restarts");
        json
    });
    let mut shown = shown(dir);
    // The hyperparameters contain the start time of the run.
    shown.retain(|(_, tag), _| tag != "_hparams_/session_start_info" && tag != "run/restarts");
    (lines.collect(), shown)
}

#[test]
fn a_resumed_run_has_the_records_of_an_uninterrupted_one() {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let shown = Shown::default();
    let open = |dir: &tempfile::TempDir| Recorder::open(dir.path(), &config(), shown.terminal(false, 100)).unwrap();
    run(&mut open(&whole), 1..=6);

    run(&mut open(&parts), 1..=5);
    let mut resumed = open(&parts);
    resumed.cut_back(3).unwrap();
    run(&mut resumed, 4..=6);
    assert_eq!(records(parts.path()), records(whole.path()));
    let restarted = |dir: &tempfile::TempDir| {
        let text = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
        text.lines().map(|line| line.contains("\"restarts\":1,")).collect::<Vec<_>>()
    };
    // The first start wrote steps 1 to 3 and the evaluation after step 2.
    assert_eq!(restarted(&parts), [false, false, false, true, true, true]);
    assert!(!restarted(&whole).contains(&true));
    let links =
        |dir: &tempfile::TempDir| hdf5::File::open(dir.path().join("rollouts.h5")).unwrap().member_names().unwrap();
    assert_eq!(links(&parts), links(&whole));
    assert_eq!(links(&whole), ["step_000002", "step_000004", "step_000006"]);
    let lines = fs::read_to_string(parts.path().join("metrics.jsonl")).unwrap();
    assert_eq!(lines.lines().count(), 6);
}

#[test]
fn the_first_rows_of_the_last_evaluations_are_kept_and_a_resume_removes_later_ones() {
    let dir = tempfile::tempdir().unwrap();
    let config = MetricsConfig { eval_rows_max: 2, rollouts_keep_last: 2, ..config() };
    let open = || Recorder::open(dir.path(), &config, Shown::default().terminal(false, 100)).unwrap();
    let row = |row: u64| EvalRow {
        step: 20,
        row,
        prompt: "a\nb\u{2028}".into(),
        responses: EvalResponses::Labelled { response: "\"".into(), label: row.is_multiple_of(2), reward: 0.1 },
        margin: -1e-300,
        correct: false,
    };
    let mut recorder = open();
    for step in [0, 10, 20, 10] {
        recorder.eval_rows(step, (step..step + 3).map(|i| Ok(row(i)))).unwrap();
    }
    assert_eq!(names(&dir.path().join("eval")), ["step-10.jsonl", "step-20.jsonl"]);
    assert_eq!(eval_rows::read(dir.path(), 20).unwrap(), [row(20), row(21)]);
    fs::write(dir.path().join("eval/.step-30.jsonl.1.partial"), b"half").unwrap();
    open().cut_back(10).unwrap();
    assert_eq!(names(&dir.path().join("eval")), ["step-10.jsonl"]);
    let none = MetricsConfig { eval_rows_max: 0, ..config };
    let mut recorder = Recorder::open(dir.path(), &none, Shown::default().terminal(false, 100)).unwrap();
    recorder.eval_rows(20, std::iter::once(Ok(row(0)))).unwrap();
    assert_eq!(names(&dir.path().join("eval")), ["step-10.jsonl"]);
}

#[test]
fn the_curves_of_a_resumed_run_include_earlier_steps_and_reading_records_changes_none() {
    let dir = tempfile::tempdir().unwrap();
    let shown = Shown::default();
    let open = |shown: &Shown| Recorder::open(dir.path(), &config(), shown.terminal(false, 100)).unwrap();
    run(&mut open(&shown), 1..=6);
    let before = (records(dir.path()), files_in(dir.path()).unwrap());
    drop(open(&shown));
    assert_eq!((records(dir.path()), files_in(dir.path()).unwrap()), before);
    let shown = Shown::default();
    let mut resumed = open(&shown);
    resumed.cut_back(4).unwrap();
    run(&mut resumed, 5..=5);
    resumed.finish(5, 0.0, &[]).unwrap();
    let text = shown.text();
    let row = text.lines().find(|row| row.trim_start().starts_with("reward")).unwrap();
    assert!(row.contains("1.0000 ->   5.0000") && row.ends_with("▁▃▅▇█"), "{text}");
}

#[test]
fn other_ranks_write_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("run");
    let mut silent = Recorder::silent(&config());
    silent.cut_back(0).unwrap();
    silent.banner(60, None, &[]);
    run(&mut silent, 1..=3);
    silent.warn("nobody hears this");
    silent.finish(3, 0.0, &[]).unwrap();
    assert!(!run_dir.exists());
    let due: Vec<u64> = (1..10).filter(|&step| config().samples_due(step)).collect();
    assert_eq!(due, [1, 3, 6, 9]);
}

#[test]
fn a_non_finite_number_causes_a_warning_with_its_step_and_key() {
    let dir = tempfile::tempdir().unwrap();
    let shown = Shown::default();
    let mut recorder = Recorder::open(dir.path(), &config(), shown.terminal(false, 80)).unwrap();
    recorder.step(4, &[("policy_loss", f64::NAN), ("reward_mean", 1.0)]).unwrap();
    assert!(shown.text().contains("warning: step 4: policy_loss is NaN"), "{}", shown.text());
}

#[test]
fn a_directory_that_cannot_be_written_is_an_io_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let open =
        |dir: &std::path::Path| Recorder::open(dir, &config(), Shown::default().terminal(false, 80)).err().unwrap();
    let error = open(&file.join("run"));
    assert_eq!(error.kind, Kind::Io);
    assert!(error.message.contains("file/run"), "{error}");
    fs::create_dir(dir.path().join("metrics.jsonl")).unwrap();
    let error = open(dir.path());
    assert!(error.kind == Kind::Io && error.message.contains("metrics.jsonl"), "{error}");
}

#[test]
fn without_tensorboard_there_are_no_events() {
    let dir = tempfile::tempdir().unwrap();
    let config = MetricsConfig { tensorboard: false, rollouts_every_steps: 0, ..config() };
    let mut recorder = Recorder::open(dir.path(), &config, Shown::default().terminal(false, 80)).unwrap();
    recorder.cut_back(0).unwrap();
    run(&mut recorder, 1..=3);
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["metrics.jsonl"]);
}
