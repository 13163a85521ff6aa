//! Rust source as these checks see it: code without comments, strings and character literals.

use std::fs;
use std::path::{Path, PathBuf};

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// A file of the tree, by its path from the root.
pub struct File {
    pub name: String,
    pub text: String,
}

impl File {
    pub fn lines(&self) -> Vec<&str> {
        self.text.lines().collect()
    }
}

/// The files below `dir` with one of these endings, in order.
pub fn files(dir: &str, endings: &[&str]) -> Vec<File> {
    let mut out = Vec::new();
    walk(&root().join(dir), &mut |path| {
        let name = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
        if endings.iter().any(|e| name.ends_with(e)) {
            out.push(File { text: fs::read_to_string(path).unwrap_or_else(|e| panic!("{name}: {e}")), name });
        }
    });
    out.sort_by(|a, b| a.name.cmp(&b.name));
    out
}

/// Every file below `dir`, but for what is built or made by runs.
pub fn walk(dir: &Path, visit: &mut dyn FnMut(&Path)) {
    let skipped = ["target", ".git", "work", "runs", "__pycache__"];
    for path in fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let is_record = path.parent() == Some(&root().join("bench"));
        if path.is_dir() && (is_record || !skipped.contains(&name.as_str())) {
            walk(&path, visit);
        } else if path.is_file() && name != ".git" {
            visit(&path);
        }
    }
}

/// The text with comments, strings and character literals blanked out; lines stay lines and bytes stay in place.
pub fn code(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut i = 0;
    while i < bytes.len() {
        let end = i + literal(&bytes[i..], i > 0 && is_word(bytes[i - 1])).max(1);
        if end > i + 1 {
            out[i..end].iter_mut().filter(|b| **b != b'\n').for_each(|b| *b = b' ');
        }
        i = end;
    }
    String::from_utf8(out).expect("blanks are text")
}

fn is_word(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_'
}

/// Length of the comment, string or character literal that begins here; 0: none does.
fn literal(s: &[u8], in_word: bool) -> usize {
    let until = |from: usize, end: &[u8]| {
        s[from..].windows(end.len()).position(|w| w == end).map_or(s.len(), |at| from + at + end.len())
    };
    if s.starts_with(b"//") {
        return s.iter().position(|b| *b == b'\n').unwrap_or(s.len());
    }
    if s.starts_with(b"/*") {
        return until(2, b"*/");
    }
    if !in_word && (s.starts_with(b"r\"") || s.starts_with(b"r#") || s.starts_with(b"br\"") || s.starts_with(b"br#")) {
        let start = 1 + usize::from(s[0] == b'b');
        let hashes = s[start..].iter().take_while(|b| **b == b'#').count();
        if s.get(start + hashes) == Some(&b'"') {
            return until(start + hashes + 1, &[&b"\""[..], &vec![b'#'; hashes]].concat());
        }
    }
    if s[0] == b'"' {
        return quoted(s, b'"');
    }
    // A character, not a lifetime: closed within a few bytes.
    let is_character = s[0] == b'\'' && s.len() > 2 && (s[1] == b'\\' || s[2..s.len().min(6)].contains(&b'\''));
    if is_character && (s[1] == b'\\' || s[2] == b'\'' || !s[1].is_ascii()) { quoted(s, b'\'') } else { 0 }
}

fn quoted(s: &[u8], quote: u8) -> usize {
    let mut i = 1;
    while i < s.len() && s[i] != quote {
        i += 1 + usize::from(s[i] == b'\\');
    }
    (i + 1).min(s.len())
}

/// The functions of a formatted file: first line (from 1), number of lines, and the line itself.
pub fn functions(file: &File) -> Vec<(usize, usize, String)> {
    let code = code(&file.text);
    let lines: Vec<&str> = code.lines().collect();
    let mut found = Vec::new();
    for (i, line) in lines.iter().enumerate().filter(|(_, line)| begins_function(line)) {
        let indent = line.len() - line.trim_start().len();
        let ends = |l: &str| l.len() - l.trim_start().len() == indent && l.trim_end().ends_with(['}', ';']);
        let length = lines[i..].iter().position(|l| ends(l)).map_or(0, |at| at + 1);
        found.push((i + 1, length, file.lines()[i].trim().to_owned()));
    }
    found
}

fn begins_function(line: &str) -> bool {
    let modifiers = ["pub", "pub(crate)", "pub(super)", "const", "unsafe", "async", "extern"];
    let mut words = line.split_whitespace().skip_while(|word| modifiers.contains(word));
    words.next() == Some("fn")
}
