use std::path::Path;

use rlhf_hpc::config::reward::{RewardConfig, RuleKind};
use rlhf_hpc::error::Kind;
use rlhf_hpc::reward::{Reward, RewardContext};

use crate::reward::{config, prompt, response};

/// The score of one response to a prompt with this label.
#[track_caller]
fn score(toml: &str, label: &str, text: &str) -> f32 {
    let mut reward = Reward::new(&config(toml), Path::new("."), &RewardContext::default()).unwrap();
    let scored = reward.score(&[&prompt(3, "", label)], &[&response(text, 5)]).unwrap();
    scored[0].score
}

#[test]
fn exact_compares_the_whole_text_except_for_surrounding_white_space() {
    let rule = "rule = \"exact\"";
    assert_eq!(score(rule, "42", "42"), 1.0);
    assert_eq!(score(rule, "42", " 42\n"), 1.0);
    assert_eq!(score(rule, "42", "4 2"), 0.0);
    assert_eq!(score(rule, "42", "42."), 0.0);
    assert_eq!(score(rule, "Paris", "paris"), 0.0);
    assert_eq!(score("rule = { ignore_case = true }", "Paris", "PARIS"), 1.0);
    assert_eq!(score("rule = { strip = false }", "42", " 42"), 0.0);
    assert_eq!(score("rule = { right = 2.0, wrong = -1.0 }", "42", "43"), -1.0);
}

#[test]
fn exact_compares_the_text_that_extract_finds_in_the_last_match() {
    let rule = "rule = { kind = \"exact\", extract = '<answer>(.*?)</answer>' }";
    assert_eq!(score(rule, "7", "<answer>3</answer> no: <answer> 7 </answer>"), 1.0);
    assert_eq!(score(rule, "3", "<answer>3</answer> no: <answer>7</answer>"), 0.0);
    assert_eq!(score(rule, "7", "7"), 0.0, "without a match the rule does not hold");
}

#[test]
fn number_compares_the_last_number_of_the_response() {
    let rule = "rule = \"number\"";
    for (label, text, want) in [
        ("72", "48 + 24 = 72", 1.0),
        ("72", "It is 72.", 1.0),
        ("72", "72, and not 71", 0.0),
        ("#### 72", "so 72.0", 1.0),
        ("1234", "a total of $1,234", 1.0),
        ("1,234", "1234", 1.0),
        ("-5", "x = -5", 1.0),
        ("-5", "x = \u{2212}5", 1.0),
        ("5", "12-7=5", 1.0),
        ("7", "12-7", 1.0),
        ("-7", "12-7", 0.0),
        ("0.5", "about .5", 1.0),
        ("0.002", "2e-3", 1.0),
        ("3", "1, 2, 3", 1.0),
        ("3", "1,2,3", 1.0),
        ("72", "no idea", 0.0),
        ("72", "", 0.0),
        ("72", "7 2", 0.0),
        ("1000000", "1000000.5", 1.0),
        ("1", "1.001", 0.0),
        ("1", "9e999", 0.0),
    ] {
        assert_eq!(score(rule, label, text), want, "label {label:?}, response {text:?}");
    }
    assert_eq!(score("rule = { kind = \"number\", tolerance = 0.01 }", "1", "1.001"), 1.0);
}

#[test]
fn regex_is_searched_for_and_format_must_match_from_end_to_end() {
    let regex = "rule = { kind = \"regex\", pattern = 'ab+' }";
    assert_eq!((score(regex, "", "xxabbxx"), score(regex, "", "axb")), (1.0, 0.0));
    let format = "rule = { kind = \"format\", pattern = '<think>.*</think>\\s*<answer>.*</answer>' }";
    assert_eq!(score(format, "", "<think>a\nb</think>\n<answer>c</answer>\n"), 1.0);
    assert_eq!(score(format, "", "<think>a</think><answer>c</answer> and more"), 0.0);
    let either = "rule = { kind = \"format\", pattern = 'a|b' }";
    assert_eq!((score(either, "", "a"), score(either, "", "ab")), (1.0, 0.0));
}

#[test]
fn label_in_a_pattern_matches_its_literal_text() {
    let rule = "rule = { kind = \"regex\", pattern = 'answer: {label}$' }";
    assert_eq!(score(rule, "1+1", "answer: 1+1"), 1.0);
    assert_eq!(score(rule, "1+1", "answer: 111"), 0.0);
}

