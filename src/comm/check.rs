//! Before a run trains on GPUs: everything that it will let them send to each other arrives.
//!
//! On each axis of several ranks patterns (`pattern`) go through the functions that the job will call there, by the way that
//! was chosen for the axis, on its own stream and behind its own events: sizes that are odd, on both sides of the sizes at which
//! a way changes its steps, and of several MiB. What a call reads is written just before it by work that may still be under way,
//! and what it brings is copied away just behind it: an event that nobody waits for shows as values that stood there before.

use super::check_host;
use super::group::Group;
use super::linked::WHOLE_MAX;
use super::pattern::{Pattern, STALE, Source};
use super::stream::{Pending, Stream};
use super::ways::Axis;
use crate::config::optim::GradientOrder;
use crate::device::Device;
use crate::device::cuda::{Memory, gpu, owned_by};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Flat, SliceMut, Tensor};
use std::ops::Range;

/// Bytes of the largest buffers.
const LARGE: usize = 4 << 20;
/// Values of others: odd ones, and more than a short message holds.
const SMALL: [usize; 3] = [1, 7, 1037];
const MIDDLE: usize = 40_001;
/// Bytes that are cleared, so often, to keep the compute stream at work while a call is launched.
const BUSY_BYTES: usize = 32 << 20;
const BUSY_TIMES: usize = 6;

const HINT: &str = "NCCL_DEBUG=INFO tells how ranks are connected; job.collectives = \"mpi\" sends all of it through the host, \
                    job.check = false trains all the same";

/// What a job does over an axis.
#[derive(Clone, Copy, Debug)]
pub enum Duty<'a> {
    /// Sums of activations, gathers and exchanges of logits; and weights that go into the rollout's layout.
    Tensor,
    /// Blocks that travel around the ring.
    Ring(&'a Stream),
    /// Gradients that are summed, weights that are gathered, and those that go into the rollout's layout.
    Zero(&'a Stream, GradientOrder),
}

/// A function of `staged`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    SumInOrder,
    ReduceScatter(GradientOrder),
    AllGather,
    Shift,
    AllToAll,
}

impl Op {
    fn words(self) -> &'static str {
        match self {
            Self::SumInOrder => "the sum in rank order",
            Self::ReduceScatter(GradientOrder::Fast) => "reduce-scatter",
            Self::ReduceScatter(GradientOrder::Fixed) => "reduce-scatter as a tree",
            Self::AllGather => "all-gather",
            Self::Shift => "send and receive around the ring",
            Self::AllToAll => "all-to-all",
        }
    }

    /// Whether what is sent stands where the result comes.
    fn is_in_place(self) -> bool {
        !matches!(self, Self::Shift | Self::AllToAll)
    }
}

/// One call.
#[derive(Clone, Copy, Debug)]
struct Case {
    op: Op,
    dtype: DType,
    len: usize,
    /// Whether ranks have equal shares.
    is_even: bool,
    number: usize,
    rank: usize,
    size: usize,
}

/// What a call reads, where it reads elsewhere, and what it writes.
struct Buffers {
    send: Memory,
    receive: Memory,
}

/// Where a call is made: by this thread, or as a job of a stream.
#[derive(Clone, Copy)]
enum By<'a> {
    Thread(&'a Group),
    Job(&'a Stream),
}

enum Flight {
    Landed(Buffers),
    Away(Pending<Buffers>),
}

/// Patterns through all functions that a job calls over `axes`, and between all ranks at the host; how many calls this rank has
/// made. All ranks of `all` call this, with axes in the same order.
///
/// # Errors
/// `Fault` on all ranks where one got other values than it should, with the same words: which call, over which ranks.
pub fn check(all: &Group, axes: &[(Axis, Duty)]) -> Result<usize> {
    let mut found = Ok(());
    let mut note = |checked: Result<()>| {
        if found.is_ok() {
            found = checked;
        }
    };
    let (mut calls, told) = check_host::check(all);
    let several = || axes.iter().filter(|(axis, _)| axis.group.size() > 1);
    owned_by("the check at the start", || {
        let runs: Vec<AxisCheck> = several().map(|(axis, duty)| AxisCheck::new(*axis, *duty)).collect();
        // The calls go on behind a mismatch: other ranks may have none.
        for run in &runs {
            for case in run.cases(&mut calls) {
                note(run.finish(&case, run.begin(&case)));
            }
        }
        // What different axes do at the same time.
        let large: Vec<(&AxisCheck, Case)> = runs.iter().map(|run| (run, run.large(&mut calls))).collect();
        let flights: Vec<Flight> = large.iter().map(|(run, case)| run.begin(case)).collect();
        for ((run, case), flight) in large.iter().zip(flights) {
            note(run.finish(case, flight));
        }
    });
    if calls > 0 {
        gpu().trim();
    }
    let carried = found.map_err(|error| error.hint(HINT));
    all.agree(told.and(carried)).map(|()| calls)
}

/// One axis, while it is checked.
struct AxisCheck<'a> {
    axis: Axis<'a>,
    duty: Duty<'a>,
    /// For what an axis without a stream does in jobs of one.
    own: Option<Stream>,
    patterns: [Pattern; 2],
}

