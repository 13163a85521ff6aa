//! Whole jobs in every layout of ranks, each with an emulated GPU, over the emulated NCCL or MPI through the host. The
//! metrics equal those of one rank, and those of the CPU up to bf16.

use crate::jobs;
use crate::jobs::{assert_near, assert_same, command, copied, emulated, flat, metrics, number, well};
use serde_json::Value;
use std::path::Path;

/// Queries and keys with norms, four query heads for two key heads, a window in the second layer, and a vocabulary that
/// no number of ranks divides. The weights are large enough that attention affects every metric.
const CONFIG: &str = r#"{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2,
 "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
 "vocab_size": 265, "max_position_embeddings": 128, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "use_sliding_window": true, "sliding_window": 9, "max_window_layers": 1, "initializer_range": 0.2,
 "bos_token_id": 0, "eos_token_id": 1}"#;

/// The gap between log-probabilities of the rollout's kernels and of training's ring or sharded matrices: the order of
/// sums differs, with roundings to bf16 in between.
const SAMPLER_GAP: f64 = 0.1;

/// The metrics of a job on `ranks` ranks in a directory of its own, with further settings, and its messages.
fn run(at: &Path, ranks: usize, job: &str, dir: &str, sets: &str) -> (Vec<Value>, String) {
    let said = well(&mut command(ranks, at, &format!("run {job} job.dir={dir} {sets}")));
    (metrics(at, dir), said)
}

#[test]
fn ppo_metrics_equal_one_ranks_in_every_layout_and_nccl_equals_the_host_bitwise() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    // With another seed, another order of a sum may change a sampled token.
    let ppo =
        |ranks, name: &str, sets: &str| run(at, ranks, "ppo.toml", name, &format!("job.steps=1 job.seed=3 {sets}"));
    let (alone, said) = ppo(1, "alone", "");
    assert!(said.contains("CUDA graphs"), "{said}");
    // Sharded matrices are summed in another order, so other tokens are sampled.
    let (cut, _) = ppo(2, "cut", "mesh.tensor=2 rollout.tensor=2");
    // In some cases the rollout has its own layout, to which weights are resharded or not. Training recomputes the
    // log-probabilities of its samples.
    for (name, ranks, mesh, want, travels, through_host) in [
        ("kept", 2, "mesh.data=2 mesh.tensor=1 mesh.zero=2 rollout.tensor=2", &cut, Some(false), false),
        ("joined", 2, "mesh.tensor=2 mesh.data=1 rollout.tensor=1", &alone, Some(true), false),
        ("other", 4, "mesh.tensor=2 mesh.data=2 mesh.zero=3 rollout.tensor=4", &alone, Some(true), false),
        ("ring", 4, "mesh.sequence=2 mesh.data=2 mesh.zero=3", &alone, None, true),
        ("ring-of-cut-matrices", 4, "mesh.sequence=2 mesh.tensor=2 mesh.zero=1 rollout.tensor=2", &cut, None, false),
    ] {
        let (got, said) = ppo(ranks, name, &format!("job.collectives=nccl {mesh}"));
        assert!(!said.contains("collectives checked"), "jobs of tests have job.check = false: {said}");
        let keys = ["entropy", "value_mean", "advantage_mean", "grad_norm_actor", "grad_norm_critic"];
        assert_near(name, &got, want, &keys, (0.05, 0.1));
        for step in &got {
            assert_eq!(number(step, "logprob_gap_max"), 0.0, "{name}: training and scoring are of the same bits");
            assert!(number(step, "sampler_gap_max") <= SAMPLER_GAP, "{name}: {step}");
            if let Some(travels) = travels {
                assert_eq!(number(step, "reshard_bytes") > 0.0, travels, "{name}: {step}");
                assert!(number(step, "time_old_logprobs_s") > 0.0, "{name}: {step}");
            }
        }
        let cut = mesh.contains("rollout.tensor") && !mesh.contains("rollout.tensor=1");
        assert_eq!(said.contains("CUDA graphs, including the collectives of the tensor axis"), cut, "{name}: {said}");
        if through_host {
            let by_mpi = format!("{name}-by-mpi");
            let (_, said) = ppo(ranks, &by_mpi, &format!("job.collectives=mpi {mesh}"));
            let why = "because GPU values on the tensor axis go through the host by MPI";
            assert!(!cut || said.contains(why), "{name}: {said}");
            assert_same(at, name, &by_mpi);
        }
    }
    // Stages compute the bits of one rank. Their hidden states go through the host.
    let (stages, _) = ppo(2, "stages", "job.collectives=nccl mesh.pipeline=2");
    assert_near(
        "stages",
        &stages,
        &alone,
        &["entropy", "value_mean", "grad_norm_actor", "grad_norm_critic"],
        (1e-5, 1e-3),
    );
    assert!(stages.iter().all(|step| number(step, "logprob_gap_max") == 0.0 && number(step, "reshard_bytes") > 0.0));
    // Sampled on its own GPU, with a copy of the weights. The first step of an async rollout equals that of a
    // synchronous one.
    let placement = r#"mesh.placement=[{roles=["actor","critic","reference"],ranks="0..1"},{roles=["rollout","reward"],ranks="1..2"}]"#;
    ppo(2, "apart", &format!("job.collectives=nccl mesh.async_updates_max=1 {placement}"));
    assert_same(at, "apart", "alone");
    // A response of one token is on one rank only, so the other's head has no rows.
    let short = "rollout.response_tokens_max=1";
    let [alone, ring] = [(1, ""), (2, "mesh.sequence=2")]
        .map(|(ranks, mesh)| ppo(ranks, &format!("short-{ranks}"), &format!("{short} {mesh}")).0);
    assert_near("short", &ring, &alone, &["entropy", "value_mean", "grad_norm_critic"], (0.05, 0.1));
}

