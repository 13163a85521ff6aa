//! The GPUs of a group of ranks, one each, joined by NCCL. The communicator is set up over MPI.
//!
//! A collective is launched on this thread's current stream (`Gpu::beside`) and runs asynchronously to the host. All
//! ranks launch the same collectives in the same order.
//!
//! During the capture of a graph, a collective becomes a part of the graph and runs at each launch. The requirements of
//! NCCL for this (its user guide, "Using NCCL with CUDA Graphs") are met as follows:
//!
//! - All ranks of a communicator capture the same calls, and launch their graphs in the same order. Graphs are
//!   captured and chosen by state that is equal on all tensor ranks (`rollout::graphs`).
//! - GPUs are connected outside of captures: a step of each bucket runs once before one is captured.
//! - Addresses in a captured call stay valid as long as its graph. They are the graph's own memory or belong to tables
//!   that outlive it. NCCL may register them (NCCL_GRAPH_REGISTER) and releases them when the graph is destroyed.
//! - No call outside of a graph is launched while a graph of the same communicator is in flight. Before an ordinary
//!   step, the host reads the tokens of the last step, which are copied after its graph. So NCCL_GRAPH_MIXING_SUPPORT=0
//!   may be set. One thread launches graphs, one at a time, on one stream, and a process has one GPU.
//! - A communicator cannot be left while graphs with its calls exist. So a used communicator is left only at the end of
//!   the process, by a thread that is waited for only briefly (`abort_all`).

use super::nccl::{Nccl, Status};
use crate::device::cuda::{Handle, View, gpu};
use crate::dtype::DType;
use crate::error::Error;
use crate::sys::lock::lock;
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

pub(super) struct Communicator {
    /// `None` without peers.
    joined: Option<Joined>,
    pub axis: &'static str,
    pub rank: usize,
    pub size: usize,
    /// Whether any call was launched.
    used: AtomicBool,
}

/// The library and the handle for calls.
struct Joined {
    nccl: Arc<Nccl>,
    comm: Handle<ncclComm_t>,
    calls: Mutex<()>,
}

/// All live communicators of this process, for its end.
static JOINED: Mutex<Vec<(Arc<Nccl>, Handle<ncclComm_t>)>> = Mutex::new(Vec::new());

/// Aborts the collectives in flight, so that nothing waits for a rank that is gone. The process ends next.
pub(super) fn abort_all() {
    // A communicator that graphs hold is aborted at once, but is left only after they are gone. The other
    // communicators do not wait for it.
    let leave = |(nccl, comm): (Arc<Nccl>, Handle<ncclComm_t>)| {
        std::thread::spawn(move || {
            let comm = comm;
            // SAFETY: a communicator that lives, left once: it is off the list. A failure cannot be reported any more.
            let _ = unsafe { (nccl.functions.leave)(comm.0) };
        })
    };
    let leaving: Vec<_> = lock(&JOINED).drain(..).map(leave).collect();
    for thread in leaving {
        let _ = thread.join();
    }
}

/// The error of an asynchronous collective, if any: a broken connection, or a peer that left.
pub(super) fn fault() -> Option<String> {
    lock(&JOINED).iter().find_map(|(nccl, comm)| {
        let mut status: Status = 0;
        // SAFETY: a communicator that lives; writes a number.
        let asked = unsafe { (nccl.functions.fault)(comm.0, &raw mut status) };
        let under_way = status == IN_PROGRESS;
        let result = nccl.check("ncclCommGetAsyncError", asked).and_then(|()| nccl.check("a collective", status));
        result.err().filter(|_| !under_way)
    })
}

/// The status of a communicator with calls in progress.
const IN_PROGRESS: Status = 7;

/// A call of the library, with the values of this rank and of all ranks. Both are the same if the call has only one
/// buffer. `peer` is the other rank or the root. The maker of a writing call borrows the values mutably.
#[derive(Clone, Copy, Debug)]
struct Call<'a> {
    op: Op,
    mine: View<'a>,
    all: View<'a>,
    peer: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Op {
    Receive,
    Send,
    AllGather,
    ReduceScatter,
    Broadcast,
}

impl fmt::Display for Call<'_> {
    /// Describes the call: `ncclRecv of 256 f32 values from rank 0 of the group`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, way) = match self.op {
            Op::Receive => ("ncclRecv", "from"),
            Op::Send => ("ncclSend", "to"),
            Op::AllGather => ("ncclAllGather", ""),
            Op::ReduceScatter => ("ncclReduceScatter", ""),
            Op::Broadcast => ("ncclBroadcast", "of"),
        };
        write!(f, "{name} of {} {} values", self.mine.len(), self.mine.dtype().name())?;
        if way.is_empty() { Ok(()) } else { write!(f, " {way} rank {} of the group", self.peer) }
    }
}

impl Communicator {
    /// Rank `rank` of `size` GPUs joined as `comm`. Takes ownership of `comm`.
    pub fn from_handle(
        nccl: &Arc<Nccl>,
        comm: Handle<ncclComm_t>,
        axis: &'static str,
        rank: usize,
        size: usize,
    ) -> Self {
        lock(&JOINED).push((Arc::clone(nccl), comm));
        let joined = Some(Joined { nccl: Arc::clone(nccl), comm, calls: Mutex::new(()) });
        Self { joined, axis, rank, size, used: AtomicBool::new(false) }
    }

