//! Rollout on ranks that share heads and vocabulary: what is drawn, what is recorded, and how all of them end together.

use crate::Test;
use crate::tensor_models::{CONTEXT, Cut, SHAPES, Shape, bits};
use rlhf_hpc::comm::World;
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::error::{Error, Result};
use rlhf_hpc::experience::{Prompt, Response};
use rlhf_hpc::model::{Head, Keys, Transformer, Weights, packed_positions};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::{Engine, Hooks, Model, Outcome, Progress, Request, Stop, requests};
use rlhf_hpc::tensor::DType;
use std::cell::Cell;
use std::sync::Arc;

pub const TESTS: &[Test] = &[
    Test { name: "sampled generation on tensor ranks is one rank's", ranks: &[2, 8], check: sampled },
    Test {
        name: "log-probabilities recorded on tensor ranks are the training forward's, bitwise",
        ranks: &[4],
        check: recorded,
    },
    Test { name: "tensor ranks with unequal memory share one schedule", ranks: &[2], check: unequal },
    Test { name: "a tensor rank caches only the heads it holds", ranks: &[4], check: cached },
    Test { name: "one tensor rank's stop and one tensor rank's error end all", ranks: &[2], check: together },
];

fn prompts(shape: &Shape) -> Vec<Prompt> {
    let token = |i: usize, j: usize| (3 + (i * 31 + j * j * 7) % (shape.vocabulary - 3)) as u32;
    let prompt = |(i, &n): (usize, &usize)| Prompt {
        id: 100 + i as u64,
        tokens: (0..n).map(|j| token(i, j)).collect(),
        ..Prompt::default()
    };
    [3, 40, 16, 1, 9].iter().enumerate().map(prompt).collect()
}

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

fn requested(model: &Transformer, shape: &Shape, config: &RolloutConfig) -> Vec<Request> {
    let stop = Arc::new(Stop::new(config, &model.arch.eos_tokens));
    requests(&prompts(shape), config, &stop, CONTEXT).expect("legal prompts")
}

fn drive(
    (transformer, weights): &(Transformer, Weights),
    shape: &Shape,
    config: &RolloutConfig,
    hooks: &mut Hooks,
) -> Result<Outcome> {
    let model = Model { transformer, weights, tokenizer: None };
    let requests = requested(transformer, shape, config);
    Engine::new(config, 0).generate(model, Rng::new(42, Purpose::Sample), 3, &requests, hooks)
}

fn responses(model: &(Transformer, Weights), shape: &Shape, config: &RolloutConfig) -> Vec<Response> {
    let mut hooks = Hooks { stop: &|| false, progress: &mut |_| {}, finished: &mut |_, _| Ok(()) };
    drive(model, shape, config, &mut hooks).expect("a rollout").complete().expect("all of them")
}

/// Same tokens; log-probabilities differ by rounding.
fn same(shape: &Shape, got: &[Response], want: &[Response]) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!((&got.tokens, got.finish), (&want.tokens, want.finish), "{}: response {i}", shape.name);
        for (a, b) in [(&got.logprobs, &want.logprobs), (&got.sample_logprobs, &want.sample_logprobs)] {
            let near = a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 2e-4);
            assert!(near && a.len() == b.len(), "{}: response {i}: {a:?} against {b:?}", shape.name);
        }
    }
}

fn on_shapes(world: &World, config: &RolloutConfig) {
    for shape in SHAPES.iter().filter(|shape| shape.fits(world.size)) {
        let cut = Cut::new(world, shape, Head::LanguageModel, DType::F32);
        same(shape, &responses(&cut.part, shape, config), &responses(&cut.whole, shape, config));
    }
}

fn sampled(world: &World) {
    on_shapes(world, &config(1.0));
    let filters = RolloutConfig { top_k: 40, top_p: 0.9, min_p: 0.01, repetition_penalty: 1.1, ..config(0.8) };
    on_shapes(world, &RolloutConfig { response_tokens_min: 4, ..filters });
}