impl<'a> AxisCheck<'a> {
    fn new(axis: Axis<'a>, duty: Duty<'a>) -> Self {
        let own = matches!(duty, Duty::Tensor).then(|| Stream::new("check", &[axis.group]));
        let patterns = [false, true].map(|is_whole| Pattern::new(axis.group.size(), is_whole));
        Self { axis, duty, own, patterns }
    }

    fn pattern(&self, case: &Case) -> &Pattern {
        &self.patterns[usize::from(case.op == Op::ReduceScatter(GradientOrder::Fast))]
    }

    /// The calls, in the order in which all ranks make them.
    fn cases(&self, calls: &mut usize) -> Vec<Case> {
        use DType::{Bf16, F32};
        let size = self.axis.group.size();
        let mut all: Vec<(Op, DType, usize, bool)> = Vec::new();
        let mut add = |op: Op, dtype: DType, lens: &[usize], cuts: &[bool]| {
            all.extend(cuts.iter().flat_map(|even| lens.iter().map(|len| (op, dtype, *len, *even))));
        };
        let large = |dtype: DType| LARGE / dtype.bytes() + 3;
        match self.duty {
            Duty::Tensor => {
                for dtype in [Bf16, F32] {
                    // Up to this everyone gets everything, behind it everyone a share.
                    let whole = WHOLE_MAX / (size * dtype.bytes());
                    add(Op::SumInOrder, dtype, &SMALL, &[true]);
                    add(Op::SumInOrder, dtype, &[whole, whole + 1, large(dtype)], &[true]);
                }
                add(Op::AllGather, F32, &[8 * size, 1037, large(F32)], &[true, false]);
                add(Op::AllToAll, F32, &[7, MIDDLE, large(F32)], &[false]);
                add(Op::AllToAll, Bf16, &[7, MIDDLE, large(Bf16)], &[false]);
            }
            Duty::Ring(_) => {
                for dtype in [Bf16, F32] {
                    add(Op::Shift, dtype, &SMALL, &[false]);
                    add(Op::Shift, dtype, &[MIDDLE, large(dtype)], &[false]);
                }
            }
            Duty::Zero(_, order) => {
                let mut orders = vec![GradientOrder::Fast];
                orders.extend((order == GradientOrder::Fixed).then_some(order));
                for order in orders {
                    add(Op::ReduceScatter(order), F32, &[8 * size, 1037, MIDDLE, large(F32)], &[true, false]);
                }
                add(Op::AllGather, F32, &[8 * size, 1037, large(F32)], &[true, false]);
                add(Op::AllGather, Bf16, &[8 * size, 1037, large(Bf16)], &[true, false]);
                add(Op::AllToAll, Bf16, &[7, MIDDLE, large(Bf16)], &[false]);
            }
        }
        all.into_iter().map(|(op, dtype, len, is_even)| self.case(op, dtype, len, is_even, calls)).collect()
    }

    /// A large call of what the axis does most.
    fn large(&self, calls: &mut usize) -> Case {
        let (op, dtype) = match self.duty {
            Duty::Tensor => (Op::SumInOrder, DType::Bf16),
            Duty::Ring(_) => (Op::Shift, DType::Bf16),
            Duty::Zero(..) => (Op::AllGather, DType::Bf16),
        };
        self.case(op, dtype, LARGE / dtype.bytes(), true, calls)
    }

    fn case(&self, op: Op, dtype: DType, len: usize, is_even: bool, calls: &mut usize) -> Case {
        let (rank, size) = (self.axis.group.rank(), self.axis.group.size());
        *calls += 1;
        Case { op, dtype, len, is_even, number: *calls, rank, size }
    }