#[test]
fn sft_metrics_equal_those_of_one_rank_and_of_the_cpu_in_every_layout() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let evaluated = "data.split.by=field data.eval_split=eval eval.every_steps=2 eval.samples_max=20";
    let sft = |ranks, name: &str, sets: &str| {
        run(at, ranks, "sft.toml", name, &format!("optim.actor.lr=1e-3 job.steps=2 {evaluated} {sets}")).0
    };
    let [alone, cpu] = [("alone", ""), ("cpu", "job.device=cpu")].map(|(name, sets)| sft(1, name, sets));
    for (name, mesh) in [
        ("cut", "mesh.sequence=2 mesh.tensor=2 mesh.zero=1"),
        ("one-ring", "mesh.sequence=4 mesh.zero=2"),
        ("stages", "mesh.pipeline=2 mesh.tensor=2"),
    ] {
        let got = sft(4, name, mesh);
        assert_near(name, &got, &alone, &["loss", "grad_norm", "eval_loss"], (4e-3, 0.1));
        assert_near(name, &got, &cpu, &["loss", "grad_norm", "eval_loss"], (1e-2, 0.1));
        // In a near tie, the other device may choose another token.
        assert_near(name, &got, &cpu, &["eval_accuracy"], (0.1, 0.1));
    }
}

#[test]
fn distillation_metrics_equal_those_of_one_rank_and_of_the_cpu_in_every_layout() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    jobs::rlhf_hpc(at, "init --config model.json --tokenizer tokenizer --out teacher --seed 9");
    let evaluated =
        "data.split.by=field data.eval_split=eval eval.every_steps=2 eval.samples_max=20 optim.actor.lr=1e-3";
    let distill = |ranks, name: &str, sets: &str| {
        let distill = "job.kind=distill model.teachers=[\"teacher\",\"model\"] distill.minibatch_samples=4 job.steps=2";
        run(at, ranks, "sft.toml", name, &format!("{distill} {evaluated} {sets}")).0
    };
    let keys = ["loss", "ce_mean", "kl_mean", "grad_norm", "eval_loss", "eval_kl_mean"];
    // Both directions of the divergence.
    let jsd = "distill.divergence=jsd distill.temperature=1.5";
    let [alone, cpu] =
        [("alone", ""), ("cpu", "job.device=cpu")].map(|(name, sets)| distill(1, name, &format!("{jsd} {sets}")));
    assert_near("alone", &alone, &cpu, &keys, (1e-2, 0.1));
    let cut = distill(2, "cut", &format!("{jsd} mesh.tensor=2 mesh.offload=[\"roles\"]"));
    assert_near("cut", &cut, &alone, &keys, (4e-3, 0.1));
}

#[test]
fn sharded_weights_and_a_fixed_gradient_order_change_no_bit() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    // A schedule that does not depend on job.steps.
    let fixed = "gradient.order=fixed gradient.chunks=4 mesh.tensor=1 optim.actor.schedule=constant \
                 optim.actor.warmup_ratio=0.0";
    let recomputed = "mesh.data=2 mesh.tensor=1 gradient.recompute=true job.steps=1";
    for (job, ranks, sets) in [("sft.toml", 4, "mesh.data=2 mesh.tensor=2 job.steps=2"), ("ppo.toml", 2, recomputed)] {
        let [divided, gradients] = [3, 2].map(|stage| format!("{job}-{stage}"));
        let (steps, _) = run(at, ranks, job, &divided, &format!("{sets} mesh.zero=3"));
        run(at, ranks, job, &gradients, &format!("{sets} mesh.zero=2"));
        assert_same(at, &divided, &gradients);
        for step in steps.iter().filter(|_| job == "ppo.toml") {
            // Gathered weights give the log-probabilities of training.
            assert_eq!(number(step, "logprob_gap_max"), 0.0, "{step}");
            assert!(number(step, "reshard_bytes") > 0.0 && number(step, "time_reshard_s") > 0.0, "{step}");
        }
    }
    // The first step runs on four ranks, the second one on two.
    run(at, 1, "sft.toml", "alone", &format!("{fixed} job.steps=2"));
    run(at, 4, "sft.toml", "moved", &format!("{fixed} mesh.data=4 mesh.zero=1 job.steps=1"));
    run(at, 2, "sft.toml", "moved", &format!("{fixed} mesh.data=2 mesh.zero=0 job.steps=2"));
    assert_same(at, "moved", "alone");
}

