//! Key/value heads that several ranks of the tensor axis hold.

use super::block_spec::AttentionSpec;
use super::part::TensorPart;
use crate::comm::Group;
use crate::ops::columns;
use crate::tensor::Tensor;

/// The key/value heads that this rank holds. Some may be copies of another rank's.
#[derive(Clone, Debug)]
pub(super) struct KvCopies {
    /// The global head of each local head.
    held: Vec<usize>,
    heads: usize,
    head_dim: usize,
    /// The number of copies of each head over all ranks.
    copies: usize,
}

impl KvCopies {
    pub(super) fn new(spec: &AttentionSpec, part: TensorPart) -> Self {
        let keys = spec.keys();
        Self { held: keys.heads(part), heads: spec.kv_heads, head_dim: spec.head_dim, copies: keys.copies(part.size) }
    }

    /// Sums the gradients over all copies of a head, so that the weights of all copies get the same update. Each copy
    /// serves different query heads. The sum is in f32, this rank's copies first.
    pub(super) fn sum(&self, tensor: &Group, gradients: [&mut Tensor; 2]) {
        let rows = gradients[0].rows();
        if self.copies == 1 || rows == 0 {
            return;
        }
        let mut all = gradients[0].statistics(rows, 2 * self.heads * self.head_dim);
        let of = |(i, gradient)| {
            let gradient: &Tensor = gradient;
            self.places(i).map(move |(own, at)| (gradient, own, at))
        };
        let parts: Vec<_> = gradients.iter().map(|gradient| &**gradient).enumerate().flat_map(of).collect();
        columns::sum(&parts, &mut all, self.head_dim);
        tensor.sum_slice(all.slice_mut());
        for (i, gradient) in gradients.into_iter().enumerate() {
            self.places(i).for_each(|(own, at)| columns::copy(&all, at, gradient, own, self.head_dim));
        }
    }

    /// The first column of each local head: on this rank, and in gradient `i` among the columns of all heads.
    fn places(&self, i: usize) -> impl Iterator<Item = (usize, usize)> {
        let e = self.head_dim;
        self.held.iter().enumerate().map(move |(local, head)| (local * e, (i * self.heads + head) * e))
    }
}
