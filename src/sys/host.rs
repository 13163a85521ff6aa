//! The name of this machine, and its clocks.

use std::borrow::Borrow;
use std::ffi::CString;

/// The host name of the kernel, or `localhost` if it has none.
pub fn name() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = text.trim();
    if name.is_empty() { "localhost".to_string() } else { name.to_string() }
}

/// The id that the kernel of this machine chose at its start; empty if it has none. Two machines may share a name.
pub fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_string()
}

/// A name for the host of each process with these names and boot ids. Hosts that share a name get a part of their boot
/// id added, so that equal names mean the same host.
pub fn distinct(hosts: &[(String, String)]) -> Vec<String> {
    let is_shared = |name: &str, id: &str| hosts.iter().any(|(other, other_id)| other == name && other_id != id);
    let distinct = |(name, id): &(String, String)| {
        if is_shared(name, id) { format!("{name} (boot {})", &id[..id.len().min(8)]) } else { name.clone() }
    };
    hosts.iter().map(distinct).collect()
}

/// The time in seconds of a system clock, such as `libc::CLOCK_MONOTONIC` or `libc::CLOCK_THREAD_CPUTIME_ID`.
pub fn clock_s(clock: libc::clockid_t) -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid timespec, and the kernel writes nothing else.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// The upper median of measured numbers, or NaN without numbers.
pub fn median(values: impl IntoIterator<Item: Borrow<f64>>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().map(|x| *x.borrow()).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Formats `seconds` since 1970-01-01T00:00Z in UTC with the C library's `strftime`.
pub fn strftime(format: &str, seconds: i64) -> String {
    format_time(format, seconds, false)
}

/// The local time of day, as `14:05:31`.
pub fn time_of_day() -> String {
    format_time("%H:%M:%S", clock_s(libc::CLOCK_REALTIME) as i64, true)
}

/// The date and the time of day here, as `2026-11-28 14:05:31`.
pub fn date_and_time() -> String {
    format_time("%F %T", clock_s(libc::CLOCK_REALTIME) as i64, true)
}

fn format_time(format: &str, seconds: i64, is_local: bool) -> String {
    let Ok(c_format) = CString::new(format) else { return format.to_string() };
    // A width in the format can exceed this: then nothing is written.
    let mut text = vec![0u8; 256 + 64 * format.len()];
    // SAFETY: an all-zero tm is a value that these functions fill; strftime writes at most the given length, and
    // returns the written length.
    let length = unsafe {
        let mut time: libc::tm = std::mem::zeroed();
        if is_local {
            libc::localtime_r(&raw const seconds, &raw mut time);
        } else {
            libc::gmtime_r(&raw const seconds, &raw mut time);
            time.tm_zone = c"UTC".as_ptr();
        }
        libc::strftime(text.as_mut_ptr().cast(), text.len(), c_format.as_ptr(), &raw const time)
    };
    String::from_utf8_lossy(&text[..length]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::{distinct, strftime};

    #[test]
    fn machines_with_equal_names_are_distinguished_by_their_boot_ids() {
        let hosts = |of: &[(&str, &str)]| {
            distinct(&of.iter().map(|(name, id)| ((*name).to_string(), (*id).to_string())).collect::<Vec<_>>())
        };
        let [one, other] = ["88372ef9-bcbe", "0c1d5e70-9f21"];
        assert_eq!(hosts(&[("n1", one), ("n1", one), ("n2", other)]), ["n1", "n1", "n2"]);
        assert_eq!(hosts(&[("n1", one), ("n2", one)]), ["n1", "n2"], "two containers of one machine");
        assert_eq!(
            hosts(&[("localhost", one), ("localhost", other), ("localhost", one), ("n2", other)]),
            ["localhost (boot 88372ef9)", "localhost (boot 0c1d5e70)", "localhost (boot 88372ef9)", "n2"]
        );
        assert_eq!(hosts(&[("localhost", ""), ("localhost", "")]), ["localhost"; 2], "a kernel without ids");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(strftime("%d %b %Y %H:%M:%S %A %j", 0), "01 Jan 1970 00:00:00 Thursday 001");
        assert_eq!(strftime("%-d %B %y %a %I %p", 951_782_400), "29 February 00 Tue 12 AM");
        assert_eq!(strftime("%F %T %% %Z %z", 1_735_689_599), "2024-12-31 23:59:59 % UTC +0000");
        assert_eq!(strftime("%F %Q", -1), "1969-12-31 %Q");
    }
}
