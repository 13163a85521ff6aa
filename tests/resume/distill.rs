//! Whole jobs of distillation: alike on every axis of the mesh, alike after an interruption, and nearer to the teachers.

use crate::resume::job::{Job, place, verb};
use crate::resume::pairs::SMOOTH;
use std::sync::Once;

/// Names and keys: on rows with two teachers, of which one is wider than the student and has a head of its own; and on the student's samples.
const KINDS: &[(&str, &str)] = &[
    ("rows", "model.teachers=[\"teacher\",\"tied\"] model.teacher_weights=[3,1] distill.temperature=1.5"),
    ("jsd", "model.teachers=[\"teacher\"] distill.divergence=jsd distill.ce_coef=0.0"),
    ("samples", "model.teachers=[\"teacher\",\"tied\"] distill.on_policy=true distill.divergence=reverse_kl"),
    (
        "sampled-tokens",
        "model.teachers=[\"tied\",\"teacher\"] distill.on_policy=true distill.divergence=reverse_kl distill.full_vocabulary=false",
    ),
];
/// Axes of two ranks, and every stage of ZeRO.
const LAYOUTS: &[&str] = &[
    "mesh.data=2 mesh.zero=0",
    "mesh.sequence=2 mesh.zero=1",
    "mesh.tensor=2",
    "mesh.data=2 mesh.zero=2",
    "mesh.data=2 mesh.zero=3 mesh.offload=[\"roles\"]",
];

/// A wider model, and one whose head is its embedding, with other weights than the student's.
fn make_teachers() {
    static MADE: Once = Once::new();
    MADE.call_once(|| {
        let config = std::fs::read_to_string(place().join("config.json")).expect("it was made");
        let wide = config.replace("\"hidden_size\": 32", "\"hidden_size\": 48").replace(": 64,", ": 96,");
        let tied = config.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
        for (name, config) in [("teacher", wide), ("tied", tied)] {
            std::fs::write(place().join(format!("{name}.json")), config).expect("writes");
            verb(&format!("init --config {name}.json --tokenizer tokenizer --out {name} --seed 9"));
        }
    });
}

fn job(name: &str, sets: &str) -> Job {
    make_teachers();
    let rows = if sets.contains("on_policy=true") { "questions" } else { "demonstrations" };
    Job::ppo(&format!("distill-{name}"))
        .with(&format!("job.kind=distill data.prompts=[\"{rows}\"] eval.every_steps=2 reward.rule=[]"))
        .with(sets)
}

#[test]
fn distillation_on_any_layout_has_the_numbers_of_one_rank() {
    for (i, (name, sets)) in KINDS.iter().enumerate() {
        let job = |layout: &str| {
            job(&format!("{name}-{}", layout.replace(' ', "-")), sets)
                .with("job.steps=2 checkpoint.every_steps=0")
                .with(SMOOTH)
                .with(layout)
        };
        let alone = job("").done();
        assert_eq!(alone.numbers("ce_mean").is_empty(), sets.contains("on_policy"), "{name}");
        // One kind on all of them, each other one on two.
        for layout in LAYOUTS.iter().cycle().skip(2 * i).take(if i == 0 { LAYOUTS.len() } else { 2 }) {
            let shared = job(layout).on(2).done();
            for key in ["loss", "kl_mean", "ce_mean", "grad_norm", "eval_loss", "eval_kl_mean"] {
                let (mine, theirs) = (shared.numbers(key), alone.numbers(key));
                assert!(
                    mine.len() == theirs.len() && (key == "ce_mean" || !mine.is_empty()),
                    "{name}: {key} on {layout}"
                );
                // What is sampled may part after an update.
                let steps = if sets.contains("on_policy") { 1 } else { mine.len() };
                for (i, (a, b)) in mine.into_iter().zip(theirs).take(steps).enumerate() {
                    let within = if i == 0 { 1e-5 } else { 1e-4 };
                    assert!((a - b).abs() <= within * b.abs().max(0.1), "{name}: {key} on {layout}: {a} against {b}");
                }
            }
        }
    }
}

#[test]
fn a_job_of_distillation_goes_on_bitwise_on_its_layout() {
    for ((name, sets), layout) in KINDS.iter().zip(LAYOUTS) {
        let whole = job(&format!("{name}-whole"), sets).on(2).with("job.steps=4").with(layout).done();
        whole.rewound(&format!("distill-{name}-resumed"), 2).done().assert_same(&whole);
    }
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
        let name = format!("learns-{}", sets.replace([' ', '='], "-"));
        let job =
            job(&name, sets).with("model.teachers=[\"tied\"] job.steps=16 eval.every_steps=16 optim.actor.lr=1e-2");
        let job =
            job.with("distill.minibatch_samples=64 distill.microbatch_tokens_max=1024 checkpoint.every_steps=0").done();
        let found = job.numbers("eval_kl_mean");
        println!("{sets}: {found:.4?}");
        assert!(found.len() == 2 && found[1] < 0.8 * found[0], "{sets}: {found:?}");
    }
}

#[test]
fn rewards_of_a_job_that_learns_from_teachers_measure_alone() {
    let sets = "distill.on_policy=true model.teachers=[\"tied\"] job.steps=2 checkpoint.every_steps=0";
    let none = job("unrewarded", sets).done();
    let rule = r#"reward.rule={ kind = "regex", pattern = "[0-9a-f]" }"#;
    let some = job("rewarded", sets).set(rule.to_string()).done();
    assert_eq!(none.read("export/model.safetensors"), some.read("export/model.safetensors"));
    for key in ["score_mean", "eval_accuracy_greedy", "eval_reward_mean"] {
        assert!(none.numbers(key).is_empty() && !some.numbers(key).is_empty(), "{key}");
    }
    assert_eq!(none.numbers("eval_kl_mean"), some.numbers("eval_kl_mean"));
}
