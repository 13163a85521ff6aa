//! Rows of JSON: one per line, a list of rows, or rows that span several lines; plain or gzip.

use std::io::{self, BufRead, BufReader};
use std::path::Path;

use super::foreign;
use crate::error::{Error, Result, format_bytes};
use crate::sys::files;

/// The maximum size of a row, as text or decoded.
pub(super) const ROW_BYTES_MAX: usize = 64 << 20;
const BUFFER_BYTES: usize = 1 << 20;
const BOM: [u8; 3] = [0xef, 0xbb, 0xbf];

/// The layout of rows in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Lines,
    /// `[{...}, {...}]`
    List,
    /// Objects that span several lines.
    Objects,
}

/// The rows of a file or a pipe.
pub struct JsonRows {
    from: Box<dyn BufRead>,
    form: Form,
    is_compressed: bool,
    /// Whether the last line ended with CR, so that an LF that follows belongs to it.
    after_cr: bool,
    list: List,
}

/// The part of a list that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum List {
    None,
    Items,
    All,
}

impl JsonRows {
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |e: io::Error| Error::io("read", path, &e);
        let file = files::open_input(path).map_err(|e| foreign::missing(path, failed(e)))?;
        let mut from: Box<dyn BufRead> = Box::new(BufReader::with_capacity(BUFFER_BYTES, file));
        let is_compressed = from.fill_buf().map_err(failed)?.starts_with(&[0x1f, 0x8b]);
        if is_compressed {
            let decoder = flate2::bufread::MultiGzDecoder::new(from);
            from = Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder));
        }
        let head = from.fill_buf().map_err(failed)?;
        foreign::check_head(path, head)?;
        let mut form = Form::Lines;
        let bom = if head.starts_with(&BOM) { BOM.len() } else { 0 };
        let start = head[bom..].trim_ascii_start();
        let line = start.split(|byte| matches!(byte, b'\n' | b'\r')).next().unwrap_or_default();
        if start.starts_with(b"[") {
            form = Form::List;
        } else if start.starts_with(b"{") && line.len() < start.len() {
            let parsed = serde_json::from_slice::<serde::de::IgnoredAny>(line);
            if parsed.is_err_and(|e| e.is_eof()) && foreign::is_json(path) {
                form = Form::Objects;
            }
        }
        from.consume(bom);
        Ok(Self { form, is_compressed, ..Self::lines(from) })
    }

    /// Lines of a stream.
    pub fn lines(from: impl BufRead + 'static) -> Self {
        let (form, from) = (Form::Lines, Box::new(from));
        Self { from, form, is_compressed: false, after_cr: false, list: List::None }
    }

    /// Whether reading can start at any byte: rows are lines, and not compressed.
    pub fn is_seekable(&self) -> bool {
        self.form == Form::Lines && !self.is_compressed
    }

    /// Reads the next row into `row`, or the next line, which may be blank. False at the end.
    pub fn next(&mut self, row: &mut Vec<u8>) -> Result<bool> {
        row.clear();
        let read = match self.form {
            Form::Lines => read_line(&mut self.from, &mut self.after_cr, row),
            Form::List => self.next_item(row),
            Form::Objects => match skip_blank(&mut self.from) {
                Ok(Some(_)) => read_value(&mut self.from, row).map(|()| true),
                other => other.map(|_| false),
            },
        };
        read.map_err(|e| match e.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => Error::data(e.to_string()),
            _ => Error::new(crate::error::Kind::Io, e.to_string()),
        })
    }

    fn next_item(&mut self, row: &mut Vec<u8>) -> io::Result<bool> {
        let wrong = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidData, what.to_owned()));
        if self.list == List::All {
            return Ok(false);
        }
        let found = skip_blank(&mut self.from)?;
        let next = match (self.list, found) {
            (List::None, Some(b'[')) | (List::Items, Some(b',')) => {
                self.from.consume(1);
                skip_blank(&mut self.from)?
            }
            (List::Items, Some(b']')) => found,
            (_, None) => return wrong("the list of rows has no end: the file was truncated"),
            _ => return wrong("the rows of a list must be separated by commas"),
        };
        if next == Some(b']') {
            self.from.consume(1);
            self.list = List::All;
            return match skip_blank(&mut self.from)? {
                None => Ok(false),
                Some(_) => wrong("the list of rows must end the file: write one list, or one row per line"),
            };
        }
        self.list = List::Items;
        read_value(&mut self.from, row).map(|()| true)
    }
}

