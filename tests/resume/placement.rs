//! Roles on separate rank ranges.

use crate::resume::job::Job;

/// Actor and reference on two ranks, critic and reward on the next `more`.
fn placed(name: &str, more: usize) -> Job {
    Job::ppo(name).placed(&[("actor reference", 2), ("critic reward", more)])
}

/// Each placement is a mesh of two ranks, like the one with all roles. A run resumes with other placements and with
/// none.
#[test]
fn roles_on_separate_ranks_equal_roles_on_the_same_ranks_bitwise() {
    for (i, sets) in ["", "mesh.tensor=1 mesh.zero=3 rollout.tensor=2", "mesh.pipeline=2"].into_iter().enumerate() {
        let together = Job::ppo(&format!("together-{i}")).on(2).with(sets).done();
        let apart = placed(&format!("apart-{i}"), 2).with(sets).done();
        apart.assert_same(&together);
        assert_idle_shares(&apart, &together);
        let resumed = format!("places-resumed-{i}");
        apart.rewound(&resumed, 2);
        Job::ppo(&resumed).on(2).with(sets).done().assert_same(&together);
    }
    assert_eq!(placed("places-uneven", 1).done().metrics().len(), 4);
}

fn assert_idle_shares(apart: &Job, together: &Job) {
    for (line, together) in apart.metrics().iter().zip(together.metrics()) {
        for key in ["idle_ratio_actor", "idle_ratio_critic"] {
            let share = line[key].as_f64().expect("a number");
            assert!((0.0..=1.0).contains(&share), "{key} is {share}");
            assert!(!together.contains_key(key), "no role waits if all are on the same ranks");
        }
        for key in ["time_rollout_s", "time_reward_s", "time_score_s", "time_train_s"] {
            assert!(line[key].as_f64().is_some_and(|seconds| seconds > 0.0), "{key}");
        }
    }
}
