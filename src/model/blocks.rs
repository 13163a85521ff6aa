//! The layers of a model, from config.json: attention and MLP, and the window and the rotary embedding of each layer.

use super::block_spec::{AttentionSpec, BlockSpec, DeltaSpec, LatentSpec, Mixer, QkNorm};
use super::config_json::{FULL, LINEAR, Reader, SLIDING};
use super::families::{Family, Latent, Number, Scores, Windows};
use super::feeds::{self, has_bias};
use super::rope::{Rope, Scaling};
use crate::dtype::KvDtype;
use crate::error::Result;
use serde_json::Value;

/// The layers of a model, and the rotary embeddings that they name.
pub(super) struct Blocks {
    pub blocks: Vec<BlockSpec>,
    pub ropes: Vec<Rope>,
}

impl Blocks {
    /// Reads `layers` layers of `width`.
    ///
    /// # Errors
    /// `Data` for wrong or unsupported values.
    pub fn read(c: &Reader, family: &Family, width: usize, layers: usize, context: usize) -> Result<Self> {
        let heads = c.count_needed("num_attention_heads")?;
        let latent = family.latent.map(|defaults| latent(c, heads, defaults)).transpose()?;
        let head_dim = match &latent {
            Some(latent) => latent.kv_rank + latent.rotated,
            None => head_dim(c, family, width, heads)?,
        };
        let kv_heads = c.count("num_key_value_heads")?.or(family.kv_heads).unwrap_or(heads);
        let attention = AttentionSpec {
            heads,
            kv_heads: if latent.is_some() { 1 } else { kv_heads },
            head_dim,
            window: None,
            rope: 0,
            scale: score_scale(c, family, latent.map_or(head_dim, |latent| latent.query()))?,
            softcap: positive(c, family.score_softcap)?,
            qkv_bias: has_bias(c, family.qkv_bias)?,
            o_bias: has_bias(c, family.o_bias)?,
            qk_norm: qk_norm(c, family)?,
            has_gate: family.is_hybrid,
            latent,
            sinks: family.sinks,
            kv: KvDtype::Model,
        };
        let delta = if family.is_hybrid { Some(delta(c)?) } else { None };
        let feeds = feeds::read(c, family, layers)?;
        let residual_scale = positive(c, family.residual_scale)?.unwrap_or(1.0);
        let (kinds, mut ropes) = kinds(c, family, layers, context)?;
        let mut attention = attention;
        if let Some(latent) = latent {
            attention.scale *= ropes[0].score_factor() as f32;
            for rope in &mut ropes {
                rope.columns = Some(latent.rotated);
            }
        }
        let block = |(Kind { window, rope, is_linear }, feed)| {
            let mixer = match delta {
                Some(delta) if is_linear => Mixer::Delta(delta),
                _ => Mixer::Attention(AttentionSpec { window, rope, ..attention }),
            };
            BlockSpec { mixer, feed, norms: family.norms, residual_scale }
        };
        Ok(Self { blocks: kinds.into_iter().zip(feeds).map(block).collect(), ropes })
    }
}

/// What differs from layer to layer.
#[derive(Clone, Copy)]
struct Kind {
    window: Option<usize>,
    /// The index of its rope.
    rope: usize,
    /// Whether it has the gated delta rule instead of attention.
    is_linear: bool,
}

/// The key that names the gates of query heads.
const GATE: &str = "attn_output_gate";

/// The gated delta rule of a family that has it.
fn delta(c: &Reader) -> Result<DeltaSpec> {
    if c.flag(GATE)? == Some(false) {
        return Err(c.wrong(GATE, "must be true"));
    }
    let count = |key: &str, default: usize| Ok(c.count(key)?.unwrap_or(default));
    let (key_heads, value_heads) = (count("linear_num_key_heads", 16)?, count("linear_num_value_heads", 32)?);
    if !value_heads.is_multiple_of(key_heads) {
        let what = format!("({value_heads}) must be a multiple of linear_num_key_heads ({key_heads})");
        return Err(c.wrong("linear_num_value_heads", &what));
    }
    let (key_dim, value_dim) = (count("linear_key_head_dim", 128)?, count("linear_value_head_dim", 128)?);
    Ok(DeltaSpec { key_heads, value_heads, key_dim, value_dim, taps: count("linear_conv_kernel_dim", 4)? })
}

