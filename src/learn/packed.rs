//! Packed rows: sequences one after the other in one row of tokens, without padding. Each rank of the sequence axis has
//! a part of a row.

use crate::comm::Group;
use crate::experience::{Experience, Image, SamplingMask};
use crate::model::Keys;
use crate::ops::linear_logprob::Targets;
use crate::ops::zigzag;
use crate::pictures::{AXES, Picture, pictures, push_positions};
use std::borrow::Cow;

/// Tokens, of which the first `prompt_tokens` are the prompt.
pub struct Tokens<'a> {
    pub tokens: Cow<'a, [u32]>,
    pub prompt_tokens: usize,
    /// The sets that the response tokens were sampled from, if they were kept.
    pub masks: &'a [SamplingMask],
    /// The images among them.
    pub images: Cow<'a, [Image]>,
}

impl<'a> Tokens<'a> {
    pub fn from_sample(sample: &'a Experience) -> Self {
        let Experience { prompt, response, .. } = sample;
        Self {
            tokens: sample.tokens().into(),
            prompt_tokens: prompt.tokens.len(),
            masks: &response.sampling_masks,
            images: sample.images(),
        }
    }
}

/// One packed row, or a rank's part of it. In a part, `cu_seqlens` and the number of sequences are those of the whole
/// row; everything else counts the part's own tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackedRow {
    pub tokens: Vec<u32>,
    /// Position of each token in its sequence. With images, three of each: time, row and column.
    pub positions: Vec<u32>,
    /// The images, in the order of their rows.
    pub pictures: Vec<Picture>,
    /// [0, end of sequence 0, ..., tokens] of the whole row.
    pub cu_seqlens: Vec<usize>,
    /// Rows of the hidden state whose next token is predicted, in order.
    pub rows: Vec<u32>,
    /// The token that each of `rows` predicts.
    pub targets: Vec<u32>,
    /// The set that each of `targets` was sampled from.
    pub masks: Vec<SamplingMask>,
    /// The `rows` of sequence i are row_offsets[i] .. row_offsets[i + 1]. In a part these are the rows of its own
    /// tokens of the sequence, with gaps where other ranks predict.
    pub row_offsets: Vec<usize>,
    /// The index of each of `rows` among the rows of the whole row. `select` uses it to pick values computed for the
    /// whole row.
    pub row_indices: Vec<usize>,
}

/// Sequences whose tokens after the prompt are all predicted.
impl<'a> FromIterator<Tokens<'a>> for PackedRow {
    fn from_iter<T: IntoIterator<Item = Tokens<'a>>>(all: T) -> Self {
        let mut row = Self::new();
        for Tokens { tokens, prompt_tokens, masks, images } in all {
            row.push_response(&tokens, prompt_tokens, masks);
            row.see(&images);
        }
        row
    }
}

impl PackedRow {
    pub fn new() -> Self {
        Self { cu_seqlens: vec![0], row_offsets: vec![0], ..Self::default() }
    }

    /// Appends a sequence, whose tokens from index `first` (at least 1) on are predicted.
    pub fn push(&mut self, tokens: &[u32], first: usize) {
        self.push_where(tokens, |i| i >= first);
    }

    /// Like `push`, for a prompt of `first` tokens and a response, whose tokens were sampled from `masks`. `masks` is
    /// empty if they were not kept.
    pub fn push_response(&mut self, tokens: &[u32], first: usize, masks: &[SamplingMask]) {
        self.push(tokens, first);
        let before = self.masks.len() - masks.len();
        self.masks[before..].clone_from_slice(masks);
    }

    /// Appends a sequence, whose token i (from 1 on) is predicted if `learned(i)`.
    pub fn push_where(&mut self, tokens: &[u32], learned: impl Fn(usize) -> bool) {
        self.push_at(tokens, (1..tokens.len()).filter(|&i| learned(i)).map(|i| (i as u32 - 1, tokens[i])));
    }

    /// Appends a sequence. `predicting` lists (position, token) pairs: each position predicts its token. Positions
    /// ascend and may repeat.
    pub fn push_at(&mut self, tokens: &[u32], predicting: impl IntoIterator<Item = (u32, u32)>) {
        let start = self.tokens.len() as u32;
        self.tokens.extend_from_slice(tokens);
        if self.pictures.is_empty() {
            self.positions.extend(0..tokens.len() as u32);
        } else {
            self.positions.extend((0..tokens.len() as u32).flat_map(|position| [position; AXES]));
        }
        self.cu_seqlens.push(self.tokens.len());
        for (position, target) in predicting {
            self.predict(start + position, target);
        }
        self.row_offsets.push(self.rows.len());
    }

