//! Every estimator, loss and option through whole steps.

use crate::cli::command;
use crate::resume::job::{Job, place};
use rlhf_hpc::checkpoint::{Checkpoint, SavedVector};
use serde_json::{Value, json};

/// Runs alone with `sets`; every number that was recorded is finite, and sampling and training agree to the bit.
fn steps(name: &str, sets: &str) -> Job {
    let job = Job::ppo(name).with("job.steps=2 checkpoint.every_steps=0").with(sets).done();
    let lines = job.metrics();
    assert_eq!(lines.len(), 2, "{name}");
    for line in &lines {
        for (key, value) in line {
            assert!(value.as_f64().is_some_and(f64::is_finite), "{name}: {key} is {value}");
        }
    }
    assert_eq!(job.numbers("logprob_gap_max"), [0.0, 0.0], "{name}");
    let start = std::fs::read(place().join("model/model.safetensors")).expect("the model");
    assert!(job.read("export/model.safetensors") != start, "{name} has learned nothing");
    job
}

/// Every loss, aggregation, filter and way to shape scores is in one of these jobs.
const MIXED: [(&str, &str); 8] = [
    (
        "clip",
        "ppo.loss=clip ppo.aggregation=sequence_sum_fixed ppo.advantage=grpo ppo.dual_clip=3.0 rollout.temperature=1.3 \
         rollout.repetition_penalty=1.3 rollout.samples_per_prompt=4",
    ),
    (
        "gspo",
        "ppo.loss=gspo ppo.aggregation=sequence ppo.advantage=dr-grpo rollout.top_k=50 \
         rollout.top_p=0.9 rollout.min_p=0.01",
    ),
    (
        "cispo",
        "ppo.loss=cispo ppo.aggregation=token ppo.advantage=rloo ppo.kl_in=none rollout.batch_max=3 \
         rollout.prefill_tokens_max=5 rollout.samples_per_prompt=3",
    ),
    (
        "sapo",
        "ppo.loss=sapo ppo.advantage=reinforce++-baseline ppo.correction=icepop model.dtype=bf16 rollout.top_k=30 \
         rollout.temperature=0.8 gradient.recompute=true",
    ),
    (
        "shaped",
        "ppo.reward_normalize=true ppo.truncated_score_coef=0.5 ppo.reward_clip=[-1.0,1.0] ppo.kl_estimator=k2 ppo.kl_coef=0.2",
    ),
    (
        "masked",
        "ppo.loss=masked ppo.clip_low=0.3 ppo.clip_high=5.0 ppo.lambda_alpha=1.5 ppo.critic_epochs=3 ppo.mask_truncated=true \
         rollout.samples_per_prompt=1 model.critic_freeze=[\"attention\"]",
    ),
    ("trust", "ppo.loss=sequence_trust ppo.advantage=flash-reinforce ppo.kl_in=none rollout.samples_per_prompt=1"),
    ("bootstrap", "ppo.truncation=bootstrap ppo.gamma=0.9 ppo.lambda=0.9"),
];

#[test]
fn every_loss_estimator_and_filter_runs_with_a_log_probability_gap_of_0() {
    for (name, sets) in MIXED {
        steps(&format!("mixed-{name}"), sets);
    }
}

#[test]
fn the_kl_acts_in_reward_in_loss_or_nowhere_and_its_weight_adapts() {
    let job = steps("kl-none-measured", "ppo.kl_in=none model.reference=model");
    assert!(job.numbers("kl_mean")[1] != 0.0, "a reference that is named is measured");
    let job = steps("kl-loss", "ppo.kl_in=loss ppo.kl_estimator=k3 ppo.kl_coef=0.1");
    assert!(job.numbers("kl_loss")[1] > 0.0);
    let sets =
        "ppo.kl_target=1.0 ppo.kl_horizon=100 ppo.kl_coef=0.2 ppo.overlong_buffer_tokens=6 ppo.overlong_penalty=2.0";
    let job = steps("kl-adaptive", sets);
    // KL 0 in the first step is below the target: error -1, cut to -0.2, over 16 samples of a horizon of 100.
    let beta = job.numbers("kl_coef");
    assert!((beta[0] - 0.2).abs() < 1e-7 && (beta[1] - 0.2 * (1.0 - 0.2 * 0.16)).abs() < 1e-7, "{beta:?}");
    let rewards = job.numbers("reward_mean");
    assert!(rewards[0] < job.numbers("score_mean")[0], "the penalty up to response_tokens_max acts: {rewards:?}");
}

