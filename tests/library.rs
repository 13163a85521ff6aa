//! Tests that call the library.

mod checkpoint;
mod data;
mod formulas;
mod masked;
mod metrics;
mod models;
mod ops;
mod parity;
mod reward;
mod rollout;
mod tidy;

/// Names in a directory, sorted.
fn names(dir: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("the directory is there");
    let mut names: Vec<String> =
        entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Runs `body`, the rest of the test `name`, in its own process.
fn alone(name: &str, body: fn()) {
    if std::env::var_os("ALONE").is_some() {
        return body();
    }
    let mut command = std::process::Command::new(std::env::current_exe().expect("this program has a path"));
    let done = command.args(["--exact", name, "--nocapture"]).env("ALONE", "1").output().expect("it starts");
    let words = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{}: {words}", done.status);
    assert!(String::from_utf8_lossy(&done.stdout).contains("1 passed"), "there is no test {name}");
}

/// Limits the size of files that this process writes, like a disk that becomes full.
fn limit_files(bytes: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: an ignored signal has no handler, and the others read and write one value.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        assert_eq!(libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit), 0);
        limit.rlim_cur = bytes.min(limit.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit), 0);
    }
}
