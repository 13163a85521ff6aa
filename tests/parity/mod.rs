//! The transformer against `transformers` and torch autograd on tiny random models of each family, its bitwise
//! properties, and the loading and export of models. `tests/golden/models.py` makes the goldens.

mod adapters;
mod beams;
mod experts;
mod exported;
mod families;
mod fp8;
pub mod golden;
mod longrope;
mod mxfp4;
mod paged;
mod quantized;
mod refused;
mod scaling;
mod vision;
