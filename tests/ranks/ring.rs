//! Ring attention over the sequence axis against one rank that has the whole row.

use crate::Test;
use crate::tensor_models::shard;
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::learn::packed::PackedRow;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Gradients, Head, ParamTable, Saved, TensorPart, Transformer, Weights, init};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::tensor::{DType, arena};
use std::sync::Arc;

pub const TESTS: &[Test] = &[
    Test { name: "a ring's loss and gradients are those of one rank", ranks: &[1, 3], check: equals },
    Test { name: "a ring gives the same bits again, recomputing or not, keeping or not", ranks: &[3], check: again },
    Test { name: "a ring learns from a sequence that does not fit one rank", ranks: &[4], check: shares },
];

const VOCABULARY: usize = 89;
/// Relative to the norm of what one rank has.
const TOLERANCE: f64 = 1e-5;
/// From no token over fewer than 2S to many. A row of labels has queries of many keys, or none: where a query sees one or
/// two, its gradients cancel to rounding.
const LENGTHS: &[&[usize]] = &[&[1, 3, 90, 0, 2, 33, 5], &[1], &[2, 1, 5, 13], &[160], &[]];

fn arch(model_type: &str, class: &str, window: Option<usize>, context: usize) -> Arch {
    let config = serde_json::json!({
        "model_type": model_type, "architectures": [class], "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "max_position_embeddings": context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "initializer_range": 0.15, "eos_token_id": 2, "sliding_window": window,
        "head_dim": 12
    });
    Arch::from_config(config.as_object().expect("an object")).expect("a model that is known")
}

/// With a window shorter than any piece, one that spans a few, and one longer than most sequences.
fn models() -> Vec<(&'static str, Arch)> {
    let mistral = |window| arch("mistral", "MistralForCausalLM", Some(window), 256);
    vec![
        ("llama", arch("llama", "LlamaForCausalLM", None, 256)),
        ("mistral 4", mistral(4)),
        ("mistral 25", mistral(25)),
        ("mistral 100", mistral(100)),
        ("qwen3", arch("qwen3", "Qwen3ForCausalLM", None, 256)),
    ]
}

fn row(lengths: &[usize]) -> PackedRow {
    let rng = Rng::new(11, Purpose::Corpus);
    let mut row = PackedRow::new();
    for (i, &length) in lengths.iter().enumerate() {
        let token = |at| 3 + rng.below(VOCABULARY as u64 - 3, [i as u32, at as u32, 0, 0]) as u32;
        let tokens: Vec<u32> = (0..length).map(token).collect();
        row.push_where(&tokens, |at| at % 7 != 3);
    }
    row
}

/// What a loss asks of the predicted token `place` of the whole row.
fn weight(place: usize) -> f32 {
    0.2 + (place * 37 % 11) as f32 * 0.1
}

struct Side {
    transformer: Transformer,
    weights: Weights,
    axes: Axes,
}

/// The hidden state of the part's rows, the loss summed over them, and the gradients they add.
struct Passed {
    hidden: Vec<f32>,
    loss: f64,
    grads: Gradients,
}

impl Side {
    /// This rank's part of the weights, whole ones being the same for every mesh.
    fn new(arch: &Arch, head: Head, axes: Axes) -> Self {
        let whole = init::init(arch, head, DType::F32, 7);
        let table = Arc::new(ParamTable::part(arch, head, TensorPart::of(&axes.tensor)));
        let mut weights = Weights::zeros(table.clone(), DType::F32);
        let mut master = vec![0.0; table.len()];
        let values = whole.to_master(0..whole.table.len());
        for (spec, of) in table.specs().iter().zip(whole.table.specs()) {
            shard(of, &values[of.range()], spec, &mut master[spec.range()]);
        }
        weights.store_master(0..table.len(), &master);
        Self { transformer: Transformer::over(arch, &weights.table, &axes), weights, axes }
    }

    fn part(&self, row: &PackedRow) -> PackedRow {
        row.part(self.axes.sequence.rank(), self.axes.sequence.size())
    }

    fn forward(&self, part: &PackedRow, saved: Option<&mut Saved>) -> Vec<f32> {
        let Self { transformer, weights, .. } = self;
        transformer.forward(weights, &part.tokens, &part.positions, part.keys(), saved).data().to_vec()
    }

