//! Records that ranks exchange and that checkpoint files contain (postcard: a compact binary format for serde).

use super::Group;
use crate::error::{Error, Result};
use serde::{Serialize, de::DeserializeOwned};

pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    postcard::to_stdvec(value).expect("records encode into memory")
}

pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|e| Error::fault(format!("malformed record of a rank or a checkpoint: {e}")))
}

/// The items of all ranks, in rank order, on every rank.
pub fn gather<T: Serialize + DeserializeOwned>(group: &Group, mine: &[T]) -> Result<Vec<T>> {
    let mut all = Vec::new();
    for bytes in group.all_gather_bytes(&encode(&mine)) {
        all.extend(decode::<Vec<T>>(&bytes)?);
    }
    Ok(all)
}

/// Returns on every rank the value that `make` returns on the first rank. A rank of a null group has no first rank to
/// receive from, and calls `make` itself.
pub fn of_first<T: Serialize + DeserializeOwned>(group: &Group, make: impl FnOnce() -> T) -> T {
    of_rank(group, 0, make)
}

/// The same of rank `root`.
pub fn of_rank<T: Serialize + DeserializeOwned>(group: &Group, root: usize, make: impl FnOnce() -> T) -> T {
    if group.size() == 1 {
        return make();
    }
    let mut bytes = if group.rank() == root || group.is_null() { encode(&make()) } else { Vec::new() };
    group.broadcast_bytes(root, &mut bytes);
    decode(&bytes).expect("a peer of the same build wrote it")
}
