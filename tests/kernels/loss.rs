//! Heads whose loss the host computes between the two halves of a chunk, and what that costs in waits.

use crate::matmul::bits;
use crate::model::{VOCABULARY, llama};
use crate::{bf16, device, numbers, rounded};
use rlhf_hpc::comm::Axes;
use rlhf_hpc::config::Config;
use rlhf_hpc::config::method::ppo::{Correction, KlIn, PolicyLossKind, PpoConfig};
use rlhf_hpc::config::optim::OptimConfig;
use rlhf_hpc::data::balance::{self, Cost};
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cuda::{Gpu, Memory};
use rlhf_hpc::experience::{Experience, Prompt, Response};
use rlhf_hpc::learn::packed::Tokens;
use rlhf_hpc::learn::score;
use rlhf_hpc::learn::{Learner, Role};
use rlhf_hpc::loss::policy::{PolicyTokens, policy_loss};
use rlhf_hpc::model::{Head, TensorPart, init};
use rlhf_hpc::ops::linear_logprob::{self, HeadPart};
use rlhf_hpc::tensor::{DType, Layout, Slice, SliceMut, Tensor, Weight, WeightMut};
use rlhf_hpc::train::methods::update::Update;
use std::cell::Cell;
use std::ops::Range;
use std::path::Path;

const BETA: f32 = 0.2;

/// The number of times that `work` waits for all started work, and for an asynchronous copy.
fn waited<R>(gpu: &Gpu, work: impl FnOnce() -> R) -> ([u64; 2], R) {
    let counts = || [gpu.counts.drained.get(), gpu.counts.fetched.get()];
    let before = counts();
    let result = work();
    let after = counts();
    ([after[0] - before[0], after[1] - before[1]], result)
}

fn learner(head: Head, config: &Config, axes: &Axes) -> Learner {
    let optim = OptimConfig::with_lr(1e-3);
    let weights = init::init_on(Device::Cuda, &llama(), head, DType::Bf16, 5, TensorPart::whole());
    let role = Role::new("actor", Path::new(""), &llama(), weights, axes);
    let learner = Learner::new(Device::Cuda, role, &optim, &config.gradient, 50, axes, 0);
    learner.and_then(Learner::with_masters).expect("a learner")
}

/// Responses of one to nine tokens, some of them not learned from, and what a step computes of them.
fn samples() -> Vec<Experience> {
    let token = |i: usize| (i * 31 % VOCABULARY) as u32;
    let one = |i: usize| {
        let (prompt, n, seed) = (2 + i % 3, 1 + 4 * i % 9, 10 * i as u32);
        let around = |at: f32, by: f32, seed: u32| numbers(seed, n).iter().map(|x| at + by * x).collect::<Vec<f32>>();
        let logprobs = around(-4.3, 0.5, seed);
        Experience {
            prompt: Prompt { tokens: (0..prompt).map(|at| token(7 * i + at)).collect(), ..Prompt::default() },
            response: Response {
                tokens: (0..n).map(|at| token(5 * i + 3 * at + 2)).collect(),
                sample_logprobs: logprobs.iter().zip(around(0.0, 0.3, seed + 1)).map(|(l, d)| l + d).collect(),
                logprobs,
                ..Response::default()
            },
            ref_logprobs: around(-4.4, 0.4, seed + 2),
            values: around(0.0, 0.5, seed + 3),
            advantages: around(0.0, 1.0, seed + 4),
            returns: around(0.3, 1.0, seed + 5),
            mask: (0..n).map(|t| u8::from((i + t) % 5 != 4)).collect(),
            ..Experience::default()
        }
    };
    (0..7).map(one).collect()
}

fn config(ppo: PpoConfig) -> Config {
    let mut config = Config { ppo, ..Config::default() };
    config.ppo.microbatch_tokens_max = 24;
    config.rollout.temperature = 0.9;
    config
}

/// The rows of each micro-batch of a minibatch.
fn microbatches(config: &Config, samples: &[&Experience]) -> Vec<Vec<usize>> {
    let lengths: Vec<usize> = samples.iter().map(|sample| sample.length()).collect();
    balance::plan(&lengths, 1, config.ppo.microbatch_tokens_max, &Cost::from_arch(&llama())).swap_remove(0)
}

#[test]
fn an_update_waits_for_its_loss_values_and_for_the_norm_of_each_gradient() {
    let (gpu, _one) = device();
    let axes = Axes::one();
    let samples = samples();
    let samples: Vec<&Experience> = samples.iter().collect();
    let clip = PpoConfig { dual_clip: 1.1, correction: Correction::Tis, ..PpoConfig::default() };
    let cispo = PpoConfig { loss: PolicyLossKind::Cispo, kl_in: KlIn::Loss, ..PpoConfig::default() };
    let gspo = PpoConfig { loss: PolicyLossKind::Gspo, entropy_coef: 0.02, ..PpoConfig::default() };
    // A sequence-level ratio needs one more forward of the head.
    for (ppo, passes) in [(clip, 1), (cispo, 1), (gspo, 2)] {
        let config = config(ppo);
        let count = microbatches(&config, &samples).len() as u64;
        assert!(count > 2, "several micro-batches");
        let [mut actor, mut critic] = [Head::LanguageModel, Head::Value].map(|head| learner(head, &config, &axes));
        let update = Update { config: &config, axes: &axes, kl_beta: BETA, texts: &[] };
        let (waits, sums) = waited(gpu, || update.minibatch(&mut actor, Some(&mut critic), &samples));
        let sums = sums.expect("finite");
        // Waits for the values of each pass and of the critic, and for two norms.
        assert_eq!(waits, [(passes + 1) * count + 2, 0], "{:?}", config.ppo.loss);
        assert!(
            sums.get("logprob_gap_max") > 0.0 && sums.get("entropy") > 0.0 && sums.get("value_loss") > 0.0,
            "{sums:?}"
        );
    }
}

