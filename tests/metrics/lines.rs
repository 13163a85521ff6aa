use std::fs;
use std::path::Path;

use rlhf_hpc::error::Kind;
use rlhf_hpc::metrics::Line;
use rlhf_hpc::metrics::jsonl::MetricsFile;

fn line(step: u64) -> Line {
    Line::new(step, 1e9, &[("loss", 0.1 * step as f64)])
}

#[test]
fn keys_of_a_line_are_in_table_order_and_unknown_keys_come_last() {
    let values = [("zeta", 1.0), ("time_step_s", 2.5), ("alpha", 1.0), ("kl_mean", 0.25), ("reward_mean", -1.5)];
    let text = Line::new(3, 1000.5, &values).to_json();
    let expected =
        r#"{"step":3,"time_unix_s":1000.5,"reward_mean":-1.5,"kl_mean":0.25,"time_step_s":2.5,"alpha":1.0,"zeta":1.0}"#;
    assert_eq!(text, expected);
}

#[test]
fn counts_are_whole_numbers_and_other_numbers_read_back_to_the_same_value() {
    let values = [("memory_peak_bytes", 3e9), ("entropy", 1.0 / 3.0), ("response_tokens_mean", 12.5), ("lr", 1e-6)];
    let line = Line::new(1, 0.0, &values);
    assert!(line.to_json().contains(r#""memory_peak_bytes":3000000000"#), "{}", line.to_json());
    assert_eq!(Line::parse(&line.to_json()).unwrap(), line);
}

#[test]
fn numbers_that_are_not_finite_are_null_and_named() {
    let values = [("policy_loss", f64::NAN), ("kl_mean", f64::NEG_INFINITY), ("entropy", 1.0), ("lr", f64::INFINITY)];
    let text = Line::new(7, 0.0, &values).to_json();
    let json: serde_json::Value = serde_json::from_str(&text).expect("plain JSON");
    assert!(json["policy_loss"].is_null() && json["kl_mean"].is_null() && json["lr"].is_null());
    assert_eq!(json["nonfinite"], serde_json::json!({"policy_loss": "NaN", "kl_mean": "-inf", "lr": "inf"}));
    let back = Line::parse(&text).unwrap();
    assert!(back.get("policy_loss").unwrap().is_nan());
    assert_eq!(back.get("kl_mean"), Some(f64::NEG_INFINITY));
    assert_eq!(back.get("lr"), Some(f64::INFINITY));
}

/// Opens `path`, truncates it to `step`, and returns the warnings.
fn cut_back(path: &Path, step: u64) -> (MetricsFile, [Option<String>; 2]) {
    let mut file = MetricsFile::open(path).unwrap();
    let damage = file.damage();
    let missing = file.cut_back(step).unwrap();
    (file, [damage, missing])
}

fn steps(file: &MetricsFile) -> Vec<u64> {
    file.lines().unwrap().iter().map(|line| line.step).collect()
}

#[test]
fn damaged_lines_are_set_aside_with_a_warning_that_names_them() {
    let whole = |step| line(step).to_json();
    let cases = [
        "{\"step\":2,",
        "{\"loss\":1.0}",
        "{\"step\":2,\"loss\":\"x\"}",
        "\u{fffd}",
        "\0\0\0",
        "<<<<<<< mine",
        "{\"step\":99999999999999999999}",
    ];
    for damage in cases {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let text = format!("{}\n\n{damage}\n{}\n{}\n", whole(1), whole(2), whole(3));
        fs::write(&path, &text).unwrap();
        drop(MetricsFile::open(&path).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), text, "to open it changes nothing");
        let (mut file, [warned, missing]) = cut_back(&path, 2);
        let warned = warned.expect("a warning");
        assert!(warned.contains("metrics.jsonl has damaged lines: line 3 (") && !warned.contains("more"), "{warned}");
        assert!(warned.ends_with("metrics.jsonl.damaged"), "{warned}");
        assert_eq!(missing, None);
        file.append(&line(3)).unwrap();
        let kept = fs::read_to_string(dir.path().join("metrics.jsonl.damaged")).unwrap();
        assert_eq!(kept, format!("{damage}\n"));
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n{}\n{}\n", whole(1), whole(2), whole(3)));
        assert_eq!(cut_back(&path, 3).1, [None, None], "warned of once");
    }
}

#[test]
fn a_torn_last_line_causes_a_warning_and_one_that_only_lacks_its_line_break_is_kept() {
    let whole = format!("{}\n{}\n", line(1).to_json(), line(2).to_json());
    let third = line(3).to_json();
    for len in 1..=third.len() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        fs::write(&path, format!("{whole}{}", &third[..len])).unwrap();
        let is_line = len == third.len();
        let mut file = MetricsFile::open(&path).unwrap();
        assert_eq!(file.damage().is_some_and(|warned| warned.contains("line 3 (")), !is_line, "{len} bytes");
        file.append(&line(if is_line { 4 } else { 3 })).unwrap();
        assert_eq!(steps(&file), if is_line { vec![1, 2, 3, 4] } else { vec![1, 2, 3] });
        assert!(fs::read_to_string(&path).unwrap().starts_with(&whole));
        let kept = fs::read_to_string(dir.path().join("metrics.jsonl.damaged")).unwrap_or_default();
        assert_eq!(kept, if is_line { String::new() } else { format!("{}\n", &third[..len]) });
    }
}

