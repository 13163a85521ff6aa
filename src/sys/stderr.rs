//! Messages on standard error. A closed or full standard error must not change how the program ends.

use std::io::Write;

/// Writes a line at once, or as much of it as possible.
pub fn line(text: &str) {
    let mut stderr = std::io::stderr().lock();
    let _ = stderr.write_all(format!("{text}\n").as_bytes()).and_then(|()| stderr.flush());
}
