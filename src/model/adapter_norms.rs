//! The sizes of adapters relative to their matrices: ||s B A||_F / ||W||_F.
//!
//! ||B A||_F^2 = tr((B^T B)(A A^T)), so no product is larger than rank x rank. A tensor rank holds the same part of
//! B A as of W, and the squares of the parts add up. Parts that several ranks hold count as often in both norms.

use super::arch::Arch;
use super::params::{ParamId, ParamSpec};
use super::weights::{Weights, pack};
use crate::comm::Axes;
use crate::ops::norm;
use rayon::prelude::*;

/// The adapters of a model, with the norms of their frozen matrices.
pub struct AdapterNorms {
    adapters: Vec<Measured>,
}

struct Measured {
    matrix: String,
    /// The unit of its parameters.
    unit: usize,
    /// A and B, or those of each matrix of all experts.
    parts: Vec<[ParamId; 2]>,
    is_of_experts: bool,
    scale: f64,
    /// ||W||_F, times a constant that the norm of B A has, too.
    norm: f64,
}

/// Sums squares over the ranks of the expert axis, which have different experts.
fn sum_over_experts(adapters: &[Measured], squares: &mut [f64], axes: &Axes) {
    let of_experts = || adapters.iter().enumerate().filter(|(_, adapter)| adapter.is_of_experts).map(|(i, _)| i);
    let mut sums: Vec<f64> = of_experts().map(|i| squares[i]).collect();
    axes.expert.all_reduce_sum_f64(&mut sums);
    of_experts().zip(sums).for_each(|(i, sum)| squares[i] = sum);
}

impl AdapterNorms {
    /// Measures the matrices of all adapters in f64, as the model multiplies by them: rounded to its dtype, and for a
    /// base in nf4 dequantized. A matrix of zeros is left out. All ranks of `axes` call this.
    pub fn new(arch: &Arch, weights: &Weights, axes: &Axes) -> Self {
        let Some((tuning, base)) = arch.tuning.as_deref().zip(weights.base.as_deref()) else {
            return Self { adapters: Vec::new() };
        };
        let find = |name: &str| weights.table.find(name).expect("the table has what trains");
        let (mut adapters, mut squares): (Vec<Measured>, Vec<f64>) = (Vec::new(), Vec::new());
        for spec in base.table.specs() {
            let Some((adapter, [a, b])) = spec.adapter(tuning) else { continue };
            let is_of_experts = spec.fused.as_ref().is_some_and(|fused| fused.experts.is_some());
            let (matrix, parts) =
                (spec.fused.as_ref().map_or(spec.name.clone(), |of| of.parameter()), [find(&a), find(&b)]);
            let square = square_here(base, spec);
            if let Some(last) = adapters.last_mut().filter(|last| is_of_experts && last.matrix == matrix) {
                last.parts.push(parts);
                *squares.last_mut().expect("it was added") += square;
                continue;
            }
            let (unit, scale) = (weights.table.unit_of(parts[1]), f64::from(adapter.scale));
            adapters.push(Measured { matrix, unit, parts: vec![parts], is_of_experts, scale, norm: 0.0 });
            squares.push(square);
        }
        base.release();
        // Matrices in nf4 are gathered whole, or all of a rank's experts.
        if base.gathers_on_use() && !base.is_quantized() {
            axes.zero.all_reduce_sum_f64(&mut squares);
        } else {
            sum_over_experts(&adapters, &mut squares, axes);
        }
        axes.pipeline.all_reduce_sum_f64(&mut squares);
        axes.tensor.all_reduce_sum_f64(&mut squares);
        adapters.iter_mut().zip(squares).for_each(|(adapter, square)| adapter.norm = square.sqrt());
        adapters.retain(|adapter| adapter.norm > 0.0);
        adapters.sort_by_key(|adapter| adapter.parts[0][0]);
        Self { adapters }
    }

    pub fn is_empty(&self) -> bool {
        self.adapters.is_empty()
    }

