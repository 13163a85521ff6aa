//! The vision tower of a model as data, from `vision_config` of config.json: Qwen2.5-VL, Qwen3-VL and Qwen3.5.

use super::config_json::Reader;
use super::wrapper::{VISION, Wrapper};
use crate::error::Result;
use crate::sys::stderr;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;

/// A vision tower. Its input are the patches of images, its result is a row of the language model's width for each
/// `merge` x `merge` patches.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionSpec {
    /// The token in whose place each of these rows comes.
    pub image_token: u32,
    /// Its tokens, which are never sampled: those of images and of videos.
    pub tokens: Vec<u32>,
    /// The pixels of the side of a patch, and its frames.
    pub patch: usize,
    pub frames: usize,
    /// Patches on the side of a token.
    pub merge: usize,
    pub width: usize,
    pub heads: usize,
    /// The inner width of MLPs.
    pub inner: usize,
    pub depth: usize,
    /// The width of the language model.
    pub out: usize,
    pub kind: TowerKind,
    /// The blocks whose results are merged and added after the first layers of the language model, ascending.
    pub deepstack: Vec<usize>,
    /// Standard deviation of new matrices.
    pub init_std: f32,
}

/// The vision tower of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Sight {
    pub spec: Arc<VisionSpec>,
    /// Whether the parameter table has it. Otherwise it is frozen, and an export copies it.
    pub trains: bool,
    /// Whether the rows of the job have images. A model that is learned without them may be exported without the tower.
    pub is_used: bool,
}

impl Sight {
    /// A tower that does not train.
    pub(super) fn frozen(spec: VisionSpec) -> Self {
        Self { spec: Arc::new(spec), trains: false, is_used: false }
    }
}

/// What differs between towers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TowerKind {
    /// RMSNorms, gated MLPs, and attention within windows of `window` x `window` tokens but in the blocks `full`
    /// (arXiv:2502.13923, section 2.1).
    Windowed { window: usize, full: Vec<usize> },
    /// LayerNorms, plain MLPs, full attention, and a learned table of `side` x `side` positions that is resampled to the
    /// grid of an image (arXiv:2511.21631).
    Learned { side: usize },
}

/// The kinds of models whose towers are known, with the default of `image_token_id`.
const KNOWN: [(&str, u32); 4] =
    [("qwen2_5_vl", 151_655), ("qwen3_vl", 151_655), ("qwen3_5", 248_056), ("qwen3_5_moe", 248_056)];

/// Whether the towers of this kind of model are known.
pub(super) fn is_known(kind: &str) -> bool {
    KNOWN.iter().any(|(known, _)| *known == kind)
}

/// Keys of `vision_config` that are read.
const USED: [&str; 19] = [
    "deepstack_visual_indexes",
    "depth",
    "fullatt_block_indexes",
    "hidden_act",
    "hidden_size",
    "in_channels",
    "in_chans",
    "initializer_range",
    "intermediate_size",
    "num_heads",
    "num_position_embeddings",
    "out_hidden_size",
    "patch_size",
    "rope_parameters",
    "spatial_merge_size",
    "spatial_patch_size",
    "temporal_patch_size",
    "window_size",
    "model_type",
];
/// Keys that change no result for images.
const IRRELEVANT: [&str; 6] = [
    "_attn_implementation",
    "attn_implementation",
    "dtype",
    "tokens_per_second",
    "torch_dtype",
    "transformers_version",
];
/// The base of the frequencies of positions.
pub(super) const THETA: f64 = 10_000.0;

impl VisionSpec {
    /// Reads the tower of the model around a language model of `width` with `layers` layers; `None` if it has none that is
    /// known.
    ///
    /// # Errors
    /// `Data` for wrong or unsupported values.
    pub(super) fn read(wrapper: &Wrapper, width: usize, layers: usize) -> Result<Option<Self>> {
        let Some((name, token)) = KNOWN.into_iter().find(|(name, _)| *name == wrapper.name()) else { return Ok(None) };
        let outer = Reader::new(wrapper.keys());
        let Some(c) = outer.object(VISION)? else { return Ok(None) };
        let is_windowed = name == "qwen2_5_vl";
        let count = |key: &str, default: usize| Ok::<_, crate::error::Error>(c.count(key)?.unwrap_or(default));
        let (patch, depth) = (
            count("patch_size", if is_windowed { 14 } else { 16 })?,
            count("depth", if is_windowed { 32 } else { 27 })?,
        );
        let merge = count("spatial_merge_size", 2)?;
        let kind = if is_windowed {
            let window = count("window_size", 112)? / (merge * patch);
            if window == 0 {
                return Err(
                    c.wrong("window_size", &format!("must be at least {}, the pixels of a token", merge * patch))
                );
            }
            TowerKind::Windowed { window, full: indices(&c, "fullatt_block_indexes", &[7, 15, 23, 31], depth)? }
        } else {
            let positions = count("num_position_embeddings", 2304)?;
            let side = positions.isqrt();
            if side * side != positions {
                return Err(c.wrong("num_position_embeddings", &format!("must be a square (got {positions})")));
            }
            TowerKind::Learned { side }
        };
        let has_deepstack = name == "qwen3_vl";
        let usual: &[usize] = if has_deepstack { &[8, 16, 24] } else { &[] };
        let image_token = outer.whole("image_token_id")?.map_or(token, |token| token as u32);
        let video_token = outer.whole("video_token_id")?.map_or(image_token + 1, |token| token as u32);
        let spec = Self {
            image_token,
            tokens: vec![image_token, video_token],
            patch,
            frames: count("temporal_patch_size", 2)?,
            merge,
            width: count("hidden_size", if is_windowed { 3584 } else { 1152 })?,
            heads: count("num_heads", 16)?,
            inner: count("intermediate_size", if is_windowed { 3420 } else { 4304 })?,
            depth,
            out: count("out_hidden_size", 3584)?,
            kind,
            deepstack: indices(&c, "deepstack_visual_indexes", usual, depth)?,
            init_std: c.number("initializer_range")?.unwrap_or(0.02) as f32,
        };
        spec.check(&c, has_deepstack, (width, layers))?;
        Ok(Some(spec))
    }

