//! Minibatches whose losses the GPU computes, beside the same losses computed by the host in between.

use crate::model::{VOCABULARY, llama};
use crate::{bf16, device, numbers, rounded};
use rlhf_hpc::comm::Axes;
use rlhf_hpc::config::Config;
use rlhf_hpc::config::optim::OptimConfig;
use rlhf_hpc::config::ppo::{Correction, KlIn, PolicyLossKind, PpoConfig};
use rlhf_hpc::data::balance::{self, Cost};
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cuda::token_loss::{self, PolicyInputs};
use rlhf_hpc::device::cuda::{Gpu, Memory, View, ViewMut};
use rlhf_hpc::experience::{Experience, Prompt, Response};
use rlhf_hpc::gradient::microbatch::PackedRow;
use rlhf_hpc::loss::aggregation::{self, Totals};
use rlhf_hpc::loss::correction;
use rlhf_hpc::loss::policy::{PolicySums, PolicyTokens, policy_loss};
use rlhf_hpc::loss::value::{ValueSums, value_loss};
use rlhf_hpc::model::{Head, Saved};
use rlhf_hpc::ops::linear_logprob::{self, Also, HeadPart, TokenLoss};
use rlhf_hpc::tensor::{DType, Layout, SliceMut, Tensor, Values, Weight, WeightMut};
use rlhf_hpc::train::role::{Learner, Role};
use rlhf_hpc::train::score;
use rlhf_hpc::train::update::{Update, UpdateSums};
use std::ops::Range;

const BETA: f32 = 0.2;

/// How often `work` waits for all that was started, and for a copy beside the host.
fn waited<R>(gpu: &Gpu, work: impl FnOnce() -> R) -> ([u64; 2], R) {
    let before = gpu.waits();
    let result = work();
    let after = gpu.waits();
    ([after.drained - before.drained, after.fetched - before.fetched], result)
}

fn learner(head: Head, config: &Config, axes: &Axes) -> Learner {
    let role = Role::init_on(Device::Cuda, "actor", &llama(), head, DType::Bf16, 5, axes, 0);
    Learner::new(role, &OptimConfig::with_lr(1e-3), &config.gradient, 50, axes, 0).expect("a learner")
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
    balance::plan(&lengths, 1, config.ppo.microbatch_tokens_max, &Cost::of(&llama())).swap_remove(0)
}

/// What a loss reads, flat over the predicted tokens of a packed row.
struct Batch {
    row: PackedRow,
    old: Vec<f32>,
    refs: Vec<f32>,
    advantages: Vec<f32>,
    factors: Vec<f32>,
    weights: Vec<f32>,
    old_values: Vec<f32>,
    returns: Vec<f32>,
}

impl Batch {
    fn new(ppo: &PpoConfig, samples: &[&Experience], chosen: &[usize]) -> Self {
        let mut totals = Totals::default();
        for sample in samples {
            totals.add_mask(&sample.mask);
        }
        let [mut factors, mut weights] = [Vec::new(), Vec::new()];
        let mut row = PackedRow::new();
        for sample in chosen.iter().map(|&i| samples[i]) {
            row.push(&sample.tokens(), sample.prompt.tokens.len());
            aggregation::weights(ppo.aggregation_in_force(), &sample.mask, totals, 8, &mut weights);
            if ppo.correction != Correction::None {
                let (range, response) = ([ppo.correction_low, ppo.correction_high], &sample.response);
                let (old, drawn) = (&response.logprobs, &response.sample_logprobs);
                correction::factors(ppo.correction, range, old, drawn, &sample.mask, &mut factors);
            }
        }
        let all = |of: fn(&Experience) -> &Vec<f32>| chosen.iter().flat_map(|&i| of(samples[i]).clone()).collect();
        Self {
            row,
            factors,
            weights,
            old: all(|sample| &sample.response.logprobs),
            refs: all(|sample| &sample.ref_logprobs),
            advantages: all(|sample| &sample.advantages),
            old_values: all(|sample| &sample.values),
            returns: all(|sample| &sample.returns),
        }
    }

