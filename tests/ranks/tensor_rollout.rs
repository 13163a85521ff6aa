//! Rollout on tensor ranks: the samples, the recorded log-probabilities, and errors that end all ranks.

use crate::Test;
use crate::models::{prompts, recorded_and_trained, requested};
use crate::tensor_models::{Side, all_cut_shapes, bits, cut_shapes, shapes};
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::error::{Error, Result};
use rlhf_hpc::experience::Response;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::Arch;
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::{Beams, EarlyStopping, Engine, Hooks, Model, Outcome, Progress};
use rlhf_hpc::tensor::DType;
use std::cell::Cell;

pub const TESTS: &[Test] = &[
    Test { name: "sampling on tensor ranks equals one rank's", ranks: &[2, 8], check: sampled },
    Test {
        name: "recorded log-probabilities on tensor ranks equal the training forward's bitwise",
        ranks: &[4],
        check: recorded,
    },
    Test { name: "a beam search on tensor ranks equals one rank's", ranks: &[2, 8], check: searched },
    Test { name: "tensor ranks with unequal memory share one schedule", ranks: &[2], check: unequal },
    Test { name: "a tensor rank caches only the heads it holds", ranks: &[4], check: cached },
    Test { name: "a stop or an error of one tensor rank ends all", ranks: &[2], check: together },
];

const PROMPTS: &[usize] = &[3, 40, 16, 1, 9];

fn config(temperature: f32) -> RolloutConfig {
    RolloutConfig {
        response_tokens_max: 20,
        samples_per_prompt: 3,
        temperature,
        batch_max: 7,
        prefill_tokens_max: 24,
        kv_bytes_max: 1 << 30,
        ..RolloutConfig::default()
    }
}

/// With sampling masks, some of which exclude the whole vocabulary shard of a rank.
fn masked() -> RolloutConfig {
    RolloutConfig { top_k: 5, keep_sampling_mask: true, ..config(0.7) }
}

fn drive(side: &Side, config: &RolloutConfig, hooks: &mut Hooks) -> Result<Outcome> {
    let Side { transformer, weights, .. } = side;
    let requests = requested(transformer, &prompts(PROMPTS), config);
    let model = Model { transformer, weights, tokenizer: None };
    Engine::new(config, 0).generate(model, Rng::new(42, Purpose::Sample), 3, &requests, hooks)
}

/// Generates all responses.
fn outcome(side: &Side, config: &RolloutConfig) -> Outcome {
    let mut hooks = Hooks::default();
    drive(side, config, &mut hooks).expect("a rollout")
}

fn responses(side: &Side, config: &RolloutConfig) -> Vec<Response> {
    outcome(side, config).complete().expect("all of them")
}

/// This rank's part of a model, all ranks along the tensor axis; and the model on one rank.
fn sides(world: &World, arch: &Arch, dtype: DType) -> [Side; 2] {
    let mesh = Mesh { tensor: world.size, ..Mesh::data_only(1) };
    [Axes::split_mesh(&world.group(), &mesh), Axes::one()].map(|axes| Side::new(arch, dtype, &axes))
}

/// Same tokens; log-probabilities differ by rounding.
fn same(what: &str, got: &[Response], want: &[Response]) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!((&got.tokens, got.finish), (&want.tokens, want.finish), "{what}: response {i}");
        assert_eq!(got.sampling_masks, want.sampling_masks, "{what}: response {i}");
        for (a, b) in [(&got.logprobs, &want.logprobs), (&got.sample_logprobs, &want.sample_logprobs)] {
            let near = a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 2e-4);
            assert!(near && a.len() == b.len(), "{what}: response {i}: {a:?} against {b:?}");
        }
    }
}

fn sampled(world: &World) {
    let filters = RolloutConfig { top_k: 40, top_p: 0.9, min_p: 0.01, repetition_penalty: 1.1, ..config(0.8) };
    for config in [config(1.0), RolloutConfig { response_tokens_min: 4, ..filters }, masked()] {
        for (name, arch) in cut_shapes(world.size) {
            let [part, whole] = sides(world, &arch, DType::F32).map(|side| responses(&side, &config));
            same(name, &part, &whole);
        }
    }
}

