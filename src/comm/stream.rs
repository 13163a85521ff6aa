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
use crate::sys::lock::lock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
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
    slot: Arc<Slot<T>>,
    axis: &'static str,
    stream: &'static str,
    /// What the job launched on a GPU.
    work: Option<Work>,
}

struct Slot<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

enum State<T> {
    Waiting,
    Done(T),
    /// The job panicked, or a job before it did.
    Lost,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({} over {})", self.name, self.axis)
    }
}

impl Stream {
    /// A stream whose jobs see twins of `groups`. All ranks of each group call this, groups in the same order.
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
            return self.pending(State::Done(value), Some(work));
        }
        let Some((sender, _)) = &self.thread else {
            return self.pending(State::Done(null::hidden(|| job(&self.groups))), None);
        };
        let pending = self.pending(State::Waiting, None);
        let promise = Promise(pending.slot.clone());
        // A thread that is gone drops the job, and its promise is lost: `wait` says so.
        let _ = sender.send(Box::new(move |groups| promise.keep(job(groups))));
        pending
    }

    fn pending<T>(&self, state: State<T>, work: Option<Work>) -> Pending<T> {
        let slot = Arc::new(Slot { state: Mutex::new(state), changed: Condvar::new() });
        Pending { slot, axis: self.axis, stream: self.name, work }
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
    pub fn is_ready(&self) -> bool {
        !matches!(*lock(&self.slot.state), State::Waiting)
    }

    /// What the job returned. The time until it has is exposed communication. On a GPU the compute stream waits for it, not
    /// the host.
    ///
    /// # Panics
    /// If the job panicked.
    pub fn wait(mut self) -> T {
        if let Some(work) = self.work.take() {
            work.join();
        }
        let mut state = lock(&self.slot.state);
        if matches!(*state, State::Waiting) {
            let start = Instant::now();
            let waiting = |state: &mut State<T>| matches!(state, State::Waiting);
            state = background::awaiting(|| {
                self.slot.changed.wait_while(state, waiting).unwrap_or_else(PoisonError::into_inner)
            });
            accounting::waited(self.axis, self.stream, start.elapsed().as_secs_f64());
        }
        match std::mem::replace(&mut *state, State::Lost) {
            State::Done(value) => value,
            State::Waiting | State::Lost => panic!("a job of stream {} panicked", self.stream),
        }
    }
}

/// Belongs to a job; dropped unkept, it is lost.
struct Promise<T>(Arc<Slot<T>>);

impl<T> Promise<T> {
    fn keep(&self, value: T) {
        *lock(&self.0.state) = State::Done(value);
        self.0.changed.notify_all();
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        if matches!(*state, State::Waiting) {
            *state = State::Lost;
            self.0.changed.notify_all();
        }
    }
}
