//! The cores that this rank may use, and its number of threads.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The affinity mask of this process: core numbers, ascending.
pub fn mask() -> Vec<usize> {
    // SAFETY: an all-zero set is a value; the kernel writes at most the size given.
    let (code, set) = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        (libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set), set)
    };
    if code != 0 {
        return (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
    }
    // SAFETY: CPU_ISSET reads within the set for numbers below CPU_SETSIZE.
    (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

/// Moves this thread, and the threads that it starts later, to `cores`. Returns whether the system allowed it.
pub fn bind(cores: &[usize]) -> bool {
    // SAFETY: an all-zero set is a value; CPU_SET writes within it for numbers below CPU_SETSIZE; the kernel reads the
    // given size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cores.iter().filter(|core| **core < libc::CPU_SETSIZE as usize).for_each(|&core| libc::CPU_SET(core, &mut set));
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) == 0
    }
}

/// The mask of a rank, and the NUMA node of its GPU if the system reports one.
pub type MaskAndNode = (Vec<usize>, Option<usize>);

/// The share of rank `me` of a host in the cores of its GPU's node. The ranks with GPUs on that node divide its cores,
/// and hardware threads of a core stay together. `None` if the system does not report the cores of the node, or if the
/// launcher bound the rank, so that it lacks cores that another rank has.
pub fn near(ranks: &[MaskAndNode], me: usize) -> Option<Vec<usize>> {
    near_in(Path::new("/sys/devices/system"), ranks, me)
}

fn near_in(system: &Path, ranks: &[MaskAndNode], me: usize) -> Option<Vec<usize>> {
    let (mask, node) = &ranks[me];
    if ranks.iter().flat_map(|(other, _)| other).any(|core| !mask.contains(core)) {
        return None;
    }
    let list = fs::read_to_string(system.join(format!("node/node{}/cpulist", (*node)?))).ok()?;
    let mut of_node: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for core in mask.iter().copied().filter(|core| ranges(&list).any(|range| range.contains(core))) {
        let threads = fs::read_to_string(system.join(format!("cpu/cpu{core}/topology/thread_siblings_list")));
        let first = threads.ok().and_then(|list| ranges(&list).next()).map_or(core, |range| *range.start());
        of_node.entry(first).or_default().push(core);
    }
    let on_node = |ranks: &[MaskAndNode]| ranks.iter().filter(|(_, other)| other == node).count();
    let (at, sharing, all) = (on_node(&ranks[..me]), on_node(ranks), of_node.len());
    let of_node = of_node.into_values();
    // With more ranks than cores, each rank gets all cores.
    let (skipped, taken) = if all < sharing { (0, all) } else { (at * all / sharing, (at + 1) * all / sharing) };
    let share: Vec<usize> = of_node.take(taken).skip(skipped).flatten().collect();
    (!share.is_empty()).then_some(share)
}

/// The NUMA nodes on which this process may run, ascending; empty if the system does not report them.
pub fn nodes() -> Vec<usize> {
    nodes_in(Path::new("/sys/devices/system/node"), &mask())
}

fn nodes_in(dir: &Path, mask: &[usize]) -> Vec<usize> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut nodes: Vec<usize> = entries
        .filter_map(|entry| {
            let node = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let list = fs::read_to_string(entry.path().join("cpulist")).ok()?;
            mask.iter().any(|core| ranges(&list).any(|range| range.contains(core))).then_some(node)
        })
        .collect();
    nodes.sort_unstable();
    nodes
}

/// The ranges of a list such as `0-3,8,10-11`.
fn ranges(list: &str) -> impl Iterator<Item = std::ops::RangeInclusive<usize>> {
    list.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    })
}

/// The number of online cores of this machine.
pub fn cores() -> usize {
    // SAFETY: reads a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1).max(1)
}

/// The threads of one rank, and a warning if the launcher gave it fewer cores than its share of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub threads: usize,
    pub mask: usize,
    pub warning: Option<String>,
}

/// The plan for `mask` cores shared by `sharing` ranks (this one included), on a machine of `cores` with `local_ranks`
/// ranks. A cgroup may allow fewer cores than the mask (`quota`).
pub fn plan(mask: usize, sharing: usize, quota: usize, cores: usize, local_ranks: usize) -> Plan {
    let threads = (mask.min(quota) / sharing.max(1)).max(1);
    let share = cores / local_ranks.max(1);
    let plural = if local_ranks == 1 { "" } else { "s" };
    let warning = (mask / sharing.max(1) < share).then(|| {
        format!(
            "a rank is bound to {mask} of {cores} cores with {local_ranks} rank{plural} on this host, so cores stay \
             idle; pass --bind-to none or --map-by slot:PE={share} to mpirun"
        )
    });
    Plan { threads, mask, warning }
}

