//! Memory and time of a job before it runs: what each rank holds in each phase, tensor by tensor, how long each phase
//! takes, and the layout that is best. Everything follows from the config, from config.json and from how long the rows of the
//! job's data are; no weights are needed.
//!
//! - `rows` says how long rows are: as the data says, as the command line says, or the longest.
//! - `null` counts memory and work of a rank: it runs the job itself on a null device.
//! - `time` turns what that would have computed and moved into seconds: the floor at the peaks of the device, and the prediction
//!   at the shares of the peaks that are reached.
//! - `devices` has the peaks: declared for GPUs; `probe` measures those of this CPU.
//! - `microbatch` finds how many tokens a micro-batch may have, where the job leaves that open.
//! - `choose` compares layouts, and `resolve` gives those of a run.

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
pub use resolve::layouts;
pub use rows::{Origin, Rows};
pub use time::Part;
