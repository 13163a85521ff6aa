//! Collectives between GPUs by NCCL, opened at run time. Communicators are made over MPI.
//!
//! A collective is started on the communicator's stream and runs beside the host: who made its values, or uses its result on
//! another stream, orders the two (`Gpu::order`). All ranks start the same ones in the same order.

use super::accounting::enter;
use super::group::Group;
use crate::config::model::DType;
use crate::device::cuda::gpu::Stream;
use crate::device::cuda::library::NCCL;
use crate::device::cuda::nvrtc::reason;
use crate::device::cuda::{Arg, View, ViewMut, gpu};
use crate::error::{Error, Result};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use libloading::Library;
use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Arc;

type Status = c_int;
type Queue = *mut c_void;

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            fn of(library: &Library) -> std::result::Result<Self, String> {
                // SAFETY: the types below are those of nccl.h, the same in all versions 2.
                unsafe {
                    Ok(Self { $($name: *library.get($symbol).map_err(|e| reason(&e))?,)* })
                }
            }
        }
    };
}

functions! {
    version: b"ncclGetVersion\0" (*mut c_int) -> Status;
    words: b"ncclGetErrorString\0" (Status) -> *const c_char;
    unique: b"ncclGetUniqueId\0" (*mut ncclUniqueId) -> Status;
    join: b"ncclCommInitRank\0" (*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> Status;
    leave: b"ncclCommAbort\0" (ncclComm_t) -> Status;
    begin: b"ncclGroupStart\0" () -> Status;
    end: b"ncclGroupEnd\0" () -> Status;
    all_reduce: b"ncclAllReduce\0"
        (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, Queue) -> Status;
    reduce_scatter: b"ncclReduceScatter\0"
        (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, Queue) -> Status;
    all_gather: b"ncclAllGather\0" (*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, Queue) -> Status;
    broadcast: b"ncclBroadcast\0"
        (*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, Queue) -> Status;
    send: b"ncclSend\0" (*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, Queue) -> Status;
    receive: b"ncclRecv\0" (*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, Queue) -> Status;
}

/// An opened library.
pub struct Nccl {
    functions: Functions,
    pub path: OsString,
    /// Major, minor and patch.
    pub version: [i32; 3],
    _library: Library,
}

impl Nccl {
    /// # Errors
    /// Why there is none.
    pub fn open() -> std::result::Result<Self, String> {
        NCCL.open(|path| Self::at(path.as_ref()))
    }

    fn at(path: &Path) -> std::result::Result<Self, String> {
        // SAFETY: the initialisers of NCCL ask nothing of the process that opens it.
        let library = unsafe { Library::new(path) }.map_err(|e| reason(&e))?;
        let functions = Functions::of(&library)?;
        let mut code = 0;
        // SAFETY: writes a number.
        let status = unsafe { (functions.version)(&raw mut code) };
        let mut nccl = Self { functions, path: path.as_os_str().to_owned(), version: [0; 3], _library: library };
        nccl.check("ncclGetVersion", status)?;
        nccl.version = version(code);
        Ok(nccl)
    }

    fn check(&self, call: &str, status: Status) -> std::result::Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library answers any number with a string of its own.
        let words = unsafe { CStr::from_ptr((self.functions.words)(status)) };
        Err(format!("{call}: {} (NCCL_DEBUG=WARN tells more)", words.to_string_lossy()))
    }
}

/// 21903 is 2.19.3; until 2.8 it was 2804.
fn version(code: i32) -> [i32; 3] {
    let minor = if code < 10_000 { 1000 } else { 10_000 };
    [code / minor, code % minor / 100, code % 100]
}

/// The GPUs of a group of ranks, one each.
pub struct Communicator {
    nccl: Arc<Nccl>,
    comm: ncclComm_t,
    stream: Stream,
    axis: &'static str,
    pub rank: usize,
    pub size: usize,
}

