//! What one tile of a product is: up to 8 rows times one panel of 32 lanes (or up to 4 rows times two panels).

/// Lanes of a panel.
pub const LANES: usize = 32;
/// Rows of a tile over one panel.
pub const ROWS: usize = 8;
/// Rows of a tile over two panels.
pub const ROWS_PAIR: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    F32,
    Bf16,
}

/// How a tile reads ahead.
#[derive(Clone, Copy, Debug)]
pub enum Prefetch {
    /// The panel itself: nobody else will walk it again.
    Stream,
    /// Another block that comes next: `step` words further with every step.
    Next { from: *const u32, step: usize },
}

#[derive(Clone, Copy, Debug)]
pub struct Tile {
    /// 1 to ROWS; 1 to ROWS_PAIR where `pair`.
    pub rows: usize,
    /// Two panels at once, `b_panel` words apart (only with `Stream` and without `packed`).
    pub pair: bool,
    pub steps: usize,
    /// Word (i, s) is at i * a_row + s; where `packed`, at i + ROWS * s.
    pub a: *const u32,
    pub a_row: usize,
    pub packed: bool,
    /// Word (s, j) of a panel is at LANES * s + j.
    pub b: *const u32,
    pub b_panel: usize,
    /// Value (i, j) is at i * c_row + j. Only columns below `columns` are read or written.
    pub c: *mut f32,
    pub c_row: usize,
    pub columns: usize,
    /// Start from 0 rather than from c.
    pub fresh: bool,
    pub prefetch: Prefetch,
}
