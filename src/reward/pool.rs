//! Responses on their way to what scores them. Threads ask, one request at a time each, while others are drawn; they touch
//! neither MPI nor a device.

use crate::config::reward::{OnFailure, RewardConfig};
use crate::error::{Error, Result};
use crate::experience::{Prompt, Response, RowFields};
use crate::reward::RewardOutput;
use crate::sys::lock::lock;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// An answer may be this long, and this much longer per response.
const REPLY_BYTES_MAX: usize = 1 << 20;
const REPLY_BYTES_MAX_EACH: usize = 1 << 14;
/// So many requests in a row without an answer in time, and what is left is not asked: the service is down, not a response bad.
const LATE_MAX: u32 = 16;
/// The longest pause before another attempt.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// What the end of the pool waits for the ends of child processes.
const END: Duration = Duration::from_secs(5);

/// What functions and services are given of a run.
#[derive(Default)]
pub struct RewardContext {
    /// The row of a prompt, by its id.
    pub rows: Option<Lookup>,
    /// Fields that a row has besides the prompt.
    pub columns: Vec<String>,
    /// Where what the functions print goes; nowhere, but for errors, where there is none.
    pub log: Option<PathBuf>,
    /// Whether no server is asked: a job is only checked.
    pub offline: bool,
}

pub type Lookup = Arc<dyn Fn(u64) -> Result<RowFields> + Send + Sync>;

/// A response to score.
#[derive(Debug)]
pub struct Asked {
    pub prompt: Prompt,
    pub response: Response,
}

/// Why an attempt gave nothing.
#[derive(Debug)]
pub struct Failure {
    pub why: String,
    /// Whether another attempt may do better.
    pub again: bool,
    /// Whether no answer came in time.
    pub late: bool,
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self { why, again: true, late: false }
    }
}

/// What a thread asks: a child process, a server.
pub trait Worker: Send + 'static {
    type Asked: Send + Sync + 'static;
    type Output: Output;

    /// One output each, from one attempt with a deadline of its own; `given_up`: nobody waits for it any more.
    fn ask(
        &mut self,
        asked: &[Arc<Self::Asked>],
        given_up: &AtomicBool,
    ) -> std::result::Result<Vec<Self::Output>, Failure>;
}

pub trait Output: Clone + Send + 'static {
    /// There is none, for this reason.
    fn failed(why: &str) -> Self;
}

impl Output for RewardOutput {
    fn failed(why: &str) -> Self {
        Self { failed: Some(why.to_string()), ..Self::default() }
    }
}

/// Bytes that an answer for `responses` may have.
pub fn reply_bytes_max(responses: usize) -> usize {
    REPLY_BYTES_MAX + responses * REPLY_BYTES_MAX_EACH
}

/// What the rows of the data hold beside the prompts.
pub fn rows_of<'a>(
    rows: Option<&Lookup>,
    prompts: impl Iterator<Item = &'a Prompt>,
) -> std::result::Result<Vec<RowFields>, String> {
    let row = |prompt: &Prompt| rows.map_or(Ok(RowFields::default()), |rows| rows(prompt.id));
    prompts.map(row).collect::<Result<_>>().map_err(|error| error.to_string())
}

/// What the first attempt that succeeds gives; else why the last one failed, and how many there were.
pub fn retried<T>(
    retries: u32,
    mut attempt: impl FnMut() -> std::result::Result<T, Failure>,
) -> std::result::Result<T, (Failure, String)> {
    let mut attempts = 1;
    loop {
        let failure = match attempt() {
            Ok(found) => return Ok(found),
            Err(failure) => failure,
        };
        if attempts > retries || !failure.again {
            let plural = if attempts == 1 { "" } else { "s" };
            return Err((failure, format!("{attempts} attempt{plural}")));
        }
        // A shared resource (a file system, a service) may need a moment.
        thread::sleep(PAUSE_MAX.min(Duration::from_millis(100) * attempts));
        attempts += 1;
    }
}

/// The requests of one reward.
#[derive(Debug)]
pub struct Pool<A = Asked, O = RewardOutput> {
    /// As messages name it.
    about: String,
    batch: usize,
    requests: Option<Sender<Request<A, O>>>,
    threads: Vec<JoinHandle<()>>,
    round: Round<O>,
}

