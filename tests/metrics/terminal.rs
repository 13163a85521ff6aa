use rlhf_hpc::experience::Experience;
use rlhf_hpc::metrics::{Curves, Line, Terminal};

use crate::metrics::{Shown, sample};

fn curves(lines: &[Line]) -> Curves {
    let mut curves = Curves::default();
    for line in lines {
        curves.add(line);
    }
    curves
}

/// Rows as banner and summary take them.
pub fn rows(rows: &[(&str, &str)]) -> Vec<(String, String)> {
    rows.iter().map(|(label, value)| (label.to_string(), value.to_string())).collect()
}

fn banner(terminal: &mut Terminal, rows: &[(String, String)]) {
    terminal.title("PPO arithmetic");
    terminal.banner(60, Some(20), rows);
}

pub fn step(n: u64) -> Line {
    let x = n as f64 / 10.0;
    let values = [
        ("reward_mean", x),
        ("kl_mean", 0.001 * x),
        ("entropy", 2.0 - x),
        ("clip_ratio", 0.031),
        ("response_tokens_mean", 12.25),
        ("value_loss", 0.25),
        ("tokens_per_s", 12_345.0),
        ("time_rollout_s", 0.6),
        ("time_train_s", 0.5),
        ("time_step_s", 1.2),
    ];
    Line::new(n, 0.0, &values)
}

/// A banner with all that may make its rows long.
fn long_banner() -> Vec<(String, String)> {
    let why = "the driver shows 8 GPUs of a kind that none of the carried kernels is for, and no NVRTC was found that could \
               compile others, though it was looked for in /usr/local/cuda/lib64 and in the active Python environment";
    let path = format!("/{}/models", "a-directory-with-a-long-name/".repeat(5));
    let hosts: Vec<String> = (0..16).map(|i| format!("node-{i}.cluster x 8")).collect();
    rows(&[
        ("ranks", &format!("128 on 16 hosts: {}", hosts.join(", "))),
        ("devices", "rank 0: NVIDIA A800-SXM4-80GB, 79.3 GiB at 0000:00:00.0, 8 lanes, 78.3 GiB of it per rank"),
        ("", &format!("no GPU: {why}")),
        ("actor", &format!("5.24M parameters, f32  {path}")),
        ("old logprobs", why),
        ("run", &format!("{path}, 60 steps, seed 42, resumed from step 20")),
    ])
}

#[test]
fn the_banner_loses_no_word_at_any_terminal_width() {
    let piped = Shown::default();
    banner(&mut piped.terminal(false, 80), &long_banner());
    let whole = piped.text();
    assert!(!whole.contains('…') && whole.contains("PPO arithmetic\n"), "{whole}");
    // In a pipe each row is one line, and its label is in the first column.
    let rows: Vec<&str> = whole.lines().skip(1).filter(|row| !row.is_empty()).collect();
    assert!(rows.iter().all(|row| row.starts_with("  ") && row.chars().nth(14) == Some(' ')), "{whole}");
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    for columns in [60, 80, 100, 120] {
        let shown = Shown::default();
        banner(&mut shown.terminal(true, columns), &long_banner());
        let text: String = shown.text().split('\x1b').map(|part| part.trim_start_matches("[2K")).collect();
        let lines: Vec<&str> = text.lines().skip(1).take_while(|line| !line.is_empty()).collect();
        let fits = |line: &&str| line.chars().count() <= columns || line.split_whitespace().count() <= 2;
        assert!(lines.iter().all(fits), "{columns} columns:\n{text}");
        assert_eq!(words(&lines.join("\n")), words(&rows.join("\n")), "{columns} columns");
    }
}

#[test]
fn outside_a_terminal_a_step_is_one_plain_line() {
    let shown = Shown::default();
    let mut terminal = shown.terminal(false, 100);
    banner(&mut terminal, &[]);
    let before = shown.text().len();
    let lines = [step(9), step(10)];
    for (i, line) in lines.iter().enumerate() {
        let bar = terminal.phase("rollout", 10);
        bar.inc(10);
        drop(bar);
        terminal.step(line, &curves(&lines[..=i]));
    }
    let text = shown.text()[before..].to_owned();
    let rows: Vec<&str> = text.lines().collect();
    assert_eq!(rows.len(), 2, "{text}");
    assert!(!text.contains('\x1b') && !text.contains('\r'));
    assert!(rows.iter().all(|row| row.chars().count() <= 190), "{text}");
    for row in &rows {
        let clock: String = row[..9].chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert!(clock == "00:00:00 " && row.contains(" s left"), "{row}");
    }
    for part in [
        "step 10/60",
        "1.20 s",
        "12.3k tok/s",
        "reward  1.0000",
        "clip    3.1%",
        "rollout 50% train 42%",
        "value loss  0.2500",
    ] {
        assert!(rows[1].contains(part), "{part} in {}", rows[1]);
    }
    let column = |row: &str| row.find("entropy").unwrap();
    assert_eq!(column(rows[0]), column(rows[1]), "columns are aligned:\n{text}");
}

