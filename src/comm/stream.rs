//! Communication in the background: a thread that runs jobs in the order they were submitted, with a group of its own.
//!
//! A stream's group duplicates the one it was made from, so its collectives never mix with those of other threads. All ranks
//! submit the same jobs in the same order. Where the group has no peer there is no thread: a job runs where it is submitted. So it
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

type Job = Box<dyn FnOnce(&Group) + Send>;

/// Ends when dropped, after all that was submitted; drop it before `shutdown`.
pub struct Stream {
    name: &'static str,
    /// Of jobs that run in place. Waits are booked under its axis.
    group: Group,
    /// Of other jobs; none where the group has no peer.
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
        write!(f, "Stream({} over {})", self.name, self.group.axis())
    }
}

impl Stream {
    /// A stream whose jobs see a duplicate of `group`, whose ranks all call this.
    ///
    /// # Panics
    /// If the system starts no more threads.
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

    /// Runs `job` after all jobs submitted before it. A panic in it ends the job of all ranks, as one elsewhere does.
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
        // A thread that is gone drops the job: `wait` says so. Nobody has to wait for the value.
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
        accounting::waited(self.group.axis(), self.name, start.elapsed().as_secs_f64());
        assert!(ended.is_ok() || std::thread::panicking(), "a job of stream {} panicked", self.name);
    }
}

impl<T> Pending<T> {
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