/// The latent attention of a family that has it, with `heads` heads.
fn latent(c: &Reader, heads: usize, defaults: Latent) -> Result<LatentSpec> {
    if let Some(other) = c.count("num_key_value_heads")?.filter(|kv_heads| *kv_heads != heads) {
        let what = format!("must be num_attention_heads ({heads}) in this family (got {other})");
        return Err(c.wrong("num_key_value_heads", &what));
    }
    let count = |key: &str, default: usize| Ok(c.count(key)?.unwrap_or(default));
    // transformers writes the number of rotated columns under both names.
    let head_dim = c.count("head_dim")?;
    let rotated = count("qk_rope_head_dim", head_dim.unwrap_or(64))?;
    if let Some(other) = head_dim.filter(|other| *other != rotated) {
        return Err(c.wrong("head_dim", &format!("must be qk_rope_head_dim, {rotated} (got {other})")));
    }
    let q_rank = if c.has("q_lora_rank") { c.count("q_lora_rank")? } else { Some(defaults.q_rank) };
    let latent = LatentSpec {
        q_rank,
        kv_rank: count("kv_lora_rank", 512)?,
        plain: count("qk_nope_head_dim", defaults.plain)?,
        rotated,
        value: count("v_head_dim", defaults.value)?,
        is_interleaved: c.flag("rope_interleave")?.unwrap_or(true),
    };
    for (key, size) in [("kv_lora_rank", latent.kv_rank), ("qk_rope_head_dim", latent.rotated)] {
        if !size.is_multiple_of(2) {
            return Err(c.wrong(key, &format!("must be even (got {size})")));
        }
    }
    Ok(latent)
}

/// The norm of queries and keys, which some families have only with `use_qk_norm`.
fn qk_norm(c: &Reader, family: &Family) -> Result<QkNorm> {
    let key = family.keys.iter().find(|key| **key == "use_qk_norm");
    let is_off = key.map(|key| c.flag(key)).transpose()?.is_some_and(|is_on| is_on != Some(true));
    Ok(if is_off { QkNorm::None } else { family.qk_norm })
}

/// The layers with the gated delta rule: those of `layer_types`, or all but every `full_attention_interval`th.
fn linear_layers(c: &Reader, family: &Family, layers: usize) -> Result<Vec<bool>> {
    if !family.is_hybrid {
        return Ok(vec![false; layers]);
    }
    let Some(types) = c.get("layer_types") else {
        let interval = c.count("full_attention_interval")?.unwrap_or(4);
        if interval > layers {
            let what = format!("must be at most num_hidden_layers, {layers}, as at least one layer has attention");
            return Err(c.wrong("full_attention_interval", &format!("{what} (got {interval})")));
        }
        return Ok((1..=layers).map(|i| !i.is_multiple_of(interval)).collect());
    };
    let is_linear = |kind: &Value| match kind.as_str() {
        Some(LINEAR) => Some(true),
        Some(FULL) => Some(false),
        _ => None,
    };
    let all = types.as_array().and_then(|all| all.iter().map(is_linear).collect::<Option<Vec<bool>>>());
    let wanted = format!("must list {LINEAR} or {FULL} for each layer ({layers})");
    let all = all.filter(|all| all.len() == layers).ok_or_else(|| c.wrong("layer_types", &wanted))?;
    if all.iter().all(|is_linear| *is_linear) {
        return Err(c.wrong("layer_types", &format!("must list {FULL} at least once")));
    }
    Ok(all)
}

/// The kind of each layer, and the ropes.
fn kinds(c: &Reader, family: &Family, layers: usize, context: usize) -> Result<(Vec<Kind>, Vec<Rope>)> {
    let has_rope = layers_with_rope(c, family, layers)?;
    let windows = windows(c, family, &has_rope)?;
    let mut ropes = vec![Rope::read(c, context, family.rope, FULL)?];
    let mut index = |rope: Rope| {
        ropes.iter().position(|known| *known == rope).unwrap_or_else(|| {
            ropes.push(rope);
            ropes.len() - 1
        })
    };
    let of_sliding =
        if family.rope.by_layer.is_some() { index(Rope::read(c, context, family.rope, SLIDING)?) } else { 0 };
    let none = Rope {
        theta: family.rope.theta,
        partial: 0.0,
        scaling: Scaling::None,
        query_scale: None,
        columns: None,
        sections: None,
    };
    let without = if has_rope.contains(&false) { index(none) } else { 0 };
    let linear = linear_layers(c, family, layers)?;
    let kind = |((window, has_rope), is_linear): ((Option<usize>, bool), bool)| {
        let rope = match window {
            _ if !has_rope => without,
            Some(_) => of_sliding,
            None => 0,
        };
        Kind { window, rope, is_linear }
    };
    Ok((windows.into_iter().zip(has_rope).zip(linear).map(kind).collect(), ropes))
}