#[test]
fn with_a_kept_sampling_mask_training_and_reference_use_the_sampled_distribution() {
    for (name, filter) in [("k", "top_k=5"), ("p", "top_p=0.7"), ("min-p", "min_p=0.1")] {
        let sets = format!("rollout.{filter} rollout.keep_sampling_mask=true ppo.epochs=1 ppo.minibatch_samples=16");
        let job = steps(&format!("mask-{name}"), &sets);
        let arrays = &job.rollouts()["step_000001"];
        let mut pairs = arrays["logprobs"].iter().zip(&arrays["sample_logprobs"]);
        assert!(pairs.all(|(old, drawn)| (old - drawn).abs() < 1e-5), "{filter}: the sample's own");
        assert!(arrays["logprobs"] == arrays["ref_logprobs"], "{filter}: the reference is the actor yet");
        if name == "k" {
            let plain = steps("mask-none", &format!("rollout.{filter}"));
            let of = |job: &Job| job.numbers("entropy")[0];
            assert!(of(&job) < of(&plain), "a part of the vocabulary is less uncertain");
        }
    }
}

#[test]
fn the_baseline_of_remax_is_the_score_of_the_greedy_response_which_is_not_learned_from() {
    let sets = "ppo.advantage=remax ppo.kl_in=none rollout.stop_token_ids=[]";
    let job = steps("remax", sets);
    let arrays = &job.rollouts()["step_000001"];
    let whole = |name: &str| arrays[name].iter().map(|&x| x as usize).collect::<Vec<usize>>();
    let (starts, prompts) = (whole("token_offsets"), whole("prompt_tokens"));
    assert_eq!((prompts.len(), job.numbers("samples")[0]), (16, 16.0), "the greedy responses are none of the samples");
    let prompt = |i: usize| &arrays["tokens"][starts[i]..starts[i] + prompts[i]];
    let rows = (0..16).step_by(2).map(|i| json!({"tokens": prompt(i).iter().map(|&t| t as u32).collect::<Vec<_>>()}));
    std::fs::write(job.dir.join("prompts.jsonl"), rows.map(|row| row.to_string() + "\n").collect::<String>())
        .expect("writes");
    let input = job.dir.join("prompts.jsonl").display().to_string();
    let verb = ["generate", "--model", "model", "--input", &input, "--max-new-tokens", "12", "--temperature", "0"];
    let greedy = command::run(place(), &verb).well().stdout;
    let score = |line: &Value| {
        f64::from(u8::from(line["text"].as_str().expect("a text").contains(|c: char| "0123456789abcdef".contains(c))))
    };
    let baselines: Vec<f64> = command::rows(&greedy).iter().map(score).collect();
    assert_eq!(baselines.len(), 8);
    for (i, first) in whole("response_offsets")[..16].iter().enumerate() {
        let wanted = arrays["score"][i] - baselines[i / 2];
        assert!((arrays["advantages"][*first] - wanted).abs() < 1e-6, "sample {i}: not {wanted}, {baselines:?}");
    }
    let mean = baselines.iter().sum::<f64>() / 8.0;
    assert!((job.numbers("score_greedy_mean")[0] - mean).abs() < 1e-9, "{baselines:?}");
}