    fn by(&self, case: &Case) -> By<'_> {
        match (self.duty, &self.own) {
            (Duty::Ring(stream) | Duty::Zero(stream, _), _) => By::Job(stream),
            // Weights go in jobs of a stream, logits do not.
            (Duty::Tensor, Some(own)) if case.op == Op::AllToAll && case.dtype == DType::Bf16 => By::Job(own),
            (Duty::Tensor, _) => By::Thread(self.axis.group),
        }
    }

    /// Writes what the call reads, and makes it.
    fn begin(&self, case: &Case) -> Flight {
        let mine = self.pattern(case).run(case.rank, case.number, 0..case.sent());
        let (mine, stale) = (of(&mine, case.dtype), |len: usize| of(&vec![STALE; len], case.dtype));
        let mut sent = stale(case.sent());
        let receive = if case.op.is_in_place() { Memory::none() } else { stale(case.received()) };
        if case.sent() * case.dtype.bytes() >= LARGE {
            let mut busy = Memory::scratch(BUSY_BYTES);
            (0..BUSY_TIMES).for_each(|_| busy.view_mut(DType::F32).clear());
        }
        sent.view_mut(case.dtype).copy_from(mine.view(case.dtype));
        let (send, receive) = if case.op.is_in_place() { (receive, sent) } else { (sent, receive) };
        let mut buffers = Buffers { send, receive };
        let case = *case;
        match self.by(&case) {
            By::Thread(group) => {
                case.call(group, &mut buffers);
                Flight::Landed(buffers)
            }
            By::Job(stream) => Flight::Away(stream.submit(move |groups| {
                case.call(&groups[0], &mut buffers);
                buffers
            })),
        }
    }

    /// Takes what the call has brought, and compares it.
    fn finish(&self, case: &Case, flight: Flight) -> Result<()> {
        let buffers = match flight {
            Flight::Landed(buffers) => buffers,
            Flight::Away(pending) => pending.wait(),
        };
        let mut taken = Memory::scratch(buffers.receive.bytes());
        taken.view_mut(case.dtype).copy_from(buffers.receive.view(case.dtype));
        // Whichever of two streams is waited for first, it must not be ahead of the other.
        if case.number.is_multiple_of(2) {
            gpu().wait_for(self.axis.stream);
        }
        let got = taken.view(case.dtype).to_f32();
        for (range, source) in case.wanted() {
            let want = self.pattern(case).wanted(&source, case.dtype, case.number, range.clone());
            let got = &got[range.clone()];
            if bytemuck::cast_slice::<f32, u8>(got) == bytemuck::cast_slice::<f32, u8>(&want) {
                continue;
            }
            let other = got.iter().zip(&want).position(|(got, want)| got.to_bits() != want.to_bits());
            if let Some(i) = other {
                return Err(Error::fault(self.words(case, range.start + i, (&got[i..], want[i]), &source, i)));
            }
        }
        Ok(())
    }

    /// `all-gather of 4096 bf16 values over NCCL on the tensor axis of ranks 4..8 (node1) gave other values from element 512 on`
    fn words(&self, case: &Case, element: usize, (got, want): (&[f32], f32), source: &Source, i: usize) -> String {
        let group = self.axis.group;
        let way = if group.is_linked() { "NCCL" } else { "MPI, through the host," };
        let dtype = format!("{:?}", case.dtype).to_lowercase();
        let (op, len, name, ranks) = (case.op.words(), case.len, self.axis.name, group.ranks_words());
        let at = match source {
            Source::Rank { at, .. } => at + i,
            Source::InOrder | Source::Tree => element,
        };
        let known = &got[..got.len().min(8)];
        let of_rank = |rank: usize| group.world_ranks().nth(rank).unwrap_or(rank);
        let whose = match self.pattern(case).senders(known, case.number, at)[..] {
            _ if got[0] == STALE => ", which stood there before".to_string(),
            [rank] if rank == case.rank && case.op.is_in_place() => ", which stood there before".to_string(),
            [rank] if known.len() > 1 => format!(", which rank {} sent", of_rank(rank)),
            _ => String::new(),
        };
        let right = match source {
            Source::Rank { rank, .. } => format!("rank {} sent {want}", of_rank(*rank)),
            Source::InOrder | Source::Tree => format!("the sum is {want}"),
        };
        format!(
            "{op} of {len} {dtype} values over {way} on the {name} axis of {ranks} gave other values from element {element} \
             on: {}{whose}, where {right}",
            got[0]
        )
    }
}

