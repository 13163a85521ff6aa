//! The effect of ZeRO stages, tensor parts, recomputation and row lengths on the bytes of a rank.

use super::models::{a800, archs, job, llama2_7b, small, table};
use rlhf_hpc::config::Config;
use rlhf_hpc::config::mesh::{Offload, RoleName};
use rlhf_hpc::launch::layout::{Layout, Swap};
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::Head;
use rlhf_hpc::plan::{self, Device, Job, Memory, Phase};
use rlhf_hpc::train::Archs;

/// Settings with few sampled tokens, which a plan counts step by step. Rows are as long as in the whole workload.
const SHORT: [&str; 4] = [
    "rollout.prompts_per_step=32",
    "ppo.minibatch_samples=32",
    "data.prompt_tokens_max=1984",
    "rollout.response_tokens_max=64",
];

const ROLES: [RoleName; 3] = [RoleName::Actor, RoleName::Reference, RoleName::Critic];

fn layout(mesh: Mesh, zero: usize) -> Layout {
    Layout { mesh, zero, chunks: 1, rollout_tensor: mesh.tensor, swap: Swap::default() }
}

fn count(config: &Config, archs: &Archs, layout: &Layout, device: &Device) -> Memory {
    let job = Job::new(config, archs, None);
    let device = Device { threads: 2, ..device.clone() };
    plan::count(&job, layout, &device, &ROLES).0
}

/// Bytes in one phase of the owners whose names begin so.
fn bytes_of(memory: &Memory, phase: Phase, owner: &str) -> usize {
    memory.peaks[&phase].parts.iter().filter(|(name, _)| name.starts_with(owner)).map(|(_, bytes)| bytes).sum()
}

const WEIGHTS: &str = "weights";
const GRADIENTS: &str = "gradients";
const STATE: &str = "optimizer state";

/// Elements of the actor's largest unit.
fn largest_unit(archs: &Archs) -> usize {
    let table = table(archs.actor(), Head::LanguageModel, 1);
    table.units().iter().map(std::ops::Range::len).max().expect("a model has units")
}

fn near(found: usize, wanted: usize) -> bool {
    found.abs_diff(wanted) <= wanted / 100
}

#[test]
fn stages_shard_state_then_gradients_then_weights_on_1_2_and_4_ranks() {
    let (config, archs) = (job(&SHORT), archs(&llama2_7b(), false));
    let [actor, critic] = [Head::LanguageModel, Head::Value].map(|head| table(archs.actor(), head, 1).len());
    let (learned, all) = (actor + critic, 2 * actor + critic);
    for ranks in [1, 2, 4] {
        let mesh = Mesh::data_only(ranks);
        let share = |sharded: bool, n: usize| if sharded { n / ranks } else { n };
        for stage in 0..4 {
            let found = count(&config, &archs, &layout(mesh, stage), &a800());
            let state = bytes_of(&found, Phase::Load, STATE);
            assert!(near(state, 12 * share(stage >= 1, learned)), "state at stage {stage} on {ranks}: {state}");
            let weights = bytes_of(&found, Phase::Load, WEIGHTS);
            assert!(near(weights, 2 * share(stage == 3, all)), "weights at stage {stage} on {ranks}: {weights}");
            // At the peak of training, the units of gradients that are being added come on top.
            let gradients = bytes_of(&found, Phase::Train, GRADIENTS);
            let kept = 4 * share(stage >= 2, learned);
            let units = if stage >= 2 && ranks > 1 { 2 * 4 * largest_unit(&archs) } else { 0 };
            assert!(
                gradients + kept / 100 >= kept && gradients <= kept + kept / 100 + units,
                "{gradients} of {kept} + {units}"
            );
        }
    }
}

#[test]
fn a_limited_cache_runs_in_batches_and_holds_at_least_the_longest_row() {
    let archs = archs(&llama2_7b(), true);
    let layout = layout(Mesh::data_only(16), 3);
    let kv = |more: &[&str]| count(&job(more), &archs, &layout, &a800()).kv.expect("a cache");
    let all = kv(&["rollout.kv_bytes_max=100000000000"]);
    // A GiB for each sample of 2048 tokens.
    assert_eq!((all.at_once, all.batches, all.bytes, all.bytes_wanted), (64, 1, 64 << 30, 64 << 30));
    let half = kv(&["rollout.kv_bytes_max=40000000000"]);
    // All whole pages of 16 MiB within the given memory.
    assert_eq!((half.at_once, half.batches, half.bytes), (37, 2, 2384 << 24));
    assert_eq!(kv(&["rollout.batch_max=16"]).batches, 4);
    // The engine fills the batch, and the last one has the remaining samples.
    let most = kv(&["rollout.batch_max=40"]);
    assert_eq!((most.at_once, most.batches, most.bytes), (40, 2, 40 << 30));
    // A run accepts a cache that holds 64 pages of 32 tokens, 16 MiB each, for its longest row, and so does the plan.
    for (bytes, fits) in [(1usize << 30, true), ((1 << 30) - 1, false)] {
        let found = count(&job(&[&format!("rollout.kv_bytes_max={bytes}")]), &archs, &layout, &a800());
        assert_eq!(found.fits, fits, "{bytes} bytes");
    }
}

