//! Runs on different numbers of ranks.

use crate::resume::job::{Job, place};
use rlhf_hpc::checkpoint::Checkpoint;

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
fn ppo_steps_in_fixed_gradient_order_are_bitwise_equal_on_1_2_and_4_ranks() {
    let jobs = [1, 2, 4].map(|ranks| {
        let job = Job::ppo(&format!("fixed-{ranks}"));
        job.on(ranks).with("job.steps=4 gradient.order=fixed eval.every_steps=2 checkpoint.every_steps=0").done()
    });
    assert_all_equal(&jobs, 4, &["actor", "critic"]);
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
fn a_run_goes_on_with_another_number_of_ranks_bitwise_in_fixed_gradient_order() {
    let whole = Job::ppo("moves-whole").with("gradient.order=fixed").done();
    let moved = Job::ppo("moves").with("gradient.order=fixed");
    let stopped = moved.clone().on(2).with("checkpoint.max_hours=1e-9").run();
    stopped.assert(85, &["stopped at step 0 (checkpoint.max_hours are over)"]);
    let stopped = moved.clone().with("checkpoint.max_hours=1e-9").run();
    stopped.assert(85, &["stopped at step"]);
    moved.clone().on(4).done().assert_same(&whole);
}
