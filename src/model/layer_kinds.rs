//! The kinds of a model's layers, from config.json: the window of each layer, and its rotary embedding.

use super::config_json::Reader;
use super::families::{Family, Windows};
use super::rope::{FULL, Rope, SLIDING, Scaling};
use crate::error::Result;
use serde_json::Value;

/// The layers of a model by kind.
pub(super) struct LayerKinds {
    /// The window, and the index in `ropes`, of each layer.
    pub layers: Vec<(Option<usize>, usize)>,
    pub ropes: Vec<Rope>,
}

/// Reads windows and ropes of `layers` layers.
///
/// # Errors
/// `Data` for wrong or unsupported values.
pub(super) fn read(c: &Reader, family: &Family, layers: usize, context: usize) -> Result<LayerKinds> {
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
    let none = Rope { theta: family.rope.theta, partial: 0.0, scaling: Scaling::None, query_scale: None };
    let without = if has_rope.contains(&false) { index(none) } else { 0 };
    let rope_of = |(window, has_rope): (Option<usize>, bool)| match window {
        _ if !has_rope => (window, without),
        Some(_) => (window, of_sliding),
        None => (window, 0),
    };
    Ok(LayerKinds { layers: windows.into_iter().zip(has_rope).map(rope_of).collect(), ropes })
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
        Windows::Periodic(default, period) => {
            let has_key = family.keys.contains(&"sliding_window_pattern");
            let period = if has_key { c.count("sliding_window_pattern")?.unwrap_or(period) } else { period };
            (width(Some(default))?, (1..=layers).map(|i| !i.is_multiple_of(period)).collect())
        }
        Windows::WithoutRope => {
            (if uses()? { width(None)? } else { None }, has_rope.iter().map(|has_rope| !has_rope).collect())
        }
    };
    let Some(types) = c.get("layer_types") else {
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
