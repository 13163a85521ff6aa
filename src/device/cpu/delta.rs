//! The gated delta rule (arXiv:2412.06464), token by token. For each value head, with S (key dim, value dim):
//!
//!   S' = a_t S_(t-1),  u_t = b_t (v_t - S'^T k_t),  S_t = S' + k_t u_t^T,  o_t = S'^T q_t + (q_t . k_t) u_t = S_t^T q_t
//!
//! The columns of S do not depend on each other, so a task walks over the tokens with a tile of `BLOCK` columns, which
//! stays in the cache. The update of token t and the decay of token t + 1 are one pass. A sum over the key dim is one
//! ascending chain for each column. So the bits do not depend on how a sequence is divided into calls.

use super::lanes;
use super::pool::{Shares, pool};
use super::scratch::{Rest, taken, with_scratch};
use super::vector::{BLOCK, Kernel, Vector, run_in};
use crate::device::null;
use crate::device::simd::{level, leveled};

/// The heads of a layer that a rank computes. Value head h reads key head h / (value_heads / key_heads).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

impl DeltaShape {
    fn blocks(&self) -> usize {
        self.value_dim.div_ceil(BLOCK)
    }

    fn tile_len(&self) -> usize {
        self.key_dim * BLOCK
    }

    /// Values of the state of all heads: tiles [value head][block of columns][key dim][BLOCK].
    pub fn state_len(&self) -> usize {
        self.value_heads * self.blocks() * self.tile_len()
    }

    fn key_head(&self, value_head: usize) -> usize {
        value_head * self.key_heads / self.value_heads
    }
}

/// Consecutive tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateRow {
    /// The first row of a batch, and the number of rows.
    pub start: usize,
    pub tokens: usize,
    /// Whether the sequence begins here. Otherwise the page has the state after the token before.
    pub is_first: bool,
    /// The page that gets the state after the last token.
    pub page: Option<u32>,
}

impl StateRow {
    /// Whole sequences: [0, end of sequence 0, ...].
    pub fn whole(cu_seqlens: &[usize]) -> Vec<Self> {
        let row = |ends: &[usize]| Self { start: ends[0], tokens: ends[1] - ends[0], is_first: true, page: None };
        cu_seqlens.windows(2).map(row).collect()
    }
}

/// The pages of a cache of states.
#[derive(Debug)]
pub struct StatePages<'a> {
    pub values: &'a mut [f32],
    pub page_len: usize,
}

/// The inputs: q, k (t, key heads * key dim); v (t, value heads * value dim); decay a and rate b (t, value heads).
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub decay: &'a [f32],
    pub rate: &'a [f32],
}

/// A tile's view of the inputs: one value head, and one block of its columns.
struct Tile<'a> {
    x: &'a Inputs<'a>,
    shape: &'a DeltaShape,
    head: usize,
    /// The first column of the head, and the number of columns.
    column: usize,
    columns: usize,
}

impl<'a> Tile<'a> {
    fn new(x: &'a Inputs<'a>, shape: &'a DeltaShape, head: usize, block: usize) -> Self {
        let column = block * BLOCK;
        Self { x, shape, head, column, columns: BLOCK.min(shape.value_dim - column) }
    }

    #[inline(always)]
    fn keys(&self, of: &'a [f32], t: usize) -> &'a [f32] {
        let s = self.shape;
        &of[(t * s.key_heads + s.key_head(self.head)) * s.key_dim..][..s.key_dim]
    }

    /// The first of its columns of token t, in a tensor with the shape of v.
    #[inline(always)]
    fn at(&self, t: usize) -> usize {
        (t * self.shape.value_heads + self.head) * self.shape.value_dim + self.column
    }

    #[inline(always)]
    fn values(&self, of: &[f32], t: usize) -> [f32; BLOCK] {
        let mut values = [0.0; BLOCK];
        values[..self.columns].copy_from_slice(&of[self.at(t)..][..self.columns]);
        values
    }

    #[inline(always)]
    fn gates(&self, t: usize) -> (f32, f32) {
        let at = t * self.shape.value_heads + self.head;
        (self.x.decay[at], self.x.rate[at])
    }
}

/// Moves the state in a tile over `tokens` tokens from `start` on. Writes o, if there is one.
struct Walk<'a> {
    of: &'a Tile<'a>,
    start: usize,
    tokens: usize,
    o: Option<&'a Shares<f32>>,
}

