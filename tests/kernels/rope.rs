use crate::near::{BF16, assert_near, wide};
use crate::{bf16, in_every_order, numbers, rounded};
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::rope::{self, Table};
use rlhf_hpc::dtype::DType;

const POSITIONS: usize = 50;

/// (cos, sin), [position][e/2]
fn angles(e: usize) -> (Vec<f32>, Vec<f32>) {
    let angle = |i: usize| (i / (e / 2)) as f64 / 10f64.powf((i % (e / 2)) as f64 / 4.0);
    (0..POSITIONS * e / 2).map(|i| (angle(i).cos() as f32, angle(i).sin() as f32)).unzip()
}

fn positions(t: usize) -> Vec<u32> {
    (0..t).map(|t| (t * 7 % POSITIONS) as u32).collect()
}

/// x (t, heads * e) turned, or turned back.
fn wanted(x: &[f32], t: usize, e: usize, sign: f64) -> Vec<f64> {
    let ((cos, sin), positions, half) = (angles(e), positions(t), e / 2);
    let x = wide(&rounded(x));
    let mut y = x.clone();
    let width = x.len() / t.max(1);
    for (i, y) in y.iter_mut().enumerate() {
        let at = positions[i / width] as usize * half + i % half;
        let (c, s) = (f64::from(cos[at]), sign * f64::from(sin[at]));
        *y = if i % e < half { x[i] * c - x[i + half] * s } else { x[i] * c + x[i - half] * s };
    }
    y
}

fn check(t: usize, heads: usize, kv_heads: usize, e: usize) {
    let (cos, sin) = angles(e);
    let (table, at) = (Table::new(e, &cos, &sin), Memory::of(&positions(t)));
    let (q, k) = (numbers(1, t * heads * e), numbers(2, t * kv_heads * e));
    for sign in [1.0, -1.0] {
        let (mut on_q, mut on_k) = (Memory::of(&bf16(&q)), Memory::of(&bf16(&k)));
        let views = (on_q.view_mut(DType::Bf16), (kv_heads > 0).then(|| on_k.view_mut(DType::Bf16)));
        let rotate = if sign > 0.0 { rope::forward } else { rope::backward };
        rotate(views.0, views.1, t, &at, &table);
        let what = format!("{t} rows, {heads} and {kv_heads} heads of {e}, turned by {sign}");
        // Two products of up to 1 may cancel.
        assert_near(on_q.view(DType::Bf16), &wanted(&q, t, e, sign), BF16, 2e-7, &what);
        assert_near(on_k.view(DType::Bf16), &wanted(&k, t, e, sign), BF16, 2e-7, &what);
    }
}

#[test]
fn every_head_is_turned_by_the_angle_of_its_position_whatever_the_other_rows_are() {
    in_every_order(|| {
        for e in [16, 64, 80, 96, 128, 256] {
            for (t, heads, kv_heads) in [(0, 4, 1), (1, 1, 0), (3, 4, 4), (9, 5, 1), (30, 6, 2)] {
                check(t, heads, kv_heads, e);
            }
        }
        let (e, t, width) = (64, 30, 3 * 64);
        let ((cos, sin), at) = (angles(e), positions(t));
        let (table, x) = (Table::new(e, &cos, &sin), bf16(&numbers(1, t * width)));
        let turned = |rows: std::ops::Range<usize>| {
            let mut y = Memory::of(&x[rows.start * width..rows.end * width]);
            rope::forward(y.view_mut(DType::Bf16), None, rows.len(), &Memory::of(&at[rows.clone()]), &table);
            y.read::<u16>(rows.len() * width)
        };
        assert_eq!(turned(11..12), turned(0..t)[11 * width..12 * width]);
    });
}
