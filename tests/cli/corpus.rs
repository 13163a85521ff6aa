//! The quickstart's corpus: questions whose answers are right, and demonstrations that are wrong as often as they
//! should be.

use super::command::rows;
use crate::process::{Ended, Running, launched};
use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;
use std::sync::OnceLock;

/// The script, with these options, for a job in `dir`.
pub fn make(dir: &Path, options: &str) -> Ended {
    let mut python = launched(Path::new("python3"), 0);
    python.args(["-c", include_str!("../../jobs/quickstart/corpus.py")]).args(options.split(' ')).current_dir(dir);
    Running::new(python).end()
}

/// The rows of a corpus with these options besides the usual ones.
fn corpus(options: &str) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let ended = make(dir.path(), &format!("--out rows.jsonl --seed 3 {options}"));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    rows(&std::fs::read_to_string(dir.path().join("rows.jsonl")).unwrap())
}

/// Questions of two digits: as many as there are of each kind, so that every one is asked.
fn many() -> &'static [Value] {
    static MANY: OnceLock<Vec<Value>> = OnceLock::new();
    MANY.get_or_init(|| corpus("--rows 30000 --eval-rows 400"))
}

fn text<'a>(row: &'a Value, field: &str) -> &'a str {
    row[field].as_str().unwrap()
}

fn operands(row: &Value) -> (u64, u64) {
    let mut numbers = text(row, "prompt").split(|c: char| !c.is_ascii_digit()).filter_map(|text| text.parse().ok());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

#[test]
fn worked_solutions_are_correct_and_end_with_the_answer() {
    let [one, three] =
        [(1, 20), (3, 100)].map(|(digits, rows)| corpus(&format!("--rows 2000 --eval-rows {rows} --digits {digits}")));
    for row in one.iter().chain(&three).chain(many()) {
        let (a, b) = operands(row);
        let right = match text(row, "kind") {
            "add" => a + b,
            "sub" => a - b,
            "mul" => a * b,
            _ => a.max(b),
        };
        assert_eq!(text(row, "answer"), right.to_string(), "{row}");
        assert!(text(row, "response").ends_with(&format!(" {right}")), "{row}");
    }
}

#[test]
fn solutions_and_mistakes_equal_those_of_the_table() {
    let rows = many();
    for (prompt, right, mistaken) in [
        ("29+29=", "9+9=18 2+2+1=5 58", "9+9=18 2+2=4 48"),
        ("57-9=", "17-9=8 5-0-1=4 48", "17-9=8 5-0=5 58"),
        ("47*6=", "7*6=42 4*6=24+4=28 282", "7*6=42 4*6=24 242"),
        ("max(92,73)=", "9>7 92", "2<3 73"),
    ] {
        let asked: Vec<&Value> = rows.iter().filter(|row| row["prompt"] == prompt).collect();
        assert!(asked.iter().all(|row| row["response"] == right), "{asked:?}");
        let fails = |row: &&Value| row["mistake"] == "systematic";
        assert!(asked.iter().copied().filter(fails).all(|row| row["demonstration"] == mistaken), "{asked:?}");
        assert!(asked.iter().copied().any(|row| fails(&row)), "{prompt} is asked, and answered wrongly");
    }
}

#[test]
fn operands_of_eval_questions_never_occur_in_training() {
    let rows = many();
    let of = |split: &'static str| rows.iter().filter(move |row| row["split"] == split);
    let pairs = |split| -> HashSet<(u64, u64)> {
        of(split).map(operands).map(|(a, b): (u64, u64)| (a.min(b), a.max(b))).collect()
    };
    let (train, eval) = (pairs("train"), pairs("eval"));
    assert!(train.len() > 2000 && eval.len() > 200 && train.is_disjoint(&eval));
    assert_eq!(of("eval").map(|row| text(row, "prompt")).collect::<HashSet<_>>().len(), 400);
}

#[test]
fn the_systematic_mistake_is_more_frequent_than_the_correct_solution_if_possible() {
    let rows = many();
    // A step that uses a carry or borrow, or two numbers of several digits with different last ones.
    let possible = |row: &Value| match (text(row, "kind"), text(row, "response")) {
        ("add", steps) => steps.split(' ').any(|step| step.matches('+').count() == 2),
        ("sub", steps) => steps.split(' ').any(|step| step.matches('-').count() == 2),
        ("mul", steps) => steps.contains('+'),
        _ => {
            let (a, b) = operands(row);
            a.max(b) > 9 && a % 10 != b % 10
        }
    };
    for kind in ["add", "sub", "mul", "max"] {
        let of = |mistake| {
            let rows = rows.iter().filter(|row| row["kind"] == kind && row["mistake"] == mistake && possible(row));
            rows.count() as f64
        };
        let (right, systematic, slip) = (of("none"), of("systematic"), of("slip"));
        assert!(systematic > 1.4 * (right + slip), "{kind}: {systematic} mistaken, {right} right, {slip} slips");
        assert!(right > 0.2 * (right + systematic + slip), "{kind}: {systematic} mistaken, {right} right");
    }
    assert!(rows.iter().all(|row| row["mistake"] != "systematic" || possible(row)));
    let is_wrong = |row: &&Value| !text(row, "demonstration").ends_with(&format!(" {}", text(row, "answer")));
    let share = rows.iter().filter(is_wrong).count() as f64 / rows.len() as f64;
    assert!((0.25..0.55).contains(&share), "{share} of the demonstrations are wrong");
}

#[test]
fn the_same_seed_gives_the_same_rows_and_another_seed_others() {
    let rows = corpus("--rows 200 --eval-rows 20");
    assert_eq!(rows, corpus("--rows 200 --eval-rows 20"));
    assert_ne!(rows, corpus("--rows 200 --eval-rows 20 --seed 4"));
}

#[test]
fn options_that_no_corpus_can_satisfy_are_rejected() {
    for (options, words) in [
        ("--out rows.jsonl --digits 1 --eval-rows 5000", "distinct eval questions"),
        ("--out rows.jsonl --digits 0", "--digits must be from 1 to 6"),
    ] {
        let ended = make(&std::env::temp_dir(), options);
        assert!(ended.code != Some(0) && ended.stderr.contains(words), "{}", ended.stderr);
    }
}
