//! The GPUs of a group of ranks, one each, joined by NCCL; made over MPI.
//!
//! A collective is launched on the stream to which this thread starts work (`Gpu::beside`) and runs beside the host. All ranks
//! launch the same ones in the same order.

use super::accounting::enter;
use super::group::Group;
use super::nccl::{Nccl, Status};
use crate::config::model::DType;
use crate::device::cuda::{Arg, View, ViewMut, gpu};
use crate::error::{Error, Result};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use std::ffi::{c_char, c_int, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A communicator of the library.
#[derive(Clone, Copy, PartialEq)]
struct Handle(ncclComm_t);

// SAFETY: calls on a communicator may come from every thread, one after another (`Communicator::calls`); an abort at any time.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

pub(super) struct Communicator {
    nccl: Arc<Nccl>,
    comm: Handle,
    axis: &'static str,
    pub rank: usize,
    pub size: usize,
    calls: Mutex<()>,
    /// Whether anything was launched.
    used: AtomicBool,
}

/// All communicators of this process that live, for its end.
static JOINED: Mutex<Vec<(Arc<Nccl>, Handle)>> = Mutex::new(Vec::new());

fn joined() -> MutexGuard<'static, Vec<(Arc<Nccl>, Handle)>> {
    JOINED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends what GPUs are at, so that nothing waits for a rank that is gone. The process ends next.
pub(super) fn abort_all() {
    for (nccl, comm) in joined().drain(..) {
        // SAFETY: a communicator that lives, left once: it is off the list. There is nobody left to tell of a failure.
        let _ = unsafe { (nccl.functions.leave)(comm.0) };
    }
}

/// What went wrong in a collective beside the host: a connection that broke, a peer that left.
pub(super) fn fault() -> Option<String> {
    joined().iter().find_map(|(nccl, comm)| {
        let mut status: Status = 0;
        // SAFETY: a communicator that lives; writes a number.
        let asked = unsafe { (nccl.functions.fault)(comm.0, &raw mut status) };
        let under_way = status == IN_PROGRESS;
        let told = nccl.check("ncclCommGetAsyncError", asked).and_then(|()| nccl.check("a collective", status));
        told.err().filter(|_| !under_way)
    })
}

/// The status of a communicator that is at work.
const IN_PROGRESS: Status = 7;

/// A run of values that a call takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    address: *mut c_void,
    len: usize,
    dtype: DType,
}

impl Span {
    pub fn of(values: View) -> Self {
        gpu().uses(&values);
        Self { address: address(values.arg(values.dtype())), len: values.len(), dtype: values.dtype() }
    }

    pub fn of_mut(values: &mut ViewMut) -> Self {
        let dtype = values.dtype();
        gpu().uses_mut(values);
        Self { address: address(values.arg(dtype)), len: values.len(), dtype }
    }

    /// # Panics
    /// If the range lies outside.
    pub fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "values {range:?} of {}", self.len);
        let address = self.address.wrapping_byte_add(range.start * self.dtype.bytes());
        Self { address, len: range.len(), dtype: self.dtype }
    }
}

impl Communicator {
    /// Joins the GPUs of `group`, whose ranks all call this.
    ///
    /// # Errors
    /// `Fault` on all ranks where one of them cannot join.
    pub fn over(nccl: &Arc<Nccl>, group: &Group) -> Result<Self> {
        let (rank, size, axis) = (group.rank(), group.size(), group.axis());
        let mut id = ncclUniqueId { internal: [0; 128] };
        let fault = |why: String| Error::fault(format!("NCCL over the {axis} axis: {why}"));
        let made = match rank {
            // SAFETY: writes the id.
            0 => nccl.check("ncclGetUniqueId", unsafe { (nccl.functions.unique)(&raw mut id) }),
            _ => Ok(()),
        };
        group.agree(made.map_err(fault))?;
        let mut bytes: Vec<u8> = id.internal.iter().map(|byte| *byte as u8).collect();
        group.broadcast_bytes(0, &mut bytes);
        for (to, from) in id.internal.iter_mut().zip(&bytes) {
            *to = *from as c_char;
        }
        let mut comm: ncclComm_t = ptr::null_mut();
        let outcome = {
            let _call = enter(axis, "ncclCommInitRank", 0);
            // SAFETY: the id that all ranks have; the GPU's context is this thread's; writes a handle.
            let status = unsafe { (nccl.functions.join)(&raw mut comm, size as c_int, id, rank as c_int) };
            nccl.check("ncclCommInitRank", status)
        };
        // One that joined where another could not leaves again.
        let own = outcome.map_err(fault).map(|()| {
            let comm = Handle(comm);
            joined().push((Arc::clone(nccl), comm));
            Self { nccl: Arc::clone(nccl), comm, axis, rank, size, calls: Mutex::new(()), used: AtomicBool::new(false) }
        });
        group.agree(own)
    }

    fn must(&self, call: &str, what: impl std::fmt::Debug, status: Status) {
        if let Err(why) = self.nccl.check(call, status) {
            let message = format!("NCCL over the {} axis, {} ranks, {what:?}: {why}", self.axis, self.size);
            std::panic::panic_any(Error::fault(message));
        }
    }

