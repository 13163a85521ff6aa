//! PPO's update on a layout of several ranks, on the same samples.

use crate::tensor_models::{self, gather};
use crate::weights::sharded;
use rlhf_hpc::comm::Axes;
use rlhf_hpc::config::Config;
use rlhf_hpc::config::method::ppo::{Aggregation, Correction, KlEstimator, KlIn, PolicyLossKind};
use rlhf_hpc::data::SftRow;
use rlhf_hpc::device::Device;
use rlhf_hpc::error::Result;
use rlhf_hpc::experience::{Experience, Prompt, Response, SamplingMask};
use rlhf_hpc::learn::sums::Sums;
use rlhf_hpc::learn::{Learner, Role};
use rlhf_hpc::model::collect::{append_bytes, store_whole};
use rlhf_hpc::model::partition::Shards;
use rlhf_hpc::model::tuning::{Adapter, Tuning};
use rlhf_hpc::model::{AdapterNorms, Arch, Head, ParamSpec, ParamTable, TensorPart, Weights, init};
use rlhf_hpc::optim::host_state::Vector;
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::tensor::DType;
use rlhf_hpc::train::methods::update::Update;
use std::convert::Infallible;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

const TOLERANCE: f64 = 1e-5;

/// A batch with everything that losses read, of such prompts and responses; numbers of plausible sizes that no two
/// tokens share.
pub fn samples(lengths: &[(usize, usize)]) -> Vec<Experience> {
    let rng = Rng::new(23, Purpose::Synthetic);
    let mut samples = Vec::new();
    for (i, &(prompt, response)) in lengths.iter().enumerate() {
        let token = |at| 3 + rng.below(94, [i as u32, at as u32, 0, 0]) as u32;
        let mask = |at: usize| {
            SamplingMask::new((3..97).filter(|&id| id == token(at) || (id as usize + at).is_multiple_of(9)))
        };
        let draw = |what: u32, low: f32, high: f32| -> Vec<f32> {
            (0..response).map(|at| low + (high - low) * rng.uniform([i as u32, at as u32, what, 1])).collect()
        };
        let logprobs = draw(1, -5.0, -3.5);
        let near = |what| draw(what, -0.3, 0.3).iter().zip(&logprobs).map(|(d, l)| l + d).collect::<Vec<f32>>();
        samples.push(Experience {
            prompt: Prompt { id: i as u64, tokens: (0..prompt).map(token).collect(), ..Prompt::default() },
            response: Response {
                prompt: i,
                tokens: (prompt..prompt + response).map(token).collect(),
                sample_logprobs: near(2),
                logprobs: logprobs.clone(),
                sampling_masks: if i % 2 == 0 { Vec::new() } else { (prompt..prompt + response).map(mask).collect() },
                ..Response::default()
            },
            ref_logprobs: near(3),
            values: draw(4, -1.0, 1.0),
            advantages: draw(5, -2.0, 2.0),
            returns: draw(6, -1.5, 1.5),
            mask: (0..response).map(|at| u8::from(at % 5 != 3)).collect(),
            ..Experience::default()
        });
    }
    samples
}

/// Pretraining rows of such lengths.
pub fn texts(lengths: &[usize]) -> Vec<SftRow> {
    let rng = Rng::new(29, Purpose::Synthetic);
    let token = |i: usize, at: usize| 3 + rng.below(94, [i as u32, at as u32, 0, 0]) as u32;
    let text = |(i, &len): (usize, &usize)| (0..len).map(|at| token(i, at)).collect();
    lengths
        .iter()
        .enumerate()
        .map(text)
        .map(|tokens: Vec<u32>| SftRow { mask: vec![1; tokens.len()], tokens, ..SftRow::default() })
        .collect()
}

pub fn config(loss: PolicyLossKind) -> Config {
    let mut config = Config::default();
    config.ppo.loss = loss;
    config.ppo.aggregation = Aggregation::Sequence;
    config.ppo.entropy_coef = 0.01;
    config.ppo.kl_in = KlIn::Loss;
    config.ppo.kl_estimator = KlEstimator::K3;
    config.ppo.microbatch_tokens_max = 96;
    config.ppo.ptx_coef = 0.3;
    config.optim.actor.ema_beta = 0.9;
    if loss != PolicyLossKind::Gspo {
        config.ppo.correction = Correction::Tis;
    }
    for optim in [&mut config.optim.actor, &mut config.optim.critic] {
        // Without a clip AdamW's first moment is (1 - beta1) g; with so large an eps the step is near to linear in g.
        (optim.clip_norm, optim.eps, optim.lr, optim.warmup_ratio) = (0.0, 1.0, 0.1, 0.0);
    }
    config
}

