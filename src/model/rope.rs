//! Rotary frequencies with the scalings of long-context models, as `transformers` computes them.

use super::config_json::{FULL, Reader, SLIDING};
use crate::error::{Error, Result};
use crate::ops::rope::Rotation;
use std::f64::consts::PI;

/// The base of the frequencies if config.json has none.
const THETA: f64 = 10_000.0;
/// The length of rows for which the model was made before its rope was scaled.
const ORIGINAL: &str = "original_max_position_embeddings";

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
        /// The temperature of `mscale_all_dim`, by whose square latent attention multiplies scores.
        of_scores: f64,
    },
    /// LongRoPE (arXiv:2402.13753): each frequency is divided by its factor, `long` if rows may be longer than
    /// `original`, else `short`. `transformers` chooses by the longest row of each call, so that a cached key may belong
    /// to the other choice. Here the limit on all rows of a job decides (`Arch::for_rows`).
    LongRope {
        short: Vec<f64>,
        long: Vec<f64>,
        original: f64,
        attention_factor: f64,
    },
}

/// The rotary embedding of a kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub theta: f64,
    /// The share of a head's columns that are rotated.
    pub partial: f64,
    pub scaling: Scaling,
    /// Queries at position p are multiplied by 1 + beta ln(1 + floor(p / original)): (beta, original).
    pub query_scale: Option<(f64, f64)>,
    /// The number of rotated columns, if it is not a share of a head.
    pub columns: Option<usize>,
    /// The frequencies that turn by the time, the row and the column of a token in a picture.
    pub sections: Option<Sections>,
}

/// The frequencies of each axis of positions among pictures: time, row and column (arXiv:2409.12191, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sections {
    pub sizes: [usize; 3],
    /// Frequency i has axis i mod 3 for as long as that axis has some left, else time. Otherwise the axes follow each
    /// other.
    pub is_interleaved: bool,
}

impl Sections {
    /// The axis of each of `pairs` frequencies.
    fn axes(self, pairs: usize) -> Vec<u8> {
        let Self { sizes: [time, rows, columns], is_interleaved } = self;
        let axis = |i: usize| match (i % 3, is_interleaved) {
            (1, true) => u8::from(i < 3 * rows),
            (2, true) => 2 * u8::from(i < 3 * columns),
            (_, true) => 0,
            (_, false) => u8::from(i >= time) + u8::from(i >= time + rows),
        };
        (0..pairs).map(axis).collect()
    }
}

/// The rotary embeddings of a family where config.json says nothing else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeDefaults {
    pub theta: f64,
    /// Layers of full attention and sliding layers have ropes of their own. A scaling for both is one of the former.
    /// This is the theta of sliding layers; `None` if it is that of the others.
    pub by_layer: Option<Option<f64>>,
    /// `None` if all columns of a head are rotated, always.
    pub partial: Option<f64>,
    /// "su" and "yarn" mean "longrope" (Phi-3). This is the default of `original_max_position_embeddings`, which is a key
    /// of the model there.
    pub longrope: Option<f64>,
    /// Whether `llama_4_scaling_beta` scales queries.
    pub scales_queries: bool,
    /// The factor and the original length of a yarn that is not truncated, if files without parameters of the rope mean
    /// that (gpt-oss).
    pub yarn: Option<(f64, f64)>,
    /// The default of `mrope_section`, and whether sections are interleaved, in families that see pictures.
    pub sections: Option<Sections>,
}

impl RopeDefaults {
    pub const PLAIN: Self = Self {
        theta: THETA,
        by_layer: None,
        partial: None,
        longrope: None,
        scales_queries: false,
        yarn: None,
        sections: None,
    };
}