    fn tokens<'a>(&'a self, r: Range<usize>, logprobs: &'a [f32], entropy: &'a [f32]) -> PolicyTokens<'a> {
        PolicyTokens {
            logprobs,
            entropy,
            old_logprobs: &self.old[r.clone()],
            advantages: &self.advantages[r.clone()],
            ref_logprobs: &self.refs[r.clone()],
            factors: if self.factors.is_empty() { &[] } else { &self.factors[r.clone()] },
            weights: &self.weights[r],
        }
    }
}

/// The gradient of a minibatch with the host's loss between the two halves of every chunk.
fn policy_through_the_host(config: &Config, actor: &mut Learner, samples: &[&Experience]) -> PolicySums {
    let ppo = &config.ppo;
    let mut sums = PolicySums::default();
    actor.sum.begin_chunk();
    for chosen in microbatches(config, samples) {
        actor.sum.begin_microbatch(false);
        let Learner { role, sum, .. } = &mut *actor;
        let (model, w, batch) = (&role.transformer, &role.weights, Batch::new(ppo, samples, &chosen));
        let row = &batch.row;
        let mut saved = Saved::new(config.gradient.recompute);
        let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
        let mut loss = |r: Range<usize>, l: &[f32], h: &[f32], dl: &mut [f32], dh: &mut [f32]| {
            sums += policy_loss(ppo, BETA, &batch.tokens(r, l, h), dl, dh);
        };
        let (rows, targets, temperature) = (&row.rows, &row.targets, config.rollout.temperature);
        let (dhidden, ..) = model.logprobs_backward(w, &hidden, rows, targets, temperature, &mut loss, &mut sum.grads);
        model.backward(w, saved, &row.cu_seqlens, dhidden, &mut sum.grads);
    }
    actor.sum.end_chunk(0);
    sums
}

fn value_through_the_host(config: &Config, critic: &mut Learner, samples: &[&Experience]) -> ValueSums {
    let mut sums = ValueSums::default();
    critic.sum.begin_chunk();
    for chosen in microbatches(config, samples) {
        critic.sum.begin_microbatch(false);
        let Learner { role, sum, .. } = &mut *critic;
        let batch = Batch::new(&PpoConfig::default(), samples, &chosen);
        let (model, w, row) = (&role.transformer, &role.weights, &batch.row);
        let mut saved = Saved::new(config.gradient.recompute);
        let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
        let values = model.values(w, &hidden, &row.rows);
        let mut dvalues = vec![0.0; values.len()];
        let (old, clip) = (&batch.old_values, config.ppo.value_clip);
        sums += value_loss(clip, &values, old, &batch.returns, &batch.weights, &mut dvalues);
        let dhidden = model.values_backward(w, &hidden, &row.rows, &dvalues, &mut sum.grads);
        model.backward(w, saved, &row.cu_seqlens, dhidden, &mut sum.grads);
    }
    critic.sum.end_chunk(0);
    sums
}

