//! Samples and reports of a run whose data is hostile, as text, as JSON, and in a browser.

use super::command::rows;
use super::fixture::Fixture;
use serde_json::{Value, json};
use std::process::Command;

const HOSTILE: &str = "</script><img src=x onerror=\"document.title='hit'\">\u{1b}[31m";

/// Damaged recorded steps without a checksum: zeros in the heap of the texts, which HDF5 reads for ever; a text that is
/// not UTF-8; and a file that is not HDF5.
fn damages(bytes: &[u8]) -> [(Vec<u8>, &'static str); 3] {
    let mut zeroed = bytes.to_vec();
    let heap = zeroed.windows(4).position(|four| four == b"GCOL").expect("the texts have a heap");
    zeroed[heap + 200..heap + 712].fill(0);
    let mut text = bytes.to_vec();
    let at = text.windows(9).position(|word| word == b"</script>").expect("a prompt");
    text[at] = 0xff;
    [(zeroed, "its limit of processor time"), (text, "is not UTF-8"), (vec![0; 4096], "cannot read")]
}

#[test]
fn a_damaged_recorded_step_is_an_error_that_names_it_and_ends_no_run() {
    let fixture = run();
    let whole = fixture.read("run/rollouts/step-2.h5");
    let end = whole.windows(8).rposition(|word| word == b"rlhf-hpc").expect("it has a checksum");
    let shown = fixture.run(&["samples", "run"]).well().stdout;
    fixture.write("run/rollouts/step-2.h5", &whole[..end]);
    assert_eq!(fixture.run(&["samples", "run"]).well().stdout, shown, "a checksum is not needed");
    for (bytes, why) in damages(&whole[..end]) {
        fixture.write("run/rollouts/step-2.h5", bytes);
        fixture.run(&["samples", "run"]).refused(65, &["run/rollouts/step-2.h5", why]).hinted("remove it");
        fixture.run(&["samples", "run", "--step", "1"]).well();
    }
    fixture.run(&["report", "run"]).refused(65, &["the page has no part for", "run/rollouts/step-2.h5"]);
    assert!(fixture.text("run/report.html").contains("step 1</h3>"), "the other step is left out");
    let ended = fixture
        .job(&[
            "data.prompts=hostile",
            "data.prompt_tokens_max=128",
            "rollout.prompts_per_step=2",
            "rollout.samples_per_prompt=2",
        ])
        .well();
    let words = ["warning: cannot read ./run/rollouts/step-2.h5", "report       ./run/report.html"];
    assert!(words.iter().all(|words| ended.stderr.contains(words)), "{}", ended.stderr);
}

/// Two recorded steps of two prompts with two responses each, asked and labelled with `HOSTILE`.
fn run() -> Fixture {
    let fixture = Fixture::new();
    let row = |i: usize| json!({"prompt": format!("{i}{HOSTILE}"), "answer": HOSTILE, "split": if i < 6 { "train" } else { "eval" }});
    fixture.jsonl("hostile.jsonl", &(0..8).map(row).collect::<Vec<_>>());
    let shard = "shard hostile.jsonl --tokenizer tokenizer --out hostile --label-key answer --split-field split";
    fixture.run(&shard.split(' ').collect::<Vec<_>>()).well();
    let sets =
        "data.prompts=hostile data.prompt_tokens_max=128 rollout.prompts_per_step=2 rollout.samples_per_prompt=2";
    let ended = fixture.job(&sets.split(' ').collect::<Vec<_>>()).well();
    assert!(ended.stderr.lines().any(|line| line.trim() == "report       ./run/report.html"), "{}", ended.stderr);
    fixture
}

#[test]
fn a_run_with_hostile_data_is_shown_as_text_as_json_and_in_a_browser() {
    let fixture = run();
    samples_are_shown_together_and_as_json_to_the_letter(&fixture);
    a_report_has_marks_in_every_plot_and_hostile_text_stays_text(&fixture);
}

fn samples_are_shown_together_and_as_json_to_the_letter(fixture: &Fixture) {
    let samples = |options: &str| {
        let words = ["samples", "run"].into_iter().chain(options.split_whitespace());
        fixture.run(&words.collect::<Vec<_>>())
    };
    let text = samples("").well().stdout;
    assert!(text.starts_with("step 2: 4 samples of 2 prompts, score "), "{text}");
    assert!(!text.contains('\u{1b}') && text.contains("[31m"), "{text}");
    assert_eq!((text.matches("\nprompt ").count(), text.matches("  - score ").count()), (2, 4), "{text}");
    let rows = |options: &str| rows(&samples(&format!("--json {options}")).well().stdout);
    let all = rows("--step 1");
    assert_eq!(all.len(), 4);
    for (i, row) in all.iter().enumerate() {
        assert!(row["prompt"].as_str().is_some_and(|prompt| prompt.ends_with(HOSTILE)), "{row}");
        assert_eq!(
            (&row["label"], row["step"].as_u64(), row["sample"].as_u64()),
            (&json!(HOSTILE), Some(1), Some(i as u64 % 2))
        );
        assert_eq!(row["scores"]["exact"], row["score"]);
        assert!(
            row["source"].as_str().is_some_and(|source| source.contains("hostile"))
                && row["response_tokens"].as_u64() > Some(0)
        );
    }
    assert_eq!(all[0]["prompt_id"], all[1]["prompt_id"]);
    let prompt = all[2]["prompt_id"].as_i64().expect("an id");
    assert_eq!(rows(&format!("--step 1 --prompt {prompt}")), all[2..]);
    assert_eq!((rows("--worst 1").len(), rows("--best 3").len()), (1, 3));
    samples("--step 7").refused(2, &["step 7 is not recorded in run"]).hinted("choose one of 1 to 2");
    samples("--prompt 99").refused(2, &["no sample of prompt 99"]);
}

/// Two steps of DPO, of KTO and of process rewards, with an evaluation after each, on responses of which some are
/// hostile.
fn judged() -> Fixture {
    let fixture = Fixture::new();
    let split = |i: usize| if i < 8 { "train" } else { "eval" };
    let (chosen, prompt) = (format!("\n{HOSTILE}"), |i: usize| format!("{i}{HOSTILE}"));
    let pair =
        |i: usize| json!({"prompt": prompt(i), "chosen": chosen, "rejected": format!("no {i}"), "split": split(i)});
    let one =
        |i: usize| json!({"prompt": prompt(i), "response": chosen, "answer": i.is_multiple_of(2), "split": split(i)});
    let steps = |i: usize| {
        let labels = if i.is_multiple_of(2) { json!(["a", 0.25]) } else { json!(["b", "a"]) };
        json!({"prompt": format!("{i}{HOSTILE}~no {i}~"), "answer": labels, "split": split(i)})
    };
    for (kind, option, rows) in [
        ("dpo", "--pairs", (0..11).map(pair).collect::<Vec<_>>()),
        ("kto", "--labelled --label-key answer", (0..11).map(one).collect()),
        ("step_reward", "--steps --label-key answer", (0..11).map(steps).collect()),
    ] {
        fixture.jsonl(&format!("{kind}.jsonl"), &rows);
        let shard = format!("shard {kind}.jsonl --tokenizer tokenizer --out {kind}-rows --split-field split {option}");
        fixture.run(&shard.split(' ').collect::<Vec<_>>()).well();
        let sets = format!(
            "job.kind={kind} job.dir={kind} data.prompts={kind}-rows data.prompt_tokens_max=128 {kind}.minibatch_samples=4 eval.every_steps=1"
        );
        let marks = ["step_reward.placeholder=~", "step_reward.reward_tokens=[\"a\",\"b\"]"];
        fixture.job(&sets.split(' ').chain(marks).collect::<Vec<_>>()).well();
    }
    fixture
}

#[test]
fn held_out_preferences_are_shown_with_their_rewards_as_rows_of_data_and_in_a_browser() {
    let fixture = judged();
    preferences_are_shown_with_their_rewards(&fixture);
    a_report_has_sides_side_by_side_the_steps_of_a_text_and_their_curves(&fixture);
}

fn preferences_are_shown_with_their_rewards(fixture: &Fixture) {
    let samples = |line: &str| fixture.run(&["samples"].into_iter().chain(line.split(' ')).collect::<Vec<_>>());
    let rows = |line: &str| rows(&samples(&format!("{line} --json")).well().stdout);
    let number = |row: &Value, key: &str| row[key].as_f64().expect("a number");
    for (kind, keys, parts) in [("dpo", ["chosen"], 2), ("kto", ["response"], 1), ("step_reward", ["steps"], 2)] {
        let all = rows(&format!("{kind} --step 2"));
        assert_eq!(all.len(), 3, "the rows of the eval split");
        for (i, row) in all.iter().enumerate() {
            let (prompt, no) = (format!("{}{HOSTILE}", 8 + i), format!("no {}~", 8 + i));
            let (prompt, first) = match kind {
                "step_reward" => (format!("{prompt}~{no}"), json!([format!("{prompt}~"), no])),
                _ => (prompt, json!(format!("\n{HOSTILE}"))),
            };
            assert_eq!((&row["step"], &row["prompt"], &row[keys[0]]), (&json!(2), &json!(prompt), &first));
            assert_eq!(row["correct"], number(row, "margin") > 0.0);
        }
        let metrics = fixture.text(&format!("{kind}/metrics.jsonl"));
        let last: Value = serde_json::from_str(metrics.lines().last().expect("a line")).expect("JSON");
        let correct = all.iter().filter(|row| row["correct"] == true).count();
        let accuracy = number(&last, "eval_accuracy");
        // A row has two steps, which must both be right.
        let is_near =
            if kind == "step_reward" { accuracy >= correct as f64 / 3.0 } else { accuracy == correct as f64 / 3.0 };
        assert!(is_near, "{correct} right: {last}");
        if kind == "dpo" {
            let margin = |row: &Value| number(row, "chosen_reward") - number(row, "rejected_reward");
            assert!(all.iter().all(|row| number(row, "margin") == margin(row)));
            assert!((number(&last, "eval_margin_mean") - all.iter().map(margin).sum::<f64>() / 3.0).abs() < 1e-9);
        } else if kind == "kto" {
            assert_eq!(all.iter().map(|row| row["label"] == true).collect::<Vec<_>>(), [true, false, true]);
        } else {
            assert_eq!(
                all.iter().map(|row| &row["labels"]).collect::<Vec<_>>(),
                [&json!(["a", 0.25]), &json!(["b", "a"]), &json!(["a", 0.25])]
            );
            for row in &all {
                let p: Vec<f64> = row["rewards"].as_array().expect("a list").iter().filter_map(Value::as_f64).collect();
                // With two reward tokens, the probability of the right one is p or 1 - p.
                let margins = if row["labels"][0] == "a" {
                    [2.0 * p[0] - 1.0, 1.0 - 2.0 * p[1]]
                } else {
                    [1.0 - 2.0 * p[0], 2.0 * p[1] - 1.0]
                };
                assert!((number(row, "margin") - margins[0].min(margins[1])).abs() < 1e-9, "{row}");
            }
        }
        let text = samples(kind).well().stdout;
        assert!(text.starts_with(&format!("step 2: 3 held-out rows, {correct} correct, margin ")), "{text}");
        assert!(!text.contains('\u{1b}') && text.contains("[31m"), "{text}");
        assert_eq!((text.matches("\nprompt ").count(), text.matches(", reward ").count()), (3, 3 * parts), "{text}");
        let least = all.iter().min_by(|a, b| number(a, "margin").total_cmp(&number(b, "margin")));
        assert_eq!(rows(&format!("{kind} --worst 1")).first(), least);
        samples(&format!("{kind} --step 7")).refused(2, &["step 7 is not recorded"]).hinted("choose one of 0 to 2");
    }
}

fn a_report_has_sides_side_by_side_the_steps_of_a_text_and_their_curves(fixture: &Fixture) {
    for (kind, sides, titles) in [
        ("dpo", 2, ["<b>Margin</b>", "<b>Margin mean</b>", "<b>Reward of chosen and rejected</b>"]),
        (
            "kto",
            1,
            [
                "<b>Accuracy</b>",
                "<b>KL to the reference or the teachers</b>",
                "<b>Reward of desirable and undesirable</b>",
            ],
        ),
        ("step_reward", 2, ["<b>Accuracy</b>", "<b>Loss</b>", "<b>Accuracy</b>"]),
    ] {
        let Some((dom, complaints)) = browsed(fixture, &format!("{kind}/report.html")) else { return };
        assert_eq!(complaints, "", "{kind}");
        let class = if kind == "step_reward" { "steps" } else { "pair" };
        let rows = between(&dom, &format!("<div class=\"responses {class}\">"), "</article>");
        // Evaluations ran before the first step and after both. The selected one is shown.
        assert_eq!((rows.len(), dom.matches("<div class=\"step\" hidden=\"\">").count()), (9, 2), "{kind}");
        assert!(rows.iter().all(|row| row.matches("<div class=\"response\">").count() == sides), "{kind}: {rows:?}");
        assert!(titles.iter().all(|title| dom.contains(title)), "{kind}: {titles:?}");
        assert!(!dom.contains("<img") && !dom.contains("<title>hit"), "{kind}: markup of a row is active");
        assert!(rows[0].contains("&lt;/script&gt;&lt;img src=x onerror="), "{kind}");
    }
}

/// The page in a browser after its script has run, and the errors of the script. `None` without a browser.
fn browsed(fixture: &Fixture, page: &str) -> Option<(String, String)> {
    let browser = std::env::var("RLHF_CHROMIUM").unwrap_or_else(|_| "chromium".into());
    let profile = fixture.path("profile");
    let mut command = Command::new(&browser);
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]);
    command.arg(format!("--user-data-dir={}", profile.display())).arg("--dump-dom");
    let url = format!("file://{}", fixture.path(page).canonicalize().expect("the page").display());
    match command.arg(url).output() {
        Ok(ended) => {
            let [dom, said] = [ended.stdout, ended.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            Some((dom, said.lines().filter(|line| line.contains("CONSOLE")).collect::<Vec<_>>().join("\n")))
        }
        Err(error) => {
            let is_needed = std::env::var("RLHF_REQUIRE_CHROMIUM").is_ok_and(|needed| needed == "1");
            assert!(!is_needed, "{browser}: {error}");
            eprintln!("skipped: {browser}: {error}");
            None
        }
    }
}

