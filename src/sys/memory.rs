//! Memory of this process and of the machine, in bytes.

use std::fs;

/// The usage of host or GPU memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of live buffers, and their peak since the start or since `begin_peak`.
    pub in_use: usize,
    pub peak: usize,
    /// Bytes taken from the system or the driver, live and kept.
    pub held: usize,
    /// Held bytes that were ever requested, so that the system backs them.
    pub resident: usize,
    /// Bytes of evicted mapped buffers, which are not in the other counts.
    pub evicted: usize,
    /// The limit; `usize::MAX`: none.
    pub limit: usize,
    /// The number of requests to the system or the driver.
    pub requests: u64,
    /// Bytes of pinned host memory, and the number of requests for it.
    pub pinned: usize,
    pub pinned_requests: u64,
}

impl Usage {
    /// No memory in use, and no limit.
    pub const NONE: Self = Self {
        in_use: 0,
        peak: 0,
        held: 0,
        resident: 0,
        evicted: 0,
        limit: usize::MAX,
        requests: 0,
        pinned: 0,
        pinned_requests: 0,
    };

    /// The bytes that may still be used.
    pub fn left(&self) -> usize {
        self.limit.saturating_sub(self.in_use)
    }
}

/// The peak resident memory of this process; 0 if the system does not report it.
pub fn peak_bytes() -> u64 {
    field("/proc/self/status", "VmHWM:").unwrap_or(0)
}

/// The value of the line `NAME N kB` in a system file, in bytes.
fn field(path: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
    Some(kib.parse::<u64>().ok()? * 1024)
}

/// Resets the peak of `peak_bytes`. Returns whether the system supports it.
pub fn begin_peak() -> bool {
    // proc_pid_clear_refs(5): 5 sets the peak to what is resident.
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

pub fn resident_bytes() -> u64 {
    field("/proc/self/status", "VmRSS:").unwrap_or(0)
}

/// The memory that is available without swapping: the machine's, or the rest of the cgroup's limit.
pub fn available_bytes() -> u64 {
    let machine = field("/proc/meminfo", "MemAvailable:");
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(limit, used)| limit.saturating_sub(used));
    machine.unwrap_or(u64::MAX).min(group.unwrap_or(u64::MAX))
}
