//! What graphs of decoding need from call to call.

use crate::comm::Calls;
use crate::device::cuda::decode::DecodeState;
use crate::device::cuda::graph::Graphs;
use crate::device::cuda::{Arg, Memory};
use crate::model::Arch;

/// What an engine keeps for its graphs.
#[derive(Debug)]
pub(super) struct Decoder {
    /// What graphs read beside the tables: they serve while it is the same.
    pub model: (Arch, Vec<Arg>),
    /// They go before what they read and write.
    pub graphs: Graphs<Shape>,
    pub tables: DecodeState,
    /// The collectives of each.
    pub calls: Vec<(Shape, Calls)>,
    /// Where the parts of the vocabulary end, i32.
    pub ends: Memory,
    pub changes: Vec<u32>,
}

/// What one graph differs from another by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Rows, those that fill up included.
    pub rows: usize,
    /// Attention is split, for contexts of up to as many tokens.
    pub longest: Option<usize>,
    /// A row may have stop tokens that are banned yet.
    pub bans: bool,
    /// A row's tokens are penalised when it has seen them.
    pub sees: bool,
}
