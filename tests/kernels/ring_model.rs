//! The model on ranks that share each sequence, beside one rank that has all of it: as near to the CPU in f32 as that one is.

use crate::model::{VOCABULARY, llama, qwen3, rows};
use crate::ranks::together;
use rlhf_hpc::comm::{Axes, Group, World};
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cuda::gpu;
use rlhf_hpc::learn::packed::PackedRow;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Gradients, Head, ParamTable, Saved, TensorPart, Transformer, Weights, cut, init};
use rlhf_hpc::ops::zigzag;
use rlhf_hpc::tensor::DType;
use std::ops::Range;
use std::sync::Arc;

/// From no token over fewer than there are ranks to many.
const LENGTHS: &[&[usize]] = &[&[1, 3, 90, 0, 2, 33, 5], &[1], &[128]];
/// How much further than one rank of a GPU a ring may be from the f32 numbers: both err by the rounding of activations to
/// bf16, in other places. Few numbers scatter more.
const FURTHER: f64 = 1.6;
/// What f32 itself may cost, relative to the norm.
const F32: f64 = 1e-5;

fn row(lengths: &[usize]) -> PackedRow {
    let mut row = PackedRow::new();
    for (i, &length) in lengths.iter().enumerate() {
        let tokens: Vec<u32> = (0..length).map(|at| ((i * 17 + at * 31 + at * at) % VOCABULARY) as u32).collect();
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

/// The hidden state of the part's rows, what the head says there, and the gradients.
struct Passed {
    hidden: Vec<f32>,
    read: Vec<f32>,
    grads: Vec<f32>,
}

impl Side {
    fn on_gpu(arch: &Arch, head: Head, axes: Axes) -> Self {
        let weights = init::init_on(Device::Cuda, arch, head, DType::Bf16, 7, TensorPart::of(&axes.tensor));
        Self { transformer: Transformer::over(arch, &weights.table, &axes), weights, axes }
    }

    /// The same values on the CPU, whole and in f32.
    fn on_cpu(arch: &Arch, head: Head) -> Self {
        let rounded = init::init(arch, head, DType::Bf16, 7);
        let table = Arc::new(ParamTable::new(arch, head));
        let mut weights = Weights::zeros(table.clone(), DType::F32);
        weights.store_master(0..table.len(), &rounded.all_f32());
        Self { transformer: Transformer::over(arch, &table, &Axes::one()), weights, axes: Axes::one() }
    }

    fn part(&self, row: &PackedRow) -> PackedRow {
        row.part(self.axes.sequence.rank(), self.axes.sequence.size())
    }

    fn pass(&self, row: &PackedRow, recompute: bool) -> Passed {
        let Self { transformer: model, weights: w, .. } = self;
        let part = self.part(row);
        let mut saved = Saved::new(recompute);
        let hidden = model.forward(w, &part.tokens, &part.positions, part.keys(), Some(&mut saved));
        let mut grads = Gradients::new(w.table.clone());
        grads.zero();
        let slopes: Vec<f32> = part.row_places.iter().map(|&place| -weight(place)).collect();
        let (dhidden, read) = if w.table.head() == Head::Value {
            let values = model.values(w, &hidden, &part.rows);
            (model.values_backward(w, &hidden, &part.rows, &slopes, &mut grads), values)
        } else {
            let mut loss = |r: Range<usize>, _: &[f32], _: &[f32], d: &mut [f32], de: &mut [f32]| {
                d.copy_from_slice(&slopes[r]);
                de.fill(0.01);
            };
            let (rows, targets) = (&part.rows, &part.targets);
            let back = model.logprobs_backward(w, &hidden, rows, targets, 0.9, &mut loss, &mut grads);
            (back.0, back.1)
        };
        let hidden = hidden.to_host();
        model.backward(w, saved, &part.cu_seqlens, dhidden, &mut grads);
        Passed { hidden, read, grads: grads.to_vec() }
    }

    /// The pass of a side that is the same on every rank: `rank` alone goes through it, and tells the others of `group`.
    fn pass_of_one(&self, group: &Group, rank: usize, row: &PackedRow, recompute: bool) -> Passed {
        let passed = (group.rank() == rank).then(|| self.pass(row, recompute));
        let told = |of: fn(&Passed) -> &[f32]| {
            let mut bytes = passed.as_ref().map_or_else(Vec::new, |passed| bytemuck::cast_slice(of(passed)).to_vec());
            group.broadcast_bytes(rank, &mut bytes);
            bytes.chunks_exact(4).map(|x| f32::from_ne_bytes(x.try_into().expect("four bytes"))).collect()
        };
        let (hidden, read) = (told(|passed| &passed.hidden), told(|passed| &passed.read));
        Passed { hidden, read, grads: told(|passed| &passed.grads) }
    }

    /// Hidden state and log-probabilities where nothing is learned.
    fn scored(&self, row: &PackedRow) -> (Vec<f32>, Vec<f32>) {
        let Self { transformer: model, weights: w, .. } = self;
        let part = self.part(row);
        let hidden = model.forward(w, &part.tokens, &part.positions, part.keys(), None);
        let logprobs = model.logprobs(w, &hidden, &part.rows, &part.targets, 0.9, false).0;
        (hidden.to_host(), logprobs)
    }
}

/// Rings of all ranks, but for `tensor` that share each matrix.
fn rings(world: &World, tensor: usize) -> Axes {
    let mesh = Mesh { data: 1, pipeline: 1, sequence: world.size / tensor, tensor };
    world.axes(&mesh).expect("the world is a product")
}

/// ||a - b||^2 and ||b||^2
fn apart(a: &[f32], b: &[f32]) -> [f64; 2] {
    assert_eq!(a.len(), b.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    [a.iter().zip(b).map(|(a, b)| square(a - b)).sum(), b.iter().map(|b| square(*b)).sum()]
}

/// A gradient as `part` has it, row by row.
fn gradient(of: &Side, flat: &[f32], part: &ParamTable, i: usize) -> Vec<f32> {
    let (whole, spec) = (&of.weights.table.specs()[i], &part.specs()[i]);
    let mut values = vec![0.0; part.len()];
    cut::cut(whole, &flat[whole.range()], spec, &mut values[spec.range()]);
    rows(spec, &values)
}

/// One row: the ring against one rank, both held against the CPU.
fn compare(what: &str, [ring, alone, cpu]: [&Side; 3], row: &PackedRow, recompute: bool) {
    let (got, all) = (ring.pass(row, recompute), &ring.axes.all);
    let one = alone.pass_of_one(all, 0, row, recompute);
    let exact = cpu.pass_of_one(all, all.size() - 1, row, recompute);
    let group = &ring.axes.sequence;
    let near = |name: &str, [got, one, exact]: [&[f32]; 3], is_shared: bool| {
        let mut sums = [apart(got, exact), apart(one, exact)].concat();
        if is_shared {
            group.all_reduce_sum_f64(&mut sums);
        }
        let norm = sums[1].sqrt();
        let [ring, one] = [sums[0], sums[2]].map(f64::sqrt);
        println!("{what}: {name} {:.1e} from f32, {:.1e} on one rank", ring / norm, one / norm);
        assert!(ring <= FURTHER * one + F32 * norm, "{what}: {name}: {ring} from f32, {one} on one rank, of {norm}");
    };
    let width = ring.transformer.arch.width;
    let own = zigzag::rows(&row.cu_seqlens, group.rank(), group.size());
    let hidden = |x: &[f32]| own.iter().flat_map(|&i| x[i * width..(i + 1) * width].to_vec()).collect::<Vec<f32>>();
    near("the hidden state", [&got.hidden, &hidden(&one.hidden), &hidden(&exact.hidden)], true);
    let places = ring.part(row).row_places;
    let read = |x: &[f32]| places.iter().map(|&place| x[place]).collect::<Vec<f32>>();
    near("what the head says", [&got.read, &read(&one.read), &read(&exact.read)], true);
    let mut summed = got.grads;
    group.all_reduce_sum(&mut summed);
    let parts = TensorPart::of(&ring.axes.tensor);
    let (arch, head) = (&ring.transformer.arch, ring.weights.table.head());
    let [on_gpu, on_cpu] = [Device::Cuda, Device::Cpu].map(|device| ParamTable::on(device, arch, head, parts));
    for (i, spec) in on_gpu.specs().iter().enumerate() {
        let got = rows(spec, &summed);
        near(
            &spec.name,
            [&got, &gradient(alone, &one.grads, &on_gpu, i), &gradient(cpu, &exact.grads, &on_cpu, i)],
            false,
        );
    }
}

fn compare_all(axes: &Axes, head: Head) {
    for (name, arch) in [("llama", llama()), ("qwen3 with a window", qwen3())] {
        let (ring, alone) = (Side::on_gpu(&arch, head, axes.clone()), Side::on_gpu(&arch, head, Axes::one()));
        let cpu = Side::on_cpu(&arch, head);
        for (i, lengths) in LENGTHS.iter().enumerate() {
            let what = format!("{name}, {head:?}, {} ranks, lengths {lengths:?}", axes.all.size());
            compare(&what, [&ring, &alone, &cpu], &row(lengths), i % 2 == 0);
        }
    }
}

#[test]
fn a_ring_has_the_hidden_states_values_and_gradients_of_one_rank() {
    together("ring_model::a_ring_has_the_hidden_states_values_and_gradients_of_one_rank", &[2, 3, 4], |world| {
        compare_all(&rings(world, 1), Head::LanguageModel);
        compare_all(&rings(world, 1), Head::Value);
    });
}

#[test]
fn rings_of_tensor_parts_have_the_gradients_of_one_rank() {
    together("ring_model::rings_of_tensor_parts_have_the_gradients_of_one_rank", &[4], |world| {
        compare_all(&rings(world, 2), Head::LanguageModel);
    });
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// So that log-probabilities of scoring are those of training.
#[test]
fn a_ring_gives_the_same_bits_again_however_it_packs_and_whether_it_recomputes() {
    const FACT: &str = "ring_model::a_ring_gives_the_same_bits_again_however_it_packs_and_whether_it_recomputes";
    together(FACT, &[2, 3], |world| {
        let ring = Side::on_gpu(&qwen3(), Head::LanguageModel, rings(world, 1));
        let whole = row(&[21, 90, 5]);
        let first = ring.pass(&whole, false);
        let other = ring.pass(&whole, true);
        assert_eq!(bits(&other.hidden), bits(&first.hidden));
        assert_eq!(bits(&other.grads), bits(&first.grads));
        assert_eq!(ring.scored(&whole), (first.hidden.clone(), first.read.clone()));
        // The first sequence without those behind it.
        let alone = ring.scored(&row(&[21]));
        assert!(alone.0 == first.hidden[..alone.0.len()] && alone.1 == first.read[..alone.1.len()]);
    });
}

/// Under a limit of GPU memory that one rank passes before its forward has ended, a ring goes forward and back.
#[test]
fn a_ring_learns_from_a_sequence_that_does_not_fit_one_rank() {
    together("ring_model::a_ring_learns_from_a_sequence_that_does_not_fit_one_rank", &[2, 4], |world| {
        let config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
            "vocab_size": VOCABULARY, "max_position_embeddings": 512, "tie_word_embeddings": false,
        });
        let arch = Arch::from_config(config.as_object().expect("an object")).expect("a model");
        let row = row(&[512]);
        let alone = Side::on_gpu(&arch, Head::LanguageModel, Axes::one());
        let ring = Side::on_gpu(&arch, Head::LanguageModel, rings(world, 1));
        let before = gpu().usage().in_use;
        let mut saved = Saved::new(false);
        let keys = || row.keys();
        alone.transformer.forward(&alone.weights, &row.tokens, &row.positions, keys(), Some(&mut saved));
        let whole = gpu().usage().in_use - before;
        drop(saved);
        let most = whole / world.size * 3 / 2;
        assert!(most < whole);
        let gradients = ring.weights.table.len() * size_of::<f32>();
        gpu().set_limit((before + gradients + most) as u64);
        let passed = ring.pass(&row, false);
        println!("{} ranks: {} of {whole} bytes at most", world.size, gpu().usage().peak - before - gradients);
        gpu().set_limit(0);
        assert!(passed.hidden.iter().all(|x| x.is_finite()));
    });
}
