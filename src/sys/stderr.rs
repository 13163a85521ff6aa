//! Messages on standard error; a closed or full one must not change how a program ends.

use std::io::Write;

/// Writes a line at once, or as much of it as is taken.
pub fn line(text: &str) {
    let mut stderr = std::io::stderr().lock();
    let _ = stderr.write_all(format!("{text}\n").as_bytes()).and_then(|()| stderr.flush());
}
