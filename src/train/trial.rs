//! A small model of a job's own kind, on which the kernels of a GPU are compared with the CPU: the same weights, the same
//! code, other devices.
//!
//! Of the job's model it has the head dim, the heads that share a key/value head, norms, biases, windows, rotary scaling and
//! whether the head is tied; it is two layers deep, and its widths end where a CPU would need more than a moment.

use crate::comm::Axes;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::learn::packed::PackedRow;
use crate::model::cut::cut;
use crate::model::{Arch, Gradients, Head, Init, ParamSpec, ParamTable, Saved, TensorPart, Transformer, Weights};
use crate::tensor::{DType, PANEL};
use std::ops::Range;
use std::sync::Arc;

const WIDTH_MAX: usize = 2048;
const MLP_WIDTH_MAX: usize = 256;
const VOCABULARY_MAX: usize = 512;
/// Two key/value heads up to as many weights of their queries, else one.
const QUERY_WEIGHTS_MAX: usize = 2 << 20;
/// Shorter than the longest sequence, so that it hides keys.
const WINDOW_MAX: usize = 24;
const CONTEXT: usize = 256;
/// Of a model that ranks share: what it costs is all theirs, and its widths were tried without them.
const SHARED_WIDTH_MAX: usize = 512;
/// Sequences of a packed row: one within a tile of attention, one past a page, and one past a tile. Their log-probabilities
/// fill a tile of the head that stores no logits.
const ENDS: [usize; 4] = [0, 9, 48, 144];
/// At these temperatures and slopes all that a backward goes through is far from 0.
pub const TEMPERATURE: f32 = 0.8;
const SLOPE_OF_ENTROPY: f32 = 0.01;

/// The small model that stands for `arch`.
pub fn small(arch: &Arch) -> Arch {
    let (sharing, width) = (arch.heads / arch.kv_heads, arch.width.min(WIDTH_MAX));
    let two_fit = 2 * sharing * arch.head_dim * width <= QUERY_WEIGHTS_MAX;
    let kv_heads = arch.kv_heads.min(if two_fit { 2 } else { 1 });
    // One layer with each kind of window that there is.
    let first = arch.windows.first().copied().flatten();
    let other = arch.windows.iter().copied().find(|window| *window != first).unwrap_or(first);
    let vocabulary = match arch.vocabulary {
        all if all <= VOCABULARY_MAX => all,
        // Odd ones have other ends of rows.
        all => VOCABULARY_MAX + all % 8,
    };
    Arch {
        width,
        layers: 2,
        heads: sharing * kv_heads,
        kv_heads,
        mlp_width: arch.mlp_width.min(MLP_WIDTH_MAX),
        vocabulary,
        context: CONTEXT,
        windows: [first, other].map(|window| window.map(|keys| keys.min(WINDOW_MAX))).to_vec(),
        // Logits and scores spread by about one, whatever the width.
        init_std: 0.8 / (width as f32).sqrt(),
        eos_tokens: Vec::new(),
        source: serde_json::Map::new(),
        ..arch.clone()
    }
}

/// The small model that stands for `arch` where ranks share each matrix, in turn as many as `sizes` say: each of them has heads
/// and a share of the MLP.
pub fn shared(arch: &Arch, sizes: [usize; 2]) -> Arch {
    let (small, sharing) = (small(arch), arch.heads / arch.kv_heads);
    let suits = |kv_heads: &usize| sizes.iter().all(|size| (sharing * kv_heads).is_multiple_of(*size));
    let kv_heads = (small.kv_heads..arch.kv_heads).find(suits).unwrap_or(arch.kv_heads);
    // Whole panels for each rank, and the same number.
    let shares = (1..=sizes[1]).map(|i| i * sizes[0]).find(|shares| shares.is_multiple_of(sizes[1]));
    let mlp_width = 2 * PANEL * shares.unwrap_or(1);
    Arch {
        width: small.width.min(SHARED_WIDTH_MAX),
        heads: sharing * kv_heads,
        kv_heads,
        mlp_width: mlp_width.max(small.mlp_width).min(arch.mlp_width),
        init_std: 0.8 / (small.width.min(SHARED_WIDTH_MAX) as f32).sqrt(),
        ..small
    }
}

/// The small model on one device, or a rank's part of it.
pub struct Twin {
    pub model: Transformer,
    pub weights: Weights,
}

impl Twin {
    /// In bf16 on a GPU, and the same values in f32 on the CPU.
    pub fn on(device: Device, arch: &Arch, head: Head) -> Self {
        Self::over(device, arch, head, &Axes::one())
    }

    /// What a rank of `axes.tensor` holds of the same.
    pub fn over(device: Device, arch: &Arch, head: Head, axes: &Axes) -> Self {
        let [whole, part] = [TensorPart::whole(), TensorPart::of(&axes.tensor)];
        let [whole, table] = [whole, part].map(|part| Arc::new(ParamTable::on(device, arch, head, part)));
        let dtype = if device == Device::Cuda { DType::Bf16 } else { DType::F32 };
        let mut weights = Weights::zeros(table.clone(), dtype);
        for unit in table.units() {
            let mut values = vec![0.0; unit.len()];
            for (i, spec) in table.specs().iter().enumerate().filter(|(_, spec)| unit.contains(&spec.offset)) {
                let (from, at) = (&whole.specs()[i], spec.offset - unit.start);
                cut(from, &drawn(from, i), spec, &mut values[at..at + spec.len]);
            }
            weights.store_master(unit.clone(), &values);
        }
        Self { model: Transformer::over(arch, &table, axes), weights }
    }
}

/// A model and what it is made of.
pub type Pair<'a> = (&'a Transformer, &'a Weights);

