//! CUDA libraries that are opened at run time: the search for them, and the reason why none was opened.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A library to search for: the variable that names the file itself, and file names, best first.
#[derive(Clone, Copy, Debug)]
pub struct Sought {
    pub variable: &'static str,
    pub names: &'static [&'static str],
}

pub const NVRTC: Sought =
    Sought { variable: "RLHF_NVRTC", names: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"] };
pub const CUBLASLT: Sought = Sought {
    variable: "RLHF_CUBLASLT_LIB",
    names: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11", "libcublasLt.so"],
};
pub const NCCL: Sought = Sought { variable: "RLHF_NCCL_LIB", names: &["libnccl.so.2", "libnccl.so"] };

/// Defines `struct Functions` with a library's functions under our own names, and `of`, which finds all of them.
macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            fn load(library: &Library) -> Result<Self, String> {
                // SAFETY: the types below are those of the library's header, the same in all versions that are taken.
                unsafe {
                    Ok(Self { $($name: *library.get($symbol).map_err(|e| reason(&e))?,)* })
                }
            }
        }
    };
}
pub(crate) use functions;

/// A lookup of environment variables; tests pass their own.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

impl Sought {
    /// The files to try, in order: only the file that the variable names, if it is set. Otherwise each name in the
    /// directories of the system's loader, then of CUDA, then of Python packages in the active environment.
    pub fn candidates(&self) -> Vec<OsString> {
        self.candidates_in(&|name| env::var_os(name).filter(|value| !value.is_empty()))
    }

    /// Whether the variable names a file.
    pub fn is_named(&self) -> bool {
        env::var_os(self.variable).is_some_and(|value| !value.is_empty())
    }

    fn candidates_in(&self, lookup: Lookup) -> Vec<OsString> {
        if let Some(path) = lookup(self.variable) {
            return vec![path];
        }
        let dirs = directories(lookup);
        let named = self.names.iter().map(OsString::from);
        let placed = self.names.iter().flat_map(|name| dirs.iter().map(move |dir| dir.join(name)));
        named.chain(placed.filter(|path| path.is_file()).map(PathBuf::into_os_string)).collect()
    }

    /// The first candidate that `open` accepts. Its messages about the others are the error.
    ///
    /// # Errors
    /// A message for each candidate that exists, or that there is none.
    pub fn open<T>(&self, open: impl Fn(&OsString) -> Result<T, String>) -> Result<T, String> {
        let mut refused = Vec::new();
        for path in self.candidates() {
            match open(&path) {
                Ok(opened) => return Ok(opened),
                Err(why) if is_absent(&why, path.as_ref()) && !self.is_named() => {}
                Err(why) => refused.push(format!("{}: {why}", path.display())),
            }
        }
        if refused.is_empty() {
            let names = self.names.join(", ");
            return Err(format!("no {names} on this machine (set {} to the path of the file)", self.variable));
        }
        Err(refused.join("; "))
    }
}

/// Whether the system's loader did not find the file `path`. If it found the file, another library may be missing.
pub(super) fn is_absent(why: &str, path: &Path) -> bool {
    why.starts_with(&format!("{}: cannot open shared object file: No such file", path.display()))
}

/// Directories that hold CUDA's libraries but that the system's loader may not know.
fn directories(lookup: Lookup) -> Vec<PathBuf> {
    let roots = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(lookup).map(PathBuf::from);
    let mut dirs: Vec<PathBuf> =
        roots.chain([PathBuf::from("/usr/local/cuda")]).map(|root| root.join("lib64")).collect();
    for prefix in prefixes(lookup) {
        let lib = prefix.join("lib");
        dirs.push(lib.clone());
        for python in entries(&lib, |name| name.starts_with("python3")) {
            for packages in ["site-packages", "dist-packages"] {
                let packages = entries(&python.join(packages).join("nvidia"), |_| true);
                dirs.extend(packages.into_iter().map(|package| package.join("lib")));
            }
        }
    }
    dirs
}

/// The prefixes of the active Python environment: its variable, or else the directory of PATH's python3, for an
/// environment that was not activated. Debian puts packages of its own python3 below `local`.
fn prefixes(lookup: Lookup) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(lookup).map(PathBuf::from).collect();
    let path = lookup("PATH").unwrap_or_default();
    let python = env::split_paths(&path).find(|dir| dir.join("python3").is_file());
    if let Some(prefix) = python.as_deref().and_then(Path::parent) {
        prefixes.extend([prefix.to_path_buf(), prefix.join("local")]);
        prefixes.dedup();
    }
    prefixes
}

fn entries(dir: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let listed = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let named = listed.filter(|entry| entry.file_name().to_str().is_some_and(&wanted));
    let mut paths: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_that_the_variable_names_is_the_only_candidate() {
        let set = |name: &str| (name == "RLHF_NVRTC").then(|| OsString::from("/site/libnvrtc.so"));
        assert_eq!(NVRTC.candidates_in(&set), ["/site/libnvrtc.so"]);
        assert_eq!(NCCL.candidates_in(&set)[..2], ["libnccl.so.2", "libnccl.so"]);
    }

    /// The layout of the CUDA 13 wheels, and of Debian's own python3.
    #[test]
    fn packages_are_found_in_the_active_environment_and_next_to_the_python3_of_path() {
        let root = tempfile::tempdir().expect("a directory");
        let make = |file: &str| {
            let file = root.path().join(file);
            std::fs::create_dir_all(file.parent().expect("a directory")).expect("a directory");
            std::fs::write(&file, b"").expect("a file");
            file
        };
        make("bin/python3");
        make("sbin/python2");
        let path = env::join_paths(["sbin", "bin"].map(|dir| root.path().join(dir))).expect("a path");
        let prefix = root.path().as_os_str().to_owned();
        for (variable, value, sought, file) in [
            ("VIRTUAL_ENV", &prefix, NCCL, "lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2"),
            ("PATH", &path, CUBLASLT, "local/lib/python3.11/dist-packages/nvidia/cublas/lib/libcublasLt.so.12"),
            ("PATH", &path, CUBLASLT, "lib/python3.12/site-packages/nvidia/cu13/lib/libcublasLt.so.13"),
        ] {
            let file = make(file).into_os_string();
            let found = sought.candidates_in(&|name| (name == variable).then(|| value.clone()));
            assert!(found.contains(&file), "{}", file.display());
        }
        let why = NCCL.open(|path| Err::<(), _>(format!("{} is no library", path.display()))).expect_err("refused");
        assert!(why.contains("libnccl.so.2 is no library"), "{why}");
    }

    #[test]
    fn a_missing_library_is_reported_with_its_variable() {
        let absent = "cannot open shared object file: No such file or directory";
        let why =
            CUBLASLT.open(|path| Err::<(), _>(format!("{}: {absent}", path.display()))).expect_err("no such library");
        assert!(why.starts_with("no libcublasLt.so.13, ") && why.contains("RLHF_CUBLASLT_LIB"), "{why}");
        // One that is there, and lacks another.
        let why = CUBLASLT.open(|_| Err::<(), _>(format!("libnvJitLink.so.13: {absent}"))).expect_err("it is missing");
        assert!(why.contains("libcublasLt.so.13: libnvJitLink.so.13: cannot open"), "{why}");
    }
}
