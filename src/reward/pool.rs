//! Transfer of responses to their rewards. Threads send one request at a time each, while other responses are sampled.
//! They use neither MPI nor a device.

use crate::config::reward::{OnFailure, RewardConfig};
use crate::error::{Error, Result};
use crate::experience::{Prompt, Response, RowFields};
use crate::reward::RewardOutput;
use crate::reward::feedback::Texts;
use crate::sys::bounded_log::BoundedLog;
use crate::sys::lock::lock;
use crate::sys::trace::{self, Category};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The maximum bytes of an answer, and the additional bytes per response.
const REPLY_BYTES_MAX: usize = 1 << 20;
const REPLY_BYTES_MAX_EACH: usize = 1 << 14;
/// The number of consecutive timeouts after which no more requests are sent, because the service is probably down.
const LATE_MAX: u32 = 16;
/// The longest pause before another attempt.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The time that the pool waits for child processes at its end.
const END: Duration = Duration::from_secs(5);

/// The context of a run for functions and services.
#[derive(Default)]
pub struct RewardContext {
    /// The row of a prompt, by its id.
    pub rows: Option<Lookup>,
    /// Fields that a row has besides the prompt.
    pub columns: Vec<String>,
    /// The log file for the output of functions. Without one, only errors are kept.
    pub log: Option<BoundedLog>,
    /// The tokenizer of an environment's answers. Without it, they are not checked.
    pub texts: Option<Arc<Texts>>,
    /// The steps of the run.
    pub steps: u64,
    /// Notes of functions about values that are not kept.
    pub notes: Notes,
}

/// Notes that are shown once each.
#[derive(Clone, Debug, Default)]
pub struct Notes(Arc<Mutex<(BTreeSet<String>, Vec<String>)>>);

impl Notes {
    pub fn add(&self, note: String) {
        let (seen, new) = &mut *lock(&self.0);
        if seen.insert(note.clone()) {
            new.push(note);
        }
    }

    /// Removes and returns a note that was not shown yet.
    pub fn next(&self) -> Option<String> {
        lock(&self.0).1.pop()
    }
}

pub type Lookup = Arc<dyn Fn(u64) -> Result<RowFields> + Send + Sync>;

/// A response to score.
#[derive(Debug)]
pub struct Asked {
    pub prompt: Prompt,
    pub response: Response,
    /// The number of steps that the run has finished.
    pub steps_done: u64,
}

/// The reason why an attempt failed.
#[derive(Clone, Debug)]
pub struct Failure {
    pub why: String,
    /// Whether another attempt may succeed.
    pub again: bool,
    /// Whether the answer timed out.
    pub late: bool,
}

impl Failure {
    /// A failure that every attempt would repeat.
    pub fn lasting(why: String) -> Self {
        Self { why, again: false, late: false }
    }

    fn after(self, attempts: u32) -> Self {
        let why = format!("{}: {}", times(attempts), self.why);
        Self { why, ..self }
    }

    fn hint(&self) -> &'static str {
        match self {
            Self { late: true, .. } => {
                "raise reward.timeout_s (reward.start_timeout_s for loading), make the reward faster, or set \
                 reward.on_failure = \"drop\" to drop such responses"
            }
            Self { again: false, .. } => {
                "fix the reward, as another attempt would fail too, or set reward.on_failure = \"drop\" to drop such \
                 responses"
            }
            _ => "fix the reward, raise reward.retries, or set reward.on_failure = \"drop\" to drop such responses",
        }
    }
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self { why, again: true, late: false }
    }
}

fn times(attempts: u32) -> String {
    format!("{attempts} attempt{}", if attempts == 1 { "" } else { "s" })
}

/// The target of a thread's requests: a child process or a server.
pub trait Worker: Send + 'static {
    type Asked: Send + Sync + 'static;
    type Output: Output;

    /// Returns one output for each of `asked`, from one attempt with its own deadline. `given_up` becomes true when
    /// nothing waits for the result any more.
    fn ask(
        &mut self,
        asked: &[Arc<Self::Asked>],
        given_up: &AtomicBool,
    ) -> std::result::Result<Vec<Self::Output>, Failure>;

    /// The most requests that the worker sends before it waits for answers.
    fn together(&self) -> usize {
        1
    }

    /// The results of one attempt at each request.
    fn ask_all(&mut self, requests: &[&[Arc<Self::Asked>]], given_up: &AtomicBool) -> Vec<Answer<Self::Output>> {
        requests.iter().map(|asked| self.ask(asked, given_up)).collect()
    }
}

/// The outputs of a request, or the reason why there are none.
pub type Answer<O> = std::result::Result<Vec<O>, Failure>;

pub trait Output: Clone + Send + 'static {
    /// The kind of a request in a trace.
    const CATEGORY: Category;

    /// A failed output, with the reason.
    fn failed(why: &str) -> Self;
}

impl Output for RewardOutput {
    const CATEGORY: Category = Category::Reward;

    fn failed(why: &str) -> Self {
        Self { failed: Some(why.to_string()), ..Self::default() }
    }
}

