//! What the release binary needs of the machine it runs on.

use std::process::Command;

/// Shared libraries that the binary itself asks for. `ldd` would list theirs, too: what the site's libmpi needs in turn
/// is the site's business.
fn needed() -> Vec<String> {
    let binary = env!("CARGO_BIN_EXE_rlhf-hpc");
    let out = Command::new("readelf").args(["-d", "--wide", binary]).output().expect("readelf (Debian: binutils)");
    let text = String::from_utf8(out.stdout).expect("text");
    let names = text.lines().filter(|line| line.contains("(NEEDED)"));
    names.map(|line| line.split(['[', ']']).nth(1).expect("a name in brackets").to_owned()).collect()
}

#[test]
fn the_binary_needs_mpi_and_the_family_of_libc_alone() {
    let libc = ["libc.so.", "libm.so.", "libgcc_s.so.", "libpthread.so.", "libdl.so.", "librt.so.", "ld-linux"];
    let needed = needed();
    let (mpi, others): (Vec<_>, Vec<_>) = needed.iter().partition(|name| name.starts_with("libmpi.so."));
    assert_eq!(mpi.len(), 1, "{needed:?}");
    assert!(!others.is_empty(), "{needed:?}");
    for name in others {
        assert!(libc.iter().any(|stem| name.starts_with(stem)), "{name} is needed, beside {needed:?}");
    }
}
