//! Divergences between heads against f64, finite differences, and bitwise equality of rows, chunks and passes.

use crate::ops::probe::{Matrix, Numbers, are_slopes, assert_near, same_bits, wide};
use rlhf_hpc::ops::linear_divergence::{Divergence, Divergences, Teacher, Teachers, forward, forward_backward};
use rlhf_hpc::ops::linear_logprob::{HeadPart, RowStats};
use rlhf_hpc::tensor::{Layout, Tensor, WeightMut};
use std::cell::RefCell;

const ALL: [Divergence; 3] = [Divergence::ForwardKl, Divergence::ReverseKl, Divergence::Jsd];
/// The weights of cross-entropy and divergence in the loss.
const WEIGHTS: [f32; 2] = [0.3, 0.7];

struct Case {
    h: Tensor,
    w: Matrix,
    /// With other widths than the student's, and their weights.
    teachers: Vec<(Tensor, Matrix, f32)>,
    targets: Vec<u32>,
    temperature: f32,
}

impl Case {
    fn new(t: usize, d: usize, v: usize, temperature: f32) -> Self {
        let mut numbers = Numbers::new((t * d + v) as u64);
        let (h, w) = (numbers.tensor(t, d), Matrix::new(v, d, &mut numbers));
        let mut teacher = |d, weight| (numbers.tensor(t, d), Matrix::new(v, d, &mut numbers), weight);
        let teachers = vec![teacher(d + 3, 0.75), teacher(d, 0.25)];
        let targets = (0..t).map(|i| ((i * 7919 + 13) % v) as u32).collect();
        Self { h, w, teachers, targets, temperature }
    }

    fn with<R>(&self, divergence: Divergence, work: impl FnOnce(Teachers) -> R) -> R {
        let all: Vec<Teacher> = self
            .teachers
            .iter()
            .map(|(h, w, weight)| Teacher { h, w: w.f32(), softcap: None, weight: *weight })
            .collect();
        work(Teachers { all: &all, divergence, temperature: self.temperature })
    }

    fn forward(&self, divergence: Divergence) -> (Divergences, Vec<f32>) {
        let (w, mut logprobs) = (self.w.f32(), vec![0.0; self.targets.len()]);
        let part = HeadPart::whole(&w);
        let found = self.with(divergence, |all| forward(&self.h, w, part, &self.targets, all, &mut logprobs));
        (found, logprobs)
    }

    /// Divergences, log-probabilities, dh and dW.
    fn backward(&self, divergence: Divergence) -> (Divergences, Vec<f32>, Tensor, Vec<f32>) {
        let (t, d) = (self.h.rows(), self.h.width());
        let (w, mut logprobs) = (self.w.f32(), vec![0.0; t]);
        let mut dh = Tensor::from_slice(t, d, &vec![f32::NAN; t * d]);
        let mut dw = vec![0.0; self.w.panels.len()];
        let gradient = WeightMut { n: w.n, k: d, layout: Layout::Panel, values: (&mut dw).into() };
        let part = HeadPart::whole(&w);
        let found = self.with(divergence, |all| {
            forward_backward(&self.h, w, part, &self.targets, all, WEIGHTS, &mut logprobs, &mut dh, Some(gradient))
        });
        (found, logprobs, dh, dw)
    }

    /// The divergence of each token, its part of the loss, and its log-probability, in f64.
    fn exact(&self, of: Divergence, h: &[f64], w: &[f64]) -> [Vec<f64>; 3] {
        let mut out = [(); 3].map(|()| vec![0.0; self.targets.len()]);
        for (i, &target) in self.targets.iter().enumerate() {
            let temperature = f64::from(self.temperature);
            let q = logprobs(h, w, self.h.width(), i, temperature);
            for (h, w, weight) in &self.teachers {
                let (p, weight) =
                    (logprobs(&wide(h.data()), &wide(&w.rows), h.width(), i, temperature), f64::from(*weight));
                let (value, loss) = divergence(of, &q, &p);
                out[0][i] += weight * value;
                out[1][i] += weight * loss;
            }
            out[2][i] = logprobs(h, w, self.h.width(), i, 1.0)[target as usize];
        }
        out
    }
}

