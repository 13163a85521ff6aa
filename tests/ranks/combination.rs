//! Every legal product of axes, at every ZeRO stage: PPO's step on the same samples is that of one rank.

use crate::Test;
use crate::layouts::{Left, Setting, assert_near, attention, config, samples, texts, tuning, update, whole};
use crate::models::arch;
use crate::tensor_models::{self, capped, eight_experts, experts, hybrid_experts, latent, long, sinks};
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::config::Config;
use rlhf_hpc::config::method::ppo::PolicyLossKind;
use rlhf_hpc::data::SftRow;
use rlhf_hpc::experience::Experience;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Head};
use rlhf_hpc::optim::host_state::Vector;
use rlhf_hpc::tensor::DType;
use rlhf_hpc::train::methods::update::Update;
use serde_json::json;
use std::sync::Arc;

pub const TESTS: &[Test] = &[
    Test { name: "every combination of axes on eight ranks has the step of one rank", ranks: &[8], check: everywhere },
    Test { name: "models with other norms, caps and ropes have the step of one rank", ranks: &[8], check: dense },
    Test { name: "experts on several ranks have the step of one rank", ranks: &[8], check: divided },
    Test { name: "adapters on a frozen base have the step of one rank on any axes", ranks: &[8], check: adapted },
    Test {
        name: "a step clipped by its norm equals one rank's on any combination of axes",
        ranks: &[8],
        check: clipped,
    },
    Test { name: "the gradient of pretraining rows is added", ranks: &[1], check: pretraining },
];

/// Tokens of (prompt, response), heavy-tailed: most are short, a few as long as all others together.
pub const LENGTHS: &[(usize, usize)] = &[
    (3, 1),
    (1, 2),
    (5, 9),
    (2, 2),
    (7, 4),
    (1, 1),
    (9, 13),
    (4, 6),
    (12, 150),
    (2, 17),
    (6, 3),
    (1, 5),
    (8, 64),
    (3, 28),
];

/// Every (data, sequence, tensor) with this product.
fn products(ranks: usize) -> Vec<Mesh> {
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mesh = |tensor: usize| {
        let left = ranks / tensor;
        divisors(left).map(move |sequence| Mesh { data: left / sequence, pipeline: 1, sequence, tensor, expert: 1 })
    };
    divisors(ranks).flat_map(mesh).collect()
}

/// The step of one rank.
fn alone(arch: &Arch, config: &Config) -> Left {
    let want = update(arch, config, &samples(LENGTHS), &Axes::one(), 0);
    let least = [
        ("clip_ratio", 0.5),
        ("loss", 1e-3),
        ("kl_loss", 1e-3),
        ("value_clip_ratio", 0.5),
        ("value_loss", 0.01),
        ("ptx_loss", 1.0),
    ];
    assert!(least.iter().all(|(key, least)| want.sums.get(key).abs() > *least), "{:?}", want.sums);
    assert!(want.norms.iter().all(|norm| *norm > 0.01), "{:?}", want.norms);
    want
}

pub fn compare(world: &World, arch: &Arch, mut config: Config, layouts: &[(Mesh, &[usize])]) {
    let (samples, want) = (samples(LENGTHS), alone(arch, &config));
    let family = arch.family.name;
    for (mesh, stages) in layouts {
        let axes = Axes::split_mesh(&world.group(), mesh);
        for &stage in *stages {
            config.gradient.recompute = (stage % 2 == 1).into();
            let got = update(arch, &config, &samples, &axes, stage);
            let who = format!("{family} on {mesh}, zero {stage}");
            let largest = assert_near(&who, &got, &want);
            if world.rank == 0 {
                println!("{who}: the largest relative gap of a tensor is {largest:.1e}");
            }
        }
    }
}

/// Tests clipped tokens and whole sequences, with the stages in turn.
fn everywhere(world: &World) {
    for (family, loss, stages) in [("llama", PolicyLossKind::Clip, [1, 3]), ("qwen3", PolicyLossKind::Gspo, [0, 2])] {
        let turn = |(i, mesh): (usize, Mesh)| (mesh, &stages[i % 2..=i % 2]);
        let all: Vec<(Mesh, &[usize])> = products(world.size).into_iter().enumerate().map(turn).collect();
        assert_eq!(all.len(), 10, "8 = data x sequence x tensor");
        compare(world, &arch(family, &json!({})), config(loss), &all);
    }
}

/// Tests families whose layers differ, each on a few meshes.
fn dense(world: &World) {
    let mesh = |data, sequence, tensor| Mesh { data, pipeline: 1, sequence, tensor, expert: 1 };
    let few: [&[(Mesh, &[usize])]; 7] = [
        &[(mesh(1, 1, 8), &[1]), (mesh(2, 2, 2), &[3])],
        &[(mesh(4, 2, 1), &[2])],
        &[(mesh(2, 1, 4), &[3])],
        &[(mesh(8, 1, 1), &[3]), (mesh(2, 2, 2), &[2])],
        &[(mesh(4, 1, 2), &[3])],
        &[(mesh(2, 2, 2), &[3]), (mesh(1, 1, 8), &[1])],
        &[(mesh(2, 2, 2), &[3]), (mesh(1, 1, 8), &[1])],
    ];
    let cases = [
        ("olmo3", json!({"sliding_window": 7})),
        ("gemma2", capped()),
        ("phi3", long()),
        ("qwen3_moe", experts()),
        ("qwen3_next", hybrid_experts()),
        ("deepseek_v3", latent()),
        ("gpt_oss", sinks()),
    ];
    for ((family, keys), few) in cases.into_iter().zip(few) {
        compare(world, &arch(family, &keys), config(PolicyLossKind::Clip), few);
    }
}