/// A learner without its layout.
#[derive(Clone)]
pub struct Setting {
    pub arch: Arch,
    pub head: Head,
    pub dtype: DType,
    pub config: Config,
}

impl Setting {
    pub fn learner(&self, seed: u64, axes: &Axes, stage: usize) -> Result<Learner> {
        let name = if self.head == Head::Value { "critic" } else { "actor" };
        let part = TensorPart::from_group(&axes.tensor);
        let over_ranks = |weights: Weights| sharded(&weights, &Shards::new(&weights.table, axes, stage));
        let weights = if let Some(tuning) = &self.arch.tuning {
            let base = Rc::new(over_ranks(self.base(tuning, seed, part)));
            let table = ParamTable::on(Device::Cpu, &self.arch, self.head, part).on_base(&self.arch, &base.table);
            over_ranks(random(&Arc::new(table), self.dtype, seed)).on_base(Some(base))
        } else {
            over_ranks(init::init_on(Device::Cpu, &self.arch, self.head, self.dtype, seed, part))
        };
        let role = Role::new(name, Path::new(""), &self.arch, weights, axes);
        let (optim, gradient) = (&self.config.optim.actor, &self.config.gradient);
        Learner::new(Device::Cpu, role, optim, gradient, 100, axes, stage)?.with_masters()
    }

    /// The frozen parameters of a model with adapters.
    fn base(&self, tuning: &Tuning, seed: u64, part: TensorPart) -> Weights {
        let arch = Arch { tuning: None, ..self.arch.clone() };
        let whole = ParamTable::new(&arch, self.head);
        let names = whole.specs().iter().map(|spec| spec.name.clone());
        let kept = names.filter(|name| !tuning.whole.contains(name)).collect();
        random(&Arc::new(ParamTable::of_base(Device::Cpu, &arch, self.head, part, &kept)), self.dtype, seed)
    }

    /// Accumulates the gradient of a minibatch.
    pub fn gradient(&self, learner: &mut Learner, axes: &Axes, samples: &[Experience]) {
        let update = Update { config: &self.config, axes, kl_beta: 0.05, texts: &[] };
        let samples: Vec<&Experience> = samples.iter().collect();
        update.gradient(learner, &samples);
    }
}

/// Random values of a table. B of an adapter is not 0, so that A has a gradient.
fn random(table: &Arc<ParamTable>, dtype: DType, seed: u64) -> Weights {
    let mut units = (0..table.units().len()).map(|unit| Ok::<_, Infallible>(init::unit(table, unit, dtype, seed)));
    let alone = Shards::new(table, &Axes::one(), 0);
    let Ok(mut weights) = Weights::build(table.clone(), dtype, &alone, |_| units.next().expect("a unit"));
    for (index, spec) in table.specs().iter().enumerate().filter(|(_, spec)| spec.name.contains("lora_B")) {
        let rng = Rng::new(seed + spec.name.len() as u64, Purpose::Synthetic);
        let count = spec.cuts.iter().map(|cut| cut.size()).product::<usize>();
        let values: Vec<f32> = (0..count).map(|i| 0.2 * rng.uniform([i as u32, 7, 0, 0]) - 0.1).collect();
        let mut bytes = Vec::new();
        append_bytes(dtype, &values, &mut bytes);
        store_whole(&mut weights, index, &bytes);
    }
    weights
}

/// Adapters of some matrices, and parameters that train whole.
pub fn tuning() -> Tuning {
    let module = |part: &str| [0, 1].map(|layer| format!("model.layers.{layer}.{part}"));
    let all = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ];
    let adapter = |(i, name): (usize, String)| (name, Adapter { rank: 1 + i % 3, scale: 1.5 });
    let whole = ["score.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.gate_proj.weight"];
    Tuning {
        adapters: all.iter().flat_map(|part| module(part)).enumerate().map(adapter).collect(),
        whole: whole.map(String::from).into(),
        ..Tuning::default()
    }
}

/// The part of `tuning` that a model without MLPs has.
pub fn attention() -> Tuning {
    let mut tuning = tuning();
    tuning.adapters.retain(|name, _| name.contains("self_attn"));
    tuning.whole.retain(|name| !name.contains("mlp"));
    tuning
}

