//! Host memory that the GPU copies from and to by itself (pinned).

use super::null_driver;
use super::sys::{self, CUevent, CUevent_flags, CUresult, CUstream, Handle, check};
use crate::device::cpu::pool::pool;
use crate::error::{Error, Result, format_bytes};
use crate::sys::pages::{self, page_size};
use std::ffi::c_void;
use std::ptr;

/// Bytes of one piece of the ring.
const PIECE: usize = null_driver::ZEROED_MAX;
const PIECES: usize = 4;
/// Bytes of the ring.
pub const STAGING_BYTES: usize = PIECE * PIECES;
/// Parts begin at multiples of this.
const ALIGN: usize = 256;

/// A run of pinned host memory.
#[derive(Debug)]
pub struct Pages {
    run: pages::Pages,
    pub bytes: usize,
}

const HINT: &str = "free host memory (mesh.offload = [] pins less), or raise the limits on it: ulimit -l for locked \
                    memory, the limit of the container, Slurm's --mem";

impl Pages {
    /// Allocates zeros near the threads of the pool, which touch the pages before they are pinned: the driver alone
    /// would back them one by one. The GPU's context must be current.
    pub fn new(bytes: usize) -> Result<Self> {
        let whole = bytes.max(1).next_multiple_of(page_size());
        let what = || format!("allocating {} of pinned host memory", format_bytes(bytes as u64));
        let is_null = null_driver::is_active();
        let run = if is_null { pages::Pages::untouched(whole) } else { pages::Pages::anonymous(whole) };
        let run = run.ok_or_else(|| Error::fault(format!("{}: the system has no more memory", what())).hint(HINT))?;
        run.keep_from_children();
        let mut pages = Self { run, bytes };
        pool().parts(pages.as_mut_slice(), pages::HUGE, bytes <= pages::HUGE, &|_, part| {
            part.iter_mut().step_by(page_size()).for_each(|byte| *byte = 0);
        });
        // SAFETY: pages of our own, registered once; portable ones serve all threads.
        let status = unsafe { sys::cuMemHostRegister_v2(pages.address(), whole, sys::CU_MEMHOSTREGISTER_PORTABLE) };
        check("cuMemHostRegister", status).map_err(|error| {
            let error = error.within(what());
            if status == CUresult::CUDA_ERROR_OUT_OF_MEMORY { error.hint(HINT) } else { error }
        })?;
        Ok(pages)
    }

    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the pages hold as many bytes, zero at first, and are borrowed.
        unsafe { std::slice::from_raw_parts(self.run.start().as_ptr(), self.bytes) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.run.start().as_ptr(), self.bytes) }
    }

    pub fn address(&self) -> *mut c_void {
        self.run.start().as_ptr().cast()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: our own pages, which go back to the system after this. After a failure the process ends anyway.
        let _ = unsafe { sys::cuMemHostUnregister(self.address()) };
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event(Handle<CUevent>);

impl Event {
    pub fn new() -> Result<Self> {
        Self::with(CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// An event that records when the stream passed it.
    pub fn timed() -> Result<Self> {
        Self::with(CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(flags: CUevent_flags) -> Result<Self> {
        let mut event: CUevent = ptr::null_mut();
        // SAFETY: writes a handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags as u32) })?;
        Ok(Self(Handle(event)))
    }

    /// Whether the stream has passed it. The GPU's context must be current.
    pub fn is_past(&self) -> Result<bool> {
        // SAFETY: a handle that lives.
        match unsafe { sys::cuEventQuery(self.0.0) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => check("cuEventQuery", status).map(|()| true),
        }
    }

    /// Seconds from `earlier` to this event, for timed events that are past; negative if `earlier` was the later one.
    pub fn seconds_since(&self, earlier: &Self) -> Result<f64> {
        let mut milliseconds = 0.0;
        // SAFETY: handles that live; writes a number.
        let status = unsafe { sys::cuEventElapsedTime(&raw mut milliseconds, earlier.0.0, self.0.0) };
        check("cuEventElapsedTime", status).map(|()| f64::from(milliseconds) / 1e3)
    }

    /// Records the event at the end of the work of `stream`, and returns it.
    pub fn recorded(self, stream: CUstream) -> Result<Self> {
        self.record(stream).map(|()| self)
    }

    /// Records the event at the end of the work of `stream`.
    pub fn record(&self, stream: CUstream) -> Result<()> {
        // SAFETY: handles that live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.0.0, stream) })
    }

    /// Lets `stream` wait for it.
    pub fn hold(&self, stream: CUstream) -> Result<()> {
        // SAFETY: handles that live.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, self.0.0, 0) })
    }

    /// Lets this thread wait for it.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: a handle that lives.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.0.0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made above, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0.0) };
    }
}

/// Pieces that are filled in turn; one is filled again when the GPU has read it.
#[derive(Debug)]
pub struct Staging {
    pieces: Vec<(Pages, Event)>,
    /// The piece that is being filled, and how far.
    at: usize,
    filled: usize,
}

impl Staging {
    pub fn new() -> Result<Self> {
        let pieces: Result<Vec<_>> = (0..PIECES).map(|_| Ok((Pages::new(PIECE)?, Event::new()?))).collect();
        Ok(Self { pieces: pieces?, at: 0, filled: 0 })
    }

    /// Copies `from` to the GPU in the order of `stream`; `from` may change when this returns.
    pub fn upload(&mut self, mut to: u64, mut from: &[u8], stream: CUstream) -> Result<()> {
        while !from.is_empty() {
            if self.filled == PIECE {
                self.next(stream)?;
            }
            let (pages, _) = &mut self.pieces[self.at];
            let (part, rest) = from.split_at(from.len().min(PIECE - self.filled));
            pages.as_mut_slice()[self.filled..self.filled + part.len()].copy_from_slice(part);
            // SAFETY: within the piece, which is not written again before the GPU has read it; views hold their bounds.
            let status =
                unsafe { sys::cuMemcpyHtoDAsync_v2(to, pages.address().byte_add(self.filled), part.len(), stream) };
            check("cuMemcpyHtoDAsync", status)?;
            self.filled = (self.filled + part.len()).next_multiple_of(ALIGN);
            to += part.len() as u64;
            from = rest;
        }
        Ok(())
    }

    /// Copies from the GPU after the earlier work of `stream`, and waits for the copy.
    pub fn download(&mut self, to: &mut [u8], mut from: u64, stream: CUstream) -> Result<()> {
        for part in to.chunks_mut(PIECE) {
            self.next(stream)?;
            let (pages, event) = &mut self.pieces[self.at];
            // SAFETY: the piece holds as many bytes and nothing reads it; views hold their bounds.
            let status = unsafe { sys::cuMemcpyDtoHAsync_v2(pages.address(), from, part.len(), stream) };
            check("cuMemcpyDtoHAsync", status)?;
            event.record(stream)?;
            event.wait()?;
            part.copy_from_slice(&pages.as_slice()[..part.len()]);
            from += part.len() as u64;
        }
        Ok(())
    }

    /// Leaves the piece to the GPU and continues with the next one, once that has been read.
    fn next(&mut self, stream: CUstream) -> Result<()> {
        self.pieces[self.at].1.record(stream)?;
        self.at = (self.at + 1) % PIECES;
        self.filled = 0;
        // An event that was never recorded is over.
        self.pieces[self.at].1.wait()
    }
}
