//! Copies and sums of runs of columns between matrices with the same number of rows.

use crate::device::Device;
use crate::device::cuda;
use crate::tensor::Tensor;

/// `to` = the sum of `parts`, in order. Each part (x, from, at) adds `width` columns of x, from column `from` on, to
/// the columns of `to` from `at` on. `to` is f32. Columns without a part are zero.
pub fn sum(parts: &[(&Tensor, usize, usize)], to: &mut Tensor, width: usize) {
    for (x, from, at) in parts {
        check("sum", x, *from, to, *at, width);
    }
    match to.device() {
        Device::Cpu => {
            to.data_mut().fill(0.0);
            for (x, from, at) in parts {
                for row in 0..x.rows() {
                    let values = &x.row(row)[*from..from + width];
                    to.row_mut(row)[*at..at + width].iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
                }
            }
        }
        Device::Cuda => sum_on_gpu(parts, to, width),
    }
}

/// Computes the sums on a GPU. The nth parts of all places are put side by side, so that one sum adds them.
fn sum_on_gpu(parts: &[(&Tensor, usize, usize)], to: &mut Tensor, width: usize) {
    let (rows, all) = (to.rows(), to.width());
    to.cuda_mut().clear();
    let nth = |i: usize| parts[..i].iter().filter(|(.., at)| *at == parts[i].2).count();
    for n in 0..=(0..parts.len()).map(nth).max().unwrap_or(0) {
        let mut aside = to.statistics(rows, all);
        aside.cuda_mut().clear();
        for (x, from, at) in (0..parts.len()).filter(|i| nth(*i) == n).map(|i| parts[i]) {
            let columns = x.width();
            let values = x.cuda().part(from..rows * columns);
            cuda::copy::columns(values, columns, aside.cuda_mut().part(at..rows * all), all, rows, width);
        }
        cuda::copy::add(aside.cuda(), to.cuda_mut());
    }
}

/// Copies `width` columns of `x`, from column `from` on, to the columns of `to` from `at` on. Rounds if `to` is bf16.
pub fn copy(x: &Tensor, from: usize, to: &mut Tensor, at: usize, width: usize) {
    check("copy", x, from, to, at, width);
    match to.device() {
        Device::Cpu => {
            for row in 0..x.rows() {
                to.row_mut(row)[at..at + width].copy_from_slice(&x.row(row)[from..from + width]);
            }
        }
        Device::Cuda => {
            let (rows, columns, all) = (x.rows(), x.width(), to.width());
            let to = to.cuda_mut().part(at..rows * all);
            cuda::copy::columns(x.cuda().part(from..rows * columns), columns, to, all, rows, width);
        }
    }
}

/// Copies a matrix of `width` columns to the columns of `to` from `at` on. It begins at value `start` of `x`.
pub fn place(x: &Tensor, start: usize, to: &mut Tensor, at: usize, width: usize) {
    let (rows, all) = (to.rows(), to.width());
    let range = start..start + rows * width;
    assert!(at + width <= all, "columns::place: {width} columns from {at} on do not fit in {all}");
    match to.device() {
        _ if range.is_empty() => {}
        Device::Cpu => {
            for (row, values) in x.data()[range].chunks_exact(width).enumerate() {
                to.row_mut(row)[at..at + width].copy_from_slice(values);
            }
        }
        Device::Cuda => {
            let to = to.cuda_mut().part(at..rows * all);
            cuda::copy::columns(x.cuda().part(range), width, to, all, rows, width);
        }
    }
}

/// Takes heads of 2e columns apart: the first and the last e columns of each head.
pub fn split(both: &Tensor, e: usize) -> [Tensor; 2] {
    let (rows, width) = (both.rows(), both.width() / 2);
    check_heads("split", width, e);
    [0, e].map(|from| {
        let mut to = both.like(rows, width);
        match both.device() {
            Device::Cpu => {
                let heads = both.data().chunks_exact(2 * e).map(|head| &head[from..from + e]);
                to.data_mut().chunks_exact_mut(e).zip(heads).for_each(|(to, head)| to.copy_from_slice(head));
            }
            Device::Cuda if rows == 0 => {}
            Device::Cuda => {
                let from = both.cuda().part(from..rows * 2 * width);
                cuda::copy::columns(from, 2 * e, to.cuda_mut(), e, rows * width / e, e);
            }
        }
        to
    })
}

/// The reverse of `split`.
pub fn join(parts: [&Tensor; 2], e: usize) -> Tensor {
    let (rows, width) = (parts[0].rows(), parts[0].width());
    check_heads("join", width, e);
    super::check("columns::join", "the other half", parts[1], rows, width);
    let mut both = parts[0].like(rows, 2 * width);
    for (x, at) in parts.into_iter().zip([0, e]) {
        match x.device() {
            Device::Cpu => {
                let heads = both.data_mut().chunks_exact_mut(2 * e).map(|head| &mut head[at..at + e]);
                heads.zip(x.data().chunks_exact(e)).for_each(|(to, x)| to.copy_from_slice(x));
            }
            Device::Cuda if rows == 0 => {}
            Device::Cuda => {
                let to = both.cuda_mut().part(at..rows * 2 * width);
                cuda::copy::columns(x.cuda(), e, to, 2 * e, rows * width / e, e);
            }
        }
    }
    both
}

fn check_heads(op: &str, width: usize, e: usize) {
    assert!(e > 0 && width.is_multiple_of(e), "columns::{op}: {width} columns are no heads of {e}");
}

fn check(op: &str, x: &Tensor, from: usize, to: &Tensor, at: usize, width: usize) {
    let fits = x.rows() == to.rows() && from + width <= x.width() && at + width <= to.width();
    let shapes = ((x.rows(), x.width()), (to.rows(), to.width()));
    assert!(fits, "columns::{op}: {width} columns from {from} to {at} do not fit the shapes {shapes:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_added_in_order_and_copied_back() {
        let a = Tensor::from_slice(2, 3, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let mut all = Tensor::from_slice(2, 4, &[9.0; 8]);
        sum(&[(&a, 0, 2), (&a, 1, 2), (&a, 2, 0)], &mut all, 1);
        assert_eq!(all.data(), [3.0, 0.0, 3.0, 0.0, 6.0, 0.0, 9.0, 0.0]);
        let mut back = Tensor::from_slice(2, 3, &[7.0; 6]);
        copy(&all, 1, &mut back, 0, 2);
        assert_eq!(back.data(), [0.0, 3.0, 7.0, 0.0, 9.0, 7.0]);
    }

    #[test]
    fn halves_of_heads_are_taken_apart_and_joined() {
        let both = Tensor::from_slice(1, 8, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        let [first, last] = split(&both, 2);
        assert_eq!((first.data(), last.data()), (&[0.0, 1.0, 4.0, 5.0][..], &[2.0, 3.0, 6.0, 7.0][..]));
        assert_eq!(join([&first, &last], 2).data(), both.data());
    }
}