#[test]
fn steps_without_a_line_are_named_up_to_the_checkpoint() {
    let cases: [(&[u64], u64, Option<&str>); 9] = [
        (&[1, 2, 3, 4], 3, None),
        (&[1, 2], 4, Some("no line for steps 3 to 4;")),
        (&[1, 3], 3, Some("no line for step 2;")),
        (&[], 2, Some("steps 1 to 2;")),
        (&[], 0, None),
        (&[1, 3, 4, 7, 9], 8, Some("steps 2, 5 to 6, 8;")),
        (&[5, 6, 1, 2], 6, Some("steps 3 to 4;")),
        (&[2, 4, 6, 8, 10], 10, Some("steps 1, 3, 5, 7 and others;")),
        (&[u64::MAX, 1], 1, None),
    ];
    for (there, step, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let eval = Line::new(0, 0.0, &[("eval_loss", 1.0)]).to_json();
        let text: String = there.iter().map(|step| line(*step).to_json() + "\n").collect();
        fs::write(&path, format!("{eval}\n{text}")).unwrap();
        let (_, [damage, missing]) = cut_back(&path, step);
        assert_eq!(damage, None);
        match expected {
            None => assert_eq!(missing, None, "{there:?}"),
            Some(words) => assert!(missing.as_ref().is_some_and(|m| m.contains(words)), "{there:?}: {missing:?}"),
        }
    }
}

#[test]
fn truncation_drops_later_lines_and_leaves_the_others_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let odd = r#"{"step":1,"time_unix_s":5.0,"loss":0.30000000000000004,"note_of_user":2}"#;
    fs::write(&path, format!("{odd}\n{}\n{}\n", line(2).to_json(), line(3).to_json())).unwrap();
    let mut file = MetricsFile::open(&path).unwrap();
    file.append_eval(&Line::new(3, 0.0, &[("eval_loss", 1.0)])).unwrap();
    assert_eq!(file.cut_back(2).unwrap(), None);
    assert_eq!(fs::read_to_string(&path).unwrap(), format!("{odd}\n{}\n", line(2).to_json()));
    file.append(&line(3)).unwrap();
    assert_eq!(steps(&MetricsFile::open(&path).unwrap()), [1, 2, 3]);
    file.cut_back(0).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left aside");
}

#[test]
fn a_step_has_one_line_with_its_evaluation_and_a_repeated_one_replaces() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut file = MetricsFile::open(&path).unwrap();
    file.append_eval(&Line::new(0, 0.0, &[("eval_loss", 3.0)])).unwrap();
    file.append_eval(&Line::new(0, 0.0, &[("eval_loss", 4.0), ("eval_accuracy", 0.5)])).unwrap();
    file.append(&line(1)).unwrap();
    let error = file.append(&line(1)).unwrap_err();
    assert!(error.kind == Kind::Fault && error.message.contains("step 1"), "{error}");
    file.append_eval(&Line::new(1, 0.0, &[("eval_loss", 0.1 + 0.2)])).unwrap();
    file.append_eval(&Line::new(1, 0.0, &[("eval_loss", 1.0)])).unwrap();
    file.append(&line(2)).unwrap();
    file.append_eval(&Line::new(2, 0.0, &[("eval_loss", 0.5)])).unwrap();
    file.append(&line(3)).unwrap();
    let lines = MetricsFile::open(&path).unwrap().lines().unwrap();
    let losses: Vec<_> = lines.iter().map(|line| (line.step, line.get("eval_loss"))).collect();
    assert_eq!(losses, [(0, Some(4.0)), (1, Some(1.0)), (2, Some(0.5)), (3, None)]);
    let numbers: Vec<_> =
        lines[1..].iter().zip(1..).map(|(now, step)| (now.get("loss"), line(step).get("loss"))).collect();
    assert!(numbers.iter().all(|(now, then)| now == then && now.is_some()), "{numbers:?}");
}
