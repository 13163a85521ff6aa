//! What the operating system offers: files in memory, processes, signals.

pub mod process;
