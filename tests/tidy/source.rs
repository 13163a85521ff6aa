//! Rust source as these checks see it: code without comments, strings and character literals.

use regex::{Captures, Regex};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

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

/// Every file below `dir`, except for build outputs and files of runs.
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

/// Comments, strings with and without escapes, and characters; a lifetime is none.
static LITERAL: LazyLock<Regex> = LazyLock::new(|| {
    let pattern = r#"(?sx) //[^\n]* | /\*.*?\*/ | \bb?r"[^"]*" | \bb?r\x23".*?"\x23 | \bb?r\x23\x23".*?"\x23\x23
        | "(?:\\.|[^"\\])*" | '(?:\\.[^']*|[^'\\])'"#;
    Regex::new(pattern).expect("a pattern")
});

/// The text with comments, strings and character literals blanked out; lines stay lines and bytes stay in place.
pub fn code(text: &str) -> String {
    let blank = |found: &Captures| found[0].bytes().map(|b| if b == b'\n' { '\n' } else { ' ' }).collect::<String>();
    LITERAL.replace_all(text, blank).into_owned()
}

/// The string literals, with their first lines (from 1) and without line breaks.
pub fn literals(text: &str) -> Vec<(usize, String)> {
    let spaces = Regex::new(r"\\\n\s*|\s+").expect("a pattern");
    let strings = LITERAL.find_iter(text).filter(|found| !found.as_str().starts_with(['/', '\'']));
    let of = |found: regex::Match| {
        let joined =
            spaces.replace_all(found.as_str(), |gap: &Captures| if gap[0].starts_with('\\') { "" } else { " " });
        (text[..found.start()].matches('\n').count() + 1, joined.into_owned())
    };
    strings.map(of).collect()
}

/// The functions of a formatted file: first line (from 1), number of lines, and the line itself.
pub fn functions(file: &File) -> Vec<(usize, usize, String)> {
    let code = code(&file.text);
    let (lines, written): (Vec<&str>, _) = (code.lines().collect(), file.lines());
    let mut found = Vec::new();
    for (i, line) in lines.iter().enumerate().filter(|(_, line)| begins_function(line)) {
        let indent = line.len() - line.trim_start().len();
        let ends = |l: &str| l.len() - l.trim_start().len() == indent && l.trim_end().ends_with(['}', ';']);
        let length = lines[i..].iter().position(|l| ends(l)).map_or(0, |at| at + 1);
        found.push((i + 1, length, written[i].trim().to_owned()));
    }
    found
}

fn begins_function(line: &str) -> bool {
    let modifiers = ["pub", "pub(crate)", "pub(super)", "const", "unsafe", "async", "extern"];
    let mut words = line.split_whitespace().skip_while(|word| modifiers.contains(word));
    words.next() == Some("fn")
}
