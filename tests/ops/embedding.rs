//! Gathering and scattering rows in every layout.

use super::probe::{Matrix, Numbers, normals, same_bits};
use rlhf_hpc::device::cpu::pool;
use rlhf_hpc::ops::embedding::{backward_part, forward_part};
use rlhf_hpc::tensor::{Layout, Slice, Tensor, Weight, WeightMut};

const SHAPES: &[(usize, usize)] = &[(1, 1), (31, 8), (33, 7), (100, 12), (512, 256)];

fn tokens(v: usize, t: usize) -> Vec<u32> {
    // Repeats are common, and rows far apart.
    (0..t).map(|i| (i * i * 7 % v) as u32).collect()
}

#[test]
fn a_row_of_any_layout_and_dtype_is_gathered_completely() {
    for &(v, d) in SHAPES {
        let (w, tokens) = (Matrix::rounded(v, d, &mut Numbers::new(1)), tokens(v, 300));
        let rows = Weight { n: v, k: d, layout: Layout::Row, values: Slice::F32(&w.rows) };
        for weight in [rows, w.f32(), w.bf16()] {
            let mut y = Tensor::scratch(300, d);
            forward_part(&tokens[..].into(), 0, weight, &mut y);
            for (t, &token) in tokens.iter().enumerate() {
                same_bits("y", y.row(t), &w.rows[token as usize * d..][..d]);
            }
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
        let panels = |rows: &[f32]| Matrix::from_rows(v, d, rows.to_vec()).panels;
        let layouts = [(Layout::Row, start.clone(), want.clone()), (Layout::Panel, panels(&start), panels(&want))];
        for ((layout, start, want), threads) in layouts.iter().flat_map(|layout| [(layout, 1), (layout, 3)]) {
            pool::set_threads(threads);
            let mut dw = start.clone();
            backward_part(&tokens, 0, &dy, WeightMut { n: v, k: d, layout: *layout, values: (&mut dw).into() });
            same_bits("dw", &dw, want);
        }
    }
}
