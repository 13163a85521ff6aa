//! The engine on the GPU: responses by graphs equal those of ordinary steps, bit for bit.

use crate::device;
use crate::model::{VOCABULARY, gated, gemma2, hybrid, llama, ministral3, qwen3, qwen3_moe};
use crate::models::recorded_and_trained;
use rlhf_hpc::comm::Axes;
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cuda::pool::Usage;
use rlhf_hpc::dtype::KvDtype;
use rlhf_hpc::error::Result;
use rlhf_hpc::experience::{Finish, Prompt, Response};
use rlhf_hpc::model::{Arch, Head, Mixer, TensorPart, Transformer, Weights, init};
use rlhf_hpc::ops::attention::PAGE;
use rlhf_hpc::ops::sample::SampleParams;
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::{Beams, EarlyStopping, Edits, Engine, Hooks, Model, Outcome, Progress, Request, Stop};
use rlhf_hpc::tensor::DType;
use rlhf_hpc::text::Tokenizer;
use std::path::Path;
use std::sync::Arc;

/// A rank's part of a model.
pub struct Part {
    transformer: Transformer,
    weights: Weights,
}

impl Part {
    pub fn new(arch: &Arch, axes: &Axes) -> Self {
        let part = TensorPart::from_group(&axes.tensor);
        let weights = init::init_on(Device::Cuda, arch, Head::LanguageModel, DType::Bf16, 11, part);
        Self { transformer: Transformer::for_axes(arch, &weights.table, axes), weights }
    }

    pub fn config(&self, batch_max: usize, pages: usize, graphs: bool) -> RolloutConfig {
        let kv_bytes_max = (pages * self.transformer.kv_page_bytes(DType::Bf16).iter().sum::<usize>()) as u64;
        RolloutConfig { batch_max, kv_bytes_max, prefill_tokens_max: 128, graphs, ..RolloutConfig::default() }
    }

    pub fn engine(&self, batch_max: usize, graphs: bool) -> Engine {
        Engine::new(&self.config(batch_max, 60, graphs), 0)
    }

    pub fn answers(
        &self,
        tokenizer: Option<&Tokenizer>,
        engine: &mut Engine,
        requests: &[Request],
        hooks: &mut Hooks,
    ) -> Result<Outcome> {
        let model = Model { transformer: &self.transformer, weights: &self.weights, tokenizer };
        engine.generate(model, Rng::new(42, Purpose::Sample), 3, requests, hooks)
    }

    pub fn run(&self, engine: &mut Engine, requests: &[Request]) -> Outcome {
        self.run_seen(None, engine, requests, &mut |_| {})
    }

    /// `seen` is called after every step.
    fn run_seen(
        &self,
        tokenizer: Option<&Tokenizer>,
        engine: &mut Engine,
        requests: &[Request],
        seen: &mut dyn FnMut(Progress),
    ) -> Outcome {
        let mut hooks = Hooks { progress: Some(seen), ..Hooks::default() };
        self.answers(tokenizer, engine, requests, &mut hooks).expect("a rollout")
    }
}

fn tiny(arch: &Arch) -> Part {
    Part::new(arch, &Axes::one())
}

/// Request `i`: sample `i % 3` of a prompt with three samples, with its own parameters, stops and length.
pub fn request(i: usize, new_tokens_max: usize) -> Request {
    let prompt = i / 3;
    let tokens: Vec<u32> = (0..=prompt * 11 % 40).map(|j| ((i / 3 * 17 + j * 5 + 3) % VOCABULARY) as u32).collect();
    let stops = [vec![], vec![2, 30, 31, 2], vec![5], (0..12).collect()];
    Request {
        prompt,
        prompt_id: 1_000_000_007 * prompt as u64,
        sample: i as u32 % 3,
        tokens: tokens.into(),
        images: Arc::default(),
        params: SampleParams {
            temperature: [1.0, 0.0, 0.6, 1.3][i % 4],
            top_k: [0, 7, 0, 30][i / 2 % 4],
            top_p: [1.0, 0.9, 1.0][i % 3],
            min_p: [0.0, 0.03][i / 3 % 2],
            repetition_penalty: 1.0,
        },
        new_tokens_min: [0, 9, 3][i % 3],
        new_tokens_max,
        stop: Arc::new(Stop { tokens: stops[i % 4].clone(), strings: Vec::new(), ..Stop::default() }),
        edits: Arc::default(),
        top_logprobs: 0,
        keeps_mask: false,
        rng: None,
        step: None,
        partial: None,
    }
}

/// All bits of a response.
pub type Bits = (Vec<u32>, Vec<u32>, Vec<u32>, Finish, String);

