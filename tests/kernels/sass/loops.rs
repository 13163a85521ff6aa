//! The loops of a kernel, and the way through each on which it does its work.

use super::listing::Instruction;
use std::collections::{BTreeMap, BTreeSet};

/// A loop: its first instruction, and the instructions of its way, in order.
pub struct Loop {
    pub head: usize,
    pub way: Vec<usize>,
}

/// Where control may go from each block of instructions, by the block's first.
struct Graph {
    ends: BTreeMap<usize, usize>,
    next: BTreeMap<usize, Vec<usize>>,
}

fn graph(code: &[Instruction]) -> Graph {
    let mut starts: BTreeSet<usize> = [0].into();
    for (at, instruction) in code.iter().enumerate() {
        if let Some(target) = instruction.target {
            starts.extend([target, at + 1]);
        } else if instruction.ends() {
            starts.insert(at + 1);
        }
    }
    starts.retain(|start| *start < code.len());
    let starts: Vec<usize> = starts.into_iter().collect();
    let (mut ends, mut next) = (BTreeMap::new(), BTreeMap::new());
    for (i, start) in starts.iter().enumerate() {
        let end = starts.get(i + 1).copied().unwrap_or(code.len());
        let last = &code[end - 1];
        let mut to: Vec<usize> = last.target.into_iter().collect();
        if !last.ends() && end < code.len() {
            to.push(end);
        }
        ends.insert(*start, end);
        next.insert(*start, to);
    }
    Graph { ends, next }
}

/// Edges to a block through which the way to their start has led, by the block to which they go.
fn back_edges(graph: &Graph) -> BTreeMap<usize, BTreeSet<usize>> {
    let mut found: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    let (mut seen, mut on_way) = (BTreeSet::from([0]), BTreeSet::from([0]));
    let mut stack = vec![(0, 0)];
    while let Some((block, tried)) = stack.pop() {
        let Some(&to) = graph.next[&block].get(tried) else {
            on_way.remove(&block);
            continue;
        };
        stack.push((block, tried + 1));
        if on_way.contains(&to) {
            found.entry(to).or_default().insert(block);
        } else if seen.insert(to) {
            on_way.insert(to);
            stack.push((to, 0));
        }
    }
    found
}

/// The blocks from which the loop's ends are reached without passing its head.
fn body(graph: &Graph, head: usize, ends: &BTreeSet<usize>) -> BTreeSet<usize> {
    let mut body = BTreeSet::from([head]);
    let mut left: Vec<usize> = ends.iter().copied().collect();
    while let Some(block) = left.pop() {
        if body.insert(block) {
            left.extend(graph.next.iter().filter(|(_, to)| to.contains(&block)).map(|(from, _)| *from));
        }
    }
    body
}

/// What a stretch of a way does: products of the tensor cores first, then copies, then (`loads`) loads, then few instructions.
fn worth(code: &[Instruction], loads: &str) -> [isize; 4] {
    let count = |kind: &str| code.iter().filter(|one| one.kind() == kind).count() as isize;
    [count("HMMA"), count("LDGSTS"), count("RED") + count("REDG") + count(loads), -(code.len() as isize)]
}

/// What the best way from a block to an end of its loop does, and the block behind it.
type Rest = ([isize; 4], Option<usize>);

/// All loops of a kernel, in order of their heads. Of loops within a loop its way goes through once.
pub fn loops(code: &[Instruction]) -> Vec<Loop> {
    let graph = graph(code);
    let back = back_edges(&graph);
    let is_back = |from: usize, to: usize| back.get(&to).is_some_and(|ends| ends.contains(&from));
    let mut loops = Vec::new();
    for (&head, ends) in &back {
        let body = body(&graph, head, ends);
        let multiplies = body.iter().any(|at| code[*at..graph.ends[at]].iter().any(|one| one.kind() == "HMMA"));
        let loads = if multiplies { "" } else { "LDG" };
        // The best way from each block to an end of the loop, found from the ends backwards.
        let mut best: BTreeMap<usize, Option<Rest>> = BTreeMap::new();
        let mut stack = vec![(head, false)];
        while let Some((block, is_ready)) = stack.pop() {
            if best.contains_key(&block) {
                continue;
            }
            let next = graph.next[&block].iter().filter(|to| body.contains(to) && !is_back(block, **to));
            if !is_ready {
                stack.push((block, true));
                stack.extend(next.map(|to| (*to, false)));
                continue;
            }
            let own = worth(&code[block..graph.ends[&block]], loads);
            let ways = next.filter_map(|to| Some((best.get(to)?.as_ref()?.0, Some(*to))));
            let stops = ends.contains(&block).then_some(([0; 4], None));
            let way = ways.chain(stops).max_by_key(|(worth, _)| *worth);
            best.insert(block, way.map(|(rest, to)| (std::array::from_fn(|i| own[i] + rest[i]), to)));
        }
        let (mut way, mut at) = (Vec::new(), Some(head));
        while let Some(block) = at {
            way.extend(block..graph.ends[&block]);
            at = best[&block].as_ref().and_then(|(_, to)| *to);
        }
        loops.push(Loop { head, way });
    }
    loops
}