/// The maximum bytes of an answer for `responses`.
pub fn reply_bytes_max(responses: usize) -> usize {
    REPLY_BYTES_MAX + responses * REPLY_BYTES_MAX_EACH
}

/// The fields of the data rows besides the prompts.
pub fn rows_of<'a>(
    rows: Option<&Lookup>,
    prompts: impl Iterator<Item = &'a Prompt>,
) -> std::result::Result<Vec<RowFields>, String> {
    let row = |prompt: &Prompt| rows.map_or(Ok(RowFields::default()), |rows| rows(prompt.id));
    prompts.map(row).collect::<Result<_>>().map_err(|error| error.to_string())
}

/// Returns the result of the first successful attempt. If all fail, returns the failure of the last one, and the number
/// of attempts.
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
            return Err((failure, times(attempts)));
        }
        // A shared resource (a file system, a service) may need some time.
        thread::sleep(PAUSE_MAX.min(Duration::from_millis(100) * attempts));
        attempts += 1;
    }
}

/// The requests of one reward.
#[derive(Debug)]
pub struct Pool<A = Asked, O = RewardOutput> {
    /// The name in messages.
    about: String,
    batch: usize,
    requests: Option<Sender<Request<A, O>>>,
    threads: Vec<JoinHandle<()>>,
    round: Round<O>,
}

/// The responses that are scored together, by position.
#[derive(Debug)]
struct Round<O> {
    shared: Arc<Shared>,
    reply: Sender<Reply<O>>,
    replies: Receiver<Reply<O>>,
    /// The requests in the order of positions.
    open: Vec<Open>,
    outputs: Vec<Option<O>>,
    missing: usize,
    failed: Option<Failure>,
}

/// A request, sent or not.
#[derive(Debug)]
struct Open {
    places: Range<usize>,
    /// The number of positions without a response.
    missing: usize,
    /// Whether no more positions are added to it.
    is_full: bool,
}

#[derive(Debug, Default)]
struct Shared {
    given_up: AtomicBool,
    /// The number of timeouts since the last answer.
    late: AtomicU32,
}

#[derive(Debug)]
struct Request<A, O> {
    places: Range<usize>,
    asked: Vec<Arc<A>>,
    shared: Arc<Shared>,
    reply: Sender<Reply<O>>,
}

/// The outputs of a request, or the reason why the run has to stop.
type Reply<O> = (Range<usize>, Answer<O>);

impl<O> Default for Round<O> {
    fn default() -> Self {
        let (reply, replies) = mpsc::channel();
        let (open, outputs) = (Vec::new(), Vec::new());
        Self { shared: Arc::default(), reply, replies, open, outputs, missing: 0, failed: None }
    }
}

impl<A: Send + Sync + 'static, O: Output> Pool<A, O> {
    /// Starts the threads. `batch`: responses per request, 0 for all that are expected before a `flush`.
    pub fn new<W>(config: &RewardConfig, about: String, batch: usize, workers: Vec<W>) -> Result<Self>
    where
        W: Worker<Asked = A, Output = O>,
    {
        let (requests, queue) = mpsc::channel();
        let queue = Arc::new(Mutex::new(queue));
        let policy = (config.retries, config.on_failure);
        let about_each = &about;
        let start = |worker: W| {
            let (queue, about) = (Arc::clone(&queue), about_each.clone());
            let named = thread::Builder::new().name("reward".into());
            named
                .spawn(move || serve(worker, &about, &queue, policy))
                .map_err(|e| Error::fault(format!("cannot start a thread: {e}")))
        };
        let threads = workers.into_iter().map(start).collect::<Result<_>>()?;
        Ok(Self { about, batch, requests: Some(requests), threads, round: Round::default() })
    }

    /// Adds the positions `places` after the existing ones.
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

    /// Called when `asked` holds the response of `place`: sends its request if it is full and complete.
    pub fn push(&mut self, place: usize, asked: &[Option<Arc<A>>]) {
        let i = self.round.open.partition_point(|open| open.places.end <= place);
        self.round.open[i].missing -= 1;
        self.send(i, asked);
    }

    /// Treats the last request as full, because later responses are not scored with it.
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
        // Threads end only with the pool.
        let _ = self.requests.as_ref().map(|requests| requests.send(Request { places, asked, shared, reply }));
    }

    /// Waits until `until`. Returns whether everything is scored, or nothing more will be.
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

    /// The outputs in the order of positions, after `wait` returned true. Then the next round begins.
    ///
    /// # Errors
    /// `Service` if a request failed and `on_failure` is stop.
    pub fn finish(&mut self) -> Result<Vec<O>> {
        let round = std::mem::take(&mut self.round);
        if let Some(failure) = round.failed {
            return Err(self.failure(&failure));
        }
        Ok(round.outputs.into_iter().map(|output| output.expect("all is scored")).collect())
    }

    /// The outputs since the last call, with their positions. Waits for the first one until `until`.
    ///
    /// # Errors
    /// `Service` if a request failed and `on_failure` is stop.
    pub fn arrived(&mut self, until: Instant) -> Result<Vec<(usize, O)>> {
        let mut arrived = Vec::new();
        let mut next = self.round.replies.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
        while let Some((places, outputs)) = next {
            arrived.extend(places.zip(outputs.map_err(|failure| self.failure(&failure))?));
            next = self.round.replies.try_recv().ok();
        }
        Ok(arrived)
    }

    fn failure(&self, failure: &Failure) -> Error {
        Error::service(format!("{} failed after {}", self.about, failure.why)).hint(failure.hint())
    }

    /// Drops all expected responses, and does not wait for pending requests.
    pub fn cancel(&mut self) {
        self.round.shared.given_up.store(true, Ordering::SeqCst);
        self.round = Round::default();
    }
}

