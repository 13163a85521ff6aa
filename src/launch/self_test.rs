//! The self-test before a run: compares the GPU of this process with the CPU. A small model of the job's kind runs
//! forward and backward on both, and the GPU samples tokens with its cache. Results that must be bit-identical are
//! compared bit for bit; the others may differ by the rounding of bf16. Only sampling rounds keys and values to 8 bits,
//! if the job does: where bf16 changes the nearest code, more than its rounding differs.

use crate::comm::abort;
use crate::config::mesh::RoleName;
use crate::config::rollout::RolloutConfig;
use crate::device::Device;
use crate::device::cuda::{fast, gpu};
use crate::dtype::{DType, KvDtype};
use crate::error::{Error, Result};
use crate::experience::Prompt;
use crate::learn::packed::PackedRow;
use crate::model::{Arch, AttentionSpec, BlockSpec, DeltaSpec, Mixer};
use crate::model::{Gradients, Head, Saved, TensorPart, Transformer, Weights, init};
use crate::rng::{Purpose, Rng};
use crate::rollout::{Engine, Hooks, Model, requests};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// The largest difference of values, and of gradients, relative to the CPU's norm: bf16 keeps 8 bits, and its rounding
/// adds up.
const APART: f64 = 0.02;
const GRADIENT_APART: f64 = 0.05;

const WIDTH_MAX: usize = 1024;
const MLP_WIDTH_MAX: usize = 256;
/// The most experts. Each token has all of them: rounding would change which ones are chosen.
const EXPERTS_MAX: usize = 8;
const VOCABULARY_MAX: usize = 512;
/// The largest window; it is shorter than the longest sequence, so that it masks keys.
const WINDOW_MAX: usize = 24;
/// Tokens of the sequences of the packed row: within a tile of attention, past a page, past a tile. Their
/// log-probabilities fill a tile of the head that stores no logits.
const LENGTHS: [usize; 3] = [9, 39, 96];
const TEMPERATURE: f32 = 0.8;
const SLOPE_OF_ENTROPY: f32 = 0.01;
const OF: &str = "the gradient of ";
/// Tokens of the prompts, one longer than a page, new tokens, and pages of the cache.
const PROMPTS: [usize; 2] = [70, 21];
const NEW: usize = 6;
const KV_PAGES: usize = 32;
const SEED: u64 = 17;

/// The small model that represents `arch`, with its head dim, ratio of heads, norms, biases, windows and rotary
/// scaling.
fn small(arch: &Arch) -> Arch {
    let width = arch.width.min(WIDTH_MAX);
    let block = |block: &BlockSpec| {
        let mixer = match block.mixer {
            Mixer::Attention(attention) => {
                let (sharing, kv_heads) = (attention.heads / attention.kv_heads, attention.kv_heads.min(2));
                let window = attention.window.map(|keys| keys.min(WINDOW_MAX));
                Mixer::Attention(AttentionSpec { heads: sharing * kv_heads, kv_heads, window, ..attention })
            }
            Mixer::Delta(delta) => {
                let sharing = delta.value_heads / delta.key_heads;
                // Rows of eights.
                let mut counts = 2..delta.key_heads;
                let key_heads = counts.find(|n| (n * sharing).is_multiple_of(8)).unwrap_or(delta.key_heads);
                Mixer::Delta(DeltaSpec { value_heads: sharing * key_heads, key_heads, ..delta })
            }
        };
        BlockSpec { mixer, feed: block.feed.narrowed(MLP_WIDTH_MAX, EXPERTS_MAX), ..*block }
    };
    // Layers of two kinds, if there are two.
    let first = &arch.blocks[0];
    let other = arch.blocks.iter().find(|block| *block != first).unwrap_or(first);
    // Odd vocabularies test the ends of rows.
    let vocabulary =
        if arch.vocabulary <= VOCABULARY_MAX { arch.vocabulary } else { VOCABULARY_MAX + arch.vocabulary % 8 };
    Arch {
        width,
        blocks: vec![block(first), block(other)],
        vocabulary,
        context: 256,
        // Logits and scores have a std of about one at any width.
        init_std: 0.8 / (width as f32).sqrt(),
        eos_tokens: Vec::new(),
        source: serde_json::Map::new(),
        ..arch.clone()
    }
}

