//! Each operation of a layer on this processor, against its equation in f64.

use super::compare::{exceeds, row_gaps};
use super::page::Check;
use crate::dtype::KvDtype;
use crate::ops::attention::{self, AttentionShape};
use crate::ops::glu::{self, Activation};
use crate::ops::matmul::{self, Into};
use crate::ops::rope::{self, RopeTable};
use crate::ops::{adamw, linear_logprob, rmsnorm};
use crate::plan::synthetic::{Matrix, UPDATE, filled};
use crate::tensor::arena::Buffer;
use crate::tensor::{DType, Layout, Tensor, WeightMut};

/// The largest relative difference that rounding of f32 explains.
const GAP_MAX: f64 = 2e-5;
/// Rows and sizes with tails of every kind.
const ROWS: usize = 37;
const WIDTH: usize = 72;
const OUTPUTS: usize = 100;
/// Ends of packed sequences.
const ENDS: [usize; 4] = [0, 1, 36, 106];
const SHAPE: AttentionShape = AttentionShape {
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    window: None,
    scale: 0.25,
    softcap: None,
    values_are_keys: false,
    kv: KvDtype::Model,
};

/// An operation with the results of its kernel and of its equation.
struct Compared {
    name: &'static str,
    got: Vec<f32>,
    want: Vec<f64>,
}

/// Runs every operation once.
pub fn check() -> Check {
    outcome(&all().iter().map(|of| (of.name, gap(&of.got, &of.want))).collect::<Vec<_>>())
}

/// The check of operations with these relative differences.
pub fn outcome(gaps: &[(&str, f64)]) -> Check {
    let name = "operations";
    let wrong: Vec<String> = gaps
        .iter()
        .filter(|(_, gap)| exceeds(*gap, GAP_MAX))
        .map(|(name, gap)| format!("{name} differs from its equation by {gap:.1e} of the norm"))
        .collect();
    let largest = gaps.iter().map(|(_, gap)| *gap).fold(0.0, f64::max);
    Check::of_faults(name, &wrong, || {
        format!("{} equal their equations in f64 (largest difference {largest:.1e})", gaps.len())
    })
}

fn gap(got: &[f32], want: &[f64]) -> f64 {
    let want: Vec<f32> = want.iter().map(|x| *x as f32).collect();
    row_gaps(got, &want, want.len().max(1)).0
}

fn all() -> Vec<Compared> {
    [products(), norms(), ropes(), attention(), gates(), vec![head()], vec![update()]].into_iter().flatten().collect()
}

/// sum over c of a(r, c) b(r, c)
fn dot(n: usize, at: impl Fn(usize) -> (f32, f32)) -> f64 {
    (0..n).map(at).map(|(a, b)| f64::from(a) * f64::from(b)).sum()
}

/// y = x W^T, dx = dy W, dW = dy^T x
fn products() -> Vec<Compared> {
    let (m, n, k) = (ROWS, OUTPUTS, WIDTH);
    let matrix = Matrix::new(n, k, DType::F32);
    let values = matrix.weight().values.f32();
    let w = |r: usize, c: usize| values[Layout::Panel.index(k, r, c)];
    let (x, dy) = (filled(m, k), filled(m, n));
    let (mut y, mut dx) = (Tensor::zeros(m, n), Tensor::zeros(m, k));
    let mut gradient = Buffer::zeros(Layout::Panel.len(n, k));
    matmul::forward(&x, matrix.weight(), None, &mut y, Into::Overwrite);
    matmul::backward_input(&dy, matrix.weight(), &mut dx, Into::Overwrite);
    let dw = WeightMut { n, k, layout: Layout::Panel, values: (&mut gradient).into() };
    matmul::backward_weight(&dy, &x, dw, DType::F32);
    let cells = |rows: usize, columns: usize| (0..rows * columns).map(move |i| (i / columns, i % columns));
    let dw = cells(n, k).map(|(r, c)| gradient[Layout::Panel.index(k, r, c)]).collect();
    vec![
        Compared {
            name: "GEMM",
            got: y.data().to_vec(),
            want: cells(m, n).map(|(i, r)| dot(k, |c| (x.row(i)[c], w(r, c)))).collect(),
        },
        Compared {
            name: "GEMM of the input's gradient",
            got: dx.data().to_vec(),
            want: cells(m, k).map(|(i, c)| dot(n, |r| (dy.row(i)[r], w(r, c)))).collect(),
        },
        Compared {
            name: "GEMM of the weight's gradient",
            got: dw,
            want: cells(n, k).map(|(r, c)| dot(m, |i| (dy.row(i)[r], x.row(i)[c]))).collect(),
        },
    ]
}

