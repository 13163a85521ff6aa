//! How a job ends when something fails: the message once, with rank, host, step and phase; a log a rank; all ranks
//! ended within seconds.
//!
//! Only one rank may print: the ranks stagger by rank, and the first to create `logs/first_error` is it. The launcher
//! adds a banner of its own after MPI_Abort; `mpirun -q` of Open MPI 4 leaves it away.

use super::accounting::last_entered;
use super::communicator;
use super::phase;
use super::world::{self, World};
use crate::error::{Error, Kind, Result};
use crate::sys::{environment, stderr};
use std::any::Any;
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

struct Setting {
    rank: usize,
    size: usize,
    hosts: Vec<String>,
    /// The run directory's `logs/`.
    logs: Option<PathBuf>,
}

static SETTING: OnceLock<Setting> = OnceLock::new();
static FAILING: AtomicBool = AtomicBool::new(false);
/// The last error that `Group::agree` made everyone's, and whether it arose here.
static AGREED: Mutex<Option<(String, bool)>> = Mutex::new(None);

thread_local! {
    /// Whether this thread's panics are somebody's to answer: `caught`.
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

const FIRST_ERROR: &str = "first_error";
/// A rank that is not the first to fail waits this long for the first one's abort.
const KILLED_WITHIN: Duration = Duration::from_secs(5);
/// NCCL's abort gets this long before MPI's.
const LEFT_WITHIN: Duration = Duration::from_secs(1);
/// Both together get this long before the process ends by itself.
const ABORTED_WITHIN: Duration = Duration::from_secs(3);

/// From now on a panic on any thread, and `fail`, end the whole job, and a collective that takes longer than
/// `collective_timeout` does too (none: no limit). Logs go to `logs`, which is made when it is needed. All ranks call
/// this once, after `World::start`.
pub fn install(world: &World, logs: Option<&Path>, collective_timeout: Option<Duration>) {
    let logs = logs.map(Path::to_path_buf);
    if let Some(logs) = logs.as_ref().filter(|_| world.rank == 0) {
        // What an earlier run of this directory left; no rank can fail before the barrier below and lose its claim.
        let _ = std::fs::remove_file(logs.join(FIRST_ERROR));
    }
    world.group().barrier();
    let setting = Setting { rank: world.rank, size: world.size, hosts: world.hosts.clone(), logs };
    assert!(SETTING.set(setting).is_ok(), "abort::install was called twice");
    std::panic::set_hook(Box::new(|panic| {
        if !CATCHING.get() {
            end(&meant(panic), false, &Backtrace::force_capture().to_string());
        }
    }));
    if let Some(limit) = collective_timeout {
        super::watchdog::start(world, limit);
    }
}

/// From now on a panic with an `Error` as payload ends the program with that error: so ends what no layer can answer
/// for, as memory that is used up. Call it first in `main`; `install` does more.
pub fn install_errors() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| match panic.payload().downcast_ref::<Error>() {
        _ if CATCHING.get() => {}
        Some(error) => end(error, false, ""),
        None => before(panic),
    }));
}

/// Runs `body`. A panic of this thread in it is an error of this call, and not the end of the job.
pub fn caught<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = CATCHING.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(body));
    CATCHING.set(before);
    outcome.unwrap_or_else(|payload| Err(error_of(payload.as_ref())))
}

/// The error that a panic carries or means.
fn error_of(payload: &(dyn Any + Send)) -> Error {
    if let Some(error) = payload.downcast_ref::<Error>() {
        return error.clone();
    }
    let message = payload.downcast_ref::<&str>().copied();
    let message = message.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    Error::fault(message.unwrap_or("a panic without words"))
}

/// The error that a panic carries, or what it says and where.
fn meant(panic: &PanicHookInfo) -> Error {
    let payload = panic.payload();
    let error = error_of(payload);
    if payload.is::<Error>() {
        return error;
    }
    let place = panic.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
    Error::fault(format!("{}{place}", error.message)).hint("this is a fault of the program, not of its input")
}

/// Notes that `error` is known to all ranks of a group and arose on this one or not.
pub(super) fn agreed(error: &Error, here: bool) {
    *AGREED.lock().unwrap_or_else(PoisonError::into_inner) = Some((error.message.clone(), here));
}

