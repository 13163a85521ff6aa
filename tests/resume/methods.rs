//! Whole jobs of every method besides PPO and SFT: equal on every axis of the mesh, equal after an interruption, and
//! able to learn.

use crate::cli::command;
use crate::resume::job::{Job, place, verb};
use rlhf_hpc::data::shard::Shard;
use serde_json::{Value, json};
use std::sync::Once;

const OF_PAIRS: &[&str] =
    &["loss", "grad_norm", "margin_mean", "chosen_reward_mean", "eval_loss", "eval_accuracy", "eval_margin_mean"];
const OF_LABELS: &[&str] = &[
    "loss",
    "accuracy",
    "grad_norm",
    "kl_mean",
    "desirable_reward_mean",
    "undesirable_reward_mean",
    "eval_loss",
    "eval_accuracy",
];
const OF_STEPS: &[&str] = &["loss", "grad_norm", "accuracy", "eval_loss", "eval_accuracy"];

const OF_TEACHERS: &[&str] = &["loss", "kl_mean", "grad_norm", "eval_loss", "eval_kl_mean"];
const OF_TEACHERS_AND_ROWS: &[&str] = &["loss", "kl_mean", "ce_mean", "grad_norm", "eval_loss", "eval_kl_mean"];

/// Name and keys of a kind of job, and its metrics.
type Kind = (&'static str, &'static str, &'static [&'static str]);

const PREFERENCES: [Kind; 5] = [
    ("reward-model", "job.kind=reward_model", OF_PAIRS),
    ("dpo", "job.kind=dpo", OF_PAIRS),
    ("simpo", "job.kind=dpo dpo.loss=simpo", OF_PAIRS),
    ("kto", "job.kind=kto data.prompts=[\"labelled\"] kto.undesirable_weight=0.25", OF_LABELS),
    ("step-reward", "job.kind=step_reward data.prompts=[\"steps\"]", OF_STEPS),
];
/// On rows with two teachers, of which one is wider than the student and has a head of its own; and on the student's
/// samples.
const DISTILLATIONS: [Kind; 4] = [
    (
        "distill-rows",
        "model.teachers=[\"teacher\",\"tied\"] model.teacher_weights=[3,1] distill.temperature=1.5",
        OF_TEACHERS_AND_ROWS,
    ),
    ("distill-jsd", "model.teachers=[\"teacher\"] distill.divergence=jsd distill.ce_coef=0.0", OF_TEACHERS_AND_ROWS),
    (
        "distill-samples",
        "model.teachers=[\"teacher\",\"tied\"] distill.on_policy=true distill.divergence=reverse_kl",
        OF_TEACHERS,
    ),
    (
        "distill-sampled-tokens",
        "model.teachers=[\"tied\",\"teacher\"] distill.on_policy=true distill.divergence=reverse_kl distill.full_vocabulary=false",
        OF_TEACHERS,
    ),
];

/// The large eps makes an AdamW step smooth in the gradient, so rounding errors stay small.
const SMOOTH: &str =
    "optim.actor.eps=0.1 optim.actor.lr=0.05 optim.actor.schedule=constant optim.actor.warmup_ratio=0.0";

/// Axes of two ranks, and every stage of ZeRO.
const LAYOUTS: &[&str] = &[
    "mesh.pipeline=2",
    "mesh.data=2 mesh.zero=0",
    "mesh.sequence=2 mesh.zero=1",
    "mesh.tensor=2",
    "mesh.data=2 mesh.zero=2",
    "mesh.data=2 mesh.zero=3 mesh.offload=[\"roles\"]",
];

/// A job of a kind. Distillation has a wider teacher, and one whose head is its embedding, with other weights than the
/// student's.
fn job(name: &str, sets: &str) -> Job {
    static TEACHERS: Once = Once::new();
    if !sets.contains("model.teachers") {
        return Job::pairs(name, sets);
    }
    TEACHERS.call_once(|| {
        let config = std::fs::read_to_string(place().join("config.json")).expect("it was made");
        let wide = config.replace("\"hidden_size\": 32", "\"hidden_size\": 48").replace(": 64,", ": 96,");
        let tied = config.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
        for (name, config) in [("teacher", wide), ("tied", tied)] {
            std::fs::write(place().join(format!("{name}.json")), config).expect("writes");
            verb(&format!("init --config {name}.json --tokenizer tokenizer --out {name} --seed 9"));
        }
    });
    let rows = if sets.contains("on_policy=true") { "questions" } else { "demonstrations" };
    Job::pairs(name, &format!("job.kind=distill data.prompts=[\"{rows}\"] reward.rule=[]")).with(sets)
}

