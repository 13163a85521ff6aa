//! Text that a terminal shows. Foreign text (answers of a model, rows, names of files) may hold control characters,
//! which a terminal obeys: they move the cursor, rename the window or hide text. They are shown as text instead.

use std::borrow::Cow;
use std::fmt::Write;
use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::OnceLock;

/// Text in which control characters are shown as text (`\x1b`), and so are marks that change the direction of other
/// characters (`\u{202e}`). Line breaks and tabs stay.
pub fn visible(text: &str) -> Cow<'_, str> {
    if text.chars().all(|c| c == '\n' || !is_obeyed(c)) {
        return Cow::Borrowed(text);
    }
    let mut stream = Visible::default();
    let shown = stream.push(text);
    Cow::Owned(shown + stream.finish())
}

/// [`visible`] for text that arrives in pieces.
#[derive(Debug, Default)]
pub struct Visible {
    /// Whether the last piece ended with a carriage return, which is a part of a line break if a line feed follows.
    has_return: bool,
}

impl Visible {
    /// The next piece as visible text.
    pub fn push(&mut self, piece: &str) -> String {
        let mut shown = String::with_capacity(piece.len());
        for c in piece.chars() {
            if std::mem::replace(&mut self.has_return, c == '\r') && c != '\n' {
                shown.push_str(RETURN);
            }
            match c {
                '\r' => {}
                c if !is_obeyed(c) => shown.push(c),
                c if u32::from(c) < 0x100 => drop(write!(shown, "\\x{:02x}", u32::from(c))),
                c => drop(write!(shown, "{}", c.escape_unicode())),
            }
        }
        shown
    }

    /// The rest at the end of the text.
    pub fn finish(&mut self) -> &'static str {
        if std::mem::take(&mut self.has_return) { RETURN } else { "" }
    }
}

const RETURN: &str = "\\x0d";

/// Whether a terminal obeys the character instead of showing it.
fn is_obeyed(c: char) -> bool {
    let is_direction =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (c.is_control() && !['\n', '\t'].contains(&c)) || is_direction
}

/// Whether this process's standard output is shown on a terminal: its own, or the terminal of the launcher. A rank's
/// own does not count, because Open MPI gives each rank a pseudo-terminal, even if its output goes to a file.
pub fn shows_stdout() -> bool {
    static SHOWS: OnceLock<bool> = OnceLock::new();
    *SHOWS.get_or_init(|| if is_launched() { of_launcher(1).is_some() } else { io::stdout().is_terminal() })
}

fn is_launched() -> bool {
    ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].into_iter().any(|name| std::env::var_os(name).is_some())
}

/// Whether this process's standard error is shown on a terminal: its own, or the terminal of the launcher (`mpirun`, on
/// this host) that forwards it.
pub fn shows_stderr() -> bool {
    io::stderr().is_terminal() || of_launcher(2).is_some()
}

/// The terminal that the launcher of this rank has as its standard output (1) or standard error (2).
pub fn of_launcher(stream: u8) -> Option<File> {
    if !is_launched() {
        return None;
    }
    let parent = std::os::unix::process::parent_id();
    // The link is read first, because opening a pipe of another process would block.
    let target = fs::read_link(format!("/proc/{parent}/fd/{stream}")).ok()?;
    let is_device = target.starts_with("/dev/pts") || target.to_string_lossy().starts_with("/dev/tty");
    // Without O_NOCTTY the terminal could become this process's controlling terminal.
    let open = || OpenOptions::new().read(true).custom_flags(libc::O_NOCTTY).open(target);
    let file = if is_device { open().ok()? } else { return None };
    file.is_terminal().then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_made_visible_and_all_other_text_is_unchanged() {
        for (text, shown) in [
            ("plain, äöü 日本 👩\u{200d}🔬 \\x1b", "plain, äöü 日本 👩\u{200d}🔬 \\x1b"),
            ("a\tb\nc\r\nd", "a\tb\nc\nd"),
            ("\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
            ("right\rwrong\r", "right\\x0dwrong\\x0d"),
            ("\r\r\n", "\\x0d\n"),
            ("\u{9b}2J\u{80}\u{9f}\x7f\0\x08", "\\x9b2J\\x80\\x9f\\x7f\\x00\\x08"),
            ("\u{202e}txt.exe\u{2069}", "\\u{202e}txt.exe\\u{2069}"),
        ] {
            assert_eq!(visible(text), shown, "{text:?}");
            let (mut stream, mut pieces) = (Visible::default(), String::new());
            for c in text.chars() {
                pieces += &stream.push(c.encode_utf8(&mut [0; 4]));
            }
            pieces += stream.finish();
            assert_eq!(pieces, shown, "{text:?} in pieces");
            assert_eq!(visible(shown), shown);
        }
    }
}
