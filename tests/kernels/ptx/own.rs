//! The machine against the tables of the PTX ISA document, on kernels that are written by hand (`probe.ptx`). They are PTX only
//! in the process that the first fact starts, which runs the others.

use super::{facts, library};
use crate::device;
use half::bf16;
use rlhf_hpc::device::cuda::{Arg, Gpu, Memory};
use std::panic::{AssertUnwindSafe, catch_unwind};

const LANES: usize = 32;

/// Where it is kind; see `hardware`.
#[test]
fn what_the_machine_computes_and_notices_is_what_the_document_says() {
    let Some(library) = library("sm_80", &[], &[]) else { return };
    facts(&library, &["--ignored", "ptx::own::"], 12, &[]);
}

/// What a kernel of one warp leaves of `x` in `words` words a thread: word k of thread t stands at k * 32 + t.
pub fn run(kernel: &'static str, x: &[u32], words: usize) -> Vec<u32> {
    let (gpu, _one) = device();
    let (x, mut y) = (Memory::of(x), Memory::of(&vec![0u32; words * LANES]));
    gpu.launch(kernel, [1, 1, 1], LANES, 0, &[x.arg(), y.arg_mut()]);
    y.read(words * LANES)
}

/// Numbers that look random.
fn mixed(seed: u32) -> u32 {
    let x = seed.wrapping_mul(0x9e37_79b9) ^ 0x85eb_ca6b;
    (x ^ x >> 15).wrapping_mul(0x2c1b_3c6d) ^ x >> 13
}

#[test]
#[ignore = "what_the_machine_computes_and_notices_is_what_the_document_says starts it on kernels of PTX"]
fn integers_are_those_of_the_document() {
    let a: Vec<u32> = (0..32).map(|i| if i == 0 { 0 } else { mixed(i) }).collect();
    let b: Vec<u32> = (0..32).map(|i| mixed(i + 100) | 1).collect();
    // Shifts and lengths around the width, and selectors of bytes.
    let c: Vec<u32> = (0..32).map(|i| if i < 20 { i * 3 } else { mixed(i + 200) & 0xffff }).collect();
    let y = run("own_integers", &[a.clone(), b.clone(), c.clone()].concat(), 20);
    let field = |a: u32, pos: u32, len: u32, signed: bool| -> u32 {
        let (pos, len) = (pos & 255, len & 255);
        let sign = if signed && len > 0 { a >> (pos + len - 1).min(31) & 1 } else { 0 };
        (0..32).map(|k| if k < len && pos + k < 32 { (a >> (pos + k) & 1) << k } else { sign << k }).sum()
    };
    for t in 0..LANES {
        let (a, b, c) = (a[t], b[t], c[t]);
        let (wide, both) = (i64::from(a as i32) * i64::from(b as i32), u64::from(b) << 32 | u64::from(a));
        let ones = if c & 255 < 32 { 31u32 << (c & 255) } else { 0 };
        let given = if c & 255 < 32 { a << (c & 255) } else { 0 };
        let bytes = (0..4).map(|k| {
            let byte = (both >> (8 * (c >> (4 * k) & 7)) & 255) as u32;
            (if c >> (4 * k) & 8 == 0 { byte } else { 255 * (byte >> 7) }) << (8 * k)
        });
        let want = [
            ((u64::from(a) * u64::from(b)) >> 32) as u32,
            (wide >> 32) as u32,
            a.wrapping_mul(b).wrapping_add(c),
            a.checked_shl(c).unwrap_or(0),
            ((a as i32) >> c.min(31)) as u32,
            field(a, b, c, false),
            field(a, b, c, true),
            (b & !ones) | (given & ones),
            bytes.sum(),
            (both << (c & 31) >> 32) as u32,
            (both >> c.min(32)) as u32,
            a ^ b ^ c,
            a.count_ones(),
            a.leading_zeros(),
            a.reverse_bits(),
            (a as i32).min(b as i32) as u32,
            a.max(b),
            (wide >> 32) as u32,
            (a as i32).wrapping_rem(b as i32) as u32,
            a.wrapping_sub(b),
        ];
        for (k, want) in want.into_iter().enumerate() {
            assert_eq!(y[k * LANES + t], want, "operation {k} of {a:#x}, {b:#x}, {c:#x}");
        }
    }
}

