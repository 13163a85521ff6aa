//! Whole jobs with losses of tokens and of sequences on the GPU, compared with the run on the CPU. The host computes
//! all other losses the same way.

use crate::jobs::{CONFIG, metrics, number, prepared, rlhf_hpc};

/// Key, relative and absolute tolerance of the metrics of a step on the GPU compared with the CPU. Activations are bf16
/// there, a few tokens are sampled differently, and a ratio near a clip boundary may fall on either side.
const KEYS: [(&str, f64, f64); 6] = [
    ("policy_loss", 0.05, 0.02),
    ("value_loss", 0.05, 1e-3),
    ("entropy", 1e-3, 0.0),
    ("kl_mean", 0.0, 0.02),
    ("clip_ratio", 0.0, 0.05),
    ("grad_norm_critic", 0.05, 0.0),
];

#[test]
fn losses_of_tokens_and_of_sequences_run_as_on_the_cpu() {
    let dir = prepared(CONFIG);
    let at = dir.path();
    rlhf_hpc(at, "run sft.toml sft.loss_on=all");
    let far = "run ppo.toml model.actor=sft/export ppo.epochs=2 optim.actor.lr=1e-3 job.steps=1";
    for (name, set) in
        [("clip", ""), ("gspo", "ppo.loss=gspo ppo.kl_in=loss ppo.kl_estimator=k3 ppo.entropy_coef=0.02")]
    {
        rlhf_hpc(at, &format!("{far} {set} job.dir={name}"));
        rlhf_hpc(at, &format!("{far} {set} job.dir={name}-cpu job.device=cpu"));
        let (on_gpu, on_cpu) = (metrics(at, name), metrics(at, &format!("{name}-cpu")));
        assert_eq!(on_gpu.len(), on_cpu.len());
        for (a, b) in on_gpu.iter().zip(&on_cpu) {
            assert_eq!(a["logprob_gap_max"].as_f64(), Some(0.0), "{name}: {a}");
            for (key, relative, absolute) in KEYS {
                let (x, y) = (number(a, key), number(b, key));
                assert!((x - y).abs() <= relative * y.abs() + absolute, "{name}: {key} is {x}, on the CPU {y}");
            }
        }
    }
}
