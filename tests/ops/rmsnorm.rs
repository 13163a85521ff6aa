//! The norm against plain f64 loops.

use super::numbers::{assert_near, normals, same_bits};
use rlhf_hpc::device::cpu::pool;
use rlhf_hpc::device::simd::{Level, with_level};
use rlhf_hpc::ops::rmsnorm::{backward, forward};
use rlhf_hpc::tensor::Tensor;

const EPS: f32 = 1e-5;

/// (rows, groups of a row, values of a group)
const SHAPES: &[(usize, usize, usize)] =
    &[(1, 1, 1), (3, 1, 8), (65, 1, 33), (64, 2, 24), (200, 1, 256), (130, 8, 64), (1, 1, 4096), (257, 1, 688)];

struct Case {
    x: Tensor,
    w: Vec<f32>,
    dy: Tensor,
    dx: Tensor,
    dw: Vec<f32>,
}

struct Result {
    y: Tensor,
    rstd: Tensor,
    dx: Tensor,
    dw: Vec<f32>,
}

impl Case {
    fn new(rows: usize, groups: usize, n: usize) -> Self {
        let width = groups * n;
        let tensor = |seed| Tensor::from_slice(rows, width, &normals(seed, rows * width, 1.0));
        Self { x: tensor(1), w: normals(2, n, 1.0), dy: tensor(3), dx: tensor(4), dw: normals(5, n, 1.0) }
    }

    fn run(&self) -> Result {
        let groups = self.x.width() / self.w.len();
        let (mut y, mut rstd) = (self.x.clone(), Tensor::zeros(self.x.rows(), groups));
        forward(&self.x, &self.w, EPS, &mut y, &mut rstd);
        let (mut dx, mut dw) = (self.dx.clone(), self.dw.clone());
        backward(&self.x, &self.w, &rstd, &self.dy, &mut dx, &mut dw);
        Result { y, rstd, dx, dw }
    }

    /// y, dx, dw in f64.
    fn naive(&self) -> [Vec<f64>; 3] {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let (x, w, dy) = (wide(self.x.data()), wide(&self.w), wide(self.dy.data()));
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
    for &(rows, groups, n) in SHAPES {
        let case = Case::new(rows, groups, n);
        let (result, [y, dx, dw]) = (case.run(), case.naive());
        assert_near("y", result.y.data(), &y, 1e-6);
        assert_near("dx", result.dx.data(), &dx, 2e-6);
        assert_near("dw", &result.dw, &dw, 5e-6);
    }
}

#[test]
fn a_row_does_not_feel_its_companions() {
    for &(rows, groups, n) in SHAPES {
        let case = Case::new(rows, groups, n);
        let all = case.run();
        for row in [0, rows / 2, rows - 1] {
            let cut = |x: &Tensor| Tensor::from_slice(1, x.width(), x.row(row));
            let alone =
                Case { x: cut(&case.x), w: case.w.clone(), dy: cut(&case.dy), dx: cut(&case.dx), dw: case.dw.clone() };
            let alone = alone.run();
            same_bits("y", alone.y.data(), all.y.row(row));
            same_bits("rstd", alone.rstd.data(), all.rstd.row(row));
            same_bits("dx", alone.dx.data(), all.dx.row(row));
        }
    }
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let results: Vec<Result> = [1, 2, 3, 5]
        .into_iter()
        .map(|threads| {
            pool::set_threads(threads);
            Case::new(300, 2, 96).run()
        })
        .collect();
    for result in &results[1..] {
        same_bits("y", result.y.data(), results[0].y.data());
        same_bits("dx", result.dx.data(), results[0].dx.data());
        same_bits("dw", &result.dw, &results[0].dw);
    }
}

#[test]
fn every_instruction_level_gives_the_same_bits() {
    for &(rows, groups, n) in SHAPES {
        let case = Case::new(rows, groups, n);
        let best = case.run();
        for level in Level::available() {
            let result = with_level(level, || case.run());
            same_bits("y", result.y.data(), best.y.data());
            same_bits("dx", result.dx.data(), best.dx.data());
            same_bits("dw", &result.dw, &best.dw);
        }
    }
}