/// The number of cores that both the mask and the cgroup's quota allow.
pub fn quota() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_mask_is_divided_and_an_own_mask_is_not() {
        assert_eq!(plan(8, 2, 8, 8, 2), Plan { threads: 4, mask: 8, warning: None });
        assert_eq!(plan(4, 1, 4, 8, 2), Plan { threads: 4, mask: 4, warning: None });
        assert_eq!(plan(2, 4, 2, 2, 4).threads, 1);
        assert_eq!(plan(8, 1, 3, 8, 1).threads, 3);
    }

    #[test]
    fn a_mask_narrower_than_a_ranks_share_causes_a_warning() {
        let narrow = plan(1, 1, 1, 8, 2);
        assert_eq!(narrow.threads, 1);
        assert!(narrow.warning.expect("half the machine idles").contains("slot:PE=4"));
    }

    /// A description, the ranks of a host, the index of one of them, and its cores.
    type Case<'a> = (&'a str, Vec<MaskAndNode>, usize, Option<&'a [usize]>);

    #[test]
    fn unbound_ranks_divide_the_cores_of_their_gpus_node() {
        let root = tempfile::tempdir().expect("a directory");
        let write = |file: String, list: String| {
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().expect("a directory")).expect("a directory");
            fs::write(file, list).expect("a file");
        };
        // Two sockets of four cores with two threads each; a third node has memory alone.
        for (node, list) in [(0, "0-3,8-11\n"), (1, "4-7,12-15\n"), (2, "\n")] {
            write(format!("node/node{node}/cpulist"), list.into());
        }
        for core in 0..16 {
            let first = core % 8;
            write(format!("cpu/cpu{core}/topology/thread_siblings_list"), format!("{first},{}\n", first + 8));
        }
        let all: Vec<usize> = (0..16).collect();
        let of = |nodes: &[Option<usize>]| -> Vec<MaskAndNode> { nodes.iter().map(|n| (all.clone(), *n)).collect() };
        let cases: [Case; 9] = [
            ("one rank has its node", of(&[Some(1)]), 0, Some(&[4, 12, 5, 13, 6, 14, 7, 15])),
            ("two of a node divide it", of(&[Some(0), Some(1), Some(0)]), 2, Some(&[2, 10, 3, 11])),
            (
                "and no rank takes cores of another node",
                of(&[Some(0), Some(1), Some(0)]),
                1,
                Some(&[4, 12, 5, 13, 6, 14, 7, 15]),
            ),
            ("three divide it nearly", of(&[Some(0); 3]), 2, Some(&[2, 10, 3, 11])),
            ("five have all of four cores", of(&[Some(0); 5]), 4, Some(&[0, 8, 1, 9, 2, 10, 3, 11])),
            ("the system does not report the node", of(&[None, Some(0)]), 0, None),
            ("a node without cores", of(&[Some(2)]), 0, None),
            ("a node that is not there", of(&[Some(7)]), 0, None),
            ("a rank that is bound stays", vec![(vec![4], Some(0)), (vec![5], Some(0))], 0, None),
        ];
        for (what, ranks, me, want) in cases {
            assert_eq!(near_in(root.path(), &ranks, me).as_deref(), want, "{what}");
        }
        let few = vec![(vec![1, 2, 6], Some(0)); 2];
        assert_eq!(
            [0, 1].map(|me| near_in(root.path(), &few, me)),
            [Some(vec![1]), Some(vec![2])],
            "the cores of a cgroup"
        );
    }

    #[test]
    fn a_bound_thread_starts_others_on_the_same_cores() {
        let all = mask();
        let last = *all.last().expect("a core");
        let bound =
            move || (bind(&[last]) && !bind(&[])).then(|| (mask(), std::thread::spawn(mask).join().expect("a mask")));
        let bound = std::thread::spawn(bound).join().expect("a thread");
        assert_eq!(bound, Some((vec![last], vec![last])));
        assert_eq!(mask(), all, "other threads stay");
    }

    #[test]
    fn a_mask_includes_the_nodes_that_share_a_core_with_it() {
        let root = tempfile::tempdir().expect("a directory");
        for (name, list) in [("node0", "0-3,8-11\n"), ("node1", "4-7,12\n"), ("node2", "\n"), ("possible", "0-2\n")] {
            std::fs::create_dir(root.path().join(name)).expect("a directory");
            std::fs::write(root.path().join(name).join("cpulist"), list).expect("a file");
        }
        let nodes = |mask: &[usize]| nodes_in(root.path(), mask);
        assert_eq!(
            [nodes(&[2, 9]), nodes(&[12]), nodes(&[3, 4]), nodes(&[13])],
            [vec![0], vec![1], vec![0, 1], vec![]]
        );
    }
}
