//! ZeRO and the fixed order with weights, gradients and state on GPUs, on one rank and on several.

use crate::model::{VOCABULARY, llama, qwen3};
use crate::ranks::together;
use crate::{device, numbers, on_a_real_gpu};
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::config::job::GradientConfig;
use rlhf_hpc::config::optim::{GradientOrder, OptimConfig};
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cuda::{Memory, gpu};
use rlhf_hpc::learn::Role;
use rlhf_hpc::learn::learner::{Learner, VECTORS};
use rlhf_hpc::learn::packed::PackedRow;
use rlhf_hpc::learn::tree_sum::{TreeSum, leaves};
use rlhf_hpc::loss::token::cross_entropy;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Head, Saved, Shards};
use rlhf_hpc::tensor::{DType, Flat};
use std::ops::Range;

/// Rows of a minibatch: so many ranks have one each.
const ROWS: usize = 4;

fn data_axes(world: &World) -> Axes {
    world.axes(&Mesh::data_only(world.size)).expect("a mesh of these ranks")
}

/// What a learner is made of.
struct Setting {
    arch: Arch,
    order: GradientOrder,
    chunks: usize,
    recompute: bool,
}

impl Setting {
    fn of(arch: Arch) -> Self {
        Self { arch, order: GradientOrder::Fast, chunks: 4, recompute: false }
    }

    fn learner(&self, axes: &Axes, stage: usize) -> Learner {
        let role = Role::init_on(Device::Cuda, "actor", &self.arch, Head::LanguageModel, DType::Bf16, 5, axes, stage);
        let optim = OptimConfig { weight_decay: 0.1, clip_norm: 0.5, ..OptimConfig::with_lr(5e-3) };
        let gradient = GradientConfig { order: self.order, chunks: self.chunks, ..GradientConfig::default() };
        Learner::new(role, &optim, &gradient, 10, axes, stage).expect("a learner")
    }
}

fn tokens(update: u64, row: usize) -> Vec<u32> {
    (0..4 + row * 5 % 7).map(|i| ((i * i * 31 + row * 17 + update as usize * 101 + i) % VOCABULARY) as u32).collect()
}

/// Adds the gradient of some rows to the learner's sums.
fn microbatch(learner: &mut Learner, rows: &[usize], recompute: bool) {
    let update = learner.zero.updates;
    let mut packed = PackedRow::new();
    for row in rows {
        packed.push(&tokens(update, *row), 1);
    }
    let weight = 1.0 / (0..ROWS).map(|row| tokens(update, row).len() - 1).sum::<usize>() as f32;
    let Learner { role, sum, .. } = learner;
    let (model, w) = (&role.transformer, &role.weights);
    let mut saved = Saved::new(recompute);
    let hidden = model.forward(w, &packed.tokens, &packed.positions, packed.keys(), Some(&mut saved));
    let weights = vec![weight; packed.rows.len()];
    let mut loss = |r: Range<usize>, l: &[f32], _: &[f32], dlogprobs: &mut [f32], dentropy: &mut [f32]| {
        cross_entropy(l, &weights[r], dlogprobs);
        dentropy.fill(0.0);
    };
    let (dhidden, ..) =
        model.logprobs_backward(w, &hidden, &packed.rows, &packed.targets, 1.0, &mut loss, &mut sum.grads);
    model.backward(w, saved, &packed.cu_seqlens, dhidden, &mut sum.grads);
}

/// One update by the rows of all ranks; gives the norm of its gradient.
fn update(learner: &mut Learner, axes: &Axes, setting: &Setting) -> f64 {
    let (chunks, own) = (learner.sum.chunks(&axes.data), learner.sum.own_chunks(&axes.data));
    for (i, (leaf, chunk)) in own.iter().enumerate() {
        let rows: Vec<usize> = (0..ROWS).filter(|row| row % chunks == *chunk).collect();
        let parts: Vec<&[usize]> = rows.chunks(rows.len().div_ceil(2).max(1)).collect();
        learner.sum.begin_chunk();
        for (j, part) in parts.iter().enumerate() {
            learner.sum.begin_microbatch(i + 1 == own.len() && j + 1 == parts.len());
            microbatch(learner, part, setting.recompute);
        }
        learner.sum.end_chunk(*leaf);
    }
    learner.step(axes).expect("finite");
    learner.report.grad_norm
}

/// The bits of everything that training came to, put together from all ranks of a mesh of data ranks.
fn outcome(learner: &Learner, axes: &Axes) -> Vec<u32> {
    let mut all = Vec::new();
    for what in VECTORS {
        let mut whole = vec![f32::NAN; learner.role.weights.table.len()];
        let mine: Vec<f64> = learner.slices(what).iter().flat_map(|(at, values)| places(*at, values)).collect();
        for pair in axes.zero.all_gather_f64(&mine).iter().flat_map(|all| all.chunks_exact(2)) {
            whole[pair[0] as usize] = pair[1] as f32;
        }
        assert!(whole.iter().all(|x| x.is_finite()), "{what} is not whole");
        all.extend(whole.into_iter().map(f32::to_bits));
    }
    all
}

/// Pairs of place and value.
fn places(start: usize, values: &[f32]) -> Vec<f64> {
    values.iter().enumerate().flat_map(|(i, x)| [(start + i) as f64, f64::from(*x)]).collect()
}

/// Two updates: norms and outcome.
fn trained(setting: &Setting, axes: &Axes, stage: usize) -> (Vec<u64>, Vec<u32>) {
    let mut learner = setting.learner(axes, stage);
    let norms = (0..2).map(|_| update(&mut learner, axes, setting).to_bits()).collect();
    let sharded = stage == 3 && axes.zero.size() > 1;
    // The unit at work and the next one; a tied head's, too.
    let most = if setting.arch.tied { 3 } else { 2 };
    assert_eq!(learner.role.weights.gathered_max(), if sharded { most } else { 0 }, "stage {stage}: gathered units");
    (norms, outcome(&learner, axes))
}

