//! Ends a job: after an unhandled error, a panic, a collective that takes too long, or at the end of `main`.

use super::ending::{self, end};
use super::world::{self, World};
use super::{agree, watchdog};
use crate::error::{Error, Kind, Result};
use crate::sys::stderr;
use std::any::Any;
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::path::Path;
use std::time::Duration;

thread_local! {
    /// Whether `caught` handles this thread's panics.
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Installs the handlers: a panic on any thread or `fail` ends the whole job, as does a collective that takes longer
/// than `collective_timeout` (`None`: no limit). Logs go to `logs`, which is created when needed. All ranks call this
/// once, after `World::start`.
pub fn install(world: &World, logs: Option<&Path>, collective_timeout: Option<Duration>) {
    ending::prepare(world, logs);
    std::panic::set_hook(Box::new(|panic| {
        if !CATCHING.get() {
            end(&meant(panic), false, &Backtrace::force_capture().to_string());
        }
    }));
    if let Some(limit) = collective_timeout {
        watchdog::start(world, limit);
    }
}

/// Installs a handler that ends the program with the error if a panic has an `Error` as payload. This is for errors
/// that no layer can handle, such as out of memory. Call it first in `main`; `install` does more.
pub fn install_errors() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| match panic.payload().downcast_ref::<Error>() {
        _ if CATCHING.get() => {}
        Some(error) => end(error, false, ""),
        None => before(panic),
    }));
}

/// Runs `body`. A panic of this thread in it becomes an error of this call and does not end the job.
pub fn caught<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = CATCHING.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(body));
    CATCHING.set(before);
    outcome.unwrap_or_else(|payload| Err(error_of(payload.as_ref())))
}

/// The error for the payload of a panic.
fn error_of(payload: &(dyn Any + Send)) -> Error {
    if let Some(error) = payload.downcast_ref::<Error>() {
        return error.clone();
    }
    let message = payload.downcast_ref::<&str>().copied();
    let message = message.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    Error::fault(message.unwrap_or("a panic without a message"))
}

/// The error in a panic's payload, or its message with the source location.
fn meant(panic: &PanicHookInfo) -> Error {
    let payload = panic.payload();
    let error = error_of(payload);
    if payload.is::<Error>() {
        return error;
    }
    let place = panic.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
    let hint = "report this: it is a bug in the program, not a problem with its input";
    Error::fault(format!("{}{place}", error.message)).hint(hint)
}

/// Ends the job with `error`: prints it once, logs it, and ends all ranks. If all ranks have the error, they end in
/// order, so that the launcher does not report an abort. `Kind::Stopped` is not a failure: all ranks call this, MPI
/// ends in order, and rank 0 prints.
pub fn fail(error: &Error) -> ! {
    if error.kind == Kind::Stopped {
        if ending::is_rank_zero() {
            stderr::line(&error.message);
        }
        shutdown();
        std::process::exit(error.exit_code());
    }
    match agree::agreed(error) {
        Some(agreed) if agreed.by_all => {
            watchdog::stop();
            ending::together(error, agreed.here)
        }
        Some(agreed) if !agreed.here => ending::follow(error),
        agreed => end(error, agreed.is_some(), ""),
    }
}

/// Ends MPI if it was started. All ranks call this last, before they exit.
pub fn shutdown() {
    watchdog::stop();
    world::finalize();
}
