//! Images among the tokens of a forward, and the positions of these tokens.
//!
//! A row of tokens has its images as a list in order (`Image`): the first token of each, the number of its tokens, and the
//! grid of its patches. Everything else is derived from this list. It stays valid if text follows, such as a response.

use crate::experience::Image;
use std::ops::Range;

/// The numbers of a position among images: time, row and column. Text has the same number three times.
pub const AXES: usize = 3;

/// An image among the rows of a forward: row `rows[i]` is that of its token `tokens[i]`. Rows ascend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Picture {
    pub image: Image,
    pub rows: Vec<u32>,
    pub tokens: Vec<u32>,
}

impl Picture {
    /// The part of it on a rank that has only the rows `own`, ascending.
    #[must_use]
    pub fn within(&self, own: &[usize]) -> Self {
        let local = |(row, token): (&u32, &u32)| Some((own.binary_search(&(*row as usize)).ok()? as u32, *token));
        let (rows, tokens) = self.rows.iter().zip(&self.tokens).filter_map(local).unzip();
        Self { image: self.image.clone(), rows, tokens }
    }
}

/// The rows and columns of an image's tokens.
fn sides(image: &Image) -> [usize; 2] {
    let [_, height, width] = image.grid;
    // Each token has merge x merge patches.
    let merge = (height * width / image.tokens.max(1)).isqrt().max(1);
    [height / merge, width / merge]
}

/// The position of token `at` of a row with these `images`. A text token has the next number on all axes. An image that
/// begins at s has (s, s + row, s + column) over its grid of tokens, and the text after it begins at s plus its longer
/// side (arXiv:2409.12191, section 2.1).
pub fn position(images: &[Image], at: usize) -> [u32; AXES] {
    let (mut token, mut next) = (0, 0);
    for image in images.iter().take_while(|image| image.at <= at) {
        let start = next + image.at - token;
        let [rows, columns] = sides(image);
        if at < image.at + image.tokens {
            let within = at - image.at;
            return [start, start + within / columns, start + within % columns].map(|n| n as u32);
        }
        (token, next) = (image.at + image.tokens, start + rows.max(columns));
    }
    [(next + at - token) as u32; AXES]
}

/// Appends the positions of the tokens `fed` of a row with these `images`: one number each or, if a forward `has_images`,
/// three.
pub fn push_positions(images: &[Image], fed: Range<usize>, has_images: bool, positions: &mut Vec<u32>) {
    if has_images {
        positions.extend(fed.flat_map(|at| position(images, at)));
    } else {
        positions.extend(fed.map(|at| at as u32));
    }
}

/// The pictures in the rows of a forward, from row `first` on, that feeds the tokens `fed`.
pub fn pictures(images: &[Image], fed: Range<usize>, first: usize) -> impl Iterator<Item = Picture> + '_ {
    images.iter().filter_map(move |image| {
        let both = image.at.max(fed.start)..(image.at + image.tokens).min(fed.end);
        (!both.is_empty()).then(|| Picture {
            image: image.clone(),
            rows: both.clone().map(|at| (first + at - fed.start) as u32).collect(),
            tokens: both.map(|at| (at - image.at) as u32).collect(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_after_an_image_begins_after_its_longer_side() {
        let images = [
            Image { at: 2, tokens: 6, grid: [1, 4, 6], ..Image::default() },
            Image { at: 9, tokens: 1, grid: [1, 2, 2], ..Image::default() },
        ];
        let expected = [
            [0; 3],
            [1; 3],
            [2, 2, 2],
            [2, 2, 3],
            [2, 2, 4],
            [2, 3, 2],
            [2, 3, 3],
            [2, 3, 4],
            [5; 3],
            [6; 3],
            [7; 3],
            [8; 3],
        ];
        let found: Vec<_> = (0..12).map(|at| position(&images, at)).collect();
        assert_eq!(found, expected);
        let found: Vec<Picture> = pictures(&images, 3..9, 10).collect();
        assert_eq!(found.len(), 1);
        assert_eq!((&found[0].rows[..], &found[0].tokens[..]), (&[10, 11, 12, 13, 14][..], &[1, 2, 3, 4, 5][..]));
        let part = found[0].within(&[0, 11, 13]);
        assert_eq!((&part.rows[..], &part.tokens[..]), (&[1, 2][..], &[2, 4][..]));
    }
}
