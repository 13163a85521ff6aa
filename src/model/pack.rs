//! Between row-major values, as on disk, and the layouts of the flat buffer.

use super::params::ParamSpec;
use super::weights::narrow;
use crate::tensor::{FLAT_ALIGN, Layout, PANEL};
use rayon::prelude::*;

/// Columns that are decoded at a time: a tile of panels fits the first-level cache.
const TILE: usize = 128;

/// Element type of a tensor on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Disk {
    F32,
    Bf16,
    F16,
}

impl Disk {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Little-endian values, widened to f32 exactly.
    fn decode(self, from: &[u8], to: &mut [f32]) {
        match self {
            Self::F32 => {
                for (t, b) in to.iter_mut().zip(from.chunks_exact(4)) {
                    *t = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            Self::Bf16 => {
                for (t, b) in to.iter_mut().zip(from.chunks_exact(2)) {
                    *t = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
                }
            }
            Self::F16 => {
                for (t, b) in to.iter_mut().zip(from.chunks_exact(2)) {
                    *t = half::f16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
        }
    }
}

/// An element of the flat buffer: f32, or a bf16 in its u16.
pub(super) trait Element: Copy + Send + Sync {
    /// Stores f32 values that lie in f32 order of `layout`; whole multiples of 64 in panels.
    fn store(layout: Layout, from: &[f32], to: &mut [Self]);
}

impl Element for f32 {
    fn store(_: Layout, from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

impl Element for u16 {
    fn store(layout: Layout, from: &[f32], to: &mut [Self]) {
        narrow(layout, from, to);
    }
}

/// Where the values of a whole parameter come from: fills the slice with its row-major elements from an index on.
pub(super) type Source<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

/// The row-major values of a tensor on disk.
pub(super) fn stored(disk: Disk, bytes: &[u8]) -> impl Fn(usize, &mut [f32]) + Sync {
    move |start, to| disk.decode(&bytes[start * disk.bytes()..(start + to.len()) * disk.bytes()], to)
}

/// Writes what is held of a parameter into its place `to` in the flat buffer, padding included. Returns false if a
/// value is NaN or infinite.
pub(super) fn pack<T: Element>(spec: &ParamSpec, source: &Source, to: &mut [T]) -> bool {
    assert_eq!(to.len(), spec.len, "room for {}", spec.name);
    let (_, width) = spec.full_dims();
    match spec.layout {
        Layout::Row => {
            if spec.columns.len() < width {
                return pack_columns(spec, source, to);
            }
            let mut finite = true;
            let mut rest = to;
            for rows in &spec.rows {
                let (run, after) = rest.split_at_mut(rows.len() * width);
                let chunks = run.par_chunks_mut(TILE * PANEL).enumerate();
                let packed = chunks.map(|(i, to)| pack_run(rows.start * width + i * TILE * PANEL, source, to));
                finite &= packed.reduce(|| true, |a, b| a && b);
                rest = after;
            }
            T::store(Layout::Row, &[0.0; FLAT_ALIGN][..rest.len()], rest);
            finite
        }
        Layout::Panel => {
            let panels = to.par_chunks_mut(PANEL * spec.columns.len().next_multiple_of(2)).enumerate();
            panels.map(|(p, to)| pack_panel(spec, p * PANEL, source, to)).reduce(|| true, |a, b| a && b)
        }
    }
}

/// Rows of which this rank holds some columns.
fn pack_columns<T: Element>(spec: &ParamSpec, source: &Source, to: &mut [T]) -> bool {
    let ((_, width), k) = (spec.full_dims(), spec.columns.len());
    let rows: Vec<usize> = spec.rows.iter().cloned().flatten().collect();
    let (values, padding) = to.split_at_mut(rows.len() * k);
    let packed = values.par_chunks_mut(k).zip(&rows).map(|(to, row)| {
        let mut run = vec![0.0; k];
        source(row * width + spec.columns.start, &mut run);
        T::store(Layout::Row, &run, to);
        run.iter().all(|x| x.is_finite())
    });
    let finite = packed.reduce(|| true, |a, b| a && b);
    T::store(Layout::Row, &[0.0; FLAT_ALIGN][..padding.len()], padding);
    finite
}

fn pack_run<T: Element>(start: usize, source: &Source, to: &mut [T]) -> bool {
    let mut values = [0.0; TILE * PANEL];
    let values = &mut values[..to.len()];
    source(start, values);
    T::store(Layout::Row, values, to);
    values.iter().all(|x| x.is_finite())
}

/// The panel of the rows from `first` on.
fn pack_panel<T: Element>(spec: &ParamSpec, first: usize, source: &Source, to: &mut [T]) -> bool {
    let ((_, width), k) = (spec.full_dims(), spec.columns.len());
    let rows: Vec<usize> = spec.rows.iter().cloned().flatten().skip(first).take(PANEL).collect();
    let mut tile = [0.0; TILE * PANEL];
    let mut run = [0.0; TILE];
    let mut finite = true;
    for (i, to) in to.chunks_mut(TILE * PANEL).enumerate() {
        let columns = i * TILE..((i + 1) * TILE).min(k);
        // Lanes without a row, and the column that an odd k leaves over, are zero.
        let tile = &mut tile[..to.len()];
        tile.fill(0.0);
        for (lane, row) in rows.iter().enumerate() {
            let run = &mut run[..columns.len()];
            source(row * width + spec.columns.start + columns.start, run);
            finite &= run.iter().all(|x| x.is_finite());
            for (c, &x) in run.iter().enumerate() {
                tile[c * PANEL + lane] = x;
            }
        }
        T::store(Layout::Panel, tile, to);
    }
    finite
}

/// `out`, the values of `part`, from those of the whole parameter in another layout; padding is zero.
pub fn repack(whole: &ParamSpec, from: &[f32], part: &ParamSpec, out: &mut [f32]) {
    let rows = unpack(whole, from);
    pack(part, &|start, to| to.copy_from_slice(&rows[start..start + to.len()]), out);
}

/// The row-major values that this rank holds of a parameter, from its place in a flat f32 buffer.
pub fn unpack(spec: &ParamSpec, flat: &[f32]) -> Vec<f32> {
    let (n, k) = spec.dims();
    match spec.layout {
        Layout::Row => flat[..n * k].to_vec(),
        Layout::Panel => {
            let mut out = vec![0.0; n * k];
            out.par_chunks_mut(k).enumerate().for_each(|(row, out)| {
                let panel = &flat[Layout::Panel.index(k, row, 0)..];
                out.iter_mut().zip(panel.iter().step_by(PANEL)).for_each(|(o, &x)| *o = x);
            });
            out
        }
    }
}
