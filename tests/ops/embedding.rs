//! Gathering and scattering rows in every layout.

use super::numbers::{normals, same_bits};
use rlhf_hpc::device::cpu::pool;
use rlhf_hpc::ops::embedding::{backward_part, forward_part};
use rlhf_hpc::tensor::{Layout, PANEL, Slice, Tensor, Weight, WeightMut};

const SHAPES: &[(usize, usize)] = &[(1, 1), (31, 8), (33, 7), (100, 12), (512, 256)];

fn tokens(v: usize, t: usize) -> Vec<u32> {
    // Repeats are common, and rows far apart.
    (0..t).map(|i| (i * i * 7 % v) as u32).collect()
}

/// The matrix (v, d) laid out, padding zero.
fn lay_out(w: &[f32], v: usize, d: usize, layout: Layout) -> Vec<f32> {
    let mut laid = vec![0.0; layout.len(v, d)];
    for n in 0..v {
        for c in 0..d {
            laid[layout.index(d, n, c)] = w[n * d + c];
        }
    }
    laid
}

#[test]
fn a_row_of_either_layout_comes_out_whole() {
    for &(v, d) in SHAPES {
        let (w, tokens) = (normals(1, v * d, 1.0), tokens(v, 300));
        for layout in [Layout::Row, Layout::Panel] {
            let laid = lay_out(&w, v, d, layout);
            let mut y = Tensor::scratch(300, d);
            forward_part(&tokens[..].into(), 0, Weight { n: v, k: d, layout, values: Slice::F32(&laid) }, &mut y);
            for (t, &token) in tokens.iter().enumerate() {
                same_bits("y", y.row(t), &w[token as usize * d..(token as usize + 1) * d]);
            }
        }
    }
}

#[test]
fn bf16_panels_with_interleaved_columns_come_out_whole() {
    for &(v, d) in SHAPES {
        let w: Vec<half::bf16> = normals(1, v * d, 1.0).into_iter().map(half::bf16::from_f32).collect();
        let mut laid = vec![0u16; Layout::Panel.len(v, d)];
        for n in 0..v {
            for c in 0..d {
                let panel = n / PANEL * PANEL * d.next_multiple_of(2);
                laid[panel + c / 2 * 2 * PANEL + n % PANEL * 2 + c % 2] = w[n * d + c].to_bits();
            }
        }
        let (tokens, mut y) = (tokens(v, 50), Tensor::scratch(50, d));
        forward_part(
            &tokens[..].into(),
            0,
            Weight { n: v, k: d, layout: Layout::Panel, values: Slice::Bf16(&laid) },
            &mut y,
        );
        for (t, &token) in tokens.iter().enumerate() {
            let row: Vec<f32> = w[token as usize * d..(token as usize + 1) * d].iter().map(|x| x.to_f32()).collect();
            same_bits("y", y.row(t), &row);
        }
    }
}

#[test]
fn gradients_of_one_token_add_up_in_order_for_any_number_of_threads() {
    for &(v, d) in SHAPES {
        let (start, dy, tokens) = (normals(1, v * d, 1.0), normals(2, 300 * d, 1.0), tokens(v, 300));
        let mut want = start.clone();
        for (t, &token) in tokens.iter().enumerate() {
            (0..d).for_each(|c| want[token as usize * d + c] += dy[t * d + c]);
        }
        let dy = Tensor::from_slice(300, d, &dy);
        for (layout, threads) in [(Layout::Row, 1), (Layout::Row, 3), (Layout::Panel, 1), (Layout::Panel, 3)] {
            pool::set_threads(threads);
            let mut laid = lay_out(&start, v, d, layout);
            backward_part(&tokens, 0, &dy, WeightMut { n: v, k: d, layout, values: (&mut laid).into() });
            same_bits("dw", &laid, &lay_out(&want, v, d, layout));
        }
    }
}

#[test]
fn parts_of_the_rows_sum_to_the_whole_and_have_its_gradients() {
    for &(v, d) in SHAPES {
        let (w, dy, tokens) = (normals(1, v * d, 1.0), normals(2, 300 * d, 1.0), tokens(v, 300));
        let dy = Tensor::from_slice(300, d, &dy);
        for layout in [Layout::Row, Layout::Panel] {
            let mut dw = lay_out(&w, v, d, layout);
            backward_part(&tokens, 0, &dy, WeightMut { n: v, k: d, layout, values: (&mut dw).into() });
            let mut sum = vec![0.0f32; 300 * d];
            for (first, end) in [(0, v / 3), (v / 3, v)].into_iter().filter(|(first, end)| first < end) {
                let mut part = lay_out(&w[first * d..end * d], end - first, d, layout);
                let mut y = Tensor::scratch(300, d);
                let weight = Weight { n: end - first, k: d, layout, values: Slice::F32(&part) };
                forward_part(&tokens[..].into(), first, weight, &mut y);
                sum.iter_mut().zip(y.data()).for_each(|(sum, y)| *sum += y);
                backward_part(
                    &tokens,
                    first,
                    &dy,
                    WeightMut { n: end - first, k: d, layout, values: (&mut part).into() },
                );
                for (n, c) in (first..end).flat_map(|n| (0..d).map(move |c| (n, c))) {
                    let (got, want) = (part[layout.index(d, n - first, c)], dw[layout.index(d, n, c)]);
                    assert_eq!(got.to_bits(), want.to_bits(), "row {n} of {v}, column {c}");
                }
            }
            let want: Vec<f32> = tokens.iter().flat_map(|&t| w[t as usize * d..][..d].to_vec()).collect();
            same_bits("sum", &sum, &want);
        }
    }
}
