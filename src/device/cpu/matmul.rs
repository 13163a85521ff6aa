//! y = x W^T and its gradients on panels of 32 outputs (`LANES`): [n/32][k rounded up to even][32].

use crate::device::cpu::pool::{Shares, pool, share};
use crate::device::simd::{level, leveled};

/// Outputs of one panel.
pub const LANES: usize = 32;

/// The values of a weight matrix in panels.
#[derive(Clone, Copy, Debug)]
pub enum PanelValues<'a> {
    F32(&'a [f32]),
    /// Two neighbouring k interleaved: [n/32][k/2][32][2].
    Bf16(&'a [u16]),
}

/// A weight matrix W[n][k] in panels.
#[derive(Clone, Copy, Debug)]
pub struct Panels<'a> {
    pub n: usize,
    pub k: usize,
    pub values: PanelValues<'a>,
}

impl Panels<'_> {
    pub fn is_bf16(&self) -> bool {
        matches!(self.values, PanelValues::Bf16(_))
    }
}

/// The nearest bf16, ties to even, widened again.
#[inline(always)]
pub fn round_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    f32::from_bits(if x.is_nan() { bits | 0x0040_0000 } else { rounded })
}

#[inline(always)]
fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

leveled! {
    fn row_f32(x: &[f32], panel: &[f32], out: &mut [f32; LANES]) {
        let mut acc = [0.0f32; LANES];
        for (&x, w) in x.iter().zip(panel.as_chunks::<LANES>().0) {
            for j in 0..LANES {
                acc[j] = x.mul_add(w[j], acc[j]);
            }
        }
        *out = acc;
    }
}

leveled! {
    fn row_bf16(x: &[f32], panel: &[u16], out: &mut [f32; LANES]) {
        let mut acc = [0.0f32; LANES];
        for (x, w) in x.chunks(2).zip(panel.as_chunks::<{ 2 * LANES }>().0) {
            let even = round_bf16(x[0]);
            let odd = if x.len() > 1 { round_bf16(x[1]) } else { 0.0 };
            for j in 0..LANES {
                acc[j] = odd.mul_add(widen(w[2 * j + 1]), acc[j]);
                acc[j] = even.mul_add(widen(w[2 * j]), acc[j]);
            }
        }
        *out = acc;
    }
}

/// y[m][n] (+)= sum_k x[m][k] W[n][k] + bias[n]
pub fn forward(x: &[f32], m: usize, w: &Panels, bias: Option<&[f32]>, y: &mut [f32], add: bool) {
    let level = level();
    let (n, k, stride) = (w.n, w.k, LANES * w.k.next_multiple_of(2));
    let out = Shares::new(y);
    pool().ranges(n.div_ceil(LANES), 1, 0, &|panels| {
        for p in panels {
            for i in 0..m {
                let mut acc = [0.0; LANES];
                match w.values {
                    PanelValues::F32(v) => {
                        row_f32(level, &x[i * k..(i + 1) * k], &v[p * stride..(p + 1) * stride], &mut acc)
                    }
                    PanelValues::Bf16(v) => {
                        row_bf16(level, &x[i * k..(i + 1) * k], &v[p * stride..(p + 1) * stride], &mut acc)
                    }
                }
                let cols = p * LANES..n.min((p + 1) * LANES);
                // SAFETY: panels are disjoint between shares, so are their columns of a row.
                let y = unsafe { out.slice(i * n + cols.start..i * n + cols.end) };
                for (j, y) in y.iter_mut().enumerate() {
                    let value = acc[j] + bias.map_or(0.0, |b| b[cols.start + j]);
                    *y = if add { *y + value } else { value };
                }
            }
        }
    });
}

leveled! {
    fn input_row(dy: &[f32], w: &Panels, dx: &mut [f32]) {
        let stride = LANES * w.k.next_multiple_of(2);
        for (p, dy) in dy.chunks(LANES).enumerate() {
            let mut lanes = [0.0f32; LANES];
            lanes[..dy.len()].copy_from_slice(dy);
            match w.values {
                PanelValues::F32(v) => {
                    for (dx, w) in dx.iter_mut().zip(v[p * stride..(p + 1) * stride].as_chunks::<LANES>().0) {
                        for j in 0..LANES {
                            *dx = lanes[j].mul_add(w[j], *dx);
                        }
                    }
                }
                PanelValues::Bf16(v) => {
                    for (c, dx) in dx.iter_mut().enumerate() {
                        for j in 0..LANES {
                            let w = widen(v[p * stride + c / 2 * 2 * LANES + 2 * j + c % 2]);
                            *dx = round_bf16(lanes[j]).mul_add(w, *dx);
                        }
                    }
                }
            }
        }
    }
}

/// dx[m][k] (+)= sum_n dy[m][n] W[n][k]
pub fn backward_input(dy: &[f32], m: usize, w: &Panels, dx: &mut [f32], add: bool) {
    let level = level();
    let (n, k) = (w.n, w.k);
    let out = Shares::new(dx);
    pool().ranges(m, 1, 0, &|rows| {
        for i in rows {
            // SAFETY: rows are disjoint between shares.
            let dx = unsafe { out.slice(i * k..(i + 1) * k) };
            if !add {
                dx.fill(0.0);
            }
            input_row(level, &dy[i * n..(i + 1) * n], w, dx);
        }
    });
}

leveled! {
    fn weight_rank_one(dy: &[f32; LANES], x: &[f32], bf16: bool, dw: &mut [f32]) {
        for (&x, dw) in x.iter().zip(dw.as_chunks_mut::<LANES>().0) {
            let x = if bf16 { round_bf16(x) } else { x };
            for j in 0..LANES {
                let dy = if bf16 { round_bf16(dy[j]) } else { dy[j] };
                dw[j] = x.mul_add(dy, dw[j]);
            }
        }
    }
}

/// dW[n][k] += sum_m dy[m][n] x[m][k], dW in f32 panels
pub fn backward_weight(dy: &[f32], x: &[f32], m: usize, n: usize, k: usize, dw: &mut [f32], bf16: bool) {
    let level = level();
    let stride = LANES * k.next_multiple_of(2);
    let out = Shares::new(dw);
    pool().ranges(n.div_ceil(LANES), 1, 0, &|panels| {
        for p in panels {
            // SAFETY: panels are disjoint between shares.
            let dw = unsafe { out.slice(p * stride..(p + 1) * stride) };
            let cols = p * LANES..n.min((p + 1) * LANES);
            for i in 0..m {
                let mut lanes = [0.0; LANES];
                lanes[..cols.len()].copy_from_slice(&dy[i * n + cols.start..i * n + cols.end]);
                weight_rank_one(level, &lanes, &x[i * k..(i + 1) * k], bf16, dw);
            }
        }
    });
}

/// db[n] += sum_m dy[m][n], rows in order
pub fn backward_bias(dy: &[f32], m: usize, db: &mut [f32]) {
    let n = db.len();
    let threads = pool().threads();
    let out = Shares::new(db);
    pool().run(&|id| {
        let cols = share(n, 16, id, threads);
        // SAFETY: shares of columns are disjoint.
        let db = unsafe { out.slice(cols.clone()) };
        for i in 0..m {
            for (db, dy) in db.iter_mut().zip(&dy[i * n + cols.start..i * n + cols.end]) {
                *db += dy;
            }
        }
    });
}
