//! Between the flat values of a whole parameter and those of the ranks that share it.
//!
//! Both lie in the layout of their spec, so what is copied are runs that are neighbours on either side: whole panels
//! where a cut falls between panels, lanes of a panel elsewhere.

use super::params::ParamSpec;
use crate::tensor::{Layout, PANEL};
use std::ops::Range;

/// An element of a flat buffer: f32, or a bf16 in its u16.
pub trait Flat: Copy + Default {
    /// Neighbouring columns that interleave in a panel.
    const INTERLEAVED: usize;
}

impl Flat for f32 {
    const INTERLEAVED: usize = 1;
}

impl Flat for u16 {
    const INTERLEAVED: usize = 2;
}

/// `out`, the values of `part`, taken from the whole parameter's `from`; padding is zero.
///
/// # Panics
/// If the specs are of different parameters, or a buffer is not as long as its spec says.
pub fn cut<T: Flat>(whole: &ParamSpec, from: &[T], part: &ParamSpec, out: &mut [T]) {
    check(whole, from.len(), part, out.len());
    clear_padding(part, out);
    runs::<T>(whole, part, |at, held, len| out[held..held + len].copy_from_slice(&from[at..at + len]));
}

/// `out`, the whole parameter, put together from the values of its parts; padding is zero. Of elements that several
/// parts hold the last part's is taken.
///
/// # Panics
/// As `cut`, or if these are not all parts.
pub fn join<T: Flat>(parts: &[(&ParamSpec, &[T])], whole: &ParamSpec, out: &mut [T]) {
    let (held, copies): (usize, usize) =
        (parts.iter().map(|(p, _)| p.elements()).sum(), parts.first().map_or(1, |p| p.0.copies));
    assert_eq!(held, copies * whole.elements(), "{}: elements of all parts, {copies} copies of each", whole.name);
    clear_padding(whole, out);
    for (part, from) in parts {
        check(whole, out.len(), part, from.len());
        runs::<T>(whole, part, |at, held, len| out[at..at + len].copy_from_slice(&from[held..held + len]));
    }
}

/// Rows of neighbouring columns that two parts of a row-layout parameter both hold, in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Index of the first element in either.
    pub from: usize,
    pub to: usize,
    /// Elements between the beginnings of two rows.
    pub from_stride: usize,
    pub to_stride: usize,
    pub rows: usize,
    pub width: usize,
}

/// What `to` can take from `from`, as few copies with strides as there are. Elements that `from` holds several times come
/// as often.
///
/// # Panics
/// If these are not parts of one parameter whose values lie row by row.
pub fn blocks(from: &ParamSpec, to: &ParamSpec) -> Vec<Block> {
    let alike = from.name == to.name && from.full == to.full && [from.layout, to.layout] == [Layout::Row; 2];
    assert!(alike, "{} {:?} beside {} {:?}", from.name, from.full, to.name, to.full);
    let columns = from.columns.start.max(to.columns.start)..from.columns.end.min(to.columns.end);
    let (from_stride, to_stride, width) = (from.columns.len(), to.columns.len(), columns.len());
    let mut found = Vec::new();
    for (to_row, wanted) in held_rows(to) {
        for (from_row, held) in held_rows(from) {
            let rows = held.start.max(wanted.start)..held.end.min(wanted.end);
            if rows.is_empty() || columns.is_empty() {
                continue;
            }
            let from_at = (from_row + rows.start - held.start) * from_stride + columns.start - from.columns.start;
            let to_at = (to_row + rows.start - wanted.start) * to_stride + columns.start - to.columns.start;
            let block = Block { from: from_at, to: to_at, from_stride, to_stride, rows: rows.len(), width };
            found.push(block.in_one_run());
        }
    }
    found
}

/// The runs of rows that a part holds, with the index of the first among its rows.
pub(super) fn held_rows(spec: &ParamSpec) -> impl Iterator<Item = (usize, &Range<usize>)> {
    spec.rows.iter().scan(0, |end, rows| {
        let start = *end;
        *end += rows.len();
        Some((start, rows))
    })
}

impl Block {
    /// Rows without gaps on either side are one.
    fn in_one_run(self) -> Self {
        let Self { from_stride, to_stride, rows, width, .. } = self;
        if width != from_stride || width != to_stride {
            return self;
        }
        let width = rows * width;
        Self { from_stride: width, to_stride: width, rows: 1, width, ..self }
    }
}

fn check(whole: &ParamSpec, whole_len: usize, part: &ParamSpec, part_len: usize) {
    assert!(
        whole.is_whole() && whole.name == part.name && whole.full == part.full && whole.layout == part.layout,
        "{} {:?} is no part of {} {:?}",
        part.name,
        part.full,
        whole.name,
        whole.shape
    );
    assert!(whole_len == whole.len && part_len == part.len, "{}: {whole_len} and {part_len} values", whole.name);
}

fn clear_padding<T: Flat>(spec: &ParamSpec, out: &mut [T]) {
    if spec.len > spec.elements() {
        out.fill(T::default());
    }
}

/// Calls `copy(index in the whole, index in the part, length)` for the runs that both hold in the same order.
fn runs<T: Flat>(whole: &ParamSpec, part: &ParamSpec, mut copy: impl FnMut(usize, usize, usize)) {
    let (_, width) = whole.full_dims();
    let columns = part.columns.clone();
    let mut held = 0;
    for rows in &part.rows {
        match part.layout {
            Layout::Row if columns == (0..width) => {
                copy(rows.start * width, held * width, rows.len() * width);
                held += rows.len();
            }
            Layout::Row => {
                for row in rows.clone() {
                    copy(row * width + columns.start, held * columns.len(), columns.len());
                    held += 1;
                }
            }
            Layout::Panel => {
                let mut row = rows.start;
                while row < rows.end {
                    // As many rows as stay within one panel on both sides.
                    let lanes = (rows.end - row).min(PANEL - row % PANEL).min(PANEL - held % PANEL);
                    let at = |row: usize, width: usize| Lanes {
                        panel: Layout::Panel.index(width, row / PANEL * PANEL, 0),
                        lane: row % PANEL,
                    };
                    panel_runs::<T>(at(row, width), at(held, columns.len()), lanes, &columns, &mut copy);
                    row += lanes;
                    held += lanes;
                }
            }
        }
    }
}