    /// Launches what `body` calls as one.
    fn grouped(&self, body: impl FnOnce()) {
        self.used.store(true, Ordering::Relaxed);
        let _one = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: ends below, on the same thread.
        self.must("ncclGroupStart", (), unsafe { (self.nccl.functions.begin)() });
        body();
        // SAFETY: begun above.
        self.must("ncclGroupEnd", (), unsafe { (self.nccl.functions.end)() });
    }

    /// Each (rank, values) of `sends` goes there, each of `receives` comes from there; empty ones are passed over.
    pub fn pass(&self, sends: &[(usize, Span)], receives: &[(usize, Span)]) {
        let (f, queue) = (&self.nccl.functions, gpu().queue());
        let full = |(_, span): &&(usize, Span)| span.len > 0;
        self.grouped(|| {
            for (from, Span { address, len, dtype }) in receives.iter().filter(full) {
                let from = *from as c_int;
                // SAFETY: the span holds as many values, and memory stays until the work is joined.
                let status = unsafe { (f.receive)(*address, *len, data_type(*dtype), from, self.comm.0, queue) };
                self.must("ncclRecv", (len, from), status);
            }
            for (to, Span { address, len, dtype }) in sends.iter().filter(full) {
                let to = *to as c_int;
                // SAFETY: as above.
                let status = unsafe { (f.send)(*address, *len, data_type(*dtype), to, self.comm.0, queue) };
                self.must("ncclSend", (len, to), status);
            }
        });
    }

    /// all = the ranks' `mine`, in rank order; they are equally long. `mine` may be this rank's part of `all`.
    pub fn all_gather(&self, mine: Span, all: Span) {
        assert_eq!((all.len, all.dtype), (mine.len * self.size, mine.dtype), "all_gather: {mine:?} into {all:?}");
        let (kind, queue) = (data_type(mine.dtype), gpu().queue());
        self.grouped(|| {
            let call = self.nccl.functions.all_gather;
            // SAFETY: the spans hold as many values, and memory stays until the work is joined.
            let status = unsafe { call(mine.address, all.address, mine.len, kind, self.comm.0, queue) };
            self.must("ncclAllGather", mine, status);
        });
    }

    /// mine = this rank's part of the sum over ranks of `all`; parts are equally long. `mine` may be that part of `all`.
    pub fn reduce_scatter(&self, all: Span, mine: Span) {
        assert_eq!((all.len, all.dtype), (mine.len * self.size, mine.dtype), "reduce_scatter: {all:?} into {mine:?}");
        let (kind, sum, queue) = (data_type(mine.dtype), ncclRedOp_t::ncclSum, gpu().queue());
        self.grouped(|| {
            let call = self.nccl.functions.reduce_scatter;
            // SAFETY: as above.
            let status = unsafe { call(all.address, mine.address, mine.len, kind, sum, self.comm.0, queue) };
            self.must("ncclReduceScatter", mine, status);
        });
    }

    /// Part r of x becomes rank r's, on all ranks; parts are of any lengths.
    pub fn broadcast_each(&self, x: Span, parts: &[Range<usize>]) {
        let queue = gpu().queue();
        self.grouped(|| {
            for (root, part) in parts.iter().enumerate().filter(|(_, part)| !part.is_empty()) {
                let Span { address, len, dtype } = x.part(part.clone());
                let (kind, root) = (data_type(dtype), root as c_int);
                let call = self.nccl.functions.broadcast;
                // SAFETY: as above.
                let status = unsafe { call(address, address, len, kind, root, self.comm.0, queue) };
                self.must("ncclBroadcast", (len, root), status);
            }
        });
    }

    /// Part r of x becomes the sum over ranks, on rank r; parts are of any lengths.
    pub fn reduce_each(&self, x: Span, parts: &[Range<usize>]) {
        let (sum, queue) = (ncclRedOp_t::ncclSum, gpu().queue());
        self.grouped(|| {
            for (root, part) in parts.iter().enumerate().filter(|(_, part)| !part.is_empty()) {
                let Span { address, len, dtype } = x.part(part.clone());
                let (kind, root) = (data_type(dtype), root as c_int);
                let call = self.nccl.functions.reduce;
                // SAFETY: as above.
                let status = unsafe { call(address, address, len, kind, sum, root, self.comm.0, queue) };
                self.must("ncclReduce", (len, root), status);
            }
        });
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // What was used stays until the process ends: GPUs of other ranks may still be at its last collectives.
        if self.used.load(Ordering::Relaxed) {
            return;
        }
        let mut joined = joined();
        let Some(at) = joined.iter().position(|(_, comm)| *comm == self.comm) else { return };
        joined.remove(at);
        drop(joined);
        // SAFETY: joined in `over`, left once: it was on the list. There is nobody left to tell of a failure.
        let _ = unsafe { (self.nccl.functions.leave)(self.comm.0) };
    }
}

fn address(arg: Arg) -> *mut c_void {
    match arg {
        Arg::Address(address) => address as *mut c_void,
        other => unreachable!("a view is passed by its address, not as {other:?}"),
    }
}

fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
        DType::F32 => ncclDataType_t::ncclFloat32,
    }
}
