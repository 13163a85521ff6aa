//! The learning rate of each update.

use crate::config::optim::{OptimConfig, Schedule};

/// Learning rate of update `t` (from 0) of `updates`, with W = ceil(warmup_ratio x updates):
///
/// - warm-up, t < W: lr (t + 1) / W, so that the first update already moves and the last of them has the peak;
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

    fn config(schedule: Schedule) -> OptimConfig {
        OptimConfig { schedule, ..OptimConfig::with_lr(2.0) }
    }

    #[test]
    fn warm_up_rises_to_the_peak_and_the_fall_ends_at_the_floor() {
        for schedule in [Schedule::Constant, Schedule::Linear, Schedule::Cosine] {
            let lr = |t| lr_at(&config(schedule), t, 100);
            assert!((lr(0) - 2.0 / 3.0).abs() < 1e-12 && lr(2) == 2.0 && lr(3) == 2.0, "{schedule:?}");
            let end = if schedule == Schedule::Constant { 2.0 } else { 0.2 };
            assert!((lr(100) - end).abs() < 1e-12 && (lr(1000) - end).abs() < 1e-12, "{schedule:?}");
            assert!((3..100).all(|t| lr(t + 1) <= lr(t)), "{schedule:?} does not rise");
        }
    }

    #[test]
    fn half_way_linear_and_cosine_are_between_peak_and_floor() {
        let no_warmup = |schedule| OptimConfig { warmup_ratio: 0.0, ..config(schedule) };
        for schedule in [Schedule::Linear, Schedule::Cosine] {
            assert!((lr_at(&no_warmup(schedule), 5, 10) - 1.1).abs() < 1e-12);
        }
        let quarter = lr_at(&no_warmup(Schedule::Cosine), 25, 100);
        assert!((quarter - 2.0 * (0.1 + 0.9 * 0.5 * (1.0 + 0.5f64.sqrt()))).abs() < 1e-12);
    }

    #[test]
    fn a_run_of_one_update_or_none_has_a_learning_rate() {
        for updates in [0, 1] {
            assert_eq!(lr_at(&config(Schedule::Cosine), 0, updates), 2.0);
        }
    }
}
