//! Mixtures of experts (arXiv:2401.04088, section 2): y = sum over the k chosen experts e of a row of g_e E_e(x).
//!
//! The rows of experts are s = t k copies of the t rows, sorted by expert, and ascending within each expert. A row's sum
//! over its experts is in ascending order of the experts, in f32.

use super::{check, matmul};
pub use crate::device::cpu::sigmoid_router::SigmoidRule;
use crate::device::cuda::experts::Choice;
use crate::device::cuda::grouped::Groups as GroupsOnGpu;
use crate::device::cuda::matmul::{self as gemm, Matrix, Way};
use crate::device::{Device, cpu, cuda, null};
use crate::dtype::DType;
use crate::sys::trace;
use crate::tensor::arena::Buffer;
use crate::tensor::{Indices, Tensor, Weight, WeightMut};
use std::borrow::Cow;
use std::sync::Arc;

/// How a router's logits become weights of experts.
#[derive(Clone, Debug)]
pub enum Rule {
    /// The probabilities of the experts with the largest logits, divided by their sum if `renormalizes`.
    Softmax { renormalizes: bool },
    /// No GPU kernel supports it.
    Sigmoid(SigmoidRule),
}

/// The experts of each row.
#[derive(Debug)]
pub struct Routing {
    /// The softmax of the router's logits, or their sigmoid (t, E).
    pub probabilities: Tensor,
    /// The weights of the chosen experts (t, k).
    pub weights: Tensor,
    rule: Rule,
    /// The choices of a GPU, which the host does not know. Then the fields below are empty.
    on_gpu: Option<Choice>,
    /// The chosen experts of each row (t, k), ascending.
    chosen: Vec<u32>,
    /// The row of each row of experts (s).
    rows: Vec<u32>,
    /// The rows of experts by expert.
    pub groups: Groups,
    /// The row of experts of each chosen one (t, k).
    places: Vec<u32>,
}

/// Rows that are sorted by expert.
#[derive(Clone, Debug)]
pub struct Groups {
    /// The rows of expert e are `ends[e]..ends[e + 1]` (E + 1); empty if only a GPU knows it.
    ends: Vec<usize>,
    /// The same on a GPU, for rows there.
    on_gpu: Option<GroupsOnGpu>,
}

impl Routing {
    /// Chooses `k` experts of each row by the router's `logits` (t, E), of equal ones those with the lowest indices.
    pub fn new(mut logits: Tensor, k: usize, rule: Rule) -> Self {
        let (t, experts) = (logits.rows(), logits.width());
        assert!(k <= experts, "experts: {k} of {experts}");
        let mut weights = logits.statistics(t, k);
        if logits.device() == Device::Cuda {
            let Rule::Softmax { renormalizes } = rule else { unreachable!("no GPU kernel has other rules") };
            let choice = Choice::new(logits.cuda_mut(), experts, renormalizes, weights.cuda_mut());
            let groups = Groups { ends: Vec::new(), on_gpu: Some(choice.groups()) };
            let ([chosen, rows, places], on_gpu) = ([(); 3].map(|()| Vec::new()), Some(choice));
            return Self { probabilities: logits, weights, rule, on_gpu, chosen, rows, groups, places };
        }
        // A null device leaves this choice, in which all experts have equally many rows.
        let mut chosen: Vec<u32> = (0..experts as u32).cycle().take(t * k).collect();
        let (scores, found) = (logits.data_mut(), weights.data_mut());
        match &rule {
            Rule::Softmax { renormalizes } => {
                cpu::router::forward(scores, experts, *renormalizes, &mut chosen, found);
            }
            Rule::Sigmoid(rule) => rule.forward(scores, &mut chosen, found),
        }
        let mut counts = vec![0; experts];
        for &e in &chosen {
            counts[e as usize] += 1;
        }
        let groups = Groups::new(counts);
        let (mut next, mut rows, mut places) = (groups.ends.clone(), vec![0; t * k], vec![0; t * k]);
        for (i, &e) in chosen.iter().enumerate() {
            let place = &mut next[e as usize];
            (rows[*place], places[i]) = ((i / k) as u32, *place as u32);
            *place += 1;
        }
        Self { probabilities: logits, weights, rule, on_gpu: None, chosen, rows, groups, places }
    }

