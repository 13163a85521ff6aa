//! Tests of the program from the outside: the binary, its exit codes and its messages.

mod adapters;
pub mod command;
mod completion;
mod compose;
pub mod corpus;
mod data;
mod directories;
mod families;
pub mod fixture;
mod foreign;
mod generate;
mod gsm8k;
mod hub;
mod jobs;
mod keys;
mod migrate;
mod models;
mod offline;
mod process;
mod ranks;
mod report;
mod results;
mod summary;
mod templates;
mod terminal;
mod verbs;
mod verify;
