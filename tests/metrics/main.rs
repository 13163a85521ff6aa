//! Facts about the records of a run.
mod records;
