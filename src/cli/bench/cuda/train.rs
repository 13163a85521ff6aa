//! A training step of a model with the shape of Llama 3.2 1B: forward, cross-entropy, backward, clip, AdamW.

use super::bench::{Bench, Target, Work};
use super::decode::weights;
use crate::cli::bench::models::{llama, tokens};
use crate::cli::bench::train::{learner, update};
use crate::comm::Axes;
use crate::device::Device;
use crate::device::cuda::fast;
use crate::error::{Error, Result};
use crate::learn::Role;
use crate::learn::packed::PackedRow;
use crate::model::{Arch, Head, ParamTable, TensorPart, cost};
use crate::tensor::DType;
use std::path::Path;
use std::sync::Arc;

const BATCH: usize = 4;
/// Bytes for weights and gradients, master weights and two moments, and for activations with room to spare.
const BYTES_PER_PARAMETER: usize = 18;
const ACTIVATION_BYTES: usize = 28 << 30;

pub(super) fn run(bench: &Bench) -> Result<()> {
    let n = |real: usize, small: usize| bench.pick(real, small);
    let (widths, heads) = ([n(2048, 64), n(8192, 96)], [n(32, 1), n(8, 1)]);
    let arch = Arch { tied: true, ..llama(n(128_256, 64), widths, n(16, 1), heads, 4096) };
    let table = Arc::new(ParamTable::on(Device::Cuda, &arch, Head::LanguageModel, TensorPart::whole()));
    if !bench.has_room("training step 1B", BYTES_PER_PARAMETER * table.parameters() + ACTIVATION_BYTES) {
        return Ok(());
    }
    let role = Role::new("actor", Path::new(""), &arch, weights(bench, &table), &Axes::one());
    let mut learner = learner(role, 1e-6)?;
    let each = n(2048, 24);
    let mut row = PackedRow::new();
    (0..BATCH).for_each(|i| row.push(&tokens(each, i, arch.vocabulary), 1));
    let work = cost::training(&arch, DType::Bf16, &[(0, each); BATCH], row.rows.len());
    let cost = Work::from_bytes(0.0, work.flops());
    for (mode, fast) in bench.modes() {
        fast::turn(*fast).map_err(|why| Error::fault(format!("GEMM by cuBLASLt: {why}")))?;
        let mut outcome = Ok(());
        bench.measure(
            &format!("training step 1B, {BATCH} x {each} tokens, {mode}"),
            cost,
            Some(Target::Product(0.45)),
            || {
                outcome = std::mem::replace(&mut outcome, Ok(())).and_then(|()| update(&mut learner, &row, || ()));
            },
        );
        outcome?;
    }
    fast::turn(false).map_err(Error::fault)
}