impl Rope {
    /// Reads the rope of layers of `kind` (`FULL` or `SLIDING`): `rope_theta` and `rope_scaling` (transformers 4) or
    /// `rope_parameters` (5). If a file has both, `rope_scaling` replaces `rope_parameters`, as in
    /// `convert_rope_params_to_dict` of transformers 5.
    ///
    /// # Errors
    /// `Data` for wrong or unsupported values, parameters by layer type that the family does not have, and two
    /// different scalings.
    pub(super) fn read(config: &Reader, context: usize, family: RopeDefaults, kind: &str) -> Result<Self> {
        if let Some(of_sliding) = family.by_layer {
            return Self::read_of_layer(config, context, family, of_sliding, kind);
        }
        let [parameters, scaling] = ["rope_parameters", "rope_scaling"].map(|key| {
            let found = config.object(key)?.filter(|found| !found.is_empty());
            match found.as_ref().and_then(Reader::nested) {
                Some(layers) => {
                    Err(config.wrong(key, &format!("must be the same for all layers (got one for {layers})")))
                }
                None => Ok(found),
            }
        });
        let top_theta = config.number("rope_theta")?;
        let parameters = match (parameters?, scaling?) {
            (Some(replaced), Some(scaling)) => Some(replacing(&replaced, scaling, top_theta)?),
            (parameters, scaling) => scaling.or(parameters),
        };
        Self::of(config, parameters.as_ref(), context, family)
    }

    /// The same for a family whose kinds of layers have ropes of their own.
    fn read_of_layer(
        config: &Reader,
        context: usize,
        family: RopeDefaults,
        of_sliding: Option<f64>,
        kind: &str,
    ) -> Result<Self> {
        let scaling = config.object("rope_scaling")?.filter(|scaling| !scaling.is_empty());
        let local = config.number("rope_local_base_freq")?.or(of_sliding);
        let theta = if kind == SLIDING { local.unwrap_or(family.theta) } else { family.theta };
        let of_kind = match config.object("rope_parameters")?.filter(|all| !all.is_empty()) {
            Some(all) if all.nested().is_none() => {
                let what = format!("must have an entry for each kind of layer, {FULL} and {SLIDING}");
                return Err(config.wrong("rope_parameters", &what));
            }
            Some(all) => all.object(kind)?,
            None => None,
        };
        let family = RopeDefaults { theta, ..family };
        match (of_kind, scaling.filter(|_| kind == FULL)) {
            (Some(_), Some(_)) => Err(config
                .wrong("rope_scaling", "must not be set if rope_parameters is")
                .hint("remove rope_parameters or rope_scaling from config.json")),
            // The keys at the top are those of layers of full attention.
            (None, None) if kind == SLIDING && of_sliding.is_some() => Ok(Self {
                theta,
                partial: 1.0,
                scaling: Scaling::None,
                query_scale: None,
                columns: None,
                sections: None,
            }),
            (parameters, scaling) => Self::of(config, parameters.or(scaling).as_ref(), context, family),
        }
    }

    /// The rope of an object of parameters, with the keys at the top where it has none.
    fn of(config: &Reader, parameters: Option<&Reader>, context: usize, family: RopeDefaults) -> Result<Self> {
        let empty = config.empty();
        let p = parameters.unwrap_or(&empty);
        let theta = p.number("rope_theta")?.or(config.number("rope_theta")?).unwrap_or(family.theta);
        let factor =
            || p.number("factor")?.filter(|f| *f >= 1.0).ok_or_else(|| p.wrong("factor", "must be at least 1"));
        let context = context as f64;
        let original = match above_zero(config, ORIGINAL)? {
            None if family.longrope.is_some() => family.longrope,
            None => above_zero(p, ORIGINAL)?,
            found => found,
        };
        let kind = match kind(p)?.as_str() {
            "su" | "yarn" if family.longrope.is_some() => "longrope".to_owned(),
            "mrope" if family.sections.is_some() => "default".to_owned(),
            kind => kind.to_owned(),
        };
        let is_silent = parameters.is_none() && config.get("rope_parameters").is_none();
        let scaling = match kind.as_str() {
            "default" => match family.yarn.filter(|_| is_silent) {
                Some((factor, original)) => yarn(&empty, factor, original, false)?,
                None => Scaling::None,
            },
            "linear" => Scaling::Linear { factor: factor()? },
            // Dynamic NTK scaling changes nothing within the context, and longer rows are rejected.
            "dynamic" if original.is_none_or(|o| o >= context) => Scaling::None,
            "llama3" => llama3(p, factor()?, original)?,
            "yarn" => {
                let original = original.unwrap_or(context);
                yarn(
                    p,
                    if p.has("factor") && p.get("factor").is_none() { context / original } else { factor()? },
                    original,
                    true,
                )?
            }
            "longrope" if family.longrope.is_some() => longrope(p, context, original.unwrap_or(context))?,
            other => {
                return Err(Error::data(format!("config.json: rope type \"{other}\" is not supported"))
                    .hint("use a model with rope type default, linear, dynamic (within its context), llama3 or yarn"));
            }
        };
        let beta = p.number("llama_4_scaling_beta")?.filter(|beta| *beta != 0.0);
        if let Some(beta) = beta.filter(|_| !family.scales_queries) {
            let what = format!("must be 0 in this family, which does not scale queries (got {beta})");
            return Err(p.wrong("llama_4_scaling_beta", &what));
        }
        let query_scale = beta.map(|beta| (beta, original.unwrap_or(context)));
        let sections = family.sections.map(|default| sections(p, default)).transpose()?;
        Ok(Self { theta, partial: partial(config, p, family.partial)?, scaling, query_scale, columns: None, sections })
    }