/// Ends the job with `error`: prints it once, logs it, ends all ranks. `Kind::Stopped` is no failure: all ranks are
/// expected here, MPI ends in order, and rank 0 prints.
pub fn fail(error: &Error) -> ! {
    if error.kind == Kind::Stopped {
        if SETTING.get().is_none_or(|s| s.rank == 0) {
            stderr::line(&error.message);
        }
        world::shutdown();
        std::process::exit(error.exit_code());
    }
    let agreed = AGREED.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let from_elsewhere = agreed.as_ref().is_some_and(|(message, here)| error.message.contains(message) && !here);
    let named = agreed.is_some_and(|(message, _)| error.message.contains(&message));
    if from_elsewhere {
        log(&described(error, true));
        die_quietly(error.exit_code());
    }
    end(error, named, "")
}

/// Prints, logs and ends the job. `named`: the message says already where it arose.
pub(super) fn end(error: &Error, named: bool, details: &str) -> ! {
    if FAILING.swap(true, Ordering::SeqCst) {
        // Another thread of this process is ending it.
        loop {
            std::thread::sleep(Duration::from_secs(60));
        }
    }
    let message = described(error, named);
    log(&format!("{message}\n{}\n{details}", last_words()));
    if !is_first(&message) {
        die_quietly(error.exit_code());
    }
    stderr::line(&message);
    leave(error.exit_code())
}

/// Ends what GPUs are at, then all ranks; this process even where neither returns.
fn leave(code: i32) -> ! {
    // A system that has no more threads must not make this a panic within a panic.
    let beside = |work: Box<dyn FnOnce() + Send>| drop(std::thread::Builder::new().spawn(work));
    beside(Box::new(move || {
        std::thread::sleep(ABORTED_WITHIN);
        exit_now(code);
    }));
    let (left, all_left) = std::sync::mpsc::channel();
    beside(Box::new(move || {
        communicator::abort_all();
        let _ = left.send(());
    }));
    let _ = all_left.recv_timeout(LEFT_WITHIN);
    world::abort(code);
    exit_now(code)
}

/// `error: rank 1 (node3), step 12, train: MESSAGE`, and the hint.
fn described(error: &Error, named: bool) -> String {
    let mut place = Vec::new();
    if let Some(s) = SETTING.get().filter(|s| s.size > 1 && !named) {
        let host = s.hosts.get(s.rank).map_or("?", String::as_str);
        place.push(format!("rank {} ({host})", s.rank));
    }
    place.extend(phase::words());
    if place.is_empty() { error.to_string() } else { error.clone().within(place.join(", ")).to_string() }
}

fn last_words() -> String {
    last_entered().map_or("no collective was entered".to_string(), |c| {
        let seconds = c.since.elapsed().as_secs_f64();
        format!("last collective: {c}, entered {seconds:.1} s ago")
    })
}

/// Whether this rank prints. Ranks that fail alike stagger, so that the first one's abort ends the others before
/// they speak even where they share no directory.
fn is_first(message: &str) -> bool {
    let Some(setting) = SETTING.get() else {
        // Before `install`: what fails here mostly fails on all ranks, and rank 0's end takes the others along.
        std::thread::sleep(Duration::from_secs(if environment::launched_rank().unwrap_or(0) > 0 { 3 } else { 0 }));
        return true;
    };
    std::thread::sleep(Duration::from_millis(300 * setting.rank.min(8) as u64));
    let Some(logs) = setting.logs.as_ref().filter(|_| setting.size > 1) else { return true };
    match OpenOptions::new().write(true).create_new(true).open(logs.join(FIRST_ERROR)) {
        Ok(mut file) => {
            let _ = writeln!(file, "{message}");
            true
        }
        Err(error) => error.kind() != std::io::ErrorKind::AlreadyExists,
    }
}

/// Waits for the abort of the rank that printed, then ends this process at any rate.
pub(super) fn die_quietly(code: i32) -> ! {
    std::thread::sleep(KILLED_WITHIN);
    leave(code)
}

/// Ends the process without running destructors or handlers that may wait for other ranks.
fn exit_now(code: i32) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// Appends to `logs/rank-N.log`, with the time in seconds since 1970. Failing to log does not hide the failure itself.
pub(super) fn log(text: &str) {
    let Some(Setting { rank, logs: Some(logs), .. }) = SETTING.get() else { return };
    let _ = std::fs::create_dir_all(logs);
    let path = logs.join(format!("rank-{rank}.log"));
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let mut line = String::new();
    let _ = writeln!(line, "[{seconds}] {}", text.trim_end());
    let written = File::options().append(true).create(true).open(path).and_then(|mut f| f.write_all(line.as_bytes()));
    drop(written);
}
