//! The routers of mixtures of experts, the order of the rows of experts, and sums over the experts of a row. The host
//! does not know the choices: all of their sizes follow from the number of rows.

use super::gpu::{Arg, gpu};
use super::grouped::Groups;
use super::matmul::Addend;
use super::memory::{Memory, View, ViewMut};
use super::shape::{THREADS, check_aligned, check_width, count, grid_of};
use crate::dtype::DType::{Bf16, F32};
use std::sync::Arc;

/// The most experts, and the most of a row, that the kernels support.
pub const EXPERTS_MAX: usize = 1024;
pub const CHOSEN_MAX: usize = 32;

/// Rows of a block in kernels where a warp has a row.
const ROWS: usize = THREADS / 32;
/// Threads of a block that sorts.
const SORTING: usize = 512;

/// The chosen experts of `t` rows, `k` of each, on the GPU. All numbers are u32.
#[derive(Debug)]
pub struct Choice {
    t: usize,
    k: usize,
    experts: usize,
    renormalizes: bool,
    /// The chosen experts of each row (t, k), ascending.
    chosen: Memory,
    /// The rows of expert e are `ends[e]..ends[e + 1]` (E + 1).
    ends: Arc<Memory>,
    /// The row of each row of experts (t k).
    rows: Memory,
    /// The row of experts of each chosen one (t, k).
    places: Memory,
}

impl Choice {
    /// Replaces the `logits` of all experts (t, E) by their softmax, and writes the `weights` (t, k) of the chosen ones.
    pub fn new(mut logits: ViewMut, experts: usize, renormalizes: bool, mut weights: ViewMut) -> Self {
        const OP: &str = "experts::route";
        let t = logits.len() / experts;
        let k = weights.len() / t.max(1);
        assert!(logits.len() == t * experts && weights.len() == t * k, "{OP}: logits or weights have a wrong size");
        assert!(experts <= EXPERTS_MAX && k <= CHOSEN_MAX, "{OP}: at most {CHOSEN_MAX} of {EXPERTS_MAX} experts");
        let table = |len: usize| Memory::scratch(4 * len);
        let [mut chosen, mut ends, mut rows, mut places] = [t * k, experts + 1, t * k, t * k].map(table);
        let [of_chosen, of_ends, of_rows, of_places] =
            [&mut chosen, &mut ends, &mut rows, &mut places].map(Memory::arg_mut);
        let choice = Self { t, k, experts, renormalizes, chosen, ends: Arc::new(ends), rows, places };
        let [t, experts, k] = choice.dims(OP);
        let renormalizes = Arg::U32(u32::from(renormalizes));
        let args = [logits.arg(F32), of_chosen, weights.arg(F32), t, experts, k, renormalizes];
        gpu().launch("router_forward", grid(choice.t), THREADS, 0, &args);
        let args = [of_chosen, of_ends, of_rows, of_places, t, k, experts];
        gpu().launch("experts_sort", [choice.experts, 1, 1], SORTING, 0, &args);
        choice
    }

    fn dims(&self, op: &str) -> [Arg; 3] {
        let _ = count(op, self.t * self.k);
        [self.t, self.experts, self.k].map(|n| count(op, n))
    }

    /// The rows of experts, by expert.
    pub fn groups(&self) -> Groups {
        Groups { ends: self.ends.clone(), count: self.experts, rows: self.t * self.k }
    }

    /// The row of each row of experts.
    pub fn rows(&self) -> &Memory {
        &self.rows
    }

    /// The chosen experts of each row (t, k), on the host. Waits for the GPU.
    pub fn chosen(&self) -> Vec<u32> {
        self.chosen.read(self.t * self.k)
    }

    /// x (t, d) = c + the sum of y (s, d) over the chosen experts of each row, weighted or not.
    pub fn combine(&self, y: View, weights: Option<View>, c: Addend, mut x: ViewMut) {
        const OP: &str = "experts::combine";
        if self.t == 0 {
            return;
        }
        let width = x.len() / self.t;
        check_width(OP, width);
        let fits = [y.len(), x.len()] == [self.t * self.k * width, self.t * width];
        assert!(fits, "{OP}: y and x must have rows of one width");
        let (y, x, none) = (y.arg(Bf16), x.arg(Bf16), Arg::Address(0));
        let c = match c {
            Addend::Nothing => none,
            Addend::Result => x,
            Addend::Matrix(c) => {
                assert!((c.rows, c.stride) == (self.t, width), "{OP}: c must have the shape of x");
                c.values.arg(Bf16)
            }
        };
        let weights = weights.map_or(none, |w| w.arg(F32));
        check_aligned(OP, &[y, x]);
        let [t, _, k] = self.dims(OP);
        let args = [y, self.places.arg(), weights, c, x, t, k, count(OP, width / 8)];
        gpu().launch("experts_combine", grid_of(OP, self.t * (width / 8)), THREADS, 0, &args);
    }

