//! Tests of the plan: its arithmetic against numbers computed by hand, its memory against the arena's count, its
//! chosen layouts and errors, and the table of the reference workload.

mod arena;
mod arithmetic;
mod counted;
mod images;
mod layouts;
mod lengths;
mod models;
mod stages;
mod table;
