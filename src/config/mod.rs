//! What a job says, as plain structs.

pub mod model;