/// Whether each layer rotates queries and keys.
fn layers_with_rope(c: &Reader, family: &Family, layers: usize) -> Result<Vec<bool>> {
    if !family.has_no_rope_layers {
        return Ok(vec![true; layers]);
    }
    let Some(given) = c.get("no_rope_layers") else {
        let interval = c.count("no_rope_layer_interval")?.unwrap_or(4);
        return Ok((1..=layers).map(|i| !i.is_multiple_of(interval)).collect());
    };
    let flag = |value: &Value| value.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1);
    let all = given.as_array().and_then(|all| all.iter().map(flag).collect::<Option<Vec<bool>>>());
    all.filter(|all| all.len() == layers)
        .ok_or_else(|| c.wrong("no_rope_layers", &format!("must have a 0 or a 1 for each layer ({layers})")))
}

/// The window of each layer.
fn windows(c: &Reader, family: &Family, has_rope: &[bool]) -> Result<Vec<Option<usize>>> {
    let layers = has_rope.len();
    let width = |default: Option<usize>| {
        if c.has("sliding_window") { c.count("sliding_window") } else { Ok(default) }
    };
    let uses = || Ok(c.flag("use_sliding_window")?.unwrap_or(false));
    let (window, slides): (_, Vec<bool>) = match family.windows {
        Windows::Never => return Ok(vec![None; layers]),
        Windows::Everywhere(default) => (width(default)?, vec![true; layers]),
        Windows::Switched(default, from) => {
            let window = if uses()? { width(Some(default))? } else { None };
            let from = match c.get("max_window_layers") {
                Some(v) => v.as_u64().ok_or_else(|| c.wrong("max_window_layers", "must be a count"))? as usize,
                None => from,
            };
            (window, (0..layers).map(|i| i >= from).collect())
        }
        Windows::AllSwitched(default) => (if uses()? { width(Some(default))? } else { None }, vec![true; layers]),
        Windows::Periodic(default, period) => {
            let has_key = family.keys.contains(&"sliding_window_pattern");
            let period = if has_key { c.count("sliding_window_pattern")?.unwrap_or(period) } else { period };
            (width(Some(default))?, (1..=layers).map(|i| !i.is_multiple_of(period)).collect())
        }
        Windows::WithoutRope => {
            (if uses()? { width(None)? } else { None }, has_rope.iter().map(|has_rope| !has_rope).collect())
        }
    };
    let Some(types) = c.get("layer_types").filter(|_| !family.is_hybrid) else {
        return Ok(slides.into_iter().map(|slides| window.filter(|_| slides)).collect());
    };
    let types = types.as_array().filter(|t| t.len() == layers);
    let types =
        types.ok_or_else(|| c.wrong("layer_types", &format!("must have one entry for each layer ({layers})")))?;
    let window_of = |kind: &Value| match kind.as_str() {
        Some(FULL) => Ok(None),
        Some(SLIDING) => window
            .map(Some)
            .ok_or_else(|| c.wrong("layer_types", "lists sliding_attention, but sliding_window is not set")),
        _ => Err(c.wrong("layer_types", &format!("must list full_attention or sliding_attention (got {kind})"))),
    };
    types.iter().map(window_of).collect()
}

/// The columns of a head.
fn head_dim(c: &Reader, family: &Family, width: usize, heads: usize) -> Result<usize> {
    match c.count("head_dim")?.or(family.head_dim) {
        Some(given) => Ok(given),
        None if width.is_multiple_of(heads) => Ok(width / heads),
        None => {
            let what = format!("({width}) must be a multiple of num_attention_heads ({heads})");
            Err(c.wrong("hidden_size", &what))
        }
    }
}

/// A number that must be positive.
pub(super) fn positive(c: &Reader, number: Number) -> Result<Option<f32>> {
    let (key, default) = match number {
        Number::None => return Ok(None),
        Number::Key(key, default) => (key, default),
    };
    let found = if c.has(key) { c.number(key)? } else { default };
    match found {
        Some(x) if x <= 0.0 => Err(c.wrong(key, &format!("must be above 0 (got {x})"))),
        found => Ok(found.map(|x| x as f32)),
    }
}

/// The factor on the scores of attention.
fn score_scale(c: &Reader, family: &Family, head_dim: usize) -> Result<f32> {
    let root = |x: f64| (1.0 / x.sqrt()) as f32;
    match family.scores {
        // In f32, as models of these families were always computed here.
        Scores::HeadDim => Ok(1.0 / (head_dim as f32).sqrt()),
        Scores::Scalar(default) => {
            let scalar = positive(c, Number::Key("query_pre_attn_scalar", Some(default)))?;
            Ok(root(scalar.map_or(default, f64::from)))
        }
        Scores::Multiplier => Ok(positive(c, Number::Key("attention_multiplier", Some(1.0)))?.unwrap_or(1.0)),
    }
}
