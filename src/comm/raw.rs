//! Typed calls into MPI. Every return code is checked. Nothing outside `comm/` sees a communicator.

use super::background;
use crate::sys::{environment, stderr};
use mpi::ffi;
use std::ffi::{c_char, c_int, c_void};
use std::time::Duration;

/// The largest number of elements in one MPI call: counts are 32-bit, and a message stays below 2 GiB for any element
/// type.
pub(super) const COUNT_MAX: usize = 1 << 27;

/// A number type with an MPI datatype.
pub trait Element: Copy + Default {
    fn datatype() -> ffi::MPI_Datatype;
}

macro_rules! element {
    ($($rust:ty => $mpi:ident),*) => {$(
        impl Element for $rust {
            fn datatype() -> ffi::MPI_Datatype {
                // SAFETY: a constant of the library, set before main.
                unsafe { ffi::$mpi }
            }
        }
    )*};
}
element!(u8 => RSMPI_UINT8_T, u16 => RSMPI_UINT16_T, u64 => RSMPI_UINT64_T, f32 => RSMPI_FLOAT, f64 => RSMPI_DOUBLE);

/// A communicator handle.
#[derive(Clone, Copy)]
pub(super) struct Comm(pub(super) ffi::MPI_Comm);

// SAFETY: a handle is a name, not memory of a thread; MPI is started with MPI_THREAD_MULTIPLE or refused.
unsafe impl Send for Comm {}

/// An outstanding send or receive. Its buffer must not move until `wait`. Every caller here waits before
/// the borrow of the buffer ends. If a panic unwinds past the wait, the drop ends the job, because MPI could still read
/// or write the buffer.
#[must_use]
pub(super) struct Request(ffi::MPI_Request);

/// Checks a return code.
///
/// # Panics
/// If `code` is not MPI_SUCCESS: a peer or the network failed, and the job cannot continue.
fn check(call: &str, code: c_int) {
    if code == ffi::MPI_SUCCESS as c_int {
        return;
    }
    let mut text = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length = 0;
    // SAFETY: the buffer has the size that the standard requires.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &raw mut length) };
    let bytes: Vec<u8> = text[..length as usize].iter().map(|&c| c as u8).collect();
    panic!("{call}: {}", String::from_utf8_lossy(&bytes));
}

fn count(n: usize) -> c_int {
    assert!(n <= COUNT_MAX, "an MPI call has at most {COUNT_MAX} elements, got {n}");
    n as c_int
}

fn start<T>(data: &[T]) -> *const c_void {
    data.as_ptr().cast()
}

fn start_mut<T>(data: &mut [T]) -> *mut c_void {
    data.as_mut_ptr().cast()
}

/// The communicator that `make` writes. Its calls return errors.
fn made(call: &str, make: impl FnOnce(*mut ffi::MPI_Comm) -> c_int) -> Comm {
    let mut comm = std::mem::MaybeUninit::uninit();
    check(call, make(comm.as_mut_ptr()));
    // SAFETY: the call has filled it.
    let comm = unsafe { comm.assume_init() };
    // SAFETY: a live communicator and a handler of the library.
    check("MPI_Comm_set_errhandler", unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) });
    Comm(comm)
}

/// Starts MPI. Returns whether it allows concurrent calls from several threads.
pub(super) fn init() -> bool {
    let mut provided = 0;
    // SAFETY: called once (see `World::start`), with no argument vector, which the standard allows.
    check("MPI_Init_thread", unsafe {
        ffi::MPI_Init_thread(std::ptr::null_mut(), std::ptr::null_mut(), ffi::RSMPI_THREAD_MULTIPLE, &raw mut provided)
    });
    // SAFETY: a constant of the library.
    provided >= unsafe { ffi::RSMPI_THREAD_MULTIPLE }
}

pub(super) fn finalize() {
    // SAFETY: called once, after `init`, by `shutdown`.
    check("MPI_Finalize", unsafe { ffi::MPI_Finalize() });
}

