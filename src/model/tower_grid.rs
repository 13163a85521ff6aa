//! The patches of images as a tower reads them: their order, their windows, and their positions.

use super::vision_spec::{TowerKind, VisionSpec};
use crate::experience::Patches;
use crate::ops::rows::Order;
use crate::ops::taps::Taps;
use crate::tensor::Tensor;
use std::sync::Arc;

/// The patches of several images, one after another.
#[derive(Debug, Default)]
pub(super) struct Grid {
    /// The token, in the order of the images, at each place of the tower. Empty if the order is that of the images.
    pub order: Vec<u32>,
    /// The ends of the images, as `Packed`, and those of the windows.
    pub images: Vec<usize>,
    pub windows: Vec<usize>,
    /// Row, column and 0 of each patch in the tower's order.
    pub positions: Vec<u32>,
    /// The resampled table of positions.
    pub taps: Taps,
}

impl Grid {
    /// # Panics
    /// If the sides of an image are not whole tokens.
    pub fn new(spec: &VisionSpec, images: &[Arc<Patches>]) -> Self {
        let mut all = Self { images: vec![0], windows: vec![0], ..Self::default() };
        let mut first = 0;
        for image in images {
            let [times, rows, columns] = image.grid;
            let merge = spec.merge;
            assert!(
                rows.is_multiple_of(merge) && columns.is_multiple_of(merge),
                "an image of {rows} x {columns} patches"
            );
            let (token_rows, token_columns) = (rows / merge, columns / merge);
            for _ in 0..times {
                let tokens = match &spec.kind {
                    TowerKind::Windowed { window, .. } => all.push_windows(spec, [token_rows, token_columns], *window),
                    TowerKind::Learned { .. } => (0..(token_rows * token_columns) as u32).collect(),
                };
                for token in &tokens {
                    let (row, column) = (*token as usize / token_columns, *token as usize % token_columns);
                    for at in 0..spec.patches_of_token() {
                        let place = [row * merge + at / merge, column * merge + at % merge];
                        all.push_patch(spec, place, [rows, columns]);
                    }
                }
                if spec.is_windowed() {
                    all.order.extend(tokens.iter().map(|token| first + token));
                }
                first += tokens.len() as u32;
                all.images.push(all.positions.len() / 3);
            }
        }
        all
    }

    /// The tokens of an image window by window, from the upper left on; windows at the right and the lower edge are
    /// smaller.
    fn push_windows(&mut self, spec: &VisionSpec, [rows, columns]: [usize; 2], window: usize) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(rows * columns);
        let start = self.windows.last().copied().unwrap_or(0);
        for top in (0..rows).step_by(window) {
            for left in (0..columns).step_by(window) {
                for row in top..rows.min(top + window) {
                    tokens.extend((left..columns.min(left + window)).map(|column| (row * columns + column) as u32));
                }
                self.windows.push(start + tokens.len() * spec.patches_of_token());
            }
        }
        tokens
    }

    fn push_patch(&mut self, spec: &VisionSpec, [row, column]: [usize; 2], [rows, columns]: [usize; 2]) {
        self.positions.extend([row as u32, column as u32, 0]);
        let TowerKind::Learned { side } = spec.kind else { return };
        for (row, of_row) in taps(row, rows, side) {
            for (column, of_column) in taps(column, columns, side) {
                self.taps.rows.push((row * side + column) as u32);
                self.taps.weights.push(of_row * of_column);
            }
        }
    }

    /// The order of the tower's tokens, for rows on the device of `rows`.
    pub fn order(&self, rows: &Tensor) -> Order {
        Order::new(rows.device(), self.order.clone())
    }

    /// The number of patches.
    pub fn patches(&self) -> usize {
        self.positions.len() / 3
    }
}

/// The two places of a table of `side` values, with their weights, for place `at` of `of` whose ends are the table's ends.
fn taps(at: usize, of: usize, side: usize) -> [(usize, f32); 2] {
    let exact = at as f32 * (side - 1) as f32 / (of - 1).max(1) as f32;
    let (below, share) = (exact.floor() as usize, exact - exact.floor());
    [(below.min(side - 1), 1.0 - share), ((below + 1).min(side - 1), share)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_of_a_table_meet_the_ends_of_an_image() {
        assert_eq!(taps(0, 5, 4), [(0, 1.0), (1, 0.0)]);
        assert_eq!(taps(4, 5, 4), [(3, 1.0), (3, 0.0)]);
        assert_eq!(taps(2, 5, 4), [(1, 0.5), (2, 0.5)]);
        assert_eq!(taps(0, 1, 4), [(0, 1.0), (1, 0.0)]);
    }
}
