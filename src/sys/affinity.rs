//! The cores that this rank may use, and how many threads that makes.

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

/// NUMA nodes on which this process may run, ascending; none where the system does not report them.
pub fn nodes() -> Vec<usize> {
    nodes_in(std::path::Path::new("/sys/devices/system/node"), &mask())
}

fn nodes_in(dir: &std::path::Path, mask: &[usize]) -> Vec<usize> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut nodes: Vec<usize> = entries
        .filter_map(|entry| {
            let node = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let list = std::fs::read_to_string(entry.path().join("cpulist")).ok()?;
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

/// Cores of this machine that are switched on.
pub fn cores() -> usize {
    // SAFETY: reads a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1).max(1)
}

/// Threads for one rank, and a warning where the launcher left it fewer cores than its share of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub threads: usize,
    pub mask: usize,
    pub warning: Option<String>,
}

/// `mask` cores shared by `sharing` ranks (this one included), on a machine of `cores` with `local_ranks` ranks; a
/// cgroup may allow fewer than the mask holds (`quota`).
pub fn plan(mask: usize, sharing: usize, quota: usize, cores: usize, local_ranks: usize) -> Plan {
    let threads = (mask.min(quota) / sharing.max(1)).max(1);
    let share = cores / local_ranks.max(1);
    let warning = (mask / sharing.max(1) < share).then(|| {
        format!(
            "bound to {mask} of {cores} cores with {local_ranks} ranks on this host: the rest idles; \
             pass --bind-to none, or --map-by slot:PE={share}, to mpirun"
        )
    });
    Plan { threads, mask, warning }
}

/// Cores that the mask and the cgroup's quota allow together.
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
    fn a_mask_narrower_than_the_share_is_warned_of() {
        let narrow = plan(1, 1, 1, 8, 2);
        assert_eq!(narrow.threads, 1);
        assert!(narrow.warning.expect("half the machine idles").contains("slot:PE=4"));
    }

    #[test]
    fn the_nodes_of_a_mask_are_those_that_share_a_core_with_it() {
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
