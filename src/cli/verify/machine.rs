//! Clocks, disk, and links between ranks: checks of measured numbers.

use super::page::Check;
use crate::error::{Error, Kind, Result, format_bytes};
use crate::sys::files::{self, LargeFile};
use crate::sys::host::{clock_s, median};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Seconds by which clocks of hosts may differ. Times in logs show the order of events.
const CLOCKS_APART_S: f64 = 1.0;
/// Seconds by which a clock may be set while this program runs. Network time adjusts by less.
const JUMP_S: f64 = 0.25;
/// The least share of the plan's bandwidth, on GPUs and on CPUs, whose memory other programs use, too.
pub const OF_PLAN_GPU: f64 = 1.0 / 3.0;
pub const OF_PLAN_CPU: f64 = 1.0 / 10.0;
/// The least share of the median of links of their kind.
const OF_MEDIAN: f64 = 1.0 / 4.0;
/// Seconds that a checkpoint may take.
const CHECKPOINT_S: f64 = 600.0;
const GB: f64 = 1e9;

/// The time on a rank's clock of the day, and on its steady clock.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Time {
    pub day_s: f64,
    pub steady_s: f64,
}

impl Time {
    pub fn now() -> Self {
        Self { day_s: clock_s(libc::CLOCK_REALTIME), steady_s: clock_s(libc::CLOCK_MONOTONIC) }
    }
}

/// Compares the clocks of ranks: `times[rank]` were taken at the same moments on all ranks.
pub fn clocks(times: &[Vec<Time>], hosts: &[String]) -> Check {
    let name = "clocks";
    let mut wrong = Vec::new();
    let (mut apart, mut jumped): (f64, f64) = (0.0, 0.0);
    let mut said: Vec<&String> = Vec::new();
    for (rank, own) in times.iter().enumerate() {
        // A host has one clock.
        let is_new = !said.contains(&&hosts[rank]);
        let jumps = own.windows(2).map(|two| (two[1].day_s - two[0].day_s) - (two[1].steady_s - two[0].steady_s));
        let jump = jumps.fold(0.0, |most: f64, jump| if jump.abs() > most.abs() { jump } else { most });
        jumped = jumped.max(jump.abs());
        if jump.abs() > JUMP_S && is_new {
            wrong.push(format!("the clock of rank {rank} ({}) jumped by {jump:+.1} s during this check", hosts[rank]));
            said.push(&hosts[rank]);
        }
        let late = median(own.iter().zip(&times[0]).map(|(own, first)| own.day_s - first.day_s));
        apart = apart.max(late.abs());
        if late.abs() > CLOCKS_APART_S && is_new {
            wrong.push(format!(
                "the clock of rank {rank} ({}) is {late:+.1} s from that of rank 0 ({})",
                hosts[rank], hosts[0]
            ));
            said.push(&hosts[rank]);
        }
    }
    if wrong.is_empty() {
        let apart = if times.len() > 1 { format!("ranks within {:.1} ms; ", 1e3 * apart) } else { String::new() };
        return Check::ok(name, format!("{apart}largest jump {:.1} ms", 1e3 * jumped));
    }
    Check::failed(name, format!("{}\nrun chrony or ntpd on every host", wrong.join("\n")))
}

/// A link between two ranks, as measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    pub from: usize,
    pub to: usize,
    pub bytes_s: f64,
}

/// The links of a kind, within a host or between hosts, and their median speed.
fn of_kind<'a>(all: &'a [Link], hosts: &[String], is_between: bool) -> (Vec<&'a Link>, f64) {
    let links: Vec<&Link> = all.iter().filter(|link| (hosts[link.from] != hosts[link.to]) == is_between).collect();
    let middle = median(links.iter().map(|link| link.bytes_s));
    (links, middle)
}

/// Whether a link is much slower than the others of its kind, whose median is `middle`.
fn is_slow(link: &Link, middle: f64) -> bool {
    link.bytes_s < OF_MEDIAN * middle
}

/// The links that are much slower than others of their kind.
pub fn slow_links(all: &[Link], hosts: &[String]) -> Vec<Link> {
    let slow = |is_between| {
        let (links, middle) = of_kind(all, hosts, is_between);
        links.into_iter().copied().filter(move |link| is_slow(link, middle))
    };
    [false, true].into_iter().flat_map(slow).collect()
}

