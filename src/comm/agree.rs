//! What all ranks of a group learn of one: an error, a number, whether something is so.

use super::group::{Group, Member};
use super::records;
use crate::error::{Error, Result};
use crate::sys::lock::lock;
use std::sync::Mutex;

/// The last error that all ranks of a group agreed on, and whether it arose here.
static AGREED: Mutex<Option<(String, bool)>> = Mutex::new(None);

/// Whether `error` is one that ranks agreed on, and if so, whether it arose here.
pub(super) fn arose_here(error: &Error) -> Option<bool> {
    let agreed = lock(&AGREED).clone();
    agreed.filter(|(message, _)| error.message.contains(message)).map(|(_, here)| here)
}

impl Group {
    /// The largest of all ranks' numbers. A collective.
    pub fn max(&self, mine: f64) -> f64 {
        let mut most = [mine];
        self.all_reduce_max_f64(&mut most);
        most[0]
    }

    /// Whether it is so on any rank. A collective.
    pub fn any(&self, mine: bool) -> bool {
        self.max(f64::from(u8::from(mine))) > 0.0
    }

    /// All ranks learn of any rank's error. Where one fails each returns an error: the lowest failing rank's, which
    /// names that rank and its host unless all ranks failed alike.
    pub fn agree<T>(&self, local: Result<T>) -> Result<T> {
        if self.size() == 1 {
            return local;
        }
        if !self.any(local.is_err()) {
            return local;
        }
        let all: Vec<Option<Error>> = records::gather(self, &[local.err()])?;
        let rank = all.iter().position(Option::is_some).expect("someone failed");
        let mut error = all[rank].clone().expect("found above");
        if all.iter().any(|other| *other != all[rank]) {
            let Member { world_rank, host } = self.member(rank);
            error = error.within(format_args!("rank {world_rank} ({host})"));
        }
        *lock(&AGREED) = Some((error.message.clone(), rank == self.rank()));
        Err(error)
    }
}
