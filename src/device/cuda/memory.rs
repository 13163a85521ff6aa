//! GPU memory: owned runs, and views of them that know their dtype.

use super::gpu::{Arg, Stream, gpu};
use super::null_driver;
use super::staging::Event;
use crate::dtype::DType;
use bytemuck::Pod;
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

thread_local! {
    /// The owner of the memory that this thread allocates.
    static OWNER: Cell<&'static str> = const { Cell::new("activations") };
}

/// Runs `work`, whose GPU memory counts as `owner`'s. If there is not enough, the error names the owners and their
/// bytes.
pub fn owned_by<R>(owner: &'static str, work: impl FnOnce() -> R) -> R {
    let before = OWNER.replace(owner);
    let done = work();
    OWNER.set(before);
    done
}

/// The owner of the memory that this thread allocates.
pub fn owner() -> &'static str {
    OWNER.get()
}

/// An owned run of bytes on the GPU of this process.
#[derive(Debug)]
pub struct Memory {
    address: u64,
    bytes: usize,
}

/// Values on the GPU, for reading, or for a library whose caller borrows them mutably. Freely copied.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    address: u64,
    len: usize,
    dtype: DType,
    memory: PhantomData<&'a [u8]>,
}

/// Values on the GPU, for writing.
#[derive(Debug)]
pub struct ViewMut<'a>(View<'a>, PhantomData<&'a mut [u8]>);

impl Memory {
    /// Allocates memory with unspecified contents.
    ///
    /// # Panics
    /// The payload is an [`crate::error::Error`] if the GPU does not have enough memory left.
    pub fn scratch(bytes: usize) -> Self {
        Self::scratch_for(Stream::Compute, bytes)
    }

    /// Same as `scratch`, for memory that `stream` uses first.
    pub(super) fn scratch_for(stream: Stream, bytes: usize) -> Self {
        let taken = gpu().allocate(bytes, OWNER.get(), stream);
        Self { address: taken.unwrap_or_else(|error| std::panic::panic_any(error)), bytes }
    }

    /// Frees it. Its next user waits for `end`, the end of a copy that reads it.
    pub(super) fn free_behind(&mut self, end: Option<&Arc<Event>>) {
        let address = std::mem::replace(&mut self.address, 0);
        self.bytes = 0;
        match end {
            _ if address == 0 => {}
            Some(end) => gpu().free_behind(address, end),
            None => gpu().free(address),
        }
    }

    /// Memory without bytes, for values that are elsewhere.
    pub fn none() -> Self {
        Self { address: 0, bytes: 0 }
    }

    pub fn zeros(bytes: usize) -> Self {
        let memory = Self::scratch(bytes);
        gpu().clear(memory.address, bytes);
        memory
    }

    /// A copy of `values`.
    pub fn from_values<T: Pod>(values: &[T]) -> Self {
        let memory = Self::scratch(size_of_val(values));
        gpu().upload(memory.address, bytemuck::cast_slice(values));
        memory
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// The argument of a kernel that reads it: indices and tables, which have no dtype.
    pub fn arg(&self) -> Arg {
        Arg::Address(self.address)
    }

    /// The argument of a kernel that writes it.
    pub fn arg_mut(&mut self) -> Arg {
        Arg::Address(self.address)
    }

    /// All of it as values of `dtype`.
    pub fn view(&self, dtype: DType) -> View<'_> {
        View { address: self.address, len: self.bytes / dtype.bytes(), dtype, memory: PhantomData }
    }

    pub fn view_mut(&mut self, dtype: DType) -> ViewMut<'_> {
        ViewMut(self.view(dtype), PhantomData)
    }

    /// Replaces the first bytes.
    pub fn write<T: Pod>(&mut self, values: &[T]) {
        assert!(size_of_val(values) <= self.bytes, "{} bytes do not fit {}", size_of_val(values), self.bytes);
        gpu().upload(self.address, bytemuck::cast_slice(values));
    }

    /// The first `len` values.
    pub fn read<T: Pod>(&self, len: usize) -> Vec<T> {
        assert!(len * size_of::<T>() <= self.bytes, "{len} values are more than {} bytes hold", self.bytes);
        let mut values = vec![T::zeroed(); len];
        gpu().download(bytemuck::cast_slice_mut(&mut values), self.address);
        values
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.address != 0 {
            gpu().free(self.address);
        }
    }
}

impl Clone for Memory {
    fn clone(&self) -> Self {
        let copied = Self::scratch(self.bytes);
        gpu().copy(copied.address, self.address, self.bytes);
        copied
    }
}

