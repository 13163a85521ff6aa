//! Numbers that can be computed by hand.

use super::models::{a800, arch, archs, job, llama2_7b, small, table};
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::Head::{LanguageModel, Value};
use rlhf_hpc::plan::time::Stage;
use rlhf_hpc::plan::{Job, Part, choose};

#[test]
fn llama2_7b_has_6738415616_parameters() {
    let arch = arch(&llama2_7b());
    let actor = table(&arch, LanguageModel, 1);
    assert_eq!(actor.parameters(), 6_738_415_616);
    // A value head of 4096 in place of 32000 x 4096.
    assert_eq!(table(&arch, Value, 1).parameters(), 6_738_415_616 - 32_000 * 4096 + 4096);
    // Embedding, 32 layers, final norm with the head; nothing of these widths needs padding.
    assert_eq!(actor.units().len(), 34);
    assert_eq!(actor.units()[1].len(), 2 * 4096 + 4 * 4096 * 4096 + 3 * 4096 * 11_008);
    assert_eq!(actor.len(), actor.parameters());
}

#[test]
fn parts_of_a_tensor_axis_add_up_to_the_model() {
    let arch = arch(&llama2_7b());
    for size in [2, 4, 8] {
        let held = table(&arch, LanguageModel, size).parameters();
        let norms = 65 * 4096;
        assert_eq!((held - norms) * size + norms, 6_738_415_616);
    }
}

#[test]
fn a_step_of_the_reference_workload_takes_at_least_the_time_of_its_flops_and_bytes() {
    let sets = ["mesh.tensor=1", "mesh.zero=3", "rollout.tensor=1", "rollout.batch_max=32"];
    let (config, archs) = (job(&sets), archs(&llama2_7b(), true));
    let choice = choose(&Job::new(&config, &archs, None), 16, &a800()).expect("it fits");
    let chosen = &choice.chosen;
    let layout = chosen.layout();
    assert_eq!(layout.mesh, Mesh::data_only(16));
    // Per rank 64 rows of 2048 tokens; 6.476e9 elements of layers. Training: two models, forward twice (recomputed, but
    // for the MLP's last product) and backward: 8 FLOPs an element and token; the actor's head 6 a row of 1024.
    let tokens = 64.0 * 2048.0;
    let layers = 32.0 * (4.0 * 4096.0 * 4096.0 + 3.0 * 4096.0 * 11_008.0);
    let pairs = 64.0 * (2048.0 * 2049.0 / 2.0);
    let attention = 2.0 * 4.0 * 4.0 * 4096.0 * 32.0 * pairs;
    let head = 6.0 * 4096.0 * 32_000.0 * 64.0 * 1024.0;
    let last = 2.0 * 2.0 * tokens * 32.0 * 4096.0 * 11_008.0;
    let flops = 2.0 * 8.0 * tokens * layers - last + attention + head;
    let floor = chosen.floor_of(Stage::Training);
    assert!((floor - flops / 312e12).abs() < 0.01 * floor, "{floor} and {}", flops / 312e12);
    // Decoding reads the weights once a token step and wave, and each sample's cache.
    let kv = chosen.main().memory.kv.expect("a cache");
    assert_eq!((kv.token_bytes, kv.samples), (524_288, 64));
    let weights = 2.0 * (layers + 4096.0 * 32_000.0) * 1023.0 * kv.batches as f64;
    let cached = 64.0 * 1023.0 * 524_288.0 * (1024.0 + 1023.0 / 2.0);
    let floor = chosen.floor_of(Stage::Decode);
    assert!((floor - (weights + cached) / 2.039e12).abs() < 0.01 * floor, "{floor}");
    assert!(chosen.step_s() > chosen.floor_s());
}

#[test]
fn microbatches_stay_within_the_budget_and_are_as_few_as_possible() {
    let archs = archs(&small(), false);
    // 51 rows of 160 tokens fit 8192.
    let cut = |rows: usize, mesh: &Mesh| {
        let sizes = [format!("rollout.prompts_per_step={rows}"), format!("ppo.minibatch_samples={rows}")];
        let lengths = ["data.prompt_tokens_max=100", "rollout.response_tokens_max=60"];
        let config = job(&[&lengths[..], &sizes.each_ref().map(String::as_str)].concat());
        let microbatches = Job::new(&config, &archs, None).training(mesh).swap_remove(0).swap_remove(0);
        (microbatches.iter().map(|batch| batch.rows).max().unwrap_or(0), microbatches.len())
    };
    let one = Mesh::data_only(1);
    assert_eq!([cut(51, &one), cut(52, &one), cut(128, &one)], [(51, 1), (26, 2), (43, 3)]);
    // Ranks that share each row share its budget.
    let ring = Mesh { sequence: 2, ..one };
    assert_eq!(cut(102, &ring), (102, 1));
}

/// The part with this name on the actor's ranks, with explicit axes.
fn part(axes: &str, world: usize, name: &str) -> Part {
    let sets: Vec<&str> = axes.split(' ').chain(["rollout.prompts_per_step=128"]).collect();
    let (config, archs) = (job(&sets), archs(&llama2_7b(), false));
    let choice = choose(&Job::new(&config, &archs, None), world, &a800()).expect("it fits");
    let parts = &choice.chosen.main().time.parts;
    let found = parts.iter().find(|part| part.name == name);
    found.unwrap_or_else(|| panic!("{name} is none of {:?}", parts.iter().map(|p| &p.name).collect::<Vec<_>>())).clone()
}

#[test]
fn a_ring_over_nodes_uses_the_link_of_one_rank_and_collectives_use_all_links() {
    for (axes, ranks, name, bound, peak) in [
        ("mesh.sequence=8 mesh.tensor=1 rollout.tensor=1 mesh.zero=3", 8, "train: shift over sequence", "link", 200e9),
        // A rank sends to the next alone.
        (
            "mesh.sequence=16 mesh.tensor=1 rollout.tensor=1 mesh.zero=3",
            16,
            "train: shift over sequence",
            "network",
            25e9,
        ),
        // 8 ranks of a node share what a collective sends to the other.
        ("mesh.tensor=1 rollout.tensor=1 mesh.zero=3", 16, "train: gather over zero", "link", 200e9),
        // 2 of them where 4 share matrices.
        ("mesh.tensor=4 rollout.tensor=4 mesh.zero=3", 16, "train: gather over zero", "network", 50e9),
    ] {
        let part = part(axes, ranks, name);
        assert_eq!((part.bound, part.peak), (bound, peak), "{axes}");
    }
}

#[test]
fn small_collectives_have_the_latency_that_nccl_estimates() {
    let sums = part("mesh.tensor=8 rollout.tensor=8 mesh.zero=1", 8, "decode: sum_ordered over tensor");
    // 14 steps around a ring of 8.
    let latency = (sums.busy_s - sums.floor_s / sums.efficiency) / sums.work.calls;
    assert!((latency - (10e-6 + 14.0 * 1.9e-6)).abs() < 1e-9, "{latency} s a call");
    // Two sums a layer in each of 1023 steps.
    assert!(sums.work.calls >= 1023.0 * 64.0, "{} calls", sums.work.calls);
}
