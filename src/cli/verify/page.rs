//! The page that `verify` prints: a line for each check, with a mark.

use crate::cli::out::say;
use crate::error::{Error, Result};
use serde::Serialize;

/// Columns of a page.
const COLUMNS: usize = 96;
/// The column where texts begin, after mark and name.
const TEXT_AT: usize = 22;

/// The outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mark {
    Ok,
    Failed,
    /// A check that this job or this machine has no use for.
    Skipped,
}

impl Mark {
    fn text(self) -> &'static str {
        match self {
            Self::Ok => "  ok",
            Self::Failed => "  FAIL",
            Self::Skipped => "  -",
        }
    }
}

/// A check with its outcome.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub mark: Mark,
    pub text: String,
}

impl Check {
    pub fn ok(name: &'static str, text: impl Into<String>) -> Self {
        Self { name, mark: Mark::Ok, text: text.into() }
    }

    pub fn failed(name: &'static str, text: impl Into<String>) -> Self {
        Self { name, mark: Mark::Failed, text: text.into() }
    }

    pub fn skipped(name: &'static str, text: impl Into<String>) -> Self {
        Self { name, mark: Mark::Skipped, text: text.into() }
    }

    /// A check that has failed if there are faults, one for each line of its text.
    pub fn of_faults(name: &'static str, faults: &[String], text: impl FnOnce() -> String) -> Self {
        if faults.is_empty() { Self::ok(name, text()) } else { Self::failed(name, faults.join("\n")) }
    }

    /// A check whose error is its text.
    pub fn of(name: &'static str, outcome: Result<String>) -> Self {
        match outcome {
            Ok(text) => Self::ok(name, text),
            Err(error) => Self::failed(name, describe(&error)),
        }
    }

    pub fn has_failed(&self) -> bool {
        self.mark == Mark::Failed
    }
}

/// An error as the text of a check.
pub fn describe(error: &Error) -> String {
    match &error.hint {
        Some(hint) => format!("{} ({hint})", error.message),
        None => error.message.clone(),
    }
}

/// The checks so far, printed as they end.
#[derive(Default)]
pub struct Page {
    checks: Vec<Check>,
    /// Whether the checks are one JSON object at the end.
    is_json: bool,
    /// Whether this rank prints nothing.
    is_silent: bool,
}

impl Page {
    pub fn new(is_json: bool, is_silent: bool) -> Self {
        Self { checks: Vec::new(), is_json, is_silent }
    }

    /// Prints a line without a mark.
    pub fn text(&self, line: &str) {
        if !self.is_json && !self.is_silent {
            say!("{line}");
        }
    }

    /// Prints a check.
    pub fn add(&mut self, check: Check) {
        if !self.is_json && !self.is_silent {
            say!("{}", lines(&check));
        }
        self.checks.push(check);
    }

    /// Ends the page: with the JSON object, if there is one, and the error of failed checks.
    ///
    /// # Errors
    /// `Fault` if a check has failed.
    pub fn finish(self, mut object: serde_json::Map<String, serde_json::Value>) -> Result<()> {
        if self.is_json && !self.is_silent {
            object.insert("checks".into(), serde_json::json!(self.checks));
            say!("{}", serde_json::Value::Object(object));
        }
        let failed: Vec<&str> = self.checks.iter().filter(|check| check.has_failed()).map(|check| check.name).collect();
        let made = self.checks.iter().filter(|check| check.mark != Mark::Skipped).count();
        match failed.len() {
            0 => {
                self.text(&format!("\n{made} checks passed"));
                Ok(())
            }
            n => Err(Error::fault(format!("{n} of {made} checks failed: {}", failed.join(", ")))),
        }
    }
}

/// The lines of a check, wrapped at the width of the page.
fn lines(check: &Check) -> String {
    let mut all = vec![format!("{:<8}{:<width$}", check.mark.text(), check.name, width = TEXT_AT - 8)];
    for paragraph in check.text.lines() {
        if all.last().is_some_and(|line| line.len() > TEXT_AT) {
            all.push(" ".repeat(TEXT_AT));
        }
        for word in paragraph.split(' ') {
            let last = all.last_mut().expect("it begins with a line");
            let is_first = last.len() == TEXT_AT;
            if !is_first && last.chars().count() + 1 + word.chars().count() > COLUMNS {
                all.push(format!("{}{word}", " ".repeat(TEXT_AT)));
                continue;
            }
            if !is_first {
                last.push(' ');
            }
            last.push_str(word);
        }
    }
    all.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_is_wrapped_at_the_width_of_the_page() {
        let text = lines(&Check::failed("weights", "a word ".repeat(30).trim_end()));
        let all: Vec<&str> = text.lines().collect();
        assert!(all[0].starts_with("  FAIL  weights       a word a"), "{text}");
        assert!(all.len() == 3 && all[1].starts_with(&format!("{}word", " ".repeat(TEXT_AT))), "{text}");
        assert!(all.iter().all(|line| line.len() <= COLUMNS), "{text}");
        assert_eq!(lines(&Check::ok("clocks", "one\ntwo")), format!("  ok    clocks        one\n{:22}two", ""));
    }

    #[test]
    fn a_page_with_a_failed_check_is_an_error_that_names_it() {
        let mut page = Page::new(false, true);
        page.add(Check::ok("disk", ""));
        page.add(Check::skipped("links", "one rank"));
        assert!(Page::new(false, true).finish(serde_json::Map::new()).is_ok());
        page.add(Check::of("clocks", Err(Error::data("rank 3 is late").hint("start chronyd"))));
        assert_eq!(page.checks[2].text, "rank 3 is late (start chronyd)");
        let error = page.finish(serde_json::Map::new()).expect_err("a check failed");
        assert_eq!((error.exit_code(), &*error.message), (1, "1 of 2 checks failed: clocks"));
    }
}
