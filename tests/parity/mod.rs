//! The transformer against `transformers` and torch autograd on tiny random models of each family; what it promises
//! bitwise; and what loading and export accept, refuse and preserve. `tests/golden/models.py` makes the goldens.

mod beams;
mod exported;
mod families;
mod golden;
mod paged;
mod refused;
mod scaling;
