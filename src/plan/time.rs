//! The seconds of a step on one rank, part by part: floor = max(FLOPs / peak, bytes / peak) at all of the device's peaks,
//! prediction = floor / efficiency. (Roofline: Williams, Waterman, Patterson 2009.) Collectives: bytes over the slowest
//! link that the group crosses, and a latency for each call and step; what computing hides is not counted.

use super::case::{Case, KvCache};
use super::cut::Share;
use super::devices::{Device, Efficiency, Latency};
use super::job::{Job, head_of, learns};
use super::memory::Memory;
use super::rows::Row;
use super::shape::{Dims, Flat, Layout};
use super::work::{self, Work};
use crate::config::mesh::RoleName;
use crate::model::Head;
use crate::tensor::DType;
use std::collections::BTreeMap;

/// What a part of a step belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    Prefill,
    Decode,
    Scoring,
    Training,
    /// Communication that no computing hides.
    Exposed,
    /// Between the device's memory and the host's.
    Swapping,
}

impl Stage {
    pub const ALL: [Self; 6] =
        [Self::Prefill, Self::Decode, Self::Scoring, Self::Training, Self::Exposed, Self::Swapping];

    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Scoring => "scoring",
            Self::Training => "training",
            Self::Exposed => "communication exposed",
            Self::Swapping => "host memory",
        }
    }
}

/// One line of the arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    pub stage: Stage,
    pub name: String,
    pub work: Work,
    /// `flops`, `memory`, `link`, `network` or `host`: what bounds it.
    pub bound: &'static str,
    /// That peak, a second.
    pub peak: f64,
    /// Seconds at the peak.
    pub floor_s: f64,
    pub efficiency: f64,
    /// Seconds predicted, those that are hidden included.
    pub busy_s: f64,
    /// Seconds predicted that the step takes longer for it.
    pub seconds: f64,
}

/// A step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Time {
    pub parts: Vec<Part>,
    /// Prompt and response tokens of a step, over all ranks.
    pub tokens: usize,
}

impl Time {
    pub fn step_s(&self) -> f64 {
        self.parts.iter().map(|part| part.seconds).sum()
    }

    /// With all peaks reached and all that can be hidden hidden.
    pub fn floor_s(&self) -> f64 {
        Stage::ALL.into_iter().map(|stage| self.floor_of(stage)).sum()
    }

    pub fn of(&self, stage: Stage) -> f64 {
        self.parts.iter().filter(|part| part.stage == stage).map(|part| part.seconds).sum()
    }

    pub fn floor_of(&self, stage: Stage) -> f64 {
        let parts = self.parts.iter().filter(|part| part.stage == stage);
        parts.map(|part| if part.seconds > 0.0 { part.floor_s.min(part.seconds) } else { 0.0 }).sum()
    }
}

/// What goes between ranks: bytes of a rank, in calls of so many steps each.
#[derive(Clone, Copy)]
struct Moved {
    bytes: f64,
    calls: f64,
    steps: f64,
}

/// Adds up the parts of a step.
struct Clock<'a> {
    job: &'a Job<'a>,
    layout: &'a Layout,
    device: &'a Device,
    element: usize,
    activation: usize,
    parts: Vec<Part>,
}

/// The seconds of a step of a rank with `roles`, whose memory is `memory`.
pub fn time(case: Case, roles: &[RoleName], memory: &Memory) -> Time {
    let Case { job, layout, device, .. } = case;
    let element = if job.config.model.dtype() == DType::Bf16 { 2 } else { 4 };
    let activation = if device.is_cpu() { 4 } else { 2 };
    let mut clock = Clock { job, layout, device, element, activation, parts: Vec::new() };
    if let Some(kv) = memory.kv.filter(|kv| kv.at_once > 0) {
        clock.rollout(&kv);
    }
    for &role in roles {
        if job.is_ppo() && (role != RoleName::Actor || job.recomputes_logprobs(layout)) {
            clock.score(role);
        }
    }
    for &role in roles.iter().filter(|role| learns(**role)) {
        clock.train(role);
    }
    clock.swap(roles);
    Time { parts: clock.parts, tokens: tokens_of_a_step(job) }
}

/// Prompt and response tokens of a step, the mean of those that are looked at.
fn tokens_of_a_step(job: &Job) -> usize {
    let steps = job.looked_at();
    let tokens = |step| job.rows_of(step).iter().map(|row| row.tokens()).sum::<usize>();
    (0..steps).map(tokens).sum::<usize>() / steps
}