impl Twin {
    pub fn pair(&self) -> Pair<'_> {
        (&self.model, &self.weights)
    }
}

/// Numbers in -1..1 that look random, the same for the same seed.
pub fn numbers(seed: usize) -> impl Iterator<Item = f32> {
    let mut state = (seed as u32).wrapping_mul(2_654_435_761).wrapping_add(12345);
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// Values of a whole parameter, as it lies, which bf16 holds: matrices spread as new ones do, and no bias or norm that changes
/// nothing.
fn drawn(spec: &ParamSpec, seed: usize) -> Vec<f32> {
    let (rows, columns) = spec.dims();
    let (middle, spread) = match spec.init {
        Init::Zeros => (0.0, 0.2),
        Init::Ones => (1.0, 0.25),
        Init::Normal { std } => (0.0, std * 3.0_f32.sqrt()),
    };
    let (mut values, mut numbers) = (vec![0.0; spec.len], numbers(seed));
    for row in 0..rows {
        for column in 0..columns {
            let value = middle + spread * numbers.next().unwrap_or_default();
            values[spec.layout.index(columns, row, column)] = half::bf16::from_f32(value).to_f32();
        }
    }
    values
}

/// What one forward and backward of a packed row computes.
pub struct Passed {
    pub hidden: Vec<f32>,
    /// Log-probabilities, or values of a value head.
    pub scored: Vec<f32>,
    pub entropies: Vec<f32>,
    /// By name, row by row.
    pub gradients: Vec<(String, Vec<f32>)>,
}

/// ||a - b|| / ||b||, or by `least` where that is more.
pub fn apart(a: &[f32], b: &[f32], least: f64) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let gap: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    gap.sqrt() / norm(b).max(least).max(1e-30)
}

pub fn norm(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt()
}

/// Refuses a quantity that is `gap` away where at most `most` is rounding; one that is no number is too far.
///
/// # Errors
/// `Fault`, naming it with both figures.
pub fn within(what: impl FnOnce() -> String, gap: f64, most: f64, of: &str) -> Result<()> {
    if gap <= most {
        return Ok(());
    }
    let [gap, most] = [gap, most].map(|x| if x == 0.0 || x >= 1e-3 { format!("{x:.3}") } else { format!("{x:.0e}") });
    Err(Error::fault(format!("{} is {gap} {of} away, and rounding explains {most}", what())))
}

/// Where the sequences of the row end, 0 first.
pub fn ends() -> &'static [usize] {
    &ENDS
}

/// The sequences that are learned.
pub fn sequences(vocabulary: usize) -> impl Iterator<Item = Vec<u32>> {
    ENDS.windows(2).map(move |ends| tokens(ends[0], ends[1] - ends[0], vocabulary))
}

/// The packed row of them.
pub fn row(vocabulary: usize) -> PackedRow {
    let mut packed = PackedRow::new();
    sequences(vocabulary).for_each(|tokens| packed.push(&tokens, 1));
    packed
}

/// `len` tokens that look random.
pub fn tokens(seed: usize, len: usize, vocabulary: usize) -> Vec<u32> {
    let draw = |x: f32| (f64::midpoint(f64::from(x), 1.0) * vocabulary as f64) as u32;
    numbers(seed + 100).take(len).map(|x| draw(x).min(vocabulary as u32 - 1)).collect()
}

/// Computes it, and adds the gradients to `grads`.
pub fn pass(model: &Transformer, w: &Weights, recompute: bool, grads: &mut Gradients) -> Passed {
    pass_scaled(model, w, recompute, 1.0, grads)
}

/// The same with all slopes times `scale`. All gradients are as many times larger: to the bit, where it is a power of two.
pub fn pass_scaled(model: &Transformer, w: &Weights, recompute: bool, scale: f32, grads: &mut Gradients) -> Passed {
    let row = row(model.arch.vocabulary);
    let slopes: Vec<f32> = numbers(7).take(row.rows.len()).map(|slope| scale * slope).collect();
    let mut saved = Saved::new(recompute);
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
    let (dhidden, scored, entropies) = match w.table.head() {
        Head::LanguageModel => {
            let mut loss = |range: Range<usize>, _: &[f32], _: &[f32], dl: &mut [f32], dh: &mut [f32]| {
                dl.copy_from_slice(&slopes[range]);
                dh.fill(scale * SLOPE_OF_ENTROPY);
            };
            model.logprobs_backward(w, &hidden, &row.rows, &row.targets, TEMPERATURE, &mut loss, grads)
        }
        Head::Value => {
            let values = model.values(w, &hidden, &row.rows);
            (model.values_backward(w, &hidden, &row.rows, &slopes, grads), values, Vec::new())
        }
    };
    model.backward(w, saved, &row.cu_seqlens, dhidden, grads);
    Passed { hidden: hidden.to_host(), scored, entropies, gradients: Vec::new() }
}

/// The log-probabilities of the same row as a forward alone scores them.
pub fn score(model: &Transformer, w: &Weights) -> Vec<f32> {
    let row = row(model.arch.vocabulary);
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
    model.logprobs(w, &hidden, &row.rows, &row.targets, TEMPERATURE, false).0
}

/// The gradients of whole units, by name and row by row.
pub fn by_name(grads: &Gradients) -> Vec<(String, Vec<f32>)> {
    let flat = grads.to_vec();
    let of = |spec: &ParamSpec| {
        let ((rows, columns), values) = (spec.dims(), &flat[spec.range()]);
        let line = |row: usize| (0..columns).map(move |column| values[spec.layout.index(columns, row, column)]);
        (spec.name.clone(), (0..rows).flat_map(line).collect())
    };
    grads.table.specs().iter().map(of).collect()
}
