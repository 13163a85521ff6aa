//! The ranks that the launcher started.

use super::group::{Group, Member};
use super::links::Links;
use super::raw::{self, Comm};
use super::records;
use super::stream::{self, Stream};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::sys::affinity::{self, Plan};
use crate::sys::{environment, host};
use serde::{Serialize, de::DeserializeOwned};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether MPI is running. A process may start it only once.
static RUNNING: AtomicBool = AtomicBool::new(false);

/// This rank's place among all ranks.
#[derive(Clone, Debug)]
pub struct World {
    pub rank: usize,
    pub size: usize,
    pub local_size: usize,
    /// The host of each rank. Equal names mean the same machine.
    pub hosts: Vec<String>,
    group: Group,
}

impl World {
    /// Joins the ranks that mpirun or srun started. Without a launcher, it is a world of one rank that never starts
    /// MPI.
    ///
    /// # Errors
    /// `Usage` if the launcher started a different number of ranks than MPI sees (the binary was built against another
    /// MPI). `Fault` if MPI allows only one thread.
    pub fn start() -> Result<Self> {
        let Some(expected) = environment::launched_ranks() else { return Ok(Self::null(0, 1)) };
        assert!(!RUNNING.swap(true, Ordering::SeqCst), "World::start was called twice");
        if !raw::init() {
            return Err(Error::fault("this MPI was built without MPI_THREAD_MULTIPLE")
                .hint("use an MPI built with thread support (Open MPI has it by default)"));
        }
        let comm = Comm::world();
        let (rank, size) = (comm.rank(), comm.size());
        if size != expected {
            return Err(Error::usage(format!("the launcher started {expected} ranks, but MPI sees {size}")).hint(
                "use the mpirun of the MPI that this binary was built against (ldd shows it), or srun --mpi=pmix",
            ));
        }
        let mine = (host::name(), host::boot_id());
        let lonely = (0..size).map(|world_rank| Member { world_rank, host: mine.0.clone() }).collect();
        let all = records::gather(&Group::from_comm("world", comm, lonely, Arc::default()), &[mine])?;
        let hosts = host::distinct(&all);
        let members = hosts.iter().enumerate().map(|(world_rank, host)| Member { world_rank, host: host.clone() });
        let group = Group::from_comm("world", comm, members.collect(), Arc::default());
        let on_this_host = || hosts.iter().filter(|host| **host == hosts[rank]).count();
        let local_size = environment::local_ranks().unwrap_or_else(on_this_host);
        Ok(Self { rank, size, local_size, hosts, group })
    }

    /// A rank of a world without peers, each on a host of its own, for a plan. MPI is not started, and collectives
    /// return at once (`Group::null`).
    pub fn null(rank: usize, size: usize) -> Self {
        let group = Group::null("world", rank, size);
        Self { rank, size, local_size: 1, hosts: vec![host::name(); size], group }
    }

    /// All ranks.
    pub fn group(&self) -> Group {
        self.group.clone()
    }

    /// The threads for this rank: its cores, divided by the number of ranks of this host with the same cores. All ranks
    /// call this.
    pub fn threads(&self) -> Plan {
        let mask = affinity::mask();
        let mine = records::encode(&(&self.hosts[self.rank], &mask));
        let sharing = self.group.all_gather_bytes(&mine).iter().filter(|other| **other == mine).count();
        affinity::plan(mask.len(), sharing, affinity::quota(), affinity::cores(), self.local_size)
    }

    /// The axes of a mesh on the ranks `range` only. `None` for a rank outside. All ranks of the world call this.
    ///
    /// # Panics
    /// If the mesh needs a different number of ranks.
    pub fn axes_of(&self, range: Range<usize>, mesh: &Mesh) -> Option<Axes> {
        if range == (0..self.size) {
            return Some(Axes::split_mesh(&self.group, mesh));
        }
        let inside = range.contains(&self.rank);
        let place = match self.rank {
            rank if inside => (rank - range.start, range.len()),
            rank if rank < range.start => (rank, self.size - range.len()),
            rank => (rank - range.len(), self.size - range.len()),
        };
        let all = along(&self.group, "all", usize::from(inside), place, 1);
        inside.then(|| Axes::split_mesh(&all, mesh))
    }
}