/// `len` tokens of all kinds.
fn tokens(seed: usize, len: usize, vocabulary: usize) -> Vec<u32> {
    (0..len).map(|i| ((seed * 89 + i * 37 + i * i * 11) % vocabulary) as u32).collect()
}

struct Small {
    model: Transformer,
    /// The same without rounding of keys and values.
    plain: Transformer,
    w: Weights,
}

impl Small {
    fn on(device: Device, arch: &Arch, head: Head) -> Self {
        let dtype = if device == Device::Cuda { DType::Bf16 } else { DType::F32 };
        let w = init::init_on(device, arch, head, dtype, SEED, TensorPart::whole());
        let [model, mut plain] = [(); 2].map(|()| Transformer::new(arch, &w.table));
        plain.keep_keys_in(KvDtype::Model);
        Self { model, plain, w }
    }
}

/// Results of one forward and backward of the packed row, by name; gradients row by row, from the head down.
type Passed = Vec<(String, Vec<f32>)>;

fn pass(Small { plain: model, w, .. }: &Small) -> Passed {
    let mut row = PackedRow::new();
    LENGTHS.iter().enumerate().for_each(|(i, len)| row.push(&tokens(i, *len, model.arch.vocabulary), 1));
    let slopes: Vec<f32> = (0..row.rows.len()).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
    let (mut saved, mut grads) = (Saved::new(false), Gradients::new(w.table.clone()));
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
    let mut passed = vec![("the hidden state after the last layer".to_string(), hidden.to_host())];
    let dhidden = match w.table.head() {
        Head::LanguageModel => {
            let mut loss = |range: Range<usize>, _: &[f32], _: &[f32], dl: &mut [f32], dh: &mut [f32]| {
                dl.copy_from_slice(&slopes[range]);
                dh.fill(SLOPE_OF_ENTROPY);
            };
            let (dhidden, logprobs, entropies) =
                model.logprobs_backward(w, &hidden, &row.rows, &row.targets, TEMPERATURE, &mut loss, &mut grads);
            passed.extend([("the log-probabilities".into(), logprobs), ("the entropies".into(), entropies)]);
            dhidden
        }
        Head::Value => {
            passed.push(("the values of the value head".into(), model.values(w, &hidden, &row.rows)));
            model.values_backward(w, &hidden, &row.rows, &slopes, &mut grads)
        }
    };
    model.backward(w, saved, &row.cu_seqlens, dhidden, &mut grads);
    let flat = grads.to_vec();
    passed.extend(grads.table.specs().iter().rev().map(|spec| {
        let ((rows, columns), values) = (spec.dims(), &flat[spec.range()]);
        let line = |row: usize| (0..columns).map(move |column| values[spec.layout.index(columns, row, column)]);
        (format!("{OF}{}", spec.name), (0..rows).flat_map(line).collect())
    }));
    passed
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt()
}

/// ||a - b|| / ||b||, or relative to `least` if that is larger.
fn compare(what: &str, a: &[f32], b: &[f32], least: f64) -> Result<f64> {
    let gaps: Vec<f32> = a.iter().zip(b).map(|(a, b)| a - b).collect();
    let gap = norm(&gaps) / norm(b).max(least).max(1e-30);
    let most = if what.starts_with(OF) { GRADIENT_APART } else { APART };
    if gap <= most {
        return Ok(gap);
    }
    Err(Error::fault(format!(
        "{what}: the difference is {gap:.3} of the norm, but rounding explains at most {most:.3}"
    )))
}

