//! y = x W^T and its gradients.
//!
//! Bitwise guarantees: every output is one ascending chain of fused multiply-adds. So it does not depend on the row
//! count, on its row's position, on threads, or on the instruction level. With bf16 a pair of factors is two
//! multiply-adds, odd index first, as in `vdpbf16ps`. That instruction flushes denormals and the other levels do not,
//! so levels may differ there. Gradients have the same guarantees: dx for each row, dW for a fixed split of m.

use super::check;
use crate::device::cpu::glu::Activation;
use crate::device::cpu::{matmul as cpu, matmul_weight};
use crate::device::cuda::matmul::{Addend, Matrix, MatrixMut, Way};
use crate::device::{Device, cuda, null};
use crate::sys::trace;
use crate::tensor::arena::Buffer;
use crate::tensor::{DType, Layout, Operand, PANEL, Slice, SliceMut, Tensor, Weight, WeightMut};

/// The use of the previous contents of `y` in `forward`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Into {
    /// y = ...
    Overwrite,
    /// y += ... (the residual stream): the finished sum is added to y with one rounding.
    Add,
}

const _: () = assert!(cpu::LANES == PANEL, "kernels and layout agree on the panel width");

/// The weight for the CPU kernels, which panic if the values do not fill the layout.
pub(super) fn panels<'a>(op: &str, w: &Weight<'a>) -> cpu::Panels<'a> {
    assert!(w.layout == Layout::Panel, "{op}: W[{}][{}] must be in panel layout", w.n, w.k);
    let values = match w.values {
        Slice::F32(v) => cpu::PanelValues::F32(v),
        Slice::Bf16(v) => cpu::PanelValues::Bf16(v),
        Slice::Cuda(view) => panic!("{op}: the CPU needs {view:?}"),
    };
    cpu::Panels { n: w.n, k: w.k, values }
}

/// The weight for GPU kernels. Panics if the values do not fill the layout.
pub(super) fn rows<'a>(op: &str, w: &Weight<'a>) -> Matrix<'a> {
    let Slice::Cuda(view) = w.values else { panic!("{op}: the GPU needs W[{}][{}], which is on the CPU", w.n, w.k) };
    assert!(w.layout == Layout::Row, "{op}: W[{}][{}] must be in row layout", w.n, w.k);
    let needed = Layout::Row.len(w.n, w.k);
    assert!(view.len() == needed, "{op}: W[{}][{}] has {} values, but needs {needed}", w.n, w.k, view.len());
    Matrix::new(view.part(0..w.n * w.k), w.n, w.k)
}

fn is_values(w: &Operand) -> bool {
    matches!(w, Operand::Values(_))
}

fn values<'a>(op: &str, w: Operand<'a>) -> Weight<'a> {
    let Operand::Values(w) = w else { panic!("{op}: there is no kernel for {w:?}") };
    w
}

pub(super) fn matrix(x: &Tensor) -> Matrix<'_> {
    Matrix::new(x.cuda(), x.rows(), x.width())
}

pub(super) fn matrix_mut(x: &mut Tensor) -> MatrixMut<'_> {
    let (rows, width) = (x.rows(), x.width());
    MatrixMut::new(x.cuda_mut(), rows, width)
}

/// A gradient on a GPU, without padding.
pub(super) fn gradient(dw: WeightMut<'_>) -> MatrixMut<'_> {
    let WeightMut { n, k, values, .. } = dw;
    MatrixMut::new(values.cuda().part(0..n * k), n, k)
}

pub(super) fn check_gradient(op: &str, dw: &WeightMut, n: usize, k: usize) {
    let wanted = if matches!(dw.values, SliceMut::F32(_)) { Layout::Panel } else { Layout::Row };
    assert!(dw.layout == wanted, "{op}: dW[{}][{}] must be in {wanted:?} layout", dw.n, dw.k);
    assert!(dw.n == n && dw.k == k, "{op}: dW must be [{n}][{k}], got [{}][{}]", dw.n, dw.k);
    let needed = wanted.len(n, k);
    let len = dw.values.len();
    assert!(len == needed, "{op}: dW[{n}][{k}] has {len} values, but its layout needs {needed}");
}

/// `cpu::forward` on flat rows, with its scratch.
pub(super) fn forward_rows<const N: usize>(x: &[f32], m: usize, outputs: [cpu::Output; N], addend: cpu::Addend) {
    let len = cpu::forward_scratch(m, &outputs[0].w);
    // f32 needs none, and decoding calls this for microseconds of work.
    let mut scratch = (len > 0).then(|| Buffer::scratch(len));
    cpu::forward(x, m, outputs, addend, scratch.as_deref_mut().unwrap_or_default());
}

/// `cpu::backward_input` on flat rows, with its scratch.
pub(super) fn backward_input_rows(
    dy: &[f32],
    m: usize,
    w: &cpu::Panels,
    transposed: Option<&[f32]>,
    dx: &mut [f32],
    add: bool,
) {
    let mut scratch = Buffer::scratch(cpu::backward_input_scratch(m, w, transposed.is_some()));
    cpu::backward_input(dy, m, w, transposed, dx, add, &mut scratch);
}

/// `matmul_weight::backward_weight` on flat rows, with its scratch.
pub(super) fn backward_weight_rows(dy: &[f32], x: &[f32], m: usize, n: usize, k: usize, dw: &mut [f32], bf16: bool) {
    let mut scratch = Buffer::scratch(matmul_weight::backward_weight_scratch(m, k, bf16));
    matmul_weight::backward_weight(dy, x, m, n, k, dw, bf16, &mut scratch);
}

/// y[m][n] (+)= (sum_k x[m][k] W[n][k]) + bias[n], with one ascending-k chain of fused multiply-adds per output.
/// W is in panel layout, f32 or bf16. For bf16, x is rounded to bf16 and accumulation is f32.
pub fn forward<'a>(
    x: &Tensor,
    w: impl std::convert::Into<Operand<'a>>,
    bias: Option<Slice>,
    y: &mut Tensor,
    into: Into,
) {
    products(x, [Output { w: w.into(), bias, y }], None, into);
}

