//! Mixtures of experts on the GPU: the choice of experts compared with the CPU, and their products, which have the bits
//! of one GEMM for each expert.

use crate::{device, in_every_order, numbers, on_gpu, rounded};
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cuda::grouped::{self, Groups};
use rlhf_hpc::device::cuda::matmul::{self, Addend, Matrix, MatrixMut, Tile, Way};
use rlhf_hpc::device::cuda::{Memory, gpu};
use rlhf_hpc::dtype::DType::{Bf16, F32};
use rlhf_hpc::ops::experts::{self, Routing, Rule};
use rlhf_hpc::ops::rows::Order;
use rlhf_hpc::tensor::Tensor;
use std::sync::Arc;

/// (rows, experts, chosen): one row, tails of warps and blocks, experts without rows, and more rows than a block has
/// threads.
const SHAPES: [(usize, usize, usize); 6] =
    [(1, 8, 2), (3, 128, 8), (9, 40, 40 - 8), (70, 8, 1), (130, 16, 4), (700, 8, 8)];

/// Logits with many ties, and of which the last expert's are small.
fn logits(rows: usize, experts: usize) -> Vec<f32> {
    let mut all = numbers(3, rows * experts);
    for (i, x) in all.iter_mut().enumerate() {
        *x = (*x * 6.0).round() / 2.0 - if i % experts == experts - 1 { 3.0 } else { 0.0 };
    }
    all
}

fn routed(device: Device, values: &[f32], [rows, experts, k]: [usize; 3], renormalizes: bool) -> Routing {
    Routing::new(Tensor::from_slice(rows, experts, values).on(device, F32), k, Rule::Softmax { renormalizes })
}

fn assert_near(what: &str, got: &[f32], want: &[f32], relative: f32, absolute: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= relative * want.abs() + absolute, "{what}: [{i}] is {got}, needs {want}");
    }
}

#[test]
fn experts_weights_and_gradients_of_routers_equal_the_cpus_and_rows_are_independent() {
    in_every_order(|| {
        for (rows, experts, k) in SHAPES {
            for renormalizes in [false, true] {
                let (what, values) = (format!("{rows} {experts} {k} {renormalizes}"), logits(rows, experts));
                let run = |device| routed(device, &values, [rows, experts, k], renormalizes);
                let [got, want] = [Device::Cuda, Device::Cpu].map(run);
                assert_eq!(got.chosen(), want.chosen(), "{what}");
                assert_near(&what, &got.weights.to_host(), &want.weights.to_host(), 2e-6, 0.0);
                assert_near(&what, &got.probabilities.to_host(), &want.probabilities.to_host(), 2e-6, 1e-30);
                let (dweights, slope) = (numbers(5, rows * k), numbers(6, experts));
                for slope in [None, Some(&slope[..])] {
                    let back = |routing: &Routing, device| {
                        let dweights = Tensor::from_slice(rows, k, &dweights).on(device, F32);
                        routing.backward(&dweights, slope).to_host()
                    };
                    let [got, want] = [back(&got, Device::Cuda), back(&want, Device::Cpu)];
                    assert_near(&what, &got, &want, 1.0 / 250.0, 1e-6);
                }
                let at = rows / 2;
                let row = &values[at * experts..(at + 1) * experts];
                let alone = routed(Device::Cuda, row, [1, experts, k], renormalizes);
                assert_eq!(*alone.chosen(), got.chosen()[at * k..(at + 1) * k], "{what}");
                assert_eq!(alone.weights.to_host(), got.weights.to_host()[at * k..(at + 1) * k], "{what}");
                let sums = got.sums_on_gpu().expect("a GPU chose").to_host();
                let counts: Vec<f32> = want.groups.counts().map(|count| count as f32).collect();
                assert_eq!(sums[..experts], counts, "{what}");
                let p = want.probabilities.to_host();
                let of = |f: fn(f32) -> f32| {
                    (0..experts).map(|e| p.iter().skip(e).step_by(experts).map(|p| f(*p)).sum()).collect::<Vec<f32>>()
                };
                assert_near(&what, &sums[experts..2 * experts], &of(|p| p), 1e-5, 0.0);
                assert_near(&what, &sums[2 * experts..], &of(|p| -p * p.ln()), 1e-4, 0.0);
            }
        }
    });
}

