//! Curves over steps, as SVG.

use super::super::samples::short_number;
use super::numbers::{scale, short, thin, tick_label, ticks, unit_of};
use super::text::{escape, put};
use crate::metrics::keys;

/// One curve of a plot.
pub struct Curve {
    /// The name in the legend and under the pointer.
    pub name: String,
    /// The index of its color: that of the run, or of the key if there is only one run.
    pub colour: usize,
    /// 0 solid, 1 dashed, 2 dotted.
    pub dash: usize,
    /// Step and value; a gap where the value is not finite.
    pub points: Vec<(f64, f64)>,
    /// Half the height of the band at each point, if there is a band.
    pub band: Vec<f64>,
}

/// A step, and the run that was restarted there.
pub type Mark = (u64, usize);

pub struct Plot<'a> {
    pub title: &'a str,
    /// The key whose unit the axis shows.
    pub key: &'a str,
    pub curves: Vec<Curve>,
    pub marks: &'a [Mark],
    /// The first and the last step of the axis.
    pub steps: (f64, f64),
    /// Whether this is a small plot.
    pub is_small: bool,
}

/// The position of a plot in its figure.
pub struct Frame {
    pub width: f64,
    pub height: f64,
    pub left: f64,
    pub right: f64,
    pub top: f64,
    pub bottom: f64,
}

/// The frame of the plots of a section.
pub const FRAME: Frame = Frame { width: 400.0, height: 210.0, left: 46.0, right: 390.0, top: 18.0, bottom: 178.0 };
const SMALL: Frame = Frame { width: 300.0, height: 150.0, left: 46.0, right: 292.0, top: 10.0, bottom: 118.0 };

/// The largest number of points that are marked with dots.
const DOTS_MAX: usize = 25;

impl Frame {
    pub fn x(&self, (low, high): (f64, f64), x: f64) -> f64 {
        self.left + (x - low) / (high - low) * (self.right - self.left)
    }

    pub fn y(&self, (low, high): (f64, f64), y: f64) -> f64 {
        self.bottom - (y - low) / (high - low) * (self.bottom - self.top)
    }

    /// Writes the grid, the numbers and the names of both axes.
    pub fn axes(&self, out: &mut String, xs: (f64, f64), ys: (f64, f64), unit: &str) {
        let Self { width, height, left, right, top, bottom } = self;
        let (marks, step) = ticks(ys.0, ys.1, 4);
        let mut lines = String::new();
        for mark in marks {
            let y = short(self.y(ys, mark), 5);
            put!(lines, "M{left} {y}H{right}");
            put!(
                out,
                "<text class=\"tick end\" x=\"{}\" y=\"{y}\" dy=\".32em\">{}</text>",
                left - 6.0,
                tick_label(mark, step)
            );
        }
        put!(out, "<path class=\"grid\" d=\"{lines}\"/>");
        let (marks, step) = ticks(xs.0, xs.1, if *width > 350.0 { 6 } else { 5 });
        for mark in marks.into_iter().filter(|mark| mark.fract() == 0.0) {
            let x = short(self.x(xs, mark), 5);
            put!(
                out,
                "<text class=\"tick mid\" x=\"{x}\" y=\"{}\">{}</text>",
                bottom + 14.0,
                tick_label(mark, step.max(1.0))
            );
        }
        put!(out, "<text class=\"name end\" x=\"{right}\" y=\"{}\">step</text>", height - 3.0);
        if !unit.is_empty() {
            put!(out, "<text class=\"name\" x=\"0\" y=\"{}\">{}</text>", top - 12.0, escape(unit));
        }
    }

    /// The transform from values to positions.
    fn transform(&self, xs: (f64, f64), ys: (f64, f64)) -> String {
        let (sx, sy) = ((self.right - self.left) / (xs.1 - xs.0), (self.top - self.bottom) / (ys.1 - ys.0));
        let [a, d, e, f] = [sx, sy, self.left - sx * xs.0, self.bottom - sy * ys.0].map(|x| format!("{x:e}"));
        format!("matrix({a} 0 0 {d} {e} {f})")
    }
}

