//! The source of images' patches for models: the image processor of a model directory.

use crate::images::Images;
use crate::model::Pixels;
use std::path::Path;

/// The patches that the processor of the model in `dir` makes; `None` if it has none that can be used. Then rows with
/// images have been rejected with the reason.
pub fn of_model(dir: &Path) -> Option<Pixels> {
    let images = Images::find(dir).ok().flatten()?;
    Some(Pixels::new(move |image| images.patches(image)))
}