fn bits(mut learner: Learner) -> Vec<u32> {
    learner.sum.finish();
    let gradient = learner.sum.grads.to_vec();
    assert!(gradient.iter().filter(|x| **x != 0.0).count() > gradient.len() / 4, "a gradient");
    gradient.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn gradients_and_metrics_of_actors_are_those_of_the_host_s_loss_and_nothing_is_waited_for_but_numbers() {
    let (gpu, _one) = device();
    let axes = Axes::one();
    let plain = PpoConfig::default();
    let all = [
        plain.clone(),
        PpoConfig { dual_clip: 1.1, correction: Correction::Tis, ..plain.clone() },
        PpoConfig { loss: PolicyLossKind::Cispo, kl_in: KlIn::Loss, ..plain.clone() },
        PpoConfig { kl_in: KlIn::Loss, entropy_coef: 0.02, correction: Correction::Icepop, ..plain },
    ];
    let samples = samples();
    let samples: Vec<&Experience> = samples.iter().collect();
    for config in all.map(config) {
        let (mut on_gpu, mut on_host) =
            (learner(Head::LanguageModel, &config, &axes), learner(Head::LanguageModel, &config, &axes));
        let count = microbatches(&config, &samples).len();
        assert!(count > 2, "several micro-batches");
        let update = Update { config: &config, axes: &axes, kl_beta: BETA };
        let (waits, sums) = waited(gpu, || update.policy_gradient(&mut on_gpu, &samples));
        let (waits_before, want) = waited(gpu, || policy_through_the_host(&config, &mut on_host, &samples));
        assert_eq!(waits, [0, count as u64], "{:?}: a fetch of numbers a micro-batch", config.ppo);
        assert!(waits_before[0] >= count as u64, "{waits_before:?}: what the host's loss costs");
        assert_eq!(bits(on_gpu), bits(on_host), "{:?}", config.ppo);
        assert_eq!(sums.policy, want, "{:?}", config.ppo);
        assert!(sums.logprob_gap_max > 0.0 && sums.policy.tokens > 20 && sums.policy.entropy > 0.0, "{sums:?}");
    }
}

#[test]
fn a_ratio_of_sequences_costs_one_wait_a_microbatch() {
    let (gpu, _one) = device();
    let axes = Axes::one();
    let config = config(PpoConfig { loss: PolicyLossKind::Gspo, ..PpoConfig::default() });
    let samples = samples();
    let samples: Vec<&Experience> = samples.iter().collect();
    let count = microbatches(&config, &samples).len() as u64;
    let mut actor = learner(Head::LanguageModel, &config, &axes);
    let update = Update { config: &config, axes: &axes, kl_beta: BETA };
    let (waits, sums): (_, UpdateSums) = waited(gpu, || update.policy_gradient(&mut actor, &samples));
    assert_eq!(waits, [count, count], "the scoring pass, and the numbers");
    assert!(sums.policy.tokens > 20 && sums.policy.policy_loss.is_finite(), "{sums:?}");
    bits(actor);
}

#[test]
fn an_update_waits_once_for_the_norm_of_each_gradient() {
    let (gpu, _one) = device();
    let (axes, config) = (Axes::one(), config(PpoConfig::default()));
    let samples = samples();
    let samples: Vec<&Experience> = samples.iter().collect();
    let count = microbatches(&config, &samples).len() as u64;
    let [mut actor, mut critic] = [Head::LanguageModel, Head::Value].map(|head| learner(head, &config, &axes));
    let update = Update { config: &config, axes: &axes, kl_beta: BETA };
    let (waits, sums) = waited(gpu, || update.minibatch(&mut actor, Some(&mut critic), &samples));
    assert_eq!(waits, [2, 2 * count]);
    assert!(sums.expect("finite").value.tokens > 20 && actor.report.grad_norm > 0.0);
}

#[test]
fn scoring_tells_the_numbers_of_a_microbatch_when_the_next_is_under_way() {
    let (gpu, _one) = device();
    let axes = Axes::one();
    let samples = samples();
    let [actor, critic] = [Head::LanguageModel, Head::Value].map(|head| learner(head, &Config::default(), &axes).role);
    let (waits, scored) = waited(gpu, || score::logprobs(&actor, &axes, &samples, 0.9, 24));
    let (of_critic, values) = waited(gpu, || score::values(&critic, &axes, &samples, 24));
    // Behind the last micro-batch there is none.
    assert!(waits[0] == 1 && waits[1] > 1, "{waits:?}");
    assert_eq!(of_critic, waits);
    for (i, sample) in samples.iter().enumerate() {
        let alone = score::logprobs(&actor, &axes, &samples[i..=i], 0.9, 1000);
        assert_eq!(scored[i], alone[0], "sample {i}");
        assert_eq!(values[i], score::values(&critic, &axes, &samples[i..=i], 1000)[0], "sample {i}");
        assert_eq!(scored[i].len(), sample.response.tokens.len());
    }
}

#[test]
fn gradients_and_metrics_of_critics_are_those_of_the_host_s_loss_and_nothing_is_waited_for_but_numbers() {
    let (gpu, _one) = device();
    let axes = Axes::one();
    let samples = samples();
    let samples: Vec<&Experience> = samples.iter().collect();
    for value_clip in [0.0, 0.1] {
        let config = config(PpoConfig { value_clip, ..PpoConfig::default() });
        let (mut on_gpu, mut on_host) = (learner(Head::Value, &config, &axes), learner(Head::Value, &config, &axes));
        let update = Update { config: &config, axes: &axes, kl_beta: BETA };
        let count = microbatches(&config, &samples).len() as u64;
        let (waits, sums) = waited(gpu, || update.value_gradient(&mut on_gpu, &samples));
        let want = value_through_the_host(&config, &mut on_host, &samples);
        assert_eq!(waits, [0, count]);
        assert_eq!(bits(on_gpu), bits(on_host));
        assert_eq!(sums.value, want);
    }
}

/// A loss that a GPU computes, as training has it.
struct OnGpu<'a> {
    config: &'a PpoConfig,
    inputs: PolicyInputs,
    chunks: usize,
}