impl Comm {
    /// A private communicator of all ranks, so that messages of other libraries do not mix with ours.
    pub(super) fn world() -> Self {
        // SAFETY: MPI is started; writes a communicator.
        made("MPI_Comm_dup", |comm| unsafe { ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, comm) })
    }

    /// Another communicator of the same ranks. All of them call this.
    pub(super) fn duplicate(self) -> Self {
        // SAFETY: a live communicator; writes another one.
        made("MPI_Comm_dup", |comm| unsafe { ffi::MPI_Comm_dup(self.0, comm) })
    }

    pub(super) fn split(self, color: usize, key: usize) -> Self {
        // SAFETY: as above.
        made("MPI_Comm_split", |comm| unsafe { ffi::MPI_Comm_split(self.0, color as c_int, key as c_int, comm) })
    }

    pub(super) fn rank(self) -> usize {
        let mut rank = 0;
        // SAFETY: a live communicator.
        check("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(self.0, &raw mut rank) });
        rank as usize
    }

    pub(super) fn size(self) -> usize {
        let mut size = 0;
        // SAFETY: a live communicator.
        check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(self.0, &raw mut size) });
        size as usize
    }

    pub(super) fn barrier(self) {
        // SAFETY: a live communicator.
        begun("MPI_Ibarrier", |request| unsafe { ffi::MPI_Ibarrier(self.0, request) }).wait();
    }

    /// `into[r * n..][..n]` = rank r's `from`, n = `from.len()`, equal on all ranks.
    pub(super) fn all_gather<T: Element>(self, from: &[T], into: &mut [T]) {
        assert_eq!(from.len() * self.size(), into.len());
        let (n, kind, from, into) = (count(from.len()), T::datatype(), start(from), start_mut(into));
        if background::current().is_none() {
            // The blocking call is the shorter way for a thread that has nothing else to do.
            // SAFETY: `from` has n elements, `into` n per rank, and they do not overlap.
            return check("MPI_Allgather", unsafe { ffi::MPI_Allgather(from, n, kind, into, n, kind, self.0) });
        }
        // SAFETY: as above; they live until this has waited.
        begun("MPI_Iallgather", |request| unsafe {
            ffi::MPI_Iallgather(from, n, kind, into, n, kind, self.0, request)
        })
        .wait();
    }

    pub(super) fn broadcast<T: Element>(self, root: usize, data: &mut [T]) {
        let (at, n) = (start_mut(data), count(data.len()));
        // SAFETY: `data` has `n` elements and lives until this has waited.
        begun("MPI_Ibcast", |request| unsafe { ffi::MPI_Ibcast(at, n, T::datatype(), root as c_int, self.0, request) })
            .wait();
    }

    /// Returns when `data` may change. Short data is mostly sent at once. Otherwise this waits for the receive, which
    /// the receiver must have posted before it sends anything itself.
    pub(super) fn send_short<T: Element>(self, to: usize, tag: i32, data: &[T]) {
        // SAFETY: `data` has as many elements as the call names, and the call returns when it was read.
        check("MPI_Send", unsafe {
            ffi::MPI_Send(start(data), count(data.len()), T::datatype(), to as c_int, tag, self.0)
        });
    }

    /// # Safety
    /// `data` lives and is not written until the request was waited for.
    pub(super) unsafe fn send<T: Element>(self, to: usize, tag: i32, data: &[T]) -> Request {
        let (at, n, to) = (start(data), count(data.len()), to as c_int);
        // SAFETY: `data` has as many elements as said; its life is the caller's promise.
        begun("MPI_Isend", |request| unsafe { ffi::MPI_Isend(at, n, T::datatype(), to, tag, self.0, request) })
    }

    /// # Safety
    /// `data` lives and is not touched until the request was waited for.
    pub(super) unsafe fn receive<T: Element>(self, from: usize, tag: i32, data: &mut [T]) -> Request {
        let (at, n, from) = (start_mut(data), count(data.len()), from as c_int);
        // SAFETY: `data` has as many elements as said; its life is the caller's promise.
        begun("MPI_Irecv", |request| unsafe { ffi::MPI_Irecv(at, n, T::datatype(), from, tag, self.0, request) })
    }
}

