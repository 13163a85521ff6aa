//! Made-up numbers, and comparisons.

use rlhf_hpc::rng::{Purpose, Rng};

/// `len` normal numbers of standard deviation `std`, those of `seed`.
pub fn normals(seed: u64, len: usize, std: f32) -> Vec<f32> {
    let rng = Rng::new(seed, Purpose::Init);
    (0..len).map(|i| std * rng.normal_pair([i as u32 / 2, 0, 0, 0])[i % 2]).collect()
}

/// Each value within `tolerance` times the largest wanted one (times one, where all are smaller).
pub fn assert_near(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1f64, |m, x| m.max(x.abs()));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let gap = (f64::from(got) - want).abs();
        // Written so that NaN fails.
        let near = gap <= tolerance * largest;
        assert!(near, "{what}[{i}]: {got} against {want}");
    }
}

pub fn same_bits(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got.to_bits() == want.to_bits(), "{what}[{i}]: {got} against {want}");
    }
}
