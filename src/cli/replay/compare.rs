//! The comparison of a step with its record: arrays of samples, and metrics.

use super::prepare::Prepared;
use crate::config::Config;
use crate::config::method::ppo::OldLogprobs;
use crate::config::model::DTypeName;
use crate::error::{Error, Result};
use crate::experience::Experience;
use crate::launch::replay::Update;
use crate::metrics::jsonl;
use crate::metrics::keys;
use crate::metrics::recorded::RecordedStep;
use crate::{config, text};
use std::path::Path;

/// The results of a replay next to the record.
pub struct Found {
    pub arrays: Vec<Array>,
    pub metrics: Vec<Pair>,
    /// The measurements of each update.
    pub updates: Vec<Update>,
    pub samples: usize,
    /// The settings of the replay, with the values that it chose.
    pub here: Config,
}

/// A number of the record, and the same number here.
pub struct Pair {
    pub key: String,
    pub recorded: f64,
    pub here: f64,
}

/// An array with a number for each response token, or for each sample.
pub struct Array {
    pub name: &'static str,
    pub of_tokens: bool,
    /// The number of compared values, and of values that differ.
    pub count: usize,
    pub differ: usize,
    /// The largest absolute value.
    pub scale: f64,
    /// The sums of both.
    sums: [f64; 2],
    /// The place of the largest difference, if any number differs.
    pub largest: Option<Spot>,
}

/// A number of a sample.
pub struct Spot {
    /// Index of the sample in the step, its prompt, and its number among the samples of the prompt.
    pub sample: usize,
    pub prompt_id: u64,
    pub number: u32,
    /// The index of the response token, and its text.
    pub token: usize,
    pub text: String,
    pub recorded: f64,
    pub here: f64,
}

/// The largest difference that another order of sums explains, as a share of the largest number of an array, or of the
/// norm of a gradient. Sums of f32 numbers agree to about six digits, those of bf16 numbers to about two.
fn rounding(config: &Config) -> [f64; 2] {
    if config.model.dtype == DTypeName::Bf16 { [5e-2, 1e-1] } else { [1e-4, 1e-3] }
}

/// Metrics that a replay cannot compute, because they measure what the sampler did.
const OF_SAMPLING: &[&str] = &[
    keys::SAMPLER_GAP_MAX,
    keys::SAMPLES_DROPPED,
    keys::GROUPS_DROPPED,
    keys::GROUPS_SURPLUS,
    keys::SCORE_SAMPLED_MEAN,
    keys::EXPERTS_EQUAL,
    keys::RESHARD_BYTES,
];

/// Whether a replay computes a metric again.
fn is_computed(key: &str) -> bool {
    let is_timed = |section| ["time", "memory", "run", "eval"].contains(&section);
    let is_of_sampling = OF_SAMPLING.contains(&key) || key.starts_with("rollout_") || key.starts_with("idle_");
    !is_of_sampling && !keys::is_eval(key) && keys::find(key).is_none_or(|key| !is_timed(key.section))
}

impl Pair {
    pub fn is_equal(&self) -> bool {
        self.recorded.to_bits() == self.here.to_bits() || self.recorded.is_nan() && self.here.is_nan()
    }

    pub fn difference(&self) -> f64 {
        self.here - self.recorded
    }

    /// Whether rounding explains the difference. Norms of gradients are compared by their own size.
    fn is_rounding(&self, [of_scale, of_norm]: [f64; 2]) -> bool {
        let size = self.recorded.abs().max(self.here.abs());
        let most = if self.key.starts_with(keys::GRAD_NORM) { of_norm * size } else { of_scale * size.max(1.0) };
        self.is_equal() || self.difference().abs() <= most
    }
}

impl Array {
    /// Compares an array of all samples. `of` returns the numbers of a sample.
    fn new(
        name: &'static str,
        of_tokens: bool,
        [recorded, here]: [&[Experience]; 2],
        of: impl Fn(&Experience) -> Vec<f32>,
        text: impl Fn(u32) -> String,
    ) -> Option<Self> {
        let mut array = Self { name, of_tokens, count: 0, differ: 0, scale: 0.0, sums: [0.0; 2], largest: None };
        for (i, (a, b)) in recorded.iter().zip(here).enumerate() {
            let (x, y) = (of(a), of(b));
            if x.len() != y.len() {
                continue;
            }
            for (token, (x, y)) in x.into_iter().zip(y).enumerate() {
                // Tokens that are not learned from have no values.
                if of_tokens && a.mask.get(token) == Some(&0) {
                    continue;
                }
                let pair = Pair { key: String::new(), recorded: x.into(), here: y.into() };
                array.count += 1;
                array.scale = array.scale.max(pair.recorded.abs()).max(pair.here.abs());
                array.sums = [array.sums[0] + pair.recorded, array.sums[1] + pair.here];
                if pair.is_equal() {
                    continue;
                }
                array.differ += 1;
                let size = |x: f64, y: f64| if (x - y).is_nan() { f64::INFINITY } else { (x - y).abs() };
                let most = array.largest.as_ref().map_or(-1.0, |spot| size(spot.recorded, spot.here));
                if size(pair.recorded, pair.here) > most {
                    array.largest = Some(Spot {
                        sample: i,
                        prompt_id: a.prompt.id,
                        number: a.response.sample,
                        token,
                        text: a.response.tokens.get(token).map_or_else(String::new, |token| text(*token)),
                        recorded: pair.recorded,
                        here: pair.here,
                    });
                }
            }
        }
        (array.count > 0).then_some(array)
    }

