//! Runs on different numbers of ranks.

use crate::resume::job::{Job, place, verb};
use rlhf_hpc::checkpoint::{SavedVector, newest};

/// A flat vector of the last checkpoint, whatever ranks saved it.
fn bits(job: &Job, name: &str) -> Vec<u32> {
    let checkpoint = newest(&job.checkpoints()).expect("whole").expect("committed");
    let len = checkpoint.vector_len(name).unwrap_or_else(|| panic!("{name} was saved"));
    let mut values = vec![0.0f32; len];
    SavedVector::open(&checkpoint, name, len).and_then(|saved| saved.read(0..len, &mut values)).expect("covered");
    values.into_iter().map(f32::to_bits).collect()
}

#[test]
fn ppo_steps_in_fixed_gradient_order_are_bitwise_equal_on_1_2_and_4_ranks() {
    for (dtype, ranks) in [("f32", &[1, 2, 4][..]), ("bf16", &[1, 2])] {
        let sets =
            "job.steps=4 gradient.order=fixed eval.every_steps=2 checkpoint.every_steps=0 optim.actor.ema_beta=0.9";
        let job = |ranks| {
            Job::ppo(&format!("fixed-{dtype}-{ranks}")).on(ranks).with(sets).with(&format!("model.dtype={dtype}"))
        };
        let jobs: Vec<Job> = ranks.iter().map(|ranks| job(*ranks).done()).collect();
        for job in &jobs[1..] {
            job.assert_same(&jobs[0]);
            for name in ["actor.weights", "actor.m", "actor.v", "actor.ema", "critic.weights", "critic.m", "critic.v"] {
                assert!(bits(job, name) == bits(&jobs[0], name), "{dtype}: {name}");
            }
        }
        let start = std::fs::read(place().join("model/model.safetensors")).expect("the model");
        assert!(jobs[0].read("export/model.safetensors") != start, "the run has learned something");
    }
}

/// A model of four layers and a head of its own.
#[test]
fn a_run_resumes_bitwise_on_any_number_of_stages() {
    let config = std::fs::read_to_string(place().join("config.json")).expect("it was made");
    let config = config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4");
    std::fs::write(place().join("deep.json"), config).expect("writes");
    verb("init --config deep.json --tokenizer tokenizer --out deep");
    let sets = "model.actor=deep model.critic=deep gradient.order=fixed eval.every_steps=2 checkpoint.every_steps=1";
    let job = |name: &str| Job::ppo(&format!("stages-{name}")).with(sets);
    let whole = job("whole").done();
    let moved = job("moved");
    let on = |ranks, layout: &str| moved.clone().on(ranks).with(layout);
    let stopped = on(4, "mesh.pipeline=4").with("checkpoint.max_hours=1e-9").run();
    stopped.assert(85, &["stopped at step 0 (checkpoint.max_hours reached)"]);
    for (ranks, layout) in [(2, "mesh.pipeline=2"), (4, "mesh.pipeline=2")] {
        on(ranks, layout).with("checkpoint.max_hours=1e-9").run().assert(85, &["stopped at step"]);
    }
    let moved = on(4, "mesh.pipeline=4").done();
    moved.assert_same(&whole);
    for name in ["actor.weights", "actor.m", "actor.v", "critic.weights", "critic.m", "critic.v"] {
        assert!(bits(&moved, name) == bits(&whole, name), "{name}");
    }
}

#[test]
fn a_run_resumes_bitwise_on_another_number_of_ranks_in_fixed_gradient_order() {
    let sets = "gradient.order=fixed ppo.ptx_coef=0.1 data.pretrain=[\"texts.jsonl\"] optim.actor.ema_beta=0.9";
    let whole = Job::ppo("moves-whole").with(sets).done();
    let moved = Job::ppo("moves").with(sets);
    let stopped = moved.clone().on(2).with("checkpoint.max_hours=1e-9").run();
    stopped.assert(85, &["stopped at step 0 (checkpoint.max_hours reached)"]);
    let stopped = moved.clone().with("checkpoint.max_hours=1e-9").run();
    stopped.assert(85, &["stopped at step"]);
    let moved = moved.clone().on(4).done();
    moved.assert_same(&whole);
    assert!(moved.read("export-ema/model.safetensors") == whole.read("export-ema/model.safetensors"), "the average");
    assert_eq!(moved.numbers("ptx_loss").len(), 4);
}
