//! Losses as pure functions over slices of tokens.
//!
//! A loss that is local to a token is computed for any range of tokens at a time, while the caller owns their logits.
//! Per-token `weights` include the mask, the aggregation and the global denominator. So the sums over ranges,
//! micro-batches and ranks are the loss, and the derivatives need no later scaling.

pub mod aggregation;
pub mod correction;
pub mod distill;
pub mod labelled;
pub mod policy;
pub mod preference;
pub mod token;
pub mod value;
