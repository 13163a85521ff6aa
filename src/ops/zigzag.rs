//! The tokens of a packed row that a rank of the sequence axis holds.
//!
//! A sequence of n tokens is cut into 2S pieces at i*n/(2S). With S ranks, rank r holds the pieces r and 2S-1-r, an
//! early one and a late one. A causal query sees the keys before it, so every rank has about the same work. Pieces of
//! short sequences may be empty. With one rank the row is whole.

use super::attention_shape::{AttentionShape, Span};
use std::ops::Range;

/// A run of tokens of one sequence, all on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The index of its sequence in the whole row.
    pub sequence: usize,
    /// The position of the first token in the sequence.
    pub start: usize,
    pub tokens: usize,
    /// The index of the first token among the rank's rows.
    pub row: usize,
}

/// The pieces of rank `rank` of `size`, in the order of their rows: by sequence, then by position. Empty pieces
/// are left out; adjacent pieces are one.
pub fn pieces(cu_seqlens: &[usize], rank: usize, size: usize) -> Vec<Piece> {
    assert!(rank < size, "rank {rank} is outside a sequence axis of {size}");
    let mut pieces = Vec::new();
    let mut row = 0;
    for (sequence, ends) in cu_seqlens.windows(2).enumerate() {
        let [early, late] = runs(ends[1] - ends[0], rank, size);
        let runs = if early.end == late.start { [early.start..late.end, 0..0] } else { [early, late] };
        for run in runs.into_iter().filter(|run| !run.is_empty()) {
            pieces.push(Piece { sequence, start: run.start, tokens: run.len(), row });
            row += run.len();
        }
    }
    pieces
}

/// The two runs of positions of a sequence of `n` tokens.
fn runs(n: usize, rank: usize, size: usize) -> [Range<usize>; 2] {
    let at = |i: usize| i * n / (2 * size);
    [rank, 2 * size - 1 - rank].map(|i| at(i)..at(i + 1))
}

/// The number of tokens of the rank.
pub fn tokens(cu_seqlens: &[usize], rank: usize, size: usize) -> usize {
    let lengths = cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]);
    lengths.map(|n| runs(n, rank, size).iter().map(Range::len).sum::<usize>()).sum()
}

/// The index in the whole row of each of the rank's rows.
pub fn rows(cu_seqlens: &[usize], rank: usize, size: usize) -> Vec<usize> {
    let pieces = pieces(cu_seqlens, rank, size);
    pieces.iter().flat_map(|p| (0..p.tokens).map(|i| cu_seqlens[p.sequence] + p.start + i)).collect()
}

/// The position in its sequence of each of the rank's rows.
pub fn positions(cu_seqlens: &[usize], rank: usize, size: usize) -> Vec<u32> {
    let pieces = pieces(cu_seqlens, rank, size);
    pieces.iter().flat_map(|p| (p.start..p.start + p.tokens).map(|at| at as u32)).collect()
}

/// The spans of `keys` that rows of `queries` see, in passes. Within a pass no row and no key occurs twice, so its
/// spans can be computed at the same time. The pieces belong to two ranks of a ring, or to one. A sequence's spans, and
/// the order of spans that share rows, depend only on its own pieces. For a rank's own keys the first pass has all
/// rows.
///
/// One pass is enough, unless a window reaches across both pieces of a side and cuts part of it off.
pub fn passes(queries: &[Piece], keys: &[Piece], shape: &AttentionShape) -> Vec<Vec<Span>> {
    let mut passes: Vec<Vec<Span>> = Vec::new();
    let mut from = 0;
    for keys in keys.chunk_by(|a, b| a.sequence == b.sequence) {
        let sequence = keys[0].sequence;
        from += queries[from..].partition_point(|query| query.sequence < sequence);
        let count = queries[from..].partition_point(|query| query.sequence == sequence);
        let queries = &queries[from..from + count];
        let Some(last) = queries.last() else { continue };
        let is_cut = shape.window.is_some_and(|window| last.start + last.tokens > keys[0].start.saturating_add(window));
        let alone = queries.len() == 1 && keys.len() == 1;
        let spans = if is_cut || alone { by_pieces(queries, keys, shape) } else { as_runs(queries, keys) };
        let mut placed: Vec<(usize, Span)> = Vec::new();
        for span in spans {
            let is_free = |pass: &usize| placed.iter().all(|(other, with)| other != pass || !meet(with, &span));
            let pass = (0..=placed.len()).find(is_free).expect("more passes than spans");
            passes.resize_with(passes.len().max(pass + 1), Vec::new);
            passes[pass].push(span);
            placed.push((pass, span));
        }
    }
    passes
}