pub fn bits(outcome: &Outcome) -> Vec<Bits> {
    let of = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect();
    let response = |r: &Option<Response>| {
        let r = r.as_ref().expect("it has ended");
        (r.tokens.clone(), of(&r.logprobs), of(&r.sample_logprobs), r.finish, r.text.clone())
    };
    outcome.responses.iter().map(response).collect()
}

/// The outcomes by graphs and by ordinary steps, which hold the same responses.
fn both(config: &RolloutConfig, tiny: &Part, requests: &[Request], tokenizer: Option<&Tokenizer>) -> [Outcome; 2] {
    let run = |graphs| {
        let mut engine = Engine::new(&RolloutConfig { graphs, ..config.clone() }, 0);
        tiny.run_seen(tokenizer, &mut engine, requests, &mut |_| {})
    };
    let [by_graphs, ordinary] = [run(true), run(false)];
    for (i, (a, b)) in bits(&by_graphs).into_iter().zip(bits(&ordinary)).enumerate() {
        assert_eq!(a, b, "request {i}");
    }
    assert_eq!(ordinary.graph_steps, 0);
    eprintln!(
        "{} of {} forwards were graphs, {} preemptions; {} ordinary",
        by_graphs.graph_steps, by_graphs.forwards, by_graphs.preemptions, ordinary.forwards
    );
    [by_graphs, ordinary]
}

#[test]
fn responses_by_graphs_equal_those_of_ordinary_steps_for_all_parameters_and_stops() {
    let (_gpu, _one) = device();
    for arch in [llama(), qwen3(), qwen3_moe(2), hybrid(2)] {
        let tiny = tiny(&arch);
        let mut requests: Vec<Request> = (0..9).map(|i| request(i, 3 + i * 7 % 26)).collect();
        for (i, request) in requests.iter_mut().enumerate() {
            request.params.repetition_penalty = [1.0, 1.3, 0.6][i % 3];
        }
        let [outcome, _] = both(&tiny.config(9, 100, true), &tiny, &requests, None);
        assert!(outcome.graph_steps * 2 > outcome.forwards, "{} of {}", outcome.graph_steps, outcome.forwards);
        let finishes: Vec<Finish> = outcome.responses.iter().flatten().map(|r| r.finish).collect();
        assert!([Finish::Stop, Finish::Length].iter().all(|f| finishes.contains(f)), "{finishes:?}");
        let crosses = |(request, r): (&Request, &Response)| {
            let first = request.tokens.len();
            first / PAGE < (first + r.tokens.len() - 2) / PAGE
        };
        assert!(requests.iter().zip(outcome.responses.iter().flatten()).any(crosses), "a page is crossed");
    }
}

#[test]
fn pages_of_windows_are_used_again_while_graphs_run_and_no_bit_changes() {
    let (_gpu, _one) = device();
    for (windows, mut arch) in [
        ([None, Some(7)], llama()),
        ([Some(40), Some(7)], llama()),
        ([None, None], qwen3_moe(3)),
        ([Some(7), None], gemma2()),
        ([None, None], ministral3()),
        ([None, None], gated(3)),
        ([None, None], hybrid(3)),
    ] {
        for (block, window) in arch.blocks.iter_mut().zip(windows) {
            if let Mixer::Attention(attention) = &mut block.mixer {
                attention.window = window;
            }
        }
        let tiny = tiny(&arch);
        // The long responses meet a cache that expects short ones.
        let requests: Vec<Request> = plain(12, |i| if i < 9 { 2 } else { 75 });
        let [outcome, _] = both(&tiny.config(4, 5, true), &tiny, &requests, None);
        assert!(outcome.graph_steps > 70, "{windows:?}: {} of {}", outcome.graph_steps, outcome.forwards);
        assert_training_bits(&tiny, &requests, outcome, &format!("{windows:?}"));
    }
}

/// Asserts that a training forward has the log-probabilities of the responses.
fn assert_training_bits(tiny: &Part, requests: &[Request], outcome: Outcome, what: &str) {
    let prompts: Vec<Prompt> =
        requests.iter().map(|r| Prompt { tokens: r.tokens.to_vec(), ..Prompt::default() }).collect();
    let mut responses = outcome.complete().expect("all of them");
    responses.iter_mut().enumerate().for_each(|(i, response)| response.prompt = i);
    let [recorded, trained] = recorded_and_trained(&tiny.transformer, &tiny.weights, &prompts, &responses, 1.0);
    assert_eq!(recorded, trained, "{what}");
}

