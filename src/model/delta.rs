//! The gated delta rule: y = Wo (norm(delta(q, k, v)) silu(Wz n)), with q, k and v = silu(conv(W n)) of queries, keys and
//! values, of which q and k have length 1 (arXiv:2412.06464).
//!
//! Dims: t tokens, d width, g key heads of e columns, h value heads of f columns, n taps.

use super::arch::Arch;
use super::block_spec::{DeltaSpec, NormSpec};
use super::branch::Body;
use super::context::{Context, LayerKeys};
use super::delta_files::DeltaFiles;
use super::file_rows::FileRows;
use super::linear::Linear;
use super::norm::Norm;
use super::params::{Init, ParamId, ParamTable};
use super::part::Cut;
use super::weights::{Gradients, Unit};
use crate::ops::attention::Packed;
use crate::ops::delta::{self, DeltaShape, States};
use crate::ops::glu::{self, Activation};
use crate::ops::matmul::Into;
use crate::ops::rmsnorm;
use crate::tensor::{Flat, Layout, Slice, Tensor};

/// The number that keeps the length of a query or a key from 0.
const LENGTH_EPS: f32 = 1e-6;
/// The range of exp(A) in new models, as in transformers.
const DECAY: [f32; 2] = [0.01, 16.0];

/// One layer's delta rule: parameters and shape.
#[derive(Clone, Debug)]
pub(super) struct Delta {
    /// Queries, keys, values: their projections, and the taps of their convolutions.
    inputs: [Linear; 3],
    taps: [ParamId; 3],
    gate: Linear,
    rate: Linear,
    decay: Linear,
    log_a: ParamId,
    bias: ParamId,
    norm: Norm,
    out: Linear,
    places: Places,
}

/// The heads that this rank holds, and their places in a page of the cache: the inputs that each convolution needs, and
/// then the states.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    shape: DeltaShape,
    convolutions: [usize; 3],
    states: usize,
}

impl Places {
    fn new(spec: &DeltaSpec, shape: DeltaShape) -> Self {
        let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim);
        let kept = spec.taps - 1;
        Self { shape, convolutions: [0, kept * keys, 2 * kept * keys], states: kept * (2 * keys + values) }
    }

    /// Values of a page.
    pub(super) fn page_len(&self) -> usize {
        self.states + self.shape.state_len()
    }
}

/// The activations that the backward needs. The others are computed again.
#[derive(Debug)]
pub(super) struct DeltaSaved {
    /// The branch's input (t, d)
    n: Tensor,
    /// Projections before the convolutions: (t, g*e), (t, g*e), (t, h*f)
    raw: [Tensor; 3],
    /// The gate (t, h*f), and the inputs of rate and decay (t, h)
    z: Tensor,
    gates: [Tensor; 2],
    /// The result of the rule (t, h*f), and 1 / rms of each head (t, h)
    o: Tensor,
    rstd: Tensor,
    /// norm(o) silu(z)
    y: Tensor,
}

impl DeltaSaved {
    /// The results in the order in which they were computed.
    pub(super) fn results(&self) -> Vec<(&'static str, &Tensor)> {
        let [q, k, v] = &self.raw;
        let first = [("the delta rule's norm", &self.n), ("queries", q), ("keys", k), ("values", v)];
        first.into_iter().chain([("the delta rule", &self.o), ("its gated norm", &self.y)]).collect()
    }
}

/// What the rule reads, with what its backward needs of it.
struct Inputs {
    /// After convolution and silu.
    q: Normed,
    k: Normed,
    v: Tensor,
    /// Decay and rate.
    gates: [Tensor; 2],
}

/// Heads of length `scale`, before and after, and 1 / rms.
struct Normed {
    x: Tensor,
    y: Tensor,
    rstd: Tensor,
}

