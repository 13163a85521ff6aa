//! Standard output of all verbs, and their messages on standard error.
//!
//! A reader that closes standard output (`rlhf-hpc info | head -1`) has read enough: the program ends silently with
//! exit code 0.

use crate::comm;
use crate::error::{Error, Result};
use crate::sys::{environment, terminal};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::Path;

/// Writes whole lines at once. On a terminal, control characters in them are made visible.
///
/// # Errors
/// `Io` if standard output cannot be written. Under a launcher also if it is closed, because then the launcher ended.
pub fn write(lines: &[u8]) -> Result<()> {
    if terminal::shows_stdout() {
        return write_raw(terminal::visible(&String::from_utf8_lossy(lines)).as_bytes());
    }
    write_raw(lines)
}

/// Writes lines of our own, which may hold the escape sequences of a style. Otherwise like `write`.
pub fn write_raw(lines: &[u8]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(lines).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe && environment::launched_ranks().is_none() => {
            comm::shutdown();
            std::process::exit(0);
        }
        written => written.map_err(|error| Error::io("write", "standard output", &error)),
    }
}

/// A progress bar for `total` rows, if known, on standard error. There is none if standard error is not a terminal, or
/// if the rows themselves go to a terminal.
pub fn progress(verb: &'static str, total: Option<usize>) -> ProgressBar {
    if std::io::stdout().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(match total {
        Some(_) => "{prefix}: {bar:28} {pos}/{len}  {elapsed}, {eta} left",
        None => "{prefix}: {pos}  {elapsed}",
    });
    ProgressBar::with_draw_target(total.map(|total| total as u64), ProgressDrawTarget::stderr())
        .with_style(style.expect("the template parses").progress_chars("━╸─"))
        .with_prefix(verb)
        .with_finish(ProgressFinish::AndClear)
}

/// Rejects an output that exists, unless it may be replaced with --force.
pub fn check_new<'a>(files: impl IntoIterator<Item = &'a Path>, force: bool) -> Result<()> {
    let is_there = |path: &&Path| match path.read_dir() {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) => path.symlink_metadata().is_ok(),
    };
    match files.into_iter().find(is_there).filter(|_| !force) {
        Some(path) => Err(Error::usage(format!("{} exists already", path.display()))
            .hint("name another output with --out, or pass --force to replace it")),
        None => Ok(()),
    }
}

/// Writes a line of a verb's output. If that fails, the program ends with the error of `write`.
pub fn say_line(line: &str) {
    write(format!("{line}\n").as_bytes()).unwrap_or_else(|error| std::panic::panic_any(error));
}

/// `println!` to [`say_line`].
macro_rules! say {
    ($($args:tt)*) => {
        $crate::cli::out::say_line(&format!($($args)*))
    };
}
pub(super) use say;

/// `eprintln!` that does not end the verb if standard error is closed or full.
macro_rules! note {
    ($($args:tt)*) => {
        $crate::sys::stderr::line(&format!($($args)*))
    };
}
pub(super) use note;
