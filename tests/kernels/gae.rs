use crate::faults::noticed;
use crate::{in_every_order, numbers};
use rlhf_hpc::advantage::gae::gae;
use rlhf_hpc::device::cuda::{Memory, gae as on_gpu};
use rlhf_hpc::dtype::DType;

#[test]
fn advantages_and_returns_are_those_of_the_cpu_bitwise() {
    in_every_order(|| {
        let lengths = [1, 0, 31, 32, 33, 100, 5, 64, 257];
        let mut starts = vec![0];
        for length in lengths {
            starts.push(starts.last().unwrap() + length);
        }
        let tokens = *starts.last().unwrap();
        let (rewards, values, last) = (numbers(1, tokens), numbers(2, tokens), numbers(3, lengths.len()));
        let mask: Vec<u8> = numbers(4, tokens).iter().map(|&x| u8::from(x < 0.6)).collect();
        let [r, v, l] = [&rewards, &values, &last].map(|values| Memory::of(values));
        let cu_seqlens: Vec<u32> = starts.iter().map(|&start| start as u32).collect();
        let (mask_on_gpu, cu_seqlens) = (Memory::of(&mask), Memory::of(&cu_seqlens));
        let [mut advantages, mut returns] = [(); 2].map(|()| Memory::scratch(4 * tokens));
        let (gamma, lambda) = (0.99f32, 0.95f32);
        on_gpu::scan(
            r.view(DType::F32),
            v.view(DType::F32),
            &mask_on_gpu,
            &cu_seqlens,
            l.view(DType::F32),
            gamma,
            lambda,
            advantages.view_mut(DType::F32),
            returns.view_mut(DType::F32),
        );
        let (advantages, returns): (Vec<f32>, Vec<f32>) = (advantages.read(tokens), returns.read(tokens));
        for (i, length) in lengths.into_iter().enumerate() {
            let at = starts[i]..starts[i + 1];
            let (gamma, lambda) = (f64::from(gamma), f64::from(lambda));
            let want = gae(gamma, lambda, &rewards[at.clone()], &values[at.clone()], last[i], &mask[at.clone()]);
            let got = (advantages[at.clone()].to_vec(), returns[at].to_vec());
            assert_eq!(got, want, "sequence {i} of {length}");
        }
    });
}

#[test]
fn tokens_of_the_environment_taken_for_steps_are_noticed() {
    let fault = ("gae.cu", "if (!shuffle(step, j)) continue;", "");
    noticed("gae::advantages_and_returns_are_those_of_the_cpu_bitwise", fault, "sequence 2 of 31");
}
