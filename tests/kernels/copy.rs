use crate::{bf16, in_every_order, numbers, on_gpu, rounded};
use rlhf_hpc::device::cuda::{Memory, ScatterLists, copy};
use rlhf_hpc::dtype::DType::{self, Bf16, F32};

const LENS: [usize; 8] = [0, 1, 7, 8, 9, 300, 2048, 5003];

/// `values` as a memory of `dtype` holds them.
fn held(dtype: DType, values: &[f32]) -> Vec<f32> {
    match dtype {
        F32 => values.to_vec(),
        Bf16 => rounded(values),
    }
}

#[test]
fn ranges_of_any_length_and_offset_are_cast_and_added_completely() {
    in_every_order(|| {
        for len in LENS {
            for skip in [0, 3, 8] {
                let (a, b) = (numbers(1, len), numbers(2, skip + len + 9));
                let range = skip..skip + len;
                for dtype in [F32, Bf16] {
                    for to in [F32, Bf16] {
                        let (from, mut into) = (on_gpu(dtype, &a), on_gpu(to, &b));
                        copy::cast(from.view(dtype), into.view_mut(to).part(range.clone()));
                        let mut want = held(to, &b);
                        want[range.clone()].copy_from_slice(&held(to, &held(dtype, &a)));
                        assert_eq!(into.view(to).to_f32()[..b.len()], want, "{len} {dtype:?} from {skip} to {to:?}");
                    }
                }
                let (from, mut into) = (Memory::from_values(&a), Memory::from_values(&b));
                copy::add(from.view(F32), into.view_mut(F32).part(range.clone()));
                let mut want = b.clone();
                want[range.clone()].iter_mut().zip(&a).for_each(|(b, a)| *b += a);
                assert_eq!(into.read::<f32>(b.len()), want, "{len} from {skip}");
            }
        }
    });
}

fn check_columns(dtypes: [DType; 2], rows: usize, width: usize, strides: [usize; 2], skips: [usize; 2]) {
    let [(a, skip_a), (b, skip_b)] = [0, 1].map(|i| (numbers(3 + i as u32, rows * strides[i] + skips[i]), skips[i]));
    let (from, mut to) = (on_gpu(dtypes[0], &a), on_gpu(dtypes[1], &b));
    let (view, view_mut) = (from.view(dtypes[0]), to.view_mut(dtypes[1]));
    let (from_len, to_len) = (view.len(), view_mut.len());
    let (view, view_mut) = (view.part(skip_a..from_len), view_mut.part(skip_b..to_len));
    copy::columns(view, strides[0], view_mut, strides[1], rows, width);
    let (a, mut want) = (held(dtypes[1], &held(dtypes[0], &a)), held(dtypes[1], &b));
    for r in 0..rows {
        for c in 0..width {
            want[r * strides[1] + skip_b + c] = a[r * strides[0] + skip_a + c];
        }
    }
    let got = to.view(dtypes[1]).to_f32();
    assert_eq!(got, want, "{rows} x {width} {dtypes:?}, {strides:?} apart, from {skips:?}");
}

#[test]
fn columns_are_copied_between_rows_of_different_widths() {
    in_every_order(|| {
        for dtypes in [[F32, F32], [F32, Bf16], [Bf16, F32], [Bf16, Bf16]] {
            for rows in [0, 1, 3, 40] {
                check_columns(dtypes, rows, 24, [24, 64], [0, 16]);
                check_columns(dtypes, rows, 64, [96, 64], [8, 0]);
                // Vocabulary shards of odd sizes.
                check_columns(dtypes, rows, 13, [13, 39], [0, 13]);
                check_columns(dtypes, rows, 16, [16, 37], [0, 8]);
                check_columns(dtypes, rows, 8, [8, 32], [0, 3]);
            }
        }
    });
}

#[test]
fn rows_are_gathered_and_contributions_to_one_row_are_summed_and_rounded_once() {
    in_every_order(|| {
        for width in [8, 24, 96, 4096] {
            for rows in [vec![], vec![2], vec![6, 0, 6, 6, 3, 1, 6, 6, 6]] {
                let x = numbers(5, 7 * width);
                let n = rows.len();
                let mut y = Memory::scratch(2 * n * width);
                copy::gather(on_gpu(Bf16, &x).view(Bf16), width, &Memory::from_values(&rows), y.view_mut(Bf16));
                let x = rounded(&x);
                let row = |i: usize| rows[i / width] as usize * width + i % width;
                let want: Vec<f32> = (0..n * width).map(|i| x[row(i)]).collect();
                assert_eq!(y.view(Bf16).to_f32(), want, "{rows:?} of width {width}");
                let mut back = Memory::zeros(2 * 7 * width);
                copy::scatter(y.view(Bf16), width, &ScatterLists::from_keys(&rows), back.view_mut(Bf16));
                let mut sums = vec![0.0f32; 7 * width];
                (0..n * width).for_each(|i| sums[row(i)] += want[i]);
                assert_eq!(back.read::<u16>(7 * width), bf16(&sums), "{rows:?} of width {width}");
            }
        }
    });
}
