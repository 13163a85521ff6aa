//! A shared list of numbers from which ranks take the next one when they need it.

use super::accounting::begin_call;
use super::group::Group;
use super::raw::Comm;
use crate::device::cpu::pool::share;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

const ASK: i32 = 21;
const REPLY: i32 = 22;
/// A rank's request: a number, or no more numbers.
const NEXT: u64 = 0;
const END: u64 = 1;
/// The reply if all numbers are taken.
const NONE: u64 = u64::MAX;
/// The sleep of the replying thread without requests: each wakeup takes time from the computing thread.
const SLEEP: Duration = Duration::from_micros(500);
/// The remaining numbers per rank below which a rank does not request ahead: no other rank can take a number that it
/// holds.
const AHEAD_MIN: usize = 4;

/// A function that returns the next free number.
pub type Next<'a> = dyn FnMut() -> Option<usize> + 'a;

impl Group {
    /// Runs `work` with a function that returns the next number in 0..`count` that no rank has taken, then `None`.
    /// `work` must call it until `None`, or never. All ranks of the group call this with the same `count`, and none
    /// returns before the others have finished their work. In a null group the numbers are the rank's own share.
    ///
    /// A thread of the first rank replies to the others, so they do not wait for a forward of that rank. It uses
    /// messages, because Open MPI 4.1 rejects one-sided calls from several threads over TCP (man page of
    /// `MPI_Win_create`, osc/pt2pt).
    pub fn with_queue<T>(&self, count: usize, work: impl FnOnce(&mut Next) -> T) -> T {
        let comm = self.channel().map(|channel| channel.comm);
        let Some(comm) = comm else {
            let mut own = share(count, 1, self.rank(), self.size());
            return work(&mut || own.next());
        };
        let found = if self.rank() == 0 { self.lead(comm, count, work) } else { self.follow(comm, count, work) };
        self.barrier();
        found
    }

    fn follow<T>(&self, comm: Comm, count: usize, work: impl FnOnce(&mut Next) -> T) -> T {
        let ask = || comm.send_short(0, ASK, &[self.rank() as u64, NEXT]);
        // A reply takes until a thread of a busy rank wakes up. While many are left, this rank requests ahead.
        let mut is_asked = false;
        let found = work(&mut || {
            if !std::mem::take(&mut is_asked) {
                ask();
            }
            let next = self.reply(comm);
            if next != NONE && (next as usize) + AHEAD_MIN * self.size() < count {
                is_asked = true;
                ask();
            }
            (next != NONE).then_some(next as usize)
        });
        assert!(!is_asked, "a rank must take numbers until there are none");
        comm.send_short(0, ASK, &[self.rank() as u64, END]);
        found
    }

    /// Waits for the reply to this rank's request.
    fn reply(&self, comm: Comm) -> u64 {
        let first = self.member(0).world_rank;
        let _call = begin_call(self.axis(), "queue", size_of::<u64>()).asking(first);
        let mut next = [0];
        // SAFETY: the buffer lives until the request was waited for.
        unsafe { comm.receive(0, REPLY, &mut next) }.wait();
        next[0]
    }

    fn lead<T>(&self, comm: Comm, count: usize, work: impl FnOnce(&mut Next) -> T) -> T {
        let taken = AtomicUsize::new(0);
        let next = &|| Some(taken.fetch_add(1, Ordering::Relaxed)).filter(|next| *next < count);
        thread::scope(|scope| {
            let others = self.size() - 1;
            let others = scope.spawn(move || reply_to(comm, others, next));
            let found = work(&mut || next());
            let _call = begin_call(self.axis(), "queue", 0);
            others.join().expect("a failing thread ends the process");
            found
        })
    }
}

/// Replies to `others` ranks until all have ended.
fn reply_to(comm: Comm, mut others: usize, next: impl Fn() -> Option<usize>) {
    while others > 0 {
        match comm.receive_note::<u64, 2>(ASK) {
            None => thread::sleep(SLEEP),
            Some([_, END]) => others -= 1,
            Some([rank, _]) => {
                comm.send_short(rank as usize, REPLY, &[next().map_or(NONE, |next| next as u64)]);
            }
        }
    }
}