/// Names links that are much slower than others of their kind.
pub fn links(all: &[Link], hosts: &[String]) -> Check {
    let name = "links";
    if all.is_empty() {
        return Check::skipped(name, "one rank");
    }
    let (mut wrong, mut text) = (Vec::new(), Vec::new());
    for (is_between, kind) in [(false, "within a host"), (true, "between hosts")] {
        let (links, middle) = of_kind(all, hosts, is_between);
        if links.is_empty() {
            continue;
        }
        let least = links.iter().map(|link| link.bytes_s).fold(f64::INFINITY, f64::min);
        text.push(format!("{} {kind}: {:.2} GB/s, the slowest {:.2}", links.len(), middle / GB, least / GB));
        for link in links.iter().filter(|link| is_slow(link, middle)) {
            let named = |rank: usize| format!("rank {rank} ({})", hosts[rank]);
            wrong.push(format!(
                "slow link: {} to {}: {:.2} GB/s, but the median {kind} is {:.2}",
                named(link.from),
                named(link.to),
                link.bytes_s / GB,
                middle / GB
            ));
        }
    }
    Check::of_faults(name, &wrong, || text.join("; "))
}

/// A measured collective over an axis, and what the plan assumes of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Collective {
    pub axis: &'static str,
    pub ranks: String,
    pub bytes_s: f64,
    /// None if the plan measures it, too.
    pub planned: Option<f64>,
    /// The first wrong value, described.
    pub wrong: Option<String>,
}

/// Compares the collectives of axes with the plan, of which they must reach `least`.
pub fn collectives(all: &[Collective], least: f64) -> Check {
    let name = "collectives";
    if all.is_empty() {
        return Check::skipped(name, "no axis of several ranks has sums");
    }
    let (mut wrong, mut text) = (Vec::new(), Vec::new());
    for Collective { axis, ranks, bytes_s, planned, wrong: value } in all {
        let rate = format!("{:.2} GB/s", bytes_s / GB);
        let plan = planned.map_or(String::new(), |planned| format!(" (plan: {:.2})", planned / GB));
        if let Some(value) = value {
            wrong.push(format!("the {axis} axis of {ranks} gives a wrong sum: {value}"));
        } else if planned.is_some_and(|planned| *bytes_s < least * planned) {
            wrong.push(format!("slow link: all-reduce over the {axis} axis of {ranks} reaches {rate}{plan}"));
        } else {
            text.push(format!("{axis}: all-reduce {rate}{plan}"));
        }
    }
    Check::of_faults(name, &wrong, || format!("right sums; {}", text.join("; ")))
}

/// Compares free space with what a job writes.
pub fn disk(dir: &Path, needed: u64, free: u64) -> Check {
    let (name, dir) = ("disk", dir.display());
    let [needs, has] = [needed, free].map(format_bytes);
    if needed > free {
        return Check::failed(
            name,
            format!("full disk: {dir} needs {needs} for checkpoints and export, but has {has} free"),
        );
    }
    Check::ok(name, format!("{has} free; checkpoints and export need {needs}"))
}

/// Writes `bytes` to a file in `dir`, as a checkpoint does, reads them back and removes the file. Returns bytes/s.
///
/// # Errors
/// `Io`, which names a full disk; `Fault` if other bytes come back.
pub fn write_speed(dir: &Path, rank: usize, bytes: usize) -> Result<f64> {
    let path = dir.join(format!("rank-{rank}.bin"));
    let made = || {
        let piece: Vec<u8> = (0..bytes.min(8 << 20)).map(|i| (i * 31 + rank) as u8).collect();
        let start = Instant::now();
        let mut file = LargeFile::create(&path)?;
        for first in (0..bytes).step_by(piece.len().max(1)) {
            file.write(&piece[..piece.len().min(bytes - first)])?;
        }
        file.finish()?;
        let seconds = start.elapsed().as_secs_f64();
        let back = files::read(&path).map_err(|e| Error::io("read", &path, &e))?;
        let differs = back.iter().enumerate().position(|(i, byte)| *byte != piece[i % piece.len()]);
        match differs {
            Some(at) => Err(Error::fault(format!("{}: byte {at} is not what was written", path.display()))),
            None => Ok(bytes as f64 / seconds.max(1e-9)),
        }
    };
    let written = made().map_err(named);
    let _ = std::fs::remove_file(&path);
    written
}

/// Names a full disk.
pub fn named(error: Error) -> Error {
    let is_full = ["No space left", "File too large", "quota exceeded"].iter().any(|text| error.message.contains(text));
    if is_full && error.kind == Kind::Io { error.within("full disk") } else { error }
}