/// Splits `all` along an axis: ranks of equal `color` form a group. `(rank, size)` is this rank's place in its group.
fn along(all: &Group, axis: &'static str, color: usize, (rank, size): (usize, usize), stride: usize) -> Group {
    if all.is_null() { Group::null_every(stride, axis, rank, size) } else { all.split(axis, color, rank) }
}

/// The names of the axes of experts.
pub(super) const EXPERT: &str = "expert";
pub(super) const REPLICAS: &str = "expert replicas";

/// The groups of this rank, one per axis.
#[derive(Clone, Debug)]
pub struct Axes {
    pub data: Group,
    pub pipeline: Group,
    /// The parts of the layers that each stage has.
    pub chunks: usize,
    /// The transfers between neighboring stages.
    pub links: Arc<Links>,
    /// The first and the last stage, which both hold a tied embedding. This rank alone on any other stage.
    pub tied: Group,
    pub sequence: Group,
    pub tensor: Group,
    /// data x sequence, sequence fastest: the ranks that ZeRO shards over.
    pub zero: Group,
    /// Neighbours on `zero` that divide the experts of a layer.
    pub expert: Group,
    /// The ranks of `zero` that have the same experts. This rank alone without an expert axis.
    pub replicas: Group,
    /// All ranks of the mesh.
    pub all: Group,
    /// Collectives over `zero` in the background.
    pub zero_stream: Arc<Stream>,
    /// The same over `replicas`, or over `zero` without an expert axis.
    pub replicas_stream: Arc<Stream>,
    /// Exchanges over `sequence` in the background.
    pub ring_stream: Arc<Stream>,
}

impl Axes {
    /// One rank alone.
    pub fn one() -> Self {
        Self::split_mesh(&Group::one(), &Mesh::data_only(1))
    }

    /// The axes of a mesh over all ranks of `all`. All of them call this.
    ///
    /// # Panics
    /// If the mesh needs a different number of ranks.
    pub fn split_mesh(all: &Group, mesh: &Mesh) -> Self {
        assert_eq!(mesh.ranks(), all.size(), "the number of ranks of mesh {mesh}");
        let rank = all.rank();
        let tensor = rank % mesh.tensor;
        let sequence = rank / mesh.tensor % mesh.sequence;
        let pipeline = rank / (mesh.tensor * mesh.sequence) % mesh.pipeline;
        let stride = mesh.tensor * mesh.sequence;
        let data = rank / (stride * mesh.pipeline);
        let shards = (data * mesh.sequence + sequence, mesh.data * mesh.sequence);
        let zero = along(all, "zero", pipeline * mesh.tensor + tensor, shards, mesh.tensor);
        let zero_stream = Arc::new(Stream::new("zero", &zero));
        let (expert, replica) = (shards.0 % mesh.expert, shards.0 / mesh.expert);
        let color = |of: usize| (of * mesh.pipeline + pipeline) * mesh.tensor + tensor;
        let (replicas, replicas_stream) = if mesh.expert == 1 {
            (Group::one(), zero_stream.clone())
        } else {
            let (place, stride) = ((replica, shards.1 / mesh.expert), mesh.expert * mesh.tensor);
            let replicas = along(all, REPLICAS, color(expert), place, stride);
            let stream = Arc::new(Stream::new("replicas", &replicas));
            (replicas, stream)
        };
        let (chain, tensors) = (
            along(all, "pipeline", rank - pipeline * stride, (pipeline, mesh.pipeline), stride),
            along(all, "tensor", rank - tensor, (tensor, mesh.tensor), 1),
        );
        let ring = along(all, "sequence", rank - sequence * mesh.tensor, (sequence, mesh.sequence), mesh.tensor);
        Self {
            data: along(all, "data", rank - data * mesh.pipeline * stride, (data, mesh.data), mesh.pipeline * stride),
            tied: Self::tied(all, mesh, pipeline),
            chunks: 1,
            links: Arc::new(Links::new(&chain, &tensors)),
            pipeline: chain,
            tensor: tensors,
            expert: along(all, EXPERT, color(replica), (expert, mesh.expert), mesh.tensor),
            replicas,
            all: all.clone(),
            zero_stream,
            replicas_stream,
            ring_stream: Arc::new(Stream::new(stream::RING, &ring)),
            sequence: ring,
            zero,
        }
    }

