//! States of sequences in a paged cache, and the location of a batch's sequences in it.

use super::gpu::{Arg, gpu};
use super::kv_cache::Words;
use super::memory::{Memory, ViewMut};
use super::shape::{THREADS, to_i32, to_u32};
use crate::device::cpu::attention::{PAGE, PagedSequence};
use crate::device::cpu::delta::StateRow;
use crate::dtype::DType;
use std::sync::{Arc, OnceLock};

const TABLE: &str = "states";
/// Values that a thread copies.
const EACH: usize = 4;

/// The sequences of a forward, on the GPU.
#[derive(Debug)]
pub struct StateTable {
    /// Past, tokens, first row, unused: the same as in `cuda/paged.cuh`.
    pub(super) sequences: Arc<Memory>,
    /// Page * PAGE at the row of each sequence's last token; negative if it is not kept. `None`: there is no cache.
    pub(super) slots: Option<Words>,
    pub count: usize,
    /// Tokens of the longest sequence, and of all.
    pub(super) longest: usize,
    pub(super) rows: usize,
    /// The first row of each row's sequence and its end, made for the backward of whole sequences.
    bounds: OnceLock<Memory>,
    whole: Vec<StateRow>,
}

impl StateTable {
    /// Whole sequences.
    pub fn whole(rows: &[StateRow]) -> Self {
        let entry = |row: &StateRow| [0, row.tokens, row.start, 0];
        let sequences: Vec<[usize; 4]> = rows.iter().map(entry).collect();
        Self { whole: rows.to_vec(), ..Self::of(&sequences, None) }
    }

    /// New tokens of sequences whose last pages have their states.
    ///
    /// # Panics
    /// If a sequence has no page.
    pub fn cached(sequences: &[PagedSequence]) -> Self {
        let (mut entries, mut slots) = (Vec::new(), Vec::new());
        for PagedSequence { past, tokens, blocks } in sequences {
            let page = *blocks.last().expect("a sequence has a page") as usize;
            entries.push([*past, *tokens, slots.len(), 0]);
            slots.resize(slots.len() + tokens, to_i32(TABLE, page * PAGE));
        }
        Self::of(&entries, Some(Words::new(&slots)))
    }

    /// One new token of each of `rows` sequences; the rest is in tables on the GPU.
    pub(super) fn on_gpu(sequences: Arc<Memory>, slots: Words, rows: usize) -> Self {
        let (bounds, whole) = (OnceLock::new(), Vec::new());
        Self { sequences, slots: Some(slots), count: rows, longest: 1, rows, bounds, whole }
    }

    fn of(sequences: &[[usize; 4]], slots: Option<Words>) -> Self {
        let words: Vec<i32> = sequences.iter().flatten().map(|n| to_i32(TABLE, *n)).collect();
        Self {
            sequences: Arc::new(Memory::from_values(&words)),
            slots,
            count: sequences.len(),
            longest: sequences.iter().map(|sequence| sequence[1]).max().unwrap_or(0),
            rows: sequences.iter().map(|sequence| sequence[1]).sum(),
            bounds: OnceLock::new(),
            whole: Vec::new(),
        }
    }

    /// The slots as an argument.
    pub(super) fn slots(&self) -> Arg {
        self.slots.as_ref().map_or(Arg::Address(0), Words::arg)
    }

    pub(super) fn bounds(&self) -> &Memory {
        self.bounds.get_or_init(|| {
            let of = |row: &StateRow| {
                std::iter::repeat_n([row.start, row.start + row.tokens].map(|n| to_u32(TABLE, n)), row.tokens)
            };
            Memory::from_values(&self.whole.iter().flat_map(of).collect::<Vec<_>>())
        })
    }
}

/// The pages of a cache of states, f32, `page_len` values each, and where in a page an operation's values begin.
#[derive(Debug)]
pub struct StatePages<'a> {
    pub values: ViewMut<'a>,
    pub page_len: usize,
    pub offset: usize,
}

impl StatePages<'_> {
    /// The arguments of kernels: pages, their length and the offset.
    pub(super) fn args(pages: Option<Self>) -> [Arg; 3] {
        pages.map_or([Arg::Address(0), 0.into(), 0.into()], |mut pages| {
            [pages.values.arg(DType::F32), pages.page_len.into(), pages.offset.into()]
        })
    }
}

/// Copies page `from` to page `to`, of `page_len` f32 values each.
pub fn copy_page(mut values: ViewMut, page_len: usize, from: u32, to: u32) {
    let pages = values.len() / page_len.max(1);
    let there = (from as usize) < pages && (to as usize) < pages && from != to;
    assert!(there, "{TABLE}: cannot copy page {from} to page {to} in a cache of {pages} pages");
    let args = [values.arg(DType::F32), Arg::U32(from), Arg::U32(to), page_len.into()];
    gpu().launch("state_copy_page", [page_len.div_ceil(EACH * THREADS), 1, 1], THREADS, 0, &args);
}
