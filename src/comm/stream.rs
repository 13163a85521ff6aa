//! Communication in the background: a thread that runs jobs in the order of submission, with a group of its own.
//!
//! A stream's group duplicates the group from which it was made, so its collectives never mix with those of other
//! threads. All ranks submit the same jobs in the same order. If the group has no peer, there is no thread, and a job
//! runs at its submission.
//!
//! With NCCL a job also runs at its submission. It launches its collectives on a GPU stream, after all earlier work of
//! the compute stream. `Pending::wait` makes the compute stream wait for them instead of the host. Memory that they use
//! may be dropped before.

use super::group::Group;
use super::{accounting, background};
use crate::device::cuda::{self, Work, gpu};
use crate::device::null;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

/// The stream with a GPU stream of its own. Others share the GPU stream of ZeRO.
pub(super) const RING: &str = "ring";

type Job = Box<dyn FnOnce(&Group) + Send>;

/// A background stream. Dropping it waits for all submitted jobs. Drop it before `shutdown`.
pub struct Stream {
    name: &'static str,
    /// The group of jobs that run at submission. Waits are booked under its axis.
    group: Group,
    /// The thread of other jobs. `None` if the group has no peer.
    thread: Option<(Sender<Job>, JoinHandle<()>)>,
}

/// The pending result of a submitted job.
#[must_use]
pub struct Pending<T> {
    value: Value<T>,
    axis: &'static str,
    stream: &'static str,
    /// The work that the job launched on a GPU.
    work: Option<Work>,
}

enum Value<T> {
    Here(T),
    /// The stream's thread sends the value. It hangs up if the job, or one before it, panicked.
    Coming(Receiver<T>),
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({} over {})", self.name, self.group.axis())
    }
}

impl Stream {
    /// A stream whose jobs use a duplicate of `group`. All ranks of `group` call this.
    ///
    /// # Panics
    /// If the system cannot start a thread.
    pub fn new(name: &'static str, group: &Group) -> Self {
        let group = group.duplicate();
        if group.size() == 1 || group.is_null() {
            return Self { name, group, thread: None };
        }
        let (sender, receiver) = channel();
        let own = group.clone();
        let thread = std::thread::Builder::new()
            .name(format!("stream {name}"))
            .spawn(move || work(name, &own, &receiver))
            .expect("the system starts a thread");
        Self { name, group, thread: Some((sender, thread)) }
    }

    /// Runs `job` after all jobs submitted before it. A panic in it ends the whole run, as elsewhere.
    pub fn submit<T: Send + 'static>(&self, job: impl FnOnce(&Group) -> T + Send + 'static) -> Pending<T> {
        if self.group.nccl().is_some() {
            let of_gpu = if self.name == RING { cuda::Stream::Ring } else { cuda::Stream::Zero };
            let (value, work) = gpu().beside(of_gpu, || null::hidden(|| job(&self.group)));
            accounting::begin_async(accounting::as_of(self.group.axis(), self.name), work.marks());
            return self.pending(Value::Here(value), Some(work));
        }
        let Some((sender, _)) = &self.thread else {
            return self.pending(Value::Here(null::hidden(|| job(&self.group))), None);
        };
        let (done, receiver) = sync_channel(1);
        // A thread that is gone drops the job, and `wait` panics. Nobody has to wait for the value.
        let _ = sender.send(Box::new(move |group| drop(done.send(job(group)))));
        self.pending(Value::Coming(receiver), None)
    }

    fn pending<T>(&self, value: Value<T>, work: Option<Work>) -> Pending<T> {
        Pending { value, axis: self.group.axis(), stream: self.name, work }
    }
}

fn work(name: &'static str, group: &Group, jobs: &Receiver<Job>) {
    background::belong_to(name);
    for job in jobs {
        job(group);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Some((sender, thread)) = self.thread.take() else { return };
        drop(sender);
        let start = Instant::now();
        let ended = thread.join();
        accounting::waited_since(self.group.axis(), self.name, start);
        assert!(ended.is_ok() || std::thread::panicking(), "a job on stream {} panicked", self.name);
    }
}

impl<T> Pending<T> {
    /// Waits for the result of the job. The wait is exposed communication. On a GPU the compute stream waits instead of
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
            accounting::waited_since(self.axis, self.stream, start);
            value
        });
        value.unwrap_or_else(|_| panic!("a job on stream {} panicked", self.stream))
    }
}
