//! Collectives that GPUs are at, beside the host: which one takes long, and what the compute streams waited for them.

use super::accounting::{self, Entered};
use crate::device::cuda::work::Marks;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

struct Flight {
    entered: Entered,
    marks: Arc<Marks>,
}

static FLIGHTS: Mutex<VecDeque<Flight>> = Mutex::new(VecDeque::new());

fn flights() -> MutexGuard<'static, VecDeque<Flight>> {
    FLIGHTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes what was launched; nothing where it is a part of a capture.
pub(super) fn begin(entered: Entered, marks: Option<Arc<Marks>>) {
    let Some(marks) = marks else { return };
    let mut flights = flights();
    flights.push_back(Flight { entered, marks });
    // Two land for each that begins, so that there are never many more than the GPU has yet to do.
    let mut landed = Vec::with_capacity(2);
    for _ in 0..2 {
        let Some(waited) = flights.front().and_then(|flight| flight.marks.waited()) else { break };
        landed.extend(flights.pop_front().map(|flight| (flight.entered, waited)));
    }
    drop(flights);
    book(landed);
}

/// Books what the compute streams have waited, as far as they have come.
pub(super) fn land() {
    let mut landed = Vec::new();
    flights().retain(|flight| {
        let waited = flight.marks.waited();
        landed.extend(waited.map(|seconds| (flight.entered.clone(), seconds)));
        waited.is_none()
    });
    book(landed);
}

fn book(landed: Vec<(Entered, f64)>) {
    for (entered, seconds) in landed {
        match entered.stream {
            Some(stream) => accounting::waited(entered.axis, stream, seconds),
            // The call itself was booked when it was launched.
            None => accounting::stood_still(entered.axis, entered.op, seconds),
        }
    }
}

/// The one that has been under way for the longest time.
pub(super) fn oldest() -> Option<Entered> {
    // Marks are looked at without the lock: a GPU that hangs may answer late.
    let all: Vec<(Entered, Arc<Marks>)> =
        flights().iter().map(|flight| (flight.entered.clone(), flight.marks.clone())).collect();
    all.into_iter().find(|(_, marks)| !marks.is_done()).map(|(entered, _)| entered)
}
