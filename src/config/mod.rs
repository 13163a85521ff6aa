//! The schema of a job, a file per table.

pub mod checkpoint;
pub mod mesh;
pub mod model;
pub mod optim;
