use crate::{bf16, in_every_order, numbers};
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::adamw::{self, Decays, Update};
use rlhf_hpc::dtype::DType::{Bf16, F32};
use rlhf_hpc::ops;

const UPDATE: Update =
    Update { lr: 3e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, bias1: 0.19, bias2: 0.0975, grad_scale: 0.7 };

/// p, g, m, v.
fn state(len: usize) -> [Vec<f32>; 4] {
    let positive = |x: Vec<f32>| x.into_iter().map(|x| x * x * 0.01).collect();
    [numbers(1, len), numbers(2, len), numbers(3, len), positive(numbers(4, len))]
}

/// The CPU's update of the same parts.
fn wanted(len: usize, parts: &[(usize, f32)]) -> [Vec<f32>; 4] {
    let [mut p, g, mut m, mut v] = state(len);
    let mut start = 0;
    for &(end, weight_decay) in parts {
        let at = start..end;
        ops::adamw::step(&mut p[at.clone()], &g[at.clone()], &mut m[at.clone()], &mut v[at], &UPDATE, weight_decay);
        start = end;
    }
    [p, g, m, v]
}

/// With `skip` values before each run.
fn check(len: usize, skip: usize, parts: &[(usize, f32)]) {
    let [mut p, g, mut m, mut v] = state(len).map(|x| Memory::from_values(&[vec![0.0; skip], x].concat()));
    let (mut w, range) = (Memory::scratch(2 * (skip + len)), skip..skip + len);
    let [to_p, to_m, to_v] = [&mut p, &mut m, &mut v].map(|x| x.view_mut(F32).part(range.clone()));
    let (from, to_w) = (g.view(F32).part(range.clone()), w.view_mut(Bf16).part(range));
    adamw::step(to_p, from, to_m, to_v, to_w, &Decays::from_parts(parts), &UPDATE);
    let want = wanted(len, parts);
    for (name, (got, want)) in ["p", "g", "m", "v"].into_iter().zip([p, g, m, v].iter().zip(&want)) {
        assert_eq!(got.read::<f32>(skip + len)[skip..], want[..], "{name} of {len} from {skip}, {parts:?}");
    }
    assert_eq!(w.read::<u16>(skip + len)[skip..], bf16(&want[0]), "w of {len} from {skip}, {parts:?}");
}

#[test]
fn a_moving_average_has_the_bits_of_the_cpu() {
    in_every_order(|| {
        for (len, skip) in [(0, 0), (1, 0), (2500, 0), (2500, 3)] {
            let (p, mut want) = (numbers(5, len), numbers(6, len));
            let [from, mut to] = [&p, &want].map(|x| Memory::from_values(&[vec![0.0; skip], x.clone()].concat()));
            let range = skip..skip + len;
            adamw::average(from.view(F32).part(range.clone()), 0.992, to.view_mut(F32).part(range));
            ops::adamw::average(&p, 0.992, &mut want);
            assert_eq!(to.read::<f32>(skip + len)[skip..], want[..], "{len} from {skip}");
        }
    });
}

#[test]
fn an_update_has_the_bits_of_the_cpu_for_parts_that_end_anywhere() {
    in_every_order(|| {
        for skip in [0, 8, 3] {
            check(0, skip, &[]);
            check(1, skip, &[(1, 0.1)]);
            check(300, skip, &[(300, 0.1)]);
            check(3001, skip, &[(8, 0.0), (64, 0.1), (71, 0.0), (72, 0.1), (72, 0.5), (2500, 0.2), (3001, 0.0)]);
        }
    });
}
