//! Keys and values in 8 bits (`rollout.kv_dtype`): sampling and training agree to the bit on every layout, for every
//! family, and after a resume.

use crate::cli::command::run;
use crate::resume::families;
use crate::resume::job::{Job, place};
use serde_json::Value;

const SETS: &str = "rollout.kv_dtype=fp8 job.steps=2 ppo.minibatch_samples=16 rollout.response_tokens_max=16 \
                    rollout.prefill_tokens_max=16 checkpoint.every_steps=1 eval.every_steps=2";

fn job(name: &str, sets: &str) -> Job {
    Job::ppo(&format!("rounded-{name}")).with(SETS).with(sets)
}

/// No gap in any step, and no divergence from a reference with the policy's weights.
fn assert_exact(job: &Job, what: &str) {
    assert_eq!(job.numbers("logprob_gap_max"), [0.0; 2], "{what}");
    let step = &job.rollouts()["step_000001"];
    if let Some(reference) = step.get("ref_logprobs") {
        assert!(step["logprobs"] == *reference, "{what}: the reference is the policy yet");
    }
}

/// The evaluation's measurements: the mean change of a log-probability, and the divergence.
fn measured(job: &Job) -> [f64; 2] {
    let found = ["eval_kv_logprob_gap_mean", "eval_kv_kl_mean"].map(|key| job.numbers(key));
    found.map(|numbers| *numbers.last().unwrap_or_else(|| panic!("{}: no evaluation", job.dir.display())))
}

#[test]
fn a_job_with_rounded_keys_samples_as_it_trains_and_resumes_and_replays_bitwise() {
    for (name, sets) in [
        ("plain", "ppo.epochs=1"),
        ("grpo", "ppo.advantage=grpo ppo.kl_in=loss ppo.kl_estimator=k3 gradient.recompute=block model.dtype=bf16"),
        ("lora", "lora.rank=2 lora.alpha=4 optim.actor.lr=0.02 gradient.recompute=attention"),
        ("beams", "eval.beams=3 rollout.prompts_per_step=4 rollout.samples_per_prompt=4 rollout.batch_max=5"),
    ] {
        let whole = job(name, sets).done();
        assert_exact(&whole, name);
        let [gap, kl] = measured(&whole);
        assert!(gap > 1e-5 && gap < 0.2 && kl > 0.0 && kl < 0.05, "{name}: {gap}, {kl}");
        let stopped = job(&format!("{name}-stopped"), sets);
        stopped.clone().with("checkpoint.max_hours=1e-9").run().assert(85, &["stopped at step"]);
        stopped.done().assert_same(&whole);
        let text = run(place(), &["replay", whole.dir.to_str().expect("UTF-8"), "--step", "2"]).well().stdout;
        assert!(text.contains("\nequal to the bit: step 2, "), "{name}: {text}");
    }
    let [rounded, exact] = ["fp8", "auto"].map(|kv| {
        let sets = format!("rollout.kv_dtype={kv} job.steps=1 rollout.temperature=1.0");
        job(&format!("as-{kv}"), &sets).done()
    });
    assert!(rounded.rollouts()["step_000001"]["logprobs"] != exact.rollouts()["step_000001"]["logprobs"]);
    assert!(exact.numbers("eval_kv_kl_mean").is_empty(), "nothing is rounded");
    let of_run = job("plain-evaluated", "job.kind=eval eval.temperature=1.0 model.actor=runs/rounded-plain").done();
    let [gap, kl] = measured(&of_run);
    assert!(gap > 1e-5 && kl > 0.0, "{gap}, {kl}");
}

#[test]
fn rounded_keys_are_those_of_one_rank_on_any_layout() {
    let sets = "ppo.epochs=1 ppo.kl_in=loss ppo.kl_estimator=k3";
    let alone = job("alone", sets).done();
    for (i, (ranks, layout)) in [
        (2, "mesh.zero=3"),
        (2, "mesh.tensor=2"),
        (4, "mesh.sequence=2 mesh.zero=2"),
        (2, "mesh.pipeline=2"),
        (4, "mesh.pipeline=2 mesh.tensor=2 rollout.tensor=4"),
        (
            2,
            "mesh.placement=[{roles=[\"actor\",\"critic\",\"reference\",\"reward\"],ranks=\"0..1\"},{roles=[\"rollout\"],ranks=\"1..2\"}]",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let job = job(&format!("layout-{i}"), sets).on(ranks).with(layout).done();
        let first = |job: &Job, what: &str| job.rollouts()["step_000001"][what].clone();
        assert_eq!(first(&job, "tokens"), first(&alone, "tokens"), "{layout}");
        assert_eq!(job.numbers("logprob_gap_max"), [0.0; 2], "{layout}");
        for (a, b) in measured(&job).into_iter().zip(measured(&alone)) {
            assert!((a - b).abs() <= 0.1 * b, "{layout}: {a} against {b}");
        }
        for key in ["loss", "grad_norm", "kl_loss"] {
            let [a, b] = [&job, &alone].map(|job| job.numbers(key).first().copied());
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-4 * b.abs().max(0.1);
            assert!(a.zip(b).is_none_or(|(a, b)| near(a, b)), "{key} on {layout}: {a:?} against {b:?}");
        }
    }
}

#[test]
fn families_with_windows_experts_latents_states_sinks_or_caps_round_their_keys_as_they_train() {
    for family in ["gemma2", "phi3-long", "mixtral", "deepseek_v3", "qwen3_5_text", "gpt_oss"] {
        let made = format!("rounded-{family}");
        families::make(family, &made);
        let whole = job(family, &format!("model.actor={made} rollout.response_tokens_max=24")).done();
        assert_exact(&whole, family);
        let [gap, kl] = measured(&whole);
        assert!(gap > 0.0 && kl >= 0.0, "{family}: {gap}, {kl}");
    }
}

#[test]
fn a_plan_has_a_quarter_of_the_cache_of_f32_and_a_power_for_each_head() {
    let bytes = |kv: &str| {
        let kv = format!("rollout.kv_dtype={kv}");
        let plan = run(place(), &["plan", "job.toml", "--ranks", "1", "--json", &kv]).well();
        let plan: Value = serde_json::from_str(&plan.stdout).expect("JSON");
        plan["chosen"]["placed"][0]["memory"]["kv_cache"]["bytes"].as_u64().expect("bytes")
    };
    // 9 bytes for a head of 8 values of 4 bytes.
    assert_eq!(bytes("fp8") * 32, bytes("auto") * 9);
}
