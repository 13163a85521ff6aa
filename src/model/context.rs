//! The inputs that all layers of one forward share, or of its backward.

use super::ring::Ring;
use super::routers::Routers;
use super::weights::{Unit, Weights};
use crate::comm::Group;
use crate::ops::attention::{KvLayer, Packed, Paged};
use crate::ops::delta::StateLayer;
use crate::ops::rope::RopeTable;
use crate::tensor::Indices;
use std::sync::Arc;

/// The source of one layer's keys, or of its states.
pub(super) enum LayerKeys<'a> {
    Packed(&'a Packed<'a>),
    Paged(&'a mut KvLayer, &'a Paged<'a>),
    State(&'a mut StateLayer, &'a Paged<'a>),
}

#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    /// The parameters of the layer, without its experts.
    pub w: &'a Unit<'a>,
    /// Those of all layers.
    pub weights: &'a Weights,
    pub positions: &'a Indices<'a>,
    /// The rotary tables of the model.
    pub ropes: &'a [Arc<RopeTable>],
    /// The ranks that hold the other parts of each matrix.
    pub tensor: &'a Group,
    /// The ranks that hold the other experts of each layer.
    pub expert: &'a Group,
    /// The ranks that hold the other tokens of each sequence.
    pub ring: &'a Ring,
    pub routers: &'a Routers,
}