/// The spans if no window cuts anything off. Keys are in the order of their positions, so a row sees a first part of
/// them. Rows that see the same part, or one more key each, make one span, over both pieces of a side.
fn as_runs(queries: &[Piece], keys: &[Piece]) -> Vec<Span> {
    let (row, key_row) = (queries[0].row, keys[0].row);
    if queries == keys {
        let tokens = queries.iter().map(|piece| piece.tokens).sum();
        return vec![Span { row, tokens, past: 0, key_row, keys: tokens }];
    }
    let mut spans: Vec<Span> = Vec::new();
    for query in queries {
        // Each piece of one rank is before or after each piece of another.
        let before = keys.iter().filter(|key| key.start < query.start).map(|key| key.tokens).sum();
        match spans.last_mut() {
            _ if before == 0 => {}
            Some(span) if span.keys == before => span.tokens += query.tokens,
            _ => spans.push(Span { row: query.row, tokens: query.tokens, past: before, key_row, keys: before }),
        }
    }
    spans
}

/// One span for each pair of pieces, ordered so that adjacent pairs share no piece: i - j modulo the larger count is a
/// Latin square.
fn by_pieces(queries: &[Piece], keys: &[Piece], shape: &AttentionShape) -> Vec<Span> {
    let across = queries.len().max(keys.len());
    let of = |apart: usize| {
        let pairs = queries.iter().enumerate().map(move |(i, query)| (query, (i + across - apart) % across));
        pairs.filter_map(|(query, j)| seen(query, keys.get(j)?, shape))
    };
    (0..across).flat_map(of).collect()
}

/// Whether two spans of a sequence share a row or a key.
fn meet(a: &Span, b: &Span) -> bool {
    let apart = |a: usize, a_len: usize, b: usize, b_len: usize| a + a_len <= b || b + b_len <= a;
    !(apart(a.row, a.tokens, b.row, b.tokens) && apart(a.key_row, a.keys, b.key_row, b.keys))
}

/// The rows of `query` that see a key of `key`, pieces of one sequence.
fn seen(query: &Piece, key: &Piece, shape: &AttentionShape) -> Option<Span> {
    let first = query.start.max(key.start);
    let end = query.start + query.tokens;
    let end = shape.window.map_or(end, |window| end.min((key.start + key.tokens - 1).saturating_add(window)));
    (first < end).then(|| Span {
        row: query.row + first - query.start,
        tokens: end - first,
        past: first - key.start,
        key_row: key.row,
        keys: key.tokens,
    })
}

