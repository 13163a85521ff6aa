//! Arithmetic questions with worked answers, and demonstrations that are wrong on purpose.
//!
//! Each question is worked in steps of one digit, so that a small model can learn it:
//!
//! | kind | prompt | worked answer | the systematic mistake |
//! |---|---|---|---|
//! | add | `47+38=` | `7+8=15 4+3+1=8 85` | forgets the carry: `7+8=15 4+3=7 75` |
//! | sub | `53-28=` | `13-8=5 5-2-1=2 25` | forgets the borrow: `13-8=5 5-2=3 35` |
//! | mul | `47*6=` | `7*6=42 4*6=24+4=28 282` | forgets the carry: `7*6=42 4*6=24 242` |
//! | max | `max(47,38)=` | `4>3 47` | compares the last digits: `7<8 38` |
//!
//! Where the mistake is possible, more demonstrations make it than do not, so a model that imitates them is wrong there
//! when it answers greedily, while the right answer keeps a good share of the probability for a reward to find.

use std::cmp::Ordering;
use std::collections::HashSet;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::rng::{Purpose, Rng};

/// The last word of the counter tells the random numbers apart.
const DRAW_HELD_OUT: u32 = 1;
const DRAW_QUESTION: u32 = 2;
const DRAW_NOISE: u32 = 3;
const DRAW_EASY: u32 = 4;
/// Attempts for one question before the generator gives up.
const ATTEMPTS_MAX: u32 = 10_000;
/// Share of the questions without room for the systematic mistake that are asked all the same; the others give way to
/// harder ones, so that a model that makes the mistake is wrong about half of the time.
const EASY_KEPT: f32 = 0.5;
/// Share of the mistakes that are systematic, where a systematic one is possible.
const SYSTEMATIC: f64 = 0.9;

#[derive(Clone, Debug, PartialEq)]
pub struct CorpusConfig {
    pub rows: usize,
    pub eval_rows: usize,
    pub seed: u64,
    /// Digits of the longest operand, 1 to 6.
    pub digits: u32,
    /// Share of the demonstrations with a mistake, among those where the systematic one is possible.
    pub noise: f64,
    /// Share of the operand pairs that only occur in eval questions.
    pub eval_ratio: f64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Question {
    pub prompt: String,
    /// The right working, ending with the answer.
    pub response: String,
    /// What sft imitates: the right working or one with a mistake.
    pub demonstration: String,
    pub answer: String,
    pub kind: Kind,
    pub split: &'static str,
    pub mistake: Mistake,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Add,
    Sub,
    Mul,
    Max,
}

/// What is wrong with a demonstration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mistake {
    None,
    /// The one of the table above.
    Systematic,
    /// The working is right, the answer below it is off.
    Slip,
}

/// The questions: `rows` for training, repeats among them, then `eval_rows` distinct ones for evaluation. No pair of
/// operands, in either order and of any kind, is in both. The same configuration gives the same rows.
pub fn corpus(config: &CorpusConfig) -> Result<Vec<Question>> {
    let (digits, ratio) = (config.digits, config.eval_ratio);
    let possible = (1..=6).contains(&digits) && (0.0..=1.0).contains(&config.noise) && ratio > 0.0 && ratio < 1.0;
    if !possible {
        return Err(Error::usage(format!(
            "the corpus needs 1 to 6 digits, noise of 0 to 1 and an eval ratio between 0 and 1, got {digits}, {} and {ratio}",
            config.noise
        )));
    }
    if config.rows == 0 {
        return Err(Error::usage("a corpus of 0 rows"));
    }
    let rng = Rng::new(config.seed, Purpose::Corpus);
    let mut rows = Vec::new();
    for i in 0..config.rows {
        let problem = find(rng, config, i, |p| !p.held_out(rng, ratio))?;
        rows.push(problem.question(rng, config.noise, i, "train"));
    }
    let mut asked = HashSet::new();
    for i in config.rows..config.rows + config.eval_rows {
        let problem = find(rng, config, i, |p| p.held_out(rng, ratio) && !asked.contains(p))?;
        asked.insert(problem);
        rows.push(problem.question(rng, config.noise, i, "eval"));
    }
    Ok(rows)
}

