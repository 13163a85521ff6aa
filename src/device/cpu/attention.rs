//! Causal grouped-query attention by blocks of `PAGE` keys, with online softmax.

use std::ops::Range;

/// Tokens of one KV page, and keys of one block of the softmax.
pub const PAGE: usize = 32;

/// Heads, window and scale of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// A query sees at most this many keys, itself included; `None`: all before it.
    pub window: Option<usize>,
    /// Usually 1 / sqrt(head_dim).
    pub scale: f32,
}

/// One sequence of a paged batch: `tokens` new rows after `past` cached ones; `blocks[i]` is the page of tokens
/// i*PAGE .. (i+1)*PAGE, and covers past + tokens.
#[derive(Clone, Debug)]
pub struct PagedSequence<'a> {
    pub past: usize,
    pub tokens: usize,
    pub blocks: &'a [u32],
}

impl AttentionShape {
    /// The keys that the query at position `at` of its sequence sees.
    pub fn visible(&self, at: usize) -> Range<usize> {
        let first = self.window.map_or(0, |window| (at + 1).saturating_sub(window));
        first..at + 1
    }
}

/// The first (`m` below any score that softmax can tell from minus infinity) so that m - m is 0, not NaN.
const LOWEST: f32 = -3.0e38;

struct Keys<'a> {
    /// Key j, lane e.
    key: &'a dyn Fn(usize, usize) -> f32,
    value: &'a dyn Fn(usize, usize) -> f32,
}

/// One query against its visible keys: writes o, returns the log-sum-exp.
fn attend(q: &[f32], keys: &Keys, visible: Range<usize>, scale: f32, o: &mut [f32]) -> f32 {
    let (mut m, mut sums) = (LOWEST, [0.0f32; PAGE]);
    o.fill(0.0);
    for block in visible.start / PAGE..visible.end.div_ceil(PAGE) {
        let mut scores = [f32::NEG_INFINITY; PAGE];
        for (lane, score) in scores.iter_mut().enumerate() {
            let j = block * PAGE + lane;
            if visible.contains(&j) {
                *score = q.iter().enumerate().fold(0.0f32, |sum, (e, q)| q.mul_add((keys.key)(j, e), sum)) * scale;
            }
        }
        let m_new = scores.iter().fold(m, |m, &s| m.max(s));
        let alpha = (m - m_new).exp();
        m = m_new;
        for (sum, score) in sums.iter_mut().zip(&mut scores) {
            *score = (*score - m).exp();
            *sum = sum.mul_add(alpha, *score);
        }
        o.iter_mut().for_each(|o| *o *= alpha);
        for (lane, &p) in scores.iter().enumerate() {
            let j = block * PAGE + lane;
            if visible.contains(&j) {
                o.iter_mut().enumerate().for_each(|(e, o)| *o = p.mul_add((keys.value)(j, e), *o));
            }
        }
    }
    let mut half = PAGE / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    o.iter_mut().for_each(|o| *o = *o / sums[0] + 0.0);
    m + sums[0].ln()
}

pub fn forward_packed(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    cu_seqlens: &[usize],
    shape: &AttentionShape,
    o: &mut [f32],
    lse: &mut [f32],
) {
    let (h, g, e) = (shape.heads, shape.kv_heads, shape.head_dim);
    for seq in cu_seqlens.windows(2) {
        for t in seq[0]..seq[1] {
            for head in 0..h {
                let at = |j: usize, lane: usize| (seq[0] + j) * g * e + head / (h / g) * e + lane;
                let keys = Keys { key: &|j, lane| k[at(j, lane)], value: &|j, lane| v[at(j, lane)] };
                let row = (t * h + head) * e..(t * h + head + 1) * e;
                let visible = shape.visible(t - seq[0]);
                lse[t * h + head] = attend(&q[row.clone()], &keys, visible, shape.scale, &mut o[row]);
            }
        }
    }
}

pub fn backward_packed(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    o: &[f32],
    lse: &[f32],
    d_o: &[f32],
    cu_seqlens: &[usize],
    shape: &AttentionShape,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) {
    let (h, g, e) = (shape.heads, shape.kv_heads, shape.head_dim);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0.0f32, |sum, (a, b)| a.mul_add(*b, sum));
    dq.fill(0.0);
    dk.fill(0.0);
    dv.fill(0.0);
    for seq in cu_seqlens.windows(2) {
        for t in seq[0]..seq[1] {
            for head in 0..h {
                let row = (t * h + head) * e..(t * h + head + 1) * e;
                let delta = dot(&o[row.clone()], &d_o[row.clone()]);
                for j in shape.visible(t - seq[0]) {
                    let key = (seq[0] + j) * g * e + head / (h / g) * e;
                    let key = key..key + e;
                    let p = (dot(&q[row.clone()], &k[key.clone()]) * shape.scale - lse[t * h + head]).exp();
                    let ds = p * (dot(&d_o[row.clone()], &v[key.clone()]) - delta) * shape.scale;
                    for lane in 0..e {
                        dq[row.start + lane] += ds * k[key.start + lane];
                        dk[key.start + lane] += ds * q[row.start + lane];
                        dv[key.start + lane] += p * d_o[row.start + lane];
                    }
                }
            }
        }
    }
}

/// Elements of one page of keys, or of values.
pub fn page_len(shape: &AttentionShape) -> usize {
    shape.kv_heads * shape.head_dim * PAGE
}

pub fn kv_append(
    keys: &mut [f32],
    values: &mut [f32],
    k: &[f32],
    v: &[f32],
    sequences: &[PagedSequence],
    shape: &AttentionShape,
) {
    let (g, e) = (shape.kv_heads, shape.head_dim);
    let rows = sequences.iter().flat_map(|s| (s.past..s.past + s.tokens).map(move |at| (s, at)));
    for (row, (sequence, at)) in rows.enumerate() {
        let page = sequence.blocks[at / PAGE] as usize * page_len(shape);
        for head in 0..g {
            let from = (row * g + head) * e;
            let to = page + head * e * PAGE;
            for lane in 0..e {
                keys[to + lane * PAGE + at % PAGE] = k[from + lane];
            }
            let to = to + at % PAGE * e;
            values[to..to + e].copy_from_slice(&v[from..from + e]);
        }
    }
}

pub fn forward_paged(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    sequences: &[PagedSequence],
    shape: &AttentionShape,
    o: &mut [f32],
) {
    let (h, g, e) = (shape.heads, shape.kv_heads, shape.head_dim);
    let rows = sequences.iter().flat_map(|s| (s.past..s.past + s.tokens).map(move |at| (s, at)));
    for (row, (sequence, at)) in rows.enumerate() {
        for head in 0..h {
            let page = |j: usize| sequence.blocks[j / PAGE] as usize * page_len(shape) + head / (h / g) * e * PAGE;
            let keys = Keys {
                key: &|j, lane| keys[page(j) + lane * PAGE + j % PAGE],
                value: &|j, lane| values[page(j) + j % PAGE * e + lane],
            };
            let row = (row * h + head) * e..(row * h + head + 1) * e;
            attend(&q[row.clone()], &keys, shape.visible(at), shape.scale, &mut o[row]);
        }
    }
}
