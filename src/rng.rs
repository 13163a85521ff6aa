//! Counter-based random numbers: each number is a pure function of its purpose and position, so there is no state to
//! keep, save or share.
//!
//! Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11, section 4.2).

/// The purpose of random numbers. It is part of the key, so two purposes never use the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    Sample = 1,
    Init = 2,
    Shuffle = 3,
    Synthetic = 5,
}

/// Ten rounds of Philox 4x32 on `counter` under `key`.
pub fn philox(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    const M0: u64 = 0xD251_1F53;
    const M1: u64 = 0xCD9E_8D57;
    let [mut k0, mut k1] = key;
    let mut c = counter;
    for _ in 0..10 {
        let p0 = M0 * u64::from(c[0]);
        let p1 = M1 * u64::from(c[2]);
        c = [(p1 >> 32) as u32 ^ c[1] ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k1, p0 as u32];
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    c
}

/// A stream of random numbers: a seed and a purpose. `Copy`, no state.
#[derive(Clone, Copy, Debug)]
pub struct Rng {
    key: [u32; 2],
}

impl Rng {
    pub fn new(seed: u64, purpose: Purpose) -> Self {
        // One Philox application mixes the 64 bits of the seed with the purpose into the 64-bit key.
        let mixed = philox([seed as u32, (seed >> 32) as u32], [purpose as u32, 0, 0, 0]);
        Self { key: [mixed[0], mixed[1]] }
    }

    /// Four 32-bit words for `counter`.
    pub fn random_words(self, counter: [u32; 4]) -> [u32; 4] {
        philox(self.key, counter)
    }

    /// Uniform in [0, 1), 24 bits.
    pub fn uniform(self, counter: [u32; 4]) -> f32 {
        (self.random_words(counter)[0] >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// The key of a stream.
    pub fn key(self) -> [u32; 2] {
        self.key
    }

    /// The random number for one sampled token: `step` counts rollout phases, `prompt` is the prompt's id, `sample` its
    /// number among the samples of that prompt, `token` the position in the response.
    pub fn sample_uniform(self, step: u32, prompt: u64, sample: u32, token: u32) -> f32 {
        self.uniform(Self::sample_counter(step, prompt, sample, token))
    }

    /// The counter of that number.
    pub fn sample_counter(step: u32, prompt: u64, sample: u32, token: u32) -> [u32; 4] {
        let prompt_mixed = (prompt as u32) ^ ((prompt >> 32) as u32).rotate_left(16);
        [step, prompt_mixed, sample, token]
    }

    /// Uniform integer below `bound` (multiply-shift on 64 bits; bias below 2^-32 for bounds below 2^32).
    pub fn below(self, bound: u64, counter: [u32; 4]) -> u64 {
        let w = self.random_words(counter);
        let x = u128::from(u64::from(w[0]) | (u64::from(w[1]) << 32));
        ((x * u128::from(bound)) >> 64) as u64
    }

    /// Two independent standard normal numbers (Box-Muller).
    pub fn normal_pair(self, counter: [u32; 4]) -> [f32; 2] {
        let w = self.random_words(counter);
        let u = (f64::from(w[0]) + 1.0) / 4_294_967_296.0;
        let v = f64::from(w[1]) / 4_294_967_296.0;
        let r = (-2.0 * u.ln()).sqrt();
        let (s, c) = (2.0 * std::f64::consts::PI * v).sin_cos();
        [(r * c) as f32, (r * s) as f32]
    }

    /// The permutation of `0..n` that belongs to `epoch` (Fisher-Yates, one number per swap).
    pub fn permutation(self, n: usize, epoch: u32) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            let j = self.below(i as u64 + 1, [epoch, i as u32, (i as u64 >> 32) as u32, 0]) as usize;
            order.swap(i, j);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_known_answers() {
        // Random123 1.14, kat_vectors, philox4x32 10 rounds.
        assert_eq!(philox([0, 0], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 2], [u32::MAX; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }
}
