//! A projection: y = x W^T + b, for attention and the MLP, and its adapter: y += scale (x A^T) B^T (arXiv:2106.09685).
//!
//! W is sharded over the ranks of the tensor axis, by outputs or by inputs (arXiv:1909.08053, section 3). With sharded
//! outputs, each rank has outputs of its own and the gradient of x is a sum over ranks. With sharded inputs, y is a sum
//! over ranks. The adapter is sharded alike: B (out, rank) by outputs, A (rank, in) by inputs, and the other one is whole
//! on each rank.

use super::context::Context;
use super::file_rows::FileRows;
use super::params::{Init, ParamId, ParamTable};
use super::part::Cut;
use super::weights::{Gradients, Unit};
use crate::comm::Group;
use crate::ops::glu::{self, Activation};
use crate::ops::matmul::{self, Factor, Into, Output};
use crate::ops::scale;
use crate::tensor::{Layout, Tensor};

#[derive(Clone, Debug)]
pub(super) struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
    adapter: Option<Adapter>,
    /// Whether each rank of the tensor axis has all of W.
    is_whole: bool,
}

/// The adapter of a matrix of which each rank has all, or the part that its outputs or inputs decide.
#[derive(Clone, Debug)]
pub(super) struct Adapter {
    a: ParamId,
    b: ParamId,
    scale: f32,
}

impl Linear {
    /// Declares `name.weight` with `dims` = [outputs, inputs], with `bias` also `name.bias`, and its adapter if it has
    /// one. The bias is sharded with the outputs. If the inputs are sharded, it is added once, after the sum over ranks.
    pub(super) fn declare(table: &mut ParamTable, name: &str, dims: [Cut; 2], bias: bool) -> Self {
        Self::declare_in(table, None, name, dims, bias)
    }

    /// The same for a matrix whose rows are elsewhere in the files: `file.tensor` is the name of the module there, which
    /// has one adapter. Its parts share the A of the adapter.
    pub(super) fn declare_in(
        table: &mut ParamTable,
        file: Option<&FileRows>,
        name: &str,
        dims: [Cut; 2],
        bias: bool,
    ) -> Self {
        let module = file.map_or(name, |file| &file.tensor);
        let place =
            |part: &str| file.map(|file| FileRows { tensor: format!("{}.{part}", file.tensor), ..file.clone() });
        let [weight, bias_name] = ["weight", "bias"].map(|part| format!("{name}.{part}"));
        let weight = table.add_in(place("weight"), &weight, &dims, Layout::Panel, table.normal());
        table.mark_linear(weight);
        let bias = bias.then(|| table.add_in(place("bias"), &bias_name, &dims[..1], Layout::Row, Init::Zeros));
        let adapter = Adapter::declare(table, module, (name, place("lora_B.weight")), dims);
        let is_whole = matches!(dims, [Cut::Whole(_), Cut::Whole(_)]);
        Self { weight, bias, adapter, is_whole }
    }

    /// Declares matrices with biases, whole on each rank, whose rows follow each other in the tensors of the module
    /// `joined`: first all weights, then all biases.
    pub(super) fn declare_joined<const N: usize>(
        table: &mut ParamTable,
        joined: &str,
        names: [&str; N],
        [outputs, inputs]: [usize; 2],
    ) -> [Self; N] {
        let (dims, places) = ([outputs, inputs].map(Cut::Whole), std::array::from_fn::<usize, N, _>(|i| i));
        let place = |i: usize, part: &str| {
            let file = FileRows::own(&format!("{joined}.{part}"), N * outputs);
            Some(FileRows { first: i * outputs, ..file })
        };
        let weights = places.map(|i| {
            let (name, init) = (format!("{}.weight", names[i]), table.normal());
            let weight = table.add_in(place(i, "weight"), &name, &dims, Layout::Panel, init);
            table.mark_linear(weight);
            weight
        });
        let biases = places.map(|i| {
            let name = format!("{}.bias", names[i]);
            table.add_in(place(i, "bias"), &name, &dims[..1], Layout::Row, Init::Zeros)
        });
        places.map(|i| {
            let adapter = Adapter::declare(table, joined, (names[i], place(i, "lora_B.weight")), dims);
            Self { weight: weights[i], bias: Some(biases[i]), adapter, is_whole: true }
        })
    }

    /// Declares `name.weight` as a convolution over all of its input, with dims (outputs, inputs ...), whole on each rank.
    pub(super) fn declare_patches(table: &mut ParamTable, name: &str, dims: &[usize], bias: bool) -> Self {
        let dims: Vec<Cut> = dims.iter().copied().map(Cut::Whole).collect();
        let weight = table.add(&format!("{name}.weight"), &dims, Layout::Panel, table.normal());
        let bias = bias.then(|| table.add(&format!("{name}.bias"), &dims[..1], Layout::Row, Init::Zeros));
        Self { weight, bias, adapter: None, is_whole: true }
    }