impl TokenLoss for OnGpu<'_> {
    fn on_host(&mut self, _: Range<usize>, _: &[f32], _: &[f32], _: &mut [f32], _: &mut [f32]) {
        panic!("the host was asked");
    }

    fn on_gpu(&mut self, range: Range<usize>, l: View, _: View, dlogprobs: ViewMut, dentropy: ViewMut) {
        self.chunks += 1;
        token_loss::policy(self.config, BETA, &self.inputs, range, l, dlogprobs, dentropy);
    }
}

#[test]
fn chunks_of_a_head_follow_each_other_without_the_host() {
    let (gpu, _one) = device();
    let (t, d, v) = (150, 24, 100);
    let mut h = Tensor::scratch_on(Device::Cuda, t, d);
    h.cuda_mut().write(&rounded(&numbers(1, t * d)));
    let len = Layout::Row.len(v, d);
    let mut head = numbers(2, v * d);
    head.resize(len, 0.0);
    let head = Memory::of(&bf16(&head));
    let w = Weight { n: v, k: d, layout: Layout::Row, values: Values::Cuda(head.view(DType::Bf16)) };
    let targets: Vec<u32> = (0..t).map(|i| (i * 37 % v) as u32).collect();
    let (old, advantages) = (numbers(3, t).iter().map(|x| x - 4.6).collect::<Vec<_>>(), numbers(4, t));
    let weights: Vec<f32> = (0..t).map(|i| if i % 6 == 0 { 0.0 } else { 0.01 }).collect();
    let config = PpoConfig { entropy_coef: 0.05, ..PpoConfig::default() };
    // A part that claims to be one of a wide vocabulary has chunks of 16 rows.
    let part = HeadPart { rows_max: 4 << 20, ..HeadPart::whole(&w) };
    let pass = |loss: &mut dyn TokenLoss, part: HeadPart| {
        let mut scored = Memory::scratch(8 * t);
        let mut both = scored.view_mut(DType::F32);
        let (l, e) = both.split_at(t);
        let (l, e) = (SliceMut::Cuda(l), SliceMut::Cuda(e));
        let mut dh = Tensor::scratch_on(Device::Cuda, t, d);
        let mut dw = Memory::zeros(4 * len);
        let gradient = WeightMut { n: v, k: d, layout: Layout::Row, values: SliceMut::Cuda(dw.view_mut(DType::F32)) };
        linear_logprob::forward_backward_part(&h, w, part, &targets, 0.8, loss, l, e, &mut dh, gradient);
        (scored, dh, dw)
    };
    let read =
        |(scored, dh, dw): (Memory, Tensor, Memory)| (scored.read::<u32>(2 * t), dh.to_host(), dw.read::<u32>(v * d));
    let inputs = PolicyInputs::of([&old, &advantages, &weights], &[], &[]);
    let mut on_gpu = OnGpu { config: &config, inputs, chunks: 0 };
    let (waits, found) = waited(gpu, || pass(&mut on_gpu, part));
    assert_eq!((waits, on_gpu.chunks), ([0, 0], 10));
    let found = read(found);
    let mut asked = 0;
    let mut through_the_host = |r: Range<usize>, l: &[f32], e: &[f32], dl: &mut [f32], de: &mut [f32]| {
        asked += 1;
        let tokens = PolicyTokens {
            logprobs: l,
            entropy: e,
            old_logprobs: &old[r.clone()],
            advantages: &advantages[r.clone()],
            weights: &weights[r],
            ..PolicyTokens::default()
        };
        policy_loss(&config, BETA, &tokens, dl, de);
    };
    let (waits, want) = waited(gpu, || pass(&mut through_the_host, part));
    assert!(waits[0] >= 10 && asked == 10, "{waits:?}: a closure waits for each chunk");
    assert_eq!(found, read(want));
    // One chunk sums dW in one chain, several in several: the rest has the same bits.
    let whole = HeadPart { rows_max: v, ..part };
    let one = read(pass(&mut on_gpu, whole));
    assert_eq!(on_gpu.chunks, 11);
    assert_eq!((&one.0, &one.1), (&found.0, &found.1));
    // Scoring stores no logits, and has the bits of training.
    let [mut l, mut e] = [vec![0.0; t], vec![0.0; t]];
    let (waits, ()) = waited(gpu, || linear_logprob::forward(&h, w, &targets, 0.8, &mut l, &mut e));
    assert_eq!(waits, [1, 0], "one download for all of it");
    let scored: Vec<u32> = l.iter().chain(&e).map(|x| x.to_bits()).collect();
    assert_eq!(scored, found.0);
    // Few rows are scored through stored logits.
    let few = 5;
    let mut first = Tensor::scratch_on(Device::Cuda, few, d);
    first.cuda_mut().copy_from(h.cuda().part(0..few * d));
    let mut l = vec![0.0; few];
    linear_logprob::forward(&first, w, &targets[..few], 0.8, &mut l, &mut []);
    assert_eq!(l.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), found.0[..few]);
}

