//! The values of tensors on disk.

use safetensors::Dtype;

/// The row-major values of a tensor on disk.
pub(super) fn stored(disk: Dtype, bytes: &[u8]) -> impl Fn(usize, &mut [f32]) + Sync {
    let each = disk.bitsize() / 8;
    move |start, to| decode(disk, &bytes[start * each..(start + to.len()) * each], to)
}

/// Widens little-endian values to f32 exactly.
///
/// # Panics
/// If they are not f32, bf16 or f16.
fn decode(disk: Dtype, from: &[u8], to: &mut [f32]) {
    match disk {
        Dtype::F32 => {
            for (t, b) in to.iter_mut().zip(from.chunks_exact(4)) {
                *t = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        Dtype::BF16 => {
            for (t, b) in to.iter_mut().zip(from.chunks_exact(2)) {
                *t = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            }
        }
        Dtype::F16 => {
            for (t, b) in to.iter_mut().zip(from.chunks_exact(2)) {
                *t = half::f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        other => unreachable!("a model's tensors of {other}"),
    }
}
