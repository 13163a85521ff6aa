//! The seconds of a step on one rank, from the operations and collectives that a null device counted. At the device's
//! peaks, floor = max(FLOPs / peak, bytes / peak), and prediction = floor / efficiency. (Roofline: Williams, Waterman,
//! Patterson 2009.) Collectives take their bytes over the slowest link that the group crosses, and a latency for each
//! call and message. Time that overlaps with computation is not counted, except for the multiprocessors that NCCL takes. Norms, rotations and softmax are not counted,
//! but are part of the efficiency.

use super::devices::{Device, Efficiency, Latency, NARROW_ROWS};
use crate::device::null::{self, Over, Phase, Record, Task, Work};
use crate::sys::environment::NCCL_CTAS;
use std::collections::BTreeMap;

/// The stage of a step that a part belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    Prefill,
    Decode,
    Scoring,
    Training,
    /// Communication that computation does not hide.
    Exposed,
    /// Between the device's memory and the host's.
    Swapping,
    /// The wait for other stages of a pipeline, at the start and the end of an update.
    Bubble,
}

impl Stage {
    pub const ALL: [Self; 7] =
        [Self::Prefill, Self::Decode, Self::Scoring, Self::Training, Self::Exposed, Self::Swapping, Self::Bubble];

    pub fn name(self) -> &'static str {
        ["prefill", "decode", "scoring", "training", "communication exposed", "host memory", "pipeline bubble"]
            [self as usize]
    }

    /// The stage of a phase's computation; none for phases outside of a step.
    fn from_phase(phase: Phase) -> Option<Self> {
        match phase {
            Phase::Rollout | Phase::Prefill => Some(Self::Prefill),
            Phase::Decode => Some(Self::Decode),
            Phase::Reward | Phase::Score => Some(Self::Scoring),
            Phase::Train => Some(Self::Training),
            Phase::Load | Phase::Checkpoint | Phase::Eval => None,
        }
    }
}

/// One row of the arithmetic table.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    pub stage: Stage,
    pub name: String,
    pub work: Work,
    /// The bound: `flops`, `memory`, `link`, `network` or `host`.
    pub bound: &'static str,
    /// The peak of the bound, per second.
    pub peak: f64,
    /// The seconds at the peak.
    pub floor_s: f64,
    pub efficiency: f64,
    /// The predicted seconds, including hidden ones.
    pub busy_s: f64,
    /// The predicted seconds that it adds to the step.
    pub seconds: f64,
}

/// The time of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Time {
    pub parts: Vec<Part>,
    /// Prompt and response tokens of a step, over all ranks.
    pub tokens: usize,
    /// The seconds of sampling and scoring, which each round of dynamic sampling takes.
    pub round_s: f64,
    /// The seconds of an evaluation.
    pub evaluation_s: f64,
    /// The seconds of micro-batches in training and in scoring, without the optimizer and the sums of gradients.
    of_microbatches: [f64; 2],
}

impl Time {
    /// The time of `steps` steps of `tokens` tokens on `device`.
    pub(super) fn from_record(record: &Record, steps: f64, tokens: usize, device: &Device) -> Self {
        let parts = parts(&record.work, steps, device);
        let seconds = |parts: &[(Task, Part)], counts: fn(Phase) -> bool| -> f64 {
            parts.iter().filter(|(task, _)| counts(task.phase)).map(|(_, part)| part.seconds).sum()
        };
        let round_s = seconds(&parts, |phase| Stage::from_phase(phase) != Some(Stage::Training));
        let evaluation_s = seconds(&self::parts(&record.evaluation, 1.0, device), |_| true);
        let is_of_microbatch = |task: &Task| {
            let is_gradient = |over: Over| over.axis == "zero" || over.axis == "expert replicas";
            task.op != null::OPTIMIZER && task.op != null::OFFLOAD && !task.over.is_some_and(is_gradient)
        };
        let of_microbatches = [Phase::Train, Phase::Score].map(|phase| -> f64 {
            let own = parts.iter().filter(|(task, _)| task.phase == phase && is_of_microbatch(task));
            own.map(|(_, part)| part.seconds).sum()
        });
        let mut parts: Vec<Part> = parts.into_iter().map(|(_, part)| part).filter(|part| part.busy_s > 0.0).collect();
        parts.sort_by_key(|part| part.stage);
        Self { parts, tokens, round_s, evaluation_s, of_microbatches }
    }

