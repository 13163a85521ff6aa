use crate::{bf16, in_every_order, numbers, rounded};
use rlhf_hpc::device::cuda::{Memory, residual};
use rlhf_hpc::dtype::DType;

#[test]
fn a_sum_is_rounded_once() {
    in_every_order(|| {
        for len in [8, 2048, 2056, 5000] {
            let (x, y) = (numbers(1, len), numbers(2, len));
            let (on_gpu, mut sum) = (Memory::of(&bf16(&x)), Memory::of(&bf16(&y)));
            residual::add(on_gpu.view(DType::Bf16), sum.view_mut(DType::Bf16));
            let want: Vec<f32> = rounded(&x).iter().zip(rounded(&y)).map(|(x, y)| x + y).collect();
            assert_eq!(sum.read::<u16>(len), bf16(&want), "{len} values");
        }
    });
}
