//! Plain English: texts contain no phrase of `banned.txt`, and no page claims a figure that no recorded run has.

use super::none;
use super::source::{File, files, literals, root};
use regex::{Regex, RegexBuilder};
use std::fs;

/// A paragraph, a table row, a comment, a string of several words or the name of a test, with its first line (from 1).
type Block = (usize, String);

/// Markdown without blocks of code: paragraphs, list items and table rows.
fn markdown(text: &str) -> Vec<Block> {
    let (mut blocks, mut is_open, mut is_fenced): (Vec<Block>, _, _) = (Vec::new(), false, false);
    for (number, line) in text.lines().enumerate() {
        let is_fence = line.starts_with("```");
        is_fenced ^= is_fence;
        let is_code = is_fence || is_fenced || line.starts_with("    ");
        if is_code || line.trim().is_empty() {
            is_open = false;
            continue;
        }
        let starts = line.starts_with(['|', '#']) || line.trim_start().starts_with("- ");
        match blocks.last_mut().filter(|_| is_open && !starts) {
            Some((_, block)) => *block = format!("{block} {}", line.trim()),
            None => blocks.push((number + 1, line.trim().to_owned())),
        }
        is_open = !line.starts_with(['|', '#']);
    }
    blocks
}

/// Comments after `marker`. Those of consecutive lines are one text.
fn comments(text: &str, marker: &str) -> Vec<Block> {
    let mut blocks: Vec<(usize, usize, String)> = Vec::new();
    for (number, line) in text.replace("//!", "//").lines().enumerate() {
        let Some((_, words)) = line.split_once(marker) else { continue };
        match blocks.last_mut().filter(|(_, last, _)| last + 1 == number) {
            Some((_, last, block)) => (*last, *block) = (number, format!("{block} {}", words.trim())),
            None => blocks.push((number + 1, number, words.trim().to_owned())),
        }
    }
    blocks.into_iter().map(|(line, _, block)| (line, block)).collect()
}

/// The names of tests, as words.
fn tests(text: &str) -> Vec<Block> {
    let names = Regex::new(r"#\[test\]\s+(?:#\[.*\]\s+)*fn (\w+)").unwrap();
    let line_of = |at: usize| text[..at].matches('\n').count() + 1;
    names
        .captures_iter(text)
        .map(|found| (line_of(found.get(1).unwrap().start()), found[1].replace('_', " ")))
        .collect()
}

/// The prose of a file, without inline code.
fn prose(file: &File) -> Vec<Block> {
    let blocks = match file.name.rsplit('.').next() {
        Some("md") => markdown(&file.text),
        Some("toml" | "py" | "sh") => comments(&file.text, "# "),
        Some("rs") => {
            let texts = literals(&file.text).into_iter().filter(|(_, text)| text.contains(' '));
            [comments(&file.text, "// "), texts.collect(), tests(&file.text)].concat()
        }
        _ => comments(&file.text, "// "),
    };
    let inline = Regex::new("`[^`]*`").unwrap();
    blocks.into_iter().map(|(line, block)| (line, inline.replace_all(&block, "``").into_owned())).collect()
}

fn texts() -> Vec<File> {
    let read = |name: &str| File { name: name.to_owned(), text: fs::read_to_string(root().join(name)).unwrap() };
    let mut all = vec![read("README.md"), read("CHANGELOG.md")];
    let endings = [".md", ".rs", ".cu", ".cuh", ".cpp", ".h", ".py", ".sh", ".toml"];
    all.extend(["src", "cuda", "jobs", "tests", "bench"].iter().flat_map(|dir| files(dir, &endings)));
    all
}

#[test]
fn texts_contain_no_banned_phrase() {
    let list = fs::read_to_string(root().join("tests/tidy/banned.txt")).unwrap();
    let rules: Vec<(Regex, &str)> = list
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .map(|line| line.split_once('\t').unwrap_or_else(|| panic!("{line}: no tab")))
        .map(|(pattern, instead)| (RegexBuilder::new(pattern).case_insensitive(true).build().unwrap(), instead))
        .collect();
    let mut faults = Vec::new();
    for file in texts() {
        for (line, block) in prose(&file) {
            let hits = rules.iter().filter_map(|(rule, instead)| Some((rule.find(&block)?.as_str(), instead)));
            faults.extend(hits.map(|(hit, instead)| format!("{}:{line}: \"{}\": {instead}", file.name, hit.trim())));
        }
    }
    none(faults);
}

/// Figures with a unit that are limits, defaults, examples or targets, not measurements: page, figure.
const SETTINGS: &[(&str, &str)] = &[
    ("data.md", "128 MiB"),
    ("data.md", "16 MiB"),
    ("data.md", "5 s"),
    ("data.md", "2 %"),
    ("gpus.md", "1 GiB"),
    ("gpus.md", "4 GiB"),
    ("gpus.md", "1.5 GiB"),
    ("gpus.md", "85 %"),
    ("gpus.md", "75 %"),
    ("gpus.md", "70 %"),
    ("gpus.md", "45 %"),
    ("services.md", "1 MiB"),
    ("services.md", "16 KiB"),
    ("trouble.md", "90 s"),
];

/// A measured figure needs a link to its run in the same paragraph, or above its table, and the run's page has its
/// numbers.
#[test]
fn every_figure_of_the_readme_and_the_manual_is_in_the_run_that_its_paragraph_links() {
    let number = r"\b\d+(?:[.,]\d+)*";
    let units = "%|ms\\b|s\\b|min\\b|minutes?\\b|MB\\b|[KMG]iB\\b|[GT]FLOP/s|[GT]B/s|points\\b";
    let figure = Regex::new(&format!(r"{number}(?: to {number})? ?(?:{units})|\b\d+\.\d+ x\b")).unwrap();
    let (number, run) = (Regex::new(number).unwrap(), Regex::new(r"bench/runs/([\w.-]+)").unwrap());
    let mut faults = Vec::new();
    let pages = texts().into_iter().filter(|file| file.name == "README.md" || file.name.starts_with("src/cli/help/"));
    for page in pages {
        let name = page.name.trim_start_matches("src/cli/help/");
        let mut above = Vec::new();
        for (line, block) in markdown(&page.text) {
            let mut runs: Vec<String> = run.captures_iter(&block).map(|found| found[1].to_owned()).collect();
            if block.starts_with('|') && runs.is_empty() {
                runs.clone_from(&above);
            }
            let records = runs.iter().map(|run| root().join("bench/runs").join(run).join("README.md"));
            let records: String = records.map(|path| fs::read_to_string(path).unwrap_or_default()).collect();
            let recorded: Vec<&str> = number.find_iter(&records).map(|found| found.as_str()).collect();
            for found in figure.find_iter(&block).map(|found| found.as_str()) {
                let is_recorded = number.find_iter(found).all(|found| recorded.contains(&found.as_str()));
                if !is_recorded && !SETTINGS.contains(&(name, found)) {
                    faults.push(format!("{}:{line}: {found} is not in {runs:?}", page.name));
                }
            }
            if !block.starts_with('|') {
                above = runs;
            }
        }
    }
    none(faults);
}