#[test]
fn a_step_shows_the_larger_gap_and_a_narrow_terminal_hides_it_only_if_it_is_0() {
    let cases = [
        (Some(0.0), None, Some("gap       0")),
        (Some(0.0), Some(0.0123), Some("gap  0.0123")),
        (Some(0.5), Some(0.25), Some("gap  0.5000")),
        (Some(0.5), Some(f64::NAN), Some("gap     NaN")),
        (None, None, None),
    ];
    for (logprob, sampler, expected) in cases {
        let values: Vec<(String, f64)> = step(1).values;
        let values: Vec<(&str, f64)> = values.iter().map(|(key, value)| (key.as_str(), *value)).collect();
        let gaps = [("logprob_gap_max", logprob), ("sampler_gap_max", sampler)];
        let gaps = gaps.into_iter().filter_map(|(key, gap)| Some((key, gap?)));
        let line = Line::new(1, 0.0, &values.into_iter().chain(gaps).collect::<Vec<_>>());
        for columns in [20, 30, 40, 60, 80, 100, 130, 170] {
            let shown = Shown::default();
            let terminal = shown.terminal(true, columns);
            terminal.step(&line, &Curves::default());
            let text = shown.text();
            let mut rows = text.split(['\n', '\r']).map(|row| row.rsplit("\x1b[2K").next().unwrap().trim_end());
            let row = rows.find(|row| row.starts_with("step ")).unwrap();
            let is_0 = expected.is_some_and(|gap| gap.ends_with(" 0"));
            let gap = expected.filter(|_| !is_0 || columns >= 160);
            assert_eq!(row.matches("gap").count(), usize::from(gap.is_some()), "{columns}: {row}");
            assert!(gap.is_none_or(|gap| row.contains(gap)), "{columns}: {row}");
            assert!(!is_0 || columns < 80 || row.contains("length"), "{columns}: {row}");
            assert!(row.chars().count() <= columns.max(30), "{columns}: {row}");
            assert_eq!(row.contains("value loss"), columns == 170, "{columns}: {row}");
        }
    }
}

#[test]
fn a_log_can_be_limited_to_every_tenth_step() {
    let (shown, lines) = (Shown::default(), (1..=25).map(step).collect::<Vec<_>>());
    let mut terminal = shown.terminal(false, 100);
    terminal.printed.print_every = 10;
    terminal.banner(25, None, &[]);
    for (i, line) in lines.iter().enumerate() {
        terminal.step(line, &curves(&lines[..=i]));
    }
    let text = shown.text();
    let steps: Vec<&str> =
        text.lines().filter_map(|row| row.split("step ").nth(1)?.split_once('/')).map(|s| s.0).collect();
    assert_eq!(steps.iter().map(|step| step.trim()).collect::<Vec<_>>(), ["1", "10", "20", "25"], "{text}");
}

/// The text of a row after cursor commands, each of which ends with a letter.
fn without_moves(row: &str) -> &str {
    let last =
        row.rsplit_once('\x1b').and_then(|(_, behind)| behind.split_at_checked(behind.find(char::is_alphabetic)? + 1));
    last.map_or(row, |(_, text)| text)
}

#[test]
fn an_evaluation_and_a_warning_fit_the_terminal() {
    let eval = ["eval_accuracy_greedy", "eval_accuracy_sampled"].map(|key| (key, 0.5));
    let eval = Line::new(10, 0.0, &eval);
    let lines: Vec<Line> = (1..=40).map(step).chain((0..40).map(|_| eval.clone())).collect();
    for columns in [60, 80, 100] {
        let shown = Shown::default();
        let mut terminal = shown.terminal(true, columns);
        banner(&mut terminal, &[]);
        terminal.eval(&eval, &curves(&lines));
        terminal.warn(&"reward.timeout_s is a key ".repeat(12));
        let text = shown.text();
        let rows: Vec<&str> = text.split(['\n', '\r']).map(without_moves).collect();
        let rows: Vec<&str> =
            rows.into_iter().filter(|row| row.starts_with("eval ") || row.contains("a key")).collect();
        assert!(rows[0].starts_with("eval ") && rows[0].contains("greedy") && rows.len() > 2, "{text}");
        assert!(rows.iter().all(|row| row.chars().count() <= columns), "{columns} columns:\n{text}");
    }
}