/// The columns that a walk moves together, in registers of one vector each.
const TOGETHER: usize = 2;

impl Walk<'_> {
    /// The walk of the columns from `lane` on.
    ///
    /// # Safety
    /// Same as `Kernel::work`, for a tile at `tile`.
    #[inline(always)]
    unsafe fn columns<V: Vector>(&self, tile: *mut f32, lane: usize) {
        let Self { of, start, tokens, o } = *self;
        let dim = of.shape.key_dim;
        let left = |j: usize| of.columns.saturating_sub(lane + j * V::LANES);
        let mut before = of.keys(of.x.k, start);
        // SAFETY: all rows have key_dim values, the tile key_dim rows of BLOCK; parts of v and o end with their columns.
        unsafe {
            let at = |i: usize, j: usize| tile.add(i * BLOCK + lane + j * V::LANES);
            let mut u = [V::splat(0.0); TOGETHER];
            for t in start..start + tokens {
                let (q, k, (a, b)) = (of.keys(of.x.q, t), of.keys(of.x.k, t), of.gates(t));
                let (a, mut r, mut p) = (V::splat(a), [V::splat(0.0); TOGETHER], [V::splat(0.0); TOGETHER]);
                for i in 0..dim {
                    // Not by `map`, whose closure would not be compiled for the registers.
                    let before = V::splat(*before.get_unchecked(i));
                    let (k, q) = (V::splat(*k.get_unchecked(i)), V::splat(*q.get_unchecked(i)));
                    for j in 0..TOGETHER {
                        let x = before.fma(u[j], V::load(at(i, j))).mul(a);
                        x.store(at(i, j));
                        r[j] = x.fma(k, r[j]);
                        p[j] = x.fma(q, p[j]);
                    }
                }
                let v = of.x.v.as_ptr().wrapping_add(of.at(t) + lane);
                for j in 0..TOGETHER {
                    u[j] = V::splat(b).mul(V::load_part(v.wrapping_add(j * V::LANES), left(j)).sub(r[j]));
                }
                before = k;
                if let Some(o) = o {
                    let both = V::splat(lanes::dot::<BLOCK>(q, k));
                    // The columns of a head and a token belong to one tile alone, and lie within o.
                    let o = o.slice(of.at(t)..of.at(t) + of.columns).as_mut_ptr();
                    for j in 0..TOGETHER {
                        both.fma(u[j], p[j]).store_part(o.wrapping_add(lane + j * V::LANES), left(j));
                    }
                }
            }
            for (i, k) in before.iter().enumerate() {
                for (j, u) in u.iter().enumerate() {
                    V::splat(*k).fma(*u, V::load(at(i, j))).store(at(i, j));
                }
            }
        }
    }
}

impl Kernel for Walk<'_> {
    #[inline(always)]
    unsafe fn work<V: Vector>(&self, tile: &mut [f32]) {
        for lane in (0..BLOCK).step_by(TOGETHER * V::LANES) {
            // SAFETY: promised by the caller.
            unsafe { self.columns::<V>(tile.as_mut_ptr(), lane) };
        }
    }
}

/// Writes o, of the shape of v, and the states after the rows to their pages, from value `offset` of a page on. The state
/// before a row that does not begin a sequence is read there.
pub fn forward(
    x: &Inputs,
    rows: &[StateRow],
    shape: &DeltaShape,
    pages: Option<(&mut StatePages, usize)>,
    o: &mut [f32],
) {
    assert_eq!(o.len(), x.v.len());
    if null::is_active() {
        return;
    }
    let (level, o) = (level(), Shares::new(o));
    let pages = pages.map(|(pages, offset)| (pages.page_len, offset, Shares::new(pages.values)));
    let (blocks, len) = (shape.blocks(), shape.tile_len());
    // Heads first, so that each thread gets equally many of each row.
    pool().ranges(shape.value_heads * rows.len(), 1, false, &|tasks| {
        with_scratch(len, |tile| {
            for task in tasks {
                let (head, row) = (task / rows.len(), rows[task % rows.len()]);
                for block in 0..blocks {
                    let kept = row.page.zip(pages.as_ref()).map(|(page, (page_len, offset, shares))| {
                        let start = page as usize * page_len + offset + (head * blocks + block) * len;
                        // SAFETY: each row has a page of its own, and its tiles belong to one task each; all pages
                        // lie within the cache.
                        unsafe { shares.slice(start..start + len) }
                    });
                    match &kept {
                        Some(kept) if !row.is_first => tile.copy_from_slice(kept),
                        _ => tile.fill(0.0),
                    }
                    let of = &Tile::new(x, shape, head, block);
                    run_in(level, &Walk { of, start: row.start, tokens: row.tokens, o: Some(&o) }, tile);
                    if let Some(kept) = kept {
                        kept.copy_from_slice(tile);
                    }
                }
            }
        });
    });
}

