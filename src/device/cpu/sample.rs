//! Sampling on the CPU: rows in parallel, one pass of exponentials per row, an inverse-CDF walk by tiles.
//!
//! Legend: x logit, e = exp((x - max) / temperature), so the likeliest token has e = 1. Every sum has one order with
//! all instruction sets: 16 lanes within a tile, tiles and then tokens ascending in f64.

use super::exp::exp;
use super::lanes;
use super::pool::pool;
use super::softmax::{RowStats, row_stats};
use crate::device::simd::{Level, level, leveled};
use crate::experience::SamplingMask;
use std::cell::RefCell;

const LANES: usize = 16;
/// The number of tokens whose e are summed in lanes. The walk adds tile by tile, then token by token within one tile.
const TILE: usize = 256;
/// The number of tokens that their maximum represents in the search for the k-th largest logit.
const BLOCK: usize = 64;
/// The number of logits below which dividing rows over threads costs more than it saves.
const SHARED_LOGITS_MIN: usize = 8192;

/// Order of the filters: bias, repetition penalty, temperature, top-k, top-p, min-p.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0: off.
    pub top_k: usize,
    /// 1: off.
    pub top_p: f32,
    /// 0: off.
    pub min_p: f32,
    /// 1: off.
    pub repetition_penalty: f32,
}

