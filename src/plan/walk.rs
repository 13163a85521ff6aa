//! The order in which a forward and a backward take and give back their buffers: `model`'s, line by line, on a heap that
//! only counts.
//!
//! Dims: t tokens of this rank, d width, q and kv columns of heads, f MLP width, v rows of the vocabulary.

use super::heap::{Heap, Held, Kind};
use super::shape::{Dims, Flat};
use crate::comm::{PIECE, SHARE_ALIGN, WHOLE_MAX};
use crate::config::mesh::RoleName;
use crate::device::cuda::rmsnorm;
use crate::tensor::DType;

/// How the kernels hold things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    /// Products of many rows are those of a library.
    pub fast: bool,
    /// How many GPUs that may be joined share matrices.
    pub joined: Option<usize>,
    /// Keys of a run, where rows see several: between them they lie in f32.
    pub run: Option<usize>,
}

/// One packed row on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Tokens of this rank.
    pub tokens: usize,
    /// Rows that a head sees on this rank.
    pub head_rows: usize,
    /// Tokens of the longest sequence on this rank.
    pub longest: usize,
}

/// What is kept of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    Nothing,
    Input,
    Everything,
}

/// Kept buffers of one layer.
struct Layer {
    x0: Held,
    attention: Option<AttentionSaved>,
    mlp: Option<(Held, MlpSaved)>,
}

struct AttentionSaved {
    norm: Vec<Held>,
    /// (raw q and 1 / rms, raw k and 1 / rms)
    raw: Vec<Held>,
    q: Held,
    k: Held,
    v: Held,
    o: Held,
    lse: Held,
}

struct MlpSaved {
    norm: Vec<Held>,
    gate: Held,
    up: Held,
    act: Held,
}

/// What a forward leaves for its backward, and the hidden state.
pub struct Kept {
    layers: Vec<Layer>,
    last: Vec<Held>,
    pub hidden: Held,
}

/// One model's forwards and backwards on one rank.
pub struct Walk<'a> {
    pub heap: &'a mut Heap,
    pub role: RoleName,
    pub dims: &'a Dims,
    pub flat: &'a Flat,
    pub kernels: Kernels,
    /// ZeRO stage.
    pub zero: usize,
    /// Ranks that share each sequence.
    pub sequence: usize,
    gathered: Vec<Held>,
    reducing: Vec<Held>,
    open: Option<(usize, Held)>,
}

impl<'a> Walk<'a> {
    pub fn new(
        heap: &'a mut Heap,
        role: RoleName,
        (dims, flat): (&'a Dims, &'a Flat),
        kernels: Kernels,
        (zero, sequence): (usize, usize),
    ) -> Self {
        Self { heap, role, dims, flat, kernels, zero, sequence, gathered: Vec::new(), reducing: Vec::new(), open: None }
    }

    pub(super) fn take(&mut self, kind: Kind, rows: usize, width: usize) -> Held {
        let bytes = rows * width * DType::Bf16.bytes();
        self.heap.take(kind, Some(self.role), bytes)
    }

    /// Numbers that are f32 everywhere.
    pub(super) fn take_f32(&mut self, kind: Kind, len: usize) -> Held {
        self.heap.take(kind, Some(self.role), 4 * len)
    }

    pub(super) fn give(&mut self, held: Held) {
        self.heap.give(held);
    }

    pub(super) fn give_all(&mut self, held: impl IntoIterator<Item = Held>) {
        self.heap.give_all(held);
    }

    /// Scratch of one call.
    pub(super) fn touch_bytes(&mut self, kind: Kind, bytes: usize) {
        if bytes > 0 {
            let held = self.heap.take(kind, Some(self.role), bytes);
            self.give(held);
        }
    }

    /// What a GPU receives of the others that share matrices, of `rows` x `width` bf16 sums, before it adds (`comm::linked`).
    fn summed(&mut self, rows: usize, width: usize) {
        let (ranks, values) = (self.kernels.joined.unwrap_or(1), rows * width);
        if ranks > 1 {
            let share = values.min(PIECE / 2).div_ceil(ranks).next_multiple_of(SHARE_ALIGN);
            let of_each = if 2 * values * ranks <= WHOLE_MAX { values } else { share };
            self.touch_bytes(Kind::Collectives, 2 * of_each * ranks);
        }
    }

    /// The backward of a norm sums up its weight's gradient in parts, on a GPU.
    fn norm_backward(&mut self, width: usize, groups: usize) {
        self.touch_bytes(Kind::Scratch, rmsnorm::backward_scratch(width, groups));
    }

