//! Before anything is trained on a GPU: its kernels compute what the CPU does.
//!
//! A small model of the job's own kind (`trial`) is sampled from with graphs as the job has them, plainly and with the job's own
//! settings, and goes through forward, backward, the job's own losses and an optimizer step, on both devices. What must have equal
//! bits is held to them; the rest may differ as bf16 rounds. What ranks send to each other is checked when they have joined
//! (`comm::check`), and then a model in the job's layout (`trial_layout`). `bench/start-check.md` reckons what it all costs.

use super::trial::{self, Passed, Twin, apart, norm, within};
use super::trial_draws::NATS_APART;
use super::trial_layout::{self, Laid};
use super::{trial_draws, trial_ring, trial_update};
use crate::comm::{Axes, abort};
use crate::config::Config;
use crate::config::job::{GradientConfig, JobKind};
use crate::device::Device;
use crate::device::cuda::matmul::{self, Family, Matrix, MatrixMut, Size};
use crate::device::cuda::{Memory, ViewMut, fast, gpu};
use crate::error::{Error, Result};
use crate::learn::{Learner, Role};
use crate::model::{Arch, Gradients, Head};
use crate::tensor::DType;
use std::path::Path;
use std::time::Instant;

/// How far hidden states and values may be apart, and gradients, by the norm of the CPU's: bf16 keeps 8 bits, and what it
/// rounds away adds up over two layers and a head.
const HIDDEN_APART: f64 = 0.02;
const GRADIENT_APART: f64 = 0.05;

/// Small models with what the CPU computes of them.
pub struct Checked {
    trials: Vec<Trial>,
    config: Config,
    actor: Arch,
    /// For the banner.
    pub words: String,
}

struct Trial {
    cpu: Twin,
    expected: Passed,
    recompute: bool,
}

/// The largest gap of a gradient, and whose.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gap {
    share: f64,
    name: String,
}

/// Compares the GPU of this process with the CPU, with exact products.
///
/// # Errors
/// `Fault`, naming the first quantity that differs and by how much.
pub fn exact(config: &Config) -> Result<Checked> {
    let start = Instant::now();
    let recompute = config.gradient.recompute;
    let trials = archs(config)?.into_iter().map(|(arch, head)| Trial::new(&arch, head, recompute));
    let actor = Arch::load(&config.model.actor)?;
    let mut checked = Checked { trials: trials.collect(), words: String::new(), config: config.clone(), actor };
    let of_cpu = start.elapsed().as_secs_f64();
    let gap = abort::caught(|| tiles().and_then(|()| checked.compare(false)))
        .map_err(|error| error.within("the kernels of this GPU do not pass beside the CPU"))?;
    gpu().trim();
    checked.words = format!(
        "kernels checked against the CPU in {:.1} s, {of_cpu:.1} s of them the CPU's: largest gap of a gradient {:.1} % ({})",
        start.elapsed().as_secs_f64(),
        100.0 * gap.share,
        gap.name
    );
    Ok(checked)
}

/// The small models of a job: one of each kind and head.
fn archs(config: &Config) -> Result<Vec<(Arch, Head)>> {
    let of = |dir: &Path| Arch::load(dir).map(|arch| trial::small(&arch));
    let mut all = vec![(of(&config.model.actor)?, Head::LanguageModel)];
    if config.job.kind == JobKind::Ppo {
        if config.needs_reference() {
            all.push((of(config.model.reference_dir())?, Head::LanguageModel));
        }
        if config.ppo.advantage.has_critic() {
            all.push((of(config.model.critic_dir())?, Head::Value));
        }
    }
    let mut each: Vec<(Arch, Head)> = Vec::new();
    for (arch, head) in all {
        if !each.iter().any(|(known, of)| *of == head && known.computes_as(&arch)) {
            each.push((arch, head));
        }
    }
    Ok(each)
}

impl Checked {
    /// The same with products of many rows by cuBLASLt.
    ///
    /// # Errors
    /// As `exact`.
    pub fn fast(&self) -> Result<()> {
        fast::turn(true).map_err(Error::usage)?;
        let compared = abort::caught(|| self.compare(true));
        fast::turn(false).map_err(Error::usage)?;
        gpu().trim();
        compared.map(drop).map_err(|error| error.within("products by cuBLASLt do not pass beside the CPU"))
    }

    /// Whether ring attention over the sequence axis, where that has several ranks, is attention of the whole row. All ranks of the
    /// axis call this.
    ///
    /// # Errors
    /// As `exact`.
    pub fn ring(&self, axes: &Axes) -> Result<()> {
        let several = axes.sequence.size() > 1;
        let each: Vec<Result<()>> =
            self.trials.iter().filter(|_| several).map(|trial| trial_ring::compare(axes, &trial.cpu.model)).collect();
        each.into_iter().collect()
    }