/// Attention of all layers over `rows`, forward.
fn attention(dims: &Dims, rows: &[Row]) -> Work {
    by_length(rows, Row::tokens, |tokens, count| work::attention(dims, count, 0, tokens))
}

/// The sum of `work(length, count)` over the lengths that rows have, as `of` measures them.
fn by_length<K: Ord + Copy>(rows: &[Row], of: impl Fn(Row) -> K, work: impl Fn(K, f64) -> Work) -> Work {
    let mut counts: BTreeMap<K, usize> = BTreeMap::new();
    for row in rows {
        *counts.entry(of(*row)).or_default() += 1;
    }
    counts.into_iter().fold(Work::default(), |sum, (key, count)| sum + work(key, count as f64))
}

/// What the fullest data rank has, in the mean of several times.
struct Load {
    tokens: f64,
    learned: f64,
    batches: f64,
    /// The rows of all times; a time has `each` of their work.
    rows: Vec<Row>,
    each: f64,
}

impl Load {
    /// The fullest rank's of each of `times`, of which each has the shares of all data ranks.
    fn of(times: Vec<Vec<Share>>) -> Self {
        let fullest = times.into_iter().filter_map(|shares| shares.into_iter().max_by_key(Share::tokens));
        let fullest: Vec<Share> = fullest.collect();
        let each = 1.0 / fullest.len().max(1) as f64;
        let mean = |of: fn(&Share) -> usize| fullest.iter().map(of).sum::<usize>() as f64 * each;
        Self {
            tokens: mean(Share::tokens),
            learned: mean(Share::learned),
            batches: mean(|share| share.microbatches.len()),
            rows: fullest.iter().flat_map(|share| share.rows.iter().copied()).collect(),
            each,
        }
    }
}