    // ---- units of ZeRO ----

    /// A layer asks for the weights of unit `index`: under stage 3 they are gathered, at most two units at a time.
    fn weights(&mut self, index: usize) {
        if self.zero < 3 {
            return;
        }
        while self.gathered.len() >= 2 {
            let oldest = self.gathered.remove(0);
            self.give(oldest);
        }
        let held = self.take(Kind::Gathered, 1, self.flat.unit(index));
        self.gathered.push(held);
    }

    fn release_weights(&mut self) {
        let gathered = std::mem::take(&mut self.gathered);
        self.give_all(gathered);
    }

    /// A backward is about to add to the gradient of unit `index`: from stage 2 on in a buffer of its own, while that of
    /// the unit before is reduced.
    pub(super) fn begin(&mut self, index: usize) {
        if self.zero < 2 || self.open.as_ref().is_some_and(|(open, _)| *open == index) {
            return;
        }
        self.reducing.extend(self.open.take().map(|(_, held)| held));
        while self.reducing.len() > 1 {
            let landed = self.reducing.remove(0);
            self.give(landed);
        }
        let held = self.take_f32(Kind::Gradients, self.flat.unit(index));
        self.open = Some((index, held));
    }

    /// The minibatch has no more backwards.
    pub fn settle(&mut self) {
        let rest: Vec<Held> = self.reducing.drain(..).chain(self.open.take().map(|(_, held)| held)).collect();
        self.give_all(rest);
    }

    // ---- layers ----

    fn norm(&mut self, t: usize) -> Vec<Held> {
        let d = self.dims.d;
        vec![self.take(Kind::Norms, t, d), self.take_f32(Kind::Norms, t)]
    }

    /// What attention keeps; where its input `keeps`, the sum with that stands in a buffer of its own.
    fn attention_forward(&mut self, t: usize, keeps: bool) -> (AttentionSaved, Option<Held>) {
        let (q, kv) = (self.dims.q(), self.dims.kv());
        let norm = self.norm(t);
        let mut qs = self.take(Kind::Attention, t, q);
        let mut ks = self.take(Kind::Attention, t, kv);
        let vs = self.take(Kind::Attention, t, kv);
        let mut raw = Vec::new();
        if self.dims.qk_norm {
            let normed = self.take(Kind::Attention, t, q);
            raw.push(self.take_f32(Kind::Norms, t * self.dims.heads));
            raw.push(std::mem::replace(&mut qs, normed));
            let normed = self.take(Kind::Attention, t, kv);
            raw.push(self.take_f32(Kind::Norms, t * self.dims.kv_heads));
            raw.push(std::mem::replace(&mut ks, normed));
        }
        let lse = self.take_f32(Kind::Norms, t * self.dims.heads);
        let o = self.ring_forward(t);
        let sum = self.residual(t, keeps);
        (AttentionSaved { norm, raw, q: qs, k: ks, v: vs, o, lse }, sum)
    }

    /// A product that is added to the residual stream, in place or in a buffer of its own.
    fn residual(&mut self, t: usize, apart: bool) -> Option<Held> {
        let d = self.dims.d;
        let sum = apart.then(|| self.take(Kind::Residual, t, d));
        self.summed(t, d);
        sum
    }

    fn give_attention(&mut self, saved: AttentionSaved) {
        let AttentionSaved { norm, raw, q, k, v, o, lse } = saved;
        self.give_all(norm.into_iter().chain(raw).chain([q, k, v, o, lse]));
    }

    /// All of the MLP's forward but its last product.
    fn mlp_activations(&mut self, t: usize) -> MlpSaved {
        let f = self.dims.f;
        let norm = self.norm(t);
        let gate = self.take(Kind::Mlp, t, f);
        let up = self.take(Kind::Mlp, t, f);
        let act = self.take(Kind::Mlp, t, f);
        MlpSaved { norm, gate, up, act }
    }

    fn give_mlp(&mut self, saved: MlpSaved) {
        let MlpSaved { norm, gate, up, act } = saved;
        self.give_all(norm.into_iter().chain([gate, up, act]));
    }