    fn check(&self, c: &Reader, has_deepstack: bool, (width, layers): (usize, usize)) -> Result<()> {
        for key in ["in_channels", "in_chans"] {
            if let Some(other) = c.count(key)?.filter(|channels| *channels != 3) {
                return Err(c.wrong(key, &format!("must be 3: red, green and blue (got {other})")));
            }
        }
        let activation = if self.is_windowed() { "silu" } else { "gelu_pytorch_tanh" };
        if let Some(other) = c.text("hidden_act")?.filter(|given| given != activation) {
            return Err(c.wrong("hidden_act", &format!("must be \"{activation}\" (got \"{other}\")")));
        }
        if !self.width.is_multiple_of(self.heads) || !(self.width / self.heads).is_multiple_of(4) {
            let what = format!("({}) must be a multiple of 4 num_heads ({})", self.width, self.heads);
            return Err(c.wrong("hidden_size", &what));
        }
        if self.out != width {
            return Err(
                c.wrong("out_hidden_size", &format!("must be the language model's width, {width} (got {})", self.out))
            );
        }
        let key = "deepstack_visual_indexes";
        let found = self.deepstack.len();
        if found > if has_deepstack { layers } else { 0 } {
            return Err(c.wrong(key, &format!("must not list more than the layers that take them (got {found})")));
        }
        let Some(rope) = c.object("rope_parameters")? else { return Ok(()) };
        if let Some(other) = rope.number("rope_theta")?.filter(|theta| *theta != THETA) {
            return Err(rope.wrong("rope_theta", &format!("must be {THETA} in a tower (got {other})")));
        }
        Ok(())
    }

    /// Warnings about keys of `vision_config` in the config.json of `dir` that nothing reads.
    pub(super) fn warnings(dir: &Path, config: &Map<String, Value>) -> Vec<String> {
        let is_known = |name: &str| KNOWN.iter().any(|(known, _)| *known == name);
        let has_tower = config.get("model_type").and_then(Value::as_str).is_some_and(is_known);
        let tower = config.get(VISION).and_then(Value::as_object).filter(|_| has_tower);
        let Some(tower) = tower else { return Vec::new() };
        let known = |key: &str| USED.contains(&key) || IRRELEVANT.contains(&key);
        stderr::unknown_keys(&dir.join("config.json").join(VISION), tower, known).into_iter().collect()
    }

    pub fn is_windowed(&self) -> bool {
        matches!(self.kind, TowerKind::Windowed { .. })
    }

    /// The values of a patch.
    pub fn patch_values(&self) -> usize {
        3 * self.frames * self.patch * self.patch
    }

    /// The patches of a token.
    pub fn patches_of_token(&self) -> usize {
        self.merge * self.merge
    }

    /// The number of tokens in whose place an image with this grid of patches comes.
    pub fn tokens_of(&self, grid: [usize; 3]) -> usize {
        grid.iter().product::<usize>() / self.patches_of_token()
    }
}

/// A list of blocks, ascending.
fn indices(c: &Reader, key: &str, default: &[usize], depth: usize) -> Result<Vec<usize>> {
    let Some(given) = c.get(key) else { return Ok(default.to_vec()) };
    let all: Option<Vec<usize>> =
        given.as_array().and_then(|all| all.iter().map(|v| v.as_u64().map(|n| n as usize)).collect());
    let all = all.filter(|all| all.is_sorted_by(|a, b| a < b) && all.last().is_none_or(|last| *last < depth));
    all.ok_or_else(|| c.wrong(key, &format!("must list blocks below depth, {depth}, in order (got {given})")))
}
