//! Models and rows on the command line: paths, or names of the Hub whose repositories are in the cache.

use crate::hub;
use crate::sys::stderr;
use std::path::{Path, PathBuf};

/// The directory of the model or adapter that an argument names.
// The signature of `from_str_fn`.
#[expect(clippy::unnecessary_wraps)]
pub fn model(text: &str) -> Result<PathBuf, String> {
    Ok(model_dir(text))
}

/// The same, for an argument that is not only a directory.
pub fn model_dir(text: &str) -> PathBuf {
    model_dir_from(Path::new(""), text)
}

/// The directory of the model that a file in the folder `here` names.
pub fn model_dir_from(here: &Path, text: &str) -> PathBuf {
    let mut notes = Vec::new();
    let dir = hub::model_dir(here, Path::new(text), &mut notes);
    for note in notes {
        stderr::note_once(&note);
    }
    dir
}

/// The file or folder of rows that an argument names.
#[expect(clippy::unnecessary_wraps)]
pub fn rows(text: &str) -> Result<PathBuf, String> {
    Ok(hub::rows_path(Path::new(""), text))
}