#[test]
fn keys_in_8_bits_are_those_of_training_in_graphs_with_shared_prompts_and_after_preemption() {
    let (_gpu, _one) = device();
    let length = |i: usize| if i < 9 { 2 } else { 45 };
    let of = |i| Request { new_tokens_min: length(i), params: SampleParams::plain(1.0), ..request(i, length(i)) };
    let requests: Vec<Request> = (0..13).map(of).collect();
    for (i, arch) in [llama(), gemma2(), hybrid(3)].into_iter().enumerate() {
        let exact = tiny(&arch);
        let rounded = tiny(&arch.with_keys_in(KvDtype::Fp8));
        let [outcome, _] = both(&rounded.config(4, 7, true), &rounded, &requests, None);
        assert!(outcome.graph_steps > 20 && (i > 0 || outcome.preemptions > 0), "{} preemptions", outcome.preemptions);
        let logprobs = |outcome: &Outcome| -> Vec<f32> {
            outcome.responses.iter().flatten().flat_map(|response| response.logprobs.clone()).collect()
        };
        let others = exact.run(&mut exact.engine(4, true), &requests);
        assert!(logprobs(&outcome) != logprobs(&others), "keys are rounded");
        assert_training_bits(&rounded, &requests, outcome, &format!("model {i}"));
    }
    // 65 bytes for a head of 64 values of 2 bytes.
    let bytes = |arch: Arch| tiny(&arch).transformer.kv_page_bytes(DType::Bf16)[0];
    assert_eq!(bytes(llama().with_keys_in(KvDtype::Fp8)) * 128, bytes(llama()) * 65);
}

#[test]
fn more_requests_than_slots_get_the_same_responses() {
    let (_gpu, _one) = device();
    let tiny = tiny(&llama());
    let requests: Vec<Request> = (0..10).map(|i| request(i, 4 + i * 5 % 17)).collect();
    let [outcome, ordinary] = both(&tiny.config(4, 100, true), &tiny, &requests, None);
    assert!(outcome.graph_steps > 0);
    // One extra step if all rows end by tokens, which the host reads late.
    let most = ordinary.forwards + requests.len();
    assert!(outcome.forwards <= most, "slots were empty: {} forwards of {most}", outcome.forwards);
}

#[test]
fn preemption_in_a_small_cache_changes_no_response() {
    let (_gpu, _one) = device();
    let tiny = tiny(&llama());
    // Short responses make the scheduler expect short ones; the long ones then meet a full cache.
    let length = |i: usize| if i < 9 { 2 } else { 45 };
    let requests: Vec<Request> =
        (0..13).map(|i| Request { new_tokens_min: length(i), ..request(i, length(i)) }).collect();
    let [outcome, _] = both(&tiny.config(4, 7, true), &tiny, &requests, None);
    assert!(outcome.preemptions > 0 && outcome.graph_steps > 20, "{} preemptions", outcome.preemptions);
}

#[test]
fn the_kernels_sample_the_tokens_that_the_host_finds_with_a_bias_or_one_beam() {
    let (_gpu, _one) = device();
    let tiny = tiny(&llama());
    let greedy = |i: usize| Request { params: SampleParams::greedy(), stop: Arc::default(), ..request(3 * i, 9) };
    let requests: Vec<Request> = (0..3).map(greedy).collect();
    let by_kernels = tiny.run(&mut tiny.engine(4, true), &requests);
    let by_host = requests.iter().map(|request| Request {
        edits: Arc::new(Edits { bias: vec![(0, 0.0)], bad_words: Vec::new() }),
        top_logprobs: 2,
        ..request.clone()
    });
    let by_host = tiny.run(&mut tiny.engine(4, true), &by_host.collect::<Vec<_>>());
    let model = Model { transformer: &tiny.transformer, weights: &tiny.weights, tokenizer: None };
    let one = Beams { count: 1, early_stopping: EarlyStopping::True, length_penalty: 1.0 };
    let mut hooks = Hooks::default();
    let by_beam = tiny.engine(4, true).beam_search(model, one, &requests, &mut hooks).expect("a search");
    assert!(by_kernels.graph_steps > 0 && by_host.graph_steps + by_beam.graph_steps == 0);
    let [kernels, host, beam] = [by_kernels, by_host, by_beam].map(|outcome| outcome.complete().expect("all of them"));
    for ((kernels, host), beam) in kernels.iter().zip(&host).zip(&beam) {
        assert_eq!((&host.tokens, &beam.tokens), (&kernels.tokens, &kernels.tokens));
        let told: Vec<f32> = host.top_logprobs.iter().map(|top| top[0].1).collect();
        for logprobs in [&host.logprobs, &beam.logprobs, &told] {
            assert!(logprobs.iter().zip(&kernels.logprobs).all(|(a, b)| (a - b).abs() < 1e-5), "{logprobs:?}");
        }
    }
}

/// Tokens are letters.
fn tokenizer(dir: &Path) -> Tokenizer {
    let vocab: serde_json::Map<String, serde_json::Value> = (0..VOCABULARY as u32)
        .map(|i| (char::from_u32(0x4e00 + i).expect("a letter").to_string(), i.into()))
        .chain([("<unk>".to_owned(), VOCABULARY.into())])
        .collect();
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    });
    std::fs::write(dir.join("tokenizer.json"), json.to_string()).expect("a file");
    Tokenizer::load(dir).expect("a tokenizer")
}