/// y = x w / rms(x) and its dx
fn norms() -> Vec<Compared> {
    const EPS: f32 = 1e-5;
    let (x, dy) = (filled(ROWS, WIDTH), filled(ROWS + 1, WIDTH));
    let dy = Tensor::from_slice(ROWS, WIDTH, &dy.data()[WIDTH..]);
    let w: Vec<f32> = (0..WIDTH).map(|i| 0.5 + i as f32 / 50.0).collect();
    let (mut y, mut rstd) = (x.clone(), Tensor::zeros(ROWS, 1));
    rmsnorm::forward(&x, &w, 0.0, EPS, &mut y, &mut rstd);
    let (mut dx, mut dw) = (Tensor::zeros(ROWS, WIDTH), vec![0.0; WIDTH]);
    rmsnorm::backward(&x, &w, 0.0, &rstd, &dy, &mut dx, &mut dw);
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    for i in 0..ROWS {
        let (x, dy) = (x.row(i), dy.row(i));
        let r = 1.0 / (dot(WIDTH, |c| (x[c], x[c])) / WIDTH as f64 + f64::from(EPS)).sqrt();
        let mean = (0..WIDTH).map(|c| f64::from(w[c]) * f64::from(dy[c]) * f64::from(x[c])).sum::<f64>() / WIDTH as f64;
        for c in 0..WIDTH {
            let (x, w, dy) = (f64::from(x[c]), f64::from(w[c]), f64::from(dy[c]));
            forward.push(x * r * w);
            backward.push(r * (w * dy - x * r * r * mean));
        }
    }
    vec![
        Compared { name: "norm", got: y.data().to_vec(), want: forward },
        Compared { name: "norm backward", got: dx.data().to_vec(), want: backward },
    ]
}

/// Pairs (i, i + e / 2) of a head turn by position * frequency.
fn ropes() -> Vec<Compared> {
    let half = SHAPE.head_dim / 2;
    let frequencies: Vec<f32> = (0..half).map(|i| 10000f32.powf(-(i as f32) / half as f32)).collect();
    let table = RopeTable::whole(&frequencies, 1.0, 512);
    let positions: Vec<u32> = (0..ROWS as u32).map(|t| t * 37 % 512).collect();
    let x = filled(ROWS, SHAPE.head_dim);
    let (mut y, mut k) = (x.clone(), x.clone());
    rope::forward(&mut y, &mut k, &positions[..].into(), &table);
    let mut want = Vec::new();
    for (t, row) in (0..ROWS).map(|t| (t, x.row(t))) {
        let turned = |lane: usize, sign: f64| {
            let (sin, cos) = f64::from(positions[t] as f32 * frequencies[lane % half]).sin_cos();
            f64::from(row[lane]) * cos + sign * f64::from(row[(lane + half) % (2 * half)]) * sin
        };
        want.extend((0..half).map(|lane| turned(lane, -1.0)));
        want.extend((half..2 * half).map(|lane| turned(lane, 1.0)));
    }
    vec![Compared { name: "rope", got: y.data().to_vec(), want }]
}

