//! The feed-forward part of each layer, from config.json: an MLP, or a mixture of experts.

use super::block_spec::{DenseSpec, ExpertsSpec, Feed};
use super::config_json::Reader;
use super::families::{Bias, Family, Mixture};
use crate::error::Result;
use crate::ops::glu::Activation;
use serde_json::Value;

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
    let count = c.count("num_experts")?.or(c.count("num_local_experts")?).unwrap_or(mixture.count);
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
    Ok(ExpertsSpec { count, top_k, width, activation, renormalizes })
}

/// Whether each layer has an MLP instead of a mixture.
fn dense_layers(c: &Reader, mixture: &Mixture, layers: usize) -> Result<Vec<bool>> {
    if !mixture.has_dense_layers {
        return Ok(vec![false; layers]);
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
