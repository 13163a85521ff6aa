//! Images of rows: from the files that rows name to the patches that a vision tower reads.

mod decode;
pub mod locate;
mod processor;
mod resize;

pub use processor::Processor;
