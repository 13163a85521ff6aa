//! The layout of a job on its ranks, and the memory that a rank is expected to hold.

use crate::config::Config;
use crate::config::job::Recompute;
use crate::config::mesh::Offload;
use crate::data::RowTokens;
use crate::mesh::Mesh;

/// The layout of a job on its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub mesh: Mesh,
    /// ZeRO stage: 0 nothing is sharded, 1 optimizer state, 2 gradients too, 3 weights too.
    pub zero: usize,
    /// The parts of the layers that each pipeline stage has.
    pub chunks: usize,
    /// Ranks that share each matrix during rollout.
    pub rollout_tensor: usize,
    pub swap: Swap,
}

/// The state that is offloaded to host memory while it is not needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Swap {
    /// AdamW's moments and master weights.
    pub state: StateSwap,
    /// Weights of all roles except the actor during rollout; weights of untrained models also during training.
    pub roles: bool,
}

/// The times at which AdamW's moments and master weights are offloaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum StateSwap {
    #[default]
    Never,
    /// Onloaded before the first update of a step, offloaded after the last.
    BetweenSteps,
    /// Onloaded before each update, offloaded after it.
    BetweenUpdates,
}

impl Swap {
    /// The offloading that a job asks for.
    pub fn from_offload(offload: &[Offload]) -> Self {
        let waits = offload.contains(&Offload::Optimizer);
        let state = if waits { StateSwap::BetweenUpdates } else { StateSwap::Never };
        Self { state, roles: offload.contains(&Offload::Roles) }
    }

    /// The union of both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { state: self.state.max(other.state), roles: self.roles || other.roles }
    }

    /// The value of `mesh.offload`.
    pub fn offload(self) -> Vec<Offload> {
        let waits = [(self.has_state(), Offload::Optimizer), (self.roles, Offload::Roles)];
        waits.into_iter().filter(|(does, _)| *does).map(|(_, what)| what).collect()
    }

    pub fn has_state(self) -> bool {
        self.state != StateSwap::Never
    }
}

impl Layout {
    /// Groups of ranks that share the prompts of a rollout.
    pub fn rollout_data(&self) -> usize {
        self.mesh.ranks() / self.rollout_tensor
    }

    /// The same layout on `ranks` ranks, with another size of the data axis.
    #[must_use]
    pub fn on_ranks(&self, ranks: usize) -> Self {
        let rest = self.mesh.ranks() / self.mesh.data;
        Self { mesh: Mesh { data: ranks / rest, ..self.mesh }, ..*self }
    }

    /// The layout of the rollout.
    pub fn rollout(&self) -> Mesh {
        Mesh { tensor: self.rollout_tensor, ..Mesh::data_only(self.rollout_data()) }
    }

    pub fn describe(&self) -> String {
        let Mesh { data, pipeline, sequence, tensor, expert } = self.mesh;
        let others = [("pipeline", pipeline), ("sequence", sequence), ("tensor", tensor)];
        let others = others.into_iter().filter(|(_, n)| *n > 1).map(|(name, n)| format!(" x {name} {n}"));
        let chunks = if self.chunks > 1 { format!(" in {} chunks", self.chunks) } else { String::new() };
        let axes = format!("data {data}{}", others.collect::<String>());
        let rollout = (self.rollout_tensor != tensor).then(|| format!("rollout tensor {}", self.rollout_tensor));
        let offloaded = match (self.swap.state, self.swap.roles) {
            (StateSwap::Never, false) => None,
            (StateSwap::Never, true) => Some("idle roles in host memory"),
            (_, true) => Some("optimizer and idle roles in host memory"),
            (StateSwap::BetweenSteps, false) => Some("optimizer in host memory during the rollout"),
            (StateSwap::BetweenUpdates, false) => Some("optimizer in host memory"),
        };
        let experts = (expert > 1).then(|| format!("expert {expert}"));
        let all = [
            Some(axes + &chunks),
            experts,
            Some(format!("zero {}", self.zero)),
            rollout,
            offloaded.map(str::to_string),
        ];
        all.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// The memory and time that the plan expects of a rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expected {
    /// The bytes that a run measures: on a GPU without its libraries' memory, on a CPU the resident memory.
    pub taken: u64,
    /// The most bytes that tensors alone take at once.
    pub arena: usize,
    /// Bytes of the fullest moment by purpose.
    pub groups: Vec<(&'static str, usize)>,
    /// The most bytes of gradients, and of optimizer state.
    pub gradients: usize,
    pub state: usize,
    /// The most bytes of pinned host memory at once, or of memory-mapped files.
    pub host: usize,
    /// Bytes of the rollout's forwards and graphs.
    pub forwards: usize,
    /// Seconds of a step.
    pub step_s: f64,
}

/// Computes the memory of a rank of each placement with a model. The arguments are: whether cuBLASLt is used and keeps
/// its workspace, the lengths of the job's first rows and of its evaluation rows, and the number of images in all rows.
pub type Count = Box<dyn Fn(&Config, Option<[bool; 2]>, [&[RowTokens]; 2], usize) -> Vec<Option<Expected>>>;

/// The plan of a run, the same on all ranks.
#[derive(Default)]
pub struct Expectations {
    /// The expectations for a rank of each placement.
    pub expected: Vec<Option<Expected>>,
    /// Whether no layout is sure to fit. The plan counts the longest rows that the job allows. Shorter rows may fit,
    /// and a rank that runs out of memory reports it.
    pub is_tight: bool,
    /// Counts memory for given rows; none in a plan.
    pub count: Option<Count>,
    /// Peak FLOP/s of a rank's GPU; none on CPUs.
    pub gpu_flops: Option<f64>,
    /// The chosen recomputation, if the job leaves that to the plan.
    pub recompute: Recompute,
    /// The most tokens of a micro-batch, if the job leaves that to the plan.
    pub microbatch_tokens: Option<usize>,
}

/// Describes a ZeRO stage: `stage 2: optimizer state and gradients sharded over 4 ranks`.
pub fn describe_zero(mesh: &Mesh, stage: usize) -> String {
    let ranks = mesh.data * mesh.sequence;
    let sharded =
        ["nothing", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights"];
    let plural = if ranks == 1 { "" } else { "s" };
    format!("stage {stage}: {} sharded over {ranks} rank{plural}", sharded[stage])
}
