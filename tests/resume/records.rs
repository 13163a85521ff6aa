//! The records of a run: its log after damage, the numbers of its updates, the files that it keeps, and the place of
//! its export.

use crate::resume::job::Job;
use rlhf_hpc::config::optim::{OptimConfig, Schedule};
use rlhf_hpc::optim::schedule::lr_at;

#[test]
fn a_damaged_log_prevents_no_resume_and_its_missing_steps_are_reported() {
    let job = Job::ppo("log").on(2);
    let first = job.clone().with("job.steps=3").done();
    let whole = String::from_utf8(first.read("metrics.jsonl")).expect("text");
    let lines: Vec<&str> = whole.lines().collect();
    let path = first.dir.join("metrics.jsonl");
    let torn = &lines[2][..40];
    std::fs::write(&path, format!("{}\nnot of ours\n{torn}", lines[0])).expect("writes");
    job.clone().dry().run().assert(0, &["metrics.jsonl has damaged lines: line 2 (", "line 3 ("]);
    let ended = job.clone().run();
    ended.assert(0, &["metrics.jsonl has no line for steps 2 to 3; the run continues after step 3"]);
    let steps: Vec<u64> = job.metrics().iter().map(|line| line["step"].as_u64().expect("a step")).collect();
    assert_eq!(steps, [1, 4]);
    let kept = String::from_utf8(job.read("metrics.jsonl.damaged")).expect("text");
    assert_eq!(kept, format!("not of ours\n{torn}\n"));
}

#[test]
fn a_file_at_the_path_of_the_export_is_rejected_before_the_first_step() {
    let job = Job::ppo("export-there").with("job.steps=1");
    let out = job.dir.join("export");
    let cases =
        [("export/notes.txt", "contains notes.txt, which is not part of an export"), ("export", "export is a file")];
    for (name, words) in cases {
        let _ = std::fs::remove_dir_all(&job.dir);
        let path = job.dir.join(name);
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("writes");
        std::fs::write(&path, "mine").expect("writes");
        for job in [job.clone().dry(), job.clone()] {
            job.run().assert(2, &["error: ", words, "or set another job.dir, or set job.export = false"]);
            assert!(!job.dir.join("metrics.jsonl").exists() && job.committed().is_empty(), "no work was begun");
        }
        assert_eq!(std::fs::read(&path).expect("still there"), b"mine");
        job.clone().with("job.export=false").done();
        assert_eq!(std::fs::read(&path).expect("still there"), b"mine");
    }
    std::fs::remove_file(&out).expect("there");
    job.clone().done();
    // An export replaces an earlier export.
    job.with("job.steps=2").done();
}

#[test]
fn norms_and_learning_rates_cover_all_updates_of_a_step() {
    let sets = "job.steps=2 optim.actor.schedule=linear optim.actor.warmup_ratio=0.25 optim.actor.floor_ratio=0.0 \
                checkpoint.every_steps=0";
    let whole = Job::ppo("all-updates").with(sets).done();
    // 2 epochs over 2 minibatches, twice.
    let optim =
        OptimConfig { schedule: Schedule::Linear, warmup_ratio: 0.25, floor_ratio: 0.0, ..OptimConfig::with_lr(1e-3) };
    let mean = |updates: std::ops::Range<u64>| updates.map(|update| lr_at(&optim, update, 8)).sum::<f64>() / 4.0;
    for (lr, mean) in whole.numbers("lr_actor").into_iter().zip([mean(0..4), mean(4..8)]) {
        assert!((lr / mean - 1.0).abs() < 1e-12, "{lr} and {mean}");
    }
    for role in ["actor", "critic"] {
        let means = whole.numbers(&format!("grad_norm_{role}"));
        let largest = whole.numbers(&format!("grad_norm_{role}_max"));
        assert_eq!((means.len(), largest.len()), (2, 2));
        assert!(means.iter().zip(&largest).all(|(mean, max)| 0.0 < *mean && mean < max), "{means:?} {largest:?}");
    }
}

#[test]
fn only_the_last_rollouts_are_kept_on_request() {
    let job = Job::ppo("rollouts-kept").with("metrics.rollouts_keep_last=2");
    job.clone().with("job.steps=3").run().assert(0, &["recorded each step, up to "]);
    let kept = |job: &Job| job.rollouts().keys().cloned().collect::<Vec<_>>();
    assert_eq!(kept(&job), ["step_000002", "step_000003"]);
    job.clone().run().assert(0, &["recorded each step, up to "]);
    assert_eq!(kept(&job), ["step_000003", "step_000004"]);
    assert_eq!(std::fs::read_dir(job.dir.join("rollouts")).expect("there").count(), 2);
}

#[test]
fn rollouts_that_the_disk_cannot_hold_are_rejected_or_warned_of_at_the_start() {
    let dry = |sets: &str| Job::ppo("rollouts-disk").with("checkpoint.every_steps=0").with(sets).dry().run();
    dry("job.steps=1000000000 metrics.rollouts_keep_last=500000000").assert(
        74,
        &["and rollouts (500000001 more of up to ", "set metrics.rollouts_keep_last to keep fewer rollouts"],
    );
    // All of them are kept, but each may be small.
    let many = "job.steps=1000000000";
    dry(&format!("{many} metrics.rollouts_keep_last=0"))
        .assert(0, &["warning: checkpoints (", "and rollouts (1000000000 more of up to "]);
    for few in ["metrics.rollouts_keep_last=3", "metrics.rollouts_every_steps=0"] {
        let ended = dry(&format!("{many} {few}"));
        assert!(ended.code == Some(0) && !ended.stderr.contains("warning: checkpoints"), "{}", ended.stderr);
    }
}

#[test]
fn a_start_completes_what_a_kill_interrupted() {
    let sets = "job.steps=3 eval.every_steps=1 checkpoint.best_metric=eval_samples checkpoint.every_steps=1";
    let job = Job::ppo("links").with(sets).with("metrics.rollouts_keep_last=0").done();
    let target = |name: &str| std::fs::read_link(job.checkpoints().join(name)).expect("a link");
    let mislead = |name: &str, to: &str| {
        std::fs::remove_file(job.checkpoints().join(name)).expect("a link");
        std::os::unix::fs::symlink(to, job.checkpoints().join(name)).expect("links");
    };
    mislead("latest", "step-2");
    mislead("best", "step-9");
    std::fs::create_dir_all(job.dir.join("data")).expect("makes");
    let partial = job.dir.join("data/.rows-1.json.7.partial");
    std::fs::write(&partial, "half").expect("writes");
    // The state that a kill leaves: the last renames are missing.
    let kept = job.clone().with("checkpoint.keep_last=1 metrics.rollouts_keep_last=1");
    kept.clone().dry().done();
    assert_eq!((target("latest"), target("best")), ("step-2".into(), "step-9".into()));
    assert!(partial.exists() && job.committed() == [1, 2, 3] && job.rollouts().len() == 3);
    kept.done();
    assert_eq!((target("latest"), target("best")), ("step-3".into(), "step-1".into()));
    assert_eq!(job.committed(), [1, 3], "the last and the best");
    assert_eq!(job.rollouts().keys().collect::<Vec<_>>(), ["step_000003"]);
    assert_eq!(job.eval_rows().keys().collect::<Vec<_>>(), [&3]);
    assert!(!partial.exists());
}
