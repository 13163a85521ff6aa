//! Questions about a recorded step, and the child process that answers them.

use std::io::Write;
use std::path::Path;

use super::step_file::StepFile;
use crate::comm::records;
use crate::error::Result;
use crate::sys::reexec;
use serde::{Deserialize, Serialize};

/// A question about a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Query {
    Scores,
    Samples,
    /// The arrays of the samples with these indices.
    Tokens(Vec<usize>),
    Experience,
    ConfigHash,
}

/// The verb of the child process, which `--help` does not list: `VERB FILE STEP QUERY`.
pub const VERB: &str = "read-recorded-step";

/// Seconds of processor time for any file, and the bytes that one more second reads. HDF5 reads much faster.
const CPU_S: u64 = 5;
const BYTES_PER_S: u64 = 20 << 20;
/// Memory for any file, and how many times its size is needed in addition: its arrays, their texts, and the answer.
const BYTES: u64 = 1 << 30;
const SIZES: u64 = 8;

/// The child process: prints the answer to the query of the command line.
pub fn serve(arguments: &[String]) {
    let [path, step, query] = arguments else { return };
    let size = std::fs::metadata(path).map_or(0, |file| file.len());
    reexec::limit(CPU_S + size / BYTES_PER_S, BYTES + SIZES * size);
    let (Ok(step), Ok(query)) = (step.parse(), serde_json::from_str(query)) else { return };
    let file = StepFile::open(Path::new(path), step);
    let answer = match query {
        Query::Scores => records::encode(&file.and_then(|file| file.scores())),
        Query::Samples => records::encode(&file.and_then(|file| file.samples())),
        Query::Tokens(samples) => {
            let tokens = |file: StepFile| samples.iter().map(|i| file.tokens(*i)).collect::<Result<Vec<_>>>();
            records::encode(&file.and_then(tokens))
        }
        Query::Experience => records::encode(&file.and_then(|file| file.experience())),
        Query::ConfigHash => records::encode(&file.and_then(|file| file.config_hash())),
    };
    let mut out = std::io::stdout();
    // The parent misses an answer that it cannot decode.
    let _ = out.write_all(&answer).and_then(|()| out.flush());
}
