//! Memory and time of a job before it runs: the memory of each rank in each phase by tensor, the seconds of each phase,
//! and the best layout. It needs the configuration, config.json and the lengths of the data's rows, but no weights.
//!
//! - `rows` determines the lengths of rows: from the data, from the command line, or the longest.
//! - `null` counts the memory and work of a rank by running the job itself on a null device.
//! - `time` converts this work into seconds: the floor at the peaks of the device, and the prediction at the reached
//!   shares of the peaks.
//! - `devices` has the declared peaks of GPUs; `probe` measures the peaks of this CPU.
//! - `microbatch` chooses the tokens of a micro-batch, if the job leaves them open.
//! - `choose` compares layouts, and `resolve` returns the layouts of a run.

mod candidate;
pub mod choose;
pub mod devices;
mod job;
pub mod memory;
pub mod microbatch;
mod null;
mod probe;
mod refuse;
mod resolve;
mod rows;
pub mod show;
pub mod synthetic;
pub mod time;

pub use choose::{Choice, choose};
pub use devices::Device;
pub use job::Job;
pub use memory::{Memory, Phase};
pub use null::count;
pub use probe::{Sharing, probe};
pub use resolve::{do_without_ranks, layouts};
pub use rows::{Origin, Rows};
pub use time::Part;
