//! A projection with one matrix for each head, of which rows of either side can be multiplied: y = x W_h^T and x = y W_h,
//! each with its adapter (`Linear`). Rows are sorted by head.

use super::context::Context;
use super::file_rows::FileRows;
use super::linear::scaled_product;
use super::params::{Init, ParamId, ParamTable};
use super::part::Cut;
use super::weights::{Gradients, Unit};
use crate::ops::experts::Groups;
use crate::ops::matmul::{self, Into};
use crate::ops::{residual, scale};
use crate::tensor::{Layout, Tensor, Weight};

#[derive(Clone, Debug)]
pub(super) struct HeadLinear {
    /// The matrix of each head of this rank (n, k).
    weights: Vec<ParamId>,
    adapter: Option<HeadAdapter>,
}

/// W_h += scale B_h A: A (rank, k) is that of all heads.
#[derive(Clone, Debug)]
struct HeadAdapter {
    a: ParamId,
    b: Vec<ParamId>,
    scale: f32,
}

impl HeadLinear {
    /// Declares the matrices of all `heads` for several projections of `inputs` columns. In the files they are one matrix
    /// `name.weight`: the rows of each head are those of the first projection, then those of the next. `parts` has the
    /// name and the number of rows of each.
    pub(super) fn declare_joined<const N: usize>(
        table: &mut ParamTable,
        name: &str,
        (heads, inputs): (usize, usize),
        parts: [(&str, usize); N],
    ) -> [Self; N] {
        let own = Cut::Heads { queries: heads, group: 1, head_dim: 1 }.heads(table.tensor_part());
        let each: usize = parts.iter().map(|(_, rows)| rows).sum();
        let add = |table: &mut ParamTable, what: &str, columns: usize, is_adapter: bool| {
            let mut all = [(); N].map(|()| Vec::new());
            for head in 0..heads {
                let mut first = head * each;
                for (ids, (part, size)) in all.iter_mut().zip(parts) {
                    let file = FileRows { first, ..FileRows::own(&format!("{name}.{what}"), heads * each) };
                    let (dims, own_name) = (
                        [Cut::OfHead { heads, head, size }, Cut::Whole(columns)],
                        format!("{name}.{head}.{part}.{what}"),
                    );
                    let id = if is_adapter {
                        table.add_own(Some(file), &own_name, &dims, Layout::Panel, Init::Zeros)
                    } else {
                        let id = table.add_in(Some(file), &own_name, &dims, Layout::Panel, table.normal());
                        table.mark_linear(id);
                        id
                    };
                    first += size;
                    if own.contains(&head) {
                        ids.push(id);
                    }
                }
            }
            all
        };
        let weights = add(table, "weight", inputs, false);
        let adapter = table.adapter(name, inputs).map(|(adapter, init)| {
            let dims = [Cut::Whole(adapter.rank), Cut::Whole(inputs)];
            let a = table.add_own(None, &format!("{name}.lora_A.weight"), &dims, Layout::Panel, init);
            (a, adapter.scale, add(table, "lora_B.weight", adapter.rank, true))
        });
        let mut adapters = match adapter {
            None => [(); N].map(|()| None),
            Some((a, scale, b)) => b.map(|b| Some(HeadAdapter { a, b, scale })),
        }
        .into_iter();
        weights.map(|weights| Self { weights, adapter: adapters.next().expect("one for each projection") })
    }

    /// y (s, n) = x W_h^T, for x (s, k).
    pub(super) fn forward(&self, w: &Unit, groups: &Groups, x: &Tensor) -> Tensor {
        let [mut y] = groups.forward_each(x, [&of(w, &self.weights)]);
        if let Some(adapter) = &self.adapter {
            let [more] = groups.forward_each(&adapter.inner(w, x), [&of(w, &adapter.b)]);
            residual::add(1.0, &more, &mut y);
        }
        y
    }

    /// x (s, k) = y W_h, for y (s, n).
    pub(super) fn transposed(&self, w: &Unit, groups: &Groups, y: &Tensor) -> Tensor {
        let weights = of(w, &self.weights);
        let mut x = y.like(y.rows(), weights[0].k);
        groups.backward_input(y, &weights, &mut x, false);
        if let Some(adapter) = &self.adapter {
            matmul::backward_input(&adapter.outer(w, groups, y), w.weight(adapter.a), &mut x, Into::Add);
        }
        x
    }

    /// dW_h += dy^T x, and the gradients of the adapter, for x (s, k) and dy (s, n). For `transposed`, dy is its y and x the
    /// gradient of its result.
    pub(super) fn backward_weights(&self, c: Context, groups: &Groups, x: &Tensor, dy: &Tensor, grads: &mut Gradients) {
        if self.weights.iter().all(|id| !id.is_frozen) {
            groups.backward_weight(dy, x, grads.weights_mut(&self.weights), c.w.dtype());
        }
        if let Some(adapter) = &self.adapter {
            groups.backward_weight(dy, &adapter.inner(c.w, x), grads.weights_mut(&adapter.b), c.w.dtype());
            let dinner = adapter.outer(c.w, groups, dy);
            matmul::backward_weight(&dinner, x, grads.weight_mut(adapter.a), c.w.dtype());
        }
    }
}

impl HeadAdapter {
    /// scale x A^T (s, rank)
    fn inner(&self, w: &Unit, x: &Tensor) -> Tensor {
        scaled_product(w, x, self.a, self.scale)
    }

    /// scale y B_h (s, rank)
    fn outer(&self, w: &Unit, groups: &Groups, y: &Tensor) -> Tensor {
        let b = of(w, &self.b);
        let mut outer = y.like(y.rows(), b[0].k);
        groups.backward_input(y, &b, &mut outer, false);
        scale::by(self.scale, &mut outer);
        outer
    }
}

fn of<'a>(w: &'a Unit, ids: &[ParamId]) -> Vec<Weight<'a>> {
    ids.iter().map(|id| w.weight(*id)).collect()
}
