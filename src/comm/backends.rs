//! The backend for collectives of GPU values on each axis: NCCL from GPU to GPU, or MPI through the host.

use super::communicator::Communicator;
use super::communicator_init::{CALL, LATE, join_group};
use super::group::Group;
use super::nccl::Nccl;
use super::nccl_collectives::NcclGroup;
use super::records;
use crate::config::job::Collectives;
use crate::device::cuda::Stream;
use crate::error::{Error, Result, format_bytes};
use crate::sys::files::free_bytes;
use std::cell::OnceCell;
use std::env;
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// An axis of several ranks, on this rank.
#[derive(Clone, Copy)]
pub struct Axis<'a> {
    /// The name that is shown to users.
    pub name: &'static str,
    pub group: &'a Group,
    /// The GPU stream for collectives that are called outside of stream jobs.
    pub stream: Stream,
}

/// Joins the GPUs of every axis by NCCL if possible and if `wanted` allows it. All groups of an axis use the same
/// backend. Returns a row for each axis of several ranks, with its backend and the reason. All ranks of `all` call
/// this, with axes in the same order. A rank that is alone on an axis does nothing there. `gpu` is equal on two ranks
/// exactly if NCCL finds the same GPU: by host and PCI address.
///
/// # Errors
/// `Usage` if `wanted` is `nccl` and an axis cannot use it, or if its ranks do not join in time.
pub fn choose(all: &Group, axes: &[Axis], gpu: &str, wanted: Collectives) -> Result<Vec<String>> {
    let opened = OnceCell::new();
    let mut rows = Vec::new();
    for axis in axes {
        let alone = axis.group.size() == 1;
        let Some(name) = all.first_words(if alone { "" } else { axis.name }) else { continue };
        let joined = match wanted {
            Collectives::Mpi => Err("job.collectives = \"mpi\"".to_string()),
            Collectives::Auto | Collectives::Nccl => join(all, axis, gpu, &opened),
        };
        let joined = joined.map_err(|why| {
            let shared = Path::new("/dev/shm");
            let hint = || all.first_words(&hint_of_memory(shared, free_bytes(shared).ok()));
            let hint = why.contains(CALL).then(hint);
            hint.flatten().map_or(why.clone(), |hint| format!("{why} ({hint})"))
        });
        if let Err(why) = joined.as_ref()
            && (wanted == Collectives::Nccl || why.contains(LATE))
        {
            let asked = if wanted == Collectives::Nccl { "job.collectives = \"nccl\", but " } else { "" };
            let message = format!("{asked}the {name} axis cannot use NCCL because {why}");
            return Err(Error::usage(message).hint(if why.contains(CALL) { JOIN_HINT } else { MPI_HINT }));
        }
        let way = joined.unwrap_or_else(|why| format!("MPI through the host, because {why}"));
        rows.push(format!("{name}: {way}"));
    }
    Ok(rows)
}

const MPI_HINT: &str = "set job.collectives = \"auto\" to use MPI there";
const JOIN_HINT: &str = "set NCCL_DEBUG=INFO to see how the ranks look for each other; name their network interface in \
                         NCCL_SOCKET_IFNAME and their InfiniBand adapters in NCCL_IB_HCA; or set \
                         job.collectives = \"mpi\" to run without NCCL";

type Opened = OnceCell<std::result::Result<Arc<Nccl>, String>>;

/// Joins the GPUs of an axis. Returns the version of NCCL, or the reason against it: the same on all ranks of `all`.
fn join(all: &Group, axis: &Axis, gpu: &str, opened: &Opened) -> std::result::Result<String, String> {
    let group = axis.group;
    let set = |communicator| group.set_nccl(NcclGroup { stride: group.stride(), communicator, stream: axis.stream });
    if group.is_null() {
        set(Communicator::null(group.axis(), group.rank(), group.size()));
        return Ok("NCCL".to_string());
    }
    let alone = group.size() == 1;
    let able = if alone { Ok(None) } else { able(group, gpu, opened).map(Some) };
    agreed(all, able.as_ref().err())?;
    let nccl = able.expect("all ranks are able");
    let made = nccl.map(|nccl| join_group(&nccl, group).map_err(|error| error.message)).transpose();
    agreed(all, made.as_ref().err())?;
    made.expect("all ranks have joined").into_iter().for_each(set);
    let version = opened.get().and_then(|nccl| nccl.as_ref().ok()).map_or(String::new(), |nccl| nccl.version_name());
    let mine = format!("{version} {}", transport(group));
    Ok(format!("NCCL {}", all.first_words(if alone { "" } else { &mine }).expect("a rank has joined others")))
}

/// The transport of a group's values, as far as it is known outside of NCCL.
fn transport(group: &Group) -> String {
    let host = &group.member(0).host;
    if (0..group.size()).all(|rank| group.member(rank).host == *host) {
        return "within a host".into();
    }
    format!("between hosts {}", network(Path::new("/sys/class/infiniband"), |name| env::var(name).ok()))
}

