//! Shape checks of all kinds of attention.

pub use crate::device::cpu::attention::{AttentionShape, PAGE, PagedSequence, Span};
use crate::tensor::Tensor;

pub(super) fn check(name: &str, x: &Tensor, rows: usize, width: usize) {
    super::check("attention", name, x, rows, width);
}

pub(super) fn check_heads(shape: &AttentionShape) {
    assert!(
        shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads),
        "attention: {} heads do not divide over {} key/value heads",
        shape.heads,
        shape.kv_heads
    );
    assert!(shape.window != Some(0), "attention: a window of 0 keys sees nothing");
}
