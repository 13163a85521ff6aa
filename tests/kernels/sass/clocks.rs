//! How many clocks a loop takes by reckoning: of each unit, and of a scheduler with the warps that it has. Nothing is measured.
//!
//! A sub-partition of a multiprocessor issues one instruction a clock, and its units take a warp's 32 lanes in as many clocks as
//! the CUDA programming guide's table of throughputs says (a multiprocessor's results a clock, divided by four): f32 2 on sm_80
//! and 1 on sm_90, integers, logic, comparisons 2, MUFU 8. Of shared memory's 128 bytes a clock a sub-partition has a quarter. An
//! mma of m16n8k16 is 2048 multiply-adds: 8 clocks at an A100's 1024 a clock of a multiprocessor; 4 at a H100's peak, of which
//! mma.sync reached 62.9 % (arXiv:2501.12084).

use super::listing::Instruction;
use std::collections::{BTreeMap, VecDeque};

/// Clocks from the end of an instruction's own to its result, and of a copy from memory: assumed, near what microbenchmarks
/// find (arXiv:1804.06826, 2206.02874). Results of fixed latency need none: the compiler's stalls hold it.
const SHARED_LATENCY: f64 = 24.0;
const SPECIAL_LATENCY: f64 = 18.0;
const MEMORY_LATENCY: f64 = 700.0;
/// How far shared memory may be behind before a warp waits to ask it for more.
const SHARED_QUEUE: f64 = 96.0;
/// Turns that each warp makes; those of the middle count.
const TURNS: usize = 24;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Unit {
    Tensor,
    Shared,
    Special,
    Fma,
    Alu,
    /// The scheduler alone.
    Issue,
}

pub fn mma_clocks(arch: &str) -> f64 {
    if arch == "sm_80" { 8.0 } else { 4.0 / 0.629 }
}

/// Which unit an instruction takes, and for how many clocks.
pub fn cost(instruction: &Instruction, arch: &str) -> (Unit, f64) {
    let name = &instruction.name;
    // Wavefronts of 128 bytes, four clocks of the quarter each.
    let wavefronts = |one: &str, two: &str| {
        if name.contains(one) {
            4.0
        } else if name.contains(two) {
            2.0
        } else {
            1.0
        }
    };
    match instruction.kind() {
        "HMMA" => (Unit::Tensor, mma_clocks(arch)),
        "MUFU" | "F2F" | "F2I" | "I2F" | "FRND" => (Unit::Special, 8.0),
        "LDSM" => (Unit::Shared, 4.0 * wavefronts(".4", ".2")),
        "LDS" | "STS" | "LDGSTS" | "LDG" | "STG" | "RED" | "REDG" => (Unit::Shared, 4.0 * wavefronts(".128", ".64")),
        "SHFL" => (Unit::Shared, 4.0),
        "FFMA" | "FMUL" | "FADD" => (Unit::Fma, if arch == "sm_80" { 2.0 } else { 1.0 }),
        "IMAD" => (Unit::Fma, 2.0),
        "BRA" | "BAR" | "NOP" | "BSSY" | "BSYNC" | "WARPSYNC" | "DEPBAR" | "LDGDEPBAR" | "CALL" | "EXIT" => {
            (Unit::Issue, 1.0)
        }
        // Of the uniform registers, for all lanes at once.
        kind if kind.starts_with('U') => (Unit::Issue, 1.0),
        _ => (Unit::Alu, 2.0),
    }
}

/// Clocks of each unit for one turn of a warp.
pub fn units(way: &[&Instruction], arch: &str) -> BTreeMap<Unit, f64> {
    let mut clocks = BTreeMap::from([(Unit::Issue, way.len() as f64)]);
    for (unit, cost) in way.iter().map(|one| cost(one, arch)).filter(|(unit, _)| *unit != Unit::Issue) {
        *clocks.entry(unit).or_default() += cost;
    }
    clocks
}

/// For how many groups of copies behind it a DEPBAR does not wait.
fn left_by(wait: &Instruction) -> usize {
    let number = wait.operands.rsplit("0x").next().map(|digits| usize::from_str_radix(digits, 16));
    number.and_then(Result::ok).unwrap_or(0)
}

/// Of the groups of copies that a loop starts, the fewest products that stand between one and the wait for it. None without copies.
pub fn products_behind_copies(way: &[&Instruction]) -> Option<usize> {
    let (mut products, mut copies, mut fewest) = (0, 0, None);
    let mut groups = VecDeque::new();
    for one in std::iter::repeat_n(way, TURNS).flatten() {
        match one.kind() {
            "HMMA" => products += 1,
            "LDGSTS" => copies += 1,
            "LDGDEPBAR" => groups.push_back((std::mem::take(&mut copies) > 0).then_some(products)),
            "DEPBAR" => {
                while groups.len() > left_by(one) {
                    if let Some(begun) = groups.pop_front().flatten() {
                        fewest = Some(fewest.map_or(products - begun, |least: usize| least.min(products - begun)));
                    }
                }
            }
            _ => {}
        }
    }
    fewest
}

