//! Which rows train and which evaluate.

use serde_json::{Value, json};
use twox_hash::XxHash3_64;

use crate::config::data::{SplitBy, SplitConfig};

/// Names of the two splits that a ratio or a list of files cuts.
pub const TRAIN: &str = "train";
pub const TEST: &str = "test";

/// The rule that makes the splits of rows while they are sharded, for the sidecar.
pub(super) fn describe(rule: &SplitConfig) -> Value {
    let SplitConfig { by, eval_ratio, seed, field, .. } = rule;
    match by {
        SplitBy::Source => Value::Null,
        SplitBy::Ratio => json!({"by": "ratio", "eval_ratio": eval_ratio, "seed": seed}),
        SplitBy::Field => json!({"by": "field", "field": field}),
        SplitBy::File => json!({"by": "file"}),
    }
}

/// Whether a row falls into `test`: XXH3 of its prompt's tokens, seeded, below `eval_ratio` of the range. It depends
/// on the row alone, so rows that are added later move no other row, and equal prompts always stay together.
pub(super) fn is_test(prompt: &[u32], rule: &SplitConfig) -> bool {
    let share = prompt_hash(prompt, rule.seed) as f64 / 18_446_744_073_709_551_616.0;
    share < rule.eval_ratio
}

/// XXH3 (64 bits) of a prompt's tokens as little-endian u32, whatever width the shard stores.
pub(super) fn prompt_hash(prompt: &[u32], seed: u64) -> u64 {
    let bytes: Vec<u8> = prompt.iter().flat_map(|t| t.to_le_bytes()).collect();
    XxHash3_64::oneshot_with_seed(seed, &bytes)
}

#[cfg(test)]
mod tests {
    use super::{SplitConfig, is_test};

    #[test]
    fn a_ratio_takes_about_its_share_and_another_seed_takes_others() {
        let rule = |seed| SplitConfig { eval_ratio: 0.1, seed, ..SplitConfig::default() };
        let taken = |seed| (0..20_000_u32).filter(|i| is_test(&[*i, 7], &rule(seed))).collect::<Vec<_>>();
        let (a, b) = (taken(0), taken(1));
        assert!((1800..2200).contains(&a.len()), "{}", a.len());
        let both = a.iter().filter(|i| b.contains(i)).count();
        assert!(both < a.len() / 2, "{both}");
    }
}
