//! PPO's update and scoring on layouts of several ranks against one rank that does everything, on the same samples.

use crate::Test;
use crate::tensor_models::gather;
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::config::Config;
use rlhf_hpc::config::ppo::{Aggregation, Correction, KlEstimator, KlIn, PolicyLossKind};
use rlhf_hpc::device::Device;
use rlhf_hpc::experience::{Experience, Prompt, Response};
use rlhf_hpc::learn::score;
use rlhf_hpc::learn::sums::Sums;
use rlhf_hpc::learn::{Learner, Role};
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Head, ParamSpec, ParamTable, TensorPart};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::tensor::DType;
use rlhf_hpc::train::update::Update;

pub const TESTS: &[Test] = &[Test { name: "scores on any layout are those of one rank", ranks: &[4], check: scores }];

const VOCABULARY: usize = 97;
const TOLERANCE: f64 = 1e-5;
/// Tokens of (prompt, response): short ones beside long ones, and fewer tokens than a ring has pieces.
const LENGTHS: &[(usize, usize)] =
    &[(3, 1), (1, 2), (20, 33), (7, 60), (2, 2), (11, 5), (30, 1), (4, 17), (9, 44), (1, 1), (16, 8)];

fn arch(name: &str) -> Arch {
    let (kind, class) = if name == "qwen3" { ("qwen3", "Qwen3ForCausalLM") } else { ("llama", "LlamaForCausalLM") };
    let config = serde_json::json!({
        "model_type": kind, "architectures": [class], "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
        "vocab_size": VOCABULARY, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": kind == "qwen3", "initializer_range": 0.15, "eos_token_id": 2
    });
    Arch::from_config(config.as_object().expect("an object")).expect("a model that is known")
}

