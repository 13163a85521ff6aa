//! How a number went over a run, in as little memory as a screen needs to show it.

use super::display::sparkline;
use super::keys;
use super::line::Line;

/// Points that a course keeps; one more makes one of each two neighbours.
pub const POINTS_MAX: usize = 512;

/// A number whose course the terminal shows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trend {
    pub key: &'static str,
    pub label: &'static str,
}

impl Trend {
    pub fn is_eval(&self) -> bool {
        keys::is_eval(self.key)
    }
}

pub(super) const TRENDS: [Trend; 8] = [
    Trend { key: keys::REWARD_MEAN, label: "reward" },
    Trend { key: keys::KL_MEAN, label: "kl" },
    Trend { key: keys::ENTROPY, label: "entropy" },
    Trend { key: keys::LOSS, label: "loss" },
    Trend { key: keys::EVAL_LOSS, label: "held-out loss" },
    Trend { key: keys::EVAL_ACCURACY, label: "held-out accuracy" },
    Trend { key: keys::EVAL_ACCURACY_GREEDY, label: "held-out greedy" },
    Trend { key: keys::EVAL_ACCURACY_SAMPLED, label: "held-out sampled" },
];

/// The values of one key: the first and the last as they were, and between them means over equally many.
#[derive(Clone, Debug, Default)]
pub struct Course {
    /// First and last value.
    ends: Option<(f64, f64)>,
    count: u64,
    points: Vec<Point>,
    /// Doublings so far: a point stands for `1 << doublings` values, the last perhaps for fewer.
    doublings: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Point {
    /// Of the finite values.
    sum: f64,
    finite: u64,
    count: u64,
}

impl Course {
    pub fn push(&mut self, value: f64) {
        self.ends = Some((self.ends.map_or(value, |(first, _)| first), value));
        self.count += 1;
        if self.points.last().is_none_or(|point| point.count >> self.doublings > 0) {
            if self.points.len() == POINTS_MAX {
                self.halve();
            }
            self.points.push(Point::default());
        }
        let point = self.points.last_mut().expect("one was pushed");
        point.count += 1;
        if value.is_finite() {
            point.finite += 1;
            point.sum += value;
        }
    }

    fn halve(&mut self) {
        let merged = |two: &[Point]| Point {
            sum: two.iter().map(|point| point.sum).sum(),
            finite: two.iter().map(|point| point.finite).sum(),
            count: two.iter().map(|point| point.count).sum(),
        };
        self.points = self.points.chunks(2).map(merged).collect();
        self.doublings += 1;
    }

    /// How many values there were.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The first value and the last.
    pub fn ends(&self) -> Option<(f64, f64)> {
        self.ends
    }

    /// At most [`POINTS_MAX`] means in their order, over the finite values of each; NaN where there was none.
    pub fn points(&self) -> Vec<f64> {
        self.points.iter().map(|point| point.sum / point.finite as f64).collect()
    }

    /// In at most `columns` blocks.
    pub fn sparkline(&self, columns: usize) -> String {
        sparkline(&self.points(), columns)
    }
}

/// The course of each number that the terminal shows.
#[derive(Clone, Debug, Default)]
pub struct Courses([Course; TRENDS.len()]);

impl Courses {
    /// Adds what a line has of them.
    pub fn add(&mut self, line: &Line) {
        for (trend, course) in TRENDS.iter().zip(&mut self.0) {
            if let Some(value) = line.get(trend.key) {
                course.push(value);
            }
        }
    }

    /// In the order of the screen.
    pub(super) fn all(&self) -> impl Iterator<Item = (&'static Trend, &Course)> {
        TRENDS.iter().zip(&self.0)
    }
}

impl<'a> FromIterator<&'a Line> for Courses {
    fn from_iter<I: IntoIterator<Item = &'a Line>>(lines: I) -> Self {
        let mut courses = Self::default();
        lines.into_iter().for_each(|line| courses.add(line));
        courses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_course_keeps_its_ends_and_its_form_in_few_points() {
        let mut course = Course::default();
        let n = 100_000;
        for i in 0..n {
            course.push(if i % 7 == 0 { f64::NAN } else { f64::from(i) });
            assert!(course.points.len() <= POINTS_MAX);
        }
        assert_eq!(course.count(), n as u64);
        let (first, last) = course.ends().unwrap();
        assert!(first.is_nan() && last == 99_999.0);
        assert_eq!(course.sparkline(8), "▁▂▃▄▅▆▇█");
        let points = course.points();
        assert!(points.len() > POINTS_MAX / 4 && points.is_sorted(), "{} points", points.len());
        assert_eq!(course.points.iter().map(|point| point.count).sum::<u64>(), n as u64);
    }

    #[test]
    fn a_course_that_a_screen_can_show_is_kept_as_it_is() {
        let values: Vec<f64> = (0..POINTS_MAX).map(|i| (i as f64).sin()).collect();
        let mut course = Course::default();
        for value in &values {
            course.push(*value);
        }
        assert_eq!(course.points(), values);
        assert_eq!(course.sparkline(40), sparkline(&values, 40));
    }
}