impl Case {
    /// Values that this rank sends, or that stand where the result comes.
    fn sent(&self) -> usize {
        match self.op {
            Op::Shift => self.block(self.rank),
            Op::AllToAll => (0..self.size).map(|to| self.message(self.rank, to)).sum(),
            _ => self.len,
        }
    }

    fn received(&self) -> usize {
        match self.op {
            Op::Shift => self.block(self.before()),
            Op::AllToAll => (0..self.size).map(|from| self.message(from, self.rank)).sum(),
            _ => self.len,
        }
    }

    fn before(&self) -> usize {
        (self.rank + self.size - 1) % self.size
    }

    /// Values that `rank` passes on.
    fn block(&self, rank: usize) -> usize {
        self.len + rank % 3
    }

    /// Values that go from a rank to another, or to itself.
    fn message(&self, from: usize, to: usize) -> usize {
        self.len / self.size + (3 * from + to) % 5
    }

    /// The share of each rank.
    fn cuts(&self) -> Vec<Range<usize>> {
        let (len, size) = (self.len, self.size);
        // The uneven ones begin with small shares, of which some are empty.
        let end = |r: usize| if self.is_even { r * (len / size) } else { r * r * len / (size * size) };
        (0..size).map(|r| end(r)..end(r + 1)).collect()
    }

    /// Messages of `from` to each rank, as they stand there, or to `to` from each.
    fn messages(&self, of: impl Fn(usize) -> usize) -> Vec<Range<usize>> {
        let mut end = 0;
        let each = (0..self.size).map(|rank| {
            end += of(rank);
            end - of(rank)..end
        });
        each.collect()
    }

    /// What the result is, by places.
    fn wanted(&self) -> Vec<(Range<usize>, Source)> {
        match self.op {
            Op::SumInOrder => vec![(0..self.len, Source::InOrder)],
            Op::ReduceScatter(order) => vec![(self.cuts()[self.rank].clone(), Source::of(order))],
            Op::AllGather => {
                let of = |(rank, cut): (usize, Range<usize>)| (cut.clone(), Source::Rank { rank, at: cut.start });
                self.cuts().into_iter().enumerate().map(of).collect()
            }
            Op::Shift => vec![(0..self.received(), Source::Rank { rank: self.before(), at: 0 })],
            Op::AllToAll => {
                let arrive = self.messages(|from| self.message(from, self.rank));
                let begin = |rank: usize| (0..self.rank).map(|to| self.message(rank, to)).sum();
                let of = |(rank, to): (usize, Range<usize>)| (to, Source::Rank { rank, at: begin(rank) });
                arrive.into_iter().enumerate().map(of).collect()
            }
        }
    }

    fn call(&self, group: &Group, buffers: &mut Buffers) {
        let Buffers { send, receive } = buffers;
        match self.op {
            Op::SumInOrder => group.sum_slice(SliceMut::Cuda(receive.view_mut(self.dtype))),
            Op::ReduceScatter(order) => {
                let mut x = Flat::Cuda(std::mem::replace(receive, Memory::none()));
                group.sum_scattered(&mut x, &self.cuts(), order);
                if let Flat::Cuda(memory) = x {
                    *receive = memory;
                }
            }
            Op::AllGather if self.dtype == DType::Bf16 => group.gather_weights(receive, &self.cuts()),
            Op::AllGather => group.gather_view(&mut receive.view_mut(DType::F32), &self.cuts()),
            Op::Shift => group.shift_block(send.view(self.dtype), &mut receive.view_mut(self.dtype)),
            Op::AllToAll => {
                let to = self.messages(|to| self.message(self.rank, to));
                let from = self.messages(|from| self.message(from, self.rank));
                if self.dtype == DType::Bf16 {
                    return group.weights_to_all(send, &to, receive, &from);
                }
                let f32 = |len: usize| Tensor::scratch_on(Device::Cuda, 1, 0).statistics(1, len);
                let [mut sent, mut received] = [self.sent(), self.received()].map(f32);
                sent.cuda_mut().copy_from(send.view(DType::F32));
                group.tensor_to_all(&sent, &to, &mut received, &from);
                receive.view_mut(DType::F32).copy_from(received.cuda());
            }
        }
    }
}

/// Values on the GPU, exact in both types.
fn of(values: &[f32], dtype: DType) -> Memory {
    match dtype {
        DType::F32 => Memory::of(values),
        DType::Bf16 => Memory::of(&values.iter().map(|x| (x.to_bits() >> 16) as u16).collect::<Vec<_>>()),
    }
}
