//! The learning rate of each update.

use crate::config::optim::{OptimConfig, Schedule};

/// Learning rate of update `t` (from 0) of `updates`, with W = ceil(warmup_ratio x updates):
///
/// - warm-up, t < W: lr (t + 1) / W, so that the first update already changes the weights and the last warm-up update
///   has the peak;
/// - after it, with x = (t - W) / (updates - W): constant lr; linear lr (1 - (1 - floor) x); cosine
///   lr (floor + (1 - floor) (1 + cos(pi x)) / 2). Past the last update it stays at the floor.
pub fn lr_at(config: &OptimConfig, t: u64, updates: u64) -> f64 {
    let warmup = (config.warmup_ratio * updates as f64).ceil() as u64;
    if t < warmup {
        return config.lr * (t + 1) as f64 / warmup as f64;
    }
    let x = ((t - warmup) as f64 / updates.saturating_sub(warmup).max(1) as f64).min(1.0);
    let floor = config.floor_ratio;
    config.lr
        * match config.schedule {
            Schedule::Constant => 1.0,
            Schedule::Linear => 1.0 - (1.0 - floor) * x,
            Schedule::Cosine => floor + (1.0 - floor) * 0.5 * (1.0 + (std::f64::consts::PI * x).cos()),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_rises_to_the_peak_and_the_decay_ends_at_the_minimum() {
        let lr = |schedule, warmup_ratio, t, updates| {
            lr_at(&OptimConfig { schedule, warmup_ratio, ..OptimConfig::with_lr(2.0) }, t, updates)
        };
        for (schedule, half, quarter, end) in [
            (Schedule::Constant, 2.0, 2.0, 2.0),
            (Schedule::Linear, 1.1, 1.55, 0.2),
            (Schedule::Cosine, 1.1, 2.0 * (0.1 + 0.9 * 0.5 * (1.0 + 0.5f64.sqrt())), 0.2),
        ] {
            for (warmup, t, updates, want) in [
                (0.03, 0, 100, 2.0 / 3.0),
                (0.03, 2, 100, 2.0),
                (0.03, 3, 100, 2.0),
                (0.0, 25, 100, quarter),
                (0.0, 5, 10, half),
                (0.03, 100, 100, end),
                (0.03, 1000, 100, end),
                (0.03, 0, 0, 2.0),
                (0.03, 0, 1, 2.0),
            ] {
                let got = lr(schedule, warmup, t, updates);
                assert!((got - want).abs() < 1e-12, "{schedule:?}: {got} at {t} of {updates}, needed {want}");
            }
            assert!((3..100).all(|t| lr(schedule, 0.03, t + 1, 100) <= lr(schedule, 0.03, t, 100)), "{schedule:?}");
        }
    }
}