#[test]
#[ignore = "what_the_machine_computes_and_notices_is_what_the_document_says starts it on kernels of PTX"]
fn each_rounding_of_a_fused_product_is_that_of_the_exact_sum() {
    let number = |seed: u32| 1.0 + (mixed(seed) >> 9) as f32 / (1 << 23) as f32;
    let [a, b, c] = [1, 2, 3].map(|k| (0..32).map(|i| number(i + 1000 * k)).collect::<Vec<f32>>());
    let x: Vec<u32> = [&a, &b, &c]
        .into_iter()
        .flatten()
        .enumerate()
        .map(|(i, x)| if i % 2 == 0 { x.to_bits() } else { (-x).to_bits() })
        .collect();
    let y = run("own_roundings", &x, 4);
    for t in 0..LANES {
        let [a, b, c] = [0, 1, 2].map(|k| f64::from(f32::from_bits(x[k * LANES + t])));
        // Exact: 48 bits of a product, and a number of the same size.
        let (sum, near) = (a * b + c, (a * b + c) as f32);
        let below = if f64::from(near) > sum { near.next_down() } else { near };
        let above = if f64::from(near) < sum { near.next_up() } else { near };
        let towards_0 = if sum > 0.0 { below } else { above };
        for (k, want) in [near, below, above, towards_0].into_iter().enumerate() {
            assert_eq!(y[k * LANES + t], want.to_bits(), "rounding {k} of {a} * {b} + {c}");
        }
    }
}

#[test]
#[ignore = "what_the_machine_computes_and_notices_is_what_the_document_says starts it on kernels of PTX"]
fn corners_of_floating_point_are_those_of_the_document() {
    let corners =
        [0.0, -0.0, 1.5, -2.5, 3e9, -3e9, f32::INFINITY, -200.0, f32::NAN, 1e-40, 0.5, 2.5, -126.5, 127.0, 1e38, 7.1];
    let others =
        [-0.0, 0.0, f32::NAN, 2.0, 1.0, -3e9, 5.0, 1e-20, 1.0, 2.0, 0.5, -2.5, 3.0, f32::NAN, 1.0 + 1.0 / 256.0, 7.2];
    let of = |values: [f32; 16]| values.into_iter().cycle().take(32).map(f32::to_bits).collect::<Vec<u32>>();
    let y = run("own_corners", &[of(corners), of(others)].concat(), 15);
    let canonical = |x: f32| if x.is_nan() { 0x7fff } else { u32::from(bf16::from_f32(x).to_bits()) };
    let flushed = |x: f32| if x.is_subnormal() { 0.0f32.copysign(x) } else { x };
    for t in 0..LANES {
        let (a, b) = (corners[t % 16], others[t % 16]);
        let got = |k: usize| y[k * LANES + t];
        let zeros = a == 0.0 && b == 0.0;
        assert_eq!(got(0), if zeros { (-0.0f32).to_bits() } else { a.min(b).to_bits() }, "min {a} {b}");
        assert_eq!(got(1), if zeros { 0 } else { a.max(b).to_bits() }, "max {a} {b}");
        let unordered = a.is_nan() || b.is_nan();
        assert_eq!([got(2), got(3)], [u32::from(a < b), u32::from(a < b || unordered)], "{a} < {b}");
        assert_eq!([got(4), got(5)], [u32::from(a != b && !unordered), u32::from(a != b)], "{a} is not {b}");
        // As in Rust: beyond the ends the end, NaN 0.
        assert_eq!([got(6), got(7)], [a as i32 as u32, a.round_ties_even() as i32 as u32], "{a} as an integer");
        assert_eq!(got(8), canonical(a) << 16 | canonical(b), "bf16 of {a} and {b}");
        assert_eq!(got(9), if a > 0.0 { a.min(1.0) } else { 0.0 }.to_bits(), "{a} in 0..1");
        let power = f64::from(a).exp2();
        let power = if power < f64::from(f32::MIN_POSITIVE) { 0.0 } else { power as f32 };
        assert!(f32::from_bits(got(10)) == power || (a.is_nan() && f32::from_bits(got(10)).is_nan()), "2^{a}");
        let inverse = flushed(1.0 / flushed(a));
        assert!(f32::from_bits(got(11)).to_bits() == inverse.to_bits() || a.is_nan(), "1 / {a}");
        if !a.is_nan() {
            assert_eq!([got(12), got(13)], [a.ceil().to_bits(), a.floor().to_bits()], "{a} up and down");
        }
        let product = flushed(flushed(a) * flushed(b));
        assert!(got(14) == product.to_bits() || product.is_nan(), "{a} * {b}");
    }
}

