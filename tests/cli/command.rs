//! The program, and assertions about its end.

use crate::process::{Ended, Running, launched};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// The command for the program in a directory: under mpirun with `ranks` ranks, or alone with 0.
pub fn program(dir: &Path, ranks: usize) -> Command {
    let mut command = launched(Path::new(env!("CARGO_BIN_EXE_rlhf-hpc")), ranks);
    command.current_dir(dir);
    command
}

/// The program, alone.
pub fn run(dir: &Path, arguments: &[&str]) -> Ended {
    mpirun(dir, 0, arguments)
}

/// The program on `ranks` ranks.
pub fn mpirun(dir: &Path, ranks: usize, arguments: &[&str]) -> Ended {
    let mut command = program(dir, ranks);
    command.args(arguments);
    Running::new(command).end()
}

/// The program, alone, with another standard output.
pub fn run_onto(dir: &Path, stdout: impl Into<Stdio>, arguments: &[&str]) -> Ended {
    let mut command = program(dir, 0);
    command.args(arguments).stdout(stdout);
    Running::new(command).end()
}

/// Copies files and folders of `dir`, given as shell patterns, into the folder `to`.
pub fn copy(dir: &Path, names: &str, to: &Path) {
    let line = format!("mkdir -p \"$0\" && cp -r {names} \"$0\"");
    let status = Command::new("sh").args(["-c", &line]).arg(to).current_dir(dir).status();
    assert!(status.is_ok_and(|status| status.success()), "{names} to {}", to.display());
}

/// The values of JSON lines.
pub fn rows(lines: &str) -> Vec<Value> {
    lines.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

impl Ended {
    /// Asserts success.
    #[track_caller]
    pub fn well(self) -> Self {
        assert_eq!(self.code, Some(0), "{}{}", self.stdout, self.stderr);
        self
    }

    /// Asserts this exit code and one error that contains all of `words`, its hint included.
    #[track_caller]
    pub fn refused(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "{}{}", self.stdout, self.stderr);
        // Open MPI 5 adds a space after its banner.
        let errors = self.stderr.lines().filter(|line| line.trim_start().starts_with("error: ")).count();
        assert_eq!(errors, 1, "an error is said once:\n{}", self.stderr);
        let said = &self.stderr[self.stderr.find("error: ").expect("counted above")..];
        for word in words {
            assert!(said.contains(word), "{word:?} is not in:\n{said}");
        }
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self
    }

    /// Asserts that the error has a hint with `words`, if there are any.
    #[track_caller]
    pub fn hinted(self, words: &str) -> Self {
        let hint = self.stderr.lines().find_map(|line| line.strip_prefix("hint: "));
        let is_there = hint.is_some_and(|hint| hint.contains(words));
        assert!(is_there || words.is_empty(), "{words:?} is in no hint of:\n{}", self.stderr);
        self
    }

    /// Asserts the exit code `code`, and each text once on standard error.
    #[track_caller]
    pub fn assert(&self, code: i32, once: &[&str]) {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        for text in once {
            assert_eq!(self.stderr.matches(text).count(), 1, "'{text}' once in:\n{}", self.stderr);
        }
    }
}