    /// The value of each row of experts (s) from that of each chosen one (t, k); both f32.
    pub fn spread(&self, from: View, to: ViewMut) {
        moves("experts_spread", from, &self.places, to);
    }

    /// The value of each chosen expert (t, k) from that of each row of experts (s); both f32.
    pub fn collect(&self, from: View, to: ViewMut) {
        collect(from, &self.places, to);
    }

    /// The number of rows of each expert, on the host. Waits for the GPU.
    pub fn counts(&self) -> Vec<usize> {
        let ends: Vec<u32> = self.ends.read(self.experts + 1);
        ends.windows(2).map(|ends| (ends[1] - ends[0]) as usize).collect()
    }

    /// The gradient of the logits (t, E, bf16) from the probabilities (t, E), the weights and their gradient (t, k), and
    /// the slope of a loss by the probability of each expert (E).
    pub fn backward(&self, p: View, [weights, dweights]: [View; 2], slope: Option<&[f32]>, mut dlogits: ViewMut) {
        const OP: &str = "experts::backward";
        assert!(slope.is_none_or(|slope| slope.len() == self.experts), "{OP}: each expert has a slope");
        let slope = slope.map(Memory::from_values);
        let slope = slope.as_ref().map_or(Arg::Address(0), Memory::arg);
        let [t, experts, k] = self.dims(OP);
        let [weights, dweights] = [weights, dweights].map(|of| of.arg(F32));
        let renormalizes = Arg::U32(u32::from(self.renormalizes));
        let (p, chosen, dlogits) = (p.arg(F32), self.chosen.arg(), dlogits.arg(Bf16));
        let args = [p, chosen, weights, dweights, slope, dlogits, t, experts, k, renormalizes];
        gpu().launch("router_backward", grid(self.t), THREADS, 0, &args);
    }

    /// The number of rows of each expert, the sum of its probabilities p, and that of -p ln p (3, E).
    pub fn sums(&self, p: View, mut sums: ViewMut) {
        const OP: &str = "experts::sums";
        let [t, experts, _] = self.dims(OP);
        let args = [p.arg(F32), self.ends.arg(), sums.arg(F32), t, experts];
        gpu().launch("router_sums", [self.experts.div_ceil(32), 1, 1], 1024, 0, &args);
    }
}

/// to[i] = from[places[i]] for u32 `places`; f32.
pub fn collect(from: View, places: &Memory, to: ViewMut) {
    moves("experts_collect", from, places, to);
}

fn moves(kernel: &'static str, from: View, places: &Memory, mut to: ViewMut) {
    const OP: &str = "experts::moves";
    let s = to.len();
    assert!(
        from.len() == s && places.bytes() == 4 * s,
        "{OP}: {} values and {} bytes for {s}",
        from.len(),
        places.bytes()
    );
    gpu().launch(kernel, grid_of(OP, s), THREADS, 0, &[from.arg(F32), places.arg(), to.arg(F32), count(OP, s)]);
}

/// The grid of kernels where a warp has a row.
fn grid(rows: usize) -> [usize; 3] {
    [rows.div_ceil(ROWS), 1, 1]
}

/// Multiplies rows of act and dact (s, f) by their `weights` (s). Before that, their dot products are `dweights` (s).
pub fn weigh(mut act: ViewMut, mut dact: ViewMut, width: usize, weights: View, mut dweights: ViewMut) {
    const OP: &str = "experts::weigh";
    check_width(OP, width);
    let (rows, len) = (weights.len(), act.len());
    assert!(len == rows * width && dact.len() == len && dweights.len() == rows, "{OP}: rows of {width} values");
    let (act, dact) = (act.arg(Bf16), dact.arg(Bf16));
    check_aligned(OP, &[act, dact]);
    let args = [act, dact, weights.arg(F32), dweights.arg(F32), count(OP, rows), count(OP, width)];
    gpu().launch("experts_weigh", grid(rows), THREADS, 0, &args);
}