/// The log-probabilities of the responses' tokens in one packed training forward.
fn training(model: &(Transformer, Weights), shape: &Shape, responses: &[Response], temperature: f32) -> Vec<f32> {
    let (prompts, (transformer, weights)) = (prompts(shape), model);
    let (mut tokens, mut cu_seqlens, mut rows, mut targets) = (Vec::new(), vec![0], Vec::new(), Vec::new());
    for response in responses {
        let first = tokens.len() + prompts[response.prompt].tokens.len();
        tokens.extend_from_slice(&prompts[response.prompt].tokens);
        tokens.extend_from_slice(&response.tokens);
        rows.extend((0..response.tokens.len()).map(|i| (first + i - 1) as u32));
        targets.extend_from_slice(&response.tokens);
        cu_seqlens.push(tokens.len());
    }
    let keys = Keys::Packed { cu_seqlens: &cu_seqlens };
    let hidden = transformer.forward(weights, &tokens, &packed_positions(&cu_seqlens), keys, None);
    transformer.logprobs(weights, &hidden, &rows, &targets, temperature, false).0
}

fn recorded(world: &World) {
    for shape in SHAPES.iter().filter(|shape| shape.fits(world.size)) {
        for dtype in [DType::F32, DType::Bf16] {
            let cut = Cut::new(world, shape, Head::LanguageModel, dtype);
            let config = config(0.7);
            let responses = responses(&cut.part, shape, &config);
            let logprobs: Vec<f32> = responses.iter().flat_map(|r| r.logprobs.iter().copied()).collect();
            let trained = training(&cut.part, shape, &responses, config.temperature);
            assert_eq!(bits(&logprobs), bits(&trained), "{} {dtype:?}", shape.name);
        }
    }
}

fn unequal(world: &World) {
    let shape = &SHAPES[0];
    let cut = Cut::new(world, shape, Head::LanguageModel, DType::F32);
    let page = cut.part.0.kv_page_bytes();
    let with_pages = |pages: usize| {
        let config = RolloutConfig { kv_bytes_max: (page * pages) as u64, ..config(1.0) };
        let mut hooks = Hooks { stop: &|| false, progress: &mut |_| {}, finished: &mut |_, _| Ok(()) };
        drive(&cut.part, shape, &config, &mut hooks).expect("a rollout")
    };
    let ample = with_pages(60);
    // The last rank has room for few pages: fewer sequences run at a time, on all ranks.
    let outcome = with_pages(if world.rank == world.size - 1 { 5 } else { 60 });
    assert!(outcome.forwards > ample.forwards, "{} forwards against {}", outcome.forwards, ample.forwards);
    let forwards = world.group().all_gather_f64(&[outcome.forwards as f64, outcome.tokens_fed as f64]);
    assert!(forwards.iter().all(|f| *f == forwards[0]));
    same(shape, &outcome.complete().expect("all"), &responses(&cut.whole, shape, &config(1.0)));
}

fn cached(world: &World) {
    for shape in SHAPES.iter().filter(|shape| shape.fits(world.size)) {
        let cut = Cut::new(world, shape, Head::LanguageModel, DType::F32);
        let (part, whole) = (cut.part.0.kv_page_bytes(), cut.whole.0.kv_page_bytes());
        let k = cut.part.1.table.find("model.layers.0.self_attn.k_proj.weight").expect("keys");
        let copies = cut.part.1.table.spec(k).copies;
        assert_eq!(part * world.size, whole * copies, "{}", shape.name);
    }
}

fn together(world: &World) {
    let shape = &SHAPES[1];
    let cut = Cut::new(world, shape, Head::LanguageModel, DType::F32);
    let last = world.rank == world.size - 1;
    let forwards = Cell::new(0);
    let stop = || last && forwards.get() >= 6;
    let mut count = |_: Progress| forwards.set(forwards.get() + 1);
    let mut hooks = Hooks { stop: &stop, progress: &mut count, finished: &mut |_, _| Ok(()) };
    let outcome = drive(&cut.part, shape, &config(1.0), &mut hooks).expect("a rollout cut short");
    assert!(!outcome.unfinished().is_empty() && forwards.get() == 6, "{} forwards", forwards.get());

    let mut seen = 0;
    let mut finished = |_: usize, _: &Response| {
        seen += 1;
        if last && seen == 2 { Err(Error::fault("no room for the second response")) } else { Ok(()) }
    };
    let mut hooks = Hooks { stop: &|| false, progress: &mut |_| {}, finished: &mut finished };
    let error = drive(&cut.part, shape, &config(1.0), &mut hooks).expect_err("one rank failed");
    assert!(error.message.contains("no room for the second response"), "{error}");
    assert!(error.message.contains(&format!("rank {}", world.size - 1)), "{error}");
}