/// The log-probabilities of all tokens after row i.
fn logprobs(h: &[f64], w: &[f64], d: usize, i: usize, temperature: f64) -> Vec<f64> {
    let z: Vec<f64> =
        w.chunks(d).map(|w| w.iter().zip(&h[i * d..]).map(|(w, h)| w * h).sum::<f64>() / temperature).collect();
    let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = max + z.iter().map(|z| (z - max).exp()).sum::<f64>().ln();
    z.iter().map(|z| z - lse).collect()
}

/// The divergence, and what a loss counts of it.
fn divergence(of: Divergence, q: &[f64], p: &[f64]) -> (f64, f64) {
    let kl = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a.exp() * (a - b)).sum::<f64>();
    let value = match of {
        Divergence::ForwardKl => kl(p, q),
        Divergence::ReverseKl => kl(q, p),
        Divergence::Jsd => {
            let m: Vec<f64> = q.iter().zip(p).map(|(q, p)| f64::midpoint(q.exp(), p.exp()).ln()).collect();
            f64::midpoint(kl(p, &m), kl(q, &m))
        }
    };
    let entropy = -p.iter().map(|p| p.exp() * p).sum::<f64>();
    (value, if of == Divergence::ForwardKl { value + entropy } else { value })
}

#[test]
fn divergences_equal_those_in_f64() {
    for (t, d, v, temperature) in [(5, 24, 50, 1.0), (130, 33, 500, 0.7), (1, 8, 1, 1.0), (9, 12, 65, 2.5)] {
        let case = Case::new(t, d, v, temperature);
        for of in ALL {
            let (found, logprobs) = case.forward(of);
            let [values, losses, exact] = case.exact(of, &wide(case.h.data()), &wide(&case.w.rows));
            assert_near("divergences", &found.values, &values, 3e-6);
            assert_near("losses", &found.losses, &losses, 3e-6);
            assert_near("logprobs", &logprobs, &exact, 3e-6);
        }
    }
}

#[test]
fn gradients_of_divergences_equal_finite_differences_in_f64() {
    let case = Case::new(4, 6, 23, 0.7);
    for of in ALL {
        let (.., dh, dw) = case.backward(of);
        are_slopes(&case.h, &case.w, (&dh, &dw), |h, w| {
            let [_, losses, logprobs] = case.exact(of, h, w);
            let [ce, scale] = WEIGHTS.map(f64::from);
            losses.iter().map(|loss| scale * loss).sum::<f64>() - logprobs.iter().map(|l| ce * l).sum::<f64>()
        });
    }
}

#[test]
fn a_token_has_the_same_bits_in_any_chunk_and_in_both_passes() {
    let (t, d, v) = (700, 16, 9000);
    let case = Case::new(t, d, v, 1.3);
    for of in ALL {
        let (found, logprobs, dh, _) = case.backward(of);
        let (scored, of_scoring) = case.forward(of);
        assert_eq!(scored, found, "{of:?}");
        same_bits("logprobs", &logprobs, &of_scoring);
        for i in [0, 257, 699] {
            let row = |x: &Tensor| Tensor::from_slice(1, x.width(), x.row(i));
            let one = Case {
                h: row(&case.h),
                w: Matrix::from_rows(v, d, case.w.rows.clone()),
                teachers: case
                    .teachers
                    .iter()
                    .map(|(h, w, weight)| (row(h), Matrix::from_rows(v, w.k, w.rows.clone()), *weight))
                    .collect(),
                targets: vec![case.targets[i]],
                temperature: case.temperature,
            };
            let (alone, _, dh_alone, _) = one.backward(of);
            same_bits("divergence", &alone.values, &found.values[i..=i]);
            same_bits("dh", dh_alone.data(), dh.row(i));
        }
    }
}