/// The text between each `from` and the next `to`.
fn between<'a>(text: &'a str, from: &str, to: &str) -> Vec<&'a str> {
    text.split(from).skip(1).map(|rest| rest.split(to).next().unwrap_or(rest)).collect()
}

fn a_report_has_marks_in_every_plot_and_hostile_text_stays_text(fixture: &Fixture) {
    let extra =
        "{\"step\":1,\"reward_mean\":0.5,\"time_step_s\":1.0,\"restarts\":1,\"mine/<b>x\":3,\"eval_mine\":0.5}\n";
    fixture.write("other/metrics.jsonl", extra);
    let page = fixture.text("run/report.html");
    assert!(page.len() < 1 << 20 && !page.contains("<img") && !page.contains("http://"), "{} bytes", page.len());
    assert!(
        page.contains(">Learning rate, actor<") && !page.contains(">Learning rate<"),
        "one plot of what is the same"
    );
    fixture.run(&["report", "run", "other", "--out", "both.html"]).well();
    let both = fixture.text("both.html");
    for words in ["restarted at step 1<", "data-name=\"other · mine/&lt;b&gt;x\"", "data-name=\"other · eval_mine\""]
    {
        assert!(both.contains(words), "{words}");
    }
    fixture.job(&["job.dir=quiet", "job.steps=1", "metrics.report=false"]).well();
    assert!(!fixture.path("quiet/report.html").exists());
    for (name, tables) in [("run/report.html", 1), ("both.html", 1)] {
        let Some((dom, complaints)) = browsed(fixture, name) else { return };
        assert_eq!(complaints, "", "{name}");
        assert!(dom.contains("<form id=\"controls\">"), "{name}: the script has not run to its end");
        let plots = between(&dom, "<svg class=\"chart\"", "</svg>");
        assert!(plots.len() > 25, "{name}: {} plots", plots.len());
        for plot in plots {
            assert!(between(plot, "class=\"curve", ">").iter().any(|curve| curve.contains(" d=\"M")), "{name}: {plot}");
        }
        let columns = between(&dom, "<svg class=\"columns\"", "</svg>");
        assert!(columns.len() >= 2 && columns.iter().all(|picture| picture.contains("<rect")), "{name}");
        assert_eq!(dom.matches("<table class=\"rows\">").count(), tables, "{name}");
        assert!(!dom.contains("<img") && !dom.contains("<title>hit"), "{name}: markup of a sample is active");
        assert!(dom.contains("&lt;/script&gt;&lt;img src=x onerror="), "{name}");
        // Each token of a response that is shown is an element of its own.
        let tokens = between(&dom, "<bdi data-cuts=", "</bdi>");
        assert!(
            tokens.iter().filter(|text| text.contains("class=\"cut\"")).all(|text| text.contains("<span")),
            "{name}"
        );
        assert!(dom.contains("class=\"cut\""), "{name}: no response is shown by tokens");
    }
}