fn searched(world: &World) {
    // Beams that repeat a token have almost equal scores.
    let config = RolloutConfig {
        repetition_penalty: 1.5,
        stop_token_ids: (40..50).collect(),
        response_tokens_max: 10,
        ..config(1.0)
    };
    let beams = Beams { count: 4, early_stopping: EarlyStopping::False, length_penalty: 1.0 };
    for (name, arch) in cut_shapes(world.size) {
        let [part, whole] = sides(world, &arch, DType::F32).map(|Side { transformer, weights, .. }| {
            let requests = requested(&transformer, &prompts(PROMPTS), &config);
            let model = Model { transformer: &transformer, weights: &weights, tokenizer: None };
            let mut hooks = Hooks::default();
            let outcome = Engine::new(&config, 0).beam_search(model, beams, &requests, &mut hooks);
            outcome.expect("a search").complete().expect("all of them")
        });
        same(name, &part, &whole);
    }
}

fn recorded(world: &World) {
    for (name, arch) in all_cut_shapes(world.size) {
        for dtype in [DType::F32, DType::Bf16] {
            let [part, _] = sides(world, &arch, dtype);
            for config in [config(0.7), masked()] {
                let responses = responses(&part, &config);
                let [recorded, trained] =
                    recorded_and_trained(&part.transformer, &part.weights, &prompts(PROMPTS), &responses, 0.7);
                assert_eq!(bits(&recorded), bits(&trained), "{name} {dtype:?}");
            }
        }
    }
}

fn unequal(world: &World) {
    let (name, arch) = &shapes()[0];
    let [part, whole] = sides(world, arch, DType::F32);
    let with_pages = |pages: usize| {
        let kv_bytes_max = (part.transformer.kv_page_bytes(DType::F32).iter().sum::<usize>() * pages) as u64;
        outcome(&part, &RolloutConfig { kv_bytes_max, ..config(1.0) })
    };
    let ample = with_pages(60);
    // The last rank has memory for few pages, so fewer sequences run at a time on all ranks.
    let outcome = with_pages(if world.rank == world.size - 1 { 5 } else { 60 });
    assert!(outcome.forwards > ample.forwards, "{} forwards against {}", outcome.forwards, ample.forwards);
    let forwards = world.group().all_gather_numbers(&[outcome.forwards as f64, outcome.tokens_fed as f64]);
    assert!(forwards.iter().all(|f| *f == forwards[0]));
    same(name, &outcome.complete().expect("all"), &responses(&whole, &config(1.0)));
}

fn cached(world: &World) {
    for (name, arch) in cut_shapes(world.size) {
        let [part, whole] = sides(world, &arch, DType::F32);
        let k = part.weights.table.find("model.layers.0.self_attn.k_proj.weight").expect("keys");
        let copies = part.weights.table.spec(k).copies;
        let [held, all] =
            [&part, &whole].map(|model| model.transformer.kv_page_bytes(DType::F32).iter().sum::<usize>());
        assert_eq!(held * world.size, all * copies, "{name}");
    }
}

fn together(world: &World) {
    let [part, _] = sides(world, &shapes()[1].1, DType::F32);
    let last = world.rank == world.size - 1;
    let forwards = Cell::new(0);
    let stop = || last && forwards.get() >= 6;
    let mut count = |_: Progress| forwards.set(forwards.get() + 1);
    let mut hooks = Hooks { stop: Some(&stop), progress: Some(&mut count), ..Hooks::default() };
    let outcome = drive(&part, &config(1.0), &mut hooks).expect("a rollout cut short");
    assert!(outcome.responses.contains(&None) && forwards.get() == 6, "{} forwards", forwards.get());

    let mut seen = 0;
    let mut finished = |_: usize, _: &Response| {
        seen += 1;
        if last && seen == 2 { Err(Error::fault("no room for the second response")) } else { Ok(()) }
    };
    let mut hooks = Hooks { finished: Some(&mut finished), ..Hooks::default() };
    let error = drive(&part, &config(1.0), &mut hooks).expect_err("one rank failed");
    assert!(error.message.contains("no room for the second response"), "{error}");
    assert!(error.message.contains(&format!("rank {}", world.size - 1)), "{error}");
}