    /// Forward and backward of the head that the weights have.
    fn pass(&self, row: &PackedRow, recompute: bool) -> Passed {
        let Self { transformer, weights, .. } = self;
        let part = self.part(row);
        let mut saved = Saved::new(recompute);
        let hidden = transformer.forward(weights, &part.tokens, &part.positions, part.keys(), Some(&mut saved));
        let mut grads = Gradients::new(weights.table.clone());
        grads.zero();
        let mut loss = 0.0;
        let dhidden = if weights.table.head() == Head::Value {
            let values = transformer.values(weights, &hidden, &part.rows);
            let gaps: Vec<f32> = values.iter().zip(&part.row_indices).map(|(v, &p)| v - weight(p)).collect();
            loss += gaps.iter().map(|g| 0.5 * f64::from(g * g)).sum::<f64>();
            transformer.values_backward(weights, &hidden, &part.rows, &gaps, &mut grads)
        } else {
            let mut local =
                |range: std::ops::Range<usize>, logprobs: &[f32], _: &[f32], d: &mut [f32], de: &mut [f32]| {
                    de.fill(0.0);
                    for ((logprob, d), &place) in logprobs.iter().zip(d).zip(&part.row_indices[range]) {
                        loss -= f64::from(weight(place) * logprob);
                        *d = -weight(place);
                    }
                };
            let (rows, targets) = (&part.rows, &part.targets);
            transformer.logprobs_backward(weights, &hidden, rows, targets, 1.0, &mut local, &mut grads).0
        };
        let hidden = hidden.data().to_vec();
        transformer.backward(weights, saved, &part.cu_seqlens, dhidden, &mut grads);
        Passed { hidden, loss, grads }
    }
}

/// Rings of all ranks, but for `tensor` that share each matrix.
fn rings(world: &World, tensor: usize) -> Axes {
    let mesh = Mesh { data: 1, pipeline: 1, sequence: world.size / tensor, tensor };
    world.axes(&mesh).expect("the world is a product")
}

fn norm(x: impl Iterator<Item = f32>) -> f64 {
    x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// ||got - want|| <= TOLERANCE ||want||
fn near(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let (gap, whole) = (norm(got.iter().zip(want).map(|(a, b)| a - b)), norm(want.iter().copied()));
    assert!(gap <= TOLERANCE * whole, "{what}: {gap:e} apart, {whole:e} long");
}

/// One row, as the ring and as one rank.
fn compare(what: &str, ring: &Side, alone: &Side, row: &PackedRow, recompute: bool) {
    let (got, want) = (ring.pass(row, recompute), alone.pass(row, recompute));
    let group = &ring.axes.sequence;
    let width = ring.transformer.arch.width;
    let own = rlhf_hpc::ops::zigzag::rows(&row.cu_seqlens, group.rank(), group.size());
    let own: Vec<f32> = own.iter().flat_map(|&i| want.hidden[i * width..(i + 1) * width].to_vec()).collect();
    near(&format!("{what}: hidden"), &got.hidden, &own);
    let mut loss = [got.loss];
    group.all_reduce_sum_f64(&mut loss);
    let gap = (loss[0] - want.loss).abs();
    assert!(gap <= TOLERANCE * want.loss.abs(), "{what}: loss {} against {}", loss[0], want.loss);
    let (mut got, want) = (got.grads.to_vec(), want.grads.to_vec());
    group.all_reduce_sum(&mut got);
    for (spec, of) in ring.weights.table.specs().iter().zip(alone.weights.table.specs()) {
        let mut part = vec![0.0; spec.len];
        shard(of, &want[of.range()], spec, &mut part);
        near(&format!("{what}: gradient of {}", spec.name), &got[spec.range()], &part);
    }
}

fn compare_all(axes: &Axes, models: &[(&str, Arch)], head: Head) {
    for (name, arch) in models {
        let (ring, alone) = (Side::new(arch, head, axes.clone()), Side::new(arch, head, Axes::one()));
        for (i, lengths) in LENGTHS.iter().enumerate() {
            let what = format!("{name}, {} ranks, lengths {lengths:?}", axes.all.size());
            compare(&what, &ring, &alone, &row(lengths), i % 2 == 0);
        }
    }
}

fn equals(world: &World) {
    compare_all(&rings(world, 1), &models(), Head::LanguageModel);
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn again(world: &World) {
    let axes = rings(world, 1);
    for (name, arch) in models() {
        let side = Side::new(&arch, Head::LanguageModel, axes.clone());
        let row = row(LENGTHS[0]);
        let first = side.pass(&row, false);
        for recompute in [false, true] {
            let other = side.pass(&row, recompute);
            assert_eq!(bits(&other.hidden), bits(&first.hidden), "{name}");
            assert_eq!(bits(&other.grads.to_vec()), bits(&first.grads.to_vec()), "{name}");
        }
        assert_eq!(bits(&side.forward(&side.part(&row), None)), bits(&first.hidden), "{name}: scoring");
    }
}

/// Under a limit that one rank passes before its forward has ended, the ring goes forward and back.
fn shares(world: &World) {
    let arch = arch("llama", "LlamaForCausalLM", None, 8192);
    let row = row(&[4096]);
    let alone = Side::new(&arch, Head::LanguageModel, Axes::one());
    let ring = Side::new(&arch, Head::LanguageModel, rings(world, 1));
    let before = arena::usage().in_use;
    let mut saved = Saved::new(false);
    alone.forward(&row, Some(&mut saved));
    let whole = arena::usage().in_use - before;
    drop(saved);
    let most = whole / world.size * 5 / 4;
    assert!(most < whole);
    arena::set_limit((before + most) as u64);
    let loss = ring.pass(&row, false).loss;
    arena::set_limit(0);
    assert!(loss.is_finite());
}