impl Delta {
    /// Declares the parameters in `name`.
    pub(super) fn declare(table: &mut ParamTable, name: &str, arch: &Arch, spec: &DeltaSpec) -> Self {
        let (part, hidden) = (table.tensor_part(), Cut::Whole(arch.width));
        let files = DeltaFiles { name, form: arch.family.files.delta, spec };
        let name = |part: &str| format!("{name}.{part}");
        let mut linear = |file: Option<FileRows>, part: &str, cut: Cut| {
            Linear::declare_in(table, file.as_ref(), &name(part), [cut, hidden], false)
        };
        let of_inputs = [("q", spec.keys()), ("k", spec.keys()), ("v", spec.values())];
        let inputs = [0, 1, 2].map(|i| {
            let (input, cut) = of_inputs[i];
            linear(files.inputs(i), &format!("{input}_proj"), cut)
        });
        let gate = linear(files.inputs(3), "in_proj_z", spec.values());
        let [rate, decay] =
            [(0, "in_proj_b"), (1, "in_proj_a")].map(|(i, own)| linear(files.gates(i), own, spec.heads()));
        let taps = [0, 1, 2].map(|i| {
            let (input, cut) = of_inputs[i];
            let dims = [cut, Cut::Whole(1), Cut::Whole(spec.taps)];
            let own = name(&format!("{input}_conv.weight"));
            table.add_in(Some(files.taps(i)), &own, &dims, Layout::Row, table.normal())
        });
        let mut vector = |part: &str, init| table.add(&name(part), &[spec.heads()], Layout::Row, init);
        let bias = vector("dt_bias", Init::Ones);
        let log_a = vector("A_log", Init::LogUniform { low: DECAY[0], high: DECAY[1] });
        let shape = spec.shape(part);
        let norm = NormSpec { offset: 0.0, ..arch.norm };
        let norm = Norm::declare_per_head(table, &name("norm"), (spec.value_dim, None), norm, shape.value_heads);
        let out = Linear::declare(table, &name("out_proj"), [hidden, spec.values()], false);
        let places = Places::new(spec, shape);
        Self { inputs, taps, gate, rate, decay, log_a, bias, norm, out, places }
    }

    pub(super) fn places(&self) -> &Places {
        &self.places
    }

    fn parameters<'a>(&self, w: &'a Unit) -> [Slice<'a>; 2] {
        [self.log_a, self.bias].map(|id| w.vector(id))
    }

    /// The inputs of the rule from projections.
    fn inputs_of(&self, w: &Unit, raw: &[Tensor; 3], gates: &[Tensor; 2], states: &mut States) -> Inputs {
        let [q, k, v] = [0, 1, 2].map(|i| {
            let mut y = raw[i].like(raw[i].rows(), raw[i].width());
            delta::conv_forward(&raw[i], w.vector(self.taps[i]), states, self.places.convolutions[i], &mut y);
            y
        });
        let dim = self.places.shape.key_dim;
        let [rate, decay] = gates;
        Inputs {
            q: Normed::new(q, dim, 1.0 / (dim as f32).sqrt()),
            k: Normed::new(k, dim, 1.0),
            v,
            gates: delta::gates([decay, rate], self.parameters(w)),
        }
    }
}

impl Normed {
    /// x / sqrt(|x|^2 + eps) * scale for each head of `dim` columns: the RMSNorm with a constant weight, which is its offset,
    /// in f32 on every device.
    fn new(x: Tensor, dim: usize, scale: f32) -> Self {
        let (mut y, mut rstd) = (x.like(x.rows(), x.width()), x.statistics(x.rows(), x.width() / dim));
        let none = x.zeros_like(1, dim);
        rmsnorm::forward(&x, none.slice(), weight(dim, scale), LENGTH_EPS / dim as f32, &mut y, &mut rstd);
        Self { x, y, rstd }
    }

    fn backward(self, dim: usize, scale: f32, dy: &Tensor) -> Tensor {
        let (mut dx, none) = (self.x.zeros_like(self.x.rows(), self.x.width()), self.x.zeros_like(1, dim));
        let mut unused = Flat::zeros(self.x.device(), dim);
        let (weight, unused) = (weight(dim, scale), unused.all_mut());
        rmsnorm::backward(&self.x, none.slice(), weight, &self.rstd, dy, &mut dx, unused);
        dx
    }
}

fn weight(dim: usize, scale: f32) -> f32 {
    scale / (dim as f32).sqrt()
}

impl Body for Delta {
    type Saved = DeltaSaved;

