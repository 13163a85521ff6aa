//! A training step of a model of the shape of Llama 3.2 1B: forward, cross-entropy, backward, clip, AdamW.

use super::bench::{Bench, Cost, Target};
use super::decode::weights;
use crate::cli::bench::cost;
use crate::cli::bench::models::tokens;
use crate::cli::bench::train::{learner, update};
use crate::comm::Axes;
use crate::device::Device;
use crate::device::cuda::fast;
use crate::error::{Error, Result};
use crate::learn::Role;
use crate::learn::packed::PackedRow;
use crate::model::{Arch, Head, ParamTable, TensorPart};
use crate::tensor::DType;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

const BATCH: usize = 4;
/// Weights and gradients, master weights and two moments, and activations with room to spare.
const BYTES_PER_PARAMETER: usize = 18;
const ACTIVATION_BYTES: usize = 28 << 30;

pub(super) fn run(bench: &Bench) -> Result<()> {
    let n = |real: usize, small: usize| bench.pick(real, small);
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": n(2048, 64),
        "intermediate_size": n(8192, 96), "num_hidden_layers": n(16, 1), "num_attention_heads": n(32, 1),
        "num_key_value_heads": n(8, 1), "head_dim": 64, "vocab_size": n(128_256, 64),
        "max_position_embeddings": 4096, "tie_word_embeddings": true,
    });
    let arch = Arch::from_config(config.as_object().expect("an object"))?;
    let table = Arc::new(ParamTable::on(Device::Cuda, &arch, Head::LanguageModel, TensorPart::whole()));
    if !bench.has_room("training step 1B", BYTES_PER_PARAMETER * table.parameters() + ACTIVATION_BYTES) {
        return Ok(());
    }
    let role = Role::new("actor", Path::new(""), &arch, weights(bench, table), &Axes::one());
    let mut learner = learner(role, 1e-6)?;
    let each = n(2048, 24);
    let mut row = PackedRow::new();
    (0..BATCH).for_each(|i| row.push(&tokens(each, i, arch.vocabulary), 1));
    let work = cost::training(&arch, DType::Bf16, &[(0, each); BATCH], row.rows.len());
    let cost = Cost::of(0.0, work.flops()).with(Target::Product(0.45));
    for (mode, fast) in bench.modes() {
        fast::turn(*fast).map_err(|why| Error::fault(format!("products by cuBLASLt: {why}")))?;
        let mut outcome = Ok(());
        bench.measure(&format!("training step 1B, {BATCH} x {each} tokens, {mode}"), &cost, || {
            outcome = std::mem::replace(&mut outcome, Ok(())).and_then(|()| update(&mut learner, &row, || ()));
        });
        outcome?;
    }
    fast::turn(false).map_err(Error::fault)
}
