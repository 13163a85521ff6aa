//! Files in memory, for parsers that need a path.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = Path::new("/dev/shm").join(format!("rlhf-hpc-fuzz-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory in memory");
    dir
});

/// The path of `name` in the directory of this process.
pub fn path(name: &str) -> PathBuf {
    DIR.join(name)
}

/// Writes a file and returns its path.
pub fn write(name: &str, bytes: &[u8]) -> PathBuf {
    let path = path(name);
    fs::create_dir_all(path.parent().expect("it is in a directory")).expect("a directory in memory");
    fs::write(&path, bytes).expect("a file in memory");
    path
}

/// What separates the files of an input that consists of several.
const CUT: &[u8] = b"\n%%%\n";

/// Joins files to one input.
pub fn join(files: &[&[u8]]) -> Vec<u8> {
    files.join(CUT)
}

/// Cuts an input into `N` files. The last ones may be missing.
pub fn cut<const N: usize>(input: &[u8]) -> [Option<&[u8]>; N] {
    let mut rest = Some(input);
    std::array::from_fn(|i| {
        let all = rest.take()?;
        match all.windows(CUT.len()).position(|window| window == CUT) {
            Some(at) if i + 1 < N => {
                rest = Some(&all[at + CUT.len()..]);
                Some(&all[..at])
            }
            _ => Some(all),
        }
    })
}

/// Writes the files that the input has, and removes the others.
pub fn write_all<const N: usize>(names: [&str; N], files: [Option<&[u8]>; N]) {
    for (name, file) in names.into_iter().zip(files) {
        match file {
            Some(bytes) => drop(write(name, bytes)),
            None => drop(fs::remove_file(path(name))),
        }
    }
}