#[test]
fn the_actor_keeps_its_weights_to_the_bit_while_the_critic_warms_up() {
    let job = Job::ppo("warm-up").with("ppo.critic_warmup_steps=2 job.steps=3 checkpoint.keep_last=0").done();
    let of = |step: u64, name: &str| vector(&job, step, name);
    assert!(of(1, "actor.weights") == of(2, "actor.weights") && of(2, "actor.weights") != of(3, "actor.weights"));
    assert!(of(2, "actor.m").iter().all(|m| *m == 0.0), "the optimizer has not begun");
    assert!(of(1, "critic.weights") != of(2, "critic.weights"));
    let start = std::fs::read(place().join("model/model.safetensors")).expect("the model");
    let out = job.dir.join("warmed").display().to_string();
    let from = job.checkpoints().join("step-2").display().to_string();
    command::run(place(), &["export", &from, "--out", &out]).well();
    assert!(
        job.read("warmed/model.safetensors").ends_with(&start[start.len() - 4096..]),
        "these are the first weights"
    );
    assert_eq!((job.numbers("lr_actor").len(), job.numbers("lr_critic").len()), (1, 3));
}

/// A flat vector of a checkpoint.
pub fn vector(job: &Job, step: u64, name: &str) -> Vec<f32> {
    let checkpoint = Checkpoint::open(&job.checkpoints().join(format!("step-{step}"))).expect("it was committed");
    let mut values = vec![0.0; checkpoint.vector_len(name).unwrap_or_else(|| panic!("{name} was saved"))];
    let len = values.len();
    SavedVector::open(&checkpoint, name, len).and_then(|saved| saved.read(0..len, &mut values)).expect("covered");
    values
}

#[test]
fn the_moving_average_covers_the_weights_after_each_step_and_is_exported_with_them() {
    let job = Job::sft("averaged").with("checkpoint.every_steps=1 checkpoint.keep_last=0");
    // The average starts at the initial weights.
    job.clone().with("job.steps=1").done();
    let job = job.with("job.steps=4 optim.actor.ema_beta=0.9").done();
    let mut average = vector(&job, 1, "actor.weights");
    for step in 2..=4 {
        for (average, weight) in average.iter_mut().zip(vector(&job, step, "actor.weights")) {
            *average = 0.9f32.mul_add(*average, (1.0 - 0.9) * weight);
        }
        assert!(average == vector(&job, step, "actor.ema"), "step {step}");
    }
    let still = Job::sft("averaged-still").with("job.steps=2 optim.actor.lr=0 optim.actor.ema_beta=0.9").done();
    let same = vector(&still, 2, "actor.ema").into_iter().zip(vector(&still, 2, "actor.weights"));
    assert!(same.into_iter().all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs()), "it begins with the first weights");
    let (run, out) = (job.dir.display().to_string(), job.dir.join("of-the-verb"));
    command::run(place(), &["export", &run, "--ema", "--out", &out.display().to_string()]).well();
    let [mine, verb, last] =
        ["export-ema", "of-the-verb", "export"].map(|dir| job.read(&format!("{dir}/model.safetensors")));
    assert!(mine == verb && mine != last);
    let none = [
        "export",
        &Job::sft("averaged-none").with("job.steps=1").done().dir.display().to_string(),
        "--ema",
        "--out",
        "x",
    ];
    command::run(place(), &none).refused(65, &["has no average of the actor"]);
}

/// Uses the arena's counts: a step that kept a buffer would raise the peak of every later step.
#[test]
fn the_memory_of_steps_of_equal_size_does_not_grow() {
    let rows = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| format!("{{\"prompt\": \"{i}+{i}=\"}}\n")).concat();
    let file = place().join("equal.jsonl");
    std::fs::write(&file, rows).expect("writes");
    let sets = "job.steps=9 data.prompts=[\"equal.jsonl\"] data.prompt_split= data.eval_split= rollout.ignore_eos=true \
                rollout.stop_token_ids=[] ppo.minibatch_samples=4";
    let peaks = Job::ppo("steady").with(sets).done().numbers("memory_arena_peak_bytes");
    assert_eq!(peaks.len(), 9);
    assert!(peaks[2] > 0.0 && peaks[2..].iter().all(|peak| *peak == peaks[2]), "{peaks:?}");
}
