//! Initializes the NCCL communicator of a group. The library's call blocks until all ranks have made it, so it runs on
//! a thread of its own. Meanwhile the ranks exchange their progress over MPI. So all of them know at once which rank
//! cannot join, and why.
//!
//! The library can also join asynchronously (`ncclCommInitRankConfig`, blocking = 0). But then a thread of the library
//! makes every later call, and its status has to be polled. That costs too much for the sums of each layer.

use super::accounting::begin_call;
use super::communicator::Communicator;
use super::group::{Group, list_ranks};
use super::nccl::Nccl;
use super::records;
use crate::device::cuda::{Handle, gpu};
use crate::error::{Error, Result};
use cudarc::nccl::sys::{ncclComm_t, ncclUniqueId};
use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;
use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// The wait between two exchanges of progress, at first and at most.
const FIRST_WAIT: Duration = Duration::from_micros(200);
const LONGEST_WAIT: Duration = Duration::from_millis(20);

pub(super) const CALL: &str = "ncclCommInitRank";

/// Seconds that the ranks of a group have to join. 8 GPUs take about one. Ranks that do not find each other's interface
/// or adapter wait forever.
const LIMIT_S: f64 = 90.0;
/// The variable that sets another limit, for worlds of thousands of ranks.
const LIMIT: &str = "RLHF_NCCL_JOIN_S";
/// The marker of the message about a timeout. A thread still runs in NCCL then, so the process must end.
pub(super) const LATE: &str = ": ncclCommInitRank did not return within ";

type Outcome = std::result::Result<Handle<ncclComm_t>, String>;

/// Whether a rank has joined, or the reason if it cannot; `None` while it is joining.
type Progress = Option<std::result::Result<(), String>>;

fn limit_s() -> f64 {
    let set = std::env::var(LIMIT).ok().and_then(|text| text.parse().ok());
    set.filter(|seconds| *seconds > 0.0).unwrap_or(LIMIT_S)
}

/// Joins the GPUs of `group`, whose ranks all call this.
///
/// # Errors
/// `Fault` on all ranks if one of them cannot join.
pub(super) fn join_group(nccl: &Arc<Nccl>, group: &Group) -> Result<Communicator> {
    let (rank, size, axis) = (group.rank(), group.size(), group.axis());
    let mut id = ncclUniqueId { internal: [0; 128] };
    let fault = |why: String| Error::fault(format!("NCCL initialization failed on the {axis} axis: {why}"));
    let made = match rank {
        // SAFETY: writes the id.
        0 => nccl.check("ncclGetUniqueId", unsafe { (nccl.functions.unique)(&raw mut id) }),
        _ => Ok(()),
    };
    group.agree(made.map_err(fault))?;
    let mut bytes = bytemuck::cast_slice(&id.internal).to_vec();
    group.broadcast_bytes(0, &mut bytes);
    id.internal.copy_from_slice(bytemuck::cast_slice(&bytes));
    let own = joined_by_all(nccl, group, id).map_err(fault);
    group.agree(own.map(|comm| Communicator::from_handle(nccl, comm, axis, rank, size)))
}

/// Returns this rank's communicator after all ranks of `group` have joined. All of them call this.
///
/// # Errors
/// The rank that could not join, and the reason: the same on all ranks. Then no rank keeps a communicator.
fn joined_by_all(nccl: &Arc<Nccl>, group: &Group, id: ncclUniqueId) -> Outcome {
    // The watchdog limits the total time.
    let _call = begin_call(group.axis(), CALL, 0);
    let (sender, receiver) = channel();
    let (library, size, rank) = (Arc::clone(nccl), group.size() as c_int, group.rank() as c_int);
    let started = Builder::new().name("join".into()).spawn(move || join(&library, &sender, size, rank, id));
    let mut outcome = started.err().map(|why| Err(format!("{CALL}: cannot start a thread: {why}")));
    let (mut wait, since, limit_s) = (FIRST_WAIT, Instant::now(), limit_s());
    loop {
        // `None` while this rank is still joining.
        let mine = outcome.as_ref().map(|outcome| outcome.as_ref().map(|_| ()).map_err(String::clone));
        let is_over = since.elapsed().as_secs_f64() > limit_s;
        let all = records::gather(group, &[(mine, is_over)]).expect("a peer of the same build wrote it");
        let (all, over): (Vec<Progress>, Vec<bool>) = all.into_iter().unzip();
        if let Some((rank, Some(Err(why)))) = all.iter().enumerate().find(|(_, mine)| matches!(mine, Some(Err(_)))) {
            if let Some(Ok(comm)) = outcome.or_else(|| receiver.try_recv().ok()) {
                leave(nccl, comm);
            }
            let rank = group.world_ranks().nth(rank).unwrap_or(rank);
            return Err(format!("rank {rank}: {why}"));
        }
        if all.iter().all(Option::is_some) {
            return outcome.expect("this rank has joined, too");
        }
        if over.contains(&true) {
            let late = group.world_ranks().zip(&all).filter(|(_, mine)| mine.is_none()).map(|(rank, _)| rank);
            let late = list_ranks(&late.collect::<Vec<_>>());
            return Err(format!("{late} of {}{LATE}{limit_s} s", group.size()));
        }
        std::thread::sleep(wait);
        wait = (2 * wait).min(LONGEST_WAIT);
        if outcome.is_none() {
            outcome = match receiver.try_recv() {
                Ok(outcome) => Some(outcome),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(Err(format!("{CALL} ended without a result"))),
            };
        }
    }
}

/// The call of the library, on a thread of its own. If the caller no longer waits for the outcome, another rank has
/// failed. A communicator that was joined nevertheless is left.
fn join(nccl: &Arc<Nccl>, to: &Sender<Outcome>, size: c_int, rank: c_int, id: ncclUniqueId) {
    let outcome = gpu().enter().and_then(|()| {
        let mut comm: ncclComm_t = ptr::null_mut();
        // SAFETY: the id that all ranks have; the GPU's context is this thread's; writes a handle.
        let status = unsafe { (nccl.functions.join)(&raw mut comm, size, id, rank) };
        nccl.check(CALL, status).map(|()| Handle(comm))
    });
    if let Err(unheard) = to.send(outcome)
        && let Ok(comm) = unheard.0
    {
        leave(nccl, comm);
    }
}

fn leave(nccl: &Nccl, comm: Handle<ncclComm_t>) {
    // SAFETY: initialised, and not shared. A failure cannot be reported any more.
    let _ = unsafe { (nccl.functions.leave)(comm.0) };
}
