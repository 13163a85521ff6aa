//! Whole jobs that train adapters, or a part of the parameters, on a frozen base: equal on every axis of the mesh, equal
//! after an interruption, with samples of the trained model, and able to learn.

use crate::resume::families;
use crate::resume::job::{Job, place};
use serde_json::Value;

const ADAPTERS: &str = "lora.rank=3 lora.alpha=6 optim.actor.lr=0.02";
const SMOOTH: &str = "optim.actor.eps=0.1 optim.actor.lr=0.05 optim.actor.schedule=constant \
                      optim.actor.warmup_ratio=0.0";

/// Jobs of every kind, with what they train.
const KINDS: &[(&str, &str)] = &[
    ("dpo", "job.kind=dpo lora.rank=3"),
    ("reward-model", "job.kind=reward_model lora.rank=1 lora.rslora=true"),
    ("kto", "job.kind=kto data.prompts=[\"labelled\"] lora.rank=2 lora.targets=[\"q_proj\",\"down_proj\"]"),
    ("step-reward", "job.kind=step_reward data.prompts=[\"steps\"] lora.rank=2 lora.train_also=[\"norm\"]"),
    ("frozen-dpo", "job.kind=dpo model.freeze=[\"embed_tokens\",\"attention\",\"layers.0\"]"),
    ("frozen-reward-model", "job.kind=reward_model model.freeze=[\"mlp\"]"),
    ("nf4-dpo", "job.kind=dpo lora.rank=3 model.quantize=nf4"),
];

const LAYOUTS: &[&str] =
    &["mesh.data=2 mesh.zero=3", "mesh.sequence=2 mesh.zero=1", "mesh.tensor=2", "mesh.data=2 mesh.zero=2"];

/// The layouts in turn; a base in nf4 is not split over tensor ranks here, as its matrices are narrow.
fn layout(i: usize, kind: &str) -> &'static str {
    if kind.contains("nf4") { LAYOUTS[0] } else { LAYOUTS[i % LAYOUTS.len()] }
}

#[test]
fn jobs_of_adapters_have_the_metrics_of_one_rank_and_resume_bitwise() {
    for (i, (name, kind)) in KINDS.iter().enumerate() {
        let job = |name: String| Job::pairs(&name, kind).with("job.steps=4").with(SMOOTH);
        let alone = job(format!("tuned-{name}-alone")).with("checkpoint.every_steps=0").done();
        let layout = layout(i, kind);
        let whole = job(format!("tuned-{name}-whole")).on(2).with(layout).done();
        let [last, of_one] =
            [&whole, &alone].map(|job| job.numbers("adapter_norm_ratio_max").last().copied().unwrap_or_default());
        assert!((last - of_one).abs() <= 1e-4 * of_one, "{name}: adapters on {layout}: {last} against {of_one}");
        assert_eq!(of_one > 0.0, kind.contains("lora"), "{name}: {of_one}");
        for key in ["loss", "grad_norm"] {
            for (a, b) in whole.numbers(key).into_iter().zip(alone.numbers(key)) {
                assert!((a - b).abs() <= 1e-4 * b.abs().max(0.1), "{name}: {key} on {layout}: {a} against {b}");
            }
        }
        whole.rewound(&format!("tuned-{name}-again"), 2).done().assert_same(&whole);
        assert!(alone.numbers("grad_norm").iter().all(|norm| *norm > 0.0), "{name}");
    }
}

