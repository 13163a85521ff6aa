//! Checkpoints that are complete or absent.
//!
//! ```text
//! checkpoints/step-50/manifest.json     the contents: bytes and xxh3 of each file, mesh, config hash, state
//! checkpoints/step-50/*.bin             each rank's files
//! checkpoints/latest                    a link to the newest
//! checkpoints/best                      a link to the one of the best evaluation
//! checkpoints/.step-60.partial          being written
//! ```
//!
//! A checkpoint is valid from the rename of its directory, after everything in it has reached the disk. Until then, and
//! if the process dies, all earlier checkpoints stay untouched.

pub mod manifest;
pub mod parts;
pub mod payload;
pub mod resume;
pub mod save;
pub mod vector;

pub use manifest::Manifest;
pub use parts::{ModelVectors, shard};
pub use payload::Payload;
pub use resume::{Checkpoint, all, find, lacks_files, newest, newest_of, peek, resume};
pub use save::{Keep, best_of, repair, save};
pub use vector::SavedVector;
