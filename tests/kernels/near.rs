//! Comparison with naive f64 results.

use rlhf_hpc::device::cuda::View;

/// One rounding to bf16, by up to 2^-8, of a value that f32 arithmetic left within 2^-17 of the true one.
pub const BF16: f64 = 1.0 / 256.0 + 1.0 / 131_072.0;
/// A few roundings of f32.
pub const F32: f64 = 4e-7;

/// Values within `relative` of the wanted ones, or within `absolute` where those are small.
pub fn assert_near(got: View, want: &[f64], relative: f64, absolute: f64, what: &str) {
    let got = got.to_f32();
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        // NaN is not near.
        assert!(error <= relative * want.abs() + absolute, "{what}: value {i} is {got}, needs {want}");
    }
}

/// As f64.
pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}
