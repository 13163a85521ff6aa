//! Ends a job that fails. Prints the message once, with rank, host, step and phase, writes a log for each rank, and
//! ends all ranks within seconds.
//!
//! One rank prints: each rank waits for a time that grows with its number, and the first to create `logs/first_error`
//! prints. The launcher adds a banner of its own after MPI_Abort.

use super::accounting::last_entered;
use super::communicator;
use super::phase;
use super::world::{self, World};
use crate::error::Error;
use crate::sys::{environment, host, stderr};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

struct Setting {
    world: World,
    /// The run directory's `logs/`.
    logs: Option<PathBuf>,
}

static SETTING: OnceLock<Setting> = OnceLock::new();
static FAILING: AtomicBool = AtomicBool::new(false);

const FIRST_ERROR: &str = "first_error";
/// The time that a rank waits for the abort by the rank that failed first.
const KILLED_WITHIN: Duration = Duration::from_secs(5);
/// The time for NCCL's abort before MPI's.
const LEFT_WITHIN: Duration = Duration::from_secs(1);
/// The time for both aborts before the process exits by itself.
const ABORTED_WITHIN: Duration = Duration::from_secs(3);

/// Stores this rank's identity and the directory of its log. All ranks call this once.
pub(super) fn prepare(world: &World, logs: Option<&Path>) {
    let logs = logs.map(Path::to_path_buf);
    if let Some(logs) = logs.as_ref().filter(|_| world.rank == 0) {
        // A leftover of an earlier run. No rank can fail before the barrier below and lose the file.
        let _ = std::fs::remove_file(logs.join(FIRST_ERROR));
    }
    world.group().barrier();
    assert!(SETTING.set(Setting { world: world.clone(), logs }).is_ok(), "abort::install was called twice");
}

pub(super) fn is_rank_zero() -> bool {
    SETTING.get().is_none_or(|setting| setting.world.rank == 0)
}

/// Ends this rank after `error` arose on another rank, which prints it.
pub(super) fn follow(error: &Error) -> ! {
    log(&described(error, true));
    die_quietly(error.exit_code())
}

/// Ends this rank in order, together with all others. All have `error`, and the rank where it arose (`here`) prints it.
pub(super) fn together(error: &Error, here: bool) -> ! {
    acquire_ending();
    let message = described(error, true);
    log(&message);
    if here {
        stderr::line(&message);
    }
    // Another rank may meet another error on the way here, or a collective that never ends.
    exit_after(KILLED_WITHIN, error.exit_code());
    communicator::abort_all();
    world::finalize();
    exit_now(error.exit_code())
}

/// Returns on the first thread that ends this process. Other threads wait for its end.
fn acquire_ending() {
    while FAILING.swap(true, Ordering::SeqCst) {
        std::thread::sleep(Duration::from_secs(60));
    }
}

/// Prints, logs and ends the job. `named`: the message already names the rank.
pub(super) fn end(error: &Error, named: bool, details: &str) -> ! {
    acquire_ending();
    let message = described(error, named);
    log(&format!("{message}\n{}\n{details}", describe_last_collective()));
    if !is_first(&message) {
        die_quietly(error.exit_code());
    }
    stderr::line(&message);
    leave(error.exit_code())
}

/// Aborts the collectives on GPUs, then all ranks. Ends this process even if neither call returns.
fn leave(code: i32) -> ! {
    exit_after(ABORTED_WITHIN, code);
    let (left, all_left) = std::sync::mpsc::channel();
    beside(move || {
        communicator::abort_all();
        let _ = left.send(());
    });
    let _ = all_left.recv_timeout(LEFT_WITHIN);
    world::abort(code);
    exit_now(code)
}

/// Runs `work` on a thread of its own. A failure to start the thread must not cause a panic within a panic.
fn beside(work: impl FnOnce() + Send + 'static) {
    drop(std::thread::Builder::new().spawn(work));
}

/// Ends this process after `time`, if nothing else ends it before.
fn exit_after(time: Duration, code: i32) {
    beside(move || {
        std::thread::sleep(time);
        exit_now(code);
    });
}

/// The text `error: rank 1 (node3), step 12, train: MESSAGE`, and the hint.
fn described(error: &Error, named: bool) -> String {
    let mut place = Vec::new();
    if let Some(Setting { world, .. }) = SETTING.get().filter(|setting| setting.world.size > 1 && !named) {
        place.push(format!("rank {} ({})", world.rank, world.hosts[world.rank]));
        place.extend(phase::stage().map(str::to_owned));
    }
    place.extend(phase::describe());
    if place.is_empty() { error.to_string() } else { error.clone().within(place.join(", ")).to_string() }
}

fn describe_last_collective() -> String {
    last_entered().map_or("no collective was entered".to_string(), |c| {
        let seconds = c.since.elapsed().as_secs_f64();
        format!("last collective: {c}, entered {seconds:.1} s ago")
    })
}

/// Whether this rank prints. Ranks that fail at the same time wait for different times. So the first one's abort ends
/// the others before they print, even if they share no directory.
fn is_first(message: &str) -> bool {
    let Some(setting) = SETTING.get() else {
        // Before `install`, failures mostly concern all ranks, and the end of rank 0 ends the others.
        std::thread::sleep(Duration::from_secs(if environment::launched_rank().unwrap_or(0) > 0 { 3 } else { 0 }));
        return true;
    };
    std::thread::sleep(Duration::from_millis(300 * setting.world.rank.min(8) as u64));
    let Some(logs) = setting.logs.as_ref().filter(|_| setting.world.size > 1) else { return true };
    match OpenOptions::new().write(true).create_new(true).open(logs.join(FIRST_ERROR)) {
        Ok(mut file) => {
            let _ = writeln!(file, "{message}");
            true
        }
        Err(error) => error.kind() != std::io::ErrorKind::AlreadyExists,
    }
}

/// Waits for the abort by the rank that printed, then ends this process in any case.
pub(super) fn die_quietly(code: i32) -> ! {
    std::thread::sleep(KILLED_WITHIN);
    leave(code)
}

/// Ends the process without running destructors or handlers that may wait for other ranks.
fn exit_now(code: i32) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// Appends to `logs/rank-N.log`, with the date and the time of day. Failing to log does not hide the failure itself.
pub(super) fn log(text: &str) {
    let Some(Setting { world, logs: Some(logs) }) = SETTING.get() else { return };
    let _ = std::fs::create_dir_all(logs);
    let path = logs.join(format!("rank-{}.log", world.rank));
    let line = format!("[{}] {}\n", host::date_and_time(), text.trim_end());
    let _ = File::options().append(true).create(true).open(path).and_then(|mut f| f.write_all(line.as_bytes()));
}
