//! What the caller of `generate` gives and hears while it runs.

use super::turns::Turns;
use crate::error::Result;
use crate::experience::Response;
use std::ops::Range;

/// Progress of a call of `generate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub finished: usize,
    pub total: usize,
    pub running: usize,
    /// New tokens sampled so far.
    pub new_tokens: usize,
}

/// Called with the index of a request and its response.
type Finished<'a> = dyn FnMut(usize, &Response) -> Result<()> + 'a;

/// The source of a call's requests, if it does not begin with all of them.
pub struct Queue<'a> {
    /// The maximum number of requests answered at once.
    pub batch_max: usize,
    /// Returns the next requests to answer, all requests of a prompt together, or `None` if there are no more. Ranks
    /// that share the schedule call it together, and get the same.
    pub next: &'a mut dyn FnMut() -> Option<Range<usize>>,
}

/// The optional callbacks of the caller of `generate`.
#[derive(Default)]
pub struct Hooks<'a> {
    /// Called before every forward. True ends the call with the finished responses.
    pub stop: Option<&'a dyn Fn() -> bool>,
    /// Called after every forward.
    pub progress: Option<&'a mut dyn FnMut(Progress)>,
    /// Called with the index of a request and each token sampled for it.
    pub drawn: Option<&'a mut dyn FnMut(usize, u32)>,
    /// Called with the index of a request and its response as soon as it has ended. An error ends the call.
    pub finished: Option<&'a mut Finished<'a>>,
    /// The environment that answers turns, if responses have several.
    pub turns: Option<&'a mut dyn Turns>,
    pub queue: Option<Queue<'a>>,
}

impl Hooks<'_> {
    pub(super) fn stops(&self) -> bool {
        self.stop.is_some_and(|stop| stop())
    }

    pub(super) fn report(&mut self, progress: Progress) {
        if let Some(hear) = &mut self.progress {
            hear(progress);
        }
    }

    pub(super) fn finished(&mut self, i: usize, response: &Response) -> Result<()> {
        self.finished.as_mut().map_or(Ok(()), |hear| hear(i, response))
    }
}
