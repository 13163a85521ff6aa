//! Work in a child process of this program with limits, for a C library that a damaged file can crash.

use super::signals;
use std::ffi::OsStr;
use std::io;
use std::process::{Command, Output};

/// Runs this program with other arguments, and returns when it has ended. The child has no standard input.
pub fn run(arguments: &[&OsStr]) -> io::Result<Output> {
    // The path of this program may belong to a newer release by now. This link still leads to the running one.
    Command::new("/proc/self/exe").args(arguments).stdin(std::process::Stdio::null()).output()
}

/// Limits this process to `cpu_s` seconds of processor time, which do not depend on the load of the machine, and to
/// `bytes` of memory. A crash leaves no core file. Signals end it, also if its parent ignores them.
pub fn limit(cpu_s: u64, bytes: u64) {
    signals::set(libc::SIGXCPU, libc::SIG_DFL, 0);
    // After the soft limit the signal names the reason. The hard limit ends a process that ignores it.
    for (what, soft, hard) in
        [(libc::RLIMIT_CPU, cpu_s, cpu_s + 1), (libc::RLIMIT_AS, bytes, bytes), (libc::RLIMIT_CORE, 0, 0)]
    {
        let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
        // SAFETY: reads one value. If the process has a lower limit already, that one stays.
        unsafe { libc::setrlimit(what, &raw const limit) };
    }
}

/// The reason why a child ended without a result: `it crashed (signal 11)`.
pub fn describe(output: &Output) -> String {
    use std::os::unix::process::ExitStatusExt;
    match output.status.signal() {
        Some(libc::SIGXCPU) => "it ran into its limit of processor time".to_string(),
        Some(signal) => format!("it crashed (signal {signal})"),
        None if output.status.success() => "its answer is malformed".to_string(),
        None => format!("it ended with {}", output.status),
    }
}
