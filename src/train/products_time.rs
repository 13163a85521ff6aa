//! How long a job's matrix products take on this GPU, with each of the two who compute them.

use crate::device::cuda::matmul::{self, Matrix, MatrixMut};
use crate::device::cuda::{Memory, fast, gpu};
use crate::model::{Arch, Head, ParamSpec, ParamTable, TensorPart};
use crate::plan::head::Cut;
use crate::tensor::DType;
use std::time::Instant;

/// Seconds of products of `tokens` tokens through all layers and the head, exact and fast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    pub tokens: usize,
    pub forward: [f64; 2],
    /// Of the gradients of input and matrix.
    pub backward: [f64; 2],
}

/// Looks at each, of which the middle one counts; and what all looks together may take, unless one alone takes longer.
const LOOKS: usize = 3;
const BUDGET_S: f64 = 1.5;
/// Rows of a head that are measured; more of them take as much longer.
const HEAD_ROWS_MAX: usize = 16384;
/// Values that look random are made at the host, so often; the rest are copies.
const MADE_UP: usize = 1 << 18;

/// A product of the model: how many of it there are, and its shape.
struct Shape {
    count: f64,
    m: usize,
    n: usize,
    k: usize,
}

/// Measures the products of `arch`, cut as on `part`, for `tokens` tokens.
pub fn measure(arch: &Arch, part: TensorPart, tokens: usize) -> Measured {
    let (start, shapes) = (Instant::now(), shapes(arch, part, tokens));
    let mut all = Measured { tokens, forward: [0.0; 2], backward: [0.0; 2] };
    let each = BUDGET_S / shapes.len() as f64;
    for (i, shape) in shapes.iter().enumerate() {
        let mut room = Room::new(shape);
        let until = each * (i + 1) as f64;
        for (mode, is_fast) in [(0, false), (1, true)] {
            fast::turn(is_fast).expect("the library was opened");
            all.forward[mode] += shape.count * seconds(start, until, || room.forward());
            all.backward[mode] += shape.count * seconds(start, until, || room.backward());
        }
    }
    fast::turn(false).expect("it can always be turned off");
    gpu().trim();
    all
}

/// The middle of some looks, behind one that is not counted: a first call looks for its kernel.
fn seconds(start: Instant, until: f64, mut work: impl FnMut()) -> f64 {
    let first = gpu().seconds(&mut work);
    let mut looks = Vec::new();
    while looks.len() < LOOKS && (looks.is_empty() || start.elapsed().as_secs_f64() + first < until) {
        looks.push(gpu().seconds(&mut work));
    }
    looks.sort_unstable_by(f64::total_cmp);
    looks[looks.len() / 2]
}

/// The matrices of one block, as often as there are blocks, and the head's. What is equal is measured once.
fn shapes(arch: &Arch, part: TensorPart, tokens: usize) -> Vec<Shape> {
    let one = Arch { layers: 1, windows: arch.windows[..1].to_vec(), ..arch.clone() };
    let table = ParamTable::part(&one, Head::LanguageModel, part);
    let in_block = |spec: &&ParamSpec| spec.name.contains(".layers.") && spec.decays();
    let mut all: Vec<Shape> = Vec::new();
    for spec in table.specs().iter().filter(in_block) {
        let (n, k) = spec.dims();
        match all.iter_mut().find(|shape| (shape.n, shape.k) == (n, k)) {
            Some(shape) => shape.count += arch.layers as f64,
            None => all.push(Shape { count: arch.layers as f64, m: tokens, n, k }),
        }
    }
    let v = part.widest(arch.vocabulary).max(1);
    let (m, n) = (Cut { cpu: false, fast: false, v }.trained(tokens).max(1), v.min(HEAD_ROWS_MAX));
    let count = tokens as f64 / m as f64 * (v as f64 / n as f64);
    all.push(Shape { count, m, n, k: arch.width });
    all
}

/// Factors and results of a product and its gradients.
struct Room {
    mnk: [usize; 3],
    x: Memory,
    w: Memory,
    dy: Memory,
    y: Memory,
    dx: Memory,
    dw: Memory,
}

impl Room {
    fn new(shape: &Shape) -> Self {
        let &Shape { m, n, k, .. } = shape;
        let wide = n.next_multiple_of(8);
        Self {
            mnk: [m, n, k],
            x: made_up(m * k),
            w: made_up(n * k),
            dy: made_up(m * wide),
            y: Memory::scratch(2 * m * wide),
            dx: Memory::scratch(2 * m * k),
            dw: Memory::zeros(4 * n * k),
        }
    }

    fn forward(&mut self) {
        let [m, n, k] = self.mnk;
        let (x, w) = (Matrix::new(self.x.view(DType::Bf16), m, k), Matrix::new(self.w.view(DType::Bf16), n, k));
        let y = MatrixMut { values: self.y.view_mut(DType::Bf16), rows: m, width: n, stride: n.next_multiple_of(8) };
        matmul::forward(x, w, None, y, false);
    }

    fn backward(&mut self) {
        let [m, n, k] = self.mnk;
        let (x, w) = (Matrix::new(self.x.view(DType::Bf16), m, k), Matrix::new(self.w.view(DType::Bf16), n, k));
        let dy = Matrix { values: self.dy.view(DType::Bf16), rows: m, width: n, stride: n.next_multiple_of(8) };
        matmul::backward_input(dy, w, MatrixMut::new(self.dx.view_mut(DType::Bf16), m, k), false);
        matmul::backward_weight(dy, x, MatrixMut::new(self.dw.view_mut(DType::F32), n, k));
    }
}

/// bf16 values in -1..1: products of zeros would draw less power, and clocks follow power.
fn made_up(len: usize) -> Memory {
    let made = len.min(MADE_UP);
    let bits = super::trial::numbers(5).take(made).map(|x| half::bf16::from_f32(x).to_bits());
    let first = Memory::of(&bits.collect::<Vec<u16>>());
    let mut all = Memory::scratch(2 * len);
    for start in (0..len).step_by(made.max(1)) {
        let end = len.min(start + made);
        all.view_mut(DType::Bf16).part(start..end).copy_from(first.view(DType::Bf16).part(0..end - start));
    }
    all
}