/// Compares the speed of all ranks' writing with the size of a checkpoint.
pub fn storage(bytes_s: f64, checkpoint: u64) -> Check {
    let seconds = checkpoint as f64 / bytes_s.max(1.0);
    let text = format!(
        "{:.2} GB/s from all ranks, synced; a checkpoint of {} takes {seconds:.1} s",
        bytes_s / GB,
        format_bytes(checkpoint)
    );
    if seconds > CHECKPOINT_S {
        Check::failed("storage", format!("slow storage: {text}"))
    } else {
        Check::ok("storage", text)
    }
}

/// The nearest directory above `dir` that exists.
pub fn existing(dir: &Path) -> PathBuf {
    let there = dir.ancestors().find(|dir| dir.is_dir());
    there.filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_path_buf()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(names: &str) -> Vec<String> {
        names.split(' ').map(String::from).collect()
    }

    #[test]
    fn a_jumping_clock_and_a_late_one_are_named() {
        let hosts = hosts("n0 n1 n1 n2");
        let at = |day_s, steady_s| Time { day_s, steady_s };
        let steady = |shift: f64| vec![at(100.0 + shift, 5.0), at(101.0 + shift, 6.0), at(102.0 + shift, 7.0)];
        let mut times = vec![steady(0.0), steady(0.001), steady(0.001), steady(-0.002)];
        let check = clocks(&times, &hosts);
        assert!(!check.has_failed() && check.text.starts_with("ranks within 2.0 ms"), "{check:?}");
        for rank in [1, 2] {
            times[rank][2].day_s += 3600.0;
        }
        times[3] = steady(-7.0);
        let check = clocks(&times, &hosts);
        assert!(check.has_failed());
        let lines: Vec<&str> = check.text.lines().collect();
        assert_eq!(lines[0], "the clock of rank 1 (n1) jumped by +3600.0 s during this check");
        assert_eq!(lines[1], "the clock of rank 3 (n2) is -7.0 s from that of rank 0 (n0)");
        assert_eq!(lines.len(), 3, "a host's clock is named once");
    }

    #[test]
    fn a_slow_link_is_named_among_those_of_its_kind() {
        let hosts = hosts("n0 n0 n1 n1");
        let link = |from, to, gb_s: f64| Link { from, to, bytes_s: gb_s * GB };
        let mut all = vec![link(0, 1, 40.0), link(1, 2, 10.0), link(2, 3, 40.0), link(3, 0, 10.0), link(1, 0, 38.0)];
        assert!(!links(&all, &hosts).has_failed(), "links between hosts are slower than those within one");
        all[1].bytes_s = 0.4 * GB;
        all.push(link(2, 1, 9.0));
        let check = links(&all, &hosts);
        assert_eq!(
            check.text,
            "slow link: rank 1 (n0) to rank 2 (n1): 0.40 GB/s, but the median between hosts is 9.00"
        );
        let axis = |bytes_s: f64, wrong: Option<&str>| Collective {
            axis: "tensor",
            ranks: "ranks 0 to 1 (n0)".into(),
            bytes_s: bytes_s * GB,
            planned: Some(100.0 * GB),
            wrong: wrong.map(String::from),
        };
        assert!(!collectives(&[axis(50.0, None)], OF_PLAN_GPU).has_failed());
        let check = collectives(&[axis(20.0, None), axis(50.0, Some("element 7 is 3, not 5"))], OF_PLAN_GPU);
        let words = "slow link: all-reduce over the tensor axis of ranks 0 to 1 (n0) reaches 20.00 GB/s (plan: 100.00)";
        assert!(check.has_failed() && check.text.starts_with(words), "{check:?}");
        assert!(check.text.contains("gives a wrong sum: element 7 is 3, not 5"), "{check:?}");
    }

    #[test]
    fn a_full_disk_and_slow_storage_are_named() {
        assert!(disk(Path::new("runs"), 5 << 30, 1 << 30).text.starts_with("full disk: runs needs 5.0 GiB"));
        assert!(!disk(Path::new("runs"), 1 << 30, 5 << 30).has_failed());
        assert!(storage(1e6, 5 << 30).text.starts_with("slow storage: 0.00 GB/s"));
        assert!(!storage(2e9, 5 << 30).has_failed());
        let full = std::io::Error::from_raw_os_error(libc::ENOSPC);
        let error = named(Error::io("write", "runs/a", &full));
        assert!(error.message.starts_with("full disk: cannot write runs/a: No space left"), "{error}");
    }

    #[test]
    fn written_bytes_are_read_back_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        assert!(write_speed(dir.path(), 3, 100_000).unwrap() > 0.0);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