// SAFETY: calls on a communicator may come from every thread, one after another; all of them take `&self` of one owner, and
// a rank starts its collectives from one thread so that their order is that of its peers.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins the GPUs of `group`, whose ranks all call this. Its collectives run on `stream`.
    ///
    /// # Errors
    /// `Fault` on all ranks where one of them cannot join.
    pub fn over(nccl: &Arc<Nccl>, group: &Group, stream: Stream) -> Result<Self> {
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
        let joined = {
            let _call = enter(axis, "ncclCommInitRank", 0);
            // SAFETY: the id that all ranks have; the GPU's context is this thread's; writes a handle.
            let status = unsafe { (nccl.functions.join)(&raw mut comm, size as c_int, id, rank as c_int) };
            nccl.check("ncclCommInitRank", status)
        };
        group.agree(joined.map_err(fault))?;
        Ok(Self { nccl: Arc::clone(nccl), comm, stream, axis, rank, size })
    }

    fn queue(&self) -> Queue {
        gpu().stream(self.stream).expect("NCCL needs real GPUs")
    }

    fn must(&self, call: &str, what: impl std::fmt::Debug, status: Status) {
        if let Err(why) = self.nccl.check(call, status) {
            let message = format!("NCCL over the {} axis, {} ranks, {what:?}: {why}", self.axis, self.size);
            std::panic::panic_any(Error::fault(message));
        }
    }

    /// x = sum over ranks of x.
    pub fn all_reduce_sum(&self, x: &mut ViewMut) {
        self.all_reduce(ncclRedOp_t::ncclSum, x);
    }

    /// x = maximum over ranks of x.
    pub fn all_reduce_max(&self, x: &mut ViewMut) {
        self.all_reduce(ncclRedOp_t::ncclMax, x);
    }

    fn all_reduce(&self, op: ncclRedOp_t, x: &mut ViewMut) {
        let (len, dtype) = (x.len(), x.dtype());
        let at = address(x.arg(dtype));
        // SAFETY: the view holds as many values, in and out.
        let status =
            unsafe { (self.nccl.functions.all_reduce)(at, at, len, data_type(dtype), op, self.comm, self.queue()) };
        self.must("ncclAllReduce", x, status);
    }

    /// mine = this rank's part of the sum over ranks of x; parts are equal and in rank order.
    ///
    /// # Panics
    /// If the sizes or dtypes do not fit.
    pub fn reduce_scatter_sum(&self, x: View, mine: &mut ViewMut) {
        let dtype = x.dtype();
        assert_eq!(x.len(), mine.len() * self.size, "reduce_scatter_sum: {x:?} into {mine:?}");
        let (from, to) = (address(x.arg(dtype)), address(mine.arg(dtype)));
        let (sum, dtype, len) = (ncclRedOp_t::ncclSum, data_type(dtype), mine.len());
        // SAFETY: the views hold as many values.
        let status =
            unsafe { (self.nccl.functions.reduce_scatter)(from, to, len, dtype, sum, self.comm, self.queue()) };
        self.must("ncclReduceScatter", mine, status);
    }

    /// all = the ranks' `mine`, in rank order; they are equally long.
    ///
    /// # Panics
    /// If the sizes or dtypes do not fit.
    pub fn all_gather(&self, mine: View, all: &mut ViewMut) {
        let dtype = mine.dtype();
        assert_eq!(all.len(), mine.len() * self.size, "all_gather: {mine:?} into {all:?}");
        let (from, to) = (address(mine.arg(dtype)), address(all.arg(dtype)));
        // SAFETY: the views hold as many values.
        let status = unsafe {
            (self.nccl.functions.all_gather)(from, to, mine.len(), data_type(dtype), self.comm, self.queue())
        };
        self.must("ncclAllGather", mine, status);
    }

    /// x = the root's x.
    pub fn broadcast(&self, root: usize, x: &mut ViewMut) {
        let (len, dtype, root) = (x.len(), x.dtype(), root as c_int);
        let at = address(x.arg(dtype));
        // SAFETY: the view holds as many values.
        let status =
            unsafe { (self.nccl.functions.broadcast)(at, at, len, data_type(dtype), root, self.comm, self.queue()) };
        self.must("ncclBroadcast", x, status);
    }

    /// Sends `mine` to the rank `to` and receives `theirs` from the rank `from`, at once.
    pub fn exchange(&self, mine: View, to: usize, theirs: &mut ViewMut, from: usize) {
        let (f, queue) = (&self.nccl.functions, self.queue());
        let (sent, received) = (mine.dtype(), theirs.dtype());
        let (source, target) = (address(mine.arg(sent)), address(theirs.arg(received)));
        let (to, from) = (to as c_int, from as c_int);
        // SAFETY: the views hold as many values; the two are one step, so that none waits for the other.
        let statuses = unsafe {
            [
                (f.begin)(),
                (f.send)(source, mine.len(), data_type(sent), to, self.comm, queue),
                (f.receive)(target, theirs.len(), data_type(received), from, self.comm, queue),
                (f.end)(),
            ]
        };
        for (call, status) in ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"].into_iter().zip(statuses) {
            self.must(call, (mine, to, from), status);
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Ranks may end at different times: no rank waits for another here.
        // SAFETY: joined above, left once. There is nobody left to tell of a failure.
        let _ = unsafe { (self.nccl.functions.leave)(self.comm) };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_in_both_of_its_spellings() {
        assert_eq!([22304, 21903, 2804].map(version), [[2, 23, 4], [2, 19, 3], [2, 8, 4]]);
    }
}
