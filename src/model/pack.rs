//! Between row-major values, as on disk, and the layouts of the flat buffer.

use super::params::ParamSpec;
use super::weights::narrow;
use crate::tensor::{Layout, PANEL};
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

/// Writes the row-major values `bytes` of a parameter into its part `to` of the flat buffer, whose padding is zero
/// already. Returns false if a value is NaN or infinite.
pub(super) fn pack<T: Element>(spec: &ParamSpec, disk: Disk, bytes: &[u8], to: &mut [T]) -> bool {
    let (n, k) = spec.dims();
    debug_assert_eq!(bytes.len(), n * k * disk.bytes());
    match spec.layout {
        Layout::Row => {
            let chunk = TILE * PANEL;
            let pairs = to[..n * k].par_chunks_mut(chunk).zip(bytes.par_chunks(chunk * disk.bytes()));
            pairs.map(|(to, from)| pack_run(disk, from, to)).reduce(|| true, |a, b| a && b)
        }
        Layout::Panel => {
            let panels = to.par_chunks_mut(PANEL * k.next_multiple_of(2)).enumerate();
            let packed = panels.map(|(p, to)| {
                let rows = p * PANEL..((p + 1) * PANEL).min(n);
                let row = k * disk.bytes();
                pack_panel(disk, &bytes[rows.start * row..rows.end * row], k, to)
            });
            packed.reduce(|| true, |a, b| a && b)
        }
    }
}

fn pack_run<T: Element>(disk: Disk, from: &[u8], to: &mut [T]) -> bool {
    let mut values = [0.0; TILE * PANEL];
    let values = &mut values[..to.len()];
    disk.decode(from, values);
    T::store(Layout::Row, values, to);
    values.iter().all(|x| x.is_finite())
}

/// One panel from its rows (at most `PANEL`, each of k values).
fn pack_panel<T: Element>(disk: Disk, rows: &[u8], k: usize, to: &mut [T]) -> bool {
    let mut tile = [0.0; TILE * PANEL];
    let mut run = [0.0; TILE];
    let mut finite = true;
    for (i, to) in to.chunks_mut(TILE * PANEL).enumerate() {
        let columns = i * TILE..((i + 1) * TILE).min(k);
        // The column that an odd k leaves over stays zero.
        let tile = &mut tile[..to.len()];
        tile.fill(0.0);
        for (lane, row) in rows.chunks_exact(k * disk.bytes()).enumerate() {
            let run = &mut run[..columns.len()];
            disk.decode(&row[columns.start * disk.bytes()..columns.end * disk.bytes()], run);
            finite &= run.iter().all(|x| x.is_finite());
            for (c, &x) in run.iter().enumerate() {
                tile[c * PANEL + lane] = x;
            }
        }
        T::store(Layout::Panel, tile, to);
    }
    finite
}

/// The row-major values of a parameter from its part of a flat f32 buffer.
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