    /// A rank and a size without peers. Launches do nothing.
    pub fn null(axis: &'static str, rank: usize, size: usize) -> Self {
        Self { joined: None, axis, rank, size, used: AtomicBool::new(false) }
    }

    /// Launches `calls` as one.
    fn launch(&self, calls: &[Call]) {
        for call in calls {
            gpu().uses(&call.mine);
            gpu().uses(&call.all);
        }
        let Some(joined) = &self.joined else { return };
        self.used.store(true, Ordering::Relaxed);
        if let Err(why) = gpu().enter().and_then(|()| joined.launch(calls, gpu().queue().cast())) {
            let message = format!("NCCL failed on the {} axis ({} ranks): {why}", self.axis, self.size);
            if !gpu().is_noted(&message) {
                let hint = "set job.collectives = \"mpi\" to run without NCCL";
                std::panic::panic_any(Error::fault(message).hint(hint));
            }
        }
    }

    /// Sends the values of each (rank, values) in `sends` to its rank, and receives those in `receives`. Empty ones are
    /// skipped.
    pub fn pass(&self, sends: &[(usize, View)], receives: &[(usize, View)]) {
        let receives = receives.iter().map(|values| (Op::Receive, values));
        let all = receives.chain(sends.iter().map(|values| (Op::Send, values)));
        let full = all.filter(|(_, (_, values))| values.len() > 0);
        let calls = full.map(|(op, &(peer, values))| Call { op, mine: values, all: values, peer });
        self.launch(&calls.collect::<Vec<_>>());
    }

    /// Runs `op` with equally long parts. `Op::AllGather`: all = the ranks' `mine`, in rank order. `Op::ReduceScatter`:
    /// mine = this rank's part of the sum over ranks of `all`. `mine` may be this rank's part of `all`.
    pub fn share(&self, op: Op, mine: View, all: View) {
        assert_eq!((all.len(), all.dtype()), (mine.len() * self.size, mine.dtype()), "{op:?}: {mine:?} of {all:?}");
        self.launch(&[Call { op, mine, all, peer: 0 }]);
    }

    /// Copies part r of x from rank r to all ranks. Parts may have any lengths.
    pub fn broadcast_each(&self, x: View, parts: &[Range<usize>]) {
        let full = parts.iter().enumerate().filter(|(_, part)| !part.is_empty());
        let call = |(peer, part): (usize, &Range<usize>)| {
            let values = x.part(part.clone());
            Call { op: Op::Broadcast, mine: values, all: values, peer }
        };
        self.launch(&full.map(call).collect::<Vec<_>>());
    }
}

impl Joined {
    /// Launches `calls` as one on a stream.
    fn launch(&self, calls: &[Call], queue: *mut c_void) -> std::result::Result<(), String> {
        let _one = lock(&self.calls);
        let f = &self.nccl.functions;
        // SAFETY: ends below, on the same thread.
        self.nccl.check("ncclGroupStart", unsafe { (f.begin)() })?;
        let called = calls.iter().try_for_each(|call| {
            let status = self.call(call, queue);
            self.nccl.check(&call.to_string(), status)
        });
        // SAFETY: begun above; one that holds a call that failed ends, too.
        let ended = self.nccl.check("ncclGroupEnd", unsafe { (f.end)() });
        called.and(ended)
    }

    fn call(&self, call: &Call, queue: *mut c_void) -> Status {
        let (f, comm, sum) = (&self.nccl.functions, self.comm.0, ncclRedOp_t::ncclSum);
        let (op, len, peer) = (call.op, call.mine.len(), call.peer as c_int);
        let [mine, all] = [call.mine, call.all].map(|values| values.address() as *mut c_void);
        let kind = match call.mine.dtype() {
            DType::Bf16 => ncclDataType_t::ncclBfloat16,
            DType::F32 => ncclDataType_t::ncclFloat32,
        };
        // SAFETY: views hold as many values of their dtype. Their memory stays until the work is joined, or as long as
        // the graph that holds the call.
        unsafe {
            match op {
                Op::Receive => (f.receive)(mine, len, kind, peer, comm, queue),
                Op::Send => (f.send)(mine, len, kind, peer, comm, queue),
                Op::AllGather => (f.all_gather)(mine, all, len, kind, comm, queue),
                Op::ReduceScatter => (f.reduce_scatter)(all, mine, len, kind, sum, comm, queue),
                Op::Broadcast => (f.broadcast)(mine, mine, len, kind, peer, comm, queue),
            }
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // A used communicator stays until the process ends: GPUs of other ranks may still be at its last collectives.
        let unused = self.joined.as_ref().filter(|_| !self.used.load(Ordering::Relaxed));
        let Some(Joined { nccl, comm, .. }) = unused else { return };
        let mut all = lock(&JOINED);
        let Some(at) = all.iter().position(|(_, other)| other == comm) else { return };
        all.remove(at);
        drop(all);
        // SAFETY: joined before `of`, left once: it was on the list. A failure cannot be reported any more.
        let _ = unsafe { (nccl.functions.leave)(comm.0) };
    }
}
