//! The feed-forward part of each layer, from config.json: an MLP, or a mixture of experts.

use super::block_spec::{DenseSpec, ExpertsSpec, Feed, Scoring, SharedName, SharedSpec};
use super::config_json::Reader;
use super::families::{self, Bias, DenseLayers, Family, Mixture, Shared};
use crate::error::Result;
use crate::ops::glu::Activation;
use serde_json::Value;

/// A number of experts above that of any real model. It bounds what a damaged config.json can make the program allocate.
const EXPERTS_MAX: usize = 1 << 14;

/// Reads the MLP or the mixture of each layer.
///
/// # Errors
/// `Data` for wrong or unsupported values.
pub(super) fn read(c: &Reader, family: &Family, layers: usize) -> Result<Vec<Feed>> {
    let activation = activation(c, family)?;
    let dense = || -> Result<Feed> {
        let (width, bias) = (c.count_needed("intermediate_size")?, has_bias(c, family.mlp_bias)?);
        Ok(Feed::Dense(DenseSpec { width, activation, bias, is_joined: family.files.joins_gate_up }))
    };
    let Some(mixture) = &family.experts else { return Ok(vec![dense()?; layers]) };
    let experts = Feed::Experts(experts(c, mixture, activation)?);
    let is_dense = dense_layers(c, mixture, layers)?;
    is_dense.into_iter().map(|is_dense| if is_dense { dense() } else { Ok(experts) }).collect()
}

fn experts(c: &Reader, mixture: &Mixture, activation: Activation) -> Result<ExpertsSpec> {
    let mut count = mixture.count;
    for key in ["n_routed_experts", "num_local_experts", "num_experts"] {
        count = c.count(key)?.unwrap_or(count);
        if count > EXPERTS_MAX {
            return Err(c.wrong(key, &format!("must be at most {EXPERTS_MAX} (got {count})")));
        }
    }
    let top_k = c.count("num_experts_per_tok")?.unwrap_or(mixture.top_k);
    if top_k > count {
        return Err(
            c.wrong("num_experts_per_tok", &format!("must be at most {count}, the number of experts (got {top_k})"))
        );
    }
    let width = match mixture.width {
        Some(default) => c.count("moe_intermediate_size")?.unwrap_or(default),
        None => c.count_needed("intermediate_size")?,
    };
    let renormalizes = match mixture.renormalizes {
        Some(default) => c.flag("norm_topk_prob")?.unwrap_or(default),
        None => true,
    };
    // The name of the same number in the files of gpt-oss.
    if let Some(other) = c.count("experts_per_token")?.filter(|other| *other != top_k) {
        return Err(c.wrong("experts_per_token", &format!("must be num_experts_per_tok, {top_k} (got {other})")));
    }
    let activation = if mixture.clamps { clamped(c, activation)? } else { activation };
    let scoring = scoring(c, mixture.scoring, count, top_k)?;
    let shared = shared(c, mixture, width)?;
    let has_biases = mixture.has_biases;
    Ok(ExpertsSpec { count, top_k, width, activation, renormalizes, has_biases, scoring, shared })
}

/// How the router of a mixture of `count` experts weighs the `top_k` of a token.
fn scoring(c: &Reader, scoring: families::Scoring, count: usize, top_k: usize) -> Result<Scoring> {
    let families::Scoring::Sigmoid(groups, top_groups, scale) = scoring else { return Ok(Scoring::Softmax) };
    for (key, only) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if let Some(other) = c.text(key)?.filter(|found| found != only) {
            return Err(c.wrong(key, &format!("must be \"{only}\" (got \"{other}\")")));
        }
    }
    if let Some(step) = c.count("moe_layer_freq")?.filter(|step| *step != 1) {
        return Err(c.wrong("moe_layer_freq", &format!("must be 1 (got {step})")));
    }
    let groups = c.count("n_group")?.unwrap_or(groups);
    let top_groups = c.count("topk_group")?.unwrap_or(top_groups);
    if groups == 0 || !count.is_multiple_of(groups) || (groups > 1 && count / groups < 2) {
        let what = format!("must divide the {count} experts into groups of at least 2 (got {groups})");
        return Err(c.wrong("n_group", &what));
    }
    if top_groups == 0 || top_groups > groups || top_groups * (count / groups) < top_k {
        let what = format!("must be 1 to {groups} groups with at least {top_k} experts together (got {top_groups})");
        return Err(c.wrong("topk_group", &what));
    }
    let scale = c.number("routed_scaling_factor")?.unwrap_or(scale) as f32;
    Ok(Scoring::Sigmoid { groups, top_groups, scale })
}

