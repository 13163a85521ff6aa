//! The watchdog thread. It ends the job if a collective of this rank, or a wait of the host for its GPU, takes too
//! long. A single rank has one, too, because a kernel may never end.
//!
//! A rank that waits past the limit sends a report to all others and asks for theirs. Their watchdogs answer even while
//! their main threads compute. A rank that does not answer within the grace time is stopped, dead or disconnected. The
//! lowest of the waiting ranks prints all reports.

use super::accounting::{Entered, last_entered, oldest_async, oldest_of_host};
use super::communicator;
use super::ending;
use super::phase;
use super::raw::{Comm, NOTE_BYTES, NOTE_TAG};
use super::records;
use super::world::World;
use crate::device::cuda::gpu::is_started;
use crate::device::cuda::standing_still;
use crate::error::Error;
use crate::sys::lock::lock;
use std::cell::RefCell;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

static STOP: AtomicBool = AtomicBool::new(false);
static THREAD: Mutex<Option<JoinHandle<()>>> = Mutex::new(None);

/// The time that the others have to answer.
const GRACE: Duration = Duration::from_secs(2);
/// The time that this rank's GPU has to answer. It is shorter, so that a hanging GPU does not delay the watchdog.
const PATIENCE: Duration = Duration::from_millis(500);
/// The start of the report of a rank that is blocked on its GPU.
const FOR_GPU: &str = "has been blocked on ";
const RANKS_HINT: &str = "look at the ranks that are not waiting; mesh.collective_timeout_s sets the limit";
const GPU_HINT: &str = "find the kernel that does not end: with CUDA_LAUNCH_BLOCKING=1 in the environment and \
                        rollout.graphs = false the message names it; check nvidia-smi and the Xid lines in the kernel \
                        log of the node (dmesg) for a hardware fault; mesh.collective_timeout_s sets the limit";
/// The largest number of ranks that the message names one by one.
const NAMED_MAX: usize = 16;

struct Watchdog {
    world: World,
    /// `None` for a single rank.
    channel: Option<Comm>,
    limit: Duration,
    /// The pending query to the driver.
    asked: RefCell<Option<Receiver<OnGpu>>>,
}

/// The state that only the GPU's driver and NCCL know.
#[derive(Default)]
struct OnGpu {
    /// The error of a collective between GPUs.
    fault: Option<String>,
    /// The collective between GPUs that has been in flight for the longest time.
    oldest: Option<Entered>,
}

/// Starts to watch the collectives of a world, and this rank's GPU. All ranks call this.
pub(super) fn start(world: &World, limit: Duration) {
    let channel = (world.size > 1).then(Comm::world);
    let watchdog = Watchdog { world: world.clone(), channel, limit, asked: RefCell::default() };
    let thread = std::thread::Builder::new()
        .name("watchdog".to_string())
        .spawn(move || watchdog.run())
        .expect("the system starts a thread");
    *lock(&THREAD) = Some(thread);
}

/// Ends the thread. MPI may end afterwards.
pub(super) fn stop() {
    STOP.store(true, Ordering::SeqCst);
    if let Some(thread) = lock(&THREAD).take() {
        thread.thread().unpark();
        let _ = thread.join();
    }
}

impl Watchdog {
    fn run(&self) {
        // Reports that arrived before this rank asked: a rank that waits past the limit sends one.
        let mut reports: Vec<Option<(bool, String)>> = vec![None; self.world.hosts.len()];
        let tick = (self.limit / 5).clamp(Duration::from_millis(20), Duration::from_millis(500));
        while !STOP.load(Ordering::SeqCst) {
            std::thread::park_timeout(tick);
            while let Some((rank, waits, words)) = self.next_report() {
                if waits {
                    self.send_report(rank, false);
                    reports[rank] = Some((true, words));
                }
            }
            let OnGpu { fault, oldest } = self.on_gpu().unwrap_or_default();
            if let Some(why) = fault {
                let message = format!("a collective between GPUs failed: {why}");
                let hint = "check the logs of the other ranks for a rank that died or a broken link; \
                            set job.collectives = \"mpi\" to run without NCCL";
                ending::end(&Error::fault(message).hint(hint), false, "");
            }
            let collectives = oldest_of_host().into_iter().chain(oldest).map(|call| call.since);
            let gpu = standing_still().map(|(since, _)| since);
            if collectives.chain(gpu).any(|since| since.elapsed() > self.limit) {
                self.expire(reports);
            }
        }
    }

    /// Queries the driver. Returns `None` if it does not answer in time. The next query starts after the late answer
    /// has arrived, which is dropped.
    fn on_gpu(&self) -> Option<OnGpu> {
        if !is_started() {
            return Some(OnGpu::default());
        }
        let mut asked = self.asked.borrow_mut();
        if let Some(late) = &*asked {
            late.try_recv().ok()?;
        }
        let (answer, answers) = channel();
        // A thread of its own, never joined: a driver that hangs may never answer.
        let ask = move || answer.send(OnGpu { fault: communicator::fault(), oldest: oldest_async() });
        std::thread::Builder::new().name("probe".to_string()).spawn(ask).ok()?;
        let answer = answers.recv_timeout(PATIENCE).ok();
        *asked = answer.is_none().then_some(answers);
        answer
    }

