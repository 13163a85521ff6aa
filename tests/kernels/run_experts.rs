//! Whole jobs of a mixture of experts on emulated GPUs: in several layouts as on one rank, and as on the CPU up to bf16.

use crate::jobs::{self, assert_near, assert_same, command, computed, emulated, metrics, number, well};
use serde_json::{Value, json};
use std::path::Path;

fn run(at: &Path, ranks: usize, job: &str, dir: &str, sets: &str) -> Vec<Value> {
    well(&mut command(ranks, at, &format!("run {job} job.dir={dir} {sets}")));
    metrics(at, dir)
}

fn config() -> String {
    let experts = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "norm_topk_prob": true, "num_attention_heads": 4, "num_key_value_heads": 2,
        "initializer_range": 0.1, "decoder_sparse_step": 1, "mlp_only_layers": [],
    });
    jobs::with(jobs::CONFIG, &experts)
}

#[test]
fn metrics_of_experts_equal_those_of_one_rank_and_of_the_cpu_and_the_sampler_is_the_trainer() {
    let Some(dir) = emulated(&config()) else { return };
    let at = dir.path();
    let sft = |ranks, name: &str, sets: &str| {
        let all = format!("optim.actor.lr=1e-3 job.steps=2 model.router_aux_loss_coef=0.1 {sets}");
        run(at, ranks, "sft.toml", name, &all)
    };
    let keys = ["loss", "grad_norm", "router_aux_loss"];
    let [alone, cpu] = [("alone", ""), ("cpu", "job.device=cpu")].map(|(name, sets)| sft(1, name, sets));
    assert_near("alone", &alone, &cpu, &keys, (2e-2, 0.1));
    let cut = sft(2, "cut", "mesh.tensor=2");
    assert_near("cut", &cut, &alone, &keys, (2e-2, 0.1));
    for (name, stage) in [("sharded", 3), ("whole", 2)] {
        sft(2, name, &format!("mesh.data=2 mesh.tensor=1 mesh.zero={stage}"));
    }
    assert_same(at, "sharded", "whole");
    let ppo = |ranks, name: &str, sets: &str| run(at, ranks, "ppo.toml", name, &format!("job.steps=2 {sets}"));
    for (name, ranks, sets) in [("ppo-alone", 1, ""), ("ppo-sharded", 2, "mesh.data=2 mesh.tensor=1 mesh.zero=3")] {
        for step in ppo(ranks, name, sets) {
            assert_eq!(number(&step, "logprob_gap_max"), 0.0, "{name}: {step}");
        }
    }
}

#[test]
fn metrics_of_experts_on_several_gpus_equal_those_of_one_and_nccl_equals_the_host_bitwise() {
    let Some(dir) = emulated(&config()) else { return };
    let at = dir.path();
    let keys = ["loss", "grad_norm", "router_aux_loss"];
    let job = |ranks, name: &str, sets: &str| {
        let all = format!("optim.actor.lr=1e-3 job.steps=2 model.router_aux_loss_coef=0.1 {sets}");
        let said = well(&mut command(ranks, at, &format!("run sft.toml job.dir={name} {all}")));
        (metrics(at, name), said)
    };
    let (alone, _) = job(1, "alone", "");
    for (name, ranks, mesh) in [
        ("divided", 2, "mesh.expert=2 mesh.zero=1"),
        ("replicas", 4, "mesh.expert=2 mesh.zero=3"),
        ("cut", 4, "mesh.expert=2 mesh.tensor=2 mesh.zero=2"),
        ("ring", 4, "mesh.expert=4 mesh.sequence=2 mesh.zero=2"),
    ] {
        let (got, said) = job(ranks, name, &format!("job.collectives=nccl {mesh}"));
        assert!(said.contains("expert: NCCL"), "{name}: {said}");
        assert_near(name, &got, &alone, &keys, (2e-2, 0.1));
        let by_mpi = format!("{name}-by-mpi");
        job(ranks, &by_mpi, &format!("job.collectives=mpi {mesh}"));
        // Sums of gradients over more than two ranks have the order of their backend.
        if ranks == 2 {
            assert_same(at, name, &by_mpi);
        }
    }
    let (_, said) = job(4, "checked", "job.check=true job.collectives=nccl mesh.expert=2 mesh.zero=1");
    let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("collectives checked over data, expert, expert replicas in "), "{said}");
}

#[test]
fn a_rollout_of_divided_experts_on_gpus_is_scored_with_its_bits_also_in_nf4() {
    let Some(dir) = emulated(&config()) else { return };
    let at = dir.path();
    let exclude = r#"lora.exclude=["gate_up_proj","experts.down_proj","mlp.gate"]"#;
    let lora = format!("lora.rank=8 lora.alpha=24 model.quantize=nf4 {exclude}");
    for (name, ranks, sets) in [
        ("whole", 2, "mesh.data=2 mesh.zero=2".to_string()),
        ("divided", 2, "mesh.expert=2 mesh.zero=2".to_string()),
        ("nf4-whole", 2, format!("mesh.data=2 mesh.zero=2 {lora}")),
        ("nf4-divided", 2, format!("mesh.expert=2 mesh.zero=2 {lora}")),
        ("nf4-sharded", 4, format!("mesh.expert=2 mesh.zero=3 {lora}")),
    ] {
        for step in run(at, ranks, "ppo.toml", name, &format!("job.steps=2 mesh.tensor=1 job.collectives=nccl {sets}"))
        {
            assert_eq!(number(&step, "logprob_gap_max"), 0.0, "{name}: {step}");
            assert!(number(&step, "gpu_graph_launches") > 0.0, "{name}: {step}");
        }
    }
    // No expert trains in nf4, so the order of sums is that of whole experts.
    assert_eq!(computed(at, "nf4-divided"), computed(at, "nf4-whole"));
    let keys = ["entropy", "value_mean", "grad_norm_actor"];
    assert_near("divided", &metrics(at, "divided")[..1], &metrics(at, "whole")[..1], &keys, (0.05, 0.1));
}
