//! The source of the patches of images.

use crate::device::null;
use crate::error::Result;
use crate::experience::{Image, Patches};
use std::rc::Rc;

/// Reads the patches of images from their files.
#[derive(Clone)]
pub struct Pixels {
    read: Rc<Read>,
    /// In a plan, the number of images that a rank sees in the whole job.
    pub(super) planned: usize,
}

type Read = dyn Fn(&Image) -> Result<Patches>;

impl std::fmt::Debug for Pixels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pixels")
    }
}

impl Pixels {
    pub fn new(read: impl Fn(&Image) -> Result<Patches> + 'static) -> Self {
        Self { read: Rc::new(read), planned: 0 }
    }

    /// Patches without values, in the plan of a job whose ranks see `images` images each.
    pub fn planned(images: usize) -> Self {
        Self { planned: images, ..Self::new(|image| Ok(without_values(image))) }
    }

    /// The patches of an image, without values on a null device.
    pub(super) fn of(&self, image: &Image) -> Result<Patches> {
        if null::is_active() {
            return Ok(without_values(image));
        }
        (self.read)(image)
    }
}

fn without_values(image: &Image) -> Patches {
    Patches { grid: image.grid, hash: image.hash, values: Vec::new() }
}
