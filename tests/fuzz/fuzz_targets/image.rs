//! Image files, and the settings of an image processor.

use crate::place;
use rlhf_hpc::comm::abort;
use rlhf_hpc::images::{Processor, thumbnail};

/// The first part of the input is a preprocessor_config.json, the second an image. As in rows, a panic of a decoder is an
/// error of the image.
pub fn run(data: &[u8]) {
    let [settings, file] = place::cut(data);
    place::write("i/preprocessor_config.json", settings.unwrap_or_default());
    let Ok(Some(processor)) = Processor::find(&place::path("i")) else { return };
    let file = file.unwrap_or_default();
    drop(abort::caught(|| processor.patches(file)));
    drop(abort::caught(|| thumbnail(file)));
}

/// Images of several forms.
pub fn seeds() -> Vec<Vec<u8>> {
    let settings = br#"{"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 4096}, "resample": 3}"#;
    let files: [&[u8]; 6] = [
        include_bytes!("../../golden/images/tiny.png"),
        include_bytes!("../../golden/images/palette.png"),
        include_bytes!("../../golden/images/interlaced.png"),
        include_bytes!("../../golden/images/420.jpg"),
        include_bytes!("../../golden/images/progressive.jpg"),
        include_bytes!("../../golden/images/turned-6.jpg"),
    ];
    files.map(|file| place::join(&[settings, file])).to_vec()
}