    /// The forward of all layers; the hidden state is left.
    pub fn forward(&mut self, t: usize, keep: Keep) -> Kept {
        let d = self.dims.d;
        self.weights(0);
        let mut x = self.take(Kind::Residual, t, d);
        let mut layers = Vec::new();
        for i in 0..self.dims.layers {
            self.weights(1 + i);
            let (attention, x1) = self.attention_forward(t, keep != Keep::Nothing);
            let x0 = x1.map(|x1| std::mem::replace(&mut x, x1));
            if keep != Keep::Everything {
                self.give_attention(attention);
                let mlp = self.mlp_activations(t);
                self.residual(t, false);
                self.give_mlp(mlp);
                layers.extend(x0.map(|x0| Layer { x0, attention: None, mlp: None }));
                continue;
            }
            let mlp = self.mlp_activations(t);
            let x2 = self.residual(t, true);
            let x1 = x2.map(|x2| std::mem::replace(&mut x, x2));
            let of_both = x0.zip(x1);
            layers.extend(of_both.map(|(x0, x1)| Layer { x0, attention: Some(attention), mlp: Some((x1, mlp)) }));
        }
        self.weights(1 + self.dims.layers);
        let hidden = self.take(Kind::Residual, t, d);
        let rstd = self.take_f32(Kind::Norms, t);
        let last = vec![x, rstd];
        if keep == Keep::Nothing {
            self.give_all(last);
            return Kept { layers, last: Vec::new(), hidden };
        }
        Kept { layers, last, hidden }
    }

    /// Ends what looked at the hidden state of a forward that kept nothing.
    pub fn done(&mut self, kept: Kept) {
        self.give_all(kept.last);
        self.give(kept.hidden);
        self.release_weights();
    }

    /// The backward of all layers, given the gradient of the hidden state.
    pub fn backward(&mut self, t: usize, kept: Kept, dhidden: Held) {
        let Kept { layers, last, hidden } = kept;
        let d = self.dims.d;
        let dx = self.take(Kind::Residual, t, d);
        self.norm_backward(d, t);
        let end = 1 + self.dims.layers;
        self.begin(end);
        // x and dhidden have served; 1 / rms stays to the end.
        let mut last = last.into_iter();
        self.give_all(last.next());
        self.give(dhidden);
        for (i, layer) in layers.into_iter().enumerate().rev() {
            self.weights(1 + i);
            self.begin(1 + i);
            self.block_backward(t, layer);
        }
        self.weights(0);
        self.begin(0);
        self.give(dx);
        self.give_all(last);
        self.give(hidden);
        self.release_weights();
    }

    fn block_backward(&mut self, t: usize, layer: Layer) {
        let Layer { x0, mut attention, mut mlp } = layer;
        if attention.is_none() {
            // Computed again from the input, but for the last product.
            let (again, x1) = self.attention_forward(t, true);
            attention = Some(again);
            mlp = x1.map(|x1| (x1, self.mlp_activations(t)));
        }
        if let Some((x1, mlp)) = mlp {
            self.mlp_backward(t, mlp);
            if let Some(attention) = attention {
                self.attention_backward(t, attention);
            }
            self.give(x1);
        }
        self.give(x0);
    }

    fn mlp_backward(&mut self, t: usize, saved: MlpSaved) {
        let (d, f) = (self.dims.d, self.dims.f);
        let MlpSaved { norm, gate, up, act } = saved;
        let dact = self.take(Kind::Mlp, t, f);
        let dup = self.take(Kind::Mlp, t, f);
        self.give_all([gate, up, dact]);
        let dn = self.take(Kind::Norms, t, d);
        self.summed(t, d);
        self.norm_backward(d, t);
        self.give_all([dn, act, dup]);
        self.give_all(norm);
    }

    fn attention_backward(&mut self, t: usize, saved: AttentionSaved) {
        let (d, q, kv) = (self.dims.d, self.dims.q(), self.dims.kv());
        let AttentionSaved { norm, raw, q: qs, k: ks, v: vs, o, lse } = saved;
        let d_o = self.take(Kind::Attention, t, q);
        let [mut dq, mut dk, dv] = self.ring_backward(t);
        self.give_all([qs, ks, vs, o, d_o]);
        if self.dims.qk_norm {
            let (new_q, new_k) = (self.take(Kind::Attention, t, q), self.take(Kind::Attention, t, kv));
            self.norm_backward(self.dims.head_dim, t * self.dims.heads);
            self.give_all([std::mem::replace(&mut dq, new_q), std::mem::replace(&mut dk, new_k)]);
        }
        self.give_all(raw);
        if self.dims.kv_copied > 0 {
            let all = self.take(Kind::Attention, 2 * t, self.dims.kv_copied);
            self.give(all);
        }
        let dn = self.take(Kind::Norms, t, d);
        self.summed(t, d);
        self.norm_backward(d, t);
        self.give_all([dn, dq, dk, dv, lse]);
        self.give_all(norm);
    }
}
