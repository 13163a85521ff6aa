//! Whitening over all learned tokens of the batch.

use crate::experience::Experience;

/// Mean and population standard deviation, in the order given; (0, 0) for no numbers.
pub fn moments(numbers: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let (sum, n) = numbers.clone().fold((0.0, 0.0), |(sum, n), x| (sum + x, n + 1.0));
    if n == 0.0 {
        return (0.0, 0.0);
    }
    let mean = sum / n;
    (mean, (numbers.map(|x| (x - mean) * (x - mean)).sum::<f64>() / n).sqrt())
}

/// A <- (A - mean) / sqrt(max(variance, 1e-8)) if mask is 1; only A - mean without `divide`.
pub fn whiten(divide: bool, mean: f64, std: f64, samples: &mut [Experience]) {
    let scale = if divide { 1.0 / (std * std).max(1e-8).sqrt() } else { 1.0 };
    for sample in samples {
        for (a, &m) in sample.advantages.iter_mut().zip(&sample.mask) {
            if m != 0 {
                *a = ((f64::from(*a) - mean) * scale) as f32;
            }
        }
    }
}
