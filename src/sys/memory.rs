//! Memory of this process and of the machine, in bytes.

use std::fs;

/// What of a memory, of the host or of a GPU, is in use: bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Of what lives, and their peak since start, or since `begin_peak`.
    pub in_use: usize,
    pub peak: usize,
    /// Taken from the system or the driver, live and kept.
    pub held: usize,
    /// What of the held ones was ever asked for, so that the system backs it.
    pub resident: usize,
    /// Of mapped buffers that are evicted, which count in none of the others.
    pub evicted: usize,
    /// `usize::MAX`: none.
    pub limit: usize,
    /// How often the system or the driver was asked for memory.
    pub requests: u64,
    /// Pinned for a GPU, and how often the driver was asked for it.
    pub pinned: usize,
    pub pinned_requests: u64,
}

impl Usage {
    /// Nothing is in use, and no limit set.
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

    /// Bytes that may still come into use.
    pub fn left(&self) -> usize {
        self.limit.saturating_sub(self.in_use)
    }
}

/// Most memory that this process has had resident. 0 where the system does not say.
pub fn peak_bytes() -> u64 {
    field("/proc/self/status", "VmHWM:").unwrap_or(0)
}

/// The line `NAME N kB` of a file of the system, in bytes.
fn field(path: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
    Some(kib.parse::<u64>().ok()? * 1024)
}

/// From now on `peak_bytes` is the most since this call; returns whether the system does that.
pub fn begin_peak() -> bool {
    // proc_pid_clear_refs(5): 5 sets the peak to what is resident.
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

pub fn resident_bytes() -> u64 {
    field("/proc/self/status", "VmRSS:").unwrap_or(0)
}

/// Memory that can still be had without swapping: the machine's, or what the cgroup's limit leaves.
pub fn available_bytes() -> u64 {
    let machine = field("/proc/meminfo", "MemAvailable:");
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(limit, used)| limit.saturating_sub(used));
    machine.unwrap_or(u64::MAX).min(group.unwrap_or(u64::MAX))
}