impl Clock<'_> {
    fn efficiency(&self) -> Efficiency {
        self.device.efficiency
    }

    /// A part that computes.
    fn compute(&mut self, stage: Stage, name: &str, work: Work, efficiency: f64) -> f64 {
        let flops_s = work.products / self.device.flops + work.attention / self.device.attention_flops;
        let bytes_s = work.bytes / self.device.memory;
        let floor_s = flops_s.max(bytes_s);
        let (bound, peak) =
            if flops_s >= bytes_s { ("flops", self.device.flops) } else { ("memory", self.device.memory) };
        let seconds = floor_s / efficiency;
        let name = name.to_string();
        self.parts.push(Part { stage, name, work, bound, peak, floor_s, efficiency, busy_s: seconds, seconds });
        seconds
    }

    /// A part that moves `bytes` over a group of `members` ranks that stand `stride` apart, in `calls` calls of `steps` steps each,
    /// `hidden` seconds of it behind computing. All of a group's ranks in a node pass on what goes to another node.
    fn move_bytes(&mut self, name: &str, moved: Moved, (members, stride): (usize, usize), hidden: f64) {
        let per_node = (self.device.ranks_per_node / stride).clamp(1, members);
        let between = (members.div_ceil(per_node) - 1) as f64 / (members - 1).max(1) as f64;
        self.moving(name, moved, members, (per_node as f64, between), hidden);
    }

    /// The same where each rank sends to the next alone: what goes to another node takes one rank's way there, and each step waits
    /// for it.
    fn pass_on(&mut self, name: &str, moved: Moved, (members, stride): (usize, usize), hidden: f64) {
        let per_node = (self.device.ranks_per_node / stride).clamp(1, members);
        let between = if members > per_node { 1.0 } else { 0.0 };
        self.moving(name, moved, members, (1.0, between), hidden);
    }

    /// `ways` of a node to others are taken at once, by a share `between` of the steps.
    fn moving(&mut self, name: &str, moved: Moved, members: usize, (ways, between): (f64, f64), hidden: f64) {
        let Moved { bytes, calls, steps } = moved;
        if members < 2 || bytes == 0.0 {
            return;
        }
        let across = self.device.network * ways;
        let crosses = between > 0.0 && across < self.device.link;
        let (bound, peak) = if crosses { ("network", across) } else { ("link", self.device.link) };
        let efficiency = self.efficiency().links;
        let floor_s = bytes / peak;
        let Latency { call_s, step_s, network_s } = self.device.latency;
        let busy_s = floor_s / efficiency + calls * (call_s + steps * ((1.0 - between) * step_s + between * network_s));
        let work = Work { bytes, ..Work::default() };
        let seconds = (busy_s - hidden).max(0.0);
        let (stage, name) = (Stage::Exposed, name.to_string());
        self.parts.push(Part { stage, name, work, bound, peak, floor_s, efficiency, busy_s, seconds });
    }

    // ---- rollout ----

    fn rollout(&mut self, kv: &KvCache) {
        let (job, layout) = (self.job, self.layout);
        let dims = Dims::new(&job.archs.actor, layout.rollout_tensor);
        let e = self.efficiency();
        let steps = job.looked_at();
        let each = 1.0 / steps as f64;
        let waves: Vec<Vec<Row>> = (0..steps).flat_map(|step| job.waves_of(step, layout.rollout_data())).collect();
        let in_step = waves.len() as f64 * each;
        let prompts = waves.concat();
        let times = job.config.rollout.samples_per_prompt as f64;
        let sum = |of: fn(&Row) -> usize| prompts.iter().map(of).sum::<usize>() as f64 * each;
        let (asked, read) = (prompts.len() as f64 * each, sum(|row| row.prompt));
        let forwards = in_step * (read / in_step / job.config.rollout.prefill_tokens_max as f64).max(1.0).ceil();
        let weights = work::weight_bytes(&dims, self.element, true);
        let mut prefill = work::body(&dims, read) + work::head(&dims, asked);
        prefill.bytes = forwards * work::weight_bytes(&dims, self.element, false);
        self.compute(Stage::Prefill, "products", prefill, e.prefill);
        let pairs = by_length(&prompts, |row| row.prompt, |prompt, n| work::attention(&dims, n, 0, prompt)) * each;
        self.compute(Stage::Prefill, "attention", pairs, e.attention);

        // The last token of a response is drawn, never fed.
        let longest = prompts.iter().map(|row| row.response.saturating_sub(1)).max().unwrap_or(0);
        let fed = times * sum(|row| row.response.saturating_sub(1));
        let steps = (kv.waves * longest) as f64;
        let mut decode = work::body(&dims, fed) + work::head(&dims, fed);
        decode.bytes = steps * weights;
        let name = format!("{steps:.0} forwards of {} rows", kv.at_once);
        self.compute(Stage::Decode, &name, decode, e.decode);
        let cached = if self.device.is_cpu() { 4 } else { 2 };
        let behind = |(prompt, fed): (usize, usize), n: f64| {
            let past = prompt as f64 + fed as f64 / 2.0;
            let bytes = n * fed as f64 * work::cached_bytes(&dims, past, cached);
            Work { bytes, ..work::attention(&dims, n, prompt, fed) }
        };
        let over = by_length(&prompts, |row| (row.prompt, row.response.saturating_sub(1)), behind) * (times * each);
        self.compute(Stage::Decode, "attention over the cache", over, e.attention_decode);
        let drawn = times * sum(|row| row.response);
        let drawn = Work { bytes: drawn * (dims.v * 8) as f64, ..Work::default() };
        self.compute(Stage::Decode, "drawing tokens", drawn, e.sample);

        let tensor = layout.rollout_tensor;
        let rows = read + fed;
        self.all_reduce(
            "rollout: sums over tensor",
            (rows, (forwards + steps) * (2 * dims.layers) as f64),
            dims.d,
            tensor,
        );
        if layout.reshards() {
            let flat = Flat::of(&job.archs.actor, RoleName::Actor, tensor);
            let ranks = layout.mesh.ranks();
            let bytes = (flat.len() * self.element) as f64 * (ranks - 1) as f64 / ranks as f64;
            let moved = Moved { bytes, calls: flat.units().len() as f64, steps: (ranks - 1) as f64 };
            self.move_bytes("rollout: resharding the actor", moved, (ranks, 1), 0.0);
        }
    }

    /// Sums of `rows` rows of `width` activations over the tensor axis, in `calls` calls.
    fn all_reduce(&mut self, name: &str, (rows, calls): (f64, f64), width: usize, tensor: usize) {
        let layers = self.job.archs.actor.layers as f64;
        let share = 2.0 * (tensor - 1) as f64 / tensor as f64;
        let bytes = 2.0 * layers * rows * (width * self.activation) as f64 * share;
        self.move_bytes(name, Moved { bytes, calls, steps: 2.0 * (tensor - 1) as f64 }, (tensor, 1), 0.0);
    }

    // ---- forwards and backwards over packed rows ----

    /// This rank's dims, and its part of the tokens and of the head's rows.
    fn share(&self, role: RoleName, load: &Load) -> (Dims, f64, f64) {
        let arch = self.job.archs.of(role).expect("a role that is planned has a model");
        let sequence = self.layout.mesh.sequence as f64;
        let dims = Dims::new(arch, self.layout.mesh.tensor);
        (dims, load.tokens / sequence, load.learned / sequence)
    }

    fn score(&mut self, role: RoleName) {
        let (mesh, e) = (self.layout.mesh, self.efficiency());
        let load = Load::of((0..self.job.looked_at()).map(|step| self.job.scoring_of(step, &mesh)).collect());
        let batches = load.batches;
        let (dims, tokens, seen) = self.share(role, &load);
        let name = role.name();
        let mut products = work::body(&dims, tokens);
        products.bytes = batches * work::weight_bytes(&dims, self.element, false);
        let mut busy = self.compute(Stage::Scoring, &format!("{name} products"), products, e.score);
        let sequence = mesh.sequence as f64;
        let pairs = attention(&dims, &load.rows) * (load.each / sequence);
        let attention = self.compute(Stage::Scoring, &format!("{name} attention"), pairs, e.attention);
        if head_of(role) == Head::LanguageModel {
            busy += self.compute(Stage::Scoring, &format!("{name} head"), work::head(&dims, seen), e.head);
        }
        let calls = batches * (2 * dims.layers) as f64;
        self.all_reduce(&format!("{name} scoring: sums over tensor"), (tokens, calls), dims.d, mesh.tensor);
        self.ring(&format!("{name} scoring: ring"), &dims, (tokens, batches), 1.0, attention);
        if self.layout.stage() == 3 {
            self.gather(role, &format!("{name} scoring: gathering units"), batches, busy + attention);
        }
    }

    fn train(&mut self, role: RoleName) {
        let (mesh, e) = (self.layout.mesh, self.efficiency());
        let (job, updates) = (self.job, self.job.updates() as f64);
        let load = Load::of(job.training(&mesh));
        let batches = load.batches * updates;
        let (dims, tokens, seen) = self.share(role, &load);
        let (tokens, seen) = (tokens * updates, seen * updates);
        let name = role.name();
        let again = if job.config.gradient.recompute { 1.0 } else { 0.0 };
        let passes = 3.0 + again * work::again(&dims);
        let mut products = work::body(&dims, tokens) * passes;
        products.bytes = batches * passes * work::weight_bytes(&dims, self.element, false);
        let mut busy = self.compute(Stage::Training, &format!("{name} products"), products, e.train);
        let pairs = attention(&dims, &load.rows) * (load.each * updates / mesh.sequence as f64);
        let forward = self.compute(Stage::Training, &format!("{name} attention"), pairs * (1.0 + again), e.attention);
        let backward = pairs * 2.0;
        let backward =
            self.compute(Stage::Training, &format!("{name} attention backward"), backward, e.attention_backward);
        if head_of(role) == Head::LanguageModel {
            let head = work::head(&dims, seen) * 3.0;
            busy += self.compute(Stage::Training, &format!("{name} head"), head, e.head_train);
        }
        let arch = job.archs.of(role).expect("a role that is planned has a model");
        let flat = Flat::of(arch, role, mesh.tensor);
        let (len, ranks) = (flat.len() as f64, self.layout.zero_ranks());
        let own = if self.layout.stage() == 0 { len } else { flat.own(ranks) as f64 };
        let held = if self.layout.stage() >= 2 { own } else { len };
        let bytes = updates * work::update_bytes(own, held, self.element == 2);
        self.compute(Stage::Training, &format!("{name} adamw"), Work { bytes, ..Work::default() }, e.optimizer);

        // Of a layer's two sums that of attention is formed again.
        let sums = 2.0 + again / 2.0;
        let calls = batches * (2 * dims.layers) as f64 * sums;
        let what = format!("{name} training: sums over tensor");
        self.all_reduce(&what, (tokens * sums, calls), dims.d, mesh.tensor);
        self.ring(&format!("{name} training: ring"), &dims, (tokens, batches), 3.0 + again, forward + backward);
        self.reduce(role, &flat, batches, updates, busy + forward + backward);
    }

    /// Keys and values (and their gradients) round the ring, behind attention.
    fn ring(&mut self, name: &str, dims: &Dims, (tokens, batches): (f64, f64), passes: f64, hidden: f64) {
        let sequence = self.layout.mesh.sequence;
        let steps = (sequence - 1) as f64;
        let bytes = steps * tokens * (2 * dims.kv() * dims.layers * self.activation) as f64 * passes;
        let stride = self.layout.mesh.tensor;
        let moved = Moved { bytes, calls: steps * batches * passes * dims.layers as f64, steps: 1.0 };
        self.pass_on(name, moved, (sequence, stride), hidden);
    }

    /// Gathering all units of a role `times` times, behind computing but for the first unit.
    fn gather(&mut self, role: RoleName, name: &str, times: f64, busy: f64) {
        let arch = self.job.archs.of(role).expect("a role that is planned has a model");
        let flat = Flat::of(arch, role, self.layout.mesh.tensor);
        let ranks = self.layout.zero_ranks();
        let share = (ranks - 1) as f64 / ranks as f64;
        let bytes = times * (flat.len() * self.element) as f64 * share;
        let moved = Moved { bytes, calls: times * flat.units().len() as f64, steps: (ranks - 1) as f64 };
        let hidden = busy * (1.0 - 1.0 / flat.units().len() as f64);
        self.move_bytes(name, moved, (ranks, self.layout.mesh.tensor), hidden);
    }

    /// Sums of gradients over the ranks of ZeRO, and the gathering of weights.
    fn reduce(&mut self, role: RoleName, flat: &Flat, batches: f64, updates: f64, busy: f64) {
        let (ranks, stride) = (self.layout.zero_ranks(), self.layout.mesh.tensor);
        let share = (ranks - 1) as f64 / ranks as f64;
        let (len, steps) = (flat.len() as f64 * share, (ranks - 1) as f64);
        let units = flat.units().len() as f64;
        let name = role.name();
        let hidden = busy * (1.0 - 1.0 / units);
        match self.layout.stage() {
            0 => self.move_bytes(
                &format!("{name} training: sums of gradients"),
                Moved { bytes: 2.0 * 4.0 * len * updates, calls: updates, steps: 2.0 * steps },
                (ranks, stride),
                0.0,
            ),
            1 => self.move_bytes(
                &format!("{name} training: gradients and weights"),
                Moved { bytes: (4.0 + self.element as f64) * len * updates, calls: 2.0 * updates, steps },
                (ranks, stride),
                0.0,
            ),
            stage => {
                // Both share the time in which the backward computes.
                let sums = format!("{name} training: scattering gradients");
                let moved = Moved { bytes: 4.0 * len * batches, calls: units * batches, steps };
                self.move_bytes(&sums, moved, (ranks, stride), hidden / 2.0);
                if stage == 3 {
                    self.gather(role, &format!("{name} training: gathering units"), 2.0 * batches, busy / 2.0);
                } else {
                    let bytes = self.element as f64 * len * updates;
                    let gather = format!("{name} training: gathering weights");
                    self.move_bytes(&gather, Moved { bytes, calls: updates, steps }, (ranks, stride), 0.0);
                }
            }
        }
    }

    // ---- host memory ----

    fn swap(&mut self, roles: &[RoleName]) {
        let (layout, ranks) = (self.layout, self.layout.zero_ranks());
        let (mut bytes, updates) = (0.0, self.job.updates() as f64);
        for &role in roles {
            let arch = self.job.archs.of(role).expect("a role that is planned has a model");
            let flat = Flat::of(arch, role, layout.mesh.tensor);
            let (len, own) = (flat.len() as f64, flat.own(ranks) as f64);
            if layout.swap.optimizer && learns(role) {
                let state = if self.element == 2 { 12.0 } else { 8.0 };
                // In before each update, out after it.
                bytes += 2.0 * updates * state * if layout.stage() == 0 { len } else { own };
            }
            let idle = !learns(role) || (role == RoleName::Critic && !self.device.is_cpu());
            if layout.swap.roles && idle {
                // What does not learn need not be written back.
                let ways = if learns(role) { 2.0 } else { 1.0 };
                bytes += ways * self.element as f64 * if layout.stage() == 3 { own } else { len };
            }
        }
        if bytes > 0.0 {
            let (peak, efficiency) = (self.device.host, self.efficiency().links);
            let floor_s = bytes / peak;
            let seconds = floor_s / efficiency;
            self.parts.push(Part {
                stage: Stage::Swapping,
                name: "optimizer state and idle roles, in and out".into(),
                work: Work { bytes, ..Work::default() },
                bound: "host",
                peak,
                floor_s,
                efficiency,
                busy_s: seconds,
                seconds,
            });
        }
    }
}