#[test]
fn offloaded_state_uses_no_memory_in_the_rollout_and_returns_for_the_update() {
    let (config, archs) = (job(&["rollout.kv_bytes_max=10000000000"]), archs(&llama2_7b(), false));
    let plain = layout(Mesh::data_only(16), 1);
    let swapped = Layout { swap: Swap::from_offload(&[Offload::Optimizer, Offload::Roles]), ..plain };
    let [plain, swapped] = [plain, swapped].map(|layout| count(&config, &archs, &layout, &a800()));
    let rollout = |m: &Memory, owner| bytes_of(m, Phase::Rollout, owner);
    assert!(rollout(&plain, STATE) > 0 && rollout(&swapped, STATE) == 0);
    assert!(rollout(&swapped, WEIGHTS) < rollout(&plain, WEIGHTS));
    let train = |m: &Memory| m.peaks[&Phase::Train].bytes;
    assert!(train(&swapped) < train(&plain), "one learner's state comes back at a time");
    assert_eq!(bytes_of(&swapped, Phase::Load, STATE), 0, "it is never whole on the GPU");
    assert_eq!(bytes_of(&swapped, Phase::Checkpoint, STATE), 0, "it is saved from the host's memory");
    assert!(swapped.host > 20 * plain.host.max(1 << 20), "{} and {}", swapped.host, plain.host);
}

#[test]
fn state_in_mapped_files_is_saved_one_vector_at_a_time() {
    let (config, archs) = (job(&["model.dtype=f32"]), archs(&small(), false));
    let plain = layout(Mesh::data_only(1), 1);
    let away = Layout { swap: Swap::from_offload(&[Offload::Optimizer]), ..plain };
    let [plain, away] = [plain, away].map(|layout| count(&config, &archs, &layout, &Device::cpu(1 << 40, 1)));
    let saved = |m: &Memory| bytes_of(m, Phase::Checkpoint, STATE);
    let actor = 4 * table(archs.actor(), Head::LanguageModel, 1).len();
    assert!(near(saved(&away), actor), "the larger learner's first moment, or its second");
    assert!(saved(&plain) > 3 * actor, "two learners, two moments");
}

#[test]
fn no_rank_needs_memory_for_a_whole_sharded_model_even_to_load_or_export_it() {
    let (config, archs) = (job(&SHORT), archs(&llama2_7b(), false));
    for (mesh, stage) in [
        (Mesh::data_only(16), 3),
        (Mesh { tensor: 4, ..Mesh::data_only(4) }, 0),
        (Mesh { tensor: 2, ..Mesh::data_only(8) }, 3),
    ] {
        let found = count(&config, &archs, &layout(mesh, stage), &a800());
        let gathered = [Phase::Load, Phase::Checkpoint].map(|phase| bytes_of(&found, phase, "gathered units"));
        assert_eq!(gathered[0], 0, "{mesh:?}, stage {stage}: each rank reads its part of the files");
        let units = 2 * 3 * largest_unit(&archs);
        assert!(gathered[1] <= units, "{mesh:?}, stage {stage}: {} of {units}", gathered[1]);
    }
}

#[test]
fn an_actor_with_its_own_ranks_generates_in_batches_and_caches_one_of_them() {
    let archs = archs(&small(), false);
    let place = "mesh.placement=[{ roles = [\"actor\", \"reference\"], ranks = \"0..1\" }, \
                 { roles = [\"critic\", \"reward\"], ranks = \"1..2\" }]";
    let layout = layout(Mesh::data_only(1), 1);
    let sizes = ["rollout.prompts_per_step=64", "data.prompt_tokens_max=96", "rollout.response_tokens_max=96"];
    let kv = |more: &[&str]| {
        let config = job(&[&sizes[..], more].concat());
        count(&config, &archs, &layout, &Device::cpu(1 << 40, 1)).kv.expect("a cache")
    };
    let (together, apart) = (kv(&[]), kv(&[place]));
    assert_eq!((together.samples, together.at_once, together.batches), (64, 64, 1));
    assert_eq!((apart.samples, apart.at_once, apart.batches), (16, 16, 1), "a batch of four");
    assert_eq!((apart.bytes * 4, apart.bytes_wanted * 4), (together.bytes, together.bytes_wanted));
}
