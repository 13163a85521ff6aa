//! Answers from outside are checked completely before any of their numbers is used.

use crate::reward::RewardOutput;
use std::collections::BTreeMap;

/// One output for each of `count` responses. Rewards that are `None` abstain. Logs that are `None` are left out.
pub fn outputs(
    rewards: Vec<Option<f64>>,
    extra: BTreeMap<String, Vec<Option<f64>>>,
    count: usize,
) -> Result<Vec<RewardOutput>, String> {
    let lengths = std::iter::once(rewards.len()).chain(extra.values().map(Vec::len));
    if let Some(wrong) = lengths.into_iter().find(|&len| len != count) {
        return Err(format!("its lists must have one number per response (got {wrong} for {count})"));
    }
    let mut outputs = vec![RewardOutput::default(); count];
    for (i, (reward, output)) in rewards.into_iter().zip(&mut outputs).enumerate() {
        let Some(reward) = reward else { continue };
        let score = reward as f32;
        if !score.is_finite() {
            return Err(format!("reward {i} is out of the range of f32 ({reward:e})"));
        }
        output.score = Some(score);
    }
    for (name, values) in extra {
        for (value, output) in values.into_iter().zip(&mut outputs) {
            let value = value.map(|x| x as f32).filter(|x| x.is_finite());
            output.extra.extend(value.map(|x| (name.clone(), x)));
        }
    }
    Ok(outputs)
}

/// Removes control characters from foreign text for a terminal. Line ends and tabs stay.
pub fn printable(text: &str) -> String {
    text.trim_end().chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// Parses JSON. The error shows the text that is not valid.
pub fn parse<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    serde_json::from_slice(bytes).map_err(|e| {
        let shown: String = printable(&String::from_utf8_lossy(bytes)).chars().take(120).collect();
        format!("its answer does not follow the protocol ({e}): {shown}")
    })
}