/// y[m][n] = c[m][n] + ((sum_k x[m][k] W[n][k]) + bias[n]): the residual stream if its previous value is kept. The bits
/// are those of a copy of c to y and `forward` with `Into::Add`. Here y shares no memory with c, as their borrows
/// ensure, and its contents are not read.
pub fn forward_onto<'a>(
    c: &Tensor,
    x: &Tensor,
    w: impl std::convert::Into<Operand<'a>>,
    bias: Option<Slice>,
    y: &mut Tensor,
) {
    let w = w.into();
    check(FORWARD, "c", c, x.rows(), w.dims().0);
    products(x, [Output { w, bias, y }], Some(c), Into::Overwrite);
}

/// `forward_onto` with c, else `forward`.
fn products<const N: usize>(x: &Tensor, outputs: [Output; N], c: Option<&Tensor>, into: Into) {
    let m = x.rows();
    for Output { w, bias, y } in &outputs {
        let (n, k) = w.dims();
        check(FORWARD, "x", x, m, k);
        check(FORWARD, "y", y, m, n);
        if let Some(bias) = bias {
            assert!(bias.len() == n, "{FORWARD}: the bias must have {n} values, got {}", bias.len());
        }
        note(m, w);
    }
    let n = || outputs.iter().map(|output| output.w.dims().0).sum::<usize>();
    let _span = trace::operation("matmul", "m n k", || [m, n(), x.width()]);
    match x.device() {
        Device::Cpu => {
            let addend = match c {
                Some(c) => cpu::Addend::Values(c.data()),
                None if into == Into::Add => cpu::Addend::Result,
                None => cpu::Addend::Nothing,
            };
            let on_cpu = |Output { w, bias, y }| {
                let (w, bias) = (panels(FORWARD, &values(FORWARD, w)), bias.map(Slice::f32));
                cpu::Output { w, bias, y: Tensor::data_mut(y) }
            };
            forward_rows(x.data(), m, outputs.map(on_cpu), addend);
        }
        Device::Cuda => {
            let addend = match c {
                Some(c) => Addend::Matrix(matrix(c)),
                None if into == Into::Add => Addend::Result,
                None => Addend::Nothing,
            };
            on_gpu(x, outputs, addend);
        }
    }
}

/// GEMMs on the GPU: in one launch, or in one each if a matrix is in nf4.
fn on_gpu<const N: usize>(x: &Tensor, outputs: [Output; N], c: Addend) {
    if outputs.iter().all(|output| is_values(&output.w)) {
        let together = |Output { w, bias, y }| {
            let (w, bias) = (rows(FORWARD, &values(FORWARD, w)), bias.map(Slice::cuda));
            cuda::matmul::Output { w, bias, y: matrix_mut(y) }
        };
        return cuda::matmul::forward_each(Way::Chosen, matrix(x), outputs.map(together), c);
    }
    for Output { w, bias, y } in outputs {
        let (bias, y) = (bias.map(Slice::cuda), matrix_mut(y));
        match w {
            Operand::Values(w) => cuda::matmul::forward(Way::Chosen, matrix(x), rows(FORWARD, &w), bias, c, y),
            Operand::Nf4(w) => w.product(matrix(x), bias, c, y),
        }
    }
}

const FORWARD: &str = "matmul::forward";