/// Gradients, of the shapes of the inputs.
pub struct Slopes<'a> {
    pub q: &'a mut [f32],
    pub k: &'a mut [f32],
    pub v: &'a mut [f32],
    pub decay: &'a mut [f32],
    pub rate: &'a mut [f32],
}

/// `Slopes`, of which each task writes its own part.
struct SharedSlopes {
    q: Shares<f32>,
    k: Shares<f32>,
    v: Shares<f32>,
    decay: Shares<f32>,
    rate: Shares<f32>,
}

/// The number of tokens whose states the backward keeps at a time.
const CHUNK: usize = 32;

/// The transposed tile [column][key dim] of a tile [key dim][BLOCK]. Rows have `row` values; those past the key dim are 0.
fn transpose(tile: &[f32], row: usize, to: &mut [f32]) {
    to.fill(0.0);
    for (i, values) in tile.as_chunks::<BLOCK>().0.iter().enumerate() {
        values.iter().enumerate().for_each(|(c, x)| to[c * row + i] = *x);
    }
}

/// The inputs of a token: q and k with zeros after the key dim.
struct Padded<'a> {
    q: &'a mut [f32],
    k: &'a mut [f32],
}

impl Padded<'_> {
    #[inline(always)]
    fn read(&mut self, of: &Tile<'_>, t: usize) {
        let dim = of.shape.key_dim;
        self.q[..dim].copy_from_slice(of.keys(of.x.q, t));
        self.k[..dim].copy_from_slice(of.keys(of.x.k, t));
    }
}

leveled! {
    /// Fills `states`, transposed tiles, with the state before `start`, which it contains, and after each of the tokens.
    /// Writes their u and v - r.
    fn states_of(
        of: &Tile<'_>, states: &mut [f32], start: usize, x: &mut Padded<'_>, u_of: &mut [f32], rest_of: &mut [f32]
    ) {
        let (row, len) = (x.k.len(), x.k.len() * BLOCK);
        let tokens = u_of.as_chunks_mut::<BLOCK>().0.iter_mut().zip(rest_of.as_chunks_mut::<BLOCK>().0);
        for (i, (u, rest)) in tokens.enumerate() {
            let t = start + i;
            x.read(of, t);
            let (v, (a, b)) = (of.values(of.x.v, t), of.gates(t));
            let (old, new) = states[i * len..(i + 2) * len].split_at_mut(len);
            let (k, _) = x.k.as_chunks::<BLOCK>();
            for (c, (old, new)) in old.chunks_exact(row).zip(new.chunks_exact_mut(row)).take(of.columns).enumerate() {
                let (old, new) = (old.as_chunks::<BLOCK>().0, new.as_chunks_mut::<BLOCK>().0);
                let mut r = [0.0f32; BLOCK];
                for ((old, new), k) in old.iter().zip(&mut *new).zip(k) {
                    for i in 0..BLOCK {
                        new[i] = old[i] * a;
                        r[i] = new[i].mul_add(k[i], r[i]);
                    }
                }
                rest[c] = v[c] - lanes::fold(r);
                u[c] = b * rest[c];
                for (new, k) in new.iter_mut().zip(k) {
                    for i in 0..BLOCK {
                        new[i] = k[i].mul_add(u[c], new[i]);
                    }
                }
            }
        }
    }
}

/// Scratch of the backward of a token: gradients of its q and k, with zeros after the key dim.
struct KeySlopes<'a> {
    q: &'a mut [f32],
    k: &'a mut [f32],
}