    /// Asks all ranks, waits for their answers, and ends the job.
    fn expire(&self, mut reports: Vec<Option<(bool, String)>>) -> ! {
        let mine = self.doing();
        (0..self.world.hosts.len()).filter(|&r| r != self.world.rank).for_each(|r| self.send_report(r, true));
        reports[self.world.rank] = Some((true, mine.clone()));
        let asked = Instant::now();
        while asked.elapsed() < GRACE && reports.iter().any(Option::is_none) {
            std::thread::sleep(Duration::from_millis(10));
            while let Some((rank, waits, words)) = self.next_report() {
                if waits || reports[rank].is_none() {
                    reports[rank] = Some((waits, words));
                }
            }
        }
        let error =
            Error::fault(self.report(&reports)).hint(if self.channel.is_some() { RANKS_HINT } else { GPU_HINT });
        let first_waiting = reports.iter().position(|s| matches!(s, Some((true, _))));
        if first_waiting != Some(self.world.rank) {
            ending::log(&format!("{mine}, past the limit of {} s", self.limit.as_secs_f64()));
            ending::die_quietly(error.exit_code());
        }
        ending::end(&error, true, "")
    }

    fn report(&self, reports: &[Option<(bool, String)>]) -> String {
        let seconds = self.limit.as_secs_f64();
        let is_gpu = reports.iter().flatten().any(|(_, words)| words.contains(FOR_GPU));
        let what = if is_gpu { "a GPU or a collective" } else { "a collective" };
        let mut text = match reports {
            // The message contains step and phase already.
            [_] => return format!("the GPU took longer than {seconds} s: this process {}", self.waiting()),
            _ => format!("{what} took longer than {seconds} s"),
        };
        // Ranks that do not wait are the cause of the others' waits, so they are listed first.
        let mut ranks: Vec<usize> = (0..reports.len()).collect();
        ranks.sort_by_key(|&r| reports[r].as_ref().map_or(0, |(waits, _)| 1 + u8::from(*waits)));
        for &rank in ranks.iter().take(NAMED_MAX) {
            let silent = "does not answer: stopped, dead or disconnected";
            let words = reports[rank].as_ref().map_or(silent, |(_, words)| words.as_str());
            let _ = write!(text, "\n  rank {rank} ({}) {words}", self.world.hosts[rank]);
        }
        if ranks.len() > NAMED_MAX {
            let _ = write!(text, "\n  and {} more", ranks.len() - NAMED_MAX);
        }
        text
    }

    /// Sends this rank's report to `to`. It asks for an answer if this rank waits past the limit.
    fn send_report(&self, to: usize, waits: bool) {
        let words = self.doing();
        let mut end = words.len().min(NOTE_BYTES - 16);
        while !words.is_char_boundary(end) {
            end -= 1;
        }
        if let Some(channel) = self.channel {
            channel.post_note(to, records::encode(&(self.world.rank, waits, &words[..end])));
        }
    }

    /// The next report: (rank, waits past the limit, text)
    fn next_report(&self) -> Option<(usize, bool, String)> {
        records::decode(&self.channel?.receive_note::<u8, NOTE_BYTES>(NOTE_TAG)?).ok()
    }

    /// `has been waiting in all_reduce_sum_ordered over data (4194304 bytes) for 600.2 s; step 3, train`. If the host
    /// waits for its GPU, the text names the operation.
    fn doing(&self) -> String {
        let mut words = self.waiting();
        if let Some(phase) = phase::describe() {
            let _ = write!(words, "; {phase}");
        }
        words
    }

    /// The same without step and phase.
    fn waiting(&self) -> String {
        let on_gpu = self.on_gpu();
        let silent = if on_gpu.is_none() { ", whose driver does not answer," } else { "" };
        let gpu = standing_still()
            .map(|(since, what)| format!("{FOR_GPU}{what}{silent} for {:.1} s", since.elapsed().as_secs_f64()));
        let flight = on_gpu.and_then(|known| known.oldest);
        let oldest = oldest_of_host().into_iter().chain(flight).min_by_key(|call| call.since);
        let collective =
            oldest.map(|call| format!("has been waiting in {call} for {:.1} s", call.since.elapsed().as_secs_f64()));
        match (collective, gpu, last_entered()) {
            (Some(collective), Some(gpu), _) => format!("{collective}, and {gpu}"),
            (Some(words), None, _) | (None, Some(words), _) => words,
            (None, None, Some(call)) => format!("is in no collective (its last was {} over {})", call.op, call.axis),
            (None, None, None) => "has entered no collective".to_string(),
        }
    }
}
