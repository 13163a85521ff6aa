//! Whole jobs whose responses have several turns: equal on any ranks and after an interruption, and the handling of
//! failed turns.

use crate::resume::async_rollout::ahead;
use crate::resume::job::{Job, place};
use rlhf_hpc::experience::parts;
use rlhf_hpc::metrics::rollouts::step_path;
use rlhf_hpc::metrics::step_file::{RecordedSample, StepFile};

/// Writes back how long a turn was; the reward is the share of even lengths. Over after the third turn.
const ENVIRONMENT: &str = r#"
import os
class Lengths:
    def reset(self, prompt, sample):
        self.n, self.prompt, self.sample = 0, prompt, sample
    def step(self, text, tokens):
        self.n += 1
        if os.path.exists("broken") and self.sample == 1 and self.n == 2:
            bad = open("broken").read()
            if bad:
                return eval(bad), 0.0, False
            raise RuntimeError("the tool is broken")
        return f"({len(tokens)})", float(len(tokens) % 2 == 0), self.n == 3
"#;

fn job(name: &str) -> Job {
    with_environment(name, Job::ppo(&format!("environment-{name}")))
}

fn with_environment(name: &str, job: Job) -> Job {
    let dir = place().join(format!("environment-{name}"));
    std::fs::create_dir_all(&dir).expect("a directory");
    std::fs::write(dir.join("env.py"), ENVIRONMENT).expect("writes");
    let sets = "job.steps=3 reward.rule=[] reward.retries=0 rollout.response_tokens_max=40";
    let environment = format!("reward.environment={{python=\"{}\",turns_max=5}}", dir.join("env.py").display());
    job.with(sets).set(environment)
}

fn broken(name: &str) -> std::path::PathBuf {
    place().join(format!("environment-{name}/broken"))
}

#[test]
fn turns_equal_those_of_one_rank_bitwise_and_resume_after_an_interruption() {
    let alone = job("alone").with("gradient.order=fixed").done();
    let two = job("two").on(2).with("gradient.order=fixed").done();
    two.assert_same(&alone);
    let turns = alone.numbers("reward/turns");
    assert!(turns.len() == 3 && turns.iter().all(|turns| *turns > 1.5 && *turns <= 3.0), "{turns:?}");
    assert!(alone.numbers("logprob_gap_max").iter().all(|gap| *gap == 0.0), "sampled tokens have training's bits");
    for (step, arrays) in alone.rollouts() {
        let mask = &arrays["mask"];
        let given = mask.iter().filter(|m| **m == 0.0).count();
        assert!(given > 20 && given < mask.len() / 2, "{step}: {given} of {}", mask.len());
        for key in ["advantages", "rewards", "kl", "sample_logprobs"] {
            let values = arrays[key].iter().zip(mask);
            assert!(values.clone().all(|(x, m)| *m == 1.0 || *x == 0.0), "{step}: {key} where mask is 0");
            // Before the first update the policy equals its reference.
            let is_all_zero = key == "kl" && step.ends_with('1');
            assert!(is_all_zero || values.clone().any(|(x, m)| *m == 1.0 && *x != 0.0), "{step}: {key}");
        }
    }
    two.rewound("environment-again", 1).done().assert_same(&alone);
    // Tensor ranks send one request, and all of them get its answer.
    let tensor = job("tensor").on(2).with("mesh.tensor=2 job.steps=1").done();
    assert_eq!(tensor.numbers("reward/turns")[0], turns[0]);
    assert_eq!(tensor.numbers("score_mean"), alone.numbers("score_mean")[..1]);
}

#[test]
fn turns_of_an_async_rollout_are_equal_on_any_ranks_and_resume_bitwise() {
    let job =
        |name: &str, trains, samples| with_environment(name, ahead(&format!("environment-{name}"), trains, samples));
    let whole = job("ahead", 1, 1).done();
    assert!(whole.numbers("reward/turns").iter().all(|turns| *turns > 1.5), "{:?}", whole.numbers("reward/turns"));
    let wide = job("ahead-wide", 1, 2).done();
    assert_eq!(wide.timeless_metrics(), whole.timeless_metrics());
    assert_eq!(wide.rewound("environment-ahead-again", 1).done().timeless_metrics(), whole.timeless_metrics());
}

#[test]
fn a_turn_that_fails_stops_the_run_or_drops_its_response_as_declared() {
    std::fs::create_dir_all(broken("stop").parent().expect("a place")).expect("a directory");
    let whole = job("whole").on(2).done();
    let stopped = job("stop").on(2);
    std::fs::write(broken("stop"), "").expect("writes");
    stopped.run().assert(75, &["environment Lengths of", "RuntimeError: the tool is broken"]);
    std::fs::remove_file(broken("stop")).expect("it was written");
    stopped.done().assert_same(&whole);
    let dropped = job("drop").with("reward.on_failure=drop");
    std::fs::write(broken("drop"), "").expect("writes");
    let dropped = dropped.done();
    let samples: Vec<f64> =
        dropped.numbers("samples").into_iter().zip(dropped.numbers("samples_dropped")).map(|(a, b)| a + b).collect();
    assert!(samples == [16.0; 3] && dropped.numbers("samples_dropped")[0] > 4.0, "{samples:?}");
}

#[test]
fn an_answer_that_the_model_cannot_read_counts_as_failed() {
    for (i, (answer, why)) in [
        ("[999999]", "its feedback has the token 999999, but the model's vocabulary has only"),
        ("[-1]", "its answer does not follow the protocol"),
        ("[{'role': 'tool', 'content': 'x'}]", "its feedback cannot be tokenized"),
    ]
    .into_iter()
    .enumerate()
    {
        let (stop, drop) = (format!("unusable-{i}"), format!("unusable-drop-{i}"));
        let stopped = job(&stop);
        std::fs::write(broken(&stop), answer).expect("writes");
        stopped.run().assert(75, &["environment Lengths of", "failed after 1 attempt: ", why]);
        std::fs::remove_file(broken(&stop)).expect("it was written");
        stopped.done().assert_same(&job("unusable-whole").done());
        let dropped = job(&drop).with("job.steps=1 reward.on_failure=drop reward.retries=1");
        std::fs::write(broken(&drop), answer).expect("writes");
        dropped.run().assert(0, &["because a reward failed on", why]);
    }
}

#[test]
fn the_environment_is_named_at_the_start_and_its_text_is_marked() {
    let job = job("seen").with("job.steps=1 metrics.samples_every_steps=1");
    let ended = job.run();
    ended.assert(0, &["rewards      environment ", "env.py"]);
    assert!(ended.stderr.contains("[environment: ("), "{}", ended.stderr);
    let step = StepFile::open(&step_path(&job.dir, 1), 1).expect("opens");
    let samples = step.samples().expect("reads");
    let of = |sample: &RecordedSample| -> Vec<String> {
        let parts = parts(&sample.response, &sample.environment);
        parts.into_iter().filter(|(_, given)| *given).map(|(part, _)| part).collect()
    };
    let given: Vec<String> = samples.iter().flat_map(of).collect();
    assert!(given.len() > 16 && given.iter().all(|part| part.starts_with('(') && part.ends_with(')')), "{given:?}");
}