#[test]
fn a_router_puts_nan_below_all_numbers() {
    let (_gpu, _one) = device();
    let mut values = vec![f32::NAN, f32::NEG_INFINITY, 3.0, f32::NAN, f32::NAN, 1.0, 3.0, -1.0];
    values.extend([0.5; 8]);
    assert_eq!(*routed(Device::Cuda, &values, [2, 8, 3], true).chosen(), [2, 5, 6, 0, 1, 2]);
    assert_eq!(routed(Device::Cuda, &values, [2, 8, 6], true).chosen()[..6], [0, 1, 2, 5, 6, 7]);
}

#[test]
fn rows_of_experts_are_gathered_summed_and_weighed_as_on_the_cpu() {
    in_every_order(|| {
        for ((rows, experts, k), d) in SHAPES.into_iter().zip([8, 24, 64, 96, 264, 16]) {
            let (what, values) = (format!("{rows} {experts} {k} of {d}"), logits(rows, experts));
            let tensor =
                |device, seed, rows| Tensor::from_slice(rows, d, &rounded(&numbers(seed, rows * d))).on(device, Bf16);
            let run = |device: Device| {
                let routing = routed(device, &values, [rows, experts, k], true);
                let (c, y) = (tensor(device, 8, rows), tensor(device, 9, rows * k));
                let gathered = routing.gather(&c);
                let mut sums = [(); 4].map(|()| tensor(device, 10, rows));
                let [plain, onto, added, scattered] = &mut sums;
                routing.combine(&y, experts::Addend::Nothing, plain);
                routing.combine(&y, experts::Addend::Values(&c), onto);
                routing.combine(&y, experts::Addend::Result, added);
                routing.scatter(&y, scattered);
                let [mut act, mut dact] = [11, 12].map(|seed| tensor(device, seed, rows * k));
                let slopes = experts::weigh(&mut act, &mut dact, &routing.row_weights());
                let dweights = routing.of_row_weights(&slopes);
                (gathered.to_host(), sums.map(|x| x.to_host()), [act, dact].map(|x| x.to_host()), dweights.to_host())
            };
            let [got, want] = [Device::Cuda, Device::Cpu].map(run);
            assert_eq!(got.0, want.0, "{what}");
            let bf16 = 1.0 / 255.0;
            for (got, want) in got.1.iter().zip(&want.1).chain(got.2.iter().zip(&want.2)) {
                assert_near(&what, got, want, bf16, 2e-6);
            }
            assert_near(&format!("{what}: dweights"), &got.3, &want.3, 1e-5, 1e-6 * d as f32);
        }
    });
}

#[test]
fn numbers_of_rows_reach_the_host_and_orders_of_rows_are_applied_and_undone_as_on_the_cpu() {
    in_every_order(|| {
        for (rows, experts, k) in SHAPES {
            let values = logits(rows, experts);
            let [got, want] =
                [Device::Cuda, Device::Cpu].map(|device| routed(device, &values, [rows, experts, k], true).counts());
            assert_eq!(got, want, "{rows} {experts} {k}");
        }
        for (rows, width, dtype) in [(0, 8, Bf16), (7, 16, Bf16), (301, 8, Bf16), (0, 1, F32), (301, 1, F32)] {
            let order: Vec<u32> = (0..rows as u32).map(|i| i * 4 % rows as u32).collect();
            let values = rounded(&numbers(2, rows * width));
            let run = |device| {
                let (order, x) =
                    (Order::new(device, order.clone()), Tensor::from_slice(rows, width, &values).on(device, dtype));
                let there = order.apply(&x);
                assert_eq!(order.undo(&there).to_host(), values, "{rows} x {width}");
                there.to_host()
            };
            assert_eq!(run(Device::Cuda), run(Device::Cpu), "{rows} x {width}");
        }
    });
}

/// The rows of each expert: few and many, none, of one or of all, and tails of all tiles.
const COUNTS: [&[usize]; 5] = [&[1], &[0, 3, 0, 17, 1], &[64, 65, 0, 16, 15, 33, 2, 130], &[0, 0, 0, 7], &[0, 0]];

/// Matrices in one memory, of `n` rows and `k` columns.
fn matrices(memory: &Memory, n: usize, k: usize) -> Vec<Matrix<'_>> {
    let view = memory.view(Bf16);
    (0..view.len() / (n * k)).map(|e| Matrix::new(view.part(e * n * k..(e + 1) * n * k), n, k)).collect()
}

