//! Rotary frequencies with the scalings of long-context models, as `transformers` computes them.

use super::config_json::Reader;
use crate::error::{Error, Result};
use std::f64::consts::PI;

/// The base of the frequencies if config.json has none.
const THETA: f64 = 10_000.0;

/// The scaling of the rotary frequencies for a longer context.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    None,
    /// All frequencies are divided by `factor` (position interpolation, arXiv:2306.15595).
    Linear {
        factor: f64,
    },
    /// Llama 3: long wavelengths are divided by `factor`, short ones kept, with a smooth transition (arXiv:2407.21783).
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original: f64,
    },
    /// YaRN (arXiv:2309.00071), sections 3.2 to 3.4.
    Yarn {
        factor: f64,
        fast: f64,
        slow: f64,
        original: f64,
        attention_factor: f64,
        truncate: bool,
    },
}

/// The rotary embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub theta: f64,
    pub scaling: Scaling,
}

impl Rope {
    /// Reads `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5). If a file has both,
    /// `rope_scaling` replaces `rope_parameters`, as in `convert_rope_params_to_dict` of transformers 5.
    ///
    /// # Errors
    /// `Data` for wrong or unsupported values, parameters by layer type, and two different scalings.
    pub(super) fn read(config: &Reader, context: usize) -> Result<Self> {
        refuse_partial(config)?;
        let top_theta = config.number("rope_theta")?;
        let [parameters, scaling] = ["rope_parameters", "rope_scaling"].map(|key| {
            let found = config.object(key)?.filter(|found| !found.is_empty());
            match found.as_ref().and_then(Reader::nested) {
                Some(layers) => {
                    Err(config.wrong(key, &format!("must be the same for all layers (got one for {layers})")))
                }
                None => Ok(found),
            }
        });
        let parameters = match (parameters?, scaling?) {
            (Some(replaced), Some(scaling)) => Some(replacing(&replaced, scaling, top_theta)?),
            (parameters, scaling) => scaling.or(parameters),
        };
        let Some(p) = parameters else {
            return Ok(Self { theta: top_theta.unwrap_or(THETA), scaling: Scaling::None });
        };
        let theta = p.number("rope_theta")?.or(top_theta).unwrap_or(THETA);
        refuse_partial(&p)?;
        let kind = kind(&p)?;
        let factor =
            || p.number("factor")?.filter(|f| *f >= 1.0).ok_or_else(|| p.wrong("factor", "must be at least 1"));
        let original = p.number("original_max_position_embeddings")?;
        let scaling = match kind.as_str() {
            "default" => Scaling::None,
            "linear" => Scaling::Linear { factor: factor()? },
            // Dynamic NTK scaling changes nothing within the context, and longer rows are rejected.
            "dynamic" if original.is_none_or(|o| o >= context as f64) => Scaling::None,
            "llama3" => Scaling::Llama3 {
                factor: factor()?,
                low: p.needed("low_freq_factor")?,
                high: p.needed("high_freq_factor")?,
                original: p.needed("original_max_position_embeddings")?,
            },
            "yarn" => yarn(&p, factor()?, original.unwrap_or(context as f64))?,
            other => {
                return Err(Error::data(format!("config.json: rope type \"{other}\" is not supported"))
                    .hint("use a model with rope type default, linear, dynamic (within its context), llama3 or yarn"));
            }
        };
        Ok(Self { theta, scaling })
    }

    /// The angle per position of each pair in a head: theta^(-2i/e), i < e/2, scaled.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let e = head_dim as f64;
        let plain = |i: usize| self.theta.powf(-2.0 * i as f64 / e);
        let scaled = |i: usize| match self.scaling {
            Scaling::None => plain(i),
            Scaling::Linear { factor } => plain(i) / factor,
            Scaling::Llama3 { factor, low, high, original } => {
                let turns = original * plain(i) / (2.0 * PI);
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                plain(i) * (keep + (1.0 - keep) / factor)
            }
            Scaling::Yarn { factor, fast, slow, original, truncate, .. } => {
                let dim_of = |turns: f64| e * (original / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
                let (mut from, mut to) = (dim_of(fast), dim_of(slow));
                if truncate {
                    (from, to) = (from.floor(), to.ceil());
                }
                (from, to) = (from.max(0.0), to.min(e - 1.0));
                let span = if from == to { 0.001 } else { to - from };
                let keep = 1.0 - ((i as f64 - from) / span).clamp(0.0, 1.0);
                plain(i) * (keep + (1.0 - keep) / factor)
            }
        };
        (0..head_dim / 2).map(|i| scaled(i) as f32).collect()
    }

    /// The factor on cos and sin (YaRN's temperature); 1 for all other scalings.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            Scaling::Yarn { attention_factor, .. } => attention_factor as f32,
            _ => 1.0,
        }
    }
}

fn kind(p: &Reader) -> Result<String> {
    Ok(p.text("rope_type")?.or(p.text("type")?).unwrap_or_else(|| "default".into()))
}

/// Returns `scaling`, unless a setting of `replaced` would be lost.
fn replacing<'a>(replaced: &Reader, scaling: Reader<'a>, top_theta: Option<f64>) -> Result<Reader<'a>> {
    let theta = replaced.number("rope_theta")?.filter(|theta| *theta != THETA);
    if let Some(theta) = theta.filter(|_| top_theta.is_none())
        && scaling.number("rope_theta")?.is_none()
    {
        return Err(scaling
            .wrong("rope_theta", &format!("must be set, as rope_scaling replaces rope_parameters (which has {theta})"))
            .hint("copy rope_theta from rope_parameters to rope_scaling"));
    }
    if kind(replaced)? != "default" && !replaced.is_same(&scaling) {
        return Err(replaced
            .wrong("rope_type", "must be \"default\" if rope_scaling sets another scaling")
            .hint("remove rope_parameters or rope_scaling from config.json"));
    }
    Ok(scaling)
}

fn refuse_partial(config: &Reader) -> Result<()> {
    match config.number("partial_rotary_factor")? {
        Some(factor) if factor != 1.0 => {
            let what = format!("must be 1 (got {factor}): partially rotated heads are not supported");
            Err(config.wrong("partial_rotary_factor", &what))
        }
        _ => Ok(()),
    }
}

fn yarn(p: &Reader, factor: f64, original: f64) -> Result<Scaling> {
    let temperature = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    let attention_factor = match (p.number("attention_factor")?, p.number("mscale")?, p.number("mscale_all_dim")?) {
        (Some(given), _, _) => given,
        (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => temperature(m) / temperature(all),
        _ => temperature(1.0),
    };
    Ok(Scaling::Yarn {
        factor,
        fast: p.number("beta_fast")?.unwrap_or(32.0),
        slow: p.number("beta_slow")?.unwrap_or(1.0),
        original,
        attention_factor,
        truncate: p.flag("truncate")?.unwrap_or(true),
    })
}
