//! The hash of tables that every launch looks into: their keys are the program's own, so that nobody can make them collide.

use std::hash::{BuildHasherDefault, Hasher};

pub(super) type Table<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<Fx>>;

/// h = (rotl(h, 5) ^ word) * K for each eight bytes, as Firefox and rustc have it; the upper bits, which all bits of a word
/// reach, become the lower ones, by which tables choose a place.
#[derive(Debug, Default)]
pub(super) struct Fx(u64);

const K: u64 = 0x517c_c1b7_2722_0a95;

impl Hasher for Fx {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks();
        for word in words {
            self.write_u64(u64::from_le_bytes(*word));
        }
        let last = rest.iter().rev().fold(0, |last, byte| last << 8 | u64::from(*byte));
        self.write_u64(last);
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(u64::from(byte));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(K);
    }

    fn finish(&self) -> u64 {
        self.0.rotate_left(26)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::hash::BuildHasher;

    #[test]
    fn kernels_and_runs_of_memory_fall_on_places_of_their_own() {
        let hash = BuildHasherDefault::<Fx>::default();
        let places = |hashes: Vec<u64>, bits: u32| {
            let all = hashes.len();
            let taken: BTreeSet<u64> = hashes.into_iter().map(|hash| hash & ((1 << bits) - 1)).collect();
            taken.len() * 100 / all
        };
        // Of as many places as keys, random hashes take 63 %.
        let runs = (0..4096u64).map(|i| hash.hash_one(0x7f00_0000_0000 + 512 * i)).collect();
        assert!(places(runs, 12) > 55);
        let names = super::super::embedded::KERNELS.iter().map(|kernel| hash.hash_one(kernel.name)).collect();
        assert!(places(names, 7) > 40, "{} kernels", super::super::embedded::KERNELS.len());
        assert_ne!(hash.hash_one("matmul_forward_16"), hash.hash_one("matmul_forward_32"));
    }
}
