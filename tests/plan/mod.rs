//! Tests of the plan: its arithmetic against numbers worked out by hand, its memory against the arena's own count, its
//! choices and refusals, and the table of the reference workload.

mod arena;
mod arithmetic;
mod counted;
mod layouts;
mod lengths;
mod models;
mod stages;
mod table;