    /// Whether the probabilities of a row sum to 1.
    pub fn is_softmax(&self) -> bool {
        matches!(self.rule, Rule::Softmax { .. })
    }

    /// The number of rows of all experts, s.
    pub fn row_count(&self) -> usize {
        self.weights.rows() * self.weights.width()
    }

    /// The chosen experts of each row (t, k), ascending. Waits for a GPU that chose.
    pub fn chosen(&self) -> Cow<'_, [u32]> {
        self.on_gpu.as_ref().map_or(Cow::Borrowed(&self.chosen), |choice| Cow::Owned(choice.chosen()))
    }

    /// The number of rows of each expert (E). Waits for a GPU that chose. On a null device all have equally many.
    pub fn counts(&self) -> Vec<usize> {
        let (rows, experts) = (self.row_count(), self.probabilities.width());
        match &self.on_gpu {
            None => self.groups.counts().collect(),
            Some(_) if null::is_active() => {
                (0..experts).map(|e| rows / experts + usize::from(e < rows % experts)).collect()
            }
            Some(choice) => choice.counts(),
        }
    }

    /// The number of rows of each expert, the sum of its probabilities p, and that of -p ln p (3, E), where a GPU chose.
    pub fn sums_on_gpu(&self) -> Option<Tensor> {
        let choice = self.on_gpu.as_ref()?;
        let mut sums = self.probabilities.as_wide(3);
        choice.sums(self.probabilities.cuda(), sums.cuda_mut());
        Some(sums)
    }

    /// The rows of x (t, d) for all experts (s, d).
    pub fn gather(&self, x: &Tensor) -> Tensor {
        let mut rows = x.as_wide(self.row_count());
        match &self.on_gpu {
            Some(choice) => cuda::copy::gather(x.cuda(), x.width(), choice.rows(), rows.cuda_mut()),
            None => super::rows::gather(x, &Indices::from(&self.rows[..]), &mut rows),
        }
        rows
    }

    /// x (t, d) = c + sum_i weight_i y[i] over the chosen experts of each row, with y (s, d). `c` is its addend, or 0. The
    /// finished sum is added with one rounding.
    pub fn combine(&self, y: &Tensor, c: Addend, x: &mut Tensor) {
        self.sum(y, Some(&self.weights), c, x);
    }

    /// The transpose of `gather`: x (t, d) = sum_i y[i] over the chosen experts of each row.
    pub fn scatter(&self, y: &Tensor, x: &mut Tensor) {
        self.sum(y, None, Addend::Nothing, x);
    }

    fn sum(&self, y: &Tensor, weights: Option<&Tensor>, c: Addend, x: &mut Tensor) {
        check("experts::combine", "y", y, self.row_count(), x.width());
        check("experts::combine", "x", x, self.weights.rows(), y.width());
        if let Some(choice) = &self.on_gpu {
            let c = match c {
                Addend::Nothing => gemm::Addend::Nothing,
                Addend::Result => gemm::Addend::Result,
                Addend::Values(c) => gemm::Addend::Matrix(matmul::matrix(c)),
            };
            return choice.combine(y.cuda(), weights.map(Tensor::cuda), c, x.cuda_mut());
        }
        let c = match c {
            Addend::Nothing => cpu::matmul::Addend::Nothing,
            Addend::Result => cpu::matmul::Addend::Result,
            Addend::Values(c) => cpu::matmul::Addend::Values(c.data()),
        };
        cpu::experts::combine(y.data(), y.width(), &self.places, weights.map(Tensor::data), c, x.data_mut());
    }

    /// The weight of each row of experts (s, 1).
    pub fn row_weights(&self) -> Tensor {
        let mut weights = self.weights.statistics(self.row_count(), 1);
        if let Some(choice) = &self.on_gpu {
            choice.spread(self.weights.cuda(), weights.cuda_mut());
            return weights;
        }
        for (&place, weight) in self.places.iter().zip(self.weights.data()) {
            weights.data_mut()[place as usize] = *weight;
        }
        weights
    }

    /// The gradient of the weights (t, k) from that of `row_weights` (s, 1).
    pub fn of_row_weights(&self, slopes: &Tensor) -> Tensor {
        let mut found = self.weights.as_wide(self.weights.rows());
        if let Some(choice) = &self.on_gpu {
            choice.collect(slopes.cuda(), found.cuda_mut());
            return found;
        }
        for (&place, slope) in self.places.iter().zip(found.data_mut()) {
            *slope = slopes.data()[place as usize];
        }
        found
    }

    /// The gradient of the router's logits (t, E), given that of the weights (t, k) and, if there is a loss of the
    /// probabilities of a softmax, its slope by the probability of each expert, the same for all rows.
    pub fn backward(&self, dweights: &Tensor, slope: Option<&[f32]>) -> Tensor {
        let (t, experts) = (self.probabilities.rows(), self.probabilities.width());
        check("experts::backward", "dweights", dweights, t, self.weights.width());
        let mut dlogits = self.probabilities.like(t, experts);
        if let Some(choice) = &self.on_gpu {
            let of_weights = [self.weights.cuda(), dweights.cuda()];
            choice.backward(self.probabilities.cuda(), of_weights, slope, dlogits.cuda_mut());
            return dlogits;
        }
        let of_weights = (&self.chosen[..], self.weights.data(), dweights.data());
        let scores = self.probabilities.data();
        match &self.rule {
            Rule::Softmax { renormalizes } => {
                cpu::router::backward(scores, experts, *renormalizes, of_weights, slope, dlogits.data_mut());
            }
            Rule::Sigmoid(rule) => rule.backward(scores, of_weights, dlogits.data_mut()),
        }
        dlogits
    }
}

