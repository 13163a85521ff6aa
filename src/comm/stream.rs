//! Communication in the background: a thread that runs jobs in the order they were submitted, with groups of its own.
//!
//! A stream's groups duplicate those it was made from, so its collectives never mix with those of other threads. All ranks
//! submit the same jobs in the same order. Where no group has a peer there is no thread: a job runs where it is submitted. So it
//! does with NCCL: it launches its collectives on a stream of the GPU, after what the compute stream has been given, and the
//! compute stream waits for them where the host would (`Pending::wait`). Memory that they use may be dropped before.

use super::group::Group;
use super::{accounting, background};
use crate::device::cuda::{self, Work, gpu};
use crate::device::null;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

/// The stream that has a GPU stream of its own; others share that of ZeRO.
pub(super) const RING: &str = "ring";

type Job = Box<dyn FnOnce(&[Group]) + Send>;

/// Ends when dropped, after all that was submitted; drop it before `shutdown`.
pub struct Stream {
    name: &'static str,
    /// What waits are booked under.
    axis: &'static str,
    /// The groups of jobs that run in place.
    groups: Vec<Group>,
    /// Of other jobs; none where no group has a peer.
    thread: Option<(Sender<Job>, JoinHandle<()>)>,
}

/// What a submitted job will return.
#[must_use]
pub struct Pending<T> {
    value: Value<T>,
    axis: &'static str,
    stream: &'static str,
    /// What the job launched on a GPU.
    work: Option<Work>,
}

enum Value<T> {
    Here(T),
    /// The stream's thread sends it; it hangs up where the job, or one before it, panicked.
    Coming(Receiver<T>),
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({} over {})", self.name, self.axis)
    }
}

impl Stream {
    /// A stream whose jobs see duplicates of `groups`. All ranks of each group call this, groups in the same order.
    ///
    /// # Panics
    /// Without groups, or if the system starts no more threads.
    pub fn new(name: &'static str, groups: &[&Group]) -> Self {
        let axis = groups.iter().find(|g| g.size() > 1).or(groups.first()).expect("a stream has a group").axis();
        let groups: Vec<Group> = groups.iter().map(|g| g.duplicate()).collect();
        if groups.iter().all(|g| g.size() == 1 || g.is_null()) {
            return Self { name, axis, groups, thread: None };
        }
        let (sender, receiver) = channel();
        let own = groups.clone();
        let thread = std::thread::Builder::new()
            .name(format!("stream {name}"))
            .spawn(move || work(name, &own, &receiver))
            .expect("the system starts a thread");
        Self { name, axis, groups, thread: Some((sender, thread)) }
    }

    /// Whether jobs launch their collectives on the GPU's stream. The same on all ranks.
    fn has_nccl(&self) -> bool {
        let mut several = self.groups.iter().filter(|group| group.size() > 1).peekable();
        several.peek().is_some() && several.all(Group::has_nccl)
    }

    /// The GPU's stream of jobs that run in place.
    fn of_gpu(&self) -> cuda::Stream {
        if self.name == RING { cuda::Stream::Ring } else { cuda::Stream::Zero }
    }

    /// Runs `job` after all jobs submitted before it. A panic in it ends the job of all ranks, as one elsewhere does.
    pub fn submit<T: Send + 'static>(&self, job: impl FnOnce(&[Group]) -> T + Send + 'static) -> Pending<T> {
        if self.has_nccl() {
            let (value, work) = gpu().beside(self.of_gpu(), || null::hidden(|| job(&self.groups)));
            accounting::begin_async(accounting::as_of(self.axis, self.name), work.marks());
            return self.pending(Value::Here(value), Some(work));
        }
        let Some((sender, _)) = &self.thread else {
            return self.pending(Value::Here(null::hidden(|| job(&self.groups))), None);
        };
        let (done, receiver) = sync_channel(1);
        // A thread that is gone drops the job: `wait` says so. Nobody has to wait for the value.
        let _ = sender.send(Box::new(move |groups| drop(done.send(job(groups)))));
        self.pending(Value::Coming(receiver), None)
    }

    fn pending<T>(&self, value: Value<T>, work: Option<Work>) -> Pending<T> {
        Pending { value, axis: self.axis, stream: self.name, work }
    }
}

fn work(name: &'static str, groups: &[Group], jobs: &Receiver<Job>) {
    background::belong_to(name);
    for job in jobs {
        job(groups);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Some((sender, thread)) = self.thread.take() else { return };
        drop(sender);
        let start = Instant::now();
        let ended = thread.join();
        accounting::waited(self.axis, self.name, start.elapsed().as_secs_f64());
        assert!(ended.is_ok() || std::thread::panicking(), "a job of stream {} panicked", self.name);
    }
}

impl<T> Pending<T> {
    /// Whether `wait` would return at once.
    pub fn is_ready(&mut self) -> bool {
        if let Value::Coming(receiver) = &self.value
            && let Ok(value) = receiver.try_recv()
        {
            self.value = Value::Here(value);
        }
        matches!(self.value, Value::Here(_))
    }

    /// What the job returned. The time until it has is exposed communication. On a GPU the compute stream waits for it, not
    /// the host.
    ///
    /// # Panics
    /// If the job panicked.
    pub fn wait(self) -> T {
        if let Some(work) = self.work {
            work.join();
        }
        let receiver = match self.value {
            Value::Here(value) => return value,
            Value::Coming(receiver) => receiver,
        };
        let value = receiver.try_recv().or_else(|_| {
            let start = Instant::now();
            let value = background::awaiting(|| receiver.recv());
            accounting::waited(self.axis, self.stream, start.elapsed().as_secs_f64());
            value
        });
        value.unwrap_or_else(|_| panic!("a job of stream {} panicked", self.stream))
    }
}