    /// The rotation of heads of `head_dim` columns, in rows of up to `longest` tokens.
    ///
    /// # Errors
    /// `Data` if an odd number of columns would be rotated, or a list of factors has another length.
    pub fn rotation(&self, head_dim: usize, longest: usize) -> Result<Rotation> {
        let rotated = self.rotated(head_dim);
        if !rotated.is_multiple_of(2) {
            let what =
                format!("partial_rotary_factor must rotate an even number of columns (got {rotated} of {head_dim})");
            return Err(Error::data(format!("config.json: {what}")));
        }
        if let Some(Sections { sizes, is_interleaved: false }) = &self.sections
            && sizes.iter().sum::<usize>() != rotated / 2
        {
            let message = format!("config.json: mrope_section must sum to {} (got {sizes:?})", rotated / 2);
            return Err(Error::data(message));
        }
        if let Scaling::LongRope { short, long, .. } = &self.scaling
            && let Some(wrong) = [short, long].into_iter().find(|factors| factors.len() != rotated / 2)
        {
            let (got, needed) = (wrong.len(), rotated / 2);
            let message = format!("config.json: short_factor and long_factor must have {needed} numbers (got {got})");
            return Err(Error::data(message));
        }
        let inverse_frequencies = self.inverse_frequencies(rotated, longest);
        let attention_factor = self.attention_factor();
        let axes = self.sections.map_or_else(Vec::new, |sections| sections.axes(rotated / 2));
        Ok(Rotation { head_dim, inverse_frequencies, axes, attention_factor, query_scale: self.query_scale })
    }

    /// The columns of a head that are rotated.
    pub fn rotated(&self, head_dim: usize) -> usize {
        self.columns.unwrap_or((head_dim as f64 * self.partial) as usize)
    }

    /// The factor on the scores of latent attention.
    pub fn score_factor(&self) -> f64 {
        if let Scaling::Yarn { of_scores, .. } = self.scaling { of_scores * of_scores } else { 1.0 }
    }

    /// The longest row for which the frequencies are those of short rows.
    pub fn short_rows(&self) -> Option<usize> {
        match self.scaling {
            Scaling::LongRope { original, .. } => Some(original as usize),
            _ => None,
        }
    }