#[test]
fn ppo_with_adapters_samples_from_the_trained_model_on_any_layout() {
    let sets = "job.steps=3 lora.critic.rank=2 optim.critic.lr=0.02";
    let job = |name: &str, more: &str| Job::ppo(&format!("tuned-ppo-{name}")).with(ADAPTERS).with(sets).with(more);
    for (name, more, ranks) in [
        ("alone", "", 0),
        ("bf16", "model.dtype=bf16", 0),
        ("nf4", "model.quantize=nf4", 0),
        ("nf4-bf16", "model.quantize=nf4 model.dtype=bf16 mesh.zero=3", 2),
        ("zero", "mesh.data=2 mesh.zero=3", 2),
        ("tensor", "mesh.tensor=2", 2),
        (
            "apart",
            "mesh.placement=[{roles=[\"actor\",\"critic\",\"reference\",\"reward\"],ranks=\"0..1\"},{roles=[\"rollout\"],ranks=\"1..2\"}]",
            2,
        ),
    ] {
        let whole = job(name, more).on(ranks).done();
        assert_eq!(whole.numbers("logprob_gap_max"), [0.0; 3], "{name}");
        let kl = whole.numbers("kl_mean");
        // The adapter reaches the sampler: from the second step on its samples are not the base's.
        assert!(kl[0] == 0.0 && kl[1].abs() > 1e-5 && kl[2].abs() > 1e-5, "{name}: {kl:?}");
        if !more.contains("placement") {
            whole.rewound(&format!("tuned-ppo-{name}-again"), 2).done().assert_same(&whole);
        }
    }
}

/// All matrices of mixtures that PEFT adapts with "all-linear", or parameters by name.
#[test]
fn ppo_with_adapters_of_experts_samples_as_it_trains_on_any_layout_and_resumes_bitwise() {
    let parameters = "lora.targets=[\"o_proj\"] lora.target_parameters=[\"experts.gate_up_proj\",\"experts.down_proj\",\"router.weight\"]";
    for (model, more, layouts) in [
        ("mixtral", "job.steps=20", &[][..]),
        ("qwen3_next", "job.steps=5", &[(2, "mesh.data=2 mesh.zero=2")]),
        ("gpt_oss", parameters, &[(2, "mesh.expert=2"), (4, "mesh.expert=2 mesh.tensor=2")]),
        ("qwen3_moe-stacked", "lora.train_also=[\"norm\"]", &[(4, "mesh.expert=2 mesh.zero=3"), (2, "mesh.tensor=2")]),
        ("deepseek_v3", "model.dtype=bf16", &[(2, "mesh.data=2 mesh.zero=3")]),
    ] {
        let made = format!("experts-{model}");
        families::make(model, &made);
        let sets = format!(
            "model.actor={made} lora.rank=2 lora.alpha=4 optim.actor.lr=0.02 job.steps=3 ppo.minibatch_samples=16 \
             rollout.response_tokens_max=16 {more}"
        );
        let job = |run: &str| Job::ppo(&format!("{made}-{run}")).with(&sets);
        let alone = job("alone").done();
        for (i, (ranks, layout)) in [(0, "")].iter().chain(layouts).enumerate() {
            let whole = job(&i.to_string()).on(*ranks).with(layout).done();
            let steps = alone.metrics().len();
            assert_eq!(whole.numbers("logprob_gap_max"), vec![0.0; steps], "{model} on {layout}");
            assert_eq!(whole.numbers("experts_equal_ratio"), vec![1.0; steps], "{model} on {layout}");
            let kl = whole.numbers("kl_mean");
            assert!(kl[0] == 0.0 && kl[1].abs() > 1e-6, "{model} on {layout}: {kl:?}");
            let most = if more.contains("bf16") { 0.05 } else { 1e-3 };
            for key in ["loss", "grad_norm", "adapter_norm_ratio_max"] {
                let first = [&whole, &alone].map(|job| job.numbers(key)[0]);
                assert!(
                    (first[0] - first[1]).abs() <= most * first[1].abs().max(0.1),
                    "{model} on {layout}: {key} {first:?}"
                );
            }
            whole.rewound(&format!("{made}-{i}-again"), steps as u64 - 1).done().assert_same(&whole);
        }
    }
}

