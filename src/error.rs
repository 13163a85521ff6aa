//! The error type: a message, a hint, and the exit code of the process.

use crate::url::redacted;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// The class of an error decides the exit code of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A broken invariant or a failed peer: exit code 1.
    Fault,
    /// Wrong command line, configuration or rank count: exit code 2.
    Usage,
    /// Input data or a model directory that cannot be used: exit code 65.
    Data,
    /// The operating system refused a read or a write: exit code 74.
    Io,
    /// A service (a reward) failed after its retries: exit code 75.
    Service,
    /// Stopped on request with a checkpoint: exit code 85.
    Stopped,
}

/// An error, which is shown to the user once: `error: MESSAGE`, then `hint: HINT` if there is one. Secrets in URLs are
/// hidden.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    pub kind: Kind,
    pub message: String,
    pub hint: Option<String>,
}

/// The error of a git-lfs file that was cloned without its content.
#[derive(Debug)]
pub struct LfsPointer;

impl fmt::Display for LfsPointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this is a pointer of git-lfs, not the file itself")
    }
}

impl std::error::Error for LfsPointer {}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: redacted(&message.into()).into_owned(), hint: None }
    }

    pub fn fault(message: impl Into<String>) -> Self {
        Self::new(Kind::Fault, message)
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Kind::Usage, message)
    }

    /// Returns a usage error unless the condition `holds`.
    pub fn need(holds: bool, message: impl Into<String>) -> Result<()> {
        if holds { Ok(()) } else { Err(Self::usage(message)) }
    }

    pub fn data(message: impl Into<String>) -> Self {
        Self::new(Kind::Data, message)
    }

    pub fn service(message: impl Into<String>) -> Self {
        Self::new(Kind::Service, message)
    }

    /// An I/O error with the action and the path it happened on: `cannot read a/b: No such file ...`.
    /// A pointer of git-lfs in place of the file is wrong data.
    pub fn io(action: &str, path: impl AsRef<Path>, source: &std::io::Error) -> Self {
        if source.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<LfsPointer>) {
            return Self::data(format!("{}: {source}", path.as_ref().display())).hint(
                "run `git lfs pull` in its directory, or use ORG/NAME from the Hugging Face cache, which `rlhf-hpc download ORG/NAME` fills",
            );
        }
        Self::new(Kind::Io, format!("cannot {action} {}: {source}", path.as_ref().display()))
    }

    /// Combines the mistakes of one input into one error; `Ok` if there are none.
    pub fn all(mut mistakes: Vec<Self>) -> Result<()> {
        if mistakes.len() < 2 {
            return mistakes.pop().map_or(Ok(()), Err);
        }
        let row = |Self { message, hint, .. }: &Self| match hint {
            Some(hint) => format!("\n  {message} ({hint})"),
            None => format!("\n  {message}"),
        };
        Err(Self::usage(format!("{} mistakes{}", mistakes.len(), mistakes.iter().map(row).collect::<String>())))
    }

    /// Adds the hint line.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(redacted(&hint.into()).into_owned());
        self
    }

    /// Adds an alternative to the hint, or the hint line if there is none.
    #[must_use]
    pub fn also(mut self, way: &str) -> Self {
        self.hint = Some(self.hint.map_or_else(|| way.to_string(), |hint| format!("{hint}; or {way}")));
        self
    }

    /// Puts `context: ` before the message, e.g. the file and row.
    #[must_use]
    pub fn within(mut self, context: impl fmt::Display) -> Self {
        self.message = format!("{}: {}", redacted(&context.to_string()), self.message);
        self
    }

    /// The exit code of the process that ends with this error.
    pub fn exit_code(&self) -> i32 {
        match self.kind {
            Kind::Fault => 1,
            Kind::Usage => 2,
            Kind::Data => 65,
            Kind::Io => 74,
            Kind::Service => 75,
            Kind::Stopped => 85,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, "\nhint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// Formats a number of bytes for messages: `1.5 GiB`, `80.0 KiB`, `17 bytes`.
pub fn format_bytes(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, unit)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} bytes"),
    }
}
