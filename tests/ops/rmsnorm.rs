//! The norm against plain f64 loops.

use super::probe::{assert_near, normals, same_on_threads_and_levels, tensor, wide};
use rlhf_hpc::ops::rmsnorm::{backward, forward};
use rlhf_hpc::tensor::Tensor;

const EPS: f32 = 1e-5;
/// The numbers that are added to w.
const OFFSETS: [f32; 2] = [0.0, 1.0];

/// (rows, groups of a row, values of a group)
const SHAPES: &[(usize, usize, usize)] =
    &[(1, 1, 1), (3, 1, 8), (65, 1, 33), (64, 2, 24), (200, 1, 256), (130, 8, 64), (1, 1, 4096), (257, 1, 688)];

struct Case {
    x: Tensor,
    w: Vec<f32>,
    offset: f32,
    dy: Tensor,
    dx: Tensor,
    dw: Vec<f32>,
}

impl Case {
    fn new(rows: usize, groups: usize, n: usize, offset: f32) -> Self {
        let [x, dy, dx] = [1, 3, 4].map(|seed| tensor(seed, rows, groups * n, 1.0));
        Self { x, w: normals(2, n, 1.0), offset, dy, dx, dw: normals(5, n, 1.0) }
    }

    /// y, dx, dw.
    fn run(&self) -> [Vec<f32>; 3] {
        let groups = self.x.width() / self.w.len();
        let (mut y, mut rstd) = (self.x.clone(), Tensor::zeros(self.x.rows(), groups));
        forward(&self.x, &self.w, self.offset, EPS, &mut y, &mut rstd);
        let (mut dx, mut dw) = (self.dx.clone(), self.dw.clone());
        backward(&self.x, &self.w, self.offset, &rstd, &self.dy, &mut dx, &mut dw);
        [y.data().to_vec(), dx.data().to_vec(), dw]
    }

    /// y, dx, dw in f64.
    fn naive(&self) -> [Vec<f64>; 3] {
        let (x, mut w, dy) = (wide(self.x.data()), wide(&self.w), wide(self.dy.data()));
        for w in &mut w {
            *w += f64::from(self.offset);
        }
        let (mut y, mut dx, mut dw) = (vec![0.0; x.len()], wide(self.dx.data()), wide(&self.dw));
        let n = w.len();
        for at in (0..x.len()).step_by(n) {
            let rstd = 1.0 / (x[at..at + n].iter().map(|x| x * x).sum::<f64>() / n as f64 + f64::from(EPS)).sqrt();
            let mean = (0..n).map(|i| w[i] * dy[at + i] * x[at + i]).sum::<f64>() / n as f64;
            for i in 0..n {
                y[at + i] = x[at + i] * rstd * w[i];
                dx[at + i] += rstd * (w[i] * dy[at + i] - x[at + i] * rstd * rstd * mean);
                dw[i] += dy[at + i] * x[at + i] * rstd;
            }
        }
        [y, dx, dw]
    }
}

#[test]
fn the_norm_equals_the_plain_sum_and_its_gradients_are_added() {
    for (&(rows, groups, n), offset) in SHAPES.iter().flat_map(|shape| OFFSETS.map(|offset| (shape, offset))) {
        let case = Case::new(rows, groups, n, offset);
        let (got, want) = (case.run(), case.naive());
        for (i, (what, tolerance)) in [("y", 1e-6), ("dx", 2e-6), ("dw", 5e-6)].into_iter().enumerate() {
            assert_near(what, &got[i], &want[i], tolerance);
        }
    }
}

#[test]
fn neither_the_thread_count_nor_the_instruction_set_changes_a_bit() {
    for &(rows, groups, n) in SHAPES {
        let case = Case::new(rows, groups, n, OFFSETS[1]);
        same_on_threads_and_levels(&format!("{rows} rows of {groups} x {n}"), || case.run().into());
    }
}
