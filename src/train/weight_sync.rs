//! The actor's weights on their way to the ranks that only sample.

use crate::comm::{Group, Pending, Stream};
use crate::device::null;
use crate::launch::run::Run;
use crate::learn::Role;
use crate::metrics::{Phase, Phases};
use crate::model::collect::{append_bytes, collect, store_whole};
use std::collections::VecDeque;

/// Bytes on their way that the actor's first rank holds: beyond them it waits for the oldest.
const SENDING_MAX: usize = 1 << 30;

/// Copies the weights to ranks of their own, where these sample: parameter by parameter, from the actor's first rank, which goes on while
/// they are sent.
pub struct WeightSync {
    /// Over the actor's first rank and those that sample; none where these are the actor's, and on ranks that have no part in it.
    stream: Option<Stream>,
    /// The step behind which the copies were made.
    step: Option<u64>,
    sending: VecDeque<(usize, Pending<()>)>,
    /// Sent in the last turn, from this rank.
    pub bytes: usize,
}

impl WeightSync {
    /// All ranks call this.
    pub fn new(run: &Run) -> Self {
        let ranks = &run.ranks;
        let (apart, takes_part) = (ranks.rollout_is_apart(), ranks.world.rank == 0 || ranks.samples());
        let split = || ranks.all.split("weights", usize::from(!takes_part), ranks.world.rank);
        let group: Option<Group> = (apart && !null::is_active()).then(split);
        let stream = group.filter(|_| takes_part).map(|group| Stream::new("weights", &group));
        Self { stream, step: None, sending: VecDeque::new(), bytes: 0 }
    }

    /// Brings the weights behind `step` to the ranks that sample, where they are not there yet. All ranks call this.
    pub fn send(&mut self, run: &Run, step: u64, actor: Option<&Role>, copy: Option<&mut Role>, phases: &mut Phases) {
        if !run.ranks.rollout_is_apart() || null::is_active() || self.step.replace(step) == Some(step) {
            return;
        }
        phases.time(Phase::Reshard, || match (actor, copy) {
            (Some(actor), _) => self.give(run, actor),
            (None, Some(copy)) => self.take(copy),
            (None, None) => {}
        });
    }

    fn give(&mut self, run: &Run, actor: &Role) {
        let (weights, dtype) = (&actor.weights, actor.weights.dtype());
        let whole = actor.whole();
        self.sending.drain(..).for_each(|(_, sent)| sent.wait());
        self.bytes = 0;
        let mut bytes = Vec::new();
        collect(actor.arch(), weights, &run.ranks.axes, |index, rows| {
            append_bytes(dtype, rows, &mut bytes);
            if bytes.len() == whole.specs()[index].elements() * dtype.bytes() {
                self.submit(std::mem::take(&mut bytes));
            }
        });
    }

    fn submit(&mut self, mut bytes: Vec<u8>) {
        let stream = self.stream.as_ref().expect("the actor's first rank sends");
        let len = bytes.len();
        self.bytes += len;
        let sent = stream.submit(move |group| group.broadcast_bytes(0, &mut bytes));
        self.sending.push_back((len, sent));
        while self.sending.iter().map(|(len, _)| len).sum::<usize>() > SENDING_MAX {
            self.sending.pop_front().expect("some are on their way").1.wait();
        }
    }

    fn take(&self, copy: &mut Role) {
        let stream = self.stream.as_ref().expect("ranks that sample receive");
        let receive = || {
            stream.submit(|group| {
                let mut bytes = Vec::new();
                group.broadcast_bytes(0, &mut bytes);
                bytes
            })
        };
        let count = copy.weights.table.specs().len();
        let mut next = Some(receive());
        for index in 0..count {
            let bytes = next.take().expect("asked for in the turn before").wait();
            next = (index + 1 < count).then(receive);
            store_whole(&mut copy.weights, index, &bytes);
        }
        copy.weights.release();
    }
}