leveled! {
    /// The backward of the tokens of one chunk, from the last to the first. `slope` is dS, transposed, after the chunk and
    /// then before it.
    ///
    ///   dS_t += q_t do_t^T,  dq_t = S_t do_t,  du_t = dS_t^T k_t,  dv_t = b_t du_t,  db_t = du_t . (v_t - r_t)
    ///   dk_t = dS_t u_t - S'_t dv_t,  dS' = dS_t - k_t dv_t^T,  da_t = dS' : S_(t-1),  dS_(t-1) = a_t dS'
    fn chunk_backward(
        of: &Tile<'_>, states: &[f32], start: usize, d_o: &[f32], updates: [&[f32]; 2], slope: &mut [f32],
        x: &mut Padded<'_>, keys: &mut KeySlopes<'_>, out: &SharedSlopes
    ) {
        let (s, row, [u_of, rest_of]) = (of.shape, x.k.len(), updates);
        let len = row * BLOCK;
        for (i, (u, rest)) in u_of.as_chunks::<BLOCK>().0.iter().zip(rest_of.as_chunks::<BLOCK>().0).enumerate().rev() {
            let t = start + i;
            x.read(of, t);
            let (d_o, (a, b)) = (of.values(d_o, t), of.gates(t));
            let ((q, _), (k, _)) = (x.q.as_chunks::<BLOCK>(), x.k.as_chunks::<BLOCK>());
            keys.q.fill(0.0);
            keys.k.fill(0.0);
            let (mut dv, mut d_rate, mut da) = ([0.0f32; BLOCK], 0.0f32, [0.0f32; BLOCK]);
            for c in 0..of.columns {
                let at = c * row..(c + 1) * row;
                let ds = slope[at.clone()].as_chunks_mut::<BLOCK>().0;
                let old = states[i * len..][at.clone()].as_chunks::<BLOCK>().0;
                let new = states[(i + 1) * len..][at].as_chunks::<BLOCK>().0;
                let (dq, dk) = (keys.q.as_chunks_mut::<BLOCK>().0, keys.k.as_chunks_mut::<BLOCK>().0);
                let mut du = [0.0f32; BLOCK];
                for ((ds, q), k) in ds.iter_mut().zip(q).zip(k) {
                    for i in 0..BLOCK {
                        ds[i] = q[i].mul_add(d_o[c], ds[i]);
                        du[i] = ds[i].mul_add(k[i], du[i]);
                    }
                }
                let du = lanes::fold(du);
                dv[c] = b * du;
                d_rate = du.mul_add(rest[c], d_rate);
                let before = a * dv[c];
                for (((((ds, old), new), k), dq), dk) in ds.iter_mut().zip(old).zip(new).zip(k).zip(dq).zip(dk) {
                    for i in 0..BLOCK {
                        dq[i] = new[i].mul_add(d_o[c], dq[i]);
                        dk[i] = ds[i].mul_add(u[c], dk[i]);
                        dk[i] = old[i].mul_add(-before, dk[i]);
                        let x = k[i].mul_add(-dv[c], ds[i]);
                        da[i] = x.mul_add(old[i], da[i]);
                        ds[i] = a * x;
                    }
                }
            }
            let (first, gate) = ((t * s.key_heads + s.key_head(of.head)) * s.key_dim, t * s.value_heads + of.head);
            // SAFETY: a task has all value heads of its key head and all their columns, for the tokens of its row.
            unsafe {
                for (sums, slopes) in [(&out.q, &*keys.q), (&out.k, &*keys.k)] {
                    let sums = sums.slice(first..first + s.key_dim);
                    sums.iter_mut().zip(slopes).for_each(|(sum, slope)| *sum += slope);
                }
                out.v.slice(of.at(t)..of.at(t) + of.columns).copy_from_slice(&dv[..of.columns]);
                out.decay.slice(gate..gate + 1)[0] += lanes::fold(da);
                out.rate.slice(gate..gate + 1)[0] += d_rate;
            }
        }
    }
}