/// The results for its rows that a part of a vocabulary sends to the others.
type Told = (Vec<RowStats>, Vec<f32>);

#[test]
fn vocabulary_shards_have_the_divergences_and_gradients_of_the_whole() {
    let (t, d, v, cut) = (6, 10, 130, 77);
    let case = Case::new(t, d, v, 0.8);
    for of in ALL {
        let (whole, _, dh, dw) = case.backward(of);
        // Each shard is computed twice: first for the statistics that it sends, then with those of the other shards in
        // the same order.
        let told: RefCell<[Vec<Told>; 2]> = RefCell::default();
        let pass = |part: usize| {
            let rows = if part == 0 { 0..cut } else { cut..v };
            let of_part =
                |w: &Matrix| Matrix::from_rows(rows.len(), w.k, w.rows[rows.start * w.k..rows.end * w.k].to_vec());
            let (w, teachers) =
                (of_part(&case.w), case.teachers.iter().map(|(_, w, _)| of_part(w)).collect::<Vec<_>>());
            let calls = RefCell::new(0);
            let combine = |stats: &mut [RowStats], targets: &mut [f32]| {
                let call = *calls.borrow();
                *calls.borrow_mut() += 1;
                let mut told = told.borrow_mut();
                if told[part].len() <= call {
                    told[part].push((Vec::new(), Vec::new()));
                }
                told[part][call] = (stats.to_vec(), targets.to_vec());
                let (Some(first), Some(second)) = (told[0].get(call), told[1].get(call)) else { return };
                for (i, (stats, target)) in stats.iter_mut().zip(targets).enumerate() {
                    *stats = RowStats::combined(&[first.0[i], second.0[i]]);
                    *target = first.1[i] + second.1[i];
                }
            };
            let head =
                HeadPart { first: rows.start, rows_max: cut, combine: Some(&combine), gather: None, softcap: None };
            let mut dh = Tensor::scratch(t, d);
            let mut dw = vec![0.0; w.panels.len()];
            let gradient = WeightMut { n: w.n, k: d, layout: Layout::Panel, values: (&mut dw).into() };
            let all: Vec<Teacher> = case
                .teachers
                .iter()
                .zip(&teachers)
                .map(|((h, _, weight), w)| Teacher { h, w: w.f32(), softcap: None, weight: *weight })
                .collect();
            let all = Teachers { all: &all, divergence: of, temperature: case.temperature };
            let (mut logprobs, dw_part) = (vec![0.0; t], Some(gradient));
            let (h, w, targets, l) = (&case.h, w.f32(), &case.targets, &mut logprobs);
            let found = forward_backward(h, w, head, targets, all, WEIGHTS, l, &mut dh, dw_part);
            (found, dh, dw)
        };
        // The first round gives the statistics, the second one the sums that need them.
        (0..3).for_each(|_| (0..2).for_each(|part| drop(pass(part))));
        let parts = [0, 1].map(pass);
        assert_eq!(parts[0].0, parts[1].0, "all parts know the same");
        assert_near("divergences", &parts[0].0.values, &wide(&whole.values), 2e-6);
        assert_near("losses", &parts[0].0.losses, &wide(&whole.losses), 2e-6);
        let sum: Vec<f32> = parts[0].1.data().iter().zip(parts[1].1.data()).map(|(a, b)| a + b).collect();
        assert_near("dh", &sum, &wide(dh.data()), 2e-6);
        for row in 0..v {
            let (part, at) = if row < cut { (0, row) } else { (1, row - cut) };
            for c in 0..d {
                let got = parts[part].2[Layout::Panel.index(d, at, c)];
                assert_near("dW", &[got], &[f64::from(dw[Layout::Panel.index(d, row, c)])], 2e-6);
            }
        }
    }
}