#[test]
fn a_checkpoint_of_sharded_weights_resumes_on_the_cpu_and_in_another_layout() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let (begun, _) = run(at, 4, "sft.toml", "four", "mesh.data=4 mesh.tensor=1 mesh.zero=3 job.steps=2");
    let goes_on = |ranks, dir: &str, sets: &str| {
        copied(&at.join("four"), &at.join(dir));
        let (all, _) = run(at, ranks, "sft.toml", dir, &format!("{sets} job.steps=3"));
        assert_eq!((all.len(), &all[..2]), (3, &begun[..]), "{dir} resumes where four ranks stopped");
        all
    };
    let want = goes_on(4, "four-on", "mesh.data=4 mesh.tensor=1 mesh.zero=3");
    for (ranks, dir, sets) in [(1, "cpu-on", "job.device=cpu"), (2, "cut-on", "mesh.data=1 mesh.tensor=2")] {
        assert_near(dir, &goes_on(ranks, dir, sets), &want, &["loss", "grad_norm"], (0.02, 0.02));
    }
    // The export does not depend on the layout: without another step it equals that of the run.
    copied(&at.join("four"), &at.join("more"));
    std::fs::remove_dir_all(at.join("more/export")).expect("an export");
    run(at, 1, "sft.toml", "more", "job.steps=2");
    assert_same(at, "more", "four");
}

#[test]
fn the_banner_shows_the_collective_backend_and_the_reason() {
    let Some(dir) = emulated(jobs::CONFIG) else { return };
    let (two, one) = (&[("EMULATED_GPUS", "2")][..], &[("EMULATED_GPUS", "1")][..]);
    let nowhere = &[("RLHF_NCCL_LIB", "/nowhere/libnccl.so.2")][..];
    let instances = [two, &[("EMULATED_MIG", "1")]].concat();
    let shares = [one, &[("NCCL_MULTI_RANK_GPU_ENABLE", "1")]].concat();
    let shares_by_newer = [&shares[..], &[("EMULATED_NCCL_VERSION", "23003")]].concat();
    let mixed = [two, &[("EMULATED_CAPABILITY_1", "90")]].concat();
    // Two ranks that share a GPU, or that have one each and NCCL.
    for (sets, env, runs, words) in [
        ("mesh.data=2", one, true, "data: MPI through the host, because ranks 0 and 1 share a GPU"),
        ("mesh.tensor=2", two, true, "tensor: NCCL 2.21.5"),
        (
            "mesh.tensor=2 job.collectives=mpi",
            two,
            true,
            "tensor: MPI through the host, because job.collectives = \"mpi\"",
        ),
        ("mesh.data=2", &instances, true, "data: MPI through the host, because ranks 0 and 1 share a GPU"),
        (
            "mesh.data=2",
            &shares,
            true,
            "share a GPU, and NCCL_MULTI_RANK_GPU_ENABLE needs NCCL 2.30.3 or later (this is 2.21.5)",
        ),
        ("mesh.tensor=2", &shares_by_newer, true, "tensor: NCCL 2.30.3"),
        ("mesh.data=2", &mixed, true, "data: NCCL 2.21.5"),
        ("mesh.tensor=2", &mixed, false, "ranks of a tensor group need the same kernels: rank 0 has "),
        ("job.collectives=nccl", one, false, "the data axis cannot use NCCL because ranks 0 and 1 share a GPU"),
        ("job.collectives=nccl", nowhere, false, "because rank 0: /nowhere/libnccl"),
        ("job.collectives=nccl job.device=cpu", one, false, "job.collectives = \"nccl\" needs GPUs"),
    ] {
        let mut command = command(2, dir.path(), &format!("run --dry-run sft.toml {sets}"));
        let done = command.envs(env.iter().copied()).output().expect("mpirun starts");
        assert!(done.status.success() == runs && flat(&done).contains(words), "{sets:?}: {}", flat(&done));
    }
}
