//! Memory of this process and of the machine, in bytes.

use std::fs;

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