/// A vector of the learner by parameter, put together from the ranges and parts of all ranks, bit for bit. Copies of
/// tensor ranks that sum gradients with others may part by rounding.
pub fn whole(learner: &Learner, what: Vector, axes: &Axes) -> Vec<(String, Vec<f32>)> {
    let role = &learner.role;
    let mut mine = vec![f64::NAN; role.weights.table.len()];
    let mut sent = Vec::new();
    for (start, values) in learner.stretches(what) {
        let values = values.to_host();
        sent.extend([start as f64, values.len() as f64]);
        sent.extend(values.iter().map(|&x| f64::from(x)));
    }
    let of_stage = axes.zero.all_gather_numbers(&sent).concat();
    for ranges in axes.pipeline.all_gather_numbers(&of_stage) {
        let mut rest = &ranges[..];
        while let [start, len, after @ ..] = rest {
            let (values, others) = after.split_at(*len as usize);
            let place = &mut mine[*start as usize..][..values.len()];
            assert!(place.iter().all(|x| x.is_nan()), "{what:?} is saved twice at {start}");
            place.copy_from_slice(values);
            rest = others;
        }
    }
    assert!(mine.iter().all(|x| !x.is_nan()), "{what:?} is not saved whole");
    let (head, size) = (role.weights.table.head(), axes.tensor.size());
    let table = |rank| ParamTable::on(Device::Cpu, role.arch(), head, TensorPart { rank, size });
    let tables: Vec<ParamTable> = (0..size).map(table).collect();
    let parts: Vec<Vec<f32>> =
        axes.tensor.all_gather_numbers(&mine).iter().map(|part| part.iter().map(|&x| x as f32).collect()).collect();
    let join = |(i, spec): (usize, &ParamSpec)| {
        let specs = tables.iter().map(|table| &table.specs()[i]);
        let pieces: Vec<(&ParamSpec, &[f32])> =
            specs.zip(&parts).map(|(spec, part)| (spec, &part[spec.range()])).collect();
        (format!("{} {} {}", role.name, what.name(), spec.name), gather(&pieces, spec, axes.zero.size() == 1))
    };
    role.whole().specs().iter().enumerate().map(join).collect()
}

/// The result of an update: sums, and gradient and weights by parameter.
pub struct Left {
    pub sums: Sums,
    /// The norms of the gradients of actor and critic.
    pub norms: [f64; 2],
    /// The sizes of their adapters before the update, relative to their matrices.
    pub ratios: Vec<(String, f64)>,
    pub vectors: Vec<(String, Vec<f32>)>,
}

pub fn update(arch: &Arch, config: &Config, samples: &[Experience], axes: &Axes, stage: usize) -> Left {
    let chosen: Vec<&Experience> = samples.iter().collect();
    let [mut actor, mut critic] = [Head::LanguageModel, Head::Value].map(|head| {
        let setting = Setting { arch: arch.clone(), head, dtype: DType::F32, config: config.clone() };
        setting.learner(5, axes, stage).expect("a learner")
    });
    let of_adapters = |learner: &Learner| {
        let weights = &learner.role.weights;
        AdapterNorms::new(arch, weights, axes).ratios(weights, axes)
    };
    let ratios = [&actor, &critic].into_iter().flat_map(of_adapters).collect();
    let update = Update { config, axes, kl_beta: 0.05, texts: &texts(&[5, 40, 2, 17, 1, 61]) };
    let sums = update.minibatch(&mut actor, Some(&mut critic), &chosen).expect("a finite gradient");
    let kept = [(&actor, Vector::First), (&actor, Vector::Master), (&critic, Vector::First), (&critic, Vector::Master)];
    let vectors = kept.into_iter().flat_map(|(learner, what)| whole(learner, what, axes)).collect();
    Left { sums, norms: [actor.report.grad_norm, critic.report.grad_norm], ratios, vectors }
}

/// The largest relative gap of a gradient or weight tensor.
pub fn assert_near(who: &str, got: &Left, want: &Left) -> f64 {
    for (key, b) in &want.sums.0 {
        let a = got.sums.get(key);
        assert!((a - b).abs() <= TOLERANCE * b.abs(), "{who}: {key} is {a}, of one rank {b}");
    }
    for (a, b) in got.norms.iter().zip(&want.norms) {
        assert!((a - b).abs() <= TOLERANCE * b.abs(), "{who}: a gradient's norm is {a}, of one rank {b}");
    }
    assert_eq!(got.ratios.len(), want.ratios.len(), "{who}");
    for ((name, a), (_, b)) in got.ratios.iter().zip(&want.ratios) {
        assert!((a - b).abs() <= 1e-12 * b && *b > 0.0, "{who}: the adapter of {name} has {a}, of one rank {b}");
    }
    let mut largest = 0.0f64;
    for ((name, got), (_, want)) in got.vectors.iter().zip(&want.vectors) {
        assert!(want.iter().any(|x| *x != 0.0), "{name} holds something");
        largest = largest.max(tensor_models::assert_near(&format!("{who}: {name}"), got, want, TOLERANCE));
    }
    largest
}