    /// Whether the actor laid out as the job's is what one rank has of it; whether there was anything to try. All ranks of the layout
    /// call this.
    ///
    /// # Errors
    /// As `exact`.
    pub fn layout(&self, laid: &Laid) -> Result<bool> {
        trial_layout::compare(laid, &self.actor)
    }

    fn compare(&self, fast: bool) -> Result<Gap> {
        let mut largest = Gap::default();
        for trial in &self.trials {
            let gap = trial.compare(&self.config, &self.actor.eos_tokens, fast)?;
            if gap.share > largest.share {
                largest = gap;
            }
        }
        Ok(largest)
    }
}

impl Trial {
    fn new(arch: &Arch, head: Head, recompute: bool) -> Self {
        let cpu = Twin::on(Device::Cpu, arch, head);
        let mut grads = Gradients::new(cpu.weights.table.clone());
        let mut expected = trial::pass(&cpu.model, &cpu.weights, recompute, &mut grads);
        expected.gradients = trial::by_name(&grads);
        Self { cpu, expected, recompute }
    }

    fn compare(&self, config: &Config, eos_tokens: &[u32], fast: bool) -> Result<Gap> {
        let (arch, head) = (&self.cpu.model.arch, self.cpu.weights.table.head());
        let twin = Twin::on(Device::Cuda, arch, head);
        let axes = Axes::one();
        let role = Role::new("actor", Path::new(""), arch, twin.weights, &axes);
        let mut learner = Learner::new(role, &trial_update::optim(), &GradientConfig::default(), 1, &axes, 0)?;
        learner.sum.begin_chunk();
        learner.sum.begin_microbatch(false);
        let Learner { role, sum, .. } = &mut learner;
        let (model, w) = (&role.transformer, &role.weights);
        let mut passed = trial::pass(model, w, self.recompute, &mut sum.grads);
        passed.gradients = trial::by_name(&sum.grads);
        let largest = compare(&passed, &self.expected)?;
        if head == Head::LanguageModel {
            if !fast && trial::score(model, w) != passed.scored {
                return Err(Error::fault("log-probabilities have other bits in scoring than in training"));
            }
            let graphs = config.rollout.graphs;
            trial_draws::compare((model, w), self.cpu.pair(), graphs, !fast)?;
            if !fast && config.job.kind == JobKind::Ppo {
                trial_draws::compare_settings((model, w), &config.rollout, eos_tokens)?;
            }
        }
        let mut beside = trial_update::Beside::new(&learner, false);
        learner.sum.end_chunk(0);
        beside.compare(&mut learner, &axes)?;
        Ok(largest)
    }
}

/// Holds one forward and backward to another; the largest gap of a gradient.
pub fn compare(got: &Passed, want: &Passed) -> Result<Gap> {
    let gap = apart(&got.hidden, &want.hidden, 0.0);
    within(|| "the hidden state behind the last layer".into(), gap, HIDDEN_APART, "of its norm")?;
    let gap_of = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, larger);
    // A value head's answers have no entropies.
    if want.entropies.is_empty() {
        let gap = apart(&got.scored, &want.scored, 0.0);
        within(|| "the values of the value head".into(), gap, HIDDEN_APART, "of their norm")?;
    } else {
        for (what, a, b) in
            [("a log-probability", &got.scored, &want.scored), ("an entropy", &got.entropies, &want.entropies)]
        {
            within(|| what.into(), gap_of(a, b), NATS_APART, "nats")?;
        }
    }
    let mut largest = Gap::default();
    // From the head down, as a backward goes: the first that differs is the nearest to the cause.
    for ((name, a), (_, b)) in got.gradients.iter().zip(&want.gradients).rev() {
        let share = apart(a, b, least(name, want));
        within(|| format!("the gradient of {name}"), share, GRADIENT_APART, "of its norm")?;
        if share > largest.share {
            largest = Gap { share, name: name.clone() };
        }
    }
    Ok(largest)
}

fn larger(a: f64, b: f64) -> f64 {
    if b.is_nan() || b > a { b } else { a }
}

/// What the gradient of a bias is measured by at least: the bias of keys, say, moves all scores of a query nearly alike, so that
/// its gradient is a small rest of large parts. The gradient of the matrix beside it knows how large: its rows are those parts
/// times a normed row.
fn least(name: &str, of: &Passed) -> f64 {
    let Some(matrix) = name.strip_suffix("bias").map(|stem| format!("{stem}weight")) else { return 0.0 };
    let Some((_, beside)) = of.gradients.iter().find(|(other, _)| *other == matrix) else { return 0.0 };
    let rows = of.gradients.iter().find(|(other, _)| other == name).map_or(1, |(_, bias)| bias.len().max(1));
    norm(beside) / ((beside.len() / rows).max(1) as f64).sqrt()
}

/// Rows of x and of W, and the columns of both, of the products that all tiles compute: y (m, n) = x (m, k) W (n, k)^T.
const PRODUCT: (usize, usize, usize) = (136, 136, 72);