impl Groups {
    /// Groups with these numbers of rows (E), for rows on a CPU.
    pub fn new(counts: Vec<usize>) -> Self {
        let mut ends = vec![0; counts.len() + 1];
        for (e, count) in counts.into_iter().enumerate() {
            ends[e + 1] = ends[e] + count;
        }
        Self { ends, on_gpu: None }
    }

    /// The same for rows on `device`.
    pub fn on(device: Device, counts: Vec<usize>) -> Self {
        let groups = Self::new(counts);
        let on_gpu = || {
            let ends: Vec<u32> = groups.ends.iter().map(|end| *end as u32).collect();
            GroupsOnGpu {
                ends: Arc::new(cuda::Memory::from_values(&ends)),
                count: ends.len() - 1,
                rows: groups.row_count(),
            }
        };
        Self { on_gpu: (device == Device::Cuda).then(on_gpu), ..groups }
    }

    /// The number of rows of all experts, s.
    pub fn row_count(&self) -> usize {
        self.on_gpu.as_ref().map_or_else(|| self.ends[self.ends.len() - 1], GroupsOnGpu::row_count)
    }

    /// The number of rows of each expert (E), if the host knows it.
    pub fn counts(&self) -> impl Iterator<Item = usize> {
        self.ends.windows(2).map(|ends| ends[1] - ends[0])
    }

