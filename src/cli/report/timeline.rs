//! The timeline of a traced step: a row for each rank, the critical path, and tables of waits.

use super::numbers::{short, tick_label, ticks};
use super::plot::Frame;
use super::text::{escape, put};
use super::waits::{RankWaits, StepWaits, overlap};
use crate::metrics::{Phase, duration, percent};

/// The ranks that a timeline shows, and those of the table of who waits for whom.
const RANKS_MAX: usize = 32;
const TABLE_MAX: usize = 16;
/// The columns of a row. Each shows the shares of its time.
const COLUMNS: u64 = 500;
/// The heights of a row, of its bar and of the line of the path below it.
const ROW: f64 = 34.0;
const BAR: f64 = 22.0;
const PATH_AT: f64 = 27.0;

/// The class of the color of a phase.
fn class(name: &str) -> &'static str {
    let known = Phase::ALL.into_iter().position(|phase| phase.name() == name);
    let others = ["p7", "p8", "p6"];
    let other = ["evaluation", "checkpoint"].iter().position(|other| *other == name).unwrap_or(2);
    known.map_or(others[other], |phase| ["p0", "p1", "p2", "p3", "p4", "p5"][phase])
}

/// A time with its unit.
fn seconds(ns: u64) -> String {
    let s = ns as f64 * 1e-9;
    match ns {
        0..1_000_000 => format!("{:.3} ms", 1e3 * s),
        1_000_000..1_000_000_000 => format!("{:.1} ms", 1e3 * s),
        _ => format!("{s:.2} s"),
    }
}

fn share(ns: u64, of: u64) -> String {
    percent(ns as f64 / of.max(1) as f64)
}

/// The ranks that are shown: all, or those with the most time on the path and then the most waits.
fn shown(step: &StepWaits) -> Vec<usize> {
    let mut ranks: Vec<usize> = (0..step.ranks.len()).collect();
    ranks.sort_by_key(|&rank| std::cmp::Reverse((step.path_of(rank), step.ranks[rank].waits())));
    ranks.truncate(RANKS_MAX);
    ranks.sort_unstable();
    ranks
}

/// The figure of a step.
pub fn html(step: &StepWaits, title: &str) -> String {
    let ranks = shown(step);
    let height = 8.0 + ROW * ranks.len() as f64 + 26.0;
    let frame = Frame { width: 1160.0, height, left: 64.0, right: 1150.0, top: 8.0, bottom: height - 26.0 };
    let label = escape(title);
    let mut out = format!(
        "<figure class=\"wide\"><figcaption><b>{label}</b><span class=\"now\">{}</span>{}</figcaption>\n\
         <svg class=\"columns timeline\" viewBox=\"0 0 {} {height}\" role=\"img\" aria-label=\"{label}\">\n",
        seconds(step.length),
        legend(step, &ranks),
        frame.width
    );
    axis(&mut out, &frame, step.length);
    for (row, &rank) in ranks.iter().enumerate() {
        let top = frame.top + row as f64 * ROW;
        put!(out, "<text class=\"tick end\" x=\"56\" y=\"{}\" dy=\".32em\">rank {rank}</text>", top + BAR / 2.0);
        bar(&mut out, &frame, top, step, rank);
    }
    path(&mut out, &frame, step, &ranks);
    out += "</svg>";
    if ranks.len() < step.ranks.len() {
        put!(
            out,
            "<p class=\"note\">{} of {} ranks: those with the most time on the critical path.</p>",
            ranks.len(),
            step.ranks.len()
        );
    }
    put!(out, "<div class=\"tables\">{}{}{}</div></figure>", path_table(step), ranks_table(step, &ranks), matrix(step));
    out
}

fn legend(step: &StepWaits, ranks: &[usize]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in ranks.iter().flat_map(|&rank| &step.ranks[rank].phases) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let phases =
        names.into_iter().map(|name| format!("<span><i class=\"{}\"></i>{}</span>", class(name), escape(name)));
    let others = [("p6", "outside of phases"), ("sent", "transfer"), ("idle", "wait"), ("path", "critical path")];
    let others = others.map(|(class, name)| format!("<span><i class=\"{class}\"></i>{name}</span>"));
    format!("<span class=\"dash phases\">{}</span>", phases.chain(others).collect::<Vec<_>>().concat())
}