/// Some lanes of a panel.
#[derive(Clone, Copy)]
struct Lanes {
    /// Index of the panel's first element.
    panel: usize,
    lane: usize,
}

impl Lanes {
    /// Index of the first lane's element in a column.
    fn at<T: Flat>(self, column: usize) -> usize {
        let i = T::INTERLEAVED;
        self.panel + column / i * i * PANEL + self.lane * i + column % i
    }
}

/// The runs of `lanes` lanes over `columns` of the whole, which are columns 0.. of the part.
fn panel_runs<T: Flat>(
    whole: Lanes,
    part: Lanes,
    lanes: usize,
    columns: &Range<usize>,
    copy: &mut impl FnMut(usize, usize, usize),
) {
    let (i, k) = (T::INTERLEAVED, columns.len());
    // Columns that interleave on both sides alike.
    let together = if columns.start.is_multiple_of(i) { k / i * i } else { 0 };
    if lanes == PANEL {
        if together > 0 {
            copy(whole.at::<T>(columns.start), part.at::<T>(0), together * PANEL);
        }
    } else {
        for c in (0..together).step_by(i) {
            copy(whole.at::<T>(columns.start + c), part.at::<T>(c), lanes * i);
        }
    }
    for c in together..k {
        for lane in 0..lanes {
            copy(whole.at::<T>(columns.start + c) + lane * i, part.at::<T>(c) + lane * i, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::model::{Arch, Head, ParamTable, TensorPart};

    fn arch(heads: usize, kv_heads: usize, tied: bool) -> Arch {
        let config = serde_json::json!({
            "model_type": "qwen2", "hidden_size": 8 * heads, "intermediate_size": 100, "num_hidden_layers": 1,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 301, "tie_word_embeddings": tied
        });
        Arch::from_config(config.as_object().expect("an object")).expect("a known family")
    }

    /// The tables of all ranks of an axis of `size`, for a GPU: everything lies row by row.
    fn tables(arch: &Arch, size: usize) -> Vec<ParamTable> {
        let on = |rank| ParamTable::on(Device::Cuda, arch, Head::LanguageModel, TensorPart { rank, size });
        (0..size).map(on).collect()
    }

    /// Values of which no two are alike.
    fn held(whole: &ParamSpec, part: &ParamSpec) -> Vec<u16> {
        let all: Vec<u16> = (0..whole.len).map(|i| if i < whole.elements() { 1 + i as u16 } else { 0 }).collect();
        let mut out = vec![7; part.len];
        cut(whole, &all, part, &mut out);
        out
    }

    #[test]
    fn blocks_between_any_two_layouts_bring_what_joining_and_cutting_bring() {
        for (arch, sizes) in
            [(arch(8, 2, false), &[1, 2, 4, 8][..]), (arch(12, 3, true), &[1, 2, 4, 6]), (arch(8, 8, true), &[1, 2, 8])]
        {
            let whole = &tables(&arch, 1)[0];
            for (from, to) in sizes.iter().flat_map(|from| sizes.iter().map(move |to| (*from, *to))) {
                let (olds, news) = (tables(&arch, from), tables(&arch, to));
                for (i, whole) in whole.specs().iter().enumerate() {
                    for new in &news {
                        let (new, mut out) = (&new.specs()[i], vec![0; new.specs()[i].len]);
                        let mut taken = 0;
                        for old in &olds {
                            let values = held(whole, &old.specs()[i]);
                            for block in blocks(&old.specs()[i], new) {
                                taken += block.rows * block.width;
                                for row in 0..block.rows {
                                    let (a, b) =
                                        (block.from + row * block.from_stride, block.to + row * block.to_stride);
                                    out[b..b + block.width].copy_from_slice(&values[a..a + block.width]);
                                }
                            }
                        }
                        assert_eq!(out, held(whole, new), "{} from {from} to {to}", whole.name);
                        assert_eq!(taken, new.elements() * olds[0].specs()[i].copies, "{}", whole.name);
                    }
                }
            }
        }
    }

    #[test]
    fn whole_rows_are_one_run_and_columns_a_block_a_rank() {
        let arch = arch(8, 2, false);
        let (wholes, halves) = (tables(&arch, 1), tables(&arch, 2));
        let of = |tables: &[ParamTable], rank: usize, name: &str| {
            let table = &tables[rank];
            table.spec(table.find(name).expect("a parameter")).clone()
        };
        let [q, o] = ["q_proj", "o_proj"].map(|name| format!("model.layers.0.self_attn.{name}.weight"));
        let found = blocks(&of(&halves, 1, &q), &of(&wholes, 0, &q));
        let run = 32 * 64;
        assert_eq!(found, [Block { from: 0, to: run, from_stride: run, to_stride: run, rows: 1, width: run }]);
        let found = blocks(&of(&halves, 1, &o), &of(&wholes, 0, &o));
        assert_eq!(found, [Block { from: 0, to: 32, from_stride: 32, to_stride: 64, rows: 64, width: 32 }]);
        assert!(blocks(&of(&halves, 0, &q), &of(&halves, 1, &q)).is_empty());
    }
}