/// The network between hosts: the adapters in `dir`, unless the environment overrides them.
fn network(dir: &Path, variable: impl Fn(&str) -> Option<String>) -> String {
    if let Some(net) = variable("NCCL_NET") {
        return format!("over NCCL_NET={net}");
    }
    let names = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    match variable("NCCL_IB_DISABLE") {
        Some(set) if set != "0" => "over sockets, because NCCL_IB_DISABLE is set".into(),
        _ if names.is_empty() => "over sockets, because there is no InfiniBand adapter".into(),
        _ => format!("over InfiniBand ({})", names.join(", ")),
    }
}

/// Bytes of shared memory that the GPUs of a host may need to connect. Containers have 64 MiB, unless they are given more.
const SHARED_BYTES: u64 = 512 << 20;

/// A hint if `dir`, where NCCL keeps what ranks of a host share, has few `free` bytes.
fn hint_of_memory(dir: &Path, free: Option<u64>) -> String {
    let Some(free) = free.filter(|free| *free < SHARED_BYTES) else { return String::new() };
    let (dir, free) = (dir.display(), format_bytes(free));
    format!(
        "{dir} has {free} free, and NCCL connects the GPUs of a host through it: start the container with \
         --shm-size=8g or --ipc=host"
    )
}

/// The variable with which NCCL lets ranks share a GPU, and the first version that knows it.
const SHARING: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
const SHARING_VERSION: [i32; 3] = [2, 30, 3];

/// Returns the library if each rank of the group has the same version and a GPU of its own, or may share it. The result
/// is the same on all ranks.
fn able(group: &Group, gpu: &str, opened: &Opened) -> std::result::Result<Arc<Nccl>, String> {
    let ranks: Vec<usize> = group.world_ranks().collect();
    let may_share = env::var(SHARING).is_ok_and(|set| !["", "0"].contains(&set.as_str()));
    let all = records::gather(group, &[(gpu.to_owned(), may_share)]).map_err(|error| error.message)?;
    let second = (0..all.len()).find_map(|i| Some((all[..i].iter().position(|other| other.0 == all[i].0)?, i)));
    let shared = second.map(|(j, i)| format!("ranks {} and {} share a GPU", ranks[j], ranks[i]));
    if let Some(why) = shared.as_ref().filter(|_| !all.iter().all(|of_rank| of_rank.1)) {
        return Err(why.clone());
    }
    let mine = opened.get_or_init(|| Nccl::open().map(Arc::new));
    let known = mine.as_ref().map(|nccl| nccl.version_name()).map_err(String::clone);
    let versions = records::gather(group, &[known]).map_err(|error| error.message)?;
    let mut first = None;
    for (version, rank) in versions.iter().zip(&ranks) {
        let version = version.as_ref().map_err(|why| format!("rank {rank}: {why}"))?;
        let first = *first.get_or_insert(version);
        if version != first {
            return Err(format!("rank {} has NCCL {first}, but rank {rank} has {version}", ranks[0]));
        }
    }
    let is_older = mine.as_ref().is_ok_and(|nccl| nccl.version < SHARING_VERSION);
    if let (Some(why), Some(version), true) = (shared, first, is_older) {
        let [major, minor, patch] = SHARING_VERSION;
        return Err(format!("{why}, and {SHARING} needs NCCL {major}.{minor}.{patch} or later (this is {version})"));
    }
    mine.clone()
}

/// Returns an error on all ranks if one has a reason.
fn agreed(all: &Group, why: Option<&String>) -> std::result::Result<(), String> {
    all.first_words(why.map_or("", |why| why)).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_shared_memory_is_named_with_the_options_of_a_container() {
        let hint = |free| hint_of_memory(Path::new("/dev/shm"), free);
        let small = hint(Some(60 << 20));
        assert!(small.starts_with("/dev/shm has 60.0 MiB free") && small.contains("--shm-size=8g"), "{small}");
        assert_eq!([hint(Some(8 << 30)), hint(None)], [""; 2]);
    }

    #[test]
    fn the_network_is_detected_from_the_adapters_unless_the_environment_sets_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let by = |set: &[(&str, &str)]| {
            network(dir.path(), |name| set.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).to_string()))
        };
        assert_eq!(by(&[]), "over sockets, because there is no InfiniBand adapter");
        for name in ["mlx5_1", "mlx5_0"] {
            fs::create_dir(dir.path().join(name)).expect("a directory");
        }
        assert_eq!(by(&[("NCCL_IB_DISABLE", "0")]), "over InfiniBand (mlx5_0, mlx5_1)");
        assert_eq!(by(&[("NCCL_IB_DISABLE", "1")]), "over sockets, because NCCL_IB_DISABLE is set");
        assert_eq!(by(&[("NCCL_NET", "AWS Libfabric")]), "over NCCL_NET=AWS Libfabric");
    }
}