/// o = softmax(scale q k^T) v over earlier keys of the same sequence; with P = softmax, dP = do v^T and
/// dS = P (dP - sum P dP): dq = scale dS k, dk = scale dS^T q, dv = P^T do.
fn attention() -> Vec<Compared> {
    let (t, e) = (ENDS[ENDS.len() - 1], SHAPE.head_dim);
    let (qw, kvw, sharing) = (SHAPE.heads * e, SHAPE.kv_heads * e, SHAPE.heads / SHAPE.kv_heads);
    let (q, d_o, keys) = (filled(t, qw), filled(t + 2, qw), filled(2 * t, kvw));
    let d_o = Tensor::from_slice(t, qw, &d_o.data()[2 * qw..]);
    let [k, v] = [0, 1].map(|half| Tensor::from_slice(t, kvw, &keys.data()[half * t * kvw..(half + 1) * t * kvw]));
    let (mut o, mut lse) = (Tensor::zeros(t, qw), Tensor::zeros(t, SHAPE.heads));
    let packed = ENDS.as_slice().into();
    attention::forward_packed(&q, &k, &v, &packed, &SHAPE, &mut o, &mut lse);
    let (mut dq, mut dk, mut dv) = (Tensor::zeros(t, qw), Tensor::zeros(t, kvw), Tensor::zeros(t, kvw));
    attention::backward_packed(&q, &k, &v, &o, &lse, &d_o, &packed, &SHAPE, &mut dq, &mut dk, &mut dv);
    let [mut want_o, mut want_q] = [(); 2].map(|()| vec![0.0; t * qw]);
    let [mut want_k, mut want_v] = [(); 2].map(|()| vec![0.0; t * kvw]);
    let scale = f64::from(SHAPE.scale);
    for (start, i, head) in queries() {
        let (own, group) = (head * e..head * e + e, head / sharing * e);
        let (q, d_o) = (&q.row(i)[own.clone()], &d_o.row(i)[own.clone()]);
        let of = |x: &Tensor, j: usize, y: &[f32]| dot(e, |c| (x.row(j)[group + c], y[c]));
        let weights: Vec<f64> = (start..=i).map(|j| (scale * of(&k, j, q)).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let p: Vec<f64> = weights.iter().map(|w| w / sum).collect();
        let dp: Vec<f64> = (start..=i).map(|j| of(&v, j, d_o)).collect();
        let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for (j, (p, dp)) in (start..=i).zip(p.iter().zip(&dp)) {
            let ds = scale * p * (dp - mean);
            for c in 0..e {
                let (at_q, at_k) = (i * qw + head * e + c, j * kvw + group + c);
                want_o[at_q] += p * f64::from(v.row(j)[group + c]);
                want_q[at_q] += ds * f64::from(k.row(j)[group + c]);
                want_k[at_k] += ds * f64::from(q[c]);
                want_v[at_k] += p * f64::from(d_o[c]);
            }
        }
    }
    let of = |name, got: &Tensor, want| Compared { name, got: got.data().to_vec(), want };
    vec![
        of("attention", &o, want_o),
        of("attention's gradient of queries", &dq, want_q),
        of("attention's gradient of keys", &dk, want_k),
        of("attention's gradient of values", &dv, want_v),
    ]
}

/// The first token of the sequence, the token and the head of each query.
fn queries() -> impl Iterator<Item = (usize, usize, usize)> {
    let tokens = ENDS.windows(2).flat_map(|ends| (ends[0]..ends[1]).map(move |i| (ends[0], i)));
    tokens.flat_map(|(start, i)| (0..SHAPE.heads).map(move |head| (start, i, head)))
}

/// y = silu(gate) up and its gradients
fn gates() -> Vec<Compared> {
    let (gate, up) = (filled(ROWS, WIDTH), filled(ROWS + 3, WIDTH));
    let up = Tensor::from_slice(ROWS, WIDTH, &up.data()[3 * WIDTH..]);
    let (mut y, mut dgate, mut dup) = (gate.clone(), gate.clone(), gate.clone());
    glu::forward(Activation::Silu, &gate, &up, &mut y);
    glu::backward(Activation::Silu, &gate, &up, &up, &mut dgate, &mut dup);
    let each = |f: &dyn Fn(f64, f64, f64) -> f64| -> Vec<f64> {
        let values = gate.data().iter().zip(up.data()).map(|(g, u)| (f64::from(*g), f64::from(*u)));
        values.map(|(g, u)| f(g, 1.0 / (1.0 + (-g).exp()), u)).collect()
    };
    vec![
        Compared { name: "gate", got: y.data().to_vec(), want: each(&|g, s, u| g * s * u) },
        Compared {
            name: "gate backward",
            got: dgate.data().to_vec(),
            want: each(&|g, s, u| u * u * s * (1.0 + g * (1.0 - s))),
        },
    ]
}

/// log softmax(h W^T) of a token
fn head() -> Compared {
    let (v, d) = (OUTPUTS, WIDTH);
    let matrix = Matrix::new(v, d, DType::F32);
    let values = matrix.weight().values.f32();
    let h = filled(ROWS, d);
    let targets: Vec<u32> = (0..ROWS).map(|i| (i * 31 % v) as u32).collect();
    let mut got = vec![0.0; ROWS];
    linear_logprob::forward(&h, matrix.weight(), &targets, 0.8, &mut got, &mut []);
    let of_row = |i: usize| {
        let logit = |r: usize| dot(d, |c| (h.row(i)[c], values[Layout::Panel.index(d, r, c)])) / f64::from(0.8f32);
        let sum: f64 = (0..v).map(|r| logit(r).exp()).sum();
        logit(targets[i] as usize) - sum.ln()
    };
    Compared { name: "log-probabilities", got, want: (0..ROWS).map(of_row).collect() }
}

/// p -= lr m' / bias1 / (sqrt(v' / bias2) + eps)
fn update() -> Compared {
    let n = 1000;
    let [p0, g, m0] = [0, 1, 2].map(|i| filled(3, n).row(i).to_vec());
    let v0: Vec<f32> = g.iter().map(|g| g.abs() + 0.01).collect();
    let (mut p, mut m, mut v) = (p0.clone(), m0.clone(), v0.clone());
    let update = adamw::Update { lr: 0.01, ..UPDATE };
    adamw::step(&mut p, &g, &mut m, &mut v, &update, 0.0);
    let [beta1, beta2] = [update.beta1, update.beta2].map(f64::from);
    let of = |i: usize| {
        let g = f64::from(g[i]) * f64::from(update.grad_scale);
        let m = beta1 * f64::from(m0[i]) + (1.0 - beta1) * g;
        let v = beta2 * f64::from(v0[i]) + (1.0 - beta2) * g * g;
        let step = m / f64::from(update.bias1) / ((v / f64::from(update.bias2)).sqrt() + f64::from(update.eps));
        f64::from(p0[i]) - f64::from(update.lr) * step
    };
    Compared { name: "AdamW", got: p, want: (0..n).map(of).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_equal_their_equations_and_one_that_does_not_is_named() {
        let check = check();
        assert!(!check.has_failed(), "{}", check.text);
        let wrong = outcome(&[("GEMM", 1e-7), ("norm", 0.25)]);
        assert!(
            wrong.has_failed() && wrong.text == "norm differs from its equation by 2.5e-1 of the norm",
            "{wrong:?}"
        );
        assert!(outcome(&[("GEMM", f64::NAN)]).has_failed());
    }
}