fn rows_of(memory: &Memory, width: usize, rows: std::ops::Range<usize>) -> Matrix<'_> {
    Matrix::new(memory.view(Bf16).part(rows.start * width..rows.end * width), rows.len(), width)
}

fn whole(memory: &mut Memory, s: usize, width: usize) -> MatrixMut<'_> {
    MatrixMut::new(memory.view_mut(Bf16).part(0..s * width), s, width)
}

fn check_products(counts: &[usize], n: usize, k: usize, tile: Tile) {
    let (s, count) = (counts.iter().sum::<usize>(), counts.len());
    let ends: Vec<u32> = (0..=count).map(|e| counts[..e].iter().sum::<usize>() as u32).collect();
    let rows = |e: usize| ends[e] as usize..ends[e + 1] as usize;
    let what = format!("{counts:?} rows, {n} x {k}, {tile:?}");
    let ends_on_gpu = Arc::new(Memory::from_values(&ends));
    let (groups, way) = (&Groups { ends: ends_on_gpu, count, rows: s }, Way::Exact(tile));
    let random = |seed: u32, len: usize| on_gpu(Bf16, &numbers(seed, len));
    let (x, dy, w, w_1) = (random(1, s * k), random(2, s * n), random(3, count * n * k), random(4, count * n * k));
    let bits = |memory: &Memory, len: usize| memory.read::<u16>(len);
    let dense = Way::Exact(Tile::Rows64);

    let [mut y, mut y_1] = [(); 2].map(|()| random(5, s * n));
    let lists = [(&w, &mut y), (&w_1, &mut y_1)].map(|(w, y)| (matrices(w, n, k), whole(y, s, n)));
    grouped::forward(way, rows_of(&x, k, 0..s), groups, lists);
    for (w, y) in [(&w, &y), (&w_1, &y_1)] {
        let mut want = Memory::zeros(2 * s * n);
        for (e, w) in matrices(w, n, k).into_iter().enumerate() {
            let to = MatrixMut::new(want.view_mut(Bf16).part(rows(e).start * n..rows(e).end * n), rows(e).len(), n);
            matmul::forward(dense, rows_of(&x, k, rows(e)), w, None, Addend::Nothing, to);
        }
        assert_eq!(bits(y, s * n), bits(&want, s * n), "y of {what}");
    }
    for add in [false, true] {
        let [mut dx, mut want] = [(); 2].map(|()| random(6, s * k));
        let all = matrices(&w, n, k);
        grouped::backward_input(way, rows_of(&dy, n, 0..s), groups, &all, whole(&mut dx, s, k), add);
        for (e, w) in all.into_iter().enumerate() {
            let to = MatrixMut::new(want.view_mut(Bf16).part(rows(e).start * k..rows(e).end * k), rows(e).len(), k);
            matmul::backward_input(dense, rows_of(&dy, n, rows(e)), w, to, add);
        }
        assert_eq!(bits(&dx, s * k), bits(&want, s * k), "dx of {what}");
    }
    let [mut dw, mut want] = [(); 2].map(|()| Memory::from_values(&numbers(7, count * n * k)));
    let mut rest = dw.view_mut(F32);
    let mut each = Vec::new();
    for _ in 0..count {
        let (own, after) = rest.split(n * k);
        each.push(MatrixMut::new(own, n, k));
        rest = after;
    }
    grouped::backward_weight(way, rows_of(&dy, n, 0..s), rows_of(&x, k, 0..s), groups, each);
    for e in 0..count {
        let to = MatrixMut::new(want.view_mut(F32).part(e * n * k..(e + 1) * n * k), n, k);
        matmul::backward_weight(dense, rows_of(&dy, n, rows(e)), rows_of(&x, k, rows(e)), to);
    }
    let bits = |memory: &Memory| memory.read::<u32>(count * n * k);
    assert_eq!(bits(&dw), bits(&want), "dW of {what}");
}

#[test]
fn products_of_groups_have_the_bits_of_one_gemm_for_each_group_in_every_tile_and_order() {
    in_every_order(|| {
        let can_be_wide = !crate::on_a_real_gpu() || gpu().properties().has_wgmma();
        for tile in Tile::OF_GROUPS.into_iter().filter(|tile| can_be_wide || !Tile::WIDE.contains(tile)) {
            for (counts, (n, k)) in COUNTS.into_iter().zip([(24, 8), (40, 136), (72, 40), (8, 264), (16, 8)]) {
                check_products(counts, n, k, tile);
            }
        }
    });
}
