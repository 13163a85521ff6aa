//! Tests that start the program, and plans, which are held against what the arena of a process counted.

mod cli;
mod plan;
mod process;
mod resume;
#[path = "reward/server.rs"]
mod server;
