//! Soft caps of logits against the CPU's.

use crate::{bf16, in_every_order, numbers, on_gpu, rounded};
use rlhf_hpc::device::cpu;
use rlhf_hpc::device::cuda::{Memory, softcap};
use rlhf_hpc::dtype::DType;

#[test]
fn capped_logits_and_their_slopes_equal_the_cpus() {
    in_every_order(|| {
        for (len, cap) in [(0, 2.5), (8, 0.5), (1000, 30.0), (5000, 2.5)] {
            let x: Vec<f32> = numbers(1, len).iter().map(|x| 40.0 * x).collect();
            let mut want = x.clone();
            cpu::softcap::forward(cap, &mut want);
            let mut y = Memory::from_values(&x);
            softcap::forward(cap, y.view_mut(DType::F32));
            let got: Vec<f32> = y.read(len);
            for ((got, want), x) in got.iter().zip(&want).zip(&x) {
                assert!((got - want).abs() <= 1e-6 * want.abs(), "{x} capped at {cap}: {got}, needs {want}");
            }
            let mut slopes = rounded(&numbers(2, len));
            let mut dy = on_gpu(DType::Bf16, &slopes);
            softcap::backward(cap, y.view(DType::F32), dy.view_mut(DType::Bf16));
            cpu::softcap::backward(cap, &got, &mut slopes);
            for (i, (got, want)) in dy.view(DType::Bf16).to_f32().iter().zip(&slopes).enumerate() {
                // Near the cap, 1 - (y / c)^2 cancels.
                assert!((got - want).abs() <= want.abs() / 256.0 + 4e-7, "slope {i} at {cap}: {got}, needs {want}");
            }
        }
    });
}

#[test]
fn an_unaligned_run_is_capped_and_masked_columns_have_no_slope() {
    in_every_order(|| {
        let x = [1.0, -2.0, 300.0, f32::NEG_INFINITY, 0.25, -0.0, 7.0];
        let mut y = Memory::from_values(&x);
        softcap::forward(2.0, y.view_mut(DType::F32).part(1..6));
        let got: Vec<f32> = y.read(7);
        assert!(got[0] == 1.0 && got[6] == 7.0 && got[2] <= 2.0 && got[3] >= -2.0, "{got:?}");
        let y = Memory::from_values(&[f32::NEG_INFINITY, f32::NAN, f32::INFINITY, 0.0, 0.0, 0.0, 0.0, 0.0]);
        let mut dy = Memory::from_values(&bf16(&[3.0; 8]));
        softcap::backward(2.0, y.view(DType::F32), dy.view_mut(DType::Bf16));
        assert_eq!(dy.view(DType::Bf16).to_f32(), [0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 3.0, 3.0]);
    });
}
