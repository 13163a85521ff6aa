//! Texts on a terminal: pages of Markdown wrapped to its width, with tables and code set off, through the user's pager.

use crate::cli::out;
use crate::error::Result;
use crate::metrics::wrapped;
use console::Term;
use std::env;
use std::io::{IsTerminal, Write};
use std::process::{Command, Stdio};
use termimad::crossterm::style::{Attribute, Color};
use termimad::{Alignment, MadSkin};

/// The maximum width of a page. Wider lines are hard to read.
const COLUMNS_MAX: usize = 100;
const COLUMNS_MIN: usize = 40;

/// Prints a page of Markdown: as it is if standard output is not a terminal.
///
/// # Errors
/// `Io` if standard output cannot be written.
pub fn page(markdown: &str) -> Result<()> {
    if !std::io::stdout().is_terminal() {
        return out::write(format!("{}\n", markdown.trim_end()).as_bytes());
    }
    let (rows, columns) = Term::stdout().size();
    let set = |name: &str| env::var_os(name).unwrap_or_default();
    let skin = if set("NO_COLOR").is_empty() && set("TERM") != "dumb" { colored() } else { MadSkin::no_style() };
    let text = rendered(markdown, columns.into(), &skin);
    if text.lines().count() < rows.into() || !through_pager(&text) {
        return out::write_raw(text.as_bytes());
    }
    Ok(())
}

/// Columns of a plain text that does not go to a terminal.
const COLUMNS: usize = 80;

/// Wraps the lines of a plain text that are too long; a continuation starts below the text of its line.
pub fn plain(text: &str) -> String {
    fitted(text, if std::io::stdout().is_terminal() { Term::stdout().size().1.into() } else { COLUMNS })
}

fn fitted(text: &str, columns: usize) -> String {
    let columns = columns.clamp(COLUMNS_MIN, COLUMNS_MAX);
    let mut out = Vec::new();
    for line in text.lines() {
        let body = line.trim_start();
        // An option's description is a second column, two or more spaces after its name.
        let gap = body.find("  ").map_or(0, |at| at + body[at..].len() - body[at..].trim_start().len());
        let indent = line.len() - body.len() + if line.starts_with("  ") { gap } else { 0 };
        if line.chars().count() <= columns || columns < indent + 20 {
            out.push(line.to_owned());
            continue;
        }
        let (lead, rest) = line.split_at(indent);
        let parts = wrapped(rest, columns - indent);
        out.extend(parts.iter().enumerate().map(|(i, part)| match i {
            0 => format!("{lead}{part}"),
            _ => format!("{:indent$}{part}", ""),
        }));
    }
    out.join("\n")
}

fn colored() -> MadSkin {
    let mut skin = MadSkin::default();
    skin.set_headers_fg(Color::Cyan);
    skin.headers[0].align = Alignment::Left;
    skin.headers[0].compound_style.remove_attr(Attribute::Underlined);
    for style in [&mut skin.inline_code, &mut skin.code_block.compound_style] {
        style.object_style.background_color = None;
        style.set_fg(Color::Green);
    }
    skin
}

fn rendered(markdown: &str, columns: usize, skin: &MadSkin) -> String {
    let columns = columns.clamp(COLUMNS_MIN, COLUMNS_MAX);
    skin.text(&joined(markdown), Some(columns)).to_string()
}

/// Markdown with each paragraph and each list item on one line, as the renderer wraps line by line.
fn joined(markdown: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    let (mut is_fenced, mut is_open) = (false, false);
    for line in markdown.lines() {
        let is_fence = line.starts_with("```");
        let body = line.trim_start();
        let is_item = body.starts_with("- ") || body.trim_start_matches(|c: char| c.is_ascii_digit()).starts_with(". ");
        let is_whole = is_fence || is_fenced || line.trim().is_empty() || line.starts_with(['|', '#']);
        if is_open && !is_whole && !is_item {
            let last = lines.last_mut().expect("an open line");
            last.push(' ');
            last.push_str(line.trim_start());
        } else {
            lines.push(line.to_owned());
            // Code is indented by four spaces, after an empty line.
            is_open = !is_whole && !line.starts_with("    ");
        }
        is_fenced ^= is_fence;
    }
    lines.join("\n") + "\n"
}

/// Whether the text went through `$PAGER`, or `less` by default.
fn through_pager(text: &str) -> bool {
    let pager = env::var("PAGER").ok().filter(|pager| !pager.is_empty()).unwrap_or_else(|| "less".to_owned());
    let mut command = Command::new("sh");
    command.args(["-c", &pager]).stdin(Stdio::piped());
    if env::var_os("LESS").is_none() {
        // Colors as they are; no pager for a text that fits; the text stays on the screen afterwards.
        command.env("LESS", "FRX");
    }
    let Ok(mut child) = command.spawn() else { return false };
    // A reader that quits early closes the pipe.
    let _ = child.stdin.take().expect("a pipe").write_all(text.as_bytes());
    // 127: there is no such pager.
    child.wait().is_ok_and(|status| status.code() != Some(127))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::help::PAGES;

    #[test]
    fn a_page_fits_80_columns_and_breaks_no_name() {
        for (topic, page) in PAGES {
            let text = rendered(page, 80, &MadSkin::no_style());
            for line in text.lines() {
                assert!(line.chars().count() <= 80, "{topic}: {line}");
            }
            let rows = page.lines().filter(|line| line.starts_with("| `"));
            for name in rows.flat_map(|row| row.split('`').skip(1).step_by(2)) {
                for word in name.split_whitespace() {
                    assert!(text.contains(word), "{topic} breaks {name}:\n{text}");
                }
            }
        }
    }

    #[test]
    fn a_paragraph_becomes_one_line_and_code_keeps_its_lines() {
        let page = "# T\n\nOne\ntwo.\n\n- a\n  b\n- c\n\n    x\n    y\n\n```toml\nk = 1\nl = 2\n```\n| a | b |\n";
        let joined = joined(page);
        assert_eq!(joined, "# T\n\nOne two.\n\n- a b\n- c\n\n    x\n    y\n\n```toml\nk = 1\nl = 2\n```\n| a | b |\n");
    }

    #[test]
    fn help_wraps_at_words_and_continues_below_the_text() {
        let text = "Usage: a [--model <model>] [--other <other>]\n  --option          words about an option";
        let fitted = fitted(text, 40);
        let expected = "Usage: a [--model <model>] [--other\n<other>]\n  --option          words about an\n                    option";
        assert_eq!(fitted, expected);
    }
}
