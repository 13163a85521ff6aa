//! Which checkpoint is the best, how it is kept and exported, and runs that end as they do not improve.

use crate::resume::job::Job;

/// The number of evaluated rows never changes: the first evaluation stays the best.
pub const FIRST: &str = "eval.every_steps=1 checkpoint.best_metric=eval_samples checkpoint.export_best=true checkpoint.every_steps=0 \
                     optim.actor.schedule=constant optim.actor.warmup_ratio=0.0";

pub fn best(job: &Job) -> String {
    std::fs::read_link(job.checkpoints().join("best")).expect("the link is there").display().to_string()
}

#[test]
fn a_run_without_a_better_evaluation_ends_early_with_the_best_checkpoint_kept_and_exported() {
    let one = Job::sft("best-one").with(FIRST).with("job.steps=1").done();
    let job = Job::sft("best-early").with(FIRST).with("job.steps=9 eval.patience=2 checkpoint.keep_last=1");
    let words = "step 3 of 9: no better eval_samples in 2 evaluations (eval.patience = 2)";
    job.run().assert(0, &["stopped early", words, "eval_samples = 8.0000 at step 1"]);
    assert_eq!((best(&job), job.committed(), job.numbers("loss").len()), ("step-1".to_string(), vec![1, 3], 3));
    assert!(job.read("export/model.safetensors") == one.read("export/model.safetensors"), "another step was exported");
    job.run().assert(
        0,
        &[
            "nothing left to do (3 of 9 steps: no better eval_samples in 2 evaluations",
            "raise eval.patience to continue",
        ],
    );
    assert_eq!(job.numbers("loss").len(), 3);
    let job = job.with("eval.patience=3").done();
    assert_eq!((job.committed(), job.numbers("loss").len()), (vec![1, 4], 4));
}

#[test]
fn the_link_and_the_export_follow_the_better_evaluation_of_either_kind() {
    for (mode, at) in [("min", 4), ("max", 1)] {
        let job = Job::sft(&format!("best-{mode}")).with(FIRST).with("job.steps=4 checkpoint.best_metric=eval_loss");
        let job = job.with(&format!("checkpoint.best_mode={mode} checkpoint.keep_last=1")).done();
        let losses = job.numbers("eval_loss");
        assert!(losses.windows(2).all(|two| two[1] < two[0]), "{losses:?}");
        assert_eq!(best(&job), format!("step-{at}"), "{mode} of {losses:?}");
    }
}

#[test]
fn an_unknown_evaluation_metric_ends_the_run_before_its_first_step() {
    let job = Job::sft("best-unknown").with(FIRST).with("checkpoint.best_metric=eval_acuracy");
    job.run().assert(2, &["checkpoint.best_metric = eval_acuracy", "choose one of eval_loss, eval_accuracy"]);
    assert!(job.numbers("loss").is_empty());
}

/// Changes a byte of the weights in a checkpoint.
fn damage(job: &Job, name: &str) {
    let path = job.checkpoints().join(name).join("actor.weights.rank-0000.bin");
    let mut bytes = std::fs::read(&path).expect("reads");
    bytes[1000] ^= 1;
    std::fs::write(path, bytes).expect("writes");
}

/// Each evaluation of 4 steps is better than the last one.
fn improving(name: &str) -> Job {
    Job::sft(name).with(FIRST).with("job.steps=4 checkpoint.best_metric=eval_loss checkpoint.every_steps=1")
}

#[test]
fn a_damaged_best_checkpoint_is_saved_again_and_the_link_points_to_the_intact_one() {
    let job = improving("best-remade").with("eval.every_steps=2 checkpoint.keep_last=2").done();
    assert_eq!((best(&job), job.committed()), ("step-4".to_string(), vec![3, 4]));
    let exported = job.read("export/model.safetensors");
    damage(&job, "step-4");
    // The state of step 3 names the evaluation of step 2, whose checkpoint step 4 has replaced.
    let words =
        ["skipped an incomplete checkpoint: step-4: ", "the best checkpoint (eval_loss = ", "at step 2) is lost"];
    job.run().assert(0, &words);
    assert_eq!((best(&job), job.committed()), ("step-4".to_string(), vec![3, 4]));
    assert_eq!(job.read("export/model.safetensors"), exported);
    // Later evaluations are worse.
    let job = job.with("job.steps=8 optim.actor.lr=9.0").done();
    assert_eq!((best(&job), job.committed()), ("step-4".to_string(), vec![4, 7, 8]));
    assert!(job.read("export/model.safetensors") == exported, "another step was exported");
}

type Lose = fn(&Job);

#[test]
fn a_damaged_or_missing_best_checkpoint_is_dropped_at_the_next_start() {
    let job = improving("best-lost").with("checkpoint.best_mode=max checkpoint.keep_last=1").done();
    assert_eq!((best(&job), job.committed()), ("step-1".to_string(), vec![1, 4]));
    let cases: [(&str, Lose); 3] = [
        ("damaged", |job| damage(job, "step-1")),
        ("partial", |job| {
            std::fs::remove_file(job.checkpoints().join("step-1/actor.weights.rank-0000.bin")).expect("there");
        }),
        ("gone", |job| std::fs::remove_dir_all(job.checkpoints().join("step-1")).expect("there")),
    ];
    for (name, lose) in cases {
        let job = job.rewound(&format!("best-lost-{name}"), 4);
        lose(&job);
        job.clone().dry().run().assert(0, &["at step 1) is lost"]);
        job.run().assert(0, &["at step 1) is lost", "the next evaluation counts as the best"]);
        assert_eq!(job.committed(), [4]);
        assert!(!job.checkpoints().join("best").is_symlink(), "{name}: no checkpoint is the best");
        let job = job.with("job.steps=6").done();
        assert_eq!((best(&job), job.committed()), ("step-5".to_string(), vec![5, 6]));
    }
}