/// Tests an expert axis next to each other axis, with stages that shard, and with few tokens: some ranks have none of an
/// expert.
fn divided(world: &World) {
    let mesh = |data, sequence, tensor, expert| Mesh { data, pipeline: 1, sequence, tensor, expert };
    let layouts: [(Mesh, &[usize]); 5] = [
        (mesh(8, 1, 1, 8), &[1, 3]),
        (mesh(8, 1, 1, 2), &[2, 3]),
        (mesh(4, 1, 2, 4), &[3]),
        (mesh(2, 2, 2, 4), &[1]),
        (mesh(4, 2, 1, 2), &[2]),
    ];
    let mixture = arch("qwen3_moe", &eight_experts());
    compare(world, &mixture, config(PolicyLossKind::Clip), &layouts);
    // With shared experts and the gated delta rule, which no sequence axis divides.
    let hybrid = arch("qwen3_5_moe_text", &hybrid_experts());
    compare(world, &hybrid, config(PolicyLossKind::Clip), &layouts[2..3]);
    // With a dense layer, groups of experts, and latent attention.
    compare(world, &arch("deepseek_v3", &latent()), config(PolicyLossKind::Clip), &layouts[3..]);
    // Experts with biases, which are whole on each rank.
    compare(world, &arch("gpt_oss", &sinks()), config(PolicyLossKind::Clip), &layouts);
    // Experts on a frozen base, which trains nothing of them.
    let arch = Arch { tuning: Some(Arc::new(attention())), ..mixture };
    compare(world, &arch, config(PolicyLossKind::Clip), &layouts[1..3]);
}

/// Tests adapters on a frozen base, with every stage.
fn adapted(world: &World) {
    let turn = |(i, mesh): (usize, Mesh)| (mesh, &[0, 1, 2, 3][i % 4..=i % 4]);
    let all: Vec<(Mesh, &[usize])> = products(world.size).into_iter().enumerate().map(turn).collect();
    let arch = Arch { tuning: Some(Arc::new(tuning())), ..arch("llama", &json!({})) };
    compare(world, &arch, config(PolicyLossKind::Clip), &all);
    let mesh = Mesh { data: world.size, pipeline: 1, sequence: 1, tensor: 1, expert: 1 };
    compare(world, &arch, config(PolicyLossKind::Clip), &[(mesh, &[0, 1, 2, 3])]);
}

/// The gradient with pretraining rows is that of the samples alone plus ptx_coef times that of the rows.
fn pretraining(_world: &World) {
    let (arch, config) = (arch("qwen3", &json!({})), config(PolicyLossKind::Clip));
    let gradient = |samples: &[Experience], texts: &[SftRow], ptx_coef: f32| {
        let mut config = config.clone();
        config.ppo.ptx_coef = ptx_coef;
        let setting = Setting { arch: arch.clone(), head: Head::LanguageModel, dtype: DType::F32, config };
        let axes = Axes::one();
        let mut learner = setting.learner(5, &axes, 0).expect("a learner");
        let update = Update { config: &setting.config, axes: &axes, kl_beta: 0.05, texts };
        let sums = update.gradient(&mut learner, &samples.iter().collect::<Vec<_>>());
        learner.step(&axes).expect("a finite gradient");
        (sums, whole(&learner, Vector::First, &axes))
    };
    let (samples, texts) = (samples(LENGTHS), texts(&[5, 40, 2, 17]));
    let [both, policy, rows] =
        [(&samples[..], &texts[..]), (&samples, &[]), (&[], &texts)].map(|(s, t)| gradient(s, t, 0.3));
    let (sums, twice) = gradient(&[], &texts, 0.6);
    let [loss, ptx] = ["loss", "ptx_loss"].map(|key| both.0.get(key));
    assert!((loss - policy.0.get("loss") - 0.3 * ptx).abs() < 1e-5 && ptx > 1.0, "{loss} with {ptx}");
    assert!((sums.get("ptx_loss") - ptx).abs() < 1e-6 && (rows.0.get("loss") - 0.3 * ptx).abs() < 1e-6);
    for (i, (name, sum)) in both.1.iter().enumerate() {
        let [policy, rows, twice] = [&policy.1, &rows.1, &twice].map(|vectors| &vectors[i].1);
        let wanted: Vec<f32> = policy.iter().zip(rows).map(|(a, b)| a + b).collect();
        tensor_models::assert_near(name, sum, &wanted, 1e-5);
        tensor_models::assert_near(name, twice, &rows.iter().map(|x| 2.0 * x).collect::<Vec<_>>(), 1e-5);
    }
}

/// The norm covers all ranks and counts copies once. It scales the gradients of all ranks.
fn clipped(world: &World) {
    let mut config = config(PolicyLossKind::Clip);
    (config.optim.actor.clip_norm, config.optim.actor.weight_decay) = (0.01, 0.1);
    let mesh = |data, sequence, tensor| Mesh { data, pipeline: 1, sequence, tensor, expert: 1 };
    compare(world, &arch("qwen3", &json!({})), config, &[(mesh(1, 1, 8), &[0]), (mesh(2, 2, 2), &[1, 3])]);
}
