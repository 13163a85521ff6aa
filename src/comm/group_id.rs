//! Names of groups, the same on all of their ranks, by which a trace finds the calls of one collective.

use crate::sys::lock::lock;
use std::sync::Mutex;

/// The axes and ranks of all groups with peers so far, in the order in which this rank made them.
static GROUPS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The id of a new group, an index of `names`. `name` holds its axis and its world ranks.
pub(super) fn register(name: String) -> u32 {
    let mut groups = lock(&GROUPS);
    groups.push(name);
    groups.len() as u32 - 1
}

/// The names of all groups, by id: `zero: ranks 0 to 3`. The second group of the same axis and ranks has `(2)` after its
/// name, and so on. Ranks make their common groups in the same order, so each has the same name on all of its ranks.
pub fn names() -> Vec<String> {
    let groups = lock(&GROUPS);
    let name = |(id, name): (usize, &String)| match groups[..id].iter().filter(|other| *other == name).count() {
        0 => name.clone(),
        before => format!("{name} ({})", before + 1),
    };
    groups.iter().enumerate().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_the_same_ranks_have_names_of_their_own() {
        let ids = ["t: ranks 4 to 5", "t: ranks 4, 6", "t: ranks 4 to 5"].map(|name| register(name.into()));
        let names = names();
        let of = ids.map(|id| &*names[id as usize]);
        assert_eq!(of, ["t: ranks 4 to 5", "t: ranks 4, 6", "t: ranks 4 to 5 (2)"]);
    }
}
