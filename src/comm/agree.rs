//! An error of one rank as an error of all ranks of its group.

use super::group::{Group, Member};
use crate::error::{Error, Kind, Result};
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
    /// All ranks learn of any rank's error. Where one fails each returns an error: the lowest failing rank's, which
    /// names that rank and its host unless all ranks failed alike.
    pub fn agree<T>(&self, local: Result<T>) -> Result<T> {
        if self.size() == 1 {
            return local;
        }
        let mut failed = [f64::from(u8::from(local.is_err()))];
        self.all_reduce_max_f64(&mut failed);
        if failed[0] == 0.0 {
            return local;
        }
        let mine = local.err().map(|e| (e.exit_code(), e.message, e.hint));
        let mine = serde_json::to_vec(&mine).expect("numbers and strings serialise");
        let all: Vec<Option<Failure>> = self
            .all_gather_bytes(&mine)
            .iter()
            .map(|bytes| serde_json::from_slice(bytes).expect("a peer of the same build wrote it"))
            .collect();
        let rank = all.iter().position(Option::is_some).expect("someone failed");
        let (code, message, hint) = all[rank].clone().expect("found above");
        let mut error = Error { kind: kind_of(code), message, hint };
        if all.iter().any(|other| *other != all[rank]) {
            let Member { world_rank, host } = self.member(rank);
            error = error.within(format_args!("rank {world_rank} ({host})"));
        }
        *lock(&AGREED) = Some((error.message.clone(), rank == self.rank()));
        Err(error)
    }
}

/// Exit code, message and hint of an error: what of it travels.
type Failure = (i32, String, Option<String>);

fn kind_of(exit_code: i32) -> Kind {
    [Kind::Usage, Kind::Data, Kind::Io, Kind::Service, Kind::Stopped]
        .into_iter()
        .find(|&kind| Error::new(kind, "").exit_code() == exit_code)
        .unwrap_or(Kind::Fault)
}