    /// W and b for the product with x.
    fn factor<'a>(&self, w: &'a Unit, x: &Tensor) -> Factor<'a> {
        Factor { w: w.operand(self.weight, x.rows()), bias: self.bias.map(|bias| w.vector(bias)) }
    }

    /// y_i = x W_i^T + b_i, for projections with sharded outputs.
    pub(super) fn forward_each<const N: usize>(w: &Unit, x: &Tensor, linears: [&Self; N]) -> [Tensor; N] {
        let factors = linears.map(|linear| linear.factor(w, x));
        let mut results = factors.map(|factor| x.like(x.rows(), factor.w.dims().0));
        let mut each = results.iter_mut();
        let outputs = factors.map(|Factor { w, bias }| {
            let y = each.next().expect("as many results as projections");
            Output { w, bias, y }
        });
        matmul::forward_each(x, outputs);
        let adapters = linears.map(|linear| linear.adapter.as_ref());
        let inners = Adapter::inner_each(w, x, adapters);
        for ((y, adapter), inner) in results.iter_mut().zip(adapters).zip(&inners) {
            if let (Some(adapter), Some(inner)) = (adapter, inner) {
                adapter.add(w, inner, y);
            }
        }
        results
    }

    /// act(x Wgate^T + b) * (x Wup^T + b), for projections with sharded outputs.
    pub(super) fn glu(w: &Unit, x: &Tensor, linears: [&Self; 2], activation: Activation) -> Tensor {
        if linears.iter().any(|linear| linear.adapter.is_some()) {
            let [gate, up] = Self::forward_each(w, x, linears);
            let mut act = gate.like(gate.rows(), gate.width());
            glu::forward(activation, &gate, &up, &mut act);
            return act;
        }
        let factors = linears.map(|linear| linear.factor(w, x));
        let mut act = x.like(x.rows(), factors[0].w.dims().0);
        glu::of_products(activation, x, factors, &mut act);
        act
    }

    /// y += x W^T + b, for a projection with sharded inputs. The sum over ranks starts from the first rank's y and b.
    /// With `keeps`, the previous y is returned and the sum gets memory of its own.
    pub(super) fn forward_onto(&self, c: Context, x: &Tensor, y: &mut Tensor, keeps: bool) -> Option<Tensor> {
        let Factor { w, bias } = self.factor(c.w, x);
        let before = keeps.then(|| {
            let apart = y.like(y.rows(), y.width());
            std::mem::replace(y, apart)
        });
        match &before {
            _ if c.tensor.rank() > 0 => matmul::forward(x, w, None, y, Into::Overwrite),
            Some(before) => matmul::forward_onto(before, x, w, bias, y),
            None => matmul::forward(x, w, bias, y, Into::Add),
        }
        if let Some(adapter) = &self.adapter {
            let inner = adapter.inner_over(c.w, x, c.tensor);
            if c.tensor.rank() == 0 {
                adapter.add(c.w, &inner, y);
            }
        }
        c.tensor.sum_slice(y.slice_mut());
        before
    }

    /// The backward of a projection with sharded inputs: dx = dy W, dW += dy^T x, db += sum dy, and the adapter's.
    pub(super) fn backward_onto(&self, c: Context, x: &Tensor, dy: &Tensor, dx: &mut Tensor, grads: &mut Gradients) {
        matmul::backward_input(dy, c.w.weight(self.weight), dx, Into::Overwrite);
        self.backward_base(c.w, x, dy, grads);
        if let Some(adapter) = &self.adapter {
            let dinner = adapter.backward_outer(c.w, dy, dx);
            adapter.backward_weights(c.w, [x, dy], &adapter.inner_over(c.w, x, c.tensor), &dinner, grads);
        }
    }

    /// The backward of a projection with sharded outputs. dx is this rank's part of the sum.
    pub(super) fn backward(
        &self,
        c: Context,
        x: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        into: Into,
        grads: &mut Gradients,
    ) {
        let dinner = self.backward_input(c, dy, dx, into);
        self.backward_weight(c.w, x, dy, dinner, grads);
    }

    /// dx (+)= dy W, for a projection with sharded outputs: this rank's part of the sum. If each rank has all of W, it is the
    /// whole. Returns the gradient of the
    /// adapter's x A^T.
    pub(super) fn backward_input(&self, c: Context, dy: &Tensor, dx: &mut Tensor, into: Into) -> Option<Tensor> {
        matmul::backward_input(dy, c.w.weight(self.weight), dx, into);
        self.adapter.as_ref().map(|adapter| {
            let mut dinner = adapter.backward_outer(c.w, dy, dx);
            if !self.is_whole {
                c.tensor.sum_slice(dinner.slice_mut());
            }
            dinner
        })
    }

    /// dW += dy^T x, db += sum dy, and the adapter's, for a projection with sharded outputs.
    pub(super) fn backward_weight(
        &self,
        w: &Unit,
        x: &Tensor,
        dy: &Tensor,
        dinner: Option<Tensor>,
        grads: &mut Gradients,
    ) {
        self.backward_base(w, x, dy, grads);
        if let (Some(adapter), Some(dinner)) = (&self.adapter, dinner) {
            adapter.backward_weights(w, [x, dy], &adapter.inner(w, x), &dinner, grads);
        }
    }

    /// dW += dy^T x and db += sum dy, unless they are frozen.
    fn backward_base(&self, w: &Unit, x: &Tensor, dy: &Tensor, grads: &mut Gradients) {
        if !self.weight.is_frozen {
            matmul::backward_weight(dy, x, grads.weight_mut(self.weight), w.dtype());
        }
        if let Some(bias) = self.bias.filter(|bias| !bias.is_frozen) {
            matmul::backward_bias(dy, grads.vector_mut(bias));
        }
    }
}

