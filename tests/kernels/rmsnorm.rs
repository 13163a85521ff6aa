use crate::near::{BF16, F32, assert_near, wide};
use crate::{bf16, device, in_every_order, numbers, rounded};
use rlhf_hpc::device::cuda::{Memory, rmsnorm};
use rlhf_hpc::dtype::DType;

const EPS: f32 = 1e-6;

struct Case {
    groups: usize,
    n: usize,
    x: Memory,
    w: Memory,
    y: Memory,
    rstd: Memory,
}

impl Case {
    fn of(x: &[f32], n: usize) -> Self {
        let groups = x.len() / n;
        Self {
            groups,
            n,
            x: Memory::of(&bf16(x)),
            w: Memory::of(&bf16(&numbers(4, n))),
            y: Memory::scratch(2 * groups * n),
            rstd: Memory::scratch(4 * groups),
        }
    }

    fn forward(&mut self) {
        let (y, rstd) = (self.y.view_mut(DType::Bf16), self.rstd.view_mut(DType::F32));
        rmsnorm::forward(self.x.view(DType::Bf16), self.w.view(DType::Bf16), EPS, y, rstd);
    }

    /// (y, rstd) in f64, of x as it is on the GPU.
    fn wanted(&self) -> (Vec<f64>, Vec<f64>) {
        let (x, w) = (wide(&self.x.view(DType::Bf16).to_f32()), wide(&self.w.view(DType::Bf16).to_f32()));
        let rstd: Vec<f64> = x.chunks(self.n).map(rstd).collect();
        let y = x.iter().enumerate().map(|(i, x)| x * rstd[i / self.n] * w[i % self.n]).collect();
        (y, rstd)
    }

    fn check(&self, what: &str) {
        let (y, rstd) = self.wanted();
        let what = format!("{what}, {} groups of {}", self.groups, self.n);
        assert_near(self.rstd.view(DType::F32), &rstd, F32, 0.0, &what);
        assert_near(self.y.view(DType::Bf16), &y, BF16, 0.0, &what);
    }
}

fn rstd(x: &[f64]) -> f64 {
    1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + f64::from(EPS)).sqrt()
}

const WIDTHS: [usize; 11] = [8, 24, 64, 96, 128, 256, 264, 1000, 2056, 4096, 8200];

/// The groups of a case for a width: as many as several blocks have where they are short.
fn groups(n: usize) -> [usize; 4] {
    [0, 1, 3, if n <= 256 { 150 } else { 19 }]
}

#[test]
fn groups_of_every_width_have_the_norm_of_the_formula_alone_and_among_others() {
    in_every_order(|| {
        for (n, groups) in WIDTHS.into_iter().flat_map(|n| groups(n).map(|groups| (n, groups))) {
            let x = numbers(3, groups * n);
            let mut all = Case::of(&x, n);
            all.forward();
            all.check("forward");
            let at = groups.saturating_sub(2);
            let mut one = Case::of(&x[at * n..(at + groups.min(1)) * n], n);
            one.forward();
            let (y, rstd) = (all.y.read::<u16>(groups * n), all.rstd.read::<u32>(groups));
            assert_eq!(one.y.read::<u16>(one.groups * n), y[at * n..][..one.groups * n], "group {at} of width {n}");
            assert_eq!(one.rstd.read::<u32>(one.groups), rstd[at..][..one.groups], "group {at} of width {n}");
        }
    });
}

/// dx and dw after a backward pass onto what was there.
fn backward(groups: usize, n: usize) -> (Memory, Memory) {
    let mut case = Case::of(&numbers(3, groups * n), n);
    case.forward();
    let dy = Memory::of(&bf16(&numbers(7, groups * n)));
    let mut dx = Memory::of(&bf16(&numbers(8, groups * n)));
    let mut dw = Memory::of(&numbers(9, n));
    let (x, w, rstd) = (case.x.view(DType::Bf16), case.w.view(DType::Bf16), case.rstd.view(DType::F32));
    rmsnorm::backward(x, w, rstd, dy.view(DType::Bf16), dx.view_mut(DType::Bf16), dw.view_mut(DType::F32));
    (dx, dw)
}

/// The bits, too.
fn check_backward(groups: usize, n: usize) -> (Vec<u16>, Vec<u32>) {
    let (dx, dw) = backward(groups, n);
    let (x, w) = (wide(&rounded(&numbers(3, groups * n))), wide(&rounded(&numbers(4, n))));
    let (dy, mut want_dx) = (wide(&rounded(&numbers(7, groups * n))), wide(&rounded(&numbers(8, groups * n))));
    let mut want_dw = wide(&numbers(9, n));
    for group in 0..groups {
        let at = group * n..(group + 1) * n;
        let (x, dy) = (&x[at.clone()], &dy[at.clone()]);
        let scale = rstd(x);
        let mean = (0..n).map(|i| w[i] * dy[i] * x[i]).sum::<f64>() / n as f64;
        for (i, dx) in want_dx[at].iter_mut().enumerate() {
            *dx += scale * (w[i] * dy[i] - x[i] * scale * scale * mean);
            want_dw[i] += dy[i] * x[i] * scale;
        }
    }
    let what = format!("{groups} groups of {n}");
    // Terms of up to 4 may cancel: what f32 rounds of them stays.
    assert_near(dx.view(DType::Bf16), &want_dx, BF16, 2e-6, &format!("dx, {what}"));
    assert_near(dw.view(DType::F32), &want_dw, 1e-6, 2e-7 * (groups as f64 + 8.0), &format!("dw, {what}"));
    (dx.read(groups * n), dw.read(n))
}

#[test]
fn gradients_of_every_width_are_those_of_the_formula_and_have_the_same_bits_in_every_order() {
    let first = std::cell::OnceCell::new();
    in_every_order(|| {
        let shapes = WIDTHS.into_iter().flat_map(|n| groups(n).map(|groups| (groups, n)));
        let bits: Vec<_> = shapes.map(|(groups, n)| check_backward(groups, n)).collect();
        assert!(*first.get_or_init(|| bits.clone()) == bits);
    });
    // More groups than one round of blocks takes at a time.
    let (_, _one) = device();
    check_backward(4000, 16);
}