    /// y (s, n) = x (s, k) W_e^T for each of several lists of one matrix for each expert.
    pub fn forward_each<const N: usize>(&self, x: &Tensor, w: [&[Weight]; N]) -> [Tensor; N] {
        const OP: &str = "experts::forward_each";
        let (s, k, bf16) = (self.row_count(), w[0][0].k, is_bf16(w[0]));
        check(OP, "x", x, s, k);
        let mut y = w.map(|w| x.like(s, w[0].n));
        for w in w {
            self.note(w);
        }
        let _span = trace::operation("experts", "rows n k", || [s, y.iter().map(Tensor::width).sum(), k]);
        if let Some(groups) = &self.on_gpu {
            let mut results = y.iter_mut();
            let lists = w.map(|w| (matrices(OP, w), matmul::matrix_mut(results.next().expect("one for each list"))));
            cuda::grouped::forward(Way::Chosen, matmul::matrix(x), groups, lists);
            return y;
        }
        let panels = w.map(|w| panels(OP, w));
        let mut scratch = Buffer::scratch(cpu::grouped::row_scratch(s, k, bf16));
        let panels = panels.each_ref().map(|panels| &panels[..]);
        cpu::grouped::forward(x.data(), &self.ends, panels, y.each_mut().map(Tensor::data_mut), false, &mut scratch);
        y
    }

    /// y (s, n) += x (s, k) W_e^T. No GPU kernel supports it.
    pub fn forward_add(&self, x: &Tensor, w: &[Weight], y: &mut Tensor) {
        const OP: &str = "experts::forward_add";
        let (s, n, k) = (self.row_count(), w[0].n, w[0].k);
        check(OP, "x", x, s, k);
        check(OP, "y", y, s, n);
        self.note(w);
        let _span = trace::operation("experts", "rows n k", || [s, n, k]);
        let mut scratch = Buffer::scratch(cpu::grouped::row_scratch(s, k, is_bf16(w)));
        cpu::grouped::forward(x.data(), &self.ends, [&panels(OP, w)], [y.data_mut()], true, &mut scratch);
    }

    /// dx (s, k) = dy (s, n) W_e, or dx += with `add`.
    pub fn backward_input(&self, dy: &Tensor, w: &[Weight], dx: &mut Tensor, add: bool) {
        const OP: &str = "experts::backward_input";
        check(OP, "dy", dy, self.row_count(), w[0].n);
        check(OP, "dx", dx, self.row_count(), w[0].k);
        self.note(w);
        let _span = trace::operation("experts dx", "rows n k", || [dy.rows(), dx.width(), dy.width()]);
        if let Some(groups) = &self.on_gpu {
            let (dy, dx) = (matmul::matrix(dy), matmul::matrix_mut(dx));
            return cuda::grouped::backward_input(Way::Chosen, dy, groups, &matrices(OP, w), dx, add);
        }
        let mut scratch = Buffer::scratch(cpu::grouped::row_scratch(dy.rows(), dy.width(), is_bf16(w)));
        cpu::grouped::backward_input(dy.data(), &self.ends, &panels(OP, w), dx.data_mut(), add, &mut scratch);
    }

    /// dW_e += dy^T x over the rows of expert e, with dy (s, n) and x (s, k), as `matmul::backward_weight`.
    pub fn backward_weight(&self, dy: &Tensor, x: &Tensor, dw: Vec<WeightMut>, dtype: DType) {
        const OP: &str = "experts::backward_weight";
        let (n, k) = (dy.width(), x.width());
        check(OP, "dy", dy, self.row_count(), n);
        check(OP, "x", x, self.row_count(), k);
        for dw in &dw {
            matmul::check_gradient(OP, dw, n, k);
        }
        null::note(null::GEMM, 2.0 * (self.row_count() * n * k) as f64, (dw.len() * n * k * dtype.bytes()) as f64);
        let _span = trace::operation("experts dW", "rows n k", || [self.row_count(), n, k]);
        if let Some(groups) = &self.on_gpu {
            let dw = dw.into_iter().map(matmul::gradient).collect();
            return cuda::grouped::backward_weight(Way::Chosen, matmul::matrix(dy), matmul::matrix(x), groups, dw);
        }
        let mut dw: Vec<&mut [f32]> = dw.into_iter().map(|dw| dw.values.f32()).collect();
        cpu::grouped::backward_weight(dy.data(), x.data(), &self.ends, [n, k], &mut dw, dtype == DType::Bf16);
    }