/// The backward of whole sequences, from d_o of the shape of v. All slopes are overwritten.
pub fn backward(x: &Inputs, rows: &[StateRow], shape: &DeltaShape, d_o: &[f32], slopes: Slopes) {
    assert!(d_o.len() == x.v.len() && slopes.v.len() == x.v.len());
    if null::is_active() {
        return;
    }
    let level = level();
    let Slopes { q, k, v, decay, rate } = slopes;
    for all in [&mut *q, &mut *k, &mut *decay, &mut *rate] {
        all.fill(0.0);
    }
    let [q, k, v, decay, rate] = [q, k, v, decay, rate].map(Shares::new);
    let out = SharedSlopes { q, k, v, decay, rate };
    let (len, group) = (shape.tile_len(), shape.value_heads / shape.key_heads);
    let longest = rows.iter().map(|row| row.tokens.div_ceil(CHUNK)).max().unwrap_or(0);
    let row = shape.key_dim.next_multiple_of(BLOCK);
    let across = row * BLOCK;
    let sizes = [longest * len, len, (CHUNK + 1) * across, across, CHUNK * BLOCK, CHUNK * BLOCK, row, row, row, row];
    pool().ranges(shape.key_heads * rows.len(), 1, false, &|tasks| {
        with_scratch(sizes.map(taken).iter().sum(), |scratch| {
            let mut rest = Rest(scratch);
            let [starts, tile, states, slope, u_of, rest_of, q, k, dq, dk] = sizes.map(|len| rest.take_slice(len));
            q.fill(0.0);
            k.fill(0.0);
            let (mut x_of, mut keys) = (Padded { q, k }, KeySlopes { q: dq, k: dk });
            for task in tasks {
                let (key_head, row_of) = (task / rows.len(), rows[task % rows.len()]);
                let end = row_of.start + row_of.tokens;
                let chunks = (row_of.start..end).step_by(CHUNK).map(|at| (at, CHUNK.min(end - at)));
                for i in 0..group * shape.blocks() {
                    let of = Tile::new(x, shape, key_head * group + i / shape.blocks(), i % shape.blocks());
                    tile.fill(0.0);
                    for (start, (at, tokens)) in starts.chunks_exact_mut(len).zip(chunks.clone()) {
                        start.copy_from_slice(tile);
                        run_in(level, &Walk { of: &of, start: at, tokens, o: None }, tile);
                    }
                    slope.fill(0.0);
                    for (chunk, (at, tokens)) in chunks.clone().enumerate().rev() {
                        transpose(&starts[chunk * len..][..len], row, &mut states[..across]);
                        let (u_of, rest_of) = (&mut u_of[..tokens * BLOCK], &mut rest_of[..tokens * BLOCK]);
                        states_of(level, &of, states, at, &mut x_of, u_of, rest_of);
                        let updates = [&*u_of, &*rest_of];
                        chunk_backward(level, &of, states, at, d_o, updates, slope, &mut x_of, &mut keys, &out);
                    }
                }
            }
        });
    });
}

/// Where the softplus is the identity, as in torch.
const SOFTPLUS_MAX: f32 = 20.0;

/// The decay a = exp(-exp(A) softplus(x + d)) and the rate b = 1 / (1 + exp(-y)) of each token and value head, from
/// projections x and y (t, heads) and parameters A and d (heads).
pub fn gates(x: &[f32], y: &[f32], log_a: &[f32], bias: &[f32], decay: &mut [f32], rate: &mut [f32]) {
    assert!([y.len(), decay.len(), rate.len()] == [x.len(); 3]);
    if null::is_active() {
        return;
    }
    for (i, (decay, rate)) in decay.iter_mut().zip(rate).enumerate() {
        let head = i % log_a.len();
        *decay = (-log_a[head].exp() * softplus(x[i] + bias[head])).exp();
        *rate = sigmoid(y[i]);
    }
}

fn softplus(x: f32) -> f32 {
    if x > SOFTPLUS_MAX { x } else { x.exp().ln_1p() }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Turns the gradients of decay and rate into those of x and y, in place. Adds the gradients of A and d.
pub fn gates_backward(
    [x, y]: [&[f32]; 2],
    [log_a, bias]: [&[f32]; 2],
    [decay, rate]: [&mut [f32]; 2],
    [d_log_a, d_bias]: [&mut [f32]; 2],
) {
    if null::is_active() {
        return;
    }
    let heads = log_a.len();
    for head in 0..heads {
        let factor = -log_a[head].exp();
        let (mut of_a, mut of_bias) = (0.0f64, 0.0f64);
        for i in (head..x.len()).step_by(heads) {
            let input = x[i] + bias[head];
            let gate = factor * softplus(input);
            let slope = decay[i] * gate.exp();
            let slope_of_input = slope * factor * if input > SOFTPLUS_MAX { 1.0 } else { sigmoid(input) };
            of_a += f64::from(slope * gate);
            of_bias += f64::from(slope_of_input);
            decay[i] = slope_of_input;
            let b = sigmoid(y[i]);
            rate[i] *= b * (1.0 - b);
        }
        d_log_a[head] += of_a as f32;
        d_bias[head] += of_bias as f32;
    }
}