    /// Adds the images of the sequence that was appended last.
    pub fn see(&mut self, images: &[Image]) {
        if images.is_empty() {
            return;
        }
        if self.pictures.is_empty() {
            self.positions = self.positions.iter().flat_map(|position| [*position; AXES]).collect();
        }
        let &[.., start, end] = &self.cu_seqlens[..] else { unreachable!("a sequence was appended") };
        self.positions.truncate(AXES * start);
        push_positions(images, 0..end - start, true, &mut self.positions);
        self.pictures.extend(pictures(images, 0..end - start, start));
    }

    /// Adds the last token so far to the rows of its sequence. No token follows it, so only a head without targets may
    /// use it.
    pub fn push_last_state(&mut self) {
        self.predict(self.tokens.len() as u32 - 1, 0);
        self.row_offsets.pop();
        self.row_offsets.push(self.rows.len());
    }

    fn predict(&mut self, row: u32, target: u32) {
        self.row_indices.push(self.rows.len());
        self.rows.push(row);
        self.targets.push(target);
        self.masks.push(SamplingMask::default());
    }

    /// The part of this whole row that rank `rank` of the `size` ranks of the sequence axis holds (see `ops::zigzag`).
    /// Targets stay with the row that predicts them, so a label is not lost at the border of two ranks.
    ///
    /// # Panics
    /// If there is no such rank, or this row is a part itself.
    #[must_use]
    pub fn part(&self, rank: usize, size: usize) -> Self {
        let tokens = self.cu_seqlens.last().copied().unwrap_or(0);
        assert_eq!(self.tokens.len(), tokens, "a part of a part");
        if size == 1 {
            return self.clone();
        }
        let own = zigzag::rows(&self.cu_seqlens, rank, size);
        let numbers = if self.pictures.is_empty() { 1 } else { AXES };
        let mut part = Self {
            tokens: own.iter().map(|&row| self.tokens[row]).collect(),
            positions: own.iter().flat_map(|&row| &self.positions[numbers * row..][..numbers]).copied().collect(),
            pictures: self.pictures.iter().map(|picture| picture.within(&own)).collect(),
            cu_seqlens: self.cu_seqlens.clone(),
            row_offsets: vec![0],
            ..Self::default()
        };
        // Both the predicted rows and the own rows ascend.
        let mut local = 0;
        for offsets in self.row_offsets.windows(2) {
            for place in offsets[0]..offsets[1] {
                let row = self.rows[place] as usize;
                local += own[local..].partition_point(|&other| other < row);
                if own.get(local) == Some(&row) {
                    part.rows.push(local as u32);
                    part.targets.push(self.targets[place]);
                    part.masks.push(self.masks[place].clone());
                    part.row_indices.push(place);
                }
            }
            part.row_offsets.push(part.rows.len());
        }
        part
    }

    /// This rank's part of the row.
    #[must_use]
    pub fn shard(&self, sequence: &Group) -> Self {
        self.part(sequence.rank(), sequence.size())
    }

    /// The predicted tokens, with the sets that they were sampled from if any was kept.
    pub fn targets(&self) -> Targets<'_> {
        let masks = if self.masks.iter().all(SamplingMask::is_whole) { &[] } else { &self.masks[..] };
        Targets { tokens: &self.targets, masks }
    }

    /// The values of this part's predicted tokens, from a list with one value for each predicted token of the whole
    /// row. An empty list stays empty.
    pub fn select<T: Copy>(&self, whole: &[T]) -> Vec<T> {
        if whole.is_empty() { Vec::new() } else { self.row_indices.iter().map(|&place| whole[place]).collect() }
    }

    /// One value per predicted token of this whole row, gathered from each rank's part.
    pub fn gather(&self, sequence: &Group, mine: &[f32]) -> Vec<f32> {
        let places = |rank| self.part(rank, sequence.size()).row_indices;
        let places: Vec<Vec<usize>> = (0..sequence.size()).map(places).collect();
        let counts: Vec<usize> = places.iter().map(Vec::len).collect();
        let values = sequence.all_gather_counts(mine, &counts).concat();
        let mut joined = vec![0.0; self.rows.len()];
        places.concat().into_iter().zip(values).for_each(|(place, value)| joined[place] = value);
        joined
    }

    /// Attention over exactly these sequences.
    pub fn keys(&self) -> Keys<'_> {
        Keys::Packed(self.cu_seqlens.as_slice().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_never_cross_the_border_of_two_sequences() {
        let mut row = PackedRow::new();
        row.push(&[5, 6, 7], 1);
        row.push(&[8, 9], 1);
        assert_eq!(row.cu_seqlens, [0, 3, 5]);
        assert_eq!(row.positions, [0, 1, 2, 0, 1]);
        assert_eq!(row.rows, [0, 1, 3]);
        assert_eq!(row.targets, [6, 7, 9]);
        assert_eq!(row.row_offsets, [0, 2, 3]);
        assert_eq!(row.row_indices, [0, 1, 2]);
    }
}