impl SampleParams {
    /// Plain sampling at `temperature`, no filter.
    pub fn plain(temperature: f32) -> Self {
        Self { temperature, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }

    pub fn greedy() -> Self {
        Self::plain(0.0)
    }

    /// Whether the sampled distribution may differ from the plain temperature softmax.
    pub fn filters(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0 || self.repetition_penalty != 1.0
    }
}

/// The inputs of one row besides its logits.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    pub params: SampleParams,
    /// Uniform in [0, 1), from `rng::Rng::sample_uniform`.
    pub uniform: f32,
    /// Tokens so far, prompt included; only read if the repetition penalty is on.
    pub seen: &'a [u32],
    /// Tokens that must not be sampled (end tokens before the minimum response length, the ends of bad words).
    pub banned: &'a [u32],
    /// Added to the logits of tokens, each once, ascending.
    pub bias: &'a [(u32, f32)],
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sampled {
    pub token: u32,
    /// Log-probability in the plain temperature softmax (temperature 0: in the softmax at temperature 1), over the
    /// tokens of the sampling mask if that is kept. NaN if the row's logits are not finite.
    pub logprob: f32,
    /// Log-probability in the filtered distribution from which the token was sampled (greedy: 0). With a sampling mask
    /// and no bias or penalty it is `logprob` except for rounding.
    pub sample_logprob: f32,
}

/// Buffers that a thread keeps from row to row.
#[derive(Default)]
struct Scratch {
    /// The row after bias, penalty and ban, if there is one.
    edited: Vec<f32>,
    /// Log-probabilities of the row, for `top`.
    logprobs: Vec<f32>,
    /// The row within its sampling mask.
    masked: Vec<f32>,
    e: Vec<f32>,
    tiles: Vec<f32>,
    maxima: Vec<f32>,
    values: Vec<f32>,
    candidates: Vec<(f32, u32)>,
    parts: Vec<RowStats>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Samples one token per row: `rows.len()` rows of logits, one after the other. See `ops::sample::forward_parts`.
pub fn forward(logits: &[f32], ends: &[usize], rows: &[SampleRow], out: &mut [Sampled]) {
    draw_rows(logits, rows, 1, out, &|level, logits, row, scratch, out| {
        out[0] = sample_row(level, logits, ends, row, None, scratch);
    });
}

/// The same with the sampling mask of each row. See `ops::sample::forward_masked`.
pub fn forward_masked(logits: &[f32], ends: &[usize], rows: &[SampleRow], out: &mut [(Sampled, SamplingMask)]) {
    draw_rows(logits, rows, 1, out, &|level, logits, row, scratch, out| {
        let (out, mask) = &mut out[0];
        *out = sample_row(level, logits, ends, row, Some(mask), scratch);
    });
}

/// The `n` best tokens of each row, one row after the other. See `ops::sample::top_parts`.
pub fn top(logits: &[f32], ends: &[usize], rows: &[SampleRow], n: usize, out: &mut [Sampled]) {
    draw_rows(logits, rows, n, out, &|level, logits, row, scratch, out| {
        top_of_row(level, logits, ends, row, scratch, out);
    });
}

type DrawRow<'a, T> = dyn Fn(Level, &[f32], &SampleRow, &mut Scratch, &mut [T]) + Sync + 'a;

/// Computes `each` results per row.
fn draw_rows<T: Send>(logits: &[f32], rows: &[SampleRow], each: usize, out: &mut [T], draw: &DrawRow<T>) {
    let v = logits.len() / rows.len().max(1);
    let small = logits.len() < SHARED_LOGITS_MIN || rows.len() < 2;
    let level = level();
    pool().parts(out, each, small, &|range, out| {
        SCRATCH.with_borrow_mut(|scratch| {
            for (i, out) in (range.start / each..).zip(out.chunks_exact_mut(each)) {
                draw(level, &logits[i * v..(i + 1) * v], &rows[i], scratch, out);
            }
        });
    });
}

fn sample_row(
    level: Level,
    logits: &[f32],
    ends: &[usize],
    row: &SampleRow,
    mask: Option<&mut SamplingMask>,
    scratch: &mut Scratch,
) -> Sampled {
    let params = &row.params;
    let greedy = params.temperature == 0.0;
    let temperature = if greedy { 1.0 } else { params.temperature };
    let Scratch { edited, masked, e, tiles, maxima, values, candidates, parts, .. } = scratch;

    let penalised = params.repetition_penalty != 1.0;
    let is_edited = penalised || !row.banned.is_empty() || !row.bias.is_empty();
    let x: &[f32] = if is_edited {
        edit(logits, row, edited);
        edited
    } else {
        logits
    };
    let max = maximum(level, x);
    let (token, drawn) = if greedy {
        (x.iter().position(|&x| x == max).unwrap_or(0), None)
    } else {
        let x_min = if params.top_k > 0 && params.top_k < x.len() {
            kth_largest(level, x, params.top_k, maxima, values)
        } else {
            f32::NEG_INFINITY
        };
        e.resize(x.len(), 0.0);
        tiles.resize(x.len().div_ceil(TILE), 0.0);
        exponentials(level, x, max, 1.0 / temperature, x_min, e, tiles);
        if params.top_p < 1.0 || params.min_p > 0.0 {
            let mut cut = Cut { e: params.min_p, last: u32::MAX };
            if params.top_p < 1.0 {
                cut = cut.tighter(nucleus(level, e, tiles, params.top_p, candidates));
            }
            cut.apply(level, e, tiles);
        }
        let (token, total) = draw(e, tiles, row.uniform);
        (token, Some(f64::from(e[token]) / total))
    };
    let of = match mask {
        Some(mask) if !greedy => {
            *mask = kept(e);
            masked.clear();
            masked.extend_from_slice(logits);
            mask.apply(0, masked);
            masked
        }
        _ => logits,
    };
    let logprob = stats(level, of, ends, 1.0 / temperature, parts).logprob(of[token]);
    let sample_logprob = match drawn {
        None => 0.0,
        Some(probability) if params.filters() || is_edited => probability.ln() as f32,
        Some(_) => logprob,
    };
    Sampled { token: token as u32, logprob, sample_logprob }
}

/// The tokens that may be sampled: the ones with a probability left.
fn kept(e: &[f32]) -> SamplingMask {
    if e.iter().all(|&e| e > 0.0) {
        return SamplingMask::default();
    }
    SamplingMask::new(e.iter().zip(0..).filter(|&(&e, _)| e > 0.0).map(|(_, id)| id))
}

fn top_of_row(
    level: Level,
    logits: &[f32],
    ends: &[usize],
    row: &SampleRow,
    scratch: &mut Scratch,
    out: &mut [Sampled],
) {
    let Scratch { edited, logprobs, maxima, values, candidates, parts, .. } = scratch;
    let temperature = if row.params.temperature == 0.0 { 1.0 } else { row.params.temperature };
    let stats = stats(level, logits, ends, 1.0 / temperature, parts);
    logprobs.clear();
    logprobs.extend(logits.iter().map(|&x| stats.logprob(x)));
    edit(logprobs, row, edited);
    let bound = if out.len() < edited.len() {
        kth_largest(level, edited, out.len(), maxima, values)
    } else {
        f32::NEG_INFINITY
    };
    candidates.clear();
    candidates.extend(edited.iter().zip(0..).filter(|&(&x, _)| x >= bound).map(|(&x, token)| (x, token)));
    candidates.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    // In a row that is not finite, no token reaches the bound.
    let none = Sampled { token: 0, logprob: f32::NAN, sample_logprob: f32::NAN };
    let found = candidates.iter().map(|&(sample_logprob, token)| {
        let logprob = logprobs[token as usize];
        Sampled { token, logprob, sample_logprob }
    });
    for (out, found) in out.iter_mut().zip(found.chain(std::iter::repeat(none))) {
        *out = found;
    }
}

/// The statistics of a row whose parts end at `ends`.
fn stats(level: Level, row: &[f32], ends: &[usize], inverse_temperature: f32, parts: &mut Vec<RowStats>) -> RowStats {
    parts.clear();
    let starts = std::iter::once(0).chain(ends.iter().copied());
    parts.extend(starts.zip(ends).map(|(start, &end)| row_stats(level, &row[start..end], inverse_temperature)));
    RowStats::combined(parts)
}

/// The row with the biases, the repetition penalty on tokens that occurred, and minus infinity on banned ones.
fn edit(logits: &[f32], row: &SampleRow, edited: &mut Vec<f32>) {
    edited.clear();
    edited.extend_from_slice(logits);
    for &(token, bias) in row.bias {
        edited[token as usize] += bias;
    }
    let penalty = row.params.repetition_penalty;
    if penalty != 1.0 {
        for &token in row.seen {
            // From the logit without penalty: a token that occurred twice is penalised once.
            let bias = row.bias.binary_search_by_key(&token, |(of, _)| *of).map_or(0.0, |i| row.bias[i].1);
            let x = logits[token as usize] + bias;
            edited[token as usize] = if x < 0.0 { x * penalty } else { x / penalty };
        }
    }
    for &token in row.banned {
        edited[token as usize] = f32::NEG_INFINITY;
    }
}

/// The k-th largest value of x (0 < k < len), by block maxima: at least k values reach the k-th largest maximum, and
/// only blocks whose maximum reaches it contain any of them.
fn kth_largest(level: Level, x: &[f32], k: usize, maxima: &mut Vec<f32>, values: &mut Vec<f32>) -> f32 {
    let descending = |a: &f32, b: &f32| b.total_cmp(a);
    maxima.clear();
    maxima.extend(x.chunks(BLOCK).map(|block| maximum(level, block)));
    values.clear();
    if maxima.len() > k {
        values.extend_from_slice(maxima);
        let bound = *values.select_nth_unstable_by(k - 1, descending).1;
        values.clear();
        for (block, _) in x.chunks(BLOCK).zip(maxima.iter()).filter(|&(_, &m)| m >= bound) {
            values.extend(block.iter().filter(|&&x| x >= bound));
        }
    } else {
        values.extend_from_slice(x);
    }
    *values.select_nth_unstable_by(k - 1, descending).1
}

/// Border of a kept set in the order (e descending, token ascending): tokens with a larger e are kept, and those with
/// an equal e up to token `last`.
#[derive(Clone, Copy)]
struct Cut {
    e: f32,
    last: u32,
}

impl Cut {
    fn tighter(self, other: Self) -> Self {
        if self.e > other.e || (self.e == other.e && self.last < other.last) { self } else { other }
    }