#[test]
fn stages_that_sum_alike_train_alike_to_the_bit() {
    together("zero3::stages_that_sum_alike_train_alike_to_the_bit", &[2, 4], |world| {
        let axes = data_axes(world);
        for setting in [Setting::of(llama()), Setting { recompute: true, ..Setting::of(qwen3()) }] {
            let stages = [0, 1, 2, 3].map(|stage| trained(&setting, &axes, stage));
            assert!(stages[0] == stages[1], "stages 0 and 1");
            assert!(stages[2] == stages[3], "stages 2 and 3: {:?} and {:?}", stages[2].0, stages[3].0);
        }
    });
}

#[test]
fn in_fixed_order_any_number_of_ranks_trains_what_one_trains_to_the_bit() {
    together("zero3::in_fixed_order_any_number_of_ranks_trains_what_one_trains_to_the_bit", &[2, 4], |world| {
        let axes = data_axes(world);
        // A tied head's unit gets its last from the embedding's backward; of four ranks two have no chunk.
        let (arch, chunks) = if world.size == 2 { (qwen3(), 4) } else { (llama(), 2) };
        let setting = Setting { order: GradientOrder::Fixed, chunks, ..Setting::of(arch) };
        let alone = trained(&setting, &Axes::one(), 0);
        for stage in [0, 1] {
            assert!(trained(&setting, &axes, stage) == alone, "stage {stage} on {} ranks", world.size);
        }
    });
}

#[test]
fn the_tree_of_chunks_has_the_bits_of_the_cpu_s() {
    let (_gpu, _one) = device();
    // A length that no kernel's block divides; values that cancel, and -0 here and there.
    let len = 4099;
    let gradient = |chunk: usize| -> Vec<f32> {
        let values = numbers(chunk as u32 + 1, len).into_iter().enumerate();
        values.map(|(i, x)| if i % 7 == 0 { -0.0 } else { x * 10f32.powi((chunk % 5) as i32) }).collect()
    };
    for chunks in [0, 1, 5, 8] {
        let sum = |device: Device, rank: usize| -> Vec<u32> {
            let mut tree = TreeSum::on(device, len);
            for (leaf, chunk) in leaves(chunks, rank, 2) {
                let mut buffer = tree.buffer();
                buffer.write(0..len, &gradient(chunk));
                tree.add(leaf, buffer);
            }
            let sum: Flat = tree.finish();
            assert_eq!(sum.device(), device);
            sum.slice(0..len).to_host().into_iter().map(f32::to_bits).collect()
        };
        for rank in [0, 1] {
            let on_gpu = sum(Device::Cuda, rank);
            assert!(on_gpu == sum(Device::Cpu, rank), "{chunks} chunks, rank {rank}");
            assert!(!on_gpu.contains(&(-0.0f32).to_bits()), "an element is -0");
        }
    }
}

/// Runs `work` and gives the most bytes of the GPU that it had in use beside those before.
pub fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    // The peak only rises: with so much in use that the next buffer raises it, it shows this work alone.
    let usage = gpu().usage();
    let _ballast = Memory::scratch(usage.peak - usage.in_use);
    let before = gpu().usage();
    assert!(before.peak == before.in_use, "the ballast reaches the peak");
    let done = work();
    (done, gpu().usage().peak - before.in_use)
}

/// Many units, so that the few that are gathered or summed at a time are little.
fn deep() -> Arch {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
        "vocab_size": VOCABULARY, "max_position_embeddings": 128, "tie_word_embeddings": false,
    });
    Arch::from_config(config.as_object().expect("an object")).expect("a model")
}

#[test]
fn the_memory_of_the_gpu_falls_by_what_each_stage_divides() {
    if on_a_real_gpu() {
        eprintln!("skipped: a real GPU's memory is counted in classes of sizes");
        return;
    }
    together("zero3::the_memory_of_the_gpu_falls_by_what_each_stage_divides", &[2, 4], |world| {
        let (axes, setting) = (data_axes(world), Setting { recompute: true, ..Setting::of(deep()) });
        let mut peaks = Vec::new();
        for stage in 0..4 {
            let (learner, bytes) = peak(|| {
                let mut learner = setting.learner(&axes, stage);
                update(&mut learner, &axes, &setting);
                learner
            });
            let table = &learner.role.weights.table;
            let (len, own) = (table.len(), Shards::new(table, &axes, 1).partition.own_len());
            let unit = table.units().iter().map(Range::len).max().expect("a unit");
            peaks.push(bytes);
            if world.rank == 0 {
                println!("stage {stage} on {} ranks: {bytes} bytes, {len} elements, {own} of them own", world.size);
            }
            // What stays: master and moments, gradients, weights.
            let kept = |from: usize, each: usize| each * if stage >= from { own } else { len };
            let stays = kept(1, 12) + kept(2, 4) + kept(3, 2);
            // Sums on their way to ranks, gathered units, and what a backward works on.
            let passing = if stage >= 2 { 2 * 4 * unit } else { 0 } + if stage == 3 { 2 * 2 * unit } else { 0 };
            let working = peaks[0] - 18 * len;
            assert!(bytes >= stays && bytes <= stays + passing + working, "stage {stage}: {bytes} of {stays}");
            assert!(working < 3 * len, "activations hide nothing: {working} beside {len} elements");
        }
        assert!(peaks.is_sorted_by(|a, b| a > b), "{peaks:?}");
    });
}
