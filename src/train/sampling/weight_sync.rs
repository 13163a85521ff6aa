//! Transfer of the actor's weights to the ranks that only sample.

use crate::comm::{Group, Pending, Stream};
use crate::launch::run::Run;
use crate::learn::Role;
use crate::metrics::{Phase, Phases};
use crate::model::collect::{append_bytes, collect, store_whole};
use std::collections::VecDeque;

/// Bytes in flight on the actor's first rank. Above this limit it waits for the oldest transfer.
const SENDING_MAX: usize = 1 << 30;

/// Copies the weights to rollout ranks, if these are separate. The actor's first rank sends parameter by parameter, and
/// continues to work meanwhile.
pub struct WeightSync {
    /// Whether the ranks that sample do not learn. A null group has no other ranks.
    is_apart: bool,
    /// The stream between the actor's first rank and the ranks that sample. `None` if the actor's ranks sample, and on
    /// ranks that do not take part.
    stream: Option<Stream>,
    /// The step after which the copies were made.
    step: Option<u64>,
    sending: VecDeque<(usize, Pending<()>)>,
    /// Bytes sent by this rank in the last transfer.
    pub bytes: usize,
}

impl WeightSync {
    /// Creates the stream. All ranks call this.
    pub fn new(run: &Run) -> Self {
        let ranks = &run.ranks;
        let is_apart = ranks.rollout_is_apart() && !ranks.all.is_null();
        let takes_part = ranks.world.rank == 0 || ranks.samples();
        let split = || ranks.all.split("weights", usize::from(!takes_part), ranks.world.rank);
        let group: Option<Group> = is_apart.then(split);
        let stream = group.filter(|_| takes_part).map(|group| Stream::new("weights", &group));
        Self { is_apart, stream, step: None, sending: VecDeque::new(), bytes: 0 }
    }

    /// Sends the weights after `step` to the ranks that sample, if they do not have them yet. All ranks call this.
    pub fn send(&mut self, run: &Run, step: u64, actor: Option<&Role>, copy: Option<&mut Role>, phases: &mut Phases) {
        if !self.is_apart || self.step.replace(step) == Some(step) {
            return;
        }
        phases.time(Phase::Reshard, || match (actor, copy) {
            (Some(actor), _) => self.give(run, actor),
            (None, Some(copy)) => self.receive_weights(copy),
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

    fn receive_weights(&self, copy: &mut Role) {
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