/// Counts the GEMM of `m` rows with W or its transpose for a plan.
fn note(m: usize, w: &Operand) {
    let (n, k) = w.dims();
    null::note(null::GEMM, 2.0 * (m * n * k) as f64, w.bytes_read(m) as f64);
}

/// One of several GEMMs of the same x: y = x W^T + bias.
#[derive(Debug)]
pub struct Output<'a> {
    pub w: Operand<'a>,
    pub bias: Option<Slice<'a>>,
    pub y: &'a mut Tensor,
}

/// `forward`, bit for bit, for several W of one width and dtype with one call to the threads. With few rows such a call
/// costs as much as a small GEMM.
pub fn forward_each<const N: usize>(x: &Tensor, outputs: [Output; N]) {
    products(x, outputs, None, Into::Overwrite);
}

/// A matrix that x is multiplied by, and a bias.
#[derive(Clone, Copy, Debug)]
pub struct Factor<'a> {
    pub w: Operand<'a>,
    pub bias: Option<Slice<'a>>,
}

/// y = act(gate) * up from two GEMMs of x, in one GPU kernel. Returns false, and does nothing, if there is no such
/// kernel.
pub(super) fn forward_glu(activation: Activation, x: &Tensor, factors: [Factor; 2], y: &mut Tensor) -> bool {
    const OP: &str = "matmul::forward_glu";
    if x.device() == Device::Cpu || !factors.iter().all(|factor| is_values(&factor.w)) {
        return false;
    }
    for Factor { w, .. } in &factors {
        let (n, k) = w.dims();
        check(OP, "x", x, x.rows(), k);
        check(OP, "y", y, x.rows(), n);
    }
    let on_gpu = factors.map(|Factor { w, bias }| {
        let (w, bias) = (rows(OP, &values(OP, w)), bias.map(Slice::cuda));
        cuda::matmul::Factor { w, bias }
    });
    let _span = trace::operation("matmul glu", "m n k", || [x.rows(), 2 * y.width(), x.width()]);
    let is_done = cuda::matmul::glu(Way::Chosen, activation, matrix(x), on_gpu, matrix_mut(y));
    if is_done {
        for factor in &factors {
            note(x.rows(), &factor.w);
        }
    }
    is_done
}

/// dx[m][k] (+)= sum_n dy[m][n] W[n][k]. With `Into::Add` the chain starts from dx. With a bf16 W, dy is rounded to
/// bf16.
pub fn backward_input(dy: &Tensor, w: Weight, dx: &mut Tensor, into: Into) {
    const OP: &str = "matmul::backward_input";
    let m = dy.rows();
    check(OP, "dy", dy, m, w.n);
    check(OP, "dx", dx, m, w.k);
    note(m, &w.into());
    let _span = trace::operation("matmul dx", "m n k", || [m, w.n, w.k]);
    match dy.device() {
        Device::Cpu => backward_input_rows(dy.data(), m, &panels(OP, &w), None, dx.data_mut(), into == Into::Add),
        Device::Cuda => {
            cuda::matmul::backward_input(Way::Chosen, matrix(dy), rows(OP, &w), matrix_mut(dx), into == Into::Add);
        }
    }
}

/// dW[n][k] += sum_m dy[m][n] x[m][k]. The chain starts from dW. Padding is not touched. With
/// `DType::Bf16` the factors are rounded to bf16, and sums stay f32.
pub fn backward_weight(dy: &Tensor, x: &Tensor, dw: WeightMut, dtype: DType) {
    const OP: &str = "matmul::backward_weight";
    let (m, n, k) = (dy.rows(), dy.width(), x.width());
    check(OP, "x", x, m, k);
    check_gradient(OP, &dw, n, k);
    null::note(null::GEMM, 2.0 * (m * n * k) as f64, (n * k * dtype.bytes()) as f64);
    let _span = trace::operation("matmul dW", "m n k", || [m, n, k]);
    match dy.device() {
        Device::Cpu => backward_weight_rows(dy.data(), x.data(), m, n, k, dw.values.f32(), dtype == DType::Bf16),
        Device::Cuda => cuda::matmul::backward_weight(Way::Chosen, matrix(dy), matrix(x), gradient(dw)),
    }
}

/// db[n] += sum_m dy[m][n]
pub fn backward_bias<'a>(dy: &Tensor, db: impl std::convert::Into<SliceMut<'a>>) {
    let db = db.into();
    assert!(
        db.len() == dy.width(),
        "matmul::backward_bias: db has {} values, but dy is ({}, {})",
        db.len(),
        dy.rows(),
        dy.width()
    );
    match dy.device() {
        Device::Cpu => matmul_weight::backward_bias(dy.data(), dy.rows(), db.f32()),
        Device::Cuda => cuda::matmul::backward_bias(matrix(dy), db.cuda()),
    }
}