#[test]
fn stop_texts_are_found_a_step_late_and_tokens_after_them_are_dropped() {
    let (_gpu, _one) = device();
    let (tiny, dir) = (tiny(&llama()), tempfile::tempdir().expect("a directory"));
    let tokenizer = tokenizer(dir.path());
    let letter = |i: u32| char::from_u32(0x4e00 + i).expect("a letter").to_string();
    let strings: Vec<String> = (20..34).map(letter).collect();
    let stop = Arc::new(Stop { tokens: vec![3], strings, ..Stop::default() });
    let requests: Vec<Request> =
        (0..9).map(|i| Request { stop: stop.clone(), params: SampleParams::plain(1.0), ..request(i, 25) }).collect();
    let [outcome, _] = both(&tiny.config(9, 100, true), &tiny, &requests, Some(&tokenizer));
    let by_text = outcome.responses.iter().flatten().filter(|r| r.finish == Finish::StopString).count();
    assert!(by_text > 3 && outcome.graph_steps > 0, "{by_text} ended by a text");
}

#[test]
fn a_context_that_grows_until_attention_is_split_has_the_same_bits() {
    let (_gpu, _one) = device();
    let tiny = tiny(&Arch { context: 2048, ..llama() });
    let mut requests: Vec<Request> = (0..2).map(|i| Request { new_tokens_min: 99, ..request(3 * i, 12) }).collect();
    requests[1].tokens = (0..1019u32).map(|i| (i * 31 + 7) % VOCABULARY as u32).collect();
    let config = RolloutConfig { prefill_tokens_max: 2048, ..tiny.config(2, 100, true) };
    let [outcome, _] = both(&config, &tiny, &requests, None);
    assert_eq!((outcome.graph_steps, outcome.forwards), (11, 12));
}

/// Requests with different prompts, sampled from the whole distribution.
pub fn plain(count: usize, length: impl Fn(usize) -> usize) -> Vec<Request> {
    let of = |i: usize| Request {
        new_tokens_min: 99,
        new_tokens_max: length(i),
        params: SampleParams::plain(1.0),
        stop: Arc::new(Stop::default()),
        tokens: (0..=(i % 3) as u32).map(|j| (i as u32 * 5 + j) % VOCABULARY as u32).collect(),
        ..request(3 * i, 1)
    };
    (0..count).map(of).collect()
}

#[test]
fn a_repeated_step_is_one_launch_without_allocation_and_graphs_outlive_a_call() {
    let (gpu, _one) = device();
    let tiny = tiny(&llama());
    let mut engine = Engine::new(&tiny.config(4, 100, true), 0);
    let counts = || {
        let all = &gpu.counts;
        [all.started.get(), all.replayed.get(), all.fetched.get(), all.drained.get()]
    };
    let mut calls = Vec::new();
    for _ in 0..2 {
        let (mut seen, mut counted): (Vec<Usage>, Vec<[u64; 4]>) = (Vec::new(), Vec::new());
        let outcome = tiny.run_seen(None, &mut engine, &plain(4, |_| 12), &mut |_| {
            seen.push(gpu.usage());
            counted.push(counts());
        });
        assert_eq!((outcome.graph_steps, seen.len()), (11, 12));
        let steady = &seen[2..];
        assert!(steady.iter().all(|usage| usage.requests == steady[0].requests), "memory was asked for: {steady:?}");
        assert!(steady.iter().all(|usage| usage.in_use == steady[0].in_use), "{steady:?}");
        // The host waits for the sampled tokens of a step while the next one runs.
        for step in counted[2..11].windows(2) {
            let counts = [0, 1, 2, 3].map(|i: usize| step[1][i] - step[0][i]);
            assert_eq!(counts, [1, 1, 1, 0], "starts, graphs, waits for a copy, and waits for all: {counted:?}");
        }
        calls.push((seen[0].requests, steady[0].requests, bits(&outcome)));
    }
    assert_eq!(calls[0].2, calls[1].2);
    // A real GPU's freed memory is cached, and a graph may reuse all of it.
    assert!(crate::on_a_real_gpu() || calls[0].0 < calls[0].1, "the first call makes the graph");
    assert_eq!(calls[1].0, calls[1].1, "the second one has it");
    // The weights have moved: a graph with the old addresses reads freed memory.
    let moved = self::tiny(&llama());
    drop(tiny);
    let outcome = moved.run(&mut engine, &plain(4, |_| 12));
    assert_eq!(bits(&outcome), calls[0].2);
    engine.release();
    assert_eq!(engine.kv_bytes(), 0);
}
