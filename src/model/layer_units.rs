//! The units of a table's layers, by which stages are cut.

use super::arch::{Arch, Head};
use super::cost::layer_elements;
use std::ops::Range;

/// The layers of a table for its stages: their units and what a token costs there.
#[derive(Clone, Debug, Default)]
pub(super) struct LayerUnits {
    /// The units of each layer, and its multiply-adds for a token.
    pub layers: Vec<(Range<usize>, usize)>,
    /// The multiply-adds of the head for a token.
    pub head: usize,
    pub is_tied: bool,
}

impl LayerUnits {
    /// `starts` are the first units of the layers, then that of the final norm.
    pub fn new(arch: &Arch, head: Head, starts: &[usize]) -> Self {
        let cost = |block| layer_elements(arch, block, 1);
        let layers = starts.windows(2).map(|ends| ends[0]..ends[1]).zip(arch.blocks.iter().map(cost)).collect();
        let is_model = head == Head::LanguageModel;
        let head = if is_model { arch.width * arch.vocabulary } else { arch.width };
        Self { layers, head, is_tied: arch.tied && is_model }
    }
}
