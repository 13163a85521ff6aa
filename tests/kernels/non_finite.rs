//! NaN that a kernel leaves in the middle of a run (`EMULATED_SPOILS`, driver/spoils.h): the job ends in the step in which it
//! arises, with the operation, layer or weight told where it began; what is committed holds none, and goes on.

use crate::failing::{self, TENSOR, ZERO, goes_on, judged};
use crate::jobs::{CONFIG, emulated};
use std::path::Path;

/// A job in which a kernel leaves NaN, as `spoils` says.
fn job(at: &Path, ranks: usize, name: &str, spoils: &str, sets: &[&str]) -> failing::Ended {
    let ended = failing::job(at, ranks, name, "", sets, &[("EMULATED_SPOILS", spoils)]);
    eprintln!("{spoils}: exit {:?}: {}", ended.code(), ended.error());
    ended
}

/// Of one rank: what leaves NaN, settings, words of the error.
const CASES: [(&str, &[&str], &[&str]); 6] = [
    (
        // A graph's: once.
        "rope_rotate:16:1",
        &[],
        &[
            "error: step 2, rollout: the logits after ",
            " are not finite, and they are in a forward over its tokens",
            "Xid",
        ],
    ),
    (
        "rope_rotate:16+:1",
        &[],
        &[
            "error: step 2, rollout: the logits after ",
            " are not finite: the first of a forward over its tokens is ",
            "all weights are finite",
            "hint: weights that are finite have grown ",
        ],
    ),
    (
        "rope_rotate:23+:1",
        &[],
        &[
            "error: step 2, train: critic: the loss of update 3 is not finite: ",
            "the first of its forward is keys of layer 0, row 0, all weights are finite",
        ],
    ),
    (
        "rope_rotate:23:1",
        &[],
        &["error: step 2, train: critic: the loss of update 3 is not finite, and its forward is where ", "Xid"],
    ),
    (
        "swiglu_backward:6+:3",
        &[],
        &[
            "error: step 2, train: critic: the gradient of update 3 is not finite: ",
            "that of model.layers.0.mlp.gate_proj.weight is the first, and that of model.layers.0.mlp.up_proj.weight before ",
        ],
    ),
    (
        "adamw_step:16:0",
        &[],
        &["error: step 2, checkpoint: a weight of the critic's model.embed_tokens.weight is NaN, and no checkpoint "],
    ),
];

#[test]
fn what_a_kernel_leaves_that_is_no_number_ends_the_run_where_it_arises_and_the_last_checkpoint_goes_on() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    for (i, (spoils, sets, words)) in CASES.into_iter().enumerate() {
        let name = format!("one-{i}");
        let ended = job(at, 1, &name, spoils, sets);
        judged(at, &name, &ended, 1, words).unwrap_or_else(|why| panic!("{spoils}: {why}"));
        assert!(at.join(&name).join("checkpoints/step-1").exists(), "{spoils}: nothing was committed");
        assert!(!at.join(&name).join("checkpoints/step-2").exists(), "{spoils}: NaN was committed");
        goes_on(at, 1, &name, sets).unwrap_or_else(|why| panic!("{spoils}: {why}"));
    }
}

#[test]
fn nan_of_one_rank_ends_all_of_them_with_what_it_was() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let cases: [(&str, &[&str], &[&str]); 2] = [
        ("adamw_step:1+:0@1", &TENSOR, &["rank 1 (", "checkpoint: ", " is NaN, and no checkpoint is made of that"]),
        ("swiglu_backward:1+:3@1", &ZERO, &["train: ", "the gradient of update 1 is not finite: "]),
    ];
    for (i, (spoils, sets, words)) in cases.into_iter().enumerate() {
        let name = format!("two-{i}");
        let ended = job(at, 2, &name, spoils, sets);
        judged(at, &name, &ended, 1, words).unwrap_or_else(|why| panic!("{spoils}: {why}"));
    }
}
