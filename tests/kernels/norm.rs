use crate::{in_every_order, numbers};
use rlhf_hpc::device::cuda::{Memory, norm};
use rlhf_hpc::dtype::DType::F32;
use rlhf_hpc::ops;
use rlhf_hpc::tensor::Slice;

#[test]
fn sums_of_squares_have_the_bits_of_the_cpu() {
    in_every_order(|| {
        for len in [0, 1, 31, 256, 300, 4096, 4097, 9000] {
            let x = numbers(1, len + 3);
            let on_gpu = Memory::from_values(&x);
            for block in [32, 100, 4096] {
                let mut sums = Memory::zeros(8 * len.div_ceil(block));
                norm::sums_into(on_gpu.view(F32).part(3..len + 3), block, &mut sums, 0);
                let got: Vec<f64> = sums.read(len.div_ceil(block));
                let want = ops::norm::sums_of_squares(&x[3..], block);
                assert_eq!(got.len(), want.len(), "{len} values, blocks of {block}");
                let same = got.iter().zip(&want).all(|(got, want)| got.to_bits() == want.to_bits());
                assert!(same, "{len} values, blocks of {block}: {got:?}, needs {want:?}");
            }
        }
    });
}

#[test]
fn sums_of_several_ranges_equal_separate_sums_and_are_waited_for_once() {
    let (gpu, _one) = crate::device();
    let x = numbers(3, 3000);
    let on_gpu = Memory::from_values(&x);
    let ranges = [0..1024, 1024..1024, 1024..1030, 1030..3000, 7..8];
    let on_gpu = ranges.clone().map(|range| Slice::Cuda(on_gpu.view(F32).part(range)));
    let on_cpu = ranges.map(|range| Slice::F32(&x[range]));
    let before = gpu.counts.drained.get();
    let got = ops::norm::sums_of_each(&on_gpu, 512);
    assert_eq!(gpu.counts.drained.get() - before, 1);
    let want: Vec<f64> = on_cpu.iter().flat_map(|run| ops::norm::sums_of_squares(*run, 512)).collect();
    assert_eq!(got, want);
    assert_eq!(ops::norm::sums_of_each(&on_cpu, 512), want);
    assert!(ops::norm::sums_of_each(&[], 512).is_empty());
}
