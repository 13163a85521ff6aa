//! Whole jobs that train adapters on the GPU, on a frozen base in bf16 and in nf4, compared with the run on the CPU.

use crate::jobs::{CONFIG, calls, command, computed, emulated, metrics, number, prepared, rlhf_hpc, well, with};
use serde_json::json;

/// Key, relative and absolute tolerance of the metrics of a step on the GPU compared with the CPU: see `run_loss`.
const KEYS: [(&str, f64, f64); 6] = [
    ("policy_loss", 0.05, 0.02),
    ("value_loss", 0.05, 1e-3),
    ("entropy", 1e-3, 0.0),
    ("kl_mean", 0.0, 0.02),
    ("adapter_norm_ratio_mean", 0.02, 0.0),
    ("adapter_norm_ratio_critic_max", 0.02, 0.0),
];

#[test]
fn adapters_on_bases_in_bf16_and_nf4_train_as_on_the_cpu() {
    let dir = prepared(CONFIG);
    let at = dir.path();
    let job = "run ppo.toml lora.rank=8 lora.alpha=24 optim.actor.lr=1e-2 optim.critic.lr=1e-2 job.steps=2";
    for (name, set) in [("bf16", ""), ("nf4", "model.quantize=nf4")] {
        rlhf_hpc(at, &format!("{job} {set} job.dir={name}"));
        rlhf_hpc(at, &format!("{job} {set} job.dir={name}-cpu job.device=cpu"));
        let (on_gpu, on_cpu) = (metrics(at, name), metrics(at, &format!("{name}-cpu")));
        assert_eq!((on_gpu.len(), on_cpu.len()), (2, 2));
        for line in &on_gpu {
            assert_eq!(line["logprob_gap_max"].as_f64(), Some(0.0), "{name}: {line}");
        }
        // Later samples differ.
        for (key, relative, absolute) in KEYS {
            let (x, y) = (number(&on_gpu[0], key), number(&on_cpu[0], key));
            assert!((x - y).abs() <= relative * y.abs() + absolute, "{name}: {key} is {x}, on the CPU {y}");
        }
        assert!(number(&on_gpu[1], "kl_mean").abs() > 1e-6, "{name}: the adapter reaches the sampler");
    }
}

/// Few rows are multiplied by codes, and many by the dequantized values of a layer.
#[test]
fn decoding_of_few_rows_reads_four_bits_in_graphs_and_changes_no_bit() {
    let Some(dir) = emulated(&with(CONFIG, &json!({"num_hidden_layers": 2, "intermediate_size": 128}))) else { return };
    let at = dir.path();
    let job = "run ppo.toml model.quantize=nf4 lora.rank=8 lora.alpha=24 optim.actor.lr=1e-2 job.steps=2 \
               rollout.prompts_per_step=17 rollout.samples_per_prompt=4 rollout.response_tokens_min=8";
    // 68 samples: at once, or a few at a time.
    let [many, few, ordinary] =
        [("many", 128, true), ("few", 34, true), ("ordinary", 34, false)].map(|(name, rows, graphs)| {
            let counts = at.join(format!("{name}.txt"));
            let line = format!("{job} rollout.batch_max={rows} rollout.graphs={graphs} job.dir={name}");
            well(command(1, at, &line).env("EMULATED_CALLS", &counts));
            let calls = calls(&counts, "0");
            let steps = metrics(at, name);
            assert!(steps.iter().all(|step| step["logprob_gap_max"].as_f64() == Some(0.0)), "{name}");
            assert_eq!(graphs, number(&steps[1], "gpu_graph_launches") > 0.0, "{name}");
            ["nf4_matmul_16", "nf4_dequantize"].map(|kernel| calls.get(kernel).copied().unwrap_or(0))
        });
    // Two steps, seven tokens after the prefill, two layers of seven matrices. Prefills may be of few rows, too.
    let decoded = 2 * 7 * 14;
    assert_eq!(few, ordinary);
    assert!(many[1] >= few[1] + decoded && few[0] >= many[0] + 2 * decoded, "{many:?} {few:?}");
    let export = |job: &str| std::fs::read(at.join(job).join("export/adapter_model.safetensors")).expect("an export");
    for other in ["few", "ordinary"] {
        assert_eq!(computed(at, "many"), computed(at, other), "{other}");
        assert!(export("many") == export(other), "{other}: exported adapters");
    }
}

#[test]
fn a_base_in_nf4_that_data_ranks_share_trains_bitwise_as_a_whole_one() {
    let Some(dir) = emulated(&with(CONFIG, &json!({"num_hidden_layers": 2, "intermediate_size": 128}))) else { return };
    let at = dir.path();
    let job = "run ppo.toml model.quantize=nf4 lora.rank=8 lora.alpha=24 job.steps=2 mesh.data=2";
    let export = |job: &str| std::fs::read(at.join(job).join("export/adapter_model.safetensors")).expect("an export");
    for (name, sets) in [
        ("whole", "mesh.zero=2 job.collectives=nccl"),
        ("nccl", "mesh.zero=3 job.collectives=nccl"),
        ("mpi", "mesh.zero=3 job.collectives=mpi"),
    ] {
        well(&mut command(2, at, &format!("{job} {sets} job.dir={name}")));
        assert!(metrics(at, name).iter().all(|step| number(step, "gpu_graph_launches") > 0.0), "{name}");
        assert_eq!(computed(at, name), computed(at, "whole"), "{name}");
        assert!(export(name) == export("whole"), "{name}: exported adapters");
    }
}