    /// The angle per position of each pair of e rotated columns: theta^(-2i/e), i < e/2, scaled.
    fn inverse_frequencies(&self, rotated: usize, longest: usize) -> Vec<f32> {
        let e = rotated as f64;
        let plain = |i: usize| self.theta.powf(-2.0 * i as f64 / e);
        let scaled = |i: usize| match &self.scaling {
            Scaling::None => plain(i),
            Scaling::Linear { factor } => plain(i) / factor,
            Scaling::LongRope { short, long, original, .. } => {
                plain(i) / if longest as f64 > *original { long[i] } else { short[i] }
            }
            Scaling::Llama3 { factor, low, high, original } => {
                let turns = original * plain(i) / (2.0 * PI);
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                plain(i) * (keep + (1.0 - keep) / factor)
            }
            &Scaling::Yarn { factor, fast, slow, original, truncate, .. } => {
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
        (0..rotated / 2).map(|i| scaled(i) as f32).collect()
    }

    /// The factor on cos and sin (the temperature of YaRN and LongRoPE); 1 for all other scalings.
    fn attention_factor(&self) -> f32 {
        match self.scaling {
            Scaling::Yarn { attention_factor, .. } | Scaling::LongRope { attention_factor, .. } => {
                attention_factor as f32
            }
            _ => 1.0,
        }
    }
}

/// A number that must be above 0, if it is set.
fn above_zero(p: &Reader, key: &str) -> Result<Option<f64>> {
    match p.number(key)? {
        Some(x) if x <= 0.0 => Err(p.wrong(key, &format!("must be above 0 (got {x})"))),
        found => Ok(found),
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

/// The frequencies of each axis of positions.
fn sections(p: &Reader, default: Sections) -> Result<Sections> {
    let key = "mrope_section";
    let size = |v: &serde_json::Value| v.as_u64().map(|n| n as usize);
    let sizes = match p.get(key) {
        None => default.sizes,
        Some(given) => {
            let all: Option<Vec<usize>> = given.as_array().and_then(|all| all.iter().map(size).collect());
            let all = all.and_then(|all| <[usize; 3]>::try_from(all).ok());
            all.ok_or_else(|| p.wrong(key, &format!("must be a list of three counts (got {given})")))?
        }
    };
    let is_interleaved = p.flag("mrope_interleaved")?.unwrap_or(default.is_interleaved);
    if is_interleaved != default.is_interleaved {
        return Err(p.wrong("mrope_interleaved", &format!("must be {} in this family", default.is_interleaved)));
    }
    Ok(Sections { sizes, is_interleaved })
}

/// The share of a head's columns that are rotated.
fn partial(config: &Reader, p: &Reader, default: Option<f64>) -> Result<f64> {
    let at = if p.number("partial_rotary_factor")?.is_some() { p } else { config };
    let given = at.number("partial_rotary_factor")?;
    match default {
        Some(default) => match given.unwrap_or(default) {
            share if share > 0.0 && share <= 1.0 => Ok(share),
            share => Err(at.wrong("partial_rotary_factor", &format!("must be above 0 and at most 1 (got {share})"))),
        },
        None if given.is_some_and(|share| share != 1.0) => {
            let what = "must be 1 in this family, which rotates whole heads";
            Err(at.wrong("partial_rotary_factor", &format!("{what} (got {})", given.unwrap_or(1.0))))
        }
        None => Ok(1.0),
    }
}

fn llama3(p: &Reader, factor: f64, original: Option<f64>) -> Result<Scaling> {
    let needed = |key, found: Option<f64>| found.ok_or_else(|| p.wrong(key, "is missing"));
    let number = |key| needed(key, above_zero(p, key)?);
    let (low, high) = (number("low_freq_factor")?, number("high_freq_factor")?);
    if low >= high {
        return Err(p.wrong("high_freq_factor", &format!("must be above low_freq_factor, {low} (got {high})")));
    }
    Ok(Scaling::Llama3 { factor, low, high, original: needed(ORIGINAL, original)? })
}

fn longrope(p: &Reader, context: f64, original: f64) -> Result<Scaling> {
    let factor = p.number("factor")?.unwrap_or(context / original);
    let temperature = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
    Ok(Scaling::LongRope {
        short: p.numbers("short_factor")?,
        long: p.numbers("long_factor")?,
        original,
        attention_factor: above_zero(p, "attention_factor")?.unwrap_or(temperature),
    })
}

fn yarn(p: &Reader, factor: f64, original: f64, truncate: bool) -> Result<Scaling> {
    let temperature = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    let attention_factor = match (above_zero(p, "attention_factor")?, p.number("mscale")?, p.number("mscale_all_dim")?)
    {
        (Some(given), _, _) => given,
        (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => temperature(m) / temperature(all),
        _ => temperature(1.0),
    };
    // 0 means the default in transformers.
    let turns = |key, default| match p.number(key)? {
        None | Some(0.0) => Ok(default),
        Some(_) => Ok(above_zero(p, key)?.unwrap_or(default)),
    };
    Ok(Scaling::Yarn {
        factor,
        fast: turns("beta_fast", 32.0)?,
        slow: turns("beta_slow", 1.0)?,
        original,
        attention_factor,
        truncate: p.flag("truncate")?.unwrap_or(truncate),
        of_scores: p.number("mscale_all_dim")?.filter(|all| *all != 0.0).map_or(1.0, temperature),
    })
}
