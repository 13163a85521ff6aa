//! Runs the program and looks at how it ended.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

/// How one run ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// The program in a directory, to be started.
pub fn program(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlhf-hpc"));
    command.current_dir(dir);
    command
}

/// The program, alone.
pub fn run(dir: &Path, arguments: &[&str]) -> Ended {
    ended(program(dir).args(arguments))
}

/// The program on `ranks` ranks.
pub fn mpirun(dir: &Path, ranks: usize, arguments: &[&str]) -> Ended {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()]);
    command.arg(env!("CARGO_BIN_EXE_rlhf-hpc")).args(arguments).current_dir(dir);
    // More ranks than cores: a rank that waits must let others run.
    ended(command.env("OMPI_MCA_mpi_yield_when_idle", "1"))
}

/// The program, alone, with its standard output on a device that is full.
pub fn run_on_full(dir: &Path, arguments: &[&str]) -> Ended {
    let full = File::options().write(true).open("/dev/full").expect("Linux has it");
    ended(Command::new(env!("CARGO_BIN_EXE_rlhf-hpc")).args(arguments).current_dir(dir).stdout(full))
}

/// The program, alone, with a standard output that nobody reads any more.
pub fn run_on_closed(dir: &Path, arguments: &[&str]) -> Ended {
    let (reader, writer) = std::io::pipe().expect("the system has pipes");
    drop(reader);
    ended(Command::new(env!("CARGO_BIN_EXE_rlhf-hpc")).args(arguments).current_dir(dir).stdout(writer))
}

/// Starts it and waits for its end.
pub fn ended(command: &mut Command) -> Ended {
    let out = command.stdin(Stdio::null()).output().expect("the program starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ended { code: out.status.code(), stdout: text(&out.stdout), stderr: text(&out.stderr) }
}

impl Ended {
    /// Ended well.
    #[track_caller]
    pub fn well(self) -> Self {
        assert_eq!(self.code, Some(0), "{}{}", self.stdout, self.stderr);
        self
    }

    /// Ended with this code and one error, in whose words (the hint among them) are all of `words`.
    #[track_caller]
    pub fn refused(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "{}{}", self.stdout, self.stderr);
        // Open MPI 5 leaves a space of its own before what follows its banner.
        let errors = self.stderr.lines().filter(|line| line.trim_start().starts_with("error: ")).count();
        assert_eq!(errors, 1, "an error is said once:\n{}", self.stderr);
        let said = &self.stderr[self.stderr.find("error: ").expect("counted above")..];
        for word in words {
            assert!(said.contains(word), "{word:?} is not in:\n{said}");
        }
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self
    }

    /// Its error came with a hint that holds `words`.
    #[track_caller]
    pub fn hinted(self, words: &str) -> Self {
        let hint = self.stderr.lines().find_map(|line| line.strip_prefix("hint: "));
        assert!(hint.is_some_and(|hint| hint.contains(words)), "{words:?} is in no hint of:\n{}", self.stderr);
        self
    }
}