    /// y (s, n) += b_e for the rows of each expert, with a bias b_e (n) for each. No GPU kernel supports it.
    pub fn add_bias(&self, bias: &[&[f32]], y: &mut Tensor) {
        check("experts::add_bias", "y", y, self.row_count(), bias[0].len());
        cpu::experts::add_bias(bias, &self.ends, y.data_mut());
    }

    /// slopes (s, 1) += dy[i].b_e for the rows of each expert, the gradient of a row's weight by its bias, with dy (s, n).
    pub fn add_bias_slopes(&self, bias: &[&[f32]], dy: &Tensor, slopes: &mut Tensor) {
        check("experts::add_bias_slopes", "dy", dy, self.row_count(), bias[0].len());
        check("experts::add_bias_slopes", "slopes", slopes, self.row_count(), 1);
        cpu::experts::add_bias_slopes(bias, &self.ends, dy.data(), slopes.data_mut());
    }

    /// The gradients of biases (E, n): the sum of w_i dy[i] over the rows of each expert, ascending, with dy (s, n) and the
    /// weights w (s, 1), or without weights.
    pub fn bias_gradients(&self, dy: &Tensor, weights: Option<&Tensor>) -> Tensor {
        check("experts::bias_gradients", "dy", dy, self.row_count(), dy.width());
        let mut sums = dy.statistics(self.ends.len() - 1, dy.width());
        cpu::experts::bias_gradients(dy.data(), &self.ends, weights.map(Tensor::data), sums.data_mut());
        sums
    }

    /// Counts the products of all rows with their matrices for a plan.
    fn note(&self, w: &[Weight]) {
        let (n, k) = (w[0].n, w[0].k);
        let with_rows = if self.ends.is_empty() {
            // Routers prefer different experts for different rows.
            w.len().min(self.row_count())
        } else {
            self.counts().filter(|rows| *rows > 0).count()
        };
        let read = with_rows * n * k * w[0].dtype().bytes();
        null::note(null::GEMM, 2.0 * (self.row_count() * n * k) as f64, read as f64);
    }
}

/// The addend of a sum over experts.
#[derive(Clone, Copy, Debug)]
pub enum Addend<'a> {
    Nothing,
    /// The previous contents of the result.
    Result,
    Values(&'a Tensor),
}

fn is_bf16(w: &[Weight]) -> bool {
    w[0].dtype() == DType::Bf16
}

fn matrices<'a>(op: &str, w: &[Weight<'a>]) -> Vec<Matrix<'a>> {
    w.iter().map(|w| matmul::rows(op, w)).collect()
}

fn panels<'a>(op: &str, w: &[Weight<'a>]) -> Vec<cpu::matmul::Panels<'a>> {
    w.iter().map(|w| matmul::panels(op, w)).collect()
}

/// From dact = W^T dy (s, f) of rows with `weights` (s, 1): multiplies act and dact by their row's weight, and returns
/// the gradient of the weights (s, 1), the dot products of act and dact. Then dact is the gradient of act, and dy^T act
/// that of W.
pub fn weigh(act: &mut Tensor, dact: &mut Tensor, weights: &Tensor) -> Tensor {
    check("experts::weigh", "act", act, weights.rows(), dact.width());
    check("experts::weigh", "dact", dact, weights.rows(), act.width());
    let (width, mut dweights) = (act.width(), weights.as_wide(weights.rows()));
    if act.device() == Device::Cuda {
        cuda::experts::weigh(act.cuda_mut(), dact.cuda_mut(), width, weights.cuda(), dweights.cuda_mut());
        return dweights;
    }
    cpu::experts::weigh(act.data_mut(), dact.data_mut(), width, weights.data(), dweights.data_mut());
    dweights
}