/// The least norm that the gradient of a bias is compared with. The bias of keys, for example, changes all scores of a
/// query by nearly the same value, so its gradient is a small difference of large terms. The gradient of its matrix
/// shows how large they are: its rows are these terms times a normalized row.
fn least(name: &str, of: &Passed) -> f64 {
    let weight = name.strip_suffix("bias").map(|stem| format!("{stem}weight"));
    let find = |name: &str| of.iter().find(|(other, _)| other == name).map(|(_, values)| values);
    let (Some(bias), Some(matrix)) = (find(name), weight.and_then(|name| find(&name))) else { return 0.0 };
    norm(matrix) / ((matrix.len() / bias.len().max(1)).max(1) as f64).sqrt()
}

/// Samples on the GPU, and compares the log-probabilities with a training forward over the same tokens, and with the
/// CPU.
fn decode(there: &Small, cpu: &Small, graphs: bool, is_exact: bool) -> Result<()> {
    let vocabulary = there.model.arch.vocabulary;
    let of =
        |(id, len): (usize, usize)| Prompt { id: id as u64, tokens: tokens(id, len, vocabulary), ..Prompt::default() };
    let prompts: Vec<Prompt> = PROMPTS.into_iter().enumerate().map(of).collect();
    let config = RolloutConfig {
        samples_per_prompt: 2,
        response_tokens_max: NEW,
        prefill_tokens_max: PROMPTS[0] + 10,
        kv_bytes_max: (KV_PAGES * there.model.kv_page_bytes(there.w.dtype()).iter().sum::<usize>()) as u64,
        graphs,
        ..RolloutConfig::default()
    };
    let requests = requests(&prompts, &config, &Arc::default(), there.model.arch.context)?;
    let mut hooks = Hooks::default();
    let model = Model { transformer: &there.model, weights: &there.w, tokenizer: None };
    let outcome = Engine::new(&config, 0).generate(model, Rng::new(SEED, Purpose::Sample), 0, &requests, &mut hooks)?;
    let responses = outcome.complete().ok_or_else(|| Error::fault("a response did not finish"))?;
    for (request, response) in requests.iter().zip(&responses) {
        let mut row = PackedRow::new();
        row.push(&[&request.tokens[..], &response.tokens].concat(), request.tokens.len());
        let hidden = |of: &Small| of.model.forward(&of.w, &row.tokens, &row.positions, row.keys(), None);
        let (again, _) = there.model.logprobs(&there.w, &hidden(there), &row.rows, &row.targets, 1.0, false);
        let (of_cpu, _) = cpu.model.logprobs(&cpu.w, &hidden(cpu), &row.rows, &row.targets, 1.0, false);
        let what = format!("the log-probabilities of tokens sampled after a prompt of {}", request.tokens.len());
        let other = again.iter().zip(&response.logprobs).any(|(a, b)| a.to_bits() != b.to_bits());
        if is_exact && other {
            let (from, rule) = (&response.logprobs, "must be bit-identical in rollout and training");
            return Err(Error::fault(format!("{what} {rule} (got {from:?} with the cache, {again:?} in training)")));
        }
        compare(&what, &response.logprobs, &of_cpu, 0.0)?;
    }
    Ok(())
}

/// `largest gap 1.2 % (the gradient of layers.0.mlp.up.weight); the hidden state after the last layer 0.4 %`: all
/// results of a forward, and the gradient with the largest gap.
fn describe(mut gaps: Vec<(f64, String)>) -> String {
    gaps.sort_by(|a, b| b.0.total_cmp(&a.0));
    let percent = |gap: f64| format!("{:.1} %", 100.0 * gap);
    let largest = gaps.first().map(|(gap, name)| format!("largest gap {} ({name})", percent(*gap)));
    let others = gaps.iter().skip(1).filter(|(_, name)| !name.starts_with(OF));
    let others = others.map(|(gap, name)| format!("{name} {}", percent(*gap)));
    largest.into_iter().chain(others).collect::<Vec<_>>().join("; ")
}

