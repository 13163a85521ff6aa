//! The name of this machine.

/// The host name as the kernel has it; `localhost` where it has none.
pub fn name() -> String {
    let mut bytes = [0u8; 256];
    // SAFETY: the kernel writes at most the given length, and the last byte stays zero.
    let code = unsafe { libc::gethostname(bytes.as_mut_ptr().cast(), bytes.len() - 1) };
    let length = bytes.iter().position(|&b| b == 0).unwrap_or(0);
    if code != 0 || length == 0 {
        return "localhost".to_string();
    }
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

/// Seconds by a clock of the system, such as `libc::CLOCK_MONOTONIC` or `libc::CLOCK_THREAD_CPUTIME_ID`.
pub fn clock_s(clock: libc::clockid_t) -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid timespec, and the kernel writes nothing else.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}