fn axis(out: &mut String, frame: &Frame, length: u64) {
    let (unit, factor) = if length >= 2_000_000_000 { ("s", 1e-9) } else { ("ms", 1e-6) };
    let most = (length as f64 * factor).max(1e-6);
    let (marks, step) = ticks(0.0, most, 10);
    let mut lines = String::new();
    for mark in marks {
        let x = short(frame.x((0.0, most), mark), 5);
        put!(lines, "M{x} {}V{}", frame.top, frame.bottom);
        let label = tick_label(mark, step);
        put!(out, "<text class=\"tick mid\" x=\"{x}\" y=\"{}\">{label}</text>", frame.bottom + 15.0);
    }
    put!(out, "<path class=\"grid\" d=\"{lines}\"/>");
    put!(out, "<text class=\"name end\" x=\"56\" y=\"{}\">{unit}</text>", frame.bottom + 15.0);
}

/// The bar of a rank. In each column, the height of the color is the share of time in which it computes, and transfers
/// are above.
fn bar(out: &mut String, frame: &Frame, top: f64, step: &StepWaits, rank: usize) {
    let RankWaits { phases, pauses, .. } = &step.ranks[rank];
    let at = |column: u64| (u128::from(step.length) * u128::from(column) / u128::from(COLUMNS)) as u64;
    let x = |ns: u64| frame.x((0.0, step.length.max(1) as f64), ns as f64);
    // (class, first column, end, top, height) of rectangles, which grow while their neighbors look the same.
    let mut open: Vec<(&'static str, u64, u64, u32, u32)> = Vec::new();
    let mut done = Vec::new();
    for column in 0..COLUMNS {
        let time = at(column)..at(column + 1);
        let of = |range: &std::ops::Range<u64>| overlap(range, &time) as f64 / (time.end - time.start).max(1) as f64;
        let first = pauses.partition_point(|pause| pause.end <= time.start);
        let here = pauses[first..].iter().take_while(|pause| pause.start < time.end);
        let (waits, sends) = here.fold((0.0, 0.0), |(waits, sends), pause| {
            (waits + of(&(pause.start..pause.ready)), sends + of(&(pause.ready..pause.end)))
        });
        let phase = phases.iter().max_by(|a, b| of(&a.1).total_cmp(&of(&b.1))).filter(|(_, range)| of(range) > 0.0);
        let colour = phase.map_or("p6", |(name, _)| class(name));
        let level = |share: f64| (share * BAR).round() as u32;
        let (computes, sends) = (level((1.0f64 - waits - sends).max(0.0)), level(sends));
        let mut next = Vec::new();
        for (class, bottom, height) in [(colour, 0, computes), ("sent", computes, sends)] {
            let same = |old: &&mut (&'static str, u64, u64, u32, u32)| {
                old.2 == column && (old.0, old.3, old.4) == (class, bottom, height)
            };
            if height == 0 {
                continue;
            }
            match open.iter_mut().find(same) {
                Some(old) => old.2 = column + 1,
                None => next.push((class, column, column + 1, bottom, height)),
            }
        }
        done.extend(open.extract_if(.., |old| old.2 <= column));
        open.append(&mut next);
    }
    done.append(&mut open);
    put!(
        out,
        "<rect class=\"idle\" x=\"{}\" y=\"{top}\" width=\"{}\" height=\"{BAR}\"/>",
        frame.left,
        frame.right - frame.left
    );
    for (class, from, to, bottom, height) in done {
        let (left, right) = (x(at(from)), x(at(to)));
        let [left, width, y] =
            [left, right - left, top + BAR - f64::from(bottom + height)].map(|number| short(number, 6));
        put!(out, "<rect class=\"{class}\" x=\"{left}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>");
    }
    let whole = ("outside of phases".to_string(), 0..step.length);
    for (name, range) in std::iter::once(&whole).chain(phases) {
        let (left, width) = (short(x(range.start), 6), short((x(range.end) - x(range.start)).max(0.3), 6));
        let (mut waits, mut sends) = (0, 0);
        for pause in pauses {
            waits += overlap(range, &(pause.start..pause.ready));
            sends += overlap(range, &(pause.ready..pause.end));
        }
        let length = range.end - range.start;
        let words = if range == &whole.1 { "whole step" } else { name };
        put!(
            out,
            "<rect class=\"over\" x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{BAR}\"><title>rank {rank}: {} {}: computes {}, transfers {}, waits {}</title></rect>",
            escape(words),
            seconds(length),
            share(length.saturating_sub(waits + sends), length),
            share(sends, length),
            share(waits, length)
        );
    }
}

/// The critical path: a line below the bars of its ranks.
fn path(out: &mut String, frame: &Frame, step: &StepWaits, ranks: &[usize]) {
    let x = |ns: u64| short(frame.x((0.0, step.length.max(1) as f64), ns as f64), 6);
    let y =
        |rank: usize| ranks.iter().position(|shown| *shown == rank).map(|row| frame.top + row as f64 * ROW + PATH_AT);
    let mut line = String::new();
    for part in &step.path {
        let Some(y) = y(part.rank) else { continue };
        let from = if line.is_empty() { "M" } else { "L" };
        put!(line, "{from}{} {y}H{}", x(part.time.start), x(part.time.end));
    }
    put!(out, "<path class=\"path\" d=\"{line}\"/>");
    for part in &step.path {
        let (Some(y), length) = (y(part.rank), part.time.end - part.time.start) else { continue };
        let until = part.until.as_ref().map_or(String::new(), |name| format!(", then others leave {name}"));
        let width = short((frame.right - frame.left) * length as f64 / step.length.max(1) as f64, 6);
        put!(
            out,
            "<rect class=\"over\" x=\"{}\" y=\"{}\" width=\"{width}\" height=\"8\"><title>critical path: rank {} for {}{}</title></rect>",
            x(part.time.start),
            y - 4.0,
            part.rank,
            seconds(length),
            escape(&until)
        );
    }
}

fn path_table(step: &StepWaits) -> String {
    let mut out = String::from(
        "<table class=\"key\"><tr><th>critical path</th><th>time</th><th>share</th><th>transfers, waits</th></tr>",
    );
    for (name, ns, paused) in step.path_phases() {
        let (colour, name) = (class(&name), escape(&name));
        let (time, part, paused) = (seconds(ns), share(ns, step.length), share(paused, ns));
        put!(out, "<tr><td><i class=\"{colour}\"></i>{name}</td><td>{time}</td><td>{part}</td><td>{paused}</td></tr>");
    }
    out + "</table>"
}

fn ranks_table(step: &StepWaits, ranks: &[usize]) -> String {
    let mut out = String::from(
        "<table class=\"key\"><tr><th>rank</th><th>computes</th><th>transfers</th><th>waits for ranks</th>\
         <th>other waits</th><th>waits most for</th><th>on the path</th></tr>",
    );
    for &rank in ranks {
        let waits = &step.ranks[rank];
        let idle = waits.waits() + waits.elsewhere;
        let most = waits.on.iter().max_by_key(|(_, ns)| **ns).map_or(String::new(), |(on, _)| format!("rank {on}"));
        let computes = step.length.saturating_sub(idle + waits.transfers);
        put!(out, "<tr><td title=\"{}\">rank {rank}</td>", escape(&waits.name));
        let cells = [computes, waits.transfers, waits.waits(), waits.elsewhere].map(|ns| share(ns, step.length));
        put!(out, "{}", cells.map(|cell| format!("<td>{cell}</td>")).concat());
        put!(out, "<td>{most}</td><td>{}</td></tr>", share(step.path_of(rank), step.length));
    }
    out + "</table>"
}

/// The table of who waits for whom, if there are several ranks and not too many.
fn matrix(step: &StepWaits) -> String {
    let count = step.ranks.len();
    if !(2..=TABLE_MAX).contains(&count) {
        return String::new();
    }
    let mut out = String::from("<table class=\"key\"><tr><th>who waits for whom</th>");
    (0..count).for_each(|rank| put!(out, "<th>rank {rank}</th>"));
    out += "</tr>";
    for (rank, waits) in step.ranks.iter().enumerate() {
        put!(out, "<tr><td>rank {rank}</td>");
        for on in 0..count {
            let cell = waits.on.get(&on).map_or(String::new(), |ns| seconds(*ns));
            put!(out, "<td>{cell}</td>");
        }
        out += "</tr>";
    }
    out + "</table>"
}

/// A line about a step for the terminal.
pub fn line(step: &StepWaits) -> String {
    let StepWaits { step: number, length, ranks, .. } = step;
    let phases = step.path_phases();
    let path =
        phases.iter().map(|(name, ns, _)| format!("{name} {}", share(*ns, *length))).collect::<Vec<_>>().join(", ");
    let idle = ranks.iter().map(|waits| waits.waits() + waits.elsewhere);
    let most = idle.enumerate().max_by_key(|(_, idle)| *idle);
    let most = most.map_or(String::new(), |(rank, idle)| format!("; rank {rank} waits most, {}", share(idle, *length)));
    format!(
        "traced step {number}: {}, {} ranks; critical path: {path}{most}",
        duration(*length as f64 * 1e-9),
        ranks.len()
    )
}