/// Values of a matrix of a product, in bf16.
fn operand(seed: usize, len: usize) -> Memory {
    let bits = trial::numbers(seed).take(len).map(|x| half::bf16::from_f32(x).to_bits());
    Memory::of(&bits.collect::<Vec<u16>>())
}

/// Tiles of all sizes give a product the same bits: a small model has not those that take the large ones.
///
/// # Errors
/// `Fault`, naming the tiles.
pub fn forward_tiles() -> Result<()> {
    let (m, n, k) = PRODUCT;
    let [x, w] = [operand(1, m * k), operand(2, n * k)];
    let [x, w] = [(&x, m), (&w, n)].map(|(memory, rows)| Matrix::new(memory.view(DType::Bf16), rows, k));
    [DType::Bf16, DType::F32].into_iter().try_for_each(|dtype| {
        alike("a product", &Family::ALL, m * n, dtype, |family, to| {
            matmul::forward_by(family, x, w, None, MatrixMut::new(to, m, n), false);
        })
    })
}

/// As `forward_tiles`, and the gradients of a product.
fn tiles() -> Result<()> {
    forward_tiles()?;
    let (m, n, k) = PRODUCT;
    let [x, w, dy] = [operand(1, m * k), operand(2, n * k), operand(3, m * n)];
    let [x, w] = [(&x, m), (&w, n)].map(|(memory, rows)| Matrix::new(memory.view(DType::Bf16), rows, k));
    let dy = Matrix::new(dy.view(DType::Bf16), m, n);
    alike("the gradient of a product's input", &Size::ALL, m * k, DType::Bf16, |size, to| {
        matmul::backward_input_by(size, dy, w, MatrixMut::new(to, m, k), false);
    })?;
    alike("the gradient of a product's matrix", &Size::ALL, n * k, DType::F32, |size, to| {
        matmul::backward_weight_by(size, dy, x, MatrixMut::new(to, n, k));
    })
}

/// Runs a product in all tiles and compares the bits.
fn alike<T: Copy + std::fmt::Debug>(
    what: &str,
    tiles: &[T],
    len: usize,
    dtype: DType,
    run: impl Fn(T, ViewMut),
) -> Result<()> {
    let bits = |tile: T| -> Vec<u32> {
        let mut to = Memory::zeros(len * dtype.bytes());
        run(tile, to.view_mut(dtype));
        to.view(dtype).to_f32().iter().map(|x| x.to_bits()).collect()
    };
    let first = bits(tiles[0]);
    match tiles[1..].iter().find(|tile| bits(**tile) != first) {
        None => Ok(()),
        Some(tile) => {
            let words = format!("{what} has other bits in tiles of {tile:?} than of {:?}", tiles[0]);
            Err(Error::fault(words))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn arch(config: &serde_json::Value) -> Arch {
        Arch::from_config(config.as_object().expect("an object")).expect("a known family")
    }

    #[test]
    fn a_small_model_is_of_the_jobs_kind_and_takes_a_cpu_a_moment() {
        let llama = json!({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 32000});
        let qwen = json!({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064});
        let large = json!({"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128_256});
        for (config, sharing, kv_heads) in [(llama, 1, 2), (qwen, 7, 1), (large, 8, 1)] {
            let arch = arch(&config);
            let small = trial::small(&arch);
            assert_eq!((small.heads, small.kv_heads, small.head_dim), (sharing * kv_heads, kv_heads, 128));
            assert_eq!((small.layers, small.width), (2, arch.width.min(2048)));
            assert_eq!((small.qkv_bias, small.tied, &small.rope), (arch.qkv_bias, arch.tied, &arch.rope));
            let start = Instant::now();
            let trial = Trial::new(&small, Head::LanguageModel, false);
            let parameters = trial.cpu.weights.table.parameters();
            eprintln!("{}: {parameters} parameters, {:.2} s", arch.shape(), start.elapsed().as_secs_f64());
            assert!(parameters < 20 << 20, "{parameters} parameters");
            // Slopes that are far from 0, so that what is relative means something.
            for (name, gradient) in &trial.expected.gradients {
                let each = norm(gradient) / (gradient.len() as f64).sqrt();
                assert!(each > 1e-4, "{name}: slopes of {each}");
            }
        }
    }

    #[test]
    fn a_layer_of_each_window_and_the_ends_of_an_odd_vocabulary_stay() {
        let mut arch = arch(&json!({"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
            "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 50_257}));
        arch.windows = vec![None, Some(4096), None, Some(4096)];
        let small = trial::small(&arch);
        assert_eq!((small.windows, small.vocabulary % 8), (vec![None, Some(24)], 50_257 % 8));
        arch.windows = vec![Some(5); 4];
        assert_eq!(trial::small(&arch).windows, [Some(5), Some(5)]);
    }
}