/// The responses that are scored together, by their places.
#[derive(Debug)]
struct Round<O> {
    shared: Arc<Shared>,
    reply: Sender<Reply<O>>,
    replies: Receiver<Reply<O>>,
    /// In the order of places.
    open: Vec<Open>,
    outputs: Vec<Option<O>>,
    missing: usize,
    failed: Option<String>,
}

/// A request, sent or not.
#[derive(Debug)]
struct Open {
    places: Range<usize>,
    /// Places that have no response yet.
    missing: usize,
    /// No place is added to it.
    is_full: bool,
}

#[derive(Debug, Default)]
struct Shared {
    given_up: AtomicBool,
    /// Requests without an answer in time since the last one with an answer.
    late: AtomicU32,
}

#[derive(Debug)]
struct Request<A, O> {
    places: Range<usize>,
    asked: Vec<Arc<A>>,
    shared: Arc<Shared>,
    reply: Sender<Reply<O>>,
}

/// The outputs of a request, or why the run has to stop.
type Reply<O> = (Range<usize>, std::result::Result<Vec<O>, String>);

impl<O> Default for Round<O> {
    fn default() -> Self {
        let (reply, replies) = mpsc::channel();
        let (open, outputs) = (Vec::new(), Vec::new());
        Self { shared: Arc::default(), reply, replies, open, outputs, missing: 0, failed: None }
    }
}

impl<A: Send + Sync + 'static, O: Output> Pool<A, O> {
    /// `batch`: responses of a request, 0 for all that are expected before a `flush`.
    pub fn new<W>(config: &RewardConfig, about: String, batch: usize, workers: Vec<W>) -> Result<Self>
    where
        W: Worker<Asked = A, Output = O>,
    {
        let (requests, queue) = mpsc::channel();
        let queue = Arc::new(Mutex::new(queue));
        let policy = (config.retries, config.on_failure);
        let start = |worker: W| {
            let queue = Arc::clone(&queue);
            let named = thread::Builder::new().name("reward".into());
            named
                .spawn(move || serve(worker, &queue, policy))
                .map_err(|e| Error::fault(format!("cannot start a thread: {e}")))
        };
        let threads = workers.into_iter().map(start).collect::<Result<_>>()?;
        Ok(Self { about, batch, requests: Some(requests), threads, round: Round::default() })
    }

    /// Makes `places` behind those that there are.
    pub fn expect(&mut self, places: Range<usize>) {
        let round = &mut self.round;
        round.outputs.resize(places.end, None);
        round.missing += places.len();
        for place in places {
            if round.open.last().is_none_or(|last| last.is_full) {
                round.open.push(Open { places: place..place, missing: 0, is_full: false });
            }
            let last = round.open.last_mut().expect("just pushed");
            last.places.end += 1;
            last.missing += 1;
            last.is_full = last.places.len() == self.batch;
        }
    }

    /// `asked` holds the response of `place` now: sends its request, if that is full and missed no other one.
    pub fn push(&mut self, place: usize, asked: &[Option<Arc<A>>]) {
        let i = self.round.open.partition_point(|open| open.places.end <= place);
        self.round.open[i].missing -= 1;
        self.send(i, asked);
    }

    /// Takes the last request for full, as those that are expected next are not scored with it.
    pub fn flush(&mut self, asked: &[Option<Arc<A>>]) {
        let Some(i) = self.round.open.iter().rposition(|open| !open.is_full) else { return };
        self.round.open[i].is_full = true;
        self.send(i, asked);
    }

    fn send(&mut self, i: usize, asked: &[Option<Arc<A>>]) {
        let Open { places, missing, is_full } = &self.round.open[i];
        if *missing > 0 || !is_full {
            return;
        }
        let (places, asked) = (places.clone(), asked[places.clone()].iter().flatten().cloned().collect());
        let (shared, reply) = (Arc::clone(&self.round.shared), self.round.reply.clone());
        // Threads end with the pool only.
        let _ = self.requests.as_ref().map(|requests| requests.send(Request { places, asked, shared, reply }));
    }

    /// Whether all is scored, or nothing more will be; waits for that until `until`.
    pub fn wait(&mut self, until: Instant) -> bool {
        let round = &mut self.round;
        while round.missing > 0 && round.failed.is_none() {
            match round.replies.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((places, Ok(outputs))) => {
                    round.missing -= places.len();
                    round.outputs[places].iter_mut().zip(outputs).for_each(|(to, output)| *to = Some(output));
                }
                Ok((_, Err(why))) => round.failed = Some(why),
                Err(RecvTimeoutError::Timeout) => return false,
                Err(RecvTimeoutError::Disconnected) => unreachable!("the round holds a sender"),
            }
        }
        true
    }

    pub fn has_failed(&self) -> bool {
        self.round.failed.is_some()
    }

    /// The outputs in the order of places, after `wait` was true. The next round begins.
    ///
    /// # Errors
    /// `Service` where a request failed and `on_failure` is stop.
    pub fn finish(&mut self) -> Result<Vec<O>> {
        let round = std::mem::take(&mut self.round);
        if let Some(why) = round.failed {
            return Err(self.failure(&why));
        }
        Ok(round.outputs.into_iter().map(|output| output.expect("all is scored")).collect())
    }

    /// The outputs that have come since the last call, by their places; waits for the first one until `until`.
    ///
    /// # Errors
    /// `Service` where a request failed and `on_failure` is stop.
    pub fn arrived(&mut self, until: Instant) -> Result<Vec<(usize, O)>> {
        let mut arrived = Vec::new();
        let mut next = self.round.replies.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
        while let Some((places, outputs)) = next {
            arrived.extend(places.zip(outputs.map_err(|why| self.failure(&why))?));
            next = self.round.replies.try_recv().ok();
        }
        Ok(arrived)
    }

    fn failure(&self, why: &str) -> Error {
        Error::service(format!("{} failed in {why}", self.about)).hint(
            "reward.timeout_s and reward.retries say how long and how often it is tried, reward.on_failure what follows",
        )
    }

    /// Forgets what is expected: what is asked now is not waited for.
    pub fn cancel(&mut self) {
        self.round.shared.given_up.store(true, Ordering::SeqCst);
        self.round = Round::default();
    }
}