/// The number of pairs of a query and a key that it sees, in the spans.
pub fn pairs(spans: &[Span], shape: &AttentionShape) -> usize {
    let of = |span: &Span| {
        let visible = (span.past..span.past + span.tokens).map(|at| shape.visible(at));
        visible.map(|seen| seen.end.min(span.keys).saturating_sub(seen.start)).sum::<usize>()
    };
    spans.iter().map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::KvDtype;

    const LENGTHS: &[usize] = &[1, 0, 3, 7, 8, 9, 100, 2, 1000];

    fn ends(lengths: &[usize]) -> Vec<usize> {
        let mut ends = vec![0];
        for n in lengths {
            ends.push(ends[ends.len() - 1] + n);
        }
        ends
    }

    fn shape(window: Option<usize>) -> AttentionShape {
        AttentionShape {
            heads: 1,
            kv_heads: 1,
            head_dim: 8,
            window,
            scale: 1.0,
            softcap: None,
            values_are_keys: false,
            kv: KvDtype::Model,
        }
    }

    #[test]
    fn every_token_is_on_one_rank_and_knows_its_position() {
        let ends = ends(LENGTHS);
        let total = ends[LENGTHS.len()];
        for size in 1..10 {
            let mut seen = vec![0; total];
            for rank in 0..size {
                let (rows, positions) = (rows(&ends, rank, size), positions(&ends, rank, size));
                assert_eq!((rows.len(), positions.len()), (tokens(&ends, rank, size), rows.len()));
                assert!(rows.is_sorted(), "by sequence, then by position");
                for (&row, &position) in rows.iter().zip(&positions) {
                    let sequence = ends.partition_point(|&end| end <= row) - 1;
                    assert_eq!(row - ends[sequence], position as usize);
                    seen[row] += 1;
                }
            }
            assert!(seen.iter().all(|&times| times == 1), "{size} ranks: {seen:?}");
        }
    }

    #[test]
    fn waves_contain_every_visible_pair_once_and_no_piece_twice() {
        let ends = ends(&[1, 5, 40, 0, 23]);
        for (size, window) in [1, 2, 3, 4].into_iter().flat_map(|s| [None, Some(1), Some(6), Some(30)].map(|w| (s, w)))
        {
            let shape = shape(window);
            let mut count = 0;
            for (rank, from) in (0..size).flat_map(|rank| (0..size).map(move |from| (rank, from))) {
                let (queries, keys) = (pieces(&ends, rank, size), pieces(&ends, from, size));
                let passes = passes(&queries, &keys, &shape);
                let rows = |pass: &Vec<Span>| pass.iter().map(|span| span.tokens).sum::<usize>();
                let all = tokens(&ends, rank, size);
                assert!(
                    rank != from || passes.first().map_or(0, rows) == all,
                    "with own keys the first pass has all rows"
                );
                for pass in passes {
                    for (i, a) in pass.iter().enumerate() {
                        for b in &pass[..i] {
                            assert!(a.row >= b.row + b.tokens || b.row >= a.row + a.tokens, "rows of {a:?} and {b:?}");
                            assert_ne!(a.key_row, b.key_row);
                        }
                        let sees = |at| shape.visible(at).start < a.keys && shape.visible(at).end > 0;
                        assert!(sees(a.past) && sees(a.past + a.tokens - 1), "{a:?}");
                    }
                    count += pairs(&pass, &shape);
                }
            }
            let all: usize = ends.windows(2).flat_map(|w| 0..w[1] - w[0]).map(|at| shape.visible(at).len()).sum();
            assert_eq!(count, all, "{size} ranks, window {window:?}");
        }
    }

    #[test]
    fn a_step_is_one_wave_unless_a_window_cuts_across_both_pieces_of_a_side() {
        let ends = ends(LENGTHS);
        let most = |window: Option<usize>| {
            let pairs = (2..6).flat_map(|size| (0..size * size).map(move |i| (size, i / size, i % size)));
            let of = |(size, rank, from)| {
                passes(&pieces(&ends, rank, size), &pieces(&ends, from, size), &shape(window)).len()
            };
            pairs.map(of).max()
        };
        assert_eq!([None, Some(1), Some(10), Some(1000), Some(400)].map(most), [1, 1, 1, 1, 2].map(Some));
    }

    #[test]
    fn ranks_have_equal_work_within_one_percent_except_if_a_window_spares_the_first() {
        let ends = ends(&[4096, 1500, 9000]);
        for (size, window) in [2, 3, 4, 8].into_iter().flat_map(|s| [None, Some(1024)].map(|w| (s, w))) {
            let shape = shape(window);
            let work: Vec<usize> = (0..size)
                .map(|rank| {
                    let queries = pieces(&ends, rank, size);
                    let seen = (0..size).flat_map(|from| passes(&queries, &pieces(&ends, from, size), &shape));
                    seen.map(|pass| pairs(&pass, &shape)).sum()
                })
                .collect();
            let mean = work.iter().sum::<usize>() as f64 / size as f64;
            let [least, most] = [work.iter().min(), work.iter().max()].map(|w| w.map_or(0.0, |&w| w as f64 / mean));
            let what = format!("{size} ranks, window {window:?}: {work:?}");
            match window {
                None => assert!(least > 0.99 && most < 1.01, "{what}"),
                Some(_) => assert!(most < 1.1, "{what}"),
            }
        }
    }
}
