//! How collectives of values on GPUs go over each axis: from GPU to GPU by NCCL, or through the host by MPI.

use super::communicator::Communicator;
use super::communicator_init::join_group;
use super::group::Group;
use super::nccl::Nccl;
use super::nccl_collectives::NcclGroup;
use super::records;
use crate::config::job::Collectives;
use crate::device::cuda::Stream;
use crate::error::{Error, Result};
use std::cell::OnceCell;
use std::sync::Arc;

/// An axis of several ranks, on this rank.
#[derive(Clone, Copy)]
pub struct Axis<'a> {
    /// As the user knows it.
    pub name: &'static str,
    pub group: &'a Group,
    /// Where collectives go that no job of a stream calls.
    pub stream: Stream,
}

/// Joins the GPUs of every axis where that can be and `wanted` allows it: one way for all groups of an axis. Returns a row for
/// each axis of several ranks: how its collectives go, and why. All ranks of `all` call this, with axes in the same order; one
/// that has an axis alone joins nobody there. `gpu` is equal on two ranks that share a GPU, on no others.
///
/// # Errors
/// `Usage` where `wanted` is `nccl` and an axis cannot.
pub fn choose(all: &Group, axes: &[Axis], gpu: &str, wanted: Collectives) -> Result<Vec<String>> {
    let opened = OnceCell::new();
    let mut rows = Vec::new();
    for axis in axes {
        let alone = axis.group.size() == 1;
        let Some(name) = first(all, if alone { "" } else { axis.name }) else { continue };
        let joined = match wanted {
            Collectives::Mpi => Err("job.collectives = \"mpi\"".to_string()),
            Collectives::Auto | Collectives::Nccl => join(all, axis, gpu, &opened),
        };
        if let (Collectives::Nccl, Err(why)) = (wanted, &joined) {
            let message = format!("job.collectives = \"nccl\", and the {name} axis has no NCCL, because {why}");
            return Err(Error::usage(message).hint("job.collectives = \"auto\" takes MPI there"));
        }
        let way = joined.unwrap_or_else(|why| format!("MPI through the host, because {why}"));
        rows.push(format!("{name}: {way}"));
    }
    Ok(rows)
}

type Opened = OnceCell<std::result::Result<Arc<Nccl>, String>>;

/// The version of NCCL that joins the GPUs of an axis, or why none does: the same on all ranks of `all`.
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
    Ok(format!("NCCL {}", first(all, if alone { "" } else { &version }).expect("a rank has joined others")))
}

/// The library, where each rank of the group has the same and a GPU of its own. All of them get the same answer.
fn able(group: &Group, gpu: &str, opened: &Opened) -> std::result::Result<Arc<Nccl>, String> {
    let ranks: Vec<usize> = group.world_ranks().collect();
    let gpus = group.all_gather_bytes(gpu.as_bytes());
    for (i, gpu) in gpus.iter().enumerate() {
        if let Some(j) = gpus[..i].iter().position(|other| other == gpu) {
            return Err(format!("ranks {} and {} share a GPU", ranks[j], ranks[i]));
        }
    }
    let mine = opened.get_or_init(|| Nccl::open().map(Arc::new));
    let known = mine.as_ref().map(|nccl| nccl.version_name()).map_err(String::clone);
    let versions = records::gather(group, &[known]).map_err(|error| error.message)?;
    let mut first = None;
    for (version, rank) in versions.iter().zip(&ranks) {
        let version = version.as_ref().map_err(|why| format!("rank {rank}: {why}"))?;
        let first = *first.get_or_insert(version);
        if version != first {
            return Err(format!("rank {} has NCCL {first}, rank {rank} {version}", ranks[0]));
        }
    }
    mine.clone()
}

/// The first words that a rank has; all ranks get the same.
fn first(all: &Group, words: &str) -> Option<String> {
    let of_ranks = all.all_gather_bytes(words.as_bytes());
    of_ranks.iter().find(|words| !words.is_empty()).map(|words| String::from_utf8_lossy(words).into_owned())
}

/// An error on all ranks where one has a reason.
fn agreed(all: &Group, why: Option<&String>) -> std::result::Result<(), String> {
    first(all, why.map_or("", |why| why)).map_or(Ok(()), Err)
}
