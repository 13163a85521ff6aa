//! The GPUs of a group of ranks, one each, joined by NCCL; made over MPI.
//!
//! A collective is launched on the stream to which this thread starts work (`Gpu::beside`) and runs beside the host. All ranks
//! launch the same ones in the same order.
//!
//! Where a graph is captured a collective becomes a part of it, and runs whenever that is launched. What NCCL asks of this is
//! kept so (its user guide, "Using NCCL with CUDA Graphs"):
//!
//! - All ranks of a communicator capture the same calls, and launch the graphs that came of them in the same order: graphs are
//!   captured and chosen by what all tensor ranks know alike (`rollout::graphs`).
//! - GPUs are connected outside of captures: a step of each bucket is done once before one is captured.
//! - Addresses that a captured call got stay valid as long as its graph: they are the graph's own memory or that of tables which
//!   outlive it. NCCL may register them (NCCL_GRAPH_REGISTER); it lets go of them when the graph is destroyed.
//! - No call outside of a graph is launched while a graph of the same communicator is under way: the host has read what the last
//!   step drew, which is copied behind its graph, before it goes on to an ordinary step. So NCCL_GRAPH_MIXING_SUPPORT=0 may be
//!   set. One thread launches graphs, one at a time, on one stream, and a process has one GPU.
//! - A communicator cannot be left before graphs that hold its calls are gone: one that was used is left at the end of the process
//!   alone, and then by a thread for which nobody waits long (`abort_all`).

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
    /// None where there are no peers.
    joined: Option<Joined>,
    pub axis: &'static str,
    pub rank: usize,
    pub size: usize,
    /// Whether anything was launched.
    used: AtomicBool,
}

/// What calls go through.
struct Joined {
    nccl: Arc<Nccl>,
    comm: Handle<ncclComm_t>,
    calls: Mutex<()>,
}

/// All communicators of this process that live, for its end.
static JOINED: Mutex<Vec<(Arc<Nccl>, Handle<ncclComm_t>)>> = Mutex::new(Vec::new());

/// Ends what GPUs are at, so that nothing waits for a rank that is gone. The process ends next.
pub(super) fn abort_all() {
    // One that graphs hold is aborted at once, but not left before they are gone: the others do not wait for it.
    let leave = |(nccl, comm): (Arc<Nccl>, Handle<ncclComm_t>)| {
        std::thread::spawn(move || {
            let comm = comm;
            // SAFETY: a communicator that lives, left once: it is off the list. There is nobody left to tell of a failure.
            let _ = unsafe { (nccl.functions.leave)(comm.0) };
        })
    };
    let leaving: Vec<_> = lock(&JOINED).drain(..).map(leave).collect();
    for thread in leaving {
        let _ = thread.join();
    }
}

/// What went wrong in a collective beside the host: a connection that broke, a peer that left.
pub(super) fn fault() -> Option<String> {
    lock(&JOINED).iter().find_map(|(nccl, comm)| {
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

/// A call of the library, with values of this rank and those of all, which are the same in a call that has no others. `peer` is the
/// other rank, or the root. Whoever makes a call that writes holds the values mutably.
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
    /// `ncclRecv of 256 f32 values from rank 0 of the group`
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
    /// Rank `rank` of `size` GPUs that joined as `comm`, which is this one's to leave.
    pub fn of(nccl: &Arc<Nccl>, comm: Handle<ncclComm_t>, axis: &'static str, rank: usize, size: usize) -> Self {
        lock(&JOINED).push((Arc::clone(nccl), comm));
        let joined = Some(Joined { nccl: Arc::clone(nccl), comm, calls: Mutex::new(()) });
        Self { joined, axis, rank, size, used: AtomicBool::new(false) }
    }

    /// A rank and a size without peers: what it is to launch is launched nowhere.
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
            let message = format!("NCCL over the {} axis, {} ranks: {why}", self.axis, self.size);
            if !gpu().is_noted(&message) {
                let hint = "job.collectives = \"mpi\" does without NCCL";
                std::panic::panic_any(Error::fault(message).hint(hint));
            }
        }
    }

    /// Each (rank, values) of `sends` goes there, each of `receives` comes from there; empty ones are passed over.
    pub fn pass(&self, sends: &[(usize, View)], receives: &[(usize, View)]) {
        let receives = receives.iter().map(|values| (Op::Receive, values));
        let all = receives.chain(sends.iter().map(|values| (Op::Send, values)));
        let full = all.filter(|(_, (_, values))| values.len() > 0);
        let calls = full.map(|(op, &(peer, values))| Call { op, mine: values, all: values, peer });
        self.launch(&calls.collect::<Vec<_>>());
    }

    /// Of `Op::AllGather`, all = the ranks' `mine`, in rank order. Of `Op::ReduceScatter`, mine = this rank's part of the sum over ranks
    /// of `all`. Parts are equally long; `mine` may be this rank's part of `all`.
    pub fn share(&self, op: Op, mine: View, all: View) {
        assert_eq!((all.len(), all.dtype()), (mine.len() * self.size, mine.dtype()), "{op:?}: {mine:?} of {all:?}");
        self.launch(&[Call { op, mine, all, peer: 0 }]);
    }

    /// Part r of x becomes rank r's on all ranks; parts are of any lengths.
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
        // SAFETY: views hold as many values of their dtype. Their memory stays until the work is joined, or as long as the graph
        // that holds the call.
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
        // What was used stays until the process ends: GPUs of other ranks may still be at its last collectives.
        let unused = self.joined.as_ref().filter(|_| !self.used.load(Ordering::Relaxed));
        let Some(Joined { nccl, comm, .. }) = unused else { return };
        let mut all = lock(&JOINED);
        let Some(at) = all.iter().position(|(_, other)| other == comm) else { return };
        all.remove(at);
        drop(all);
        // SAFETY: joined before `of`, left once: it was on the list. There is nobody left to tell of a failure.
        let _ = unsafe { (nccl.functions.leave)(comm.0) };
    }
}
