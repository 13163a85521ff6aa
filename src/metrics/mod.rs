//! The records and the display of a run: `metrics.jsonl`, TensorBoard events, `rollouts.h5`, evaluated held-out rows,
//! and the terminal.
//!
//! [`Recorder`] owns them all. Rank 0 writes. Other ranks have a silent one.

pub mod adapter_ratios;
mod curves;
mod display;
pub mod eval_rows;
mod eval_table;
pub mod jsonl;
pub mod keys;
mod line;
pub mod recorded;
mod recorder;
pub mod rollouts;
mod rows;
mod screen;
mod step_experience;
pub mod step_file;
pub mod step_query;
pub mod tensorboard;
mod terminal;
pub mod throughput;
pub mod trace;
pub mod traced;

pub use curves::{Curves, is_graded};
pub use display::{count, counted, duration, grouped, number, one_line, percent, wrapped};
pub use eval_table::{eval_lines, eval_table, name_of_rows};
pub use jsonl::Line;
pub use recorder::Recorder;
pub use screen::Screen;
pub use terminal::Terminal;
pub use throughput::{Phase, Phases};