#[test]
fn steps_and_evaluations_on_any_layout_have_the_metrics_of_one_rank() {
    for (i, (name, kind, keys)) in PREFERENCES.iter().chain(&DISTILLATIONS).enumerate() {
        let job = |layout: &str| {
            let name = format!("{name}-{}", layout.replace(' ', "-"));
            job(&name, kind).with("job.steps=2 checkpoint.every_steps=0").with(SMOOTH).with(layout)
        };
        let alone = job("").done();
        // One kind of job runs on all layouts, each other kind on two.
        for layout in LAYOUTS.iter().cycle().skip(2 * i).take(if i == 0 { LAYOUTS.len() } else { 2 }) {
            let job = job(layout).on(2).done();
            for key in *keys {
                let (mine, theirs) = (job.numbers(key), alone.numbers(key));
                assert_eq!((mine.len(), theirs.is_empty()), (theirs.len(), false), "{name}: {key} on {layout}");
                // Samples may differ after an update.
                let steps = if kind.contains("on_policy") { 1 } else { mine.len() };
                for (i, (a, b)) in mine.into_iter().zip(theirs).take(steps).enumerate() {
                    let within = if i == 0 && !key.starts_with("eval") { 1e-5 } else { 1e-4 };
                    // Before the first step the policy equals its reference: any other value than 0 is rounding.
                    assert!((a - b).abs() <= within * b.abs().max(0.1), "{name}: {key} on {layout}: {a} against {b}");
                }
            }
            assert_eq!(job.numbers("bubble_ratio").is_empty(), !layout.contains("pipeline"), "{name} on {layout}");
            let rows = |job: &Job| job.eval_rows().into_values().flatten().map(|row| row.row).collect::<Vec<_>>();
            assert_eq!(rows(&job), rows(&alone), "{name}: rows of evaluations on {layout}");
            assert!(!rows(&alone).is_empty() || kind.contains("teachers"), "{name}");
        }
    }
}

#[test]
fn every_preference_method_is_planned() {
    for (_, kind, _) in PREFERENCES {
        let sets = ["data.prompts=[\"pairs\"]"].into_iter().chain(kind.split(' '));
        let plan = ["plan", "job.toml", "--ranks", "2"].into_iter().chain(sets);
        let planned = command::run(place(), &plan.collect::<Vec<_>>()).well().stdout;
        assert!(planned.contains("of the job: ") && planned.contains("peak "), "{kind}: {planned}");
    }
}

#[test]
fn a_job_of_any_kind_resumes_bitwise_on_its_layout() {
    for ((name, kind, _), layout) in PREFERENCES.iter().chain(&DISTILLATIONS).zip(LAYOUTS.iter().cycle()) {
        let whole = job(&format!("{name}-whole"), kind).on(2).with("job.steps=4").with(layout).done();
        // Stopped in the middle; and after the end, when the mean and std of a reward model's last evaluation are
        // read from its checkpoint.
        for step in if kind.contains("reward_model") { &[2, 4][..] } else { &[2] } {
            let again = whole.rewound(&format!("{name}-from-{step}"), *step).done();
            again.assert_same(&whole);
            assert!(again.read("export/config.json") == whole.read("export/config.json"), "{name} from {step}");
        }
    }
}

#[test]
fn every_preference_loss_decreases_on_repeated_rows() {
    for (sets, rises) in [
        ("reward_model", "margin_mean"),
        ("reward_model reward_model.loss=logexp", "margin_mean"),
        ("dpo dpo.label_smoothing=0.1 dpo.nll_coef=0.1", "margin_mean"),
        ("dpo dpo.loss=ipo", "margin_mean"),
        ("dpo dpo.loss=simpo", "margin_mean"),
        ("dpo dpo.loss=orpo", "margin_mean"),
        ("kto data.prompts=[\"labelled\"]", "desirable_reward_mean"),
        ("step_reward data.prompts=[\"steps\"]", "accuracy"),
    ] {
        // A step is an epoch.
        let kind = sets.split(' ').next().expect("a kind");
        let rows = if kind == "kto" { 240 } else { 120 };
        let sets = format!("job.kind={sets} job.steps=6 {kind}.minibatch_samples={rows}");
        let name = sets.replace([' ', '=', '"'], "-");
        let job = Job::pairs(&format!("pairs-{name}"), &sets).with("checkpoint.every_steps=0").done();
        let (losses, rising) = (job.numbers("loss"), job.numbers(rises));
        let has_risen = rising.last() > rising.first();
        assert!(losses.len() == 6 && losses[5] < losses[0] && has_risen, "{sets}: {losses:?}, {rising:?}");
    }
}

