//! Ring attention over the job's own sequence axis, held to attention of the whole row on the same GPU: forward and gradients.

use super::trial::{apart, ends, numbers, within};
use crate::comm::Axes;
use crate::device::Device;
use crate::error::Result;
use crate::model::{Ring, Transformer};
use crate::ops::attention::{self, AttentionShape, Packed};
use crate::ops::zigzag;
use crate::tensor::Tensor;

/// Both round to bf16: results, and probabilities in other blocks.
const ROW_APART: f64 = 0.02;

/// Compares each kind of layer of the small model. All ranks of `axes.sequence` call this, and none waits for what another finds.
///
/// # Errors
/// `Fault`, naming what differs.
pub fn compare(axes: &Axes, model: &Transformer) -> Result<()> {
    let ring = Ring::new(axes);
    let each: Vec<Result<()>> = (0..model.arch.layers)
        .map(|layer| {
            let within = format!("ring attention over the sequence axis of {}", axes.sequence.ranks_words());
            of_layer(axes, &ring, model.attention_shape(layer)).map_err(|error| error.within(within))
        })
        .collect();
    each.into_iter().collect()
}

fn of_layer(axes: &Axes, ring: &Ring, shape: &AttentionShape) -> Result<()> {
    let rows = zigzag::rows(ends(), axes.sequence.rank(), axes.sequence.size());
    let [of_q, of_k] = [shape.heads, shape.kv_heads].map(|heads| heads * shape.head_dim);
    let tokens = ends()[ends().len() - 1];
    let drawn = |seed: usize, width: usize| -> Vec<f32> { numbers(seed).take(tokens * width).collect() };
    let wholes = [(31, of_q), (32, of_k), (33, of_k), (34, of_q)].map(|(seed, width)| (drawn(seed, width), width));
    let of_rows = |values: &[f32], width: usize| -> Vec<f32> {
        rows.iter().flat_map(|row| values[row * width..(row + 1) * width].to_vec()).collect()
    };
    let on_gpu =
        |values: &[f32], width: usize| Tensor::from_slice(values.len() / width, width, values).to(Device::Cuda);
    let [q, k, v, d_o] = wholes.each_ref().map(|(values, width)| on_gpu(values, *width));
    let (mut o, mut lse) = (q.as_wide(tokens), q.statistics(tokens, shape.heads));
    let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| x.as_wide(tokens));
    let (whole, cut) = (Packed::new(ends()), Packed::new(ends()));
    attention::forward_packed(&q, &k, &v, &whole, shape, &mut o, &mut lse);
    attention::backward_packed(&q, &k, &v, &o, &lse, &d_o, &whole, shape, &mut dq, &mut dk, &mut dv);
    let [q, k, v, d_o] = wholes.each_ref().map(|(values, width)| on_gpu(&of_rows(values, *width), *width));
    let (of_ring, its_lse) = ring.forward(&cut, shape, [&q, &k, &v]);
    let [its_dq, its_dk, its_dv] = ring.backward(&cut, shape, [&q, &k, &v], [&of_ring, &its_lse, &d_o]);
    for (name, got, want) in
        [("o", of_ring, o), ("lse", its_lse, lse), ("dq", its_dq, dq), ("dk", its_dk, dk), ("dv", its_dv, dv)]
    {
        let gap = apart(&got.to_host(), &of_rows(&want.to_host(), want.width()), 0.0);
        within(|| name.into(), gap, ROW_APART, "of the norm of its rows")?;
    }
    Ok(())
}