    /// The mean of the record and here.
    pub fn means(&self) -> [f64; 2] {
        self.sums.map(|sum| sum / self.count as f64)
    }

    /// The largest difference.
    pub fn most(&self) -> f64 {
        self.largest.as_ref().map_or(0.0, |spot| (spot.here - spot.recorded).abs())
    }

    fn is_rounding(&self, [of_scale, _]: [f64; 2]) -> bool {
        // NaN is no rounding.
        self.most() <= of_scale * self.scale.max(1.0)
    }
}

impl Found {
    /// Reads the results of a replay in `scratch`, and compares them with the record.
    pub fn read(prepared: &Prepared, scratch: &Path, updates: Vec<Update>) -> Result<Self> {
        let Prepared { dir, step, line, has_samples, .. } = prepared;
        let here = config::load(&scratch.join("config.resolved.toml"), &[])?;
        let lines = jsonl::lines(&scratch.join("metrics.jsonl"))?;
        let made = lines.into_iter().rfind(|line| line.step == *step);
        let made = made.ok_or_else(|| Error::fault(format!("the replay has no line of step {step}")))?;
        let pair = |(key, recorded): &(String, f64)| {
            Some(Pair { key: key.clone(), recorded: *recorded, here: made.get(key)? })
        };
        let metrics = line.values.iter().filter(|(key, _)| is_computed(key)).filter_map(pair).collect();
        let read = |dir: &Path| RecordedStep::for_step(dir, *step).experience();
        let [recorded, again] = if *has_samples { [read(dir)?, read(scratch)?] } else { [Vec::new(), Vec::new()] };
        if recorded.len() != again.len() {
            return Err(Error::fault(format!("the record has {} samples, the replay {}", recorded.len(), again.len())));
        }
        let arrays = arrays(&prepared.config, [&recorded, &again]);
        Ok(Self { arrays, metrics, updates, samples: recorded.len(), here })
    }

    /// Whether everything is equal to the bit.
    pub fn is_equal(&self) -> bool {
        self.arrays.iter().all(|array| array.differ == 0) && self.metrics.iter().all(Pair::is_equal)
    }

    /// The names of what rounding does not explain; none if the replay was asked for other settings, or ended early.
    pub fn unexplained(&self, prepared: &Prepared) -> Option<String> {
        if !prepared.changes_nothing() {
            return None;
        }
        let limits = rounding(&self.here);
        let arrays = self.arrays.iter().filter(|array| !array.is_rounding(limits)).map(|array| array.name);
        let metrics =
            self.metrics.iter().filter(|_| prepared.part().is_none()).filter(|pair| !pair.is_rounding(limits));
        let names: Vec<&str> = arrays.chain(metrics.map(|pair| &*pair.key)).collect();
        (!names.is_empty()).then(|| names.join(", "))
    }
}

fn arrays(config: &Config, both: [&[Experience]; 2]) -> Vec<Array> {
    type Of = fn(&Experience) -> Vec<f32>;
    let all: [(&'static str, bool, Of); 8] = [
        ("logprobs", true, |e| e.response.logprobs.clone()),
        ("ref_logprobs", true, |e| e.ref_logprobs.clone()),
        ("values", true, |e| e.values.clone()),
        ("kl", true, |e| e.kl.clone()),
        ("score", false, |e| vec![e.score]),
        ("rewards", true, |e| e.rewards.clone()),
        ("advantages", true, |e| e.advantages.clone()),
        ("returns", true, |e| e.returns.clone()),
    ];
    let tokenizer = text::Tokenizer::load(&config.model.actor).ok();
    let text = |token: u32| tokenizer.as_ref().and_then(|t| t.decode(&[token], false).ok()).unwrap_or_default();
    let is_copied = config.ppo.old_logprobs == OldLogprobs::Rollout;
    let compared = all.into_iter().filter(|(name, ..)| *name != "logprobs" || !is_copied);
    compared.filter_map(|(name, of_tokens, of)| Array::new(name, of_tokens, both, of, text)).collect()
}