    /// ||s B A||_F / ||W||_F of each matrix, by its name, in the order of the model. Sharded weights are gathered one
    /// layer at a time. Changes no values. All ranks of `axes` call this.
    pub fn ratios(&self, weights: &Weights, axes: &Axes) -> Vec<(String, f64)> {
        let (table, mut squares) = (&*weights.table, Vec::with_capacity(self.adapters.len()));
        for of_unit in self.adapters.chunk_by(|one, next| one.unit == next.unit) {
            let held = weights.own_unit(of_unit[0].unit);
            // A rank has the layers of its stage, and the experts that it computes.
            let here = held.values().range();
            if here.is_empty() {
                squares.extend(of_unit.iter().map(|_| 0.0));
                continue;
            }
            let is_here = |id: &ParamId| here.contains(&table.spec(*id).offset);
            let ids = || of_unit.iter().flat_map(|adapter| adapter.parts.iter().flatten()).filter(|id| is_here(id));
            let start = ids().map(|id| table.spec(*id).range().start).min().unwrap_or(here.start);
            let end = ids().map(|id| table.spec(*id).range().end).max().unwrap_or(here.start);
            let mut flat = vec![0.0; end - start];
            held.values().to_master(&(start..end), &mut flat);
            let values = |id| {
                let spec = table.spec(id);
                (pack::unpack(spec, &flat[spec.offset - start..][..spec.len]), spec.dims())
            };
            let square = |[a, b]: &[ParamId; 2]| {
                let (a, (rank, width)) = values(*a);
                square_of_product(&a, &values(*b).0, [rank, width])
            };
            let of_adapter =
                |adapter: &Measured| -> f64 { adapter.parts.iter().filter(|[a, _]| is_here(a)).map(square).sum() };
            squares.par_extend(of_unit.par_iter().map(of_adapter));
        }
        weights.release();
        sum_over_experts(&self.adapters, &mut squares, axes);
        axes.pipeline.all_reduce_sum_f64(&mut squares);
        axes.tensor.all_reduce_sum_f64(&mut squares);
        let ratio = |(adapter, square): (&Measured, f64)| {
            (adapter.matrix.clone(), adapter.scale.abs() * square.sqrt() / adapter.norm)
        };
        self.adapters.iter().zip(squares).map(ratio).collect()
    }
}

/// The sum of squares of the part of a matrix of the base that is here.
fn square_here(base: &Weights, spec: &ParamSpec) -> f64 {
    let id = base.table.find(&spec.name).expect("it is the base's");
    let held = base.here(base.table.unit_of(id));
    let (range, here) = (spec.range(), held.values().range());
    let part = range.start.max(here.start)..range.end.min(here.end);
    if part.start < part.end { norm::sum_of_squares(held.values().part(&part)) } else { 0.0 }
}

/// ||B A||_F^2 in f64, for row-major A (rank, width) and B (n, rank).
fn square_of_product(a: &[f32], b: &[f32], [rank, width]: [usize; 2]) -> f64 {
    let a: Vec<f64> = a.iter().map(|x| f64::from(*x)).collect();
    // B^T B, whose rows below the diagonal repeat those above.
    let mut inner_b = vec![0.0; rank * rank];
    let mut row = vec![0.0; rank];
    for of_row in b.chunks_exact(rank) {
        row.iter_mut().zip(of_row).for_each(|(wide, x)| *wide = f64::from(*x));
        for (i, x) in row.iter().enumerate() {
            inner_b[i * rank + i..(i + 1) * rank].iter_mut().zip(&row[i..]).for_each(|(sum, y)| *sum += x * y);
        }
    }
    let row_of_a = |i: usize| &a[i * width..(i + 1) * width];
    let mut trace = 0.0;
    for i in 0..rank {
        trace += inner_b[i * rank + i] * dot(row_of_a(i), row_of_a(i));
        for j in i + 1..rank {
            trace += 2.0 * inner_b[i * rank + j] * dot(row_of_a(i), row_of_a(j));
        }
    }
    trace.max(0.0)
}

/// A sum in lanes, which the compiler can keep in vectors.
fn dot(x: &[f64], y: &[f64]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0; LANES];
    let (x_rest, y_rest) = (x.chunks_exact(LANES).remainder(), y.chunks_exact(LANES).remainder());
    for (x, y) in x.chunks_exact(LANES).zip(y.chunks_exact(LANES)) {
        lanes.iter_mut().zip(x.iter().zip(y)).for_each(|(sum, (x, y))| *sum += x * y);
    }
    lanes.iter().sum::<f64>() + x_rest.iter().zip(y_rest).map(|(x, y)| x * y).sum::<f64>()
}
