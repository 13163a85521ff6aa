//! Runs on different numbers of ranks.

use crate::resume::job::{Job, place};
use rlhf_hpc::checkpoint::Checkpoint;
use rlhf_hpc::device::Device;
use rlhf_hpc::model::{Head, load};
use rlhf_hpc::tensor::DType;

/// A flat vector of a checkpoint, whatever ranks saved it.
fn vector(job: &Job, step: u64, name: &str) -> Vec<f32> {
    let checkpoint = Checkpoint::open(&job.checkpoints().join(format!("step-{step}"))).expect("committed");
    let len = checkpoint.vector_len(name).unwrap_or_else(|| panic!("{name} was saved"));
    let mut values = vec![0.0; len];
    checkpoint.read_vector(name, len, 0..len, &mut values).expect("covered");
    values
}

fn assert_bits(a: &[f32], b: &[f32], who: &str) {
    assert_eq!(a.len(), b.len(), "{who}");
    if let Some(i) = (0..a.len()).find(|&i| a[i].to_bits() != b[i].to_bits()) {
        panic!("{who}: element {i} of {} is {} and {}", a.len(), a[i], b[i]);
    }
}

/// ||a - b|| / ||b|| of each parameter is at most `most`. Padding belongs to no parameter.
fn assert_near(role: &str, head: Head, a: &[f32], b: &[f32], most: f64) {
    let (_, weights) = load::load(Device::Cpu, &place().join("model"), head, DType::F32, 42).expect("the model loads");
    for spec in weights.table.specs() {
        let pairs = || a[spec.range()].iter().zip(&b[spec.range()]);
        let norm = pairs().map(|(_, y)| f64::from(*y).powi(2)).sum::<f64>().sqrt();
        let apart = pairs().map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum::<f64>().sqrt();
        assert!(norm > 0.0, "{role} {}: no gradient at all", spec.name);
        assert!(apart <= most * norm, "{role} {}: {apart:e} apart, norm {norm:e}", spec.name);
    }
}

/// One update without a clip leaves (1 - beta1) g in AdamW's first moment: the gradient itself.
#[test]
fn equal_weights_give_equal_samples_losses_and_gradients_on_1_2_3_and_4_ranks() {
    let jobs: Vec<Job> = (1..=4)
        .map(|ranks| {
            let job = Job::ppo(&format!("ranks-{ranks}")).on(ranks).with(
                "job.steps=1 ppo.epochs=1 ppo.minibatch_samples=16 ppo.aggregation=sequence ppo.entropy_coef=0.01 \
                 optim.actor.clip_norm=0 optim.critic.clip_norm=0",
            );
            job.done()
        })
        .collect();
    let alone = &jobs[0];
    let step = &alone.rollouts()["step_000001"];
    let lengths: std::collections::BTreeSet<i64> =
        step.whole("response_offsets").windows(2).map(|w| w[1] - w[0]).collect();
    assert!(lengths.len() > 2, "responses of several lengths: {lengths:?}");
    for (job, ranks) in jobs.iter().zip(1..).skip(1) {
        step.assert_same(&job.rollouts()["step_000001"], &format!("samples on {ranks} ranks"));
        let (mine, theirs) = (&job.timeless_metrics()[0], &alone.timeless_metrics()[0]);
        assert_eq!(mine.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
        for (key, value) in theirs {
            let (a, b) = (mine[key].as_f64().expect("a number"), value.as_f64().expect("a number"));
            assert!((a - b).abs() <= 1e-5 * b.abs(), "{key} on {ranks} ranks: {a} against {b}");
        }
        for (role, head) in [("actor", Head::LanguageModel), ("critic", Head::Value)] {
            let gradient = |job| vector(job, 1, &format!("{role}.m"));
            assert_near(role, head, &gradient(job), &gradient(alone), 1e-5);
        }
    }
    assert!(alone.numbers("policy_loss")[0].abs() > 1e-4, "a loss that is not 0 by itself");
}

fn assert_all_equal(jobs: &[Job], step: u64, roles: &[&str]) {
    for job in &jobs[1..] {
        for role in roles {
            for what in ["weights", "m", "v"] {
                let name = format!("{role}.{what}");
                assert_bits(&vector(job, step, &name), &vector(&jobs[0], step, &name), &name);
            }
        }
        assert!(job.read("export/model.safetensors") == jobs[0].read("export/model.safetensors"), "the export");
    }
}

#[test]
fn ten_ppo_steps_in_fixed_gradient_order_are_bitwise_equal_on_1_2_and_4_ranks() {
    let jobs = [1, 2, 4].map(|ranks| {
        let job = Job::ppo(&format!("fixed-{ranks}"));
        job.on(ranks).with("job.steps=10 gradient.order=fixed eval.every_steps=5 checkpoint.every_steps=0").done()
    });
    assert_all_equal(&jobs, 10, &["actor", "critic"]);
    for job in &jobs[1..] {
        job.assert_same(&jobs[0]);
    }
    let start = std::fs::read(place().join("model/model.safetensors")).expect("the model");
    assert!(jobs[0].read("export/model.safetensors") != start, "the run has learned something");
}

#[test]
fn bf16_steps_in_fixed_gradient_order_are_bitwise_equal_on_1_and_2_ranks() {
    let jobs = [1, 2].map(|ranks| {
        let job = Job::ppo(&format!("fixed-bf16-{ranks}"));
        job.on(ranks).with("job.steps=3 gradient.order=fixed model.dtype=bf16 checkpoint.every_steps=0").done()
    });
    assert_all_equal(&jobs, 3, &["actor", "critic"]);
}

#[test]
fn ten_sft_steps_in_fixed_gradient_order_are_bitwise_equal_on_1_2_and_4_ranks() {
    let jobs = [1, 2, 4].map(|ranks| {
        let job = Job::sft(&format!("sft-fixed-{ranks}"));
        job.on(ranks).with("job.steps=10 gradient.order=fixed checkpoint.every_steps=0").done()
    });
    assert_all_equal(&jobs, 10, &["actor"]);
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks_bitwise_in_fixed_gradient_order() {
    let whole = Job::ppo("moves-whole").with("gradient.order=fixed").done();
    let moved = Job::ppo("moves").with("gradient.order=fixed");
    let stopped = moved.clone().on(2).with("checkpoint.max_hours=1e-9").run();
    stopped.assert(85, &["stopped at step 0 (checkpoint.max_hours are over)"]);
    let stopped = moved.clone().with("checkpoint.max_hours=1e-9").run();
    stopped.assert(85, &["stopped at step"]);
    moved.clone().on(4).done().assert_same(&whole);
}
