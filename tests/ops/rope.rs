//! The rotation against f64.

use super::probe::{assert_near, normals, same_bits, tensor, wide};
use rlhf_hpc::ops::rope::{RopeTable, backward, forward};
use rlhf_hpc::tensor::Tensor;

fn frequencies(head_dim: usize) -> Vec<f32> {
    (0..head_dim / 2).map(|i| 10000f32.powf(-2.0 * i as f32 / head_dim as f32)).collect()
}

fn positions(rows: usize) -> Vec<u32> {
    (0..rows as u32).map(|t| t * 37 % 512).collect()
}

#[test]
fn each_pair_turns_by_position_times_frequency() {
    for (rows, heads, e) in [(1, 1, 2), (5, 3, 12), (40, 8, 32), (9, 2, 80), (70, 4, 128)] {
        let x = normals(1, rows * heads * e, 1.0);
        let (frequencies, positions, factor) = (frequencies(e), positions(rows), 1.25f32);
        let table = RopeTable::whole(&frequencies, factor, 512);
        let mut y = Tensor::from_slice(rows, heads * e, &x);
        // Keys have heads of their own number, here one.
        let first: Vec<f32> = x.chunks_exact(heads * e).flat_map(|row| &row[..e]).copied().collect();
        let mut k = Tensor::from_slice(rows, e, &first);
        forward(&mut y, &mut k, &positions[..].into(), &table);
        for row in 0..rows {
            same_bits("k", k.row(row), &y.row(row)[..e]);
        }
        let mut want = vec![0.0; x.len()];
        for (at, &value) in x.iter().enumerate() {
            let (t, head, lane) = (at / (heads * e), at / e * e, at % e);
            let (sin, cos) = f64::from(positions[t] as f32 * frequencies[lane % (e / 2)]).sin_cos();
            let value = f64::from(value) * f64::from(factor);
            want[head + lane] += value * cos;
            want[head + (lane + e / 2) % e] += value * if lane < e / 2 { sin } else { -sin };
        }
        assert_near("y", y.data(), &want, 1e-6);
    }
}

#[test]
fn backward_is_the_transpose() {
    let (rows, width) = (50, 96);
    let table = RopeTable::whole(&frequencies(32), 1.0, 512);
    let [x, dy] = [1, 2].map(|seed| tensor(seed, rows, width, 1.0));
    let (mut y, mut dx) = (x.clone(), dy.clone());
    let (mut k, mut dk) = (x.clone(), dy.clone());
    forward(&mut y, &mut k, &positions(rows)[..].into(), &table);
    backward(&mut dx, &mut dk, &positions(rows)[..].into(), &table);
    same_bits("dk", dk.data(), dx.data());
    let dot = |a: &Tensor, b: &Tensor| -> f64 {
        a.data().iter().zip(b.data()).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    assert!((dot(&y, &dy) - dot(&x, &dx)).abs() < 1e-4);
    // And the inverse, since it is a rotation.
    backward(&mut y, &mut k, &positions(rows)[..].into(), &table);
    assert_near("x", y.data(), &wide(x.data()), 1e-6);
}

#[test]
#[should_panic(expected = "position 512 of a table of 512")]
fn a_position_outside_the_table_is_rejected() {
    forward(
        &mut Tensor::zeros(1, 4),
        &mut Tensor::zeros(1, 4),
        &[512][..].into(),
        &RopeTable::whole(&frequencies(4), 1.0, 512),
    );
}

#[test]
fn a_rope_table_contains_the_requested_positions_and_not_the_whole_context() {
    let context = 20_000;
    let table = RopeTable::whole(&frequencies(64), 1.0, context);
    let all = RopeTable::whole(&frequencies(64), 1.0, 5000);
    all.reserve(5000);
    let x = tensor(1, 2, 64, 1.0);
    for (last, held) in [(3, 1024), (1023, 1024), (1024, 2048), (4999, 8192), (19_999, context)] {
        let at = [0, last];
        let (mut y, mut k) = (x.clone(), x.clone());
        forward(&mut y, &mut k, &at[..].into(), &table);
        assert_eq!(table.positions(), held, "position {last}");
        if last < 5000 {
            let (mut want, mut k) = (x.clone(), x.clone());
            forward(&mut want, &mut k, &at[..].into(), &all);
            same_bits("a table that grew", y.data(), want.data());
        }
    }
}