/// A batch with everything that losses read, of such prompts and responses; numbers of plausible sizes that no two tokens
/// share.
pub fn samples(lengths: &[(usize, usize)]) -> Vec<Experience> {
    let rng = Rng::new(23, Purpose::Corpus);
    let mut samples = Vec::new();
    for (i, &(prompt, response)) in lengths.iter().enumerate() {
        let token = |at| 3 + rng.below(VOCABULARY as u64 - 3, [i as u32, at as u32, 0, 0]) as u32;
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

pub fn config(loss: PolicyLossKind) -> Config {
    let mut config = Config::default();
    config.ppo.loss = loss;
    config.ppo.aggregation = Aggregation::Sequence;
    config.ppo.entropy_coef = 0.01;
    config.ppo.kl_in = KlIn::Loss;
    config.ppo.kl_estimator = KlEstimator::K3;
    config.ppo.microbatch_tokens_max = 96;
    if loss != PolicyLossKind::Gspo {
        config.ppo.correction = Correction::Tis;
    }
    for optim in [&mut config.optim.actor, &mut config.optim.critic] {
        // Without a clip AdamW's first moment is (1 - beta1) g; with so large an eps the step is near to linear in g.
        (optim.clip_norm, optim.eps, optim.lr, optim.warmup_ratio) = (0.0, 1.0, 0.1, 0.0);
    }
    config
}

fn learner(arch: &Arch, head: Head, config: &Config, axes: &Axes, stage: usize) -> Learner {
    let name = if head == Head::Value { "critic" } else { "actor" };
    let role = Role::init(Device::Cpu, name, arch, head, DType::F32, 5, axes, stage);
    Learner::new(role, &config.optim.actor, &config.gradient, 100, axes, stage).expect("a learner")
}

/// A vector of the learner by parameter, put together from the ranges and parts of all ranks, bit for bit.
pub fn whole(learner: &Learner, what: &str, axes: &Axes) -> Vec<(String, Vec<f32>)> {
    let role = &learner.role;
    let mut mine = vec![0.0; role.weights.table.len()];
    let mut sent = Vec::new();
    for (start, values) in learner.stretches(what) {
        let values = values.to_host();
        sent.extend([start as f64, values.len() as f64]);
        sent.extend(values.iter().map(|&x| f64::from(x)));
    }
    for ranges in axes.zero.all_gather_f64(&sent) {
        let mut rest = &ranges[..];
        while let [start, len, after @ ..] = rest {
            let (values, others) = after.split_at(*len as usize);
            mine[*start as usize..][..values.len()].copy_from_slice(values);
            rest = others;
        }
    }
    let head = role.weights.table.head();
    let size = axes.tensor.size();
    let tables: Vec<ParamTable> =
        (0..size).map(|rank| ParamTable::part(role.arch(), head, TensorPart { rank, size })).collect();
    let parts: Vec<Vec<f32>> =
        axes.tensor.all_gather_f64(&mine).iter().map(|part| part.iter().map(|&x| x as f32).collect()).collect();
    let join = |(i, spec): (usize, &ParamSpec)| {
        let pieces: Vec<(&ParamSpec, &[f32])> = tables
            .iter()
            .zip(&parts)
            .map(|(table, part)| (&table.specs()[i], &part[table.specs()[i].range()]))
            .collect();
        let mut values = vec![0.0; spec.len];
        gather(&pieces, spec, &mut values);
        (format!("{} {what} {}", role.name, spec.name), values)
    };
    role.whole().specs().iter().enumerate().map(join).collect()
}

/// What an update leaves: sums, and gradient and weights by parameter.
pub struct Left {
    pub sums: Sums,
    /// Of the gradients of actor and critic.
    pub norms: [f64; 2],
    pub vectors: Vec<(String, Vec<f32>)>,
}

pub fn update(arch: &Arch, config: &Config, samples: &[Experience], axes: &Axes, stage: usize) -> Left {
    let chosen: Vec<&Experience> = samples.iter().collect();
    let mut actor = learner(arch, Head::LanguageModel, config, axes, stage);
    let mut critic = learner(arch, Head::Value, config, axes, stage);
    let update = Update { config, axes, kl_beta: 0.05 };
    let sums = update.minibatch(&mut actor, Some(&mut critic), &chosen).expect("a finite gradient");
    let kept = [(&actor, "m"), (&actor, "weights"), (&critic, "m"), (&critic, "weights")];
    let vectors = kept.into_iter().flat_map(|(learner, what)| whole(learner, what, axes)).collect();
    Left { sums, norms: [actor.report.grad_norm, critic.report.grad_norm], vectors }
}

fn norm(x: impl Iterator<Item = f32>) -> f64 {
    x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// The largest relative gap of a gradient or weight tensor.
pub fn assert_near(who: &str, got: &Left, want: &Left) -> f64 {
    for (key, b) in want.sums.iter() {
        let a = got.sums.get(key);
        assert!((a - b).abs() <= TOLERANCE * b.abs(), "{who}: {key} is {a}, of one rank {b}");
    }
    for (a, b) in got.norms.iter().zip(&want.norms) {
        assert!((a - b).abs() <= TOLERANCE * b.abs(), "{who}: a gradient's norm is {a}, of one rank {b}");
    }
    let mut largest = 0.0f64;
    for ((name, got), (_, want)) in got.vectors.iter().zip(&want.vectors) {
        let (apart, len) = (norm(got.iter().zip(want).map(|(a, b)| a - b)), norm(want.iter().copied()));
        assert!(len > 0.0 && apart <= TOLERANCE * len, "{who}: {name}: {apart:e} apart, {len:e} long");
        largest = largest.max(apart / len);
    }
    largest
}

/// Every product of a data, a sequence and a tensor axis on the world that the models can be cut into.
fn meshes(world: &World) -> Vec<Mesh> {
    let dividing = |n: usize| (1..=n).filter(move |s| n.is_multiple_of(*s));
    let tensor = dividing(world.size).filter(|t| 4usize.is_multiple_of(*t));
    let mesh = |tensor: usize| {
        let left = world.size / tensor;
        dividing(left).map(move |sequence| Mesh { data: left / sequence, pipeline: 1, sequence, tensor })
    };
    tensor.flat_map(mesh).collect()
}

fn scores(world: &World) {
    let (arch, config, samples) = (arch("llama"), config(PolicyLossKind::Clip), samples(LENGTHS));
    let scored = |axes: &Axes, stage| {
        let actor = learner(&arch, Head::LanguageModel, &config, axes, stage).role;
        let critic = learner(&arch, Head::Value, &config, axes, stage).role;
        let logprobs = score::logprobs(&actor, axes, &samples, 0.8, 96);
        let values = score::values(&critic, axes, &samples, 96);
        (logprobs, values)
    };
    let want = scored(&Axes::one(), 0);
    for (sample, (values, last)) in samples.iter().zip(&want.1) {
        assert!(values.len() == sample.response.tokens.len() && last.is_finite());
    }
    for mesh in meshes(world) {
        let axes = world.axes(&mesh).expect("the world's size");
        for stage in [1, 3] {
            let got = scored(&axes, stage);
            if mesh.sequence * mesh.tensor == 1 {
                assert!(got == want, "on {mesh}, stage {stage}: the bits of one rank");
            }
            for (got, want) in got.0.iter().zip(&want.0).chain(got.1.iter().zip(&want.1).map(|(a, b)| (&a.0, &b.0))) {
                let apart = norm(got.iter().zip(want).map(|(a, b)| a - b));
                assert!(got.len() == want.len() && apart <= TOLERANCE * norm(want.iter().copied()), "on {mesh}");
            }
            let lasts = got.1.iter().zip(&want.1).map(|(a, b)| a.1 - b.1);
            assert!(norm(lasts) <= TOLERANCE * norm(want.1.iter().map(|x| x.1)), "on {mesh}: last values");
        }
    }
}