    /// Sets e of the tokens outside to zero and sums the tiles again.
    fn apply(self, level: Level, e: &mut [f32], tiles: &mut [f32]) {
        if let Some(behind) = e.get_mut((self.last as usize).saturating_add(1)..) {
            drop_equal(level, behind, self.e);
        }
        cut_below(level, e, self.e, tiles);
    }
}

/// The border of the smallest set, likeliest first, whose mass reaches `top_p` of the whole. The mass above a few
/// levels at a time brackets the border. Then it is found among the tokens within the bracket.
fn nucleus(level: Level, e: &[f32], tiles: &[f32], top_p: f32, candidates: &mut Vec<(f32, u32)>) -> Cut {
    /// Maximum passes over the row; only rows of equal values need this many, and end with many candidates.
    const PASSES: usize = 10;
    const CANDIDATES_ENOUGH: f64 = 256.0;
    let total: f64 = tiles.iter().map(|&t| f64::from(t)).sum();
    let target = f64::from(top_p) * total;
    // Tokens with e above `high` have the mass `before`, short of the target; those above `low` reach it.
    let (mut low, mut high, mut before, mut reached) = (0.0f32, 1.0f32, 0.0, total);
    let mut levels = [0.1, 0.01, 1e-3, 1e-5];
    for _ in 0..PASSES {
        for (border, mass) in levels.into_iter().zip(mass_above(level, e, levels)) {
            if mass >= target {
                (low, reached) = (border, mass);
                break;
            }
            (high, before) = (border, mass);
        }
        if reached - before <= CANDIDATES_ENOUGH * f64::from(low) {
            break;
        }
        levels = [0.8, 0.6, 0.4, 0.2].map(|part: f32| (high - low).mul_add(part, low));
    }
    candidates.clear();
    collect_within(level, e, low, high, candidates);
    last_kept(candidates, before, target)
}

/// The token with which `before`, and the candidates in their order, reach `target`.
fn last_kept(candidates: &mut [(f32, u32)], mut before: f64, target: f64) -> Cut {
    let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
    let (mut low, mut high) = (0, candidates.len());
    while high - low > 32 {
        let half = (high - low) / 2;
        let part = &mut candidates[low..high];
        part.select_nth_unstable_by(half, order);
        let mass: f64 = part[..=half].iter().map(|&(e, _)| f64::from(e)).sum();
        if before + mass >= target {
            high = low + half + 1;
        } else {
            before += mass;
            low += half + 1;
        }
    }
    let part = &mut candidates[low..high];
    part.sort_unstable_by(order);
    for &(e, token) in part.iter() {
        before += f64::from(e);
        if before >= target {
            return Cut { e, last: token };
        }
    }
    part.last().map_or(Cut { e: 0.0, last: u32::MAX }, |&(e, token)| Cut { e, last: token })
}

/// The first token whose cumulative sum exceeds `uniform` times the whole, and the whole.
fn draw(e: &[f32], tiles: &[f32], uniform: f32) -> (usize, f64) {
    let total: f64 = tiles.iter().map(|&t| f64::from(t)).sum();
    let target = f64::from(uniform) * total;
    let (mut tile, mut sum) = (0, 0.0f64);
    for (t, &mass) in tiles.iter().enumerate() {
        if mass > 0.0 {
            tile = t;
            if sum + f64::from(mass) > target {
                break;
            }
        }
        sum += f64::from(mass);
    }
    let start = tile * TILE;
    let mut last = start;
    for (i, &e) in e[start..(start + TILE).min(e.len())].iter().enumerate() {
        if e > 0.0 {
            last = start + i;
            sum += f64::from(e);
            if sum > target {
                break;
            }
        }
    }
    // A tile's sum in lanes may exceed its sum token by token by rounding. Then its last token is sampled.
    (last, total)
}

leveled! {
    fn maximum(x: &[f32]) -> f32 {
        lanes::max::<LANES>(x)
    }
}

leveled! {
    /// e = exp((x - max) / temperature) if x reaches `x_min`, else 0; and the sums of the tiles.
    fn exponentials(x: &[f32], max: f32, inverse_temperature: f32, x_min: f32, e: &mut [f32], tiles: &mut [f32]) {
        for ((x, e), tile) in x.chunks(TILE).zip(e.chunks_mut(TILE)).zip(tiles) {
            for (e, &x) in e.iter_mut().zip(x) {
                let value = exp((x - max) * inverse_temperature);
                *e = if x >= x_min { value } else { 0.0 };
            }
            *tile = lanes::sum::<f32, LANES>(e, |sum, e| sum + e);
        }
    }
}

leveled! {
    /// Zeroes every e below the border and sums the tiles.
    fn cut_below(e: &mut [f32], border: f32, tiles: &mut [f32]) {
        for (e, tile) in e.chunks_mut(TILE).zip(tiles) {
            for e in e.iter_mut() {
                *e = if *e >= border { *e } else { 0.0 };
            }
            *tile = lanes::sum::<f32, LANES>(e, |sum, e| sum + e);
        }
    }
}

leveled! {
    /// The sum of the e above each level.
    fn mass_above(e: &[f32], levels: [f32; 4]) -> [f64; 4] {
        let mut masses = [0.0f64; 4];
        for tile in e.chunks(TILE) {
            for (mass, level) in masses.iter_mut().zip(levels) {
                *mass += f64::from(lanes::sum::<f32, LANES>(tile, |sum, e| sum + if e > level { e } else { 0.0 }));
            }
        }
        masses
    }
}

leveled! {
    /// The e in (low, high] with their tokens.
    fn collect_within(e: &[f32], low: f32, high: f32, found: &mut Vec<(f32, u32)>) {
        for (b, block) in e.chunks(BLOCK).enumerate() {
            // Few blocks contain any. The test for one has no branch, so it is vectorized.
            if block.iter().fold(0, |any, &e| any | (u8::from(e > low) & u8::from(e <= high))) != 0 {
                let within = |(i, &e): (usize, &f32)| (e > low && e <= high).then_some((e, (b * BLOCK + i) as u32));
                found.extend(block.iter().enumerate().filter_map(within));
            }
        }
    }
}

leveled! {
    fn drop_equal(e: &mut [f32], border: f32) {
        for e in e {
            *e = if *e == border { 0.0 } else { *e };
        }
    }
}
