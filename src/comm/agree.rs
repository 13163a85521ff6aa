//! Agreement of a group's ranks on an error, a number or a flag of one rank.

use super::group::{Group, Member};
use super::{phase, records};
use crate::error::{Error, Result};
use crate::sys::environment;
use crate::sys::lock::lock;
use std::sync::Mutex;

/// An error that all ranks of a group know.
#[derive(Clone)]
pub(super) struct Agreed {
    message: String,
    /// Whether it arose on this rank.
    pub here: bool,
    /// Whether the group has all ranks of the job.
    pub by_all: bool,
}

static LAST_AGREED: Mutex<Option<Agreed>> = Mutex::new(None);

/// The record of the agreement on `error`, if there was one.
pub(super) fn agreed(error: &Error) -> Option<Agreed> {
    lock(&LAST_AGREED).clone().filter(|agreed| error.message.contains(&agreed.message))
}

impl Group {
    /// The largest of all ranks' numbers. All ranks call this.
    pub fn max(&self, mine: f64) -> f64 {
        let mut most = [mine];
        self.all_reduce_max_f64(&mut most);
        most[0]
    }

    /// Whether `mine` is true on any rank. All ranks call this.
    pub fn any(&self, mine: bool) -> bool {
        self.max(f64::from(u8::from(mine))) > 0.0
    }

    /// The text of the first rank with a nonempty one, the same on all ranks. All ranks call this.
    pub fn first_words(&self, mine: &str) -> Option<String> {
        let first = self.all_gather_bytes(mine.as_bytes()).into_iter().find(|words| !words.is_empty())?;
        Some(String::from_utf8_lossy(&first).into_owned())
    }

    /// Makes all ranks fail if any rank fails. Each returns the error of the lowest failing rank. The error
    /// names that rank and its host, unless all ranks have the same error.
    pub fn agree<T>(&self, local: Result<T>) -> Result<T> {
        if self.size() == 1 || !self.any(local.is_err()) {
            return local;
        }
        let stage = phase::stage().map(|stage| format!(", {stage}")).unwrap_or_default();
        let (all, stages): (Vec<Option<Error>>, Vec<String>) =
            records::gather(self, &[(local.err(), stage)])?.into_iter().unzip();
        let rank = all.iter().position(Option::is_some).expect("someone failed");
        let mut error = all[rank].clone().expect("found above");
        if all.iter().any(|other| *other != all[rank]) {
            let Member { world_rank, host } = self.member(rank);
            error = error.within(format_args!("rank {world_rank} ({host}){}", stages[rank]));
        }
        let by_all = !self.is_null() && environment::launched_ranks() == Some(self.size());
        *lock(&LAST_AGREED) = Some(Agreed { message: error.message.clone(), here: rank == self.rank(), by_all });
        Err(error)
    }
}