#[test]
fn bars_show_the_progress_of_a_phase_on_a_terminal() {
    let shown = Shown::default();
    let mut terminal = shown.terminal(true, 80);
    banner(&mut terminal, &[]);
    let bar = terminal.phase("rollout", 32);
    bar.set_position(16);
    // Another thread prints the bar.
    for _ in 0..600 {
        if shown.text().contains("16/32") {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert!(shown.text().contains("16/32"), "{:?}", shown.text());
    drop(bar);
    terminal.final_summary(0, 0.0, &Curves::default(), &[]);
    let text = shown.text();
    let sequences = text.split('\x1b').skip(1).filter_map(|rest| rest.chars().find(char::is_ascii_alphabetic));
    assert!(sequences.clone().count() > 0 && sequences.clone().all(|end| end != 'm'), "colour that was not allowed");
}

#[test]
fn samples_never_carry_control_characters_and_fit() {
    let shown = Shown::default();
    let mut hostile: Experience = sample(2, 3);
    hostile.prompt.text = format!("{}\x1b[2J\u{202e}the end?", "long ".repeat(100));
    hostile.response.text = format!("\x1b]0;owned\x07 42\n{}", "日本".repeat(200));
    hostile.prompt.label = "\x1b[31m42".into();
    shown.terminal(false, 100).samples(10, &[hostile]);
    let text = shown.text();
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(
        text.contains("the end?") && text.contains("\\x1b]0;owned\\x07 42⏎") && text.contains("label \\x1b[31m42"),
        "{text}"
    );
    assert!(text.contains("score 1.5000, 3 tokens, stop"), "{text}");
}

#[test]
fn the_summary_shows_each_curve_with_its_first_and_last_number() {
    let shown = Shown::default();
    let mut lines: Vec<Line> = (1..=10).map(step).collect();
    lines.insert(0, Line::new(0, 0.0, &[("eval_accuracy_greedy", 0.412)]));
    lines.push(Line::new(10, 0.0, &[("eval_accuracy_greedy", 0.723)]));
    let ledger = rows(&[("ledger", "3,900 trained, 80 filtered, 20 deferred"), ("export", "runs/x/export")]);
    shown.terminal(false, 100).final_summary(10, 245.0, &curves(&lines), &ledger);
    let text = shown.text();
    assert!(text.contains("10 steps in 4 min 05 s"), "{text}");
    assert!(text.contains("  ledger       3,900 trained, 80 filtered, 20 deferred\n"), "{text}");
    let row = |label: &str| text.lines().find(|row| row.trim_start().starts_with(label)).unwrap();
    assert!(row("reward").contains("0.1000 ->   1.0000") && row("reward").contains("▁▁▂▃▄▅▆▇"), "{text}");
    assert!(row("entropy").contains('█') && row("kl").contains("->"), "{text}");
    assert!(row("held-out greedy").contains("41.2% ->    72.3%  ▁█  +31.1 points"), "{text}");
}

#[test]
fn graded_held_out_rewards_are_shown_as_a_mean_and_others_as_shares() {
    let line = |step, reward| Line::new(step, 0.0, &[("eval_reward_mean", reward), ("eval_accuracy_greedy", 0.5)]);
    for (last, shown, hidden) in
        [(0.5, "held-out greedy", "held-out reward"), (1.6, "held-out reward", "held-out greedy")]
    {
        let lines = [line(0, 0.5), line(10, last)];
        let screen = Shown::default();
        screen.terminal(false, 100).eval(&lines[1], &curves(&lines));
        screen.terminal(false, 100).final_summary(10, 245.0, &curves(&lines), &[]);
        let text = screen.text();
        assert!(text.matches(shown).count() == 2 && !text.contains(hidden), "{text}");
    }
    let tied = Line::new(0, 0.0, &[("eval_loss", 0.69), ("eval_margin_mean", 0.0)]);
    let screen = Shown::default();
    screen.terminal(false, 100).eval(&tied, &curves(std::slice::from_ref(&tied)));
    assert!(screen.text().contains("held-out accuracy      -"), "{}", screen.text());
}