#[test]
fn scoring_returns_the_results_of_a_microbatch_while_the_next_one_runs() {
    let (gpu, _one) = device();
    let axes = Axes::one();
    let samples = samples();
    let [actor, critic] = [Head::LanguageModel, Head::Value].map(|head| learner(head, &Config::default(), &axes).role);
    let rows: Vec<Tokens> = samples.iter().map(Tokens::from_sample).collect();
    let (waits, scored) = waited(gpu, || score::logprobs(&actor, &axes, &rows, 0.9, 24));
    let (of_critic, values) = waited(gpu, || score::values(&critic, &axes, &rows, 24));
    // No micro-batch follows the last one.
    assert!(waits[0] == 1 && waits[1] > 1, "{waits:?}");
    assert_eq!(of_critic, waits);
    for (i, sample) in samples.iter().enumerate() {
        let alone = score::logprobs(&actor, &axes, &rows[i..=i], 0.9, 1000);
        assert_eq!(scored[i], alone[0], "sample {i}");
        assert_eq!(values[i], score::values(&critic, &axes, &rows[i..=i], 1000)[0], "sample {i}");
        assert_eq!(scored[i].len(), sample.response.tokens.len());
    }
}

#[test]
fn the_host_computes_the_loss_of_a_chunk_and_waits_only_for_its_values() {
    let (gpu, _one) = device();
    let (t, d, v) = (150, 24, 100);
    let mut h = Tensor::scratch_on(Device::Cuda, t, d);
    h.cuda_mut().write(&rounded(&numbers(1, t * d)));
    let len = Layout::Row.len(v, d);
    let mut head = numbers(2, v * d);
    head.resize(len, 0.0);
    let head = Memory::from_values(&bf16(&head));
    let w = Weight { n: v, k: d, layout: Layout::Row, values: Slice::Cuda(head.view(DType::Bf16)) };
    let targets: Vec<u32> = (0..t).map(|i| (i * 37 % v) as u32).collect();
    let (old, advantages) = (numbers(3, t).iter().map(|x| x - 4.6).collect::<Vec<_>>(), numbers(4, t));
    let weights: Vec<f32> = (0..t).map(|i| if i % 6 == 0 { 0.0 } else { 0.01 }).collect();
    let config = PpoConfig { entropy_coef: 0.05, ..PpoConfig::default() };
    // A shard of a large vocabulary has chunks of 16 rows.
    let part = HeadPart { rows_max: 4 << 20, ..HeadPart::whole(&w) };
    let asked = Cell::new(0);
    let pass = |part: HeadPart| {
        let mut loss = |r: Range<usize>, l: &[f32], e: &[f32], dl: &mut [f32], de: &mut [f32]| {
            asked.set(asked.get() + 1);
            let (old_logprobs, advantages, weights) = (&old[r.clone()], &advantages[r.clone()], &weights[r]);
            let more = PolicyTokens::default();
            let tokens = PolicyTokens { logprobs: l, entropy: e, old_logprobs, advantages, weights, ..more };
            policy_loss(&config, BETA, &tokens, dl, de);
        };
        let [mut l, mut e] = [vec![0.0; t], vec![0.0; t]];
        let mut dh = Tensor::scratch_on(Device::Cuda, t, d);
        let mut dw = Memory::zeros(4 * len);
        let gradient = WeightMut { n: v, k: d, layout: Layout::Row, values: SliceMut::Cuda(dw.view_mut(DType::F32)) };
        let (scored, beside) = (&mut l, &mut e);
        linear_logprob::forward_backward_part(
            &h,
            w,
            part,
            (&targets).into(),
            0.8,
            &mut loss,
            None,
            scored,
            beside,
            &mut dh,
            Some(gradient),
        );
        (bits(&[l, e].concat()), dh, dw)
    };
    let read = |(scored, dh, dw): (Vec<u32>, Tensor, Memory)| (scored, dh.to_host(), dw.read::<f32>(v * d));
    let (waits, found) = waited(gpu, || pass(part));
    assert_eq!((waits, asked.get()), ([10, 0], 10), "a wait a chunk");
    let found = read(found);
    // The order of dW's sum depends on the chunks. All else has the same bits.
    let one = read(pass(HeadPart { rows_max: v, ..part }));
    assert_eq!(asked.get(), 11);
    assert_eq!((&one.0, &one.1), (&found.0, &found.1));
    let gap = one.2.iter().zip(&found.2).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(gap < 1e-6 && one.2.iter().any(|x| x.abs() > 1e-4), "{gap}");
    // Scoring stores no logits and has the bits of training.
    let [mut l, mut e] = [vec![0.0; t], vec![0.0; t]];
    let (waits, ()) = waited(gpu, || linear_logprob::forward(&h, w, &targets, 0.8, &mut l, &mut e));
    assert_eq!(waits, [1, 0], "one download for all of it");
    assert_eq!(bits(&[l, e].concat()), found.0);
    // Few rows are scored through stored logits.
    let few = 5;
    let mut first = Tensor::scratch_on(Device::Cuda, few, d);
    first.cuda_mut().copy_from(h.cuda().part(0..few * d));
    let mut l = vec![0.0; few];
    linear_logprob::forward(&first, w, &targets[..few], 0.8, &mut l, &mut []);
    assert_eq!(bits(&l), found.0[..few]);
}