#[test]
fn the_likeliest_tokens_are_found_without_logits() {
    let (_gpu, _one) = device();
    let axes = Axes::one();
    let [on_gpu, on_cpu] = [(Device::Cuda, DType::Bf16), (Device::Cpu, DType::F32)]
        .map(|(device, dtype)| Role::init_on(device, "actor", &llama(), Head::LanguageModel, dtype, 5, &axes, 0));
    for tokens in [140, 9] {
        let mut row = PackedRow::new();
        for part in (0..tokens as u32).collect::<Vec<_>>().chunks(70) {
            row.push(&part.iter().map(|i| i * 31 % VOCABULARY as u32).collect::<Vec<_>>(), 1);
        }
        let look = |role: &Role| {
            let (model, w) = (&role.transformer, &role.weights);
            let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
            let logits = model.logits(w, &hidden, &row.rows);
            let likeliest = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("a token");
            let best: Vec<u32> = logits.to_host().chunks(VOCABULARY).map(|row| likeliest(row) as u32).collect();
            // Every other target is the likeliest token, the next one its neighbour.
            let targets: Vec<u32> = best.iter().enumerate().map(|(i, t)| (t + (i % 2) as u32) % 77).collect();
            let there = model.logprobs_there(w, &hidden, &row.rows, &targets, 1.0, Also::Top);
            let (logprobs, _) = model.logprobs(w, &hidden, &row.rows, &targets, 1.0, false);
            (there.later().take(), logprobs)
        };
        for (found, logprobs) in [look(&on_gpu), look(&on_cpu)] {
            let (scored, top) = found.split_at(row.rows.len());
            assert_eq!(scored, logprobs);
            let want: Vec<f32> = (0..top.len()).map(|i| if i % 2 == 0 { 1.0 } else { 0.0 }).collect();
            assert_eq!(top, want, "{tokens} tokens");
        }
    }
}