    /// The first and the last of the stages that this rank is one of; itself if it is stage `pipeline` between them.
    fn tied(all: &Group, mesh: &Mesh, pipeline: usize) -> Group {
        let (last, stride) = (mesh.pipeline - 1, mesh.tensor * mesh.sequence);
        if last == 0 {
            return Group::one();
        }
        let first = all.rank() - pipeline * stride;
        let is_end = pipeline == 0 || pipeline == last;
        let (color, place) = if is_end { (first, (usize::from(pipeline > 0), 2)) } else { (all.rank(), (0, 1)) };
        along(all, "tied embedding", color, place, last * stride)
    }

    /// The rank of the last stage on the pipeline axis.
    pub fn last_stage(&self) -> usize {
        self.pipeline.size() - 1
    }

    /// The value that `make` returns on the last stage, on all ranks. All ranks call this.
    pub fn of_last_stage<T: Serialize + DeserializeOwned>(&self, make: impl FnOnce() -> T) -> T {
        records::of_rank(&self.pipeline, self.last_stage(), make)
    }
}

/// Ends every rank of the job with this exit code if MPI is running. Otherwise returns.
pub(super) fn abort(code: i32) {
    if RUNNING.load(Ordering::SeqCst) {
        raw::abort(code);
    }
}

/// Ends MPI if it is running.
pub(super) fn finalize() {
    if RUNNING.swap(false, Ordering::SeqCst) {
        raw::finalize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::accounting;

    #[test]
    fn any_rank_of_any_mesh_runs_without_its_peers() {
        let calls =
            || accounting().get(&("zero", "all_reduce_sum_ordered")).map_or((0, 0), |total| (total.calls, total.bytes));
        for (mesh, rank, zero, tensor) in [
            (Mesh { data: 3, pipeline: 2, sequence: 2, tensor: 4, expert: 1 }, 47, (5, 6), (3, 4)),
            (Mesh { data: 2, pipeline: 1, sequence: 2, tensor: 1, expert: 1 }, 2, (2, 4), (0, 1)),
            (Mesh { data: 1024, pipeline: 1, sequence: 1, tensor: 8, expert: 1 }, 8, (1, 1024), (0, 8)),
        ] {
            let axes = Axes::split_mesh(&Group::null("all", rank, mesh.ranks()), &mesh);
            let place = |group: &Group| (group.rank(), group.size());
            assert_eq!(
                [place(&axes.zero), place(&axes.tensor), place(&axes.all)],
                [zero, tensor, (rank, mesh.ranks())]
            );
            let (group, size, before) = (&axes.zero, zero.1, calls());
            let mut x = [1.5, 2.5];
            group.barrier();
            group.all_reduce_sum_ordered(&mut x);
            group.all_reduce_max_f64(&mut [3.0]);
            group.reduce_scatter_sum(&mut x, &vec![0..0; size]);
            group.all_gather(&mut x, &vec![2..2; size]);
            assert_eq!((x, calls()), ([1.5, 2.5], (before.0 + 1, before.1 + 8)));
            assert_eq!(group.all_gather_bytes(b"me"), vec![b"me".to_vec(); size]);
            let mut got = [0.0; 3];
            group.shift(&x, &mut got);
            assert_eq!(got, [1.5, 2.5, 0.0]);
            assert!(group.agree(Err::<(), _>(Error::data("row 7"))).is_err());
            let summed = axes.zero_stream.submit(|group| {
                let mut x = [4.0; 9];
                group.all_reduce_sum_ordered(&mut x);
                (x[0], std::thread::current().id())
            });
            assert_eq!(summed.wait(), (4.0, std::thread::current().id()), "a job runs in place");
        }
        let world = World::null(5, 8);
        let axes = |range| world.axes_of(range, &Mesh::data_only(4));
        assert!(axes(0..4).is_none() && axes(4..8).is_some_and(|axes| axes.data.rank() == 1));
    }
}
