//! Pinned memory, and numbers that are copied to the host through it while the GPU keeps working.

use super::gpu::gpu;
use super::memory::View;
use super::staging::{Event, Pages};
use super::streams::Stream;
use crate::device::null;
use crate::dtype::DType;
use crate::error::format_bytes;
use crate::sys::lock::lock;
use std::sync::Mutex;

/// Pinned host memory, which the GPU copies from and to while the host works.
#[derive(Debug)]
pub(super) struct Pinned(pub Pages);

impl Pinned {
    /// Pinned memory of zeros.
    ///
    /// # Panics
    /// The payload is an [`crate::error::Error`] if the host cannot pin that much.
    pub fn new(bytes: usize) -> Self {
        let pages = gpu().call(|| Pages::new(bytes)).unwrap_or_else(|mut error| {
            let has = format_bytes(gpu().usage().pinned as u64);
            error.message = format!("{}; this process has already pinned {has}", error.message);
            std::panic::panic_any(error)
        });
        let usage = &mut gpu().pool().usage;
        usage.pinned += bytes;
        null::hold_on_host(usage.pinned);
        usage.pinned_requests += 1;
        Self(pages)
    }

    /// Memory for `bytes`: the smallest spare run that is large enough. If none is, new memory replaces the spare runs.
    fn kept(bytes: usize) -> Self {
        let mut spare = lock(&SPARE);
        // Memory of a null GPU is not shared.
        let count = if null::is_active() { 0 } else { spare.len() };
        if let Some(i) = (0..count).filter(|&i| spare[i].0.bytes >= bytes).min_by_key(|&i| spare[i].0.bytes) {
            return spare.swap_remove(i);
        }
        if !null::is_active() {
            spare.clear();
        }
        drop(spare);
        Self::new(bytes.next_power_of_two().max(BYTES_MIN))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        gpu().pool().usage.pinned -= self.0.bytes;
    }
}

/// Pinned memory between two uses: pinning takes longer than copying.
static SPARE: Mutex<Vec<Pinned>> = Mutex::new(Vec::new());

/// The least that is pinned.
const BYTES_MIN: usize = 64 << 10;

/// f32 numbers on their way to the host.
#[derive(Debug)]
#[must_use = "the numbers are there when `wait_values` returns"]
pub struct Late {
    /// `None` once they were taken.
    pinned: Option<Pinned>,
    end: Event,
    len: usize,
    /// Kernels that had been started when the copy began.
    started: u64,
}

impl Late {
    /// Begins to copy `numbers`, after all earlier work of the stream. Later work may free or overwrite their memory.
    pub fn start(numbers: View) -> Self {
        assert_eq!(numbers.dtype(), DType::F32, "numbers are read back as f32");
        let (len, bytes) = (numbers.len(), size_of::<f32>() * numbers.len());
        let mut pinned = Pinned::kept(bytes);
        let end = gpu().fetch(&mut pinned.0, numbers.address(), bytes, Stream::Compute);
        Self { pinned: Some(pinned), end, len, started: gpu().counts.started.get() }
    }

    /// The numbers. Waits for their copy, not for work that was started after it.
    pub fn wait_values(mut self) -> Vec<f32> {
        let counts = &gpu().counts;
        let count = if counts.started.get() == self.started { &counts.drained } else { &counts.fetched };
        count.add(1);
        gpu().await_event(&self.end, "a copy of results to the host");
        let pinned = self.pinned.take().expect("numbers are taken once");
        let mut numbers = vec![0.0f32; self.len];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut numbers);
        bytes.copy_from_slice(&pinned.0.as_slice()[..bytes.len()]);
        if !null::is_active() {
            lock(&SPARE).push(pinned);
        }
        numbers
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        if self.pinned.is_some() && !std::thread::panicking() {
            gpu().await_event(&self.end, "a copy of results to the host");
        }
    }
}
