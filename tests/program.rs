//! Tests that start the program, and tests of plans, which are compared with the arena's count of a whole process.

mod cli;
mod plan;
mod process;
mod resume;
#[path = "reward/server.rs"]
mod server;