/// Rows and columns of the fragments of mma.m16n8k16 (section 9.7.15.5.8): of value i in lane l.
pub fn place_a(l: usize, i: usize) -> (usize, usize) {
    (l / 4 + if (2..4).contains(&i) || i >= 6 { 8 } else { 0 }, l % 4 * 2 + i % 2 + if i >= 4 { 8 } else { 0 })
}
pub fn place_b(l: usize, i: usize) -> (usize, usize) {
    (l % 4 * 2 + i % 2 + if i >= 2 { 8 } else { 0 }, l / 4)
}
pub fn place_c(l: usize, i: usize) -> (usize, usize) {
    (l / 4 + if i >= 2 { 8 } else { 0 }, l % 4 * 2 + i % 2)
}

#[test]
#[ignore = "what_the_machine_computes_and_notices_is_what_the_document_says starts it on kernels of PTX"]
fn products_of_matrices_take_the_fragments_of_the_document() {
    // Small integers, so that every order of sums is exact; no two rows or columns alike.
    let a = |row: usize, k: usize| (row * 16 + k) as f32 - 100.0;
    let b = |k: usize, column: usize| ((k * 8 + column) % 61) as f32 - 30.0;
    let c = |row: usize, column: usize| (1000 * row + column) as f32;
    let pair = |low: f32, high: f32| {
        u32::from(bf16::from_f32(low).to_bits()) | u32::from(bf16::from_f32(high).to_bits()) << 16
    };
    let mut x = vec![0u32; 10 * LANES];
    for l in 0..LANES {
        let of_a = |i| {
            let (row, k) = place_a(l, i);
            a(row, k)
        };
        let of_b = |i| {
            let (k, column) = place_b(l, i);
            b(k, column)
        };
        for r in 0..4 {
            x[r * LANES + l] = pair(of_a(2 * r), of_a(2 * r + 1));
            let (row, column) = place_c(l, r);
            x[(6 + r) * LANES + l] = c(row, column).to_bits();
        }
        for r in 0..2 {
            x[(4 + r) * LANES + l] = pair(of_b(2 * r), of_b(2 * r + 1));
        }
    }
    let y = run("own_mma", &x, 4);
    for l in 0..LANES {
        for i in 0..4 {
            let (row, column) = place_c(l, i);
            let want = c(row, column) + (0..16).map(|k| a(row, k) * b(k, column)).sum::<f32>();
            assert_eq!(f32::from_bits(y[i * LANES + l]), want, "row {row}, column {column}");
        }
    }
}

