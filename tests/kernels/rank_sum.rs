use crate::{bf16, in_every_order, numbers, rounded};
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::rank_sum::{self, Parts};
use rlhf_hpc::dtype::DType::{self, Bf16, F32};

/// Parts of all ranks, and this rank's own part. In the first, the part of `rank` is NaN, as it must not be read.
fn parts(ranks: usize, rank: usize, stride: usize, len: usize) -> (Vec<Vec<f32>>, Vec<f32>) {
    let each: Vec<Vec<f32>> = (0..ranks).map(|r| numbers(r as u32 + 1, len)).collect();
    let mut all = vec![f32::NAN; ranks * stride];
    for (r, part) in each.iter().enumerate().filter(|(r, _)| *r != rank) {
        all[r * stride..r * stride + len].copy_from_slice(part);
    }
    (each, all)
}

#[test]
fn parts_are_added_in_the_order_of_ranks() {
    in_every_order(|| {
        for (ranks, rank, stride, len) in
            [(1, 0, 8, 8), (2, 1, 9, 9), (3, 0, 2056, 2053), (5, 3, 301, 300), (4, 2, 8, 0)]
        {
            let (each, all) = parts(ranks, rank, stride, len);
            let sum = |of: &dyn Fn(&[f32]) -> Vec<f32>| {
                let first = of(&each[0]);
                each[1..].iter().fold(first, |sum, part| sum.iter().zip(of(part)).map(|(a, b)| a + b).collect())
            };
            let at = |values| Parts { values, stride, rank, ranks };
            let (all_f32, mut x) = (Memory::from_values(&all), Memory::from_values(&each[rank]));
            rank_sum::in_order(at(all_f32.view(F32)), x.view_mut(F32));
            assert_eq!(x.read::<f32>(len), sum(&<[f32]>::to_vec), "{len} of {ranks}");
            let (all_bf16, mut x) = (Memory::from_values(&bf16(&all)), Memory::from_values(&bf16(&each[rank])));
            rank_sum::in_order(at(all_bf16.view(Bf16)), x.view_mut(Bf16));
            assert_eq!(x.read::<u16>(len), bf16(&sum(&rounded)), "{len} of {ranks} in {:?}", DType::Bf16);
        }
    });
}

#[test]
fn a_tree_adds_neighbours_first() {
    fn tree(parts: &[Vec<f32>]) -> Vec<f32> {
        if let [part] = parts {
            return part.clone();
        }
        let (left, right) = parts.split_at(parts.len() / 2);
        tree(left).iter().zip(tree(right)).map(|(a, b)| a + b).collect()
    }
    in_every_order(|| {
        for (ranks, rank, stride, len) in
            [(1, 0, 5, 5), (2, 0, 300, 257), (4, 3, 64, 64), (16, 5, 40, 33), (8, 0, 4, 0)]
        {
            let (each, all) = parts(ranks, rank, stride, len);
            let (all, mut x) = (Memory::from_values(&all), Memory::from_values(&each[rank]));
            rank_sum::in_tree(Parts { values: all.view(F32), stride, rank, ranks }, x.view_mut(F32));
            assert_eq!(x.read::<f32>(len), tree(&each), "{len} of {ranks}");
        }
    });
}