#[test]
fn length_is_full_within_its_range_and_falls_linearly_outside() {
    let rule = "rule = { kind = \"length\", tokens_min = 2, tokens_max = 6, tokens_slack = 4, wrong = -1.0 }";
    let mut reward = Reward::new(&config(rule), Path::new("."), &RewardContext::default()).unwrap();
    for (tokens, want) in [(2, 1.0), (6, 1.0), (1, 0.5), (7, 0.5), (8, 0.0), (10, -1.0), (99, -1.0)] {
        let scored = reward.score(&[&prompt(0, "", "")], &[&response("", tokens)]).unwrap();
        assert_eq!(scored[0].score, want, "{tokens} tokens");
    }
}

#[test]
fn a_missing_label_is_an_error_and_not_a_zero() {
    let mut reward = Reward::new(&config("rule = \"exact\""), Path::new("."), &RewardContext::default()).unwrap();
    let error = reward.score(&[&prompt(3, "", "")], &[&response("42", 1)]).unwrap_err();
    assert_eq!(error.kind, Kind::Data);
    assert!(error.message.contains("prompt 3") && error.hint.unwrap().contains("label_key"));
    let mut reward = Reward::new(&config("rule = \"number\""), Path::new("."), &RewardContext::default()).unwrap();
    let error = reward.score(&[&prompt(3, "", "many")], &[&response("42", 1)]).unwrap_err();
    assert!(error.message.contains("\"many\" has no number"), "{error}");
}

#[test]
fn invalid_rules_are_rejected_and_the_error_names_the_key() {
    for (toml, word) in [
        ("rule = { kind = \"exact\", pattern = 'a' }", "does not use a pattern"),
        ("rule = { kind = \"regex\", pattern = '(' }", "reward.rule.pattern"),
        ("rule = { extract = '(?=x)' }", "reward.rule.extract"),
        ("rule = { right = nan }", "reward.rule.right"),
        ("rule = { kind = \"length\", tokens_min = 9, tokens_max = 3 }", "tokens_min"),
    ] {
        let error = Reward::new(&config(toml), Path::new("/nonexistent"), &RewardContext::default()).unwrap_err();
        assert_eq!(error.kind, Kind::Usage, "{toml}");
        assert!(error.message.contains(word), "{toml}: {error}");
    }
}

#[test]
fn a_source_is_a_name_a_table_or_a_list_and_survives_toml() {
    let one = config("rule = \"number\"");
    assert_eq!(one, config("rule = { kind = \"number\" }"));
    assert_eq!(one, config("rule = [\"number\"]"));
    assert_eq!(one, config("[[rule]]\nkind = \"number\""));
    let several = config("rule = [\"number\", { kind = \"length\", weight = 0.5 }]\npython = \"a.py\"");
    assert_eq!(several.rule[1].kind, RuleKind::Length);
    assert_eq!(several.python[0].file, "a.py");
    let back: RewardConfig = toml::from_str(&toml::to_string(&several).unwrap()).unwrap();
    assert_eq!(back, several);
    assert_eq!(config(""), RewardConfig::default());
    for (toml, word) in [
        ("rule = \"exakt\"", "exakt"),
        ("rule = { kindd = \"exact\" }", "kindd"),
        ("rule = [{ kindd = \"exact\" }]", "kindd"),
        ("rule = 3", "exact | number"),
        ("timeout = 3", "timeout"),
    ] {
        let error = toml::from_str::<RewardConfig>(toml).unwrap_err().to_string();
        assert!(error.contains(word), "{toml}: {error}");
    }
}

#[test]
fn an_answer_is_what_a_rule_compares_with_the_label_else_the_stripped_text() {
    for (toml, text, answer) in [
        ("rule = \"number\"", "so 1,072.0", Some("1072")),
        ("rule = \"number\"", "-0", Some("0")),
        ("rule = \"number\"", "none", None),
        ("rule = { ignore_case = true, extract = '<a>(.*)</a>' }", "x <a> Paris </a>", Some("paris")),
        ("rule = { extract = '<a>(.*)</a>' }", "Paris", None),
        ("rule = [\"length\", \"number\"]", "7 of 9", Some("9")),
        ("rule = \"length\"", " 7 of 9\n", Some("7 of 9")),
    ] {
        let reward = Reward::new(&config(toml), Path::new("."), &RewardContext::default()).unwrap();
        assert_eq!(reward.answer(text).as_deref(), answer, "{toml}: {text}");
    }
}