#[test]
#[ignore = "what_the_machine_computes_and_notices_is_what_the_document_says starts it on kernels of PTX"]
fn matrices_come_from_shared_memory_by_rows_and_by_columns() {
    // Thread t stores row t % 8 of matrix t / 8: values 256 t + 2 k and 256 t + 2 k + 1 in word k.
    let x: Vec<u32> = (0..4 * 32)
        .map(|i| {
            let (k, t) = (i / 32, i % 32);
            (256 * t + 2 * k) | ((256 * t + 2 * k + 1) << 16)
        })
        .collect();
    let y = run("own_matrices", &x, 8);
    let value = |m: usize, row: usize, column: usize| (256 * (8 * m + row) + column) as u32;
    for l in 0..LANES {
        let (i, j) = (l / 4, l % 4 * 2);
        for m in 0..4 {
            assert_eq!(y[m * LANES + l], value(m, i, j) | value(m, i, j + 1) << 16, "matrix {m}, lane {l}");
            assert_eq!(
                y[(4 + m) * LANES + l],
                value(m, j, i) | value(m, j + 1, i) << 16,
                "matrix {m} transposed, lane {l}"
            );
        }
    }
}

#[test]
#[ignore = "what_the_machine_computes_and_notices_is_what_the_document_says starts it on kernels of PTX"]
fn shuffles_clamp_and_cut_warps_as_the_document_says() {
    for (by, segment, clamp) in
        [(1, 0, 31), (5, 0, 31), (3, 0x18, 7), (2, 0x18, 7), (40, 0x10, 0), (1, 0, 0), (31, 0, 31)]
    {
        let x: Vec<u32> = (0..32).map(|l| 100 + l).chain([by; 32]).chain([segment << 8 | clamp; 32]).collect();
        let y = run("own_shuffles", &x, 8);
        for lane in 0..32i32 {
            let (by, segment, clamp) = ((by & 31) as i32, segment as i32, clamp as i32);
            let (most, least) = ((lane & segment) | (clamp & !segment), lane & segment);
            let from = [lane - by, lane + by, lane ^ by, least | (by & !segment)];
            for (way, from) in from.into_iter().enumerate() {
                let within = if way == 0 { from >= most } else { from <= most };
                let want = 100 + if within { from as u32 & 31 } else { lane as u32 };
                let got = [0, 1].map(|k| y[(2 * way + k) * LANES + lane as usize]);
                assert_eq!(got, [want, u32::from(within)], "way {way} by {by}, lane {lane}, {segment:#x} {clamp}");
            }
        }
    }
}

#[test]
#[ignore = "what_the_machine_computes_and_notices_is_what_the_document_says starts it on kernels of PTX"]
fn votes_count_the_lanes_that_are_there() {
    let x: Vec<u32> = (0..32).map(|l| mixed(l) % 5).collect();
    let y = run("own_votes", &x, 7);
    let odd: u32 = (0..32).filter(|l| x[*l] % 2 == 1).map(|l| 1 << l).sum();
    for l in 0..LANES {
        let same: u32 = (0..32).filter(|k| x[*k] == x[l]).map(|k| 1 << k).sum();
        let (there, votes) = if x[l] % 2 == 1 { (odd, 7) } else { (!odd, 0) };
        let got: Vec<u32> = (0..7).map(|k| y[k * LANES + l]).collect();
        assert_eq!(got, [odd, u32::from(odd != 0), 0, same, x.iter().sum(), there, votes], "lane {l}");
    }
}

#[test]
#[ignore = "what_the_machine_computes_and_notices_is_what_the_document_says starts it on kernels of PTX"]
fn lanes_that_part_meet_again() {
    let x: Vec<u32> = (0..32).map(|l| mixed(l) % 23).collect();
    let y = run("own_parting", &x, 2);
    let want: Vec<u32> = x.iter().map(|n| (0..*n).map(|i| i + if i % 2 == 1 { 100 } else { 0 }).sum()).collect();
    assert_eq!(y[..LANES], want);
    assert!((0..LANES).all(|l| y[LANES + l] == want[l ^ 1]));
}

