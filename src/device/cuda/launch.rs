//! The launch of kernels.

use super::gpu::{Arg, Gpu};
use super::null_driver;
use super::sys::{self, check};
use super::waits::waiting;
use crate::error::{Error, Result};
use std::ffi::c_void;
use std::ptr;

/// The maximum blocks of a grid in x, y and z.
const GRID_MAX: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// The maximum arguments of a launch.
const ARGS_MAX: usize = 48;

impl Gpu {
    /// Starts a kernel after all earlier work of the stream. Blocks have `block` threads in x. A grid without blocks
    /// starts nothing.
    ///
    /// # Panics
    /// The payload is an [`Error`] if there is no such kernel or it fails. It names the kernel, its grid and its
    /// arguments.
    pub fn launch(&self, kernel: &'static str, grid: [usize; 3], block: usize, shared_bytes: usize, args: &[Arg]) {
        if grid.contains(&0) {
            return;
        }
        self.works.note(args.iter().filter_map(|arg| if let Arg::Address(at) = arg { Some(*at) } else { None }));
        self.counts.started.add(1);
        // The failure precedes the kernel's arguments, which may be long.
        let started = self.start(kernel, grid, block, shared_bytes, args).map_err(|mut error| {
            let given = args.iter().map(Arg::to_string).collect::<Vec<_>>().join(", ");
            error.message = format!("{}; arguments: {given}", error.message);
            error
        });
        let [x, y, z] = grid;
        self.must_start(started, || format!("kernel {kernel}, grid {x} x {y} x {z}, {block} threads per block"));
    }

    fn start(&self, name: &'static str, grid: [usize; 3], block: usize, shared: usize, args: &[Arg]) -> Result<()> {
        if grid.iter().zip(GRID_MAX).any(|(blocks, most)| *blocks > most as usize) {
            let [x, y, z] = GRID_MAX;
            return Err(Error::fault(format!("a grid may have at most {x} x {y} x {z} blocks")));
        }
        let function = self.kernels.function(name, block, shared)?;
        if null_driver::is_active() {
            return Ok(());
        }
        assert!(args.len() <= ARGS_MAX, "a kernel may have at most {ARGS_MAX} arguments (got {})", args.len());
        let mut words = [0u64; ARGS_MAX];
        let mut places = [ptr::null_mut::<c_void>(); ARGS_MAX];
        for ((arg, word), place) in args.iter().zip(&mut words).zip(&mut places) {
            *word = arg.word();
            *place = ptr::from_mut(word).cast();
        }
        let ([x, y, z], block, shared) = (grid.map(|blocks| blocks as u32), block as u32, shared as u32);
        self.call(|| {
            // The driver blocks the host if too much work is queued.
            let _waiting = waiting("a kernel launch");
            // SAFETY: an address for each argument, from which little-endian machines read the first bytes; views hold
            // their bounds.
            let status = unsafe {
                let (places, none) = (places.as_mut_ptr(), ptr::null_mut());
                sys::cuLaunchKernel(function, x, y, z, block, 1, 1, shared, self.queue(), places, none)
            };
            check("cuLaunchKernel", status)
        })?;
        self.note_started(name);
        Ok(())
    }
}