    /// Adds the wait for the other of `stages` stages: the time of p - 1 of the micro-batches, whose number is m in an
    /// update and in a pass that scores all samples. With v chunks in a stage it is a v-th of that.
    pub(super) fn wait_for_stages(&mut self, stages: usize, chunks: usize, [update, scoring]: [f64; 2]) {
        let [train, score] = self.of_microbatches;
        for (name, seconds, count) in [("train", train, update), ("score", score, scoring)] {
            let seconds = seconds * (stages - 1) as f64 / count / chunks as f64;
            if seconds > 0.0 {
                let name = format!("{name}: {} of {count:.0} micro-batches", stages - 1);
                let (work, bound) = (Work::default(), "stages");
                let (stage, floor_s, busy_s) = (Stage::Bubble, seconds, seconds);
                self.parts.push(Part {
                    stage,
                    name,
                    work,
                    bound,
                    peak: 0.0,
                    floor_s,
                    efficiency: 1.0,
                    busy_s,
                    seconds,
                });
            }
        }
    }

    pub fn of_stage(&self, stage: Stage) -> f64 {
        self.parts.iter().filter(|part| part.stage == stage).map(|part| part.seconds).sum()
    }

    pub fn step_s(&self) -> f64 {
        Stage::ALL.into_iter().map(|stage| self.of_stage(stage)).sum()
    }

    /// The seconds at all peaks, with everything hidden that can be hidden.
    pub fn floor_of(&self, stage: Stage) -> f64 {
        let parts = self.parts.iter().filter(|part| part.stage == stage);
        parts.map(|part| if part.seconds > 0.0 { part.floor_s.min(part.seconds) } else { 0.0 }).sum()
    }
}

/// The parts of one of `steps` steps, with the tasks that they are.
fn parts(all: &BTreeMap<Task, Work>, steps: f64, device: &Device) -> Vec<(Task, Part)> {
    let each = |work: &Work| Work {
        flops: work.flops / steps,
        bytes: work.bytes / steps,
        calls: work.calls / steps,
        messages: work.messages / steps,
    };
    let parts = all
        .iter()
        .filter_map(|(task, work)| Some((*task, part(task, Stage::from_phase(task.phase)?, each(work), device))));
    let mut parts: Vec<(Task, Part)> = parts.collect();
    hide(&mut parts, device);
    parts
}

/// The share of its peak that an operation reaches. A GEMM with bf16 weights does as many FLOPs per byte as it has
/// rows.
fn efficiency(e: &Efficiency, stage: Stage, op: &str, work: &Work) -> f64 {
    match (op, stage) {
        (null::ATTENTION, Stage::Decode) => e.attention_decode,
        (null::ATTENTION, _) => e.attention,
        (null::ATTENTION_BACKWARD, _) => e.attention_backward,
        (null::HEAD, _) => e.head,
        (null::HEAD_BACKWARD, _) => e.head_train,
        (null::SAMPLING, _) => e.sample,
        (null::OPTIMIZER, _) => e.optimizer,
        (_, Stage::Decode) if work.flops > (NARROW_ROWS + 0.5) * work.bytes => e.decode_wide,
        (_, Stage::Decode) => e.decode,
        (_, Stage::Prefill | Stage::Scoring) => e.score,
        _ => e.train,
    }
}

fn part(task: &Task, stage: Stage, work: Work, device: &Device) -> Part {
    if let Some(over) = &task.over {
        return moved(task, over, work, device);
    }
    if task.op == null::OFFLOAD {
        let (peak, efficiency) = (device.host, device.efficiency.links);
        let floor_s = work.bytes / peak;
        let (stage, name, seconds) =
            (Stage::Swapping, format!("{} in and out", task.phase.name()), floor_s / efficiency);
        return Part { stage, name, work, bound: "host", peak, floor_s, efficiency, busy_s: seconds, seconds };
    }
    let is_attention = [null::ATTENTION, null::ATTENTION_BACKWARD].contains(&task.op);
    let flops = if is_attention { device.attention_flops } else { device.flops };
    let (flops_s, bytes_s) = (work.flops / flops, work.bytes / device.memory);
    let (bound, peak) = if flops_s >= bytes_s { ("flops", flops) } else { ("memory", device.memory) };
    let (floor_s, efficiency) = (flops_s.max(bytes_s), efficiency(&device.efficiency, stage, task.op, &work));
    let of = if task.phase == Phase::Reward { " of reward models" } else { "" };
    let (name, seconds) = (format!("{}{of}", task.op), floor_s / efficiency);
    Part { stage, name, work, bound, peak, floor_s, efficiency, busy_s: seconds, seconds }
}