impl<A, O> Drop for Pool<A, O> {
    /// Waits for child processes to end, but not for servers.
    fn drop(&mut self) {
        self.round.shared.given_up.store(true, Ordering::SeqCst);
        self.requests = None;
        let until = Instant::now() + END;
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Processes requests until the pool has ended.
fn serve<W: Worker>(
    mut worker: W,
    about: &str,
    queue: &Mutex<Receiver<Request<W::Asked, W::Output>>>,
    policy: (u32, OnFailure),
) {
    let next = |count: usize| {
        let queue = lock(queue);
        let first = queue.recv().ok()?;
        Some(std::iter::once(first).chain(queue.try_iter().take(count - 1)).collect::<Vec<_>>())
    };
    while let Some(mut requests) = next(worker.together()) {
        // Requests that are not given up belong to the same round.
        requests.retain(|request| !request.shared.given_up.load(Ordering::SeqCst));
        let responses = requests.iter().map(|request| request.asked.len()).sum();
        let category = <W::Output as Output>::CATEGORY;
        let span = trace::named(category, || about.to_string(), "responses requests", [responses, requests.len()]);
        let answers = answer(&mut worker, &requests, policy);
        drop(span);
        for (Request { places, shared, reply, .. }, outputs) in requests.into_iter().zip(answers) {
            let has_failed = outputs.is_err();
            // A finished round has no receiver.
            let _ = reply.send((places, outputs));
            if has_failed {
                shared.given_up.store(true, Ordering::SeqCst);
            }
        }
    }
}

/// Sends the requests, and retries failed ones. If a request for several responses still fails and failed responses are
/// dropped, sends one request for each response, and marks the failed responses.
fn answer<W: Worker>(
    worker: &mut W,
    requests: &[Request<W::Asked, W::Output>],
    (retries, on_failure): (u32, OnFailure),
) -> Vec<Answer<W::Output>> {
    let Some(Request { shared, .. }) = requests.first() else { return Vec::new() };
    if shared.late.load(Ordering::SeqCst) >= LATE_MAX {
        let why = format!("no further requests are sent, because {LATE_MAX} requests in a row timed out");
        return requests.iter().map(|request| Ok(vec![W::Output::failed(&why); request.asked.len()])).collect();
    }
    let mut attempt = |asked: &[&[Arc<W::Asked>]]| {
        let found = worker.ask_all(asked, &shared.given_up);
        if !found.iter().any(|found| matches!(found, Err(Failure { late: true, .. }))) {
            shared.late.store(0, Ordering::SeqCst);
        }
        found
    };
    let mut found: Vec<Option<Answer<W::Output>>> = vec![None; requests.len()];
    let (mut open, mut attempts): (Vec<usize>, _) = ((0..requests.len()).collect(), 0);
    let _ = retried(retries, || {
        attempts += 1;
        let asked: Vec<_> = open.iter().map(|&i| &requests[i].asked[..]).collect();
        let mut failed = Vec::new();
        for (i, answer) in std::mem::take(&mut open).into_iter().zip(attempt(&asked)) {
            failed.extend(answer.as_ref().err().filter(|failure| failure.again).map(|failure| (i, failure.clone())));
            found[i] = Some(answer.map_err(|failure| failure.after(attempts)));
        }
        open.extend(failed.iter().map(|(i, _)| *i));
        failed.pop().map_or(Ok(()), |(_, failure)| Err(failure))
    });
    let mut settled = |found: Option<Answer<W::Output>>, request: &Request<W::Asked, W::Output>| {
        let failure = match found.expect("each was sent") {
            Ok(outputs) => return Ok(outputs),
            Err(failure) => failure,
        };
        shared.late.fetch_add(u32::from(failure.late), Ordering::SeqCst);
        if on_failure == OnFailure::Stop {
            return Err(failure);
        }
        if request.asked.len() == 1 {
            return Ok(vec![W::Output::failed(&failure.why)]);
        }
        let alone: Vec<_> = request.asked.chunks(1).collect();
        let one = |found: Answer<W::Output>| match found {
            Ok(mut outputs) => outputs.remove(0),
            Err(failure) => W::Output::failed(&failure.why),
        };
        Ok(attempt(&alone).into_iter().map(one).collect())
    };
    found.into_iter().zip(requests).map(|(found, request)| settled(found, request)).collect()
}
