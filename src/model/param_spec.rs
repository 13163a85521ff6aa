//! One parameter of a model: its name, shape, sharding, memory layout and initialization.

use super::file_rows::FileRows;
use super::names::{ROUTER, SHARED_GATE};
use super::part::Cut;
use super::targets::Fused;
use super::tuning::{Adapter, Tuning, adapter_names};
use crate::tensor::{Layout, PANEL};
use std::ops::Range;
use std::sync::Arc;

/// The initial values of a new parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    /// Normal with mean 0.
    Normal {
        std: f32,
    },
    /// Uniform in +-bound.
    Uniform {
        bound: f32,
    },
    /// The logarithm of a number that is uniform from `low` to `high`.
    LogUniform {
        low: f32,
        high: f32,
    },
}

/// A parameter of a model: its index in the model's own table or, if it is frozen, in the table of the base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId {
    pub index: usize,
    pub is_frozen: bool,
}

impl ParamId {
    /// Number `index` of the own table.
    pub fn own(index: usize) -> Self {
        Self { index, is_frozen: false }
    }
}

/// One parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// The Hugging Face name.
    pub name: String,
    /// (outputs, inputs ...) of a matrix, (elements) of a vector: this rank's part.
    pub shape: Vec<usize>,
    /// How the ranks of the tensor axis share each dim of the whole parameter.
    pub cuts: Vec<Cut>,
    /// The rows (for a vector: elements) of the whole that this rank holds, in its order.
    pub rows: Vec<Range<usize>>,
    /// The columns of the whole that this rank holds; 0..1 for a vector.
    pub columns: Range<usize>,
    /// The number of copies of each element over all tensor ranks. Sums over all ranks count an element this often.
    pub copies: usize,
    pub layout: Layout,
    pub init: Init,
    /// Whether it is the matrix of a linear layer, which may have an adapter. Routers and experts are not: they are no
    /// modules of their own in transformers.
    pub is_linear: bool,
    /// What a router or the matrix of an expert is in transformers, which may have an adapter, too.
    pub fused: Option<Arc<Fused>>,
    /// The place in the files of a model; `None`: a tensor of its name, in the same order.
    pub file: Option<FileRows>,
    /// First element in the flat buffer, a multiple of `FLAT_ALIGN`.
    pub offset: usize,
    /// Elements in the flat buffer, padding included.
    pub len: usize,
}

impl ParamSpec {
    /// (rows, columns). All dims but the first are columns; a vector is one row.
    pub fn dims(&self) -> (usize, usize) {
        match &self.shape[..] {
            [k] => (1, *k),
            [n, inner @ ..] => (*n, inner.iter().product()),
            [] => (1, 1),
        }
    }

    /// The shape of the whole parameter, as in the files of a model.
    pub(super) fn full(&self) -> Vec<usize> {
        self.cuts.iter().map(|cut| cut.size()).collect()
    }

    /// (rows, columns) of the whole parameter. The elements of a vector are rows of one column.
    pub(super) fn full_dims(&self) -> (usize, usize) {
        match self.cuts[..] {
            [] => (1, 1),
            [n] => (n.size(), 1),
            [n, ref inner @ ..] => (n.size(), inner.iter().map(|cut| cut.size()).product()),
        }
    }

    /// The place in the files of a model.
    pub fn file_rows(&self) -> FileRows {
        self.file.clone().unwrap_or_else(|| FileRows::own(&self.name, self.full_dims().0))
    }

    /// The name of its tensor in the files of a model.
    pub fn file_name(&self) -> &str {
        self.file.as_ref().map_or(&self.name, |file| &file.tensor)
    }

    /// The values of a row of its tensor.
    pub fn file_width(&self) -> usize {
        self.full_dims().1
    }

    /// The shape of its tensor in the files.
    pub(super) fn file_shape(&self) -> Vec<usize> {
        let mut shape = self.full();
        if let Some(file) = &self.file {
            shape[0] = file.of;
            if let Some(columns) = file.columns {
                shape[1] = columns.of;
            }
            if let Some(matrices) = file.matrices {
                shape.splice(0..1, [matrices, file.of / matrices]);
            }
            if file.is_transposed {
                shape.swap(1, 2);
            }
        }
        shape
    }

    /// The adapter of a matrix, and the names of its A and B. Parts of one tensor share A.
    pub(super) fn adapter(&self, tuning: &Tuning) -> Option<(Adapter, [String; 2])> {
        let own = self.name.strip_suffix(".weight")?;
        let [module, of_a, of_b] = match &self.fused {
            None => {
                let module = self.file_name().strip_suffix(".weight")?;
                [module.to_owned(), module.to_owned(), own.to_owned()]
            }
            Some(fused) if fused.experts.is_none() => [(); 3].map(|()| fused.module.clone()),
            Some(fused) => [fused.module.clone(), fused.of_expert(own), own.to_owned()],
        };
        let adapter = tuning.adapters.get(&module)?;
        let ([a, _], [_, b]) = (adapter_names(&of_a), adapter_names(&of_b));
        Some((*adapter, [a, b]))
    }

    /// Elements without padding.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it is the matrix of a projection, which may be quantized: routers, gates of rows and the taps of convolutions are not.
    pub fn is_projection(&self) -> bool {
        self.shape.len() == 2 && ![ROUTER, SHARED_GATE].iter().any(|end| self.name.ends_with(end))
    }

    /// Whether weight decay applies: to matrices, not to norms and biases.
    pub fn decays(&self) -> bool {
        self.shape.len() >= 2
    }

    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }

    /// The flat range of some held rows, rounded to whole panels.
    pub(super) fn flat_rows(&self, rows: &Range<usize>) -> Range<usize> {
        let (k, Range { start, end }) = (self.columns.len(), rows.clone());
        let place = match self.layout {
            Layout::Row => start * k..end * k,
            Layout::Panel => {
                let row = k.next_multiple_of(2);
                start / PANEL * PANEL * row..end.next_multiple_of(PANEL) * row
            }
        };
        self.offset + place.start..self.offset + place.end
    }

    /// The held runs of rows of the whole parameter, each with the index of its first row among the held rows.
    pub(super) fn held_rows(&self) -> impl Iterator<Item = (usize, &Range<usize>)> {
        self.rows.iter().scan(0, |end, rows| {
            let start = *end;
            *end += rows.len();
            Some((start, rows))
        })
    }
}

/// The parameters of each tensor in the files of a model: some are parts of one.
pub(super) fn tensors(specs: &[ParamSpec]) -> impl Iterator<Item = &[ParamSpec]> {
    specs.chunk_by(|a, b| a.file_name() == b.file_name())
}