/// The fewest instructions between a load from memory and the wait for it; the loop goes on behind its end. None without loads.
pub fn instructions_behind_loads(way: &[&Instruction]) -> Option<usize> {
    let behind = |from: usize, barrier: usize| {
        (1..=way.len()).find(|far| way[(from + far) % way.len()].waits >> barrier & 1 == 1)
    };
    let loads = way.iter().enumerate().filter(|(_, one)| one.kind() == "LDG");
    loads.filter_map(|(at, one)| behind(at, one.sets[0]?)).min()
}

#[derive(Default)]
struct Warp {
    /// Its next instruction, counted through all turns.
    at: usize,
    ready: f64,
    /// When each of its barriers has ended.
    barriers: [f64; 6],
    /// When its groups of copies have landed, and that of the group which it has not closed.
    groups: VecDeque<f64>,
    open: f64,
    /// Barriers of the block that it has passed.
    met: usize,
}

struct Scheduler<'a> {
    way: &'a [&'a Instruction],
    arch: &'a str,
    warps: Vec<Warp>,
    /// Warps of a block among them.
    of_block: usize,
    free: BTreeMap<Unit, f64>,
}

impl Scheduler<'_> {
    fn next(&self, warp: &Warp) -> &Instruction {
        self.way[warp.at % self.way.len()]
    }

    fn is_done(&self, warp: &Warp) -> bool {
        warp.at >= TURNS * self.way.len()
    }

    /// When a warp may issue its next instruction; none while others of its block have not come to its barrier.
    fn may_issue(&self, number: usize, clock: f64) -> Option<f64> {
        let warp = &self.warps[number];
        let one = self.next(warp);
        let mut at = warp.ready.max(clock);
        for (_, ended) in warp.barriers.iter().enumerate().filter(|(i, _)| one.waits >> i & 1 == 1) {
            at = at.max(*ended);
        }
        let (unit, _) = cost(one, self.arch);
        let free = self.free.get(&unit).copied().unwrap_or(0.0);
        at = match unit {
            Unit::Issue => at,
            Unit::Shared => at.max(free - SHARED_QUEUE),
            _ => at.max(free),
        };
        match one.kind() {
            "DEPBAR" if warp.groups.len() > left_by(one) => {
                Some(at.max(warp.groups[warp.groups.len() - 1 - left_by(one)]))
            }
            "BAR" => {
                let first = number / self.of_block * self.of_block;
                let mut others = self.warps[first..first + self.of_block].iter().filter(|other| !self.is_done(other));
                let has_come =
                    |other: &Warp| other.met > warp.met || other.met == warp.met && self.next(other).kind() == "BAR";
                others.all(has_come).then_some(at)
            }
            _ => Some(at),
        }
    }

    fn issue(&mut self, number: usize, at: f64) {
        let one = self.way[self.warps[number].at % self.way.len()];
        let (unit, cost) = cost(one, self.arch);
        let free = self.free.entry(unit).or_insert(0.0);
        let end = at.max(*free) + cost;
        if unit != Unit::Issue {
            *free = end;
        }
        let latency = match one.kind() {
            "LDSM" | "LDS" | "SHFL" => SHARED_LATENCY,
            "LDG" => MEMORY_LATENCY,
            _ => SPECIAL_LATENCY,
        };
        let warp = &mut self.warps[number];
        for (barrier, wait) in one.sets.iter().zip([latency, 0.0]) {
            if let Some(barrier) = barrier {
                warp.barriers[*barrier] = warp.barriers[*barrier].max(end + wait);
            }
        }
        match one.kind() {
            "LDGSTS" => warp.open = at + MEMORY_LATENCY,
            "LDGDEPBAR" => warp.groups.push_back(std::mem::take(&mut warp.open)),
            "BAR" => warp.met += 1,
            _ => {}
        }
        warp.ready = at + f64::from(one.stall.max(1));
        warp.at += 1;
    }
}

/// Share of time for which the tensor cores multiply when `blocks` blocks of threads, each with `of_block` warps on this scheduler,
/// walk a loop. Of warps that could go on at once the first goes on.
pub fn share(way: &[&Instruction], arch: &str, blocks: usize, of_block: usize) -> f64 {
    // They begin apart by a tenth of a turn.
    let begin = |i: usize| Warp { ready: (i * way.len() / 10) as f64, ..Warp::default() };
    let warps = (0..blocks * of_block).map(begin).collect();
    let mut scheduler = Scheduler { way, arch, warps, of_block, free: BTreeMap::new() };
    let (mut clock, mut ends) = (0.0, Vec::new());
    loop {
        let mut first: Option<(f64, usize)> = None;
        for number in (0..scheduler.warps.len()).filter(|i| !scheduler.is_done(&scheduler.warps[*i])) {
            let at = scheduler.may_issue(number, clock);
            first =
                at.map(|at| (at, number)).into_iter().chain(first).min_by(|a, b| a.partial_cmp(b).expect("numbers"));
        }
        let Some((at, number)) = first else { break };
        scheduler.issue(number, at);
        clock = at + 1.0;
        if scheduler.warps[number].at.is_multiple_of(way.len()) {
            ends.push(at);
        }
    }
    let (from, to) = (ends.len() / 4, ends.len() * 3 / 4);
    let products = way.iter().filter(|one| one.kind() == "HMMA").count();
    (to - from) as f64 * products as f64 * mma_clocks(arch) / (ends[to] - ends[from])
}
