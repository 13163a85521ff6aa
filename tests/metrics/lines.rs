use std::fs;

use rlhf_hpc::error::Kind;
use rlhf_hpc::metrics::Line;
use rlhf_hpc::metrics::jsonl::MetricsFile;

fn line(step: u64) -> Line {
    Line::new(step, 1e9, &[("loss", 0.1 * step as f64)])
}

#[test]
fn keys_of_a_line_stand_in_the_order_of_the_table_and_others_behind() {
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

#[test]
fn every_line_is_in_the_file_as_soon_as_it_is_appended() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut file = MetricsFile::open(&path).unwrap();
    for step in 1..4 {
        file.append(line(step)).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), step as usize);
        assert!(text.ends_with("}\n"));
    }
}

#[test]
fn a_torn_last_line_is_removed_and_writing_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let whole = format!("{}\n{}\n", line(1).to_json(), line(2).to_json());
    fs::write(&path, format!("{whole}{}", &line(3).to_json()[..20])).unwrap();
    let mut file = MetricsFile::open(&path).unwrap();
    assert_eq!(file.lines().len(), 2);
    assert_eq!(fs::read_to_string(&path).unwrap(), whole);
    file.append(line(3)).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), format!("{whole}{}\n", line(3).to_json()));
}

#[test]
fn cutting_back_drops_later_lines_and_leaves_the_others_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let odd = r#"{"step":1,"time_unix_s":5.0,"loss":0.30000000000000004,"note_of_user":2}"#;
    fs::write(&path, format!("{odd}\n{}\n{}\n", line(2).to_json(), line(3).to_json())).unwrap();
    let mut file = MetricsFile::open(&path).unwrap();
    file.append_eval(Line::new(3, 0.0, &[("eval_loss", 1.0)])).unwrap();
    file.cut_back(2).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), format!("{odd}\n{}\n", line(2).to_json()));
    file.append(line(3)).unwrap();
    assert_eq!(MetricsFile::open(&path).unwrap().lines().len(), 3);
    file.cut_back(0).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left aside");
}

#[test]
fn a_step_is_recorded_once_and_a_repeated_evaluation_replaces() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut file = MetricsFile::open(&path).unwrap();
    file.append_eval(Line::new(0, 0.0, &[("eval_loss", 3.0)])).unwrap();
    file.append(line(1)).unwrap();
    let error = file.append(line(1)).unwrap_err();
    assert!(error.kind == Kind::Fault && error.message.contains("step 1"), "{error}");
    file.append_eval(Line::new(1, 0.0, &[("eval_loss", 2.0)])).unwrap();
    file.append_eval(Line::new(1, 0.0, &[("eval_loss", 1.0)])).unwrap();
    let lines = MetricsFile::open(&path).unwrap();
    let losses: Vec<_> = lines.lines().iter().map(|l| l.get("eval_loss")).collect();
    assert_eq!(losses, [Some(3.0), None, Some(1.0)]);
}

#[test]
fn a_damaged_line_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    for damage in ["{\"step\":2,", "{\"loss\":1.0}", "{\"step\":2,\"loss\":\"x\"}", "\u{fffd}"] {
        fs::write(&path, format!("{}\n{damage}\n{}\n", line(1).to_json(), line(3).to_json())).unwrap();
        let error = MetricsFile::open(&path).unwrap_err();
        assert!(error.kind == Kind::Data && error.message.contains("metrics.jsonl, line 2"), "{damage}: {error}");
    }
}