#[test]
fn adapters_start_without_size_and_grow_and_the_report_names_the_largest() {
    let keys = ["adapter_norm_ratio_mean", "adapter_norm_ratio_max"];
    let job =
        |name: &str| Job::sft(&format!("tuned-sizes-{name}")).with(ADAPTERS).with("optim.actor.schedule=constant");
    let still = job("still").with("optim.actor.lr=0 job.steps=2").done();
    let grown = job("grown").done();
    let steps: Vec<_> =
        grown.metrics().iter().filter(|line| line.contains_key(keys[0])).map(|l| l["step"].clone()).collect();
    assert_eq!(steps, [1, 2, 4, 6, 8], "the first step, and each with a checkpoint");
    for key in keys {
        assert_eq!(still.numbers(key), [0.0, 0.0], "{key}");
        let values = grown.numbers(key);
        assert!(values[0] > 0.0 && values.is_sorted_by(|a, b| a < b) && values[4] < 1.0, "{key}: {values:?}");
    }
    let ratios: Value = serde_json::from_slice(&grown.read("adapters.json")).expect("JSON");
    assert_eq!((&ratios["step"], &ratios["roles"][0]["role"]), (&8.into(), &"actor".into()));
    let matrices = ratios["roles"][0]["matrices"].as_array().expect("a list");
    let ratio = |matrix: &&Value| matrix["ratio"].as_f64().expect("a number");
    let largest = matrices.iter().max_by(|a, b| ratio(a).total_cmp(&ratio(b))).expect("adapters");
    let of_all = [matrices.iter().map(|matrix| ratio(&matrix)).sum::<f64>() / matrices.len() as f64, ratio(&largest)];
    assert_eq!(matrices.len(), 14, "seven matrices in each of two layers");
    for (key, value) in keys.into_iter().zip(of_all) {
        assert!((grown.numbers(key)[4] - value).abs() < 1e-9, "{key}: {value}");
    }
    let report = String::from_utf8(grown.read("report.html")).expect("text");
    let title = "<b>Largest adapters of the actor, step 8</b>";
    let table = report.split(title).nth(1).expect("a table of adapters");
    let first = table.split("<td>").nth(1).expect("a row");
    assert!(first.starts_with(largest["name"].as_str().expect("a name")), "{first}");
    assert!(report.contains("<b>Relative size of adapters</b>") && table.contains("The model has 14 adapters."));
}

#[test]
fn a_base_in_nf4_that_data_ranks_share_trains_and_samples_bitwise_as_a_whole_one() {
    let [whole, shared] = [2, 3].map(|stage| {
        let sets = format!("job.steps=2 lora.critic.rank=2 model.quantize=nf4 mesh.data=2 mesh.zero={stage}");
        Job::ppo(&format!("tuned-nf4-{stage}")).with(ADAPTERS).with(&sets).on(2).done()
    });
    shared.assert_same(&whole);
}

#[test]
fn a_checkpoint_and_an_export_of_adapters_hold_only_what_trains() {
    let job = Job::ppo("tuned-files").with(ADAPTERS).with("job.steps=1").done();
    let config: Value = serde_json::from_slice(&job.read("export/adapter_config.json")).expect("JSON");
    assert_eq!((&config["r"], &config["lora_alpha"]), (&3.into(), &6.into()));
    let whole = std::fs::metadata(place().join("model/model.safetensors")).expect("the base").len();
    let size = |path: &std::path::Path| std::fs::metadata(path).expect("a file").len();
    assert!(size(&job.dir.join("export/adapter_model.safetensors")) < whole / 4);
    let saved = std::fs::read_dir(job.checkpoints().join("step-1")).expect("a checkpoint");
    let bytes: u64 = saved
        .map(|file| file.expect("a file").path())
        .filter(|p| p.extension().is_some_and(|e| e == "bin"))
        .map(|p| size(&p))
        .sum();
    assert!(bytes < 8 * whole, "{bytes} bytes for a model of {whole}");
}

#[test]
fn settings_of_adapters_that_no_job_can_use_are_rejected_before_it_starts() {
    for (sets, message) in [
        ("job.kind=dpo lora.rank=1000", "lora.rank must be at most"),
        ("job.kind=dpo lora.rank=2 lora.targets=[\"query\"]", "lora.targets must list names of modules"),
        ("job.kind=dpo lora.rank=2 model.freeze=[\"mlp\"]", "model.freeze has no use with lora.rank above 0"),
        ("job.kind=dpo model.adapter=absent", "error: model.adapter: "),
        ("job.kind=dpo model.quantize=nf4", "model.quantize = \"nf4\" needs frozen weights"),
        ("job.kind=dpo model.freeze=[\"layers.7\"]", "model.freeze must name layers up to"),
    ] {
        let ended = Job::pairs("tuned-wrong", sets).run();
        assert!(ended.stderr.contains(message), "{sets}: {}", ended.stderr);
    }
}
