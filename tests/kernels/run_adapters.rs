//! Whole jobs that train adapters on the GPU, on a frozen base in bf16 and in nf4, compared with the run on the CPU.

use crate::jobs::{CONFIG, metrics, number, prepared, rlhf_hpc};

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
