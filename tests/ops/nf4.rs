//! nf4 against bitsandbytes, bit for bit, and dequantization in every layout and at every instruction level.

use rlhf_hpc::device::simd::{Level, with_level};
use rlhf_hpc::dtype::round_bf16;
use rlhf_hpc::tensor::nf4::{Absmax, BLOCK, Held, Nested, Nf4, TABLE, dequantize};
use rlhf_hpc::tensor::{Layout, PANEL, SliceMut};
use safetensors::SafeTensors;
use std::borrow::Cow;
use std::ops::Range;
use std::path::PathBuf;

struct Golden(Vec<u8>);

impl Golden {
    fn read() -> Self {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/nf4/values.safetensors");
        Self(std::fs::read(path).expect("the golden is checked in"))
    }

    fn get(&self, name: &str) -> (Vec<usize>, &[u8]) {
        let tensor = SafeTensors::deserialize(&self.0).unwrap().tensor(name).unwrap();
        let at = tensor.data().as_ptr() as usize - self.0.as_ptr() as usize;
        (tensor.shape().to_vec(), &self.0[at..at + tensor.data().len()])
    }

    fn f32(&self, name: &str) -> Vec<f32> {
        self.get(name).1.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    fn bf16(&self, name: &str) -> Vec<u16> {
        self.get(name).1.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect()
    }
}

const CASES: [&str; 6] = ["whole", "short", "single", "odd", "zeros", "many"];

fn quantized(values: &[f32], n: usize, k: usize) -> Option<Nf4<'static>> {
    Nf4::quantize(n, k, &|at, to: &mut [f32]| to.copy_from_slice(&values[at..at + to.len()]))
}