impl<A, O> Drop for Pool<A, O> {
    /// Waits for the ends of child processes, but for no server.
    fn drop(&mut self) {
        self.round.shared.given_up.store(true, Ordering::SeqCst);
        self.requests = None;
        let until = Instant::now() + END;
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Answers requests until the pool has ended.
fn serve<W: Worker>(
    mut worker: W,
    queue: &Mutex<Receiver<Request<W::Asked, W::Output>>>,
    (retries, on_failure): (u32, OnFailure),
) {
    let next = || lock(queue).recv();
    while let Ok(Request { places, asked, shared, reply }) = next() {
        if shared.given_up.load(Ordering::SeqCst) {
            continue;
        }
        let outputs = answer(&mut worker, &asked, &shared, (retries, on_failure));
        let has_failed = outputs.is_err();
        // A round that is over has no receiver.
        let _ = reply.send((places, outputs));
        if has_failed {
            shared.given_up.store(true, Ordering::SeqCst);
        }
    }
}

/// Asks for all at once; where that fails and failures drop, for each by itself, and marks those that fail alone.
fn answer<W: Worker>(
    worker: &mut W,
    asked: &[Arc<W::Asked>],
    shared: &Shared,
    (retries, on_failure): (u32, OnFailure),
) -> std::result::Result<Vec<W::Output>, String> {
    let mut attempt = |asked: &[Arc<W::Asked>]| {
        let found = worker.ask(asked, &shared.given_up);
        match &found {
            Err(Failure { late: true, .. }) => {}
            _ => shared.late.store(0, Ordering::SeqCst),
        }
        found
    };
    if shared.late.load(Ordering::SeqCst) >= LATE_MAX {
        let why = format!("it is not asked any more, as {LATE_MAX} requests in a row had no answer in time");
        return Ok(vec![W::Output::failed(&why); asked.len()]);
    }
    let (Failure { why, late, .. }, times) = match retried(retries, || attempt(asked)) {
        Ok(outputs) => return Ok(outputs),
        Err(failure) => failure,
    };
    shared.late.fetch_add(u32::from(late), Ordering::SeqCst);
    if on_failure == OnFailure::Stop {
        return Err(format!("{times}: {why}"));
    }
    if asked.len() == 1 {
        return Ok(vec![W::Output::failed(&why)]);
    }
    let alone = |one: &Arc<W::Asked>| match attempt(std::slice::from_ref(one)) {
        Ok(mut outputs) => outputs.remove(0),
        Err(failure) => W::Output::failed(&failure.why),
    };
    Ok(asked.iter().map(alone).collect())
}
