//! `jobs/reference.toml`, which the binary carries: the meaning of every key of a job.

use super::aliases;
use toml::Value as Toml;

const REFERENCE: &str = include_str!("../../jobs/reference.toml");

/// A key with its comment, or a table (an empty `key`).
pub struct Entry {
    pub table: String,
    pub key: String,
    /// The default as it is written; empty for a table.
    pub value: String,
    /// The lines of the comment.
    pub about: Vec<String>,
}

impl Entry {
    /// The full path, such as `ppo.kl_coef`.
    pub fn path(&self) -> String {
        match (&*self.table, &*self.key) {
            (table, "") => table.to_owned(),
            ("", key) => key.to_owned(),
            (table, key) => format!("{table}.{key}"),
        }
    }

    pub(super) fn default(&self) -> Option<Toml> {
        format!("v = {}", self.value).parse::<toml::Table>().ok()?.remove("v")
    }

    /// The comment as one line.
    pub(super) fn description(&self) -> String {
        self.about.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
    }
}

/// The entries of a text. Every value is on one line, below its comment. A comment right below the name of a table
/// describes the table.
fn entries(text: &str, within: &str) -> Vec<Entry> {
    let (mut table, mut about, mut all) = (within.to_owned(), Vec::new(), Vec::new());
    let mut is_new = false;
    for line in text.lines() {
        if let Some(words) = line.strip_prefix('#') {
            about.push(words.strip_prefix(' ').unwrap_or(words).to_owned());
        } else if let Some(name) = line.strip_prefix('[') {
            (table, is_new) = (name.trim_matches(['[', ']']).to_owned(), true);
            about.clear();
        } else {
            let about = std::mem::take(&mut about);
            let found = line.split_once(" = ").or(is_new.then_some(("", "")));
            if let Some((key, value)) = found {
                all.push(Entry { table: table.clone(), key: key.to_owned(), value: value.to_owned(), about });
            }
            is_new = false;
        }
    }
    all
}

/// The entries of a table that the reference shows as a commented example.
fn example(table: &str) -> Vec<Entry> {
    let inner = REFERENCE.lines().skip_while(|line| *line != format!("# [[{table}]]")).skip(1);
    entries(&inner.map_while(|line| line.strip_prefix("# ")).collect::<Vec<_>>().join("\n"), table)
}

/// The entry of `base`, a key outside of all tables, whose example is a comment.
fn base() -> Option<Entry> {
    let before: Vec<&str> = REFERENCE.lines().take_while(|line| !line.starts_with("# base = ")).collect();
    let begin = before.iter().rposition(|line| line.is_empty())? + 1;
    let about = before[begin..].iter().map(|line| line.trim_start_matches("# ").to_owned()).collect();
    Some(Entry { table: String::new(), key: "base".to_owned(), value: "\"\"".to_owned(), about })
}

/// All entries: `base`, then those of the tables, then those of the examples.
pub fn all() -> Vec<Entry> {
    let shown = REFERENCE.lines().filter_map(|line| line.strip_prefix("# [[")?.strip_suffix("]]"));
    base().into_iter().chain(entries(REFERENCE, "")).chain(shown.flat_map(example)).collect()
}

/// The entries that `name` may mean: a full path; else keys that end with it; else the key for an option of another
/// system.
pub fn find(name: &str) -> Vec<Entry> {
    let (ending, foreign) = (format!(".{name}"), aliases::ours(name));
    let readings: [&dyn Fn(&str) -> bool; 3] =
        [&|path| path == name, &|path| path.ends_with(&ending), &|path| foreign.contains(&path)];
    let found = readings.iter().map(|is_meant| all().into_iter().filter(|entry| is_meant(&entry.path())).collect());
    found.into_iter().find(|found: &Vec<Entry>| !found.is_empty()).unwrap_or_default()
}