/// A collective. All of a group's ranks in a node forward data to another node. If each rank sends only to the next,
/// one rank's link to the other node carries it, and each message waits for it.
fn moved(task: &Task, over: &Over, work: Work, device: &Device) -> Part {
    let (members, is_ring) = (over.members, ["shift", "send"].contains(&task.op));
    let per_node = (device.ranks_per_node / over.stride).clamp(1, members);
    let (ways, between) = if is_ring {
        (1.0, if members > per_node { 1.0 } else { 0.0 })
    } else {
        (per_node as f64, (members.div_ceil(per_node) - 1) as f64 / (members - 1).max(1) as f64)
    };
    let across = device.network * ways;
    let crosses = between > 0.0 && across < device.link;
    let (bound, peak) = if crosses { ("network", across) } else { ("link", device.link) };
    let (floor_s, efficiency) = (work.bytes / peak, device.efficiency.links);
    let Latency { call_s, step_s, network_s } = device.latency;
    let message_s = (1.0 - between) * step_s + between * network_s;
    let busy_s = floor_s / efficiency + work.calls * call_s + work.messages * message_s;
    let name = format!("{}: {} over {}", task.phase.name(), task.op, over.axis);
    Part { stage: Stage::Exposed, name, work, bound, peak, floor_s, efficiency, busy_s, seconds: busy_s }
}

/// Deducts the seconds of collectives that overlap with computation, except the seconds that they take from it: NCCL runs
/// on some of the multiprocessors. Only the first call is always exposed.
fn hide(parts: &mut [(Task, Part)], device: &Device) {
    let taken = device.gpu.map_or(0.0, |gpu| NCCL_CTAS as f64 / gpu.multiprocessors as f64);
    let is_hidden = |task: &Task| task.over.is_some_and(|over| over.is_hidden);
    let mut left: BTreeMap<Phase, f64> = BTreeMap::new();
    for (task, part) in parts.iter().filter(|(task, _)| task.over.is_none()) {
        *left.entry(task.phase).or_default() += part.busy_s;
    }
    for (task, part) in parts.iter_mut().filter(|(task, _)| is_hidden(task)) {
        let computing = left.entry(task.phase).or_default();
        let hidden = (part.busy_s * (1.0 - 1.0 / part.work.calls.max(1.0))).min(*computing);
        *computing -= hidden;
        part.seconds -= hidden * (1.0 - taken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hidden_collective_takes_its_multiprocessors_from_the_computation() {
        let over = Over { axis: "zero", members: 8, stride: 1, is_hidden: true };
        let part = |busy_s: f64, calls: f64| Part {
            stage: Stage::Exposed,
            name: String::new(),
            work: Work { calls, ..Work::default() },
            bound: "link",
            peak: 1.0,
            floor_s: busy_s,
            efficiency: 1.0,
            busy_s,
            seconds: busy_s,
        };
        let task = |op, over| Task { phase: Phase::Train, op, over };
        let of = |device: &Device| {
            let mut parts =
                vec![(task(null::GEMM, None), part(20.0, 1.0)), (task("gather", Some(over)), part(10.0, 5.0))];
            hide(&mut parts, device);
            parts[1].1.seconds
        };
        // 8 of 10 seconds are hidden, and 8 of 108 multiprocessors are taken.
        let gpu = of(&Device::gpu("a800-80g", 25.0).expect("known"));
        assert!((gpu - (2.0 + 8.0 * 8.0 / 108.0)).abs() < 1e-12, "{gpu}");
        assert_eq!(of(&Device::cpu(1 << 30, 1)), 2.0);
    }

    #[test]
    fn decode_gemms_of_more_rows_than_a_tile_have_their_own_rate() {
        let rate = |gpu: &str, phase: Phase, rows: f64| {
            let (device, task) = (Device::gpu(gpu, 25.0).expect("known"), Task { phase, op: null::GEMM, over: None });
            let work = Work { flops: rows * 1e9, bytes: 1e9, ..Work::default() };
            part(&task, Stage::from_phase(phase).expect("part of a step"), work, &device).efficiency
        };
        assert_eq!([64.0, 72.0].map(|rows| rate("a800-80g", Phase::Decode, rows)), [0.62, 0.50]);
        assert_eq!([64.0, 72.0].map(|rows| rate("h200", Phase::Decode, rows)), [0.45, 0.42]);
        assert_eq!(["a100-40g", "h800"].map(|gpu| rate(gpu, Phase::Train, 8192.0)), [0.62, 0.44]);
    }
}
