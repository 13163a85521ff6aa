//! y = act(gate) * up

use super::exp::exp;
use super::pool::{Shares, pool};
use crate::device::simd::{level, leveled};

/// The function of a gated linear unit's gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// SwiGLU: silu(x) = x s with s = 1 / (1 + exp(-x)), and its slope s (1 + x (1 - s)).
    Silu,
    /// GeGLU with the tanh form of GELU (arXiv:1606.08415): x (1 + tanh(u)) / 2 = x s with s = 1 / (1 + exp(-2 u)) and
    /// u = sqrt(2 / pi) (x + 0.044715 x^3). Its slope is s (1 + 2 x (1 - s) u').
    GeluTanh,
    /// A gate alone: s = 1 / (1 + exp(-x)), with slope s (1 - s).
    Sigmoid,
    /// The experts of gpt-oss: y = (u + 1) g s with s = 1 / (1 + exp(-alpha g)), where g = min(gate, limit) and u is up
    /// within +-limit. The slopes outside the limits are 0. No GPU kernel supports it.
    ClampedSilu { alpha: f32, limit: f32 },
}

impl Activation {
    /// The name in config.json.
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu | Self::ClampedSilu { .. } => "silu",
            Self::GeluTanh => "gelu_pytorch_tanh",
            Self::Sigmoid => "sigmoid",
        }
    }
}

/// 2 sqrt(2 / pi)
const GELU: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;
const SQUARE_MAX: f32 = 1e4;

/// The number of elements below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 1 << 13;

leveled! {
    fn silu_forward(gate: &[f32], up: &[f32], y: &mut [f32]) {
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            *y = gate / (1.0 + exp(-gate)) * up;
        }
    }
}

leveled! {
    fn gelu_forward(gate: &[f32], up: &[f32], y: &mut [f32]) {
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            *y = gate / (1.0 + exp(-GELU * (gate + CUBIC * gate * gate * gate))) * up;
        }
    }
}

leveled! {
    fn sigmoid_forward(gate: &[f32], up: &[f32], y: &mut [f32]) {
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            *y = up / (1.0 + exp(-gate));
        }
    }
}

/// x, or the nearer end of the range from `low` to `high`. NaN stays.
#[inline(always)]
fn within(x: f32, low: f32, high: f32) -> f32 {
    if x > high {
        high
    } else if x < low {
        low
    } else {
        x
    }
}

leveled! {
    fn clamped_forward(alpha: f32, limit: f32, gate: &[f32], up: &[f32], y: &mut [f32]) {
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            let (gate, up) = (within(*gate, f32::NEG_INFINITY, limit), within(*up, -limit, limit));
            *y = gate / (1.0 + exp(-alpha * gate)) * (up + 1.0);
        }
    }
}

pub fn forward(activation: Activation, gate: &[f32], up: &[f32], y: &mut [f32]) {
    assert!(up.len() == gate.len() && y.len() == gate.len());
    let level = level();
    pool().parts(y, 1024, gate.len() < SERIAL_MAX, &|range, y| match activation {
        Activation::Silu => silu_forward(level, &gate[range.clone()], &up[range], y),
        Activation::GeluTanh => gelu_forward(level, &gate[range.clone()], &up[range], y),
        Activation::Sigmoid => sigmoid_forward(level, &gate[range.clone()], &up[range], y),
        Activation::ClampedSilu { alpha, limit } => {
            clamped_forward(level, alpha, limit, &gate[range.clone()], &up[range], y);
        }
    });
}

leveled! {
    fn silu_backward(gate: &[f32], up: &[f32], dy: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
        for ((((gate, up), dy), dgate), dup) in gate.iter().zip(up).zip(dy).zip(dgate).zip(dup) {
            let sigmoid = 1.0 / (1.0 + exp(-gate));
            *dgate = dy * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)));
            *dup = dy * (gate * sigmoid);
        }
    }
}

leveled! {
    fn gelu_backward(gate: &[f32], up: &[f32], dy: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
        for ((((gate, up), dy), dgate), dup) in gate.iter().zip(up).zip(dy).zip(dgate).zip(dup) {
            // Far out the slope is 0 or 1; without the limit it would be 0 times infinity.
            let square = (gate * gate).min(SQUARE_MAX);
            let sigmoid = 1.0 / (1.0 + exp(-GELU * (gate + CUBIC * gate * square)));
            let inner = GELU * (1.0 + 3.0 * CUBIC * square);
            *dgate = dy * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid) * inner));
            *dup = dy * (gate * sigmoid);
        }
    }
}

leveled! {
    fn sigmoid_backward(gate: &[f32], up: &[f32], dy: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
        for ((((gate, up), dy), dgate), dup) in gate.iter().zip(up).zip(dy).zip(dgate).zip(dup) {
            let sigmoid = 1.0 / (1.0 + exp(-gate));
            *dgate = dy * up * (sigmoid * (1.0 - sigmoid));
            *dup = dy * sigmoid;
        }
    }
}

leveled! {
    fn clamped_backward(
        alpha: f32,
        limit: f32,
        gate: &[f32],
        up: &[f32],
        dy: &[f32],
        dgate: &mut [f32],
        dup: &mut [f32],
    ) {
        for ((((gate, up), dy), dgate), dup) in gate.iter().zip(up).zip(dy).zip(dgate).zip(dup) {
            let (g, u) = (within(*gate, f32::NEG_INFINITY, limit), within(*up, -limit, limit));
            let sigmoid = 1.0 / (1.0 + exp(-alpha * g));
            let slope = dy * (u + 1.0) * (sigmoid * (1.0 + alpha * g * (1.0 - sigmoid)));
            *dgate = if *gate > limit { 0.0 } else { slope };
            *dup = if up.abs() > limit { 0.0 } else { dy * (g * sigmoid) };
        }
    }
}

pub fn backward(activation: Activation, gate: &[f32], up: &[f32], dy: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
    assert!([up.len(), dy.len(), dgate.len(), dup.len()] == [gate.len(); 4]);
    let level = level();
    let (dgate, dup) = (Shares::new(dgate), Shares::new(dup));
    pool().ranges(gate.len(), 1024, gate.len() < SERIAL_MAX, &|range| {
        // SAFETY: ranges of different shares do not overlap and lie in 0..gate.len(), the length of both.
        let (dgate, dup) = unsafe { (dgate.slice(range.clone()), dup.slice(range.clone())) };
        let (gate, up, dy) = (&gate[range.clone()], &up[range.clone()], &dy[range]);
        match activation {
            Activation::Silu => silu_backward(level, gate, up, dy, dgate, dup),
            Activation::GeluTanh => gelu_backward(level, gate, up, dy, dgate, dup),
            Activation::Sigmoid => sigmoid_backward(level, gate, up, dy, dgate, dup),
            Activation::ClampedSilu { alpha, limit } => {
                clamped_backward(level, alpha, limit, gate, up, dy, dgate, dup);
            }
        }
    });
}