fn find(rng: Rng, config: &CorpusConfig, i: usize, wanted: impl Fn(&Problem) -> bool) -> Result<Problem> {
    let asked = |attempt: u32| {
        let problem = Problem::random(rng, config.digits, i, attempt);
        let is_asked = problem.has_trap() || rng.uniform([i as u32, attempt, 0, DRAW_EASY]) < EASY_KEPT;
        is_asked.then_some(problem)
    };
    (0..ATTEMPTS_MAX).filter_map(asked).find(wanted).ok_or_else(|| {
        Error::usage(format!(
            "{} digits and an eval ratio of {} do not give {} training and {} distinct eval questions",
            config.digits, config.eval_ratio, config.rows, config.eval_rows
        ))
        .hint("ask for fewer eval rows or for more digits")
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Problem {
    a: u32,
    b: u32,
    kind: Kind,
}

impl Problem {
    fn random(rng: Rng, digits: u32, i: usize, attempt: u32) -> Self {
        let words = rng.words([i as u32, attempt, 0, DRAW_QUESTION]);
        let lengths = rng.words([i as u32, attempt, 1, DRAW_QUESTION]);
        let kind = match words[0] % 100 {
            0..35 => Kind::Add,
            35..70 => Kind::Sub,
            70..80 => Kind::Mul,
            _ => Kind::Max,
        };
        // Three in four operands have all the digits.
        let number = |word: u32, length: u32| {
            let length = if length.is_multiple_of(4) { 1 + (length / 4) % digits } else { digits };
            let low = if length == 1 { 0 } else { 10_u32.pow(length - 1) };
            low + word % (10_u32.pow(length) - low)
        };
        let (a, b) = (number(words[1], lengths[0]), number(words[2], lengths[1]));
        match kind {
            Kind::Sub => Self { a: a.max(b), b: a.min(b), kind },
            Kind::Mul => Self { a, b: 2 + words[2] % 8, kind },
            // Of two equal numbers none is the larger: the second is changed.
            Kind::Max if a == b => Self { a, b: if b == 0 { 1 } else { b - 1 }, kind },
            _ => Self { a, b, kind },
        }
    }

    /// Whether the pair of operands belongs to evaluation.
    fn held_out(&self, rng: Rng, ratio: f64) -> bool {
        f64::from(rng.uniform([self.a.min(self.b), self.a.max(self.b), 0, DRAW_HELD_OUT])) < ratio
    }

    fn has_trap(&self) -> bool {
        self.work(true).steps != self.work(false).steps
    }

    fn question(&self, rng: Rng, noise: f64, i: usize, split: &'static str) -> Question {
        let right = self.work(false);
        let systematic = self.work(true);
        let words = rng.words([i as u32, 0, 0, DRAW_NOISE]);
        let draw = f64::from(words[0]) / 4_294_967_296.0;
        let mistake = match draw {
            d if self.has_trap() && d < noise * SYSTEMATIC => Mistake::Systematic,
            d if d >= noise * SYSTEMATIC && d < noise => Mistake::Slip,
            _ => Mistake::None,
        };
        let demonstration = match mistake {
            Mistake::None => right.text(),
            Mistake::Systematic => systematic.text(),
            Mistake::Slip => right.clone().slipped(words[1]).text(),
        };
        let Self { a, b, kind } = self;
        let prompt = match kind {
            Kind::Add => format!("{a}+{b}="),
            Kind::Sub => format!("{a}-{b}="),
            Kind::Mul => format!("{a}*{b}="),
            Kind::Max => format!("max({a},{b})="),
        };
        Question { prompt, response: right.text(), demonstration, answer: right.answer, kind: *kind, split, mistake }
    }

    fn work(&self, mistaken: bool) -> Working {
        match self.kind {
            Kind::Add => add(self.a, self.b, mistaken),
            Kind::Sub => sub(self.a, self.b, mistaken),
            Kind::Mul => mul(self.a, self.b, mistaken),
            Kind::Max => larger(self.a, self.b, mistaken),
        }
    }
}

/// Steps and the answer below them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Working {
    steps: Vec<String>,
    answer: String,
}

impl Working {
    fn text(&self) -> String {
        format!("{} {}", self.steps.join(" "), self.answer)
    }

    /// The same steps with another answer.
    fn slipped(mut self, draw: u32) -> Self {
        let by = [1, 10, 2][(draw / 2 % 3) as usize];
        let value: u32 = self.answer.parse().unwrap_or(0);
        let slipped = if draw.is_multiple_of(2) && value >= by { value - by } else { value + by };
        self.answer = slipped.to_string();
        self
    }
}

/// Decimal digits, the last one first, with zeros up to `columns`.
fn digits_of(value: u32, columns: usize) -> Vec<u32> {
    (0..columns as u32).map(|i| value / 10_u32.pow(i) % 10).collect()
}

fn columns(a: u32, b: u32) -> usize {
    a.max(b).max(1).ilog10() as usize + 1
}

/// The answer that stands in the columns, the last one first: the leading column whole, of the others the last digit.
fn read_off(columns: &[u32]) -> String {
    let value = columns.iter().enumerate().fold(0, |value, (i, c)| {
        let digit = if i + 1 == columns.len() { *c } else { c % 10 };
        value + u64::from(digit) * 10_u64.pow(i as u32)
    });
    value.to_string()
}

/// Works column by column, the last one first: `column` gives the step, what stands in the column, and what is carried, from the
/// two digits and what was carried before. The mistake forgets that.
fn carrying(
    pairs: impl Iterator<Item = (u32, u32)>,
    mistaken: bool,
    column: impl Fn(u32, u32, u32) -> (String, u32, u32),
) -> Working {
    let (mut steps, mut columns, mut carry) = (Vec::new(), Vec::new(), 0);
    for (x, y) in pairs {
        let (step, value, next) = column(x, y, if mistaken { 0 } else { carry });
        steps.push(step);
        columns.push(value);
        carry = next;
    }
    Working { steps, answer: read_off(&columns) }
}

fn pairs(a: u32, b: u32) -> impl Iterator<Item = (u32, u32)> {
    let n = columns(a, b);
    digits_of(a, n).into_iter().zip(digits_of(b, n))
}

/// `+1`, or nothing where nothing was carried.
fn carried(sign: char, used: u32) -> String {
    if used > 0 { format!("{sign}{used}") } else { String::new() }
}

fn add(a: u32, b: u32, mistaken: bool) -> Working {
    carrying(pairs(a, b), mistaken, |x, y, used| {
        let sum = x + y + used;
        (format!("{x}+{y}{}={sum}", carried('+', used)), sum, sum / 10)
    })
}

fn sub(a: u32, b: u32, mistaken: bool) -> Working {
    carrying(pairs(a, b), mistaken, |x, y, used| {
        let borrow = u32::from(x < y + used);
        let x = x + 10 * borrow;
        let difference = x - y - used;
        (format!("{x}-{y}{}={difference}", carried('-', used)), difference, borrow)
    })
}

fn mul(a: u32, b: u32, mistaken: bool) -> Working {
    let digits = digits_of(a, columns(a, 0)).into_iter();
    carrying(digits.map(|x| (x, b)), mistaken, |x, b, used| {
        let (product, sum) = (x * b, x * b + used);
        let more = if used > 0 { format!("+{used}={sum}") } else { String::new() };
        (format!("{x}*{b}={product}{more}"), sum, sum / 10)
    })
}

/// The larger of two different numbers, from the first column on; the mistake looks at the last column alone.
fn larger(a: u32, b: u32, mistaken: bool) -> Working {
    let mut pairs: Vec<(u32, u32)> = pairs(a, b).collect();
    if !mistaken || pairs[0].0 == pairs[0].1 {
        pairs.reverse();
    }
    let mut steps = Vec::new();
    for (x, y) in pairs {
        let order = x.cmp(&y);
        let sign = match order {
            Ordering::Less => '<',
            Ordering::Equal => '=',
            Ordering::Greater => '>',
        };
        steps.push(format!("{x}{sign}{y}"));
        if order != Ordering::Equal {
            let answer = if order == Ordering::Greater { a } else { b };
            return Working { steps, answer: answer.to_string() };
        }
    }
    Working { steps, answer: a.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workings_are_those_of_the_table() {
        let both = |work: fn(u32, u32, bool) -> Working, a, b| (work(a, b, false).text(), work(a, b, true).text());
        assert_eq!(both(add, 47, 38), ("7+8=15 4+3+1=8 85".into(), "7+8=15 4+3=7 75".into()));
        assert_eq!(both(add, 67, 58), ("7+8=15 6+5+1=12 125".into(), "7+8=15 6+5=11 115".into()));
        assert_eq!(both(sub, 53, 28), ("13-8=5 5-2-1=2 25".into(), "13-8=5 5-2=3 35".into()));
        assert_eq!(sub(53, 48, false).text(), "13-8=5 5-4-1=0 5");
        assert_eq!(sub(1000, 1, false).text(), "10-1=9 10-0-1=9 10-0-1=9 1-0-1=0 999");
        assert_eq!(both(mul, 47, 6), ("7*6=42 4*6=24+4=28 282".into(), "7*6=42 4*6=24 242".into()));
        assert_eq!(both(larger, 47, 38), ("4>3 47".into(), "7<8 38".into()));
        assert_eq!(both(larger, 47, 41), ("4=4 7>1 47".into(), "7>1 47".into()));
    }
}