/// The expert that all tokens use, for other experts of `width`.
fn shared(c: &Reader, mixture: &Mixture, width: usize) -> Result<Option<SharedSpec>> {
    let (name, width) = match mixture.shared {
        None => return Ok(None),
        Some(Shared::Gated(default)) => {
            (SharedName::Gated, c.count("shared_expert_intermediate_size")?.unwrap_or(default))
        }
        Some(Shared::Plain(default)) => (SharedName::Plain, c.count("n_shared_experts")?.unwrap_or(default) * width),
    };
    Ok(Some(SharedSpec { name, width }))
}

/// The activation of experts that limit gate and up.
fn clamped(c: &Reader, activation: Activation) -> Result<Activation> {
    if activation != Activation::Silu {
        return Err(c.wrong("hidden_act", &format!("must be \"silu\" (got \"{}\")", activation.name())));
    }
    let number = |key: &str, default: f64| match c.number(key)?.unwrap_or(default) {
        x if x > 0.0 => Ok(x as f32),
        x => Err(c.wrong(key, &format!("must be above 0 (got {x})"))),
    };
    Ok(Activation::ClampedSilu { alpha: number("swiglu_alpha", 1.702)?, limit: number("swiglu_limit", 7.0)? })
}

/// Whether each layer has an MLP instead of a mixture.
fn dense_layers(c: &Reader, mixture: &Mixture, layers: usize) -> Result<Vec<bool>> {
    match mixture.dense {
        DenseLayers::Never => return Ok(vec![false; layers]),
        DenseLayers::First(default) => {
            let first = c.whole("first_k_dense_replace")?.unwrap_or(default);
            return Ok((0..layers).map(|i| i < first).collect());
        }
        DenseLayers::Listed => return listed_dense(c, layers),
        DenseLayers::Stepped => {}
    }
    let step = c.count("decoder_sparse_step")?.unwrap_or(1);
    let mut dense: Vec<bool> = (1..=layers).map(|i| !i.is_multiple_of(step)).collect();
    let listed = match c.get("mlp_only_layers") {
        None => Some(Vec::new()),
        Some(list) => list.as_array().and_then(|list| list.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>()),
    };
    let listed = listed.ok_or_else(|| c.wrong("mlp_only_layers", "must be a list of layers"))?;
    // transformers ignores layers that the model lacks, too.
    for layer in listed {
        if let Some(dense) = usize::try_from(layer).ok().and_then(|layer| dense.get_mut(layer)) {
            *dense = true;
        }
    }
    Ok(dense)
}

/// Whether each layer is `dense` in `mlp_layer_types`. Without it, the first one is.
fn listed_dense(c: &Reader, layers: usize) -> Result<Vec<bool>> {
    const KEY: &str = "mlp_layer_types";
    let Some(types) = c.get(KEY) else { return Ok((0..layers).map(|i| i == 0).collect()) };
    let is_dense = |kind: &Value| match kind.as_str() {
        Some("dense") => Some(true),
        Some("sparse") => Some(false),
        _ => None,
    };
    let all = types.as_array().and_then(|all| all.iter().map(is_dense).collect::<Option<Vec<bool>>>());
    all.filter(|all| all.len() == layers)
        .ok_or_else(|| c.wrong(KEY, &format!("must list dense or sparse for each layer ({layers})")))
}

/// The activation of MLPs and experts.
fn activation(c: &Reader, family: &Family) -> Result<Activation> {
    let (key, default) = family.activation;
    match c.text(key)?.as_deref() {
        None => Ok(default),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some(other) => Err(c.wrong(key, &format!("must be \"silu\" or \"gelu_pytorch_tanh\" (got \"{other}\")"))),
    }
}

/// Whether a projection has a bias.
pub(super) fn has_bias(c: &Reader, bias: Bias) -> Result<bool> {
    match bias {
        Bias::Never => Ok(false),
        Bias::Always => Ok(true),
        Bias::Key(key, default) => Ok(c.flag(key)?.unwrap_or(default)),
    }
}