/// The request that `start` writes. With it, the wait for a collective does not spin on a stream's thread.
fn begun(call: &str, start: impl FnOnce(*mut ffi::MPI_Request) -> c_int) -> Request {
    // SAFETY: a value of the library.
    let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
    check(call, start(&raw mut request));
    Request(request)
}

/// The largest size of a note: a short message that its receiver does not expect.
pub(super) const NOTE_BYTES: usize = 512;
pub(super) const NOTE_TAG: i32 = 11;

impl Comm {
    /// Sends a note without waiting. It never arrives if the receiver is stopped or dead.
    pub(super) fn post_note(self, to: usize, note: Vec<u8>) {
        assert!(note.len() <= NOTE_BYTES);
        let kept: &'static [u8] = note.leak();
        // SAFETY: the buffer lives forever, as the request is never waited for; notes are only sent by a job that is
        // about to end.
        let request = unsafe { self.send(to, NOTE_TAG, kept) };
        std::mem::forget(request);
    }

    /// Takes a message of `N` elements that has arrived from any rank, if there is one. Only one thread at a time may
    /// call this for a tag.
    pub(super) fn receive_note<T: Element, const N: usize>(self, tag: i32) -> Option<[T; N]> {
        let mut there = 0;
        // SAFETY: a live communicator; the status is ignored.
        let code =
            unsafe { ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, tag, self.0, &raw mut there, ffi::RSMPI_STATUS_IGNORE) };
        check("MPI_Iprobe", code);
        if there == 0 {
            return None;
        }
        let mut message = [T::default(); N];
        // SAFETY: the buffer holds a whole message, and the call returns when it is filled.
        check("MPI_Recv", unsafe {
            let (n, kind, status) = (count(N), T::datatype(), ffi::RSMPI_STATUS_IGNORE);
            ffi::MPI_Recv(start_mut(&mut message), n, kind, ffi::RSMPI_ANY_SOURCE, tag, self.0, status)
        });
        Some(message)
    }
}

/// Ends all ranks of the job; the launcher exits with `code`.
pub(super) fn abort(code: i32) {
    // SAFETY: MPI is running (see `World`), with calls from any thread allowed.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
}

impl Drop for Request {
    fn drop(&mut self) {
        // SAFETY: a value of the library.
        if self.0 == unsafe { ffi::RSMPI_REQUEST_NULL } {
            return;
        }
        let rank = environment::launched_rank().unwrap_or(0);
        stderr::line(&format!("error: rank {rank} failed while MPI sent or received its data; all ranks end at once"));
        abort(1);
        std::process::abort();
    }
}

/// The number of polls of a request before the first sleep, with a yield after each.
const POLLS: u32 = 20;
const SLEEP_MIN: Duration = Duration::from_micros(20);
const SLEEP_MAX: Duration = Duration::from_micros(200);

impl Request {
    /// Waits. A compute thread spins, because it has nothing else to do. A stream's thread polls and yields, then
    /// sleeps between polls while others compute: MPI_Wait would take as much of a full core as the computing thread.
    pub(super) fn wait(mut self) {
        if background::current().is_none() {
            // SAFETY: a request of this module, waited for once (self is consumed).
            return check("MPI_Wait", unsafe { ffi::MPI_Wait(&raw mut self.0, ffi::RSMPI_STATUS_IGNORE) });
        }
        let (mut polls, mut sleep) = (0, SLEEP_MIN);
        while !self.is_done() {
            polls += 1;
            if polls < POLLS || background::is_awaited() {
                std::thread::yield_now();
            } else {
                std::thread::sleep(sleep);
                sleep = (2 * sleep).min(SLEEP_MAX);
            }
        }
    }

    fn is_done(&mut self) -> bool {
        let mut done = 0;
        // SAFETY: a live request, or the null one that a test leaves when it was done.
        check("MPI_Test", unsafe { ffi::MPI_Test(&raw mut self.0, &raw mut done, ffi::RSMPI_STATUS_IGNORE) });
        done != 0
    }
}
