//! Numbers that come to the host while the GPU goes on.

use super::graph::{Pinned, Transfer};
use super::memory::View;
use super::null_driver;
use crate::dtype::DType;
use crate::sys::lock::lock;
use std::sync::Mutex;

/// Pinned memory between two uses: to pin takes longer than to copy.
static SPARE: Mutex<Vec<Pinned>> = Mutex::new(Vec::new());

/// The least that is pinned.
pub const BYTES_MIN: usize = 64 << 10;

/// f32 numbers on their way to the host.
#[derive(Debug)]
pub struct Late {
    transfer: Transfer,
    len: usize,
}

impl Late {
    /// Begins to copy `numbers`, behind what was started before; their memory may be freed or overwritten by what is started
    /// later.
    pub fn of(numbers: View) -> Self {
        assert_eq!(numbers.dtype(), DType::F32, "numbers come late as f32");
        Self { transfer: Pinned::kept(size_of::<f32>() * numbers.len()).fetch(numbers), len: numbers.len() }
    }

    /// The numbers. Waits for their copy, not for what was started behind it.
    pub fn take(self) -> Vec<f32> {
        let pinned = self.transfer.finish();
        let mut numbers = vec![0.0f32; self.len];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut numbers);
        bytes.copy_from_slice(&pinned.as_slice()[..bytes.len()]);
        pinned.keep();
        numbers
    }
}

impl Pinned {
    /// Room for `bytes`: the smallest that was kept and does. What is too small gives way to what is made new.
    pub fn kept(bytes: usize) -> Self {
        let mut spare = lock(&SPARE);
        // That of a null GPU is no one's.
        let count = if null_driver::is_active() { 0 } else { spare.len() };
        let fit = (0..count).filter(|&i| spare[i].as_slice().len() >= bytes);
        if let Some(i) = fit.min_by_key(|&i| spare[i].as_slice().len()) {
            return spare.swap_remove(i);
        }
        if !null_driver::is_active() {
            spare.clear();
        }
        drop(spare);
        Self::new(bytes.next_power_of_two().max(BYTES_MIN))
    }

    /// Keeps it for the next use.
    pub fn keep(self) {
        if !null_driver::is_active() {
            lock(&SPARE).push(self);
        }
    }
}