#[test]
#[ignore = "what_the_machine_computes_and_notices_is_what_the_document_says starts it on kernels of PTX"]
fn copies_fill_with_zeros_and_groups_are_waited_for_in_their_order() {
    let given: Vec<u32> = (0..32).map(|l| l % 5 * 4).collect();
    let values: Vec<u32> = (0..128).map(|i| 1000 + i).collect();
    let y = run("own_copies", &[given.clone(), values.clone()].concat(), 4);
    for l in 0..LANES {
        for k in 0..4 {
            let want = if 4 * k < given[l] as usize { values[4 * l + k] } else { 0 };
            assert_eq!(y[k * LANES + l], want, "lane {l}, word {k}");
        }
    }
    let x = Memory::of(&values);
    let mut y = Memory::of(&[0u32; 32]);
    assert_eq!(said("own_groups", &[x.arg(), y.arg_mut(), Arg::U32(0)]), None);
    assert_eq!(y.read::<u32>(2), [1000, 1004]);
    let why = said("own_groups", &[x.arg(), y.arg_mut(), Arg::U32(512)]).expect("the second group is under way");
    assert!(why.contains("on its way"), "{why}");
}

/// What the machine says of a launch of one warp, if it ends it.
fn said(kernel: &'static str, args: &[Arg]) -> Option<String> {
    let (gpu, _one) = device();
    launched(gpu, kernel, 1, args)
}

pub fn launched(gpu: &Gpu, kernel: &'static str, blocks: usize, args: &[Arg]) -> Option<String> {
    let run = || gpu.launch(kernel, [blocks, 1, 1], LANES, 0, args);
    catch_unwind(AssertUnwindSafe(run)).err().map(|panic| crate::words(&*panic))
}

#[test]
#[ignore = "what_the_machine_computes_and_notices_is_what_the_document_says starts it on kernels of PTX"]
fn blocks_that_wait_for_later_ones_give_way_to_them() {
    let blocks = 40;
    let (gpu, _one) = device();
    for order in 0..5 {
        gpu.set_order(order);
        let (mut x, mut y) = (Memory::of(&[0u32; 2]), Memory::of(&[1u32; 1]));
        assert_eq!(launched(gpu, "own_turns", blocks, &[x.arg_mut(), y.arg_mut()]), None);
        let want = (0..blocks as u32).fold(1u32, |sum, turn| sum.wrapping_mul(3).wrapping_add(turn));
        assert_eq!((x.read::<u32>(2), y.read::<u32>(1)), (vec![blocks as u32; 2], vec![want]));
    }
    gpu.set_order(0);
    // A turn that never comes.
    let (mut x, mut y) = (Memory::of(&[0u32, 1000]), Memory::of(&[1u32; 1]));
    let why = launched(gpu, "own_turns", 3, &[x.arg_mut(), y.arg_mut()]).expect("nobody gives that turn");
    assert!(why.contains("what never comes"), "{why}");
}

#[test]
#[ignore = "what_the_machine_computes_and_notices_is_what_the_document_says starts it on kernels of PTX"]
fn addresses_of_every_space_are_generic_too() {
    let x: Vec<u32> = (0..32).map(mixed).collect();
    assert_eq!(run("own_spaces", &x, 2), [x.clone(), x].concat());
}

#[test]
#[ignore = "what_the_machine_computes_and_notices_is_what_the_document_says starts it on kernels of PTX"]
fn each_fault_is_told_with_its_thread_and_line() {
    let x = Memory::of(&(1..=32).collect::<Vec<u32>>());
    let mut y = Memory::scratch(8192);
    let faults = [
        ("own_missing", "lanes of a warp part: thread 0 is at an instruction of several lanes, thread 16 at its end"),
        ("own_unnamed", "is not among the lanes"),
        ("own_unwritten", "reads 4 bytes that nobody wrote"),
        ("own_divided", "a division by zero"),
        ("own_factors", "a factor that nobody wrote"),
    ];
    for (kernel, part) in faults {
        let why = said(kernel, &[x.arg(), y.arg_mut()]).unwrap_or_else(|| panic!("{kernel} passes"));
        assert!(why.contains(part), "{why}");
        assert!(why.contains(&format!("({kernel}, block 0,0,0, thread ")) && why.contains(" of its PTX)"), "{why}");
    }
}