fn all(matrix: &Nf4) -> Vec<f32> {
    let mut values = vec![f32::NAN; matrix.n * matrix.k];
    matrix.read(0, &mut values);
    values
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// f32 values that are bf16 values, as their bits.
fn halves(values: &[f32]) -> Vec<u16> {
    assert!(values.iter().all(|x| x.to_bits().trailing_zeros() >= 16), "each value is a bf16");
    values.iter().map(|x| (x.to_bits() >> 16) as u16).collect()
}

#[test]
fn codes_scales_and_values_are_those_of_bitsandbytes() {
    let golden = Golden::read();
    for case in CASES {
        let (shape, values) = (golden.get(&format!("{case}.values")).0, golden.f32(&format!("{case}.values")));
        for level in Level::available() {
            let matrix = with_level(level, || quantized(&values, shape[0], shape[1])).expect("finite values");
            assert_eq!(matrix.codes, golden.get(&format!("{case}.codes")).1, "{case} {level:?}");
            assert_eq!(bits(&matrix.absmax()), bits(&golden.f32(&format!("{case}.absmax"))), "{case} {level:?}");
            assert_eq!(halves(&all(&matrix)), golden.bf16(&format!("{case}.bf16")), "{case} {level:?}");
        }
    }
}

#[test]
fn doubly_quantized_scales_give_the_values_of_bitsandbytes() {
    let golden = Golden::read();
    let map = golden.f32("map");
    for case in CASES {
        let part = |name: &str| format!("{case}.nested.{name}");
        let (shape, absmax) = (golden.get(&format!("{case}.values")).0, golden.f32(&format!("{case}.absmax")));
        let (offset, largest) = (golden.f32(&part("offset"))[0], golden.f32(&part("largest")));
        let own = Nested::quantize_about(&absmax, offset);
        assert_eq!(bits(&own.map[..]), bits(&map), "{case}");
        assert_eq!(bits(&own.largest), bits(&largest), "{case}");
        // bitsandbytes rounds to 65,536 steps of -1 to 1 on a CPU, so it may miss the nearest code by a step.
        let codes = golden.get(&part("codes")).1;
        for (i, (own, other)) in own.codes.iter().zip(codes).enumerate() {
            // Equal scales: any code gives the offset.
            let x = (absmax[i] - offset) / largest[i / 256].max(f32::MIN_POSITIVE);
            if x == 0.0 {
                continue;
            }
            let [a, b] = [own, other].map(|code| (map[usize::from(*code)] - x).abs());
            assert!(a <= b && b - a <= 2.0 / 65_535.0, "{case}: {x} got code {own}, not {other}");
        }
        let mean = Nested::quantize(&absmax).offset;
        assert!((mean - offset).abs() <= offset.abs() * 1e-6, "{case}: {mean} {offset}");
        let nested = Nested::new(codes.into(), largest.into(), own.map, offset);
        let codes = Cow::Borrowed(golden.get(&format!("{case}.codes")).1);
        let matrix = Nf4 { n: shape[0], k: shape[1], codes, scales: Absmax::Nested(nested) };
        assert_eq!(halves(&all(&matrix)), golden.bf16(&part("bf16")), "{case}");
    }
}

/// Values of different sizes in each block.
fn numbers(len: usize) -> Vec<f32> {
    let x = |i: usize| ((i * 2_654_435_761) % 1_000_003) as f32 / 500_001.5 - 1.0;
    (0..len).map(|i| x(i) * (1.0 + (i / 50 % 7) as f32)).collect()
}

#[test]
fn a_value_is_the_nearest_of_the_table_times_the_scale_in_bf16() {
    let (n, k) = (300, 192);
    let values = numbers(n * k);
    let matrix = quantized(&values, n, k).unwrap();
    for (i, (x, got)) in values.iter().zip(all(&matrix)).enumerate() {
        let scale = values[i / BLOCK * BLOCK..][..BLOCK].iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let distance = |t: &&f32| f64::from(**t) - f64::from(*x) / f64::from(scale);
        let nearest = TABLE.iter().min_by(|a, b| distance(a).abs().total_cmp(&distance(b).abs())).unwrap();
        assert_eq!(got.to_bits(), u32::from(round_bf16(nearest * scale)) << 16, "value {i}");
    }
    let nested = matrix.clone().double_quantized();
    // Its table of codes takes 1024 bytes.
    assert!(nested.place(0).bytes() < matrix.place(0).bytes() + 1024 && nested.codes == matrix.codes);
    let largest = values.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    assert!(nested.absmax().iter().zip(matrix.absmax()).all(|(a, b)| (a - b).abs() < 0.01 * largest));
    assert!(quantized(&[1.0, f32::NAN], 1, 2).is_none() && quantized(&[f32::INFINITY; 65], 1, 65).is_none());
}

/// The elements of a held part in a layout, one by one.
fn laid_out(matrix: &Nf4, rows: &[Range<usize>], columns: &Range<usize>, layout: Layout) -> Vec<f32> {
    let (values, k) = (all(matrix), columns.len());
    let rows: Vec<usize> = rows.iter().cloned().flatten().collect();
    let mut out = vec![0.0; layout.len(rows.len(), k)];
    for (i, row) in rows.iter().enumerate() {
        for c in 0..k {
            out[layout.index(k, i, c)] = values[row * matrix.k + columns.start + c];
        }
    }
    out
}

/// The bf16 order of f32 elements.
fn in_bf16(layout: Layout, values: &[f32]) -> Vec<u16> {
    let values = halves(values);
    let of_pair = |pair: &[u16]| (0..PANEL).flat_map(|lane| [pair[lane], pair[PANEL + lane]]).collect::<Vec<_>>();
    match layout {
        Layout::Row => values,
        Layout::Panel => values.chunks(2 * PANEL).flat_map(of_pair).collect(),
    }
}

#[test]
fn any_part_is_dequantized_into_rows_and_panels_at_every_level() {
    // (n, k), held runs of rows, held columns: whole and short panels, rows that begin in a block, heads, columns.
    let cases = [
        ((64, 128), &[(0, 64)][..], 0..128),
        ((70, 192), &[(0, 70)][..], 0..192),
        ((33, 100), &[(0, 33)][..], 0..100),
        ((5, 33), &[(0, 5)][..], 0..33),
        ((96, 256), &[(8, 40), (56, 96)][..], 64..192),
        ((40, 72), &[(3, 9), (20, 40)][..], 8..31),
        ((512, 640), &[(0, 512)][..], 0..640),
    ];
    for ((n, k), rows, columns) in cases {
        let rows: Vec<Range<usize>> = rows.iter().map(|&(start, end)| start..end).collect();
        let plain = quantized(&numbers(n * k), n, k).unwrap();
        let nested = plain.clone().double_quantized();
        for (matrix, layout) in [&plain, &nested].into_iter().flat_map(|m| [(m, Layout::Row), (m, Layout::Panel)]) {
            let want = laid_out(matrix, &rows, &columns, layout);
            let held = Held { rows: &rows, columns: columns.clone() };
            let place = matrix.place(32);
            let mut memory = vec![0.0f32; place.end / 4];
            place.write(&matrix.view(), bytemuck::cast_slice_mut(&mut memory));
            let placed = place.matrix(bytemuck::cast_slice(&memory));
            let len = want.len();
            for part in [0..len, len / 2 / 64 * 64..len, 64.min(len - 64)..len / 3 / 64 * 64] {
                let part = part.start.min(part.end)..part.end;
                for level in Level::available() {
                    let what = format!("({n}, {k}) {rows:?} {columns:?} {layout:?} {part:?} {level:?}");
                    let (mut f32s, mut halves) = (vec![f32::NAN; part.len()], vec![0xffff; part.len()]);
                    with_level(level, || {
                        dequantize(&matrix.view(), &held, layout, part.start, SliceMut::F32(&mut f32s));
                        dequantize(&placed, &held, layout, part.start, SliceMut::Bf16(&mut halves));
                    });
                    assert!(bits(&f32s) == bits(&want[part.clone()]), "{what}");
                    assert!(halves == in_bf16(layout, &want)[part.clone()], "{what} bf16");
                }
            }
        }
    }
}

#[test]
fn rows_of_a_matrix_are_a_matrix() {
    let (n, k) = (600, 64);
    let plain = quantized(&numbers(n * k), n, k).unwrap();
    for matrix in [plain.clone(), plain.double_quantized()] {
        let values = all(&matrix);
        for rows in [0..600, 0..3, 255..513, 300..600] {
            let some = matrix.rows(rows.clone());
            assert_eq!(bits(&all(&some)), bits(&values[rows.start * k..rows.end * k]), "{rows:?}");
            let again = some.rows(1..rows.len());
            assert_eq!(bits(&all(&again)), bits(&values[(rows.start + 1) * k..rows.end * k]), "{rows:?}");
            assert_eq!(bits(&all(&again.clone().into_owned())), bits(&all(&again)), "{rows:?}");
        }
    }
}

#[test]
fn a_held_part_of_whole_blocks_is_a_matrix_with_the_same_values() {
    let (n, k) = (60, 256);
    let plain = quantized(&numbers(n * k), n, k).unwrap();
    for matrix in [plain.clone(), plain.double_quantized()] {
        let (values, rows) = (all(&matrix), [5..9, 40..60]);
        let part = matrix.held(&Held { rows: &rows, columns: 64..192 }).expect("whole blocks");
        let want: Vec<f32> = rows.into_iter().flatten().flat_map(|row| &values[row * k..][64..192]).copied().collect();
        assert_eq!(((part.n, part.k), bits(&all(&part))), ((24, 128), bits(&want)));
        let rows = [(0, n)].map(|(start, end)| start..end);
        assert!(matrix.held(&Held { rows: &rows, columns: 32..256 }).is_none());
    }
    let narrow = quantized(&numbers(8 * 72), 8, 72).unwrap();
    assert!(narrow.held(&Held { rows: &[0..4, 4..8], columns: 0..72 }).is_none());
}