#[test]
fn a_reward_models_mean_and_std_are_those_of_its_scores_of_held_out_responses() {
    let job = Job::pairs("pairs-scores", "job.kind=reward_model job.steps=2").done();
    let shard = Shard::open(&place().join("pairs"), 272).expect("it was made");
    let eval = shard.sidecar().splits.iter().find(|split| split.name == "eval").expect("there is one");
    let mut rows = Vec::new();
    for i in eval.first..eval.first + eval.documents {
        let document = shard.document(i as usize).expect("whole");
        rows.extend(document[1..].iter().map(|side| json!({"prompt_tokens": document[0], "tokens": side}).to_string()));
    }
    let input = job.dir.join("held-out.jsonl");
    std::fs::write(&input, rows.join("\n")).expect("writes");
    let (export, again) = (job.dir.join("export"), job.dir.join("again"));
    let from = [&job.checkpoints().join("step-2"), &again].map(|path| path.display().to_string());
    command::run(place(), &["export", &from[0], "--out", &from[1]]).well();
    for file in ["config.json", "model.safetensors"] {
        assert!(job.read(&format!("again/{file}")) == job.read(&format!("export/{file}")), "{file} of the checkpoint");
    }
    let paths = [&export, &input].map(|path| path.to_str().expect("text"));
    let verb = ["reward", "--model", paths[0], "--input", paths[1], "--device", "cpu"];
    let scores = |more: &[&str]| -> Vec<f64> {
        let ended = command::run(place(), &[&verb, more].concat()).well();
        command::rows(&ended.stdout).iter().map(|line| line["reward"].as_f64().expect("a number")).collect()
    };
    let moments = |scores: &[f64]| {
        let n = scores.len() as f64;
        let mean = scores.iter().sum::<f64>() / n;
        [mean, (scores.iter().map(|score| (score - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt()]
    };
    let near = |got: [f64; 2], want: [f64; 2]| {
        let close = got.iter().zip(want).all(|(a, b)| (a - b).abs() <= 1e-4 * b.abs().max(1.0));
        assert!(close, "mean and std are {got:?} and not {want:?}");
    };
    let config: Value = serde_json::from_slice(&job.read("export/config.json")).expect("JSON");
    let named = ["mean", "std"].map(|key| config[key].as_f64().expect("a number"));
    let raw = scores(&[]);
    assert!(raw.len() == rows.len() && named[1] > 0.0, "{raw:?}, {named:?}");
    near(named, moments(&raw));
    near(moments(&scores(&["--normalize"])), [0.0, 1.0]);
    let (margins, last) =
        (raw.chunks(2).map(|pair| pair[0] - pair[1]).collect::<Vec<f64>>(), job.numbers("eval_accuracy"));
    let right = margins.iter().filter(|margin| **margin > 0.0).count() as f64 / margins.len() as f64;
    assert_eq!(last.last(), Some(&right), "{margins:?}");
    // The first responses are recorded with these scores.
    let recorded = job.eval_rows().remove(&2).expect("it was evaluated");
    assert!(recorded.len() == margins.len().min(32) && recorded.iter().all(|row| row.correct == (row.margin > 0.0)));
    for (row, scores) in recorded.iter().zip(raw.chunks(2)) {
        let rewards: Vec<f64> = row.responses.list().iter().map(|(_, _, reward)| *reward).collect();
        assert!(rewards.iter().zip(scores).all(|(a, b)| (a - b).abs() < 1e-4), "{row:?}, not {scores:?}");
        assert_eq!(row.margin, rewards[0] - rewards[1]);
    }
}

/// Layouts of two ranks for a job with a reward model. They differ from one rank only by the order of sums.
const SHARED: &[&str] = &[
    "mesh.data=2 mesh.zero=0",
    "mesh.tensor=2",
    "mesh.sequence=2 mesh.zero=2",
    "mesh.data=2 mesh.zero=3 mesh.offload=[\"roles\"]",
    "mesh.placement=[{roles=[\"actor\",\"reference\"],ranks=\"0..1\"},{roles=[\"critic\",\"reward\"],ranks=\"1..2\"}]",
];

#[test]
fn ppo_with_reward_models_has_the_metrics_of_one_rank_and_resumes_bitwise() {
    let trained = Job::pairs("pairs-in-the-loop", "job.kind=reward_model job.steps=2").done();
    let dir = trained.dir.join("export").display().to_string();
    let models = format!("reward.models=[{{dir=\"{dir}\",normalize=true}},{{dir=\"{dir}\",name=\"raw\",weight=0.5}}]");
    let job = |name: &str, ranks: usize, sets: &str| {
        let job = Job::ppo(&format!("against-{name}")).on(ranks).with("job.steps=2 eval.every_steps=1").with(sets);
        job.set(models.clone())
    };
    let alone = job("alone", 0, "").done();
    let keys = ["score_mean", "reward/raw", "reward/regex", "eval_reward/raw", "eval_reward_mean", "value_loss"];
    let scores: Vec<f64> = keys.iter().map(|key| alone.numbers(key)[0]).collect();
    let [sum, raw, rule] = [scores[0], scores[1], scores[2]];
    let config: Value = serde_json::from_slice(&trained.read("export/config.json")).expect("JSON");
    let [mean, std] = ["mean", "std"].map(|key| config[key].as_f64().expect("a number"));
    assert!((sum - (rule + (raw - mean) / std + 0.5 * raw)).abs() < 1e-4, "{sum} of {rule} and {raw}");
    for (i, sets) in SHARED.iter().enumerate() {
        let shared = job(&i.to_string(), 2, sets).done();
        for key in keys {
            let (mine, theirs) = (shared.numbers(key)[0], alone.numbers(key)[0]);
            assert!((mine - theirs).abs() <= 1e-4 * theirs.abs().max(0.1), "{key} with {sets}: {mine}, not {theirs}");
        }
    }
    let last = SHARED.len() - 1;
    let whole = job(&last.to_string(), 2, SHARED[last]);
    whole.rewound("against-again", 1).done().assert_same(&whole);
}

#[test]
fn a_student_gets_nearer_to_its_teacher_by_every_divergence() {
    for sets in [
        "distill.ce_coef=0.2",
        "distill.divergence=reverse_kl distill.ce_coef=0.0",
        "distill.divergence=jsd distill.ce_coef=0.0",
        "distill.on_policy=true distill.divergence=reverse_kl",
        "distill.on_policy=true distill.divergence=reverse_kl distill.full_vocabulary=false rollout.prompts_per_step=64",
    ] {
        let name = format!("distill-{}", sets.replace([' ', '='], "-"));
        let sets = format!("model.teachers=[\"tied\"] {sets}");
        let job = job(&name, &sets).with("job.steps=16 eval.every_steps=16 optim.actor.lr=1e-2");
        let job =
            job.with("distill.minibatch_samples=64 distill.microbatch_tokens_max=1024 checkpoint.every_steps=0").done();
        let found = job.numbers("eval_kl_mean");
        println!("{sets}: {found:.4?}");
        assert!(found.len() == 2 && found[1] < 0.8 * found[0], "{sets}: {found:?}");
    }
}

#[test]
fn rewards_of_a_distillation_job_are_only_measured() {
    let sets = "distill.on_policy=true model.teachers=[\"tied\"] job.steps=2 checkpoint.every_steps=0";
    let none = job("distill-unrewarded", sets).done();
    let rule = r#"reward.rule={ kind = "regex", pattern = "[0-9a-f]" }"#;
    let some = job("distill-rewarded", sets).set(rule.to_string()).done();
    assert_eq!(none.read("export/model.safetensors"), some.read("export/model.safetensors"));
    for key in ["score_mean", "eval_accuracy_greedy", "eval_reward_mean"] {
        assert!(none.numbers(key).is_empty() && !some.numbers(key).is_empty(), "{key}");
    }
    assert_eq!(none.numbers("eval_kl_mean"), some.numbers("eval_kl_mean"));
}
