//! The standard error stream as a screen: lines, and below them rows that are redrawn.
//!
//! This is our own code because under `mpirun` a rank's standard error is a pipe, even if `mpirun` runs in a terminal.
//! Whether to show live rows, and how wide, is decided here instead of by querying the stream.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex};

use console::Term;
use indicatif::TermLike;

use crate::sys::lock::lock;
use crate::sys::terminal::of_launcher;

/// Columns if the terminal does not report them.
const COLUMNS: usize = 100;
/// The minimum number of columns. A narrower window is treated as if it had this many.
const COLUMNS_MIN: usize = 20;

/// Whether color may be used: on a terminal that is not dumb, without `NO_COLOR` (<https://no-color.org>).
pub(super) fn colour_allowed(is_terminal: bool) -> bool {
    let set = |name: &str| std::env::var_os(name).unwrap_or_default();
    is_terminal && set("NO_COLOR").is_empty() && set("TERM") != "dumb"
}

/// The terminal that shows this process's standard error, for its width.
fn terminal() -> Option<Term> {
    if io::stderr().is_terminal() {
        return Some(Term::stderr());
    }
    let file = of_launcher(2)?;
    Some(Term::read_write_pair(file.try_clone().ok()?, file))
}

/// A shared handle. Bars update it from threads of their own. Write errors are not errors of the run: a terminal that
/// disappears must not end the training.
#[derive(Clone)]
pub struct Screen {
    state: Arc<Mutex<State>>,
    /// Queried at each use, because windows change.
    terminal: Option<Term>,
    /// Columns if no terminal reports them.
    columns: usize,
}

struct State {
    out: Box<dyn Write + Send>,
    /// Output up to the next flush, so that a frame is written at once.
    frame: Vec<u8>,
}

impl Screen {
    pub fn stderr() -> Self {
        Self { terminal: terminal(), ..Self::new(Box::new(io::stderr()), COLUMNS) }
    }

    /// Any stream, with its number of columns.
    pub fn new(out: Box<dyn Write + Send>, columns: usize) -> Self {
        Self { state: Arc::new(Mutex::new(State { out, frame: Vec::new() })), terminal: None, columns }
    }

    /// The current number of columns of a line.
    pub fn columns(&self) -> usize {
        match self.terminal.as_ref().and_then(Term::size_checked) {
            Some((_, columns)) if columns > 0 => usize::from(columns).max(COLUMNS_MIN),
            _ => self.columns,
        }
    }

    pub fn write(&self, text: &str) {
        let mut state = lock(&self.state);
        let _ = state.out.write_all(text.as_bytes()).and_then(|()| state.out.flush());
    }

    fn frame(&self, text: &str) {
        lock(&self.state).frame.extend_from_slice(text.as_bytes());
    }

    fn cursor(&self, n: usize, direction: char) {
        if n > 0 {
            self.frame(&format!("\x1b[{n}{direction}"));
        }
    }
}

impl fmt::Debug for Screen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Screen").field("columns", &self.columns()).finish_non_exhaustive()
    }
}

impl TermLike for Screen {
    fn width(&self) -> u16 {
        self.columns() as u16
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.cursor(n, 'A');
        Ok(())
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.cursor(n, 'B');
        Ok(())
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.cursor(n, 'C');
        Ok(())
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.cursor(n, 'D');
        Ok(())
    }

    fn write_line(&self, s: &str) -> io::Result<()> {
        self.frame(s);
        self.frame("\n");
        Ok(())
    }

    fn write_str(&self, s: &str) -> io::Result<()> {
        self.frame(s);
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.frame("\r\x1b[2K");
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        let frame = std::mem::take(&mut state.frame);
        let _ = state.out.write_all(&frame).and_then(|()| state.out.flush());
        Ok(())
    }
}