/// The range from the least to the greatest number with a margin; it includes 0 if that is near.
pub fn range(numbers: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let finite = numbers.filter(|x| x.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    if low > high {
        return (0.0, 1.0);
    }
    if low == high {
        return if low == 0.0 { (-1.0, 1.0) } else { (low - low.abs() * 0.5, low + low.abs() * 0.5) };
    }
    let air = (high - low) * 0.06;
    let from = if low >= 0.0 && low <= 0.5 * high { 0.0 } else { low - air };
    (from, if high <= 0.0 && high >= 0.5 * low { 0.0 } else { high + air })
}

impl Plot<'_> {
    /// The figure, with at most `points_max` points for each curve; none if no curve has a value.
    pub fn html(&self, points_max: usize) -> Option<String> {
        let all = || self.curves.iter().flat_map(|curve| &curve.points);
        let last = self.curves.iter().find_map(|curve| curve.points.iter().rev().find(|(_, y)| y.is_finite()))?.1;
        let most = all().map(|(_, y)| y.abs()).filter(|y| y.is_finite()).fold(0.0, f64::max);
        let (factor, unit) = scale(unit_of(self.key), most);
        let reach = |curve: &Curve| {
            let of = |(i, (_, y)): (usize, &(f64, f64))| {
                let band = curve.band.get(i).copied().unwrap_or(0.0);
                [(y - band) * factor, (y + band) * factor]
            };
            curve.points.iter().enumerate().flat_map(of).collect::<Vec<f64>>()
        };
        let reached: Vec<f64> = self.curves.iter().flat_map(reach).collect();
        let (xs, ys) = (self.steps, range(reached.iter().copied()));
        let frame = if self.is_small { &SMALL } else { &FRAME };
        let mut out = String::from("<figure class=\"plot\"><figcaption");
        if let Some(key) = keys::find(self.key) {
            put!(out, " title=\"{}\"", escape(key.meaning));
        }
        let is_one = self.curves.len() == 1;
        let now = if is_one {
            let last = last * factor;
            let last = if last.abs() < 1e4 { short_number(last) } else { tick_label(last, 1.0) };
            format!("<span class=\"now\">{last} {unit}</span>")
        } else {
            String::new()
        };
        put!(out, "><b>{}</b>{now}{}</figcaption>", escape(self.title), self.legend());
        let (width, height, label) = (frame.width, frame.height, escape(self.title));
        put!(
            out,
            "<svg class=\"chart\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{label} by step\" data-unit=\"{unit}\">"
        );
        frame.axes(&mut out, xs, ys, if self.is_small { "" } else { unit });
        for (step, run) in self.marks.iter().filter(|(step, _)| xs.0 <= *step as f64 && *step as f64 <= xs.1) {
            let x = short(frame.x(xs, *step as f64), 5);
            let (top, bottom) = (frame.top, frame.bottom);
            put!(
                out,
                "<path class=\"mark r{run}\" d=\"M{x} {top}V{bottom}\"><title>restarted at step {step}</title></path>"
            );
        }
        put!(out, "<g transform=\"{}\">", frame.transform(xs, ys));
        for curve in &self.curves {
            curve.draw(&mut out, factor, points_max);
        }
        out += "</g></svg></figure>\n";
        Some(out)
    }

    /// The legend of several keys' lines.
    fn legend(&self) -> String {
        let mut lines: Vec<&Curve> = Vec::new();
        for curve in &self.curves {
            if lines.iter().all(|known| known.dash != curve.dash) {
                lines.push(curve);
            }
        }
        if lines.len() < 2 {
            return String::new();
        }
        let of = |curve: &&Curve| {
            let name = curve.name.rsplit(" · ").next().unwrap_or(&curve.name);
            format!("<span>{}{}</span>", swatch(curve.colour, curve.dash), escape(name))
        };
        format!("<span class=\"dash\">{}</span>", lines.iter().map(of).collect::<Vec<_>>().concat())
    }
}

/// A piece of a curve, for a legend.
pub fn swatch(colour: usize, dash: usize) -> String {
    format!("<svg viewBox=\"0 0 22 6\"><path class=\"curve r{colour} d{dash}\" d=\"M0 3H22\"/></svg>")
}

impl Curve {
    fn draw(&self, out: &mut String, factor: f64, points_max: usize) {
        let scaled: Vec<(f64, f64)> = self.points.iter().map(|(x, y)| (*x, y * factor)).collect();
        if self.band.len() == scaled.len() && !self.band.is_empty() {
            let edge = |sign: f64| {
                let points = scaled.iter().zip(&self.band).map(|((x, y), band)| (*x, y + sign * band * factor));
                thin(&points.filter(|(_, y)| y.is_finite()).collect::<Vec<_>>(), points_max / 4)
            };
            let upper = edge(1.0).into_iter().chain(edge(-1.0).into_iter().rev());
            put!(out, "<path class=\"band r{}\" d=\"{}Z\"/>", self.colour, path(&upper.collect::<Vec<_>>()));
        }
        let thinned = thin(&scaled, points_max);
        let (colour, dash, name, line) = (self.colour, self.dash, escape(&self.name), path(&thinned));
        put!(out, "<path class=\"curve r{colour} d{dash}\" data-name=\"{name}\" d=\"{line}\"/>");
        if thinned.len() <= DOTS_MAX {
            let dots = thinned.iter().filter(|(_, y)| y.is_finite());
            let dots = dots.map(|(x, y)| format!("M{} {}h0", short(*x, 9), short(*y, 5)));
            let dots = dots.collect::<Vec<_>>().concat();
            put!(out, "<path class=\"dots r{colour}\" d=\"{dots}\"/>");
        }
    }
}

/// A line through points, with gaps at non-finite values; a single point is a line of length 0.
fn path(points: &[(f64, f64)]) -> String {
    let parts = points.split(|(_, y)| !y.is_finite()).filter(|part| !part.is_empty());
    let mut out = String::new();
    for part in parts {
        for (i, (x, y)) in part.iter().enumerate() {
            let (x, y) = (short(*x, 9), short(*y, 5));
            let before = if i == 0 {
                "M"
            } else if i == 1 {
                "L"
            } else {
                " "
            };
            out += &[before, &x, " ", &y].concat();
        }
        if part.len() == 1 {
            out += "h0";
        }
    }
    out
}