/// Small models with the CPU's results.
pub struct SelfTest {
    models: Vec<(Small, Passed)>,
    graphs: bool,
    /// The result, for the banner.
    pub description: String,
}

impl SelfTest {
    /// Compares the GPU of this process with the CPU on small models like `models`, with exact GEMMs.
    pub fn exact(models: &[(RoleName, Head, Arch)], graphs: bool) -> Result<Self> {
        let start = Instant::now();
        let mut test = Self { models: Vec::new(), graphs, description: String::new() };
        for (arch, head) in models.iter().map(|(_, head, arch)| (small(arch), *head)) {
            let same = |(cpu, _): &(Small, Passed)| cpu.w.table.head() == head && cpu.model.arch.computes_as(&arch);
            if !test.models.iter().any(same) {
                let cpu = Small::on(Device::Cpu, &arch, head);
                let expected = pass(&cpu);
                test.models.push((cpu, expected));
            }
        }
        let gaps = test
            .run(true)
            .map_err(|error| error.within("the kernels of this GPU failed the self-test against the CPU"))?;
        let seconds = start.elapsed().as_secs_f64();
        test.description = format!("kernels checked against the CPU in {seconds:.1} s: {}", describe(gaps));
        Ok(test)
    }

    /// The same test with cuBLASLt for GEMMs of many rows.
    pub fn fast(&self) -> Result<()> {
        fast::turn(true).map_err(Error::usage)?;
        let compared = self.run(false);
        fast::turn(false).map_err(Error::usage)?;
        compared.map(drop).map_err(|error| error.within("GEMM by cuBLASLt failed the self-test against the CPU"))
    }

    /// Compares forward and backward with the CPU's, and sampling; returns the gaps, with their names.
    fn run(&self, is_exact: bool) -> Result<Vec<(f64, String)>> {
        let compared = abort::caught(|| {
            let mut gaps = Vec::new();
            for (cpu, expected) in &self.models {
                let (arch, head) = (&cpu.model.arch, cpu.w.table.head());
                let there = Small::on(Device::Cuda, arch, head);
                for ((name, a), (_, b)) in pass(&there).into_iter().zip(expected) {
                    gaps.push((compare(&name, &a, b, least(&name, expected))?, name));
                }
                if head == Head::LanguageModel {
                    decode(&there, cpu, self.graphs, is_exact)?;
                }
            }
            Ok(gaps)
        });
        gpu().trim();
        compared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_gap_is_reported_first_followed_by_the_gaps_of_the_forward() {
        let gaps = [(0.004, "the entropies"), (0.01, "the gradient of a"), (0.012, "the gradient of b")];
        let gaps = gaps.map(|(gap, name)| (gap, name.to_string())).to_vec();
        assert_eq!(describe(gaps), "largest gap 1.2 % (the gradient of b); the entropies 0.4 %");
    }

    #[test]
    fn the_self_test_model_has_the_jobs_architecture_and_is_small() {
        let layer_types: Vec<_> = ["full_attention", "sliding_attention"].into_iter().cycle().take(28).collect();
        let shape = serde_json::json!({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
            "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 50_257,
            "use_sliding_window": true, "sliding_window": 4096, "layer_types": layer_types});
        let arch = Arch::from_config(shape.as_object().expect("an object")).expect("a known family");
        let small = small(&arch);
        let [first, second] = [0, 1].map(|layer| small.blocks[layer].attention().expect("attention"));
        assert_eq!((first.heads, first.kv_heads, first.head_dim, first.qkv_bias), (14, 2, 128, true));
        assert_eq!((first.window, second.window, small.blocks.len()), (None, Some(24), 2));
        assert_eq!((small.width, small.vocabulary % 8, small.tied), (1024, 50_257 % 8, arch.tied));
        assert_eq!(small.ropes, arch.ropes);
        assert!(Small::on(Device::Cpu, &small, Head::LanguageModel).w.table.parameters() < 20 << 20);
    }
}
