//! Column charts over steps: the times of the phases, and the scores of the samples.

use super::numbers::{short, spread};
use super::plot::{FRAME, range};
use super::source::Source;
use super::text::{escape, put};
use crate::metrics::recorded::RecordedStep;
use crate::metrics::{Line, Phase, keys, number, percent};

/// The maximum number of columns in a chart; in a longer run a column covers several steps.
const COLUMNS_MAX: usize = 60;

/// Seconds of each phase, and of the remaining time, in the steps of one column.
struct Column {
    steps: (u64, u64),
    seconds: Vec<f64>,
}

/// The names of the phases, and of the remaining time.
fn phase_names() -> impl Iterator<Item = &'static str> {
    Phase::ALL.into_iter().map(Phase::name).chain(["other"])
}

/// Seconds of each phase of a line, and of the rest of its step.
fn seconds(line: &Line) -> Option<Vec<f64>> {
    let step = line.get(keys::TIME_STEP_S).filter(|step| step.is_finite())?;
    let mut all: Vec<f64> = Phase::ALL.into_iter().map(|phase| line.get(phase.key()).unwrap_or(0.0).max(0.0)).collect();
    all.push((step - all.iter().sum::<f64>()).max(0.0));
    Some(all)
}

fn mean<'a>(rows: impl ExactSizeIterator<Item = &'a Vec<f64>>) -> Vec<f64> {
    let n = rows.len() as f64;
    let mut sum = vec![0.0; Phase::ALL.len() + 1];
    rows.for_each(|row| sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x / n));
    sum
}

/// The time of a run's steps by phase, as stacked columns and a table; none for a run without times.
pub fn phases(source: &Source, title: &str) -> Option<String> {
    let timed: Vec<(u64, Vec<f64>)> =
        source.lines.iter().filter_map(|line| Some((line.step, seconds(line)?))).collect();
    let rows: Vec<&Vec<f64>> = timed.iter().map(|(_, row)| row).collect();
    let all = mean(rows.into_iter());
    let columns = timed.len().clamp(1, COLUMNS_MAX);
    let column = |i: usize| {
        let part = &timed[i * timed.len() / columns..(i + 1) * timed.len() / columns];
        let steps = (part.first()?.0, part.last()?.0);
        Some(Column { steps, seconds: mean(part.iter().map(|(_, row)| row).collect::<Vec<_>>().into_iter()) })
    };
    let columns: Vec<Column> = (0..columns).filter_map(column).collect();
    let (first, last) = (columns.first()?, columns.last()?);
    let (xs, width) = axis(first.steps.0, last.steps.1, columns.len());
    let ys = (0.0, range(columns.iter().map(|column| column.seconds.iter().sum())).1);
    let mut out = figure(title, "time of a step by phase").replacen("plot", "plot tall", 1);
    FRAME.axes(&mut out, xs, ys, "s per step");
    for (i, column) in columns.iter().enumerate() {
        let whole: f64 = column.seconds.iter().sum();
        let mut below = 0.0;
        for (phase, (name, seconds)) in phase_names().zip(&column.seconds).enumerate() {
            if *seconds > 0.0 {
                let (y, top) = (FRAME.y(ys, below), FRAME.y(ys, below + seconds));
                let words =
                    format!("{}: {name} {} s, {}", named(column.steps), number(*seconds), percent(seconds / whole));
                rect(&mut out, &format!("p{phase}"), (FRAME.left + i as f64 * width, top), (width, y - top), &words);
            }
            below += seconds;
        }
    }
    out += "</svg>";
    out += &table(&all);
    out += "</figure>\n";
    Some(out)
}

fn table(seconds: &[f64]) -> String {
    let whole: f64 = seconds.iter().sum();
    let mut out = String::from("<table class=\"key\"><tr><th>phase</th><th>s per step</th><th>share</th></tr>");
    for (phase, (name, seconds)) in phase_names().zip(seconds).enumerate().filter(|(_, (_, seconds))| **seconds > 0.0) {
        let (share, seconds) = (percent(seconds / whole), number(*seconds));
        put!(out, "<tr><td><i class=\"p{phase}\"></i>{name}</td><td>{seconds}</td><td>{share}</td></tr>");
    }
    out + "</table>"
}

/// A histogram of the scores of all samples, for each recorded step.
pub fn histogram(title: &str, between: (f64, f64), steps: &[(u64, Vec<f32>)]) -> Option<String> {
    let (first, last) = (steps.first()?.0, steps.last()?.0);
    let (xs, width) = axis(first, last, steps.len());
    let (low, high) = if between.0 < between.1 { between } else { (between.0 - 0.5, between.1 + 0.5) };
    let height = (high - low) / f64::from(BINS);
    let ys = (low, high);
    let mut out = figure(title, "scores of the samples by step");
    FRAME.axes(&mut out, xs, ys, "score");
    for (i, (step, scores)) in steps.iter().enumerate() {
        let mut counts = [0usize; BINS as usize];
        for score in scores {
            let bin = (f64::from(*score) - low) / height;
            counts[(bin.max(0.0) as usize).min(BINS as usize - 1)] += 1;
        }
        for (bin, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let (from, to) = (low + bin as f64 * height, low + (bin + 1) as f64 * height);
            let (top, bottom) = (FRAME.y(ys, to), FRAME.y(ys, from));
            let share = *count as f64 / scores.len() as f64;
            let class = format!("h{}", (share * 9.0).ceil() as usize);
            let words = format!(
                "step {step}: score {} to {}: {} of {}",
                number(from),
                number(to),
                percent(share),
                scores.len()
            );
            rect(&mut out, &class, (FRAME.left + i as f64 * width, top), (width, bottom - top), &words);
        }
    }
    put!(out, "</svg><p class=\"note\">{} recorded steps. Darker means more samples.</p></figure>", steps.len());
    Some(out)
}

/// The number of score ranges.
const BINS: u32 = 20;

/// The scores of some recorded steps, including the first and the last.
pub fn scores(source: &mut Source) -> Vec<(u64, Vec<f32>)> {
    let chosen: Vec<u64> = spread(source.recorded.len(), COLUMNS_MAX).into_iter().map(|i| source.recorded[i]).collect();
    let read = |step| Some((step, source.try_read(RecordedStep::for_step(&source.dir, step).scores())?));
    chosen.into_iter().filter_map(read).collect()
}

/// The axis of steps below equal columns, and their width.
fn axis(first: u64, last: u64, columns: usize) -> ((f64, f64), f64) {
    let half = (last - first).max(1) as f64 / columns.max(2) as f64 / 2.0;
    ((first as f64 - half, last as f64 + half), (FRAME.right - FRAME.left) / columns as f64)
}

fn figure(title: &str, label: &str) -> String {
    let (width, height) = (FRAME.width, FRAME.height);
    format!(
        "<figure class=\"plot\"><figcaption><b>{}</b></figcaption>\n<svg class=\"columns\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{label}\">\n",
        escape(title)
    )
}

fn named((first, last): (u64, u64)) -> String {
    if first == last { format!("step {first}") } else { format!("steps {first} to {last}") }
}

fn rect(out: &mut String, class: &str, (x, y): (f64, f64), (width, height): (f64, f64), words: &str) {
    let gap = if width > 3.0 { 0.6 } else { 0.0 };
    let [x, y, width, height] = [x, y, width - gap, height.max(0.3)].map(|number| short(number, 5));
    put!(
        out,
        "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"><title>{words}</title></rect>"
    );
}
