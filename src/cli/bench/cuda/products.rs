//! GEMMs of a 7B shape and their gradients, exact and by cuBLASLt.

use super::bench::{Bench, Timed, Work};
use crate::cli::out::say;
use crate::device::cuda::Memory;
use crate::device::cuda::matmul::{self, Addend, Matrix, MatrixMut, Way};
use crate::tensor::DType::{Bf16, F32};

pub(super) fn run(bench: &Bench) {
    let (n, k) = (bench.n(11008), bench.n(4096));
    let large = bench.n(8192);
    // The GEMMs of a layer: the output of the attention, and the two directions of the MLP.
    for (m, (n, k)) in
        [1, 16, 32, 64, 128, 512, large].into_iter().flat_map(|m| [(k, k), (n, k), (k, n)].map(|nk| (m, nk)))
    {
        let mut products = Products::for_shape(bench, m, n, k, bench.copies(2 * n * k));
        let cost = products.cost();
        for (mode, fast) in bench.modes() {
            bench.measure(&format!("product, {mode}, {m} x {n} x {k}"), cost, None, || products.forward(*fast));
        }
    }
    let products = Products::for_shape(bench, large, n, k, 1);
    let cost = products.cost();
    let (dy, mut dx, mut dw) = (bench.random(large * n), Memory::scratch(2 * large * k), Memory::zeros(4 * n * k));
    for (mode, fast) in bench.modes() {
        let name = |of: &str| format!("product, {mode}, gradient of the {of}, {large} x {n} x {k}");
        bench.measure(&name("input"), cost, None, || products.backward_input(&dy, &mut dx, *fast));
        bench.measure(&name("weight"), cost, None, || products.backward_weight(&dy, &mut dw, *fast));
    }
}

/// The backend of a GEMM. The mode is off, so GEMMs that are not explicitly fast are exact.
fn way(fast: bool) -> Way {
    if fast { Way::Fast } else { Way::Chosen }
}

/// The GEMMs of one shape: y (m, n) = x (m, k) W (n, k)^T and its gradients. Several W take turns.
pub(super) struct Products {
    mnk: [usize; 3],
    x: Memory,
    w: Vec<Memory>,
    turn: usize,
    y: Memory,
}

impl Products {
    pub fn for_shape(bench: &Bench, m: usize, n: usize, k: usize, weights: usize) -> Self {
        let w = (0..weights).map(|_| bench.random(n * k)).collect();
        Self { mnk: [m, n, k], x: bench.random(m * k), w, turn: 0, y: Memory::scratch(2 * m * n) }
    }

    pub fn cost(&self) -> Work {
        let [m, n, k] = self.mnk;
        Work::from_bytes(2.0 * (n * k + m * (n + k)) as f64, 2.0 * (m * n * k) as f64)
    }

    pub fn forward(&mut self, fast: bool) {
        let [m, n, k] = self.mnk;
        self.turn = (self.turn + 1) % self.w.len();
        let (x, w) = (Matrix::new(self.x.view(Bf16), m, k), Matrix::new(self.w[self.turn].view(Bf16), n, k));
        let y = MatrixMut::new(self.y.view_mut(Bf16), m, n);
        matmul::forward(way(fast), x, w, None, Addend::Nothing, y);
    }

    fn backward_input(&self, dy: &Memory, dx: &mut Memory, fast: bool) {
        let [m, n, k] = self.mnk;
        let (dy, dx) = (Matrix::new(dy.view(Bf16), m, n), MatrixMut::new(dx.view_mut(Bf16), m, k));
        matmul::backward_input(way(fast), dy, Matrix::new(self.w[0].view(Bf16), n, k), dx, false);
    }

    fn backward_weight(&self, dy: &Memory, dw: &mut Memory, fast: bool) {
        let [m, n, k] = self.mnk;
        let (dy, dw) = (Matrix::new(dy.view(Bf16), m, n), MatrixMut::new(dw.view_mut(F32), n, k));
        matmul::backward_weight(way(fast), dy, Matrix::new(self.x.view(Bf16), m, k), dw);
    }
}

/// The denominators: a large copy, and a large GEMM by the faster of the backends.
pub(super) fn peaks(bench: &mut Bench, fast: &Result<String, String>) {
    let len = bench.n(1 << 14).pow(2);
    let (from, mut to) = (bench.random_f32(len), Memory::scratch(4 * len));
    let copied = bench.seconds(|| to.view_mut(F32).copy_from(from.view(F32)));
    let copy_cost = Work::from_bytes(8.0 * len as f64, 0.0);
    bench.copy = copy_cost.bytes / copied.median;
    let n = bench.n(8192);
    let mut large = Products::for_shape(bench, n, n, n, 1);
    let cost = large.cost();
    let done: Vec<(&str, Timed)> =
        bench.modes().iter().map(|(mode, fast)| (*mode, bench.seconds(|| large.forward(*fast)))).collect();
    let best = done.iter().map(|(_, timed)| timed.median).fold(f64::INFINITY, f64::min);
    bench.product = cost.flops() / best;
    if !bench.args.json {
        let name = &bench.gpu.properties().name;
        say!("cuda: {name}, kernels from {}, medians of {}", bench.gpu.origin(), bench.repeats());
        match fast {
            Ok(library) => {
                let faster = done.iter().find(|(_, timed)| timed.median <= best).map_or("exact", |(mode, _)| mode);
                say!("GEMM: exact, and fast by {library}; shares are relative to the {faster} GEMM of {n} x {n} x {n}");
            }
            Err(why) => say!("GEMM: exact only, {why}; shares are relative to the GEMM of {n} x {n} x {n}"),
        }
        say!("{:<54}  median ms   +-     GB/s  TFLOP/s   copy  prod.  target", "work");
    }
    bench.show(&format!("copy of {} MiB", len >> 18), copy_cost, None, copied);
    for (mode, timed) in done {
        bench.show(&format!("product, {mode}, {n} x {n} x {n}"), cost, None, timed);
    }
}