/// scale x A^T, the inner result of an adapter.
pub(super) fn scaled_product(w: &Unit, x: &Tensor, a: ParamId, scale: f32) -> Tensor {
    let a = w.weight(a);
    let mut inner = x.like(x.rows(), a.n);
    matmul::forward(x, a, None, &mut inner, Into::Overwrite);
    scale::by(scale, &mut inner);
    inner
}

impl Adapter {
    /// Declares the adapter of `module` for the part `name` of it with `dims` = [outputs, inputs], if there is one. The
    /// rows of the part's B are at `place` in the files.
    pub(super) fn declare(
        table: &mut ParamTable,
        module: &str,
        (name, place): (&str, Option<FileRows>),
        [outputs, inputs]: [Cut; 2],
    ) -> Option<Self> {
        let (adapter, init) = table.adapter(module, inputs.size())?;
        let rank = Cut::Whole(adapter.rank);
        let a = format!("{module}.lora_A.weight");
        let a = table.find(&a).unwrap_or_else(|| table.add_own(None, &a, &[rank, inputs], Layout::Panel, init));
        let (b, dims) = (format!("{name}.lora_B.weight"), [outputs, rank]);
        let b = table.add_own(place, &b, &dims, Layout::Panel, Init::Zeros);
        Some(Self { a, b, scale: adapter.scale })
    }

    /// y += scale (x A^T) B^T, for a matrix that each rank has.
    pub(super) fn forward(&self, w: &Unit, x: &Tensor, y: &mut Tensor) {
        self.add(w, &self.inner(w, x), y);
    }

    /// dx += scale (dy B) A and the gradients of A and B, for a matrix that each rank has.
    pub(super) fn backward(&self, w: &Unit, [x, dy]: [&Tensor; 2], dx: &mut Tensor, grads: &mut Gradients) {
        let dinner = self.backward_outer(w, dy, dx);
        self.backward_weights(w, [x, dy], &self.inner(w, x), &dinner, grads);
    }

    /// scale x A^T (t, rank)
    fn inner(&self, w: &Unit, x: &Tensor) -> Tensor {
        scaled_product(w, x, self.a, self.scale)
    }

    /// The same for each adapter. If there are as many as matrices, they are one call to the threads: alone, a product with
    /// so few outputs uses one of them.
    fn inner_each<const N: usize>(w: &Unit, x: &Tensor, adapters: [Option<&Self>; N]) -> [Option<Tensor>; N] {
        if N == 1 || adapters.iter().any(Option::is_none) {
            return adapters.map(|adapter| adapter.map(|adapter| adapter.inner(w, x)));
        }
        let each = adapters.map(|adapter| adapter.expect("every matrix has one"));
        let mut inners = each.map(|adapter| x.like(x.rows(), w.weight(adapter.a).n));
        let mut all = inners.iter_mut();
        matmul::forward_each(
            x,
            each.map(|adapter| {
                let y = all.next().expect("as many results as adapters");
                Output { w: w.weight(adapter.a).into(), bias: None, y }
            }),
        );
        for (inner, adapter) in inners.iter_mut().zip(each) {
            scale::by(adapter.scale, inner);
        }
        inners.map(Some)
    }

    /// The same for sharded inputs: a sum over ranks.
    fn inner_over(&self, w: &Unit, x: &Tensor, tensor: &Group) -> Tensor {
        let mut inner = self.inner(w, x);
        tensor.sum_slice(inner.slice_mut());
        inner
    }

    /// y += inner B^T
    fn add(&self, w: &Unit, inner: &Tensor, y: &mut Tensor) {
        matmul::forward(inner, w.weight(self.b), None, y, Into::Add);
    }

    /// dinner = scale dy B, dx += dinner A
    fn backward_outer(&self, w: &Unit, dy: &Tensor, dx: &mut Tensor) -> Tensor {
        let b = w.weight(self.b);
        let mut dinner = dy.like(dy.rows(), b.k);
        matmul::backward_input(dy, b, &mut dinner, Into::Overwrite);
        scale::by(self.scale, &mut dinner);
        matmul::backward_input(&dinner, w.weight(self.a), dx, Into::Add);
        dinner
    }

    /// dA += dinner^T x, dB += dy^T inner
    fn backward_weights(
        &self,
        w: &Unit,
        [x, dy]: [&Tensor; 2],
        inner: &Tensor,
        dinner: &Tensor,
        grads: &mut Gradients,
    ) {
        matmul::backward_weight(dy, inner, grads.weight_mut(self.b), w.dtype());
        matmul::backward_weight(dinner, x, grads.weight_mut(self.a), w.dtype());
    }
}