impl View<'_> {
    pub fn len(self) -> usize {
        self.len
    }

    pub fn dtype(self) -> DType {
        self.dtype
    }

    pub fn address(self) -> u64 {
        self.address
    }

    /// The argument of a kernel that reads values of `dtype`.
    pub fn arg(self, dtype: DType) -> Arg {
        assert_eq!(self.dtype, dtype, "the kernel expects another dtype");
        Arg::Address(self.address)
    }

    #[must_use]
    pub fn part(self, range: Range<usize>) -> Self {
        let within = range.start <= range.end && range.end <= self.len;
        assert!(within, "the range {range:?} exceeds the {} values", self.len);
        View { address: self.address + (range.start * self.dtype.bytes()) as u64, len: range.len(), ..self }
    }

    /// The values as they are, on the host. Waits for the GPU.
    pub fn read_bits<T: Pod>(self, values: &mut [T]) {
        assert_eq!(size_of_val(values), self.len * self.dtype.bytes(), "host values must fit {self:?}");
        gpu().download(bytemuck::cast_slice_mut(values), self.address);
    }

    /// The values on the host, as f32. Waits for the GPU. Zeros on a null GPU, which the host does not touch.
    pub fn to_f32(self) -> Vec<f32> {
        match self.dtype {
            _ if null_driver::is_active() => vec![0.0; self.len],
            DType::F32 => {
                let mut values = vec![0.0f32; self.len];
                self.read_bits(&mut values);
                values
            }
            DType::Bf16 => {
                let mut values = vec![0u16; self.len];
                self.read_bits(&mut values);
                values.into_iter().map(|x| f32::from_bits(u32::from(x) << 16)).collect()
            }
        }
    }
}

impl<'a> ViewMut<'a> {
    pub fn len(&self) -> usize {
        self.0.len
    }

    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    pub fn as_view(&self) -> View<'_> {
        self.0
    }

    /// The same values for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut(self.0, PhantomData)
    }

    /// The argument of a kernel that writes values of `dtype`.
    pub fn arg(&mut self, dtype: DType) -> Arg {
        self.0.arg(dtype)
    }

    #[must_use]
    pub fn part(self, range: Range<usize>) -> ViewMut<'a> {
        ViewMut(self.0.part(range), PhantomData)
    }

    /// The values before `at`, and those from there on.
    pub fn split_at(&mut self, at: usize) -> (ViewMut<'_>, ViewMut<'_>) {
        self.reborrow().split(at)
    }

    /// The same for as long as `self` lasts.
    pub fn split(self, at: usize) -> (ViewMut<'a>, ViewMut<'a>) {
        let [before, behind] = [0..at, at..self.0.len].map(|range| ViewMut(self.0.part(range), PhantomData));
        (before, behind)
    }

    /// Replaces the values by those of the host, rounded if the dtype is narrower.
    pub fn write(&mut self, values: &[f32]) {
        assert_eq!(self.len(), values.len(), "host values must fit {self:?}");
        match self.dtype() {
            _ if null_driver::is_active() => {}
            DType::F32 => self.write_bits(values),
            DType::Bf16 => {
                let bits: Vec<u16> = values.iter().map(|x| half::bf16::from_f32(*x).to_bits()).collect();
                self.write_bits(&bits);
            }
        }
    }

    /// Replaces the values by those of the host, as they are.
    pub fn write_bits<T: Pod>(&mut self, values: &[T]) {
        assert_eq!(size_of_val(values), self.0.len * self.0.dtype.bytes(), "host values must fit {self:?}");
        gpu().upload(self.0.address, bytemuck::cast_slice(values));
    }

    /// Calls `work` with a copy of the values on the host, as f32, and writes it back.
    pub fn on_host<R>(&mut self, work: impl FnOnce(&mut [f32]) -> R) -> R {
        let mut values = self.0.to_f32();
        let done = work(&mut values);
        self.write(&values);
        done
    }

    /// Copies `from` after all earlier work of the stream.
    pub fn copy_from(&mut self, from: View) {
        assert!((self.0.len, self.0.dtype) == (from.len, from.dtype), "{from:?} cannot be copied into {self:?}");
        gpu().copy(self.0.address, from.address, self.0.len * self.0.dtype.bytes());
    }

    /// Sets all values to 0.
    pub fn clear(&mut self) {
        gpu().clear(self.0.address, self.0.len * self.0.dtype.bytes());
    }
}