/// Reads up to the next line end (LF, CR or CRLF), without it. `after_cr` must be kept between the lines of a file.
pub(super) fn read_line(from: &mut impl BufRead, after_cr: &mut bool, line: &mut Vec<u8>) -> io::Result<bool> {
    let mut has_any = false;
    loop {
        let mut bytes = from.fill_buf()?;
        if std::mem::take(after_cr) && bytes.first() == Some(&b'\n') {
            from.consume(1);
            bytes = from.fill_buf()?;
        }
        if bytes.is_empty() {
            return Ok(has_any);
        }
        has_any = true;
        let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
        let taken = end.unwrap_or(bytes.len());
        line.extend_from_slice(&bytes[..taken]);
        let is_cr = end.is_some_and(|end| bytes[end] == b'\r');
        from.consume(taken + usize::from(end.is_some()));
        check_size(line)?;
        if end.is_some() {
            *after_cr = is_cr;
            return Ok(true);
        }
    }
}

fn check_size(row: &[u8]) -> io::Result<()> {
    if row.len() <= ROW_BYTES_MAX {
        return Ok(());
    }
    let most = format_bytes(ROW_BYTES_MAX as u64);
    Err(io::Error::new(io::ErrorKind::InvalidData, format!("a row must have at most {most} of text")))
}

/// Skips white space, and returns the byte after it.
fn skip_blank(from: &mut impl BufRead) -> io::Result<Option<u8>> {
    loop {
        let bytes = from.fill_buf()?;
        let blank = bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let next = bytes.get(blank).copied();
        let is_end = bytes.is_empty();
        from.consume(blank);
        if next.is_some() || is_end {
            return Ok(next);
        }
    }
}

/// Reads one JSON value: up to its last bracket, or to the end of a number or word.
fn read_value(from: &mut impl BufRead, value: &mut Vec<u8>) -> io::Result<()> {
    let (mut depth, mut in_text, mut is_escaped) = (0_usize, false, false);
    loop {
        let bytes = from.fill_buf()?;
        if bytes.is_empty() {
            let is_whole = depth == 0 && !in_text;
            let cut = || io::Error::new(io::ErrorKind::UnexpectedEof, "the row has no end: the file was truncated");
            return if is_whole { Ok(()) } else { Err(cut()) };
        }
        let mut end = None;
        for (i, &byte) in bytes.iter().enumerate() {
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' if in_text => is_escaped = true,
                b'"' => in_text = !in_text,
                _ if in_text => {}
                b'{' | b'[' => depth += 1,
                b'}' | b']' if depth > 0 => {
                    depth -= 1;
                    if depth == 0 {
                        end = Some(i + 1);
                    }
                }
                b',' | b']' | b'}' if depth == 0 => end = Some(i),
                _ => {}
            }
            if end.is_some() {
                break;
            }
        }
        let taken = end.unwrap_or(bytes.len());
        value.extend_from_slice(&bytes[..taken]);
        from.consume(taken);
        check_size(value)?;
        if end.is_some() {
            return Ok(());
        }
    }
}

/// A line with null instead of NaN, Infinity and -Infinity, which Python writes. `None` if it has none.
pub(super) fn without_nan(line: &[u8]) -> Option<Vec<u8>> {
    let (mut out, mut in_text, mut is_escaped, mut i) = (Vec::with_capacity(line.len()), false, false, 0);
    let mut has_any = false;
    while i < line.len() {
        if !in_text
            && let Some(word) =
                ["NaN", "-Infinity", "Infinity"].into_iter().find(|w| line[i..].starts_with(w.as_bytes()))
        {
            out.extend_from_slice(b"null");
            (has_any, i) = (true, i + word.len());
            continue;
        }
        match line[i] {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_text => is_escaped = true,
            b'"' => in_text = !in_text,
            _ => {}
        }
        out.push(line[i]);
        i += 1;
    }
    has_any.then_some(out)
}

/// Removes the byte order mark with which a file may begin.
pub(super) fn without_bom(line: &[u8]) -> &[u8] {
    line.strip_prefix(&BOM).unwrap_or(line)
}
