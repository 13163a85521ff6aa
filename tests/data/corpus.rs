use std::collections::HashSet;

use rlhf_hpc::data::arithmetic::{CorpusConfig, Kind, Mistake, Question, corpus};

fn config() -> CorpusConfig {
    CorpusConfig { rows: 6000, eval_rows: 400, seed: 3, digits: 2, noise: 0.7, eval_ratio: 0.1 }
}

fn operands(question: &Question) -> (u64, u64) {
    let numbers: Vec<u64> =
        question.prompt.split(|c: char| !c.is_ascii_digit()).filter_map(|text| text.parse().ok()).collect();
    (numbers[0], numbers[1])
}

#[test]
fn worked_answers_are_right_and_end_with_the_answer() {
    for digits in [1, 2, 3] {
        let eval_rows = if digits == 1 { 20 } else { 100 };
        for row in corpus(&CorpusConfig { digits, eval_rows, rows: 2000, ..config() }).unwrap() {
            let (a, b) = operands(&row);
            let right = match row.kind {
                Kind::Add => a + b,
                Kind::Sub => a - b,
                Kind::Mul => a * b,
                Kind::Max => a.max(b),
            };
            assert_eq!(row.answer, right.to_string(), "{}", row.prompt);
            assert!(row.response.ends_with(&format!(" {right}")), "{} {}", row.prompt, row.response);
        }
    }
}

#[test]
fn operands_of_eval_questions_never_occur_in_training() {
    let rows = corpus(&config()).unwrap();
    let pairs = |split: &str| -> HashSet<(u64, u64)> {
        let ordered = |(a, b): (u64, u64)| (a.min(b), a.max(b));
        rows.iter().filter(|row| row.split == split).map(|row| ordered(operands(row))).collect()
    };
    let (train, eval) = (pairs("train"), pairs("eval"));
    assert!(train.len() > 2000 && eval.len() > 200);
    assert!(train.is_disjoint(&eval));
    let prompts: HashSet<&String> = rows.iter().filter(|row| row.split == "eval").map(|row| &row.prompt).collect();
    assert_eq!(prompts.len(), 400);
}

#[test]
fn the_systematic_mistake_outnumbers_the_right_working_where_it_is_possible() {
    let rows = corpus(&config()).unwrap();
    // A step that uses a carry or borrow, or two numbers of several digits with different last ones.
    let possible = |row: &Question| match row.kind {
        Kind::Add => row.response.split(' ').any(|step| step.matches('+').count() == 2),
        Kind::Sub => row.response.split(' ').any(|step| step.matches('-').count() == 2),
        Kind::Mul => row.response.contains('+'),
        Kind::Max => {
            let (a, b) = operands(row);
            a.max(b) > 9 && a % 10 != b % 10
        }
    };
    for kind in [Kind::Add, Kind::Sub, Kind::Mul, Kind::Max] {
        let of = |mistake| {
            let rows = rows.iter().filter(|row| row.kind == kind && row.mistake == mistake && possible(row));
            rows.count() as f64
        };
        let (right, systematic, slip) = (of(Mistake::None), of(Mistake::Systematic), of(Mistake::Slip));
        assert!(systematic > 1.4 * (right + slip), "{kind:?}: {systematic} mistaken, {right} right, {slip} slips");
        assert!(right > 0.2 * (right + systematic + slip), "{kind:?}: {systematic} mistaken, {right} right");
    }
    assert!(rows.iter().all(|row| row.mistake != Mistake::Systematic || possible(row)));
    let wrong = rows.iter().filter(|row| !row.demonstration.ends_with(&format!(" {}", row.answer))).count();
    let share = wrong as f64 / rows.len() as f64;
    assert!((0.25..0.55).contains(&share), "{share} of the demonstrations are wrong");
}

#[test]
fn the_same_seed_gives_the_same_rows_and_another_seed_others() {
    assert_eq!(corpus(&config()).unwrap(), corpus(&config()).unwrap());
    assert_ne!(corpus(&config()).unwrap(), corpus(&CorpusConfig { seed: 4, ..config() }).unwrap());
}

#[test]
fn more_eval_questions_than_there_are_is_an_error() {
    let error = corpus(&CorpusConfig { digits: 1, eval_rows: 5000, ..config() }).unwrap_err();
    assert!(error.message.contains("distinct eval questions"), "{error}");
}