    fn forward(&self, c: Context, n: Tensor, keys: &mut LayerKeys) -> DeltaSaved {
        let mut states = match keys {
            LayerKeys::Packed(packed) => States::packed(n.device(), packed),
            LayerKeys::State(cache, paged) => States::cached(cache, paged),
            LayerKeys::Paged(..) => unreachable!("the delta rule has a cache of states"),
        };
        let [q, k, v] = &self.inputs;
        let [q, k, v] = Linear::forward_each(c.w, &n, [q, k, v]);
        let [z, rate, decay] = Linear::forward_each(c.w, &n, [&self.gate, &self.rate, &self.decay]);
        let (raw, gates) = ([q, k, v], [rate, decay]);
        let x = self.inputs_of(c.w, &raw, &gates, &mut states);
        let of = [&x.q.y, &x.k.y, &x.v, &x.gates[0], &x.gates[1]];
        let o = delta::forward(of, &self.places.shape, &mut states, self.places.states);
        drop(x);
        let (normed, rstd) = self.norm.forward(c.w, &o);
        let mut y = o.like(o.rows(), o.width());
        glu::forward(Activation::Silu, &z, &normed, &mut y);
        DeltaSaved { n, raw, z, gates, o, rstd, y }
    }

    fn add(&self, c: Context, saved: &DeltaSaved, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        self.out.forward_onto(c, &saved.y, x, keeps)
    }

    fn backward(&self, c: Context, packed: &Packed, saved: DeltaSaved, dy: &Tensor, grads: &mut Gradients) -> Tensor {
        let DeltaSaved { n, raw, z, gates: [rate, decay], o, rstd, y } = saved;
        let (t, like) = (o.rows(), |x: &Tensor| x.like(x.rows(), x.width()));
        let mut d_y = like(&o);
        self.out.backward_onto(c, &y, dy, &mut d_y, grads);
        let (normed, _) = self.norm.forward(c.w, &o);
        let [mut dz, mut d_normed, mut d_o] = [like(&z), like(&o), o.zeros_like(t, o.width())];
        glu::backward(Activation::Silu, &z, &normed, &d_y, &mut dz, &mut d_normed);
        self.norm.backward(c, &o, &rstd, &d_normed, &mut d_o, grads);
        drop((y, d_y, normed, d_normed, o, z));

        let mut states = States::packed(n.device(), packed);
        let gates = [rate, decay];
        let x = self.inputs_of(c.w, &raw, &gates, &mut states);
        let of = [&x.q.y, &x.k.y, &x.v, &x.gates[0], &x.gates[1]];
        let [dq, dk, dv, d_decay, d_rate] = delta::backward(of, &self.places.shape, &states, &d_o);
        let DeltaShape { key_dim: dim, value_heads, .. } = self.places.shape;
        let slopes = [x.q.backward(dim, 1.0 / (dim as f32).sqrt(), &dq), x.k.backward(dim, 1.0, &dk), dv];
        let [rate, decay] = &gates;
        let mut sums = [(); 2].map(|()| Flat::zeros(n.device(), value_heads));
        let of_parameters = sums.each_mut().map(Flat::all_mut);
        let slopes_of_gates = [d_decay, d_rate];
        let [d_decay, d_rate] =
            delta::gates_backward([decay, rate], self.parameters(c.w), slopes_of_gates, of_parameters);
        [self.log_a, self.bias].into_iter().zip(&sums).for_each(|(id, sum)| grads.add_vector(id, sum.all()));

        let mut dn = n.like(t, n.width());
        self.gate.backward(c, &n, &dz, &mut dn, Into::Overwrite, grads);
        self.rate.backward(c, &n, &d_rate, &mut dn, Into::Add, grads);
        self.decay.backward(c, &n, &d_decay, &mut dn, Into::Add, grads);
        for (i, slope) in slopes.into_iter().enumerate() {
            let (taps, id) = (c.w.vector(self.taps[i]), self.taps[i]);
            let mut d_taps = Flat::zeros(n.device(), taps.len());
            let d_raw = delta::conv_backward(&raw[i], taps, &states, slope, d_taps.all_mut());
            grads.add_vector(id, d_taps.all());
            self.inputs[i].backward(c, &n, &d_raw, &mut dn, Into::Add, grads);
        }
        c.tensor.sum_slice(dn.slice_mut());
        dn
    }
}
