//! Runs work that depends on external text (a chat template) on a thread with limits: on its memory, its stack and
//! its processor time.
//!
//! If memory or the stack is used up, nothing can be unwound: an allocator must not panic, and a fault must not return.
//! So the thread stops there for good, and the caller gets the error. A run ends with such an error. Until then the
//! thread keeps its memory, within its limits.

use super::faults::{self, Cause};
use super::host::clock_s;
use super::lock::lock;
use crate::error::format_bytes;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

/// The memory that one piece of work may hold at a time.
const BYTES_MAX: usize = 128 << 20;
const STACK_BYTES: usize = 16 << 20;
/// The limit of processor time, which does not depend on the load of the machine.
const SECONDS_MAX: f64 = 5.0;
/// The interval at which a thread that does not answer is checked.
const TICK: Duration = Duration::from_millis(10);

const WITHIN: u8 = 0;
const OUT_OF_MEMORY: u8 = 1;
const OUT_OF_STACK: u8 = 2;

thread_local! {
    /// The number of bytes that this thread may still allocate.
    static LEFT: Cell<isize> = const { Cell::new(isize::MAX) };
    /// The state in which a sandboxed thread reports that it stopped.
    static STATE: Cell<Option<&'static AtomicU8>> = const { Cell::new(None) };
    /// The addresses around the end of a sandboxed thread's stack, which cannot be written.
    static GUARD: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// The system's allocator with accounting for sandboxed threads.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call goes to the system allocator with the caller's arguments. A call may not return: that is allowed.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        charge(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        charge(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        charge(size as isize - layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        charge(-(layout.size() as isize));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(old, layout) }
    }
}

fn charge(bytes: isize) {
    let left = LEFT.get().saturating_sub(bytes);
    LEFT.set(left);
    if left < 0
        && let Some(state) = STATE.get()
    {
        stop(state, OUT_OF_MEMORY);
    }
}

/// Stops this thread forever. It runs within an allocation or a fault of this thread, which holds no lock of
/// the allocator.
fn stop(state: &AtomicU8, why: u8) -> ! {
    state.store(why, Ordering::SeqCst);
    loop {
        // SAFETY: waits for a signal, and does nothing else.
        unsafe { libc::pause() };
    }
}

/// Does not return if the fault is a stack overflow of this thread and the thread is sandboxed. It runs in the fault
/// handler, so it reads only this thread's own cells.
fn stop_where_stack_ends(address: usize) {
    let (from, to) = GUARD.get();
    if let Some(state) = STATE.get()
        && (from..to).contains(&address)
    {
        stop(state, OUT_OF_STACK);
    }
}

/// A thread that waits for work.
struct Worker {
    work: Sender<Box<dyn FnOnce() + Send>>,
    state: &'static AtomicU8,
    /// The clock of its processor time.
    clock: libc::clockid_t,
}

/// The idle threads: as many as were ever busy at the same time.
static IDLE: Mutex<Vec<Worker>> = Mutex::new(Vec::new());

/// Runs `work` on a thread with limits.
///
/// # Errors
/// Describes the exceeded limit: `needs more than 128.0 MiB of memory`.
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    run_within(BYTES_MAX, SECONDS_MAX, work)
}

/// Runs `work` like `run`, with other limits of memory and processor time.
pub fn run_within<T: Send + 'static>(
    bytes_max: usize,
    seconds_max: f64,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let idle_one = lock(&IDLE).pop();
    let worker = idle_one.map_or_else(Worker::start, Ok)?;
    let (answer, answers) = mpsc::channel();
    let begun = clock_s(worker.clock);
    let work = Box::new(move || {
        LEFT.set(bytes_max as isize);
        drop(answer.send(work()));
    });
    let ended = || "ended without a result".to_string();
    worker.work.send(work).map_err(|_| ended())?;
    loop {
        match answers.recv_timeout(TICK) {
            Ok(value) => {
                lock(&IDLE).push(worker);
                return Ok(value);
            }
            Err(RecvTimeoutError::Disconnected) => return Err(ended()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        match worker.state.load(Ordering::SeqCst) {
            WITHIN if clock_s(worker.clock) - begun < seconds_max => {}
            WITHIN => return Err(format!("runs for more than {seconds_max} s")),
            OUT_OF_MEMORY => return Err(format!("needs more than {} of memory", format_bytes(bytes_max as u64))),
            _ => {
                return Err(format!("nests too deeply: needs more than {} of stack", format_bytes(STACK_BYTES as u64)));
            }
        }
    }
}

impl Worker {
    fn start() -> Result<Self, String> {
        faults::install(Cause::StackEnds, stop_where_stack_ends);
        let state: &'static AtomicU8 = Box::leak(Box::new(AtomicU8::new(WITHIN)));
        let (work, works) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let body = move || {
            GUARD.set(guard_of_this_thread());
            STATE.set(Some(state));
            while let Ok(work) = works.recv() {
                work();
                LEFT.set(isize::MAX);
            }
        };
        let thread = std::thread::Builder::new().name("sandbox".to_string()).stack_size(STACK_BYTES).spawn(body);
        let thread = thread.map_err(|e| format!("could not start a thread: {e}"))?;
        let mut clock = libc::CLOCK_MONOTONIC;
        // SAFETY: the thread lives, for it waits for work; on failure the clock stays that of the wall.
        unsafe { libc::pthread_getcpuclockid(thread.as_pthread_t(), &raw mut clock) };
        Ok(Self { work, state, clock })
    }
}

/// The addresses at which a fault is a stack overflow. Some releases of the C library count the guard as part of the
/// stack and others do not, so the range covers both.
fn guard_of_this_thread() -> (usize, usize) {
    // SAFETY: an all-zero attribute is filled by the first call, read by the next two, and then given back.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        if libc::pthread_getattr_np(libc::pthread_self(), &raw mut attributes) != 0 {
            return (0, 0);
        }
        let (mut start, mut size, mut guard) = (std::ptr::null_mut(), 0, 0);
        libc::pthread_attr_getstack(&raw const attributes, &raw mut start, &raw mut size);
        libc::pthread_attr_getguardsize(&raw const attributes, &raw mut guard);
        libc::pthread_attr_destroy(&raw mut attributes);
        (start as usize - guard, start as usize + guard)
    }
}
