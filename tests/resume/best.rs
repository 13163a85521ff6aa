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
fn a_number_that_evaluations_do_not_have_ends_the_run_before_its_first_step() {
    let job = Job::sft("best-unknown").with(FIRST).with("checkpoint.best_metric=eval_acuracy");
    job.run().assert(2, &["checkpoint.best_metric = eval_acuracy", "choose one of eval_loss, eval_accuracy"]);
    assert!(job.numbers("loss").is_empty());
}
