//! Environments: valid files and servers, and the handling of turns without a good answer.

use crate::data::image_rows::{Fixture, texts};
use crate::reward::server::Server;
use crate::reward::{config, prompt};
use rlhf_hpc::error::{Kind, Result};
use rlhf_hpc::experience::RowFields;
use rlhf_hpc::reward::RewardContext;
use rlhf_hpc::reward::environment::{Environment, Feedback, Reply, Turn, Turns};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Counts turns: answers `<TURN:TEXT:LEVEL OF THE ROW>`, adds half a point each time, and ends after the third.
const COUNTS: &[(&str, &str)] = &[
    (
        "a class",
        r#"
import os
class Counts:
    def reset(self, prompt, label, level):
        assert (prompt, label) == ("1+1=", "2")
        self.n, self.level = 0, level
    def step(self, text):
        self.n += 1
        if text == "die" and not os.path.exists("tried"):
            open("tried", "w").close()
            os._exit(3)
        return f"<{self.n}:{text}:{self.level}>", self.n / 2, self.n == 3
"#,
    ),
    (
        "a class that asks for token ids and is asynchronous",
        r#"
import asyncio
class Counts:
    async def reset(self, **columns):
        self.n, self.level = 0, columns["level"]
    async def step(self, tokens):
        await asyncio.sleep(0)
        self.n += 1
        text = "".join(chr(t) for t in tokens)
        return {"feedback": f"<{self.n}:{text}:{self.level}>", "reward": self.n / 2, "done": self.n == 3, "extra": {"n": self.n}}
"#,
    ),
    (
        "OpenRLHF's function",
        r#"
async def step(observation, action, label, **kwargs):
    n = observation.count("<") + 1
    feedback = f"<{n}:{action}:{kwargs['level']}>"
    return {"rewards": [n / 2], "scores": 0, "next_observation": observation + action + feedback, "done": n == 3,
            "sampling_params": None, "extra_logs": {"n": n}}
"#,
    ),
    (
        "OpenRLHF's class",
        r#"
class AgentInstance:
    def __init__(self, *args, **kwargs):
        self.n = 0
    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}
    async def step(self, states: dict, **kwargs):
        self.n += 1
        assert states["observation_text"].count("<") == self.n - 1
        feedback = f"<{self.n}:{states['action_text']}:{states['level']}>"
        return {"rewards": self.n / 2, "scores": 1, "environment_feedback": feedback, "done": self.n == 3}
"#,
    ),
];

fn environment(toml: &str, dir: &Path) -> Result<Environment> {
    let config = config(&format!("environment = {toml}\nretries = 1\ntimeout_s = 5"));
    let row =
        |_| Ok(RowFields { columns: json!({"level": 7}).as_object().cloned().expect("a map"), ..RowFields::default() });
    let context =
        RewardContext { rows: Some(Arc::new(row)), columns: vec!["level".into()], ..RewardContext::default() };
    config.check()?;
    Environment::new(&config, &config.environment[0], dir, &context)
}

fn in_python(code: &str) -> (Result<Environment>, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("env.py"), code).expect("writes");
    (environment("\"env.py\"", dir.path()), dir)
}

/// Asks for each of `texts` as the next turn of an episode.
fn run_turns(environment: &mut Environment, episode: usize, texts: &[&str]) -> Result<Vec<Reply>> {
    let mut turns: Vec<Turn> = Vec::new();
    let mut replies = Vec::new();
    for text in texts {
        let tokens = text.bytes().map(u32::from).collect();
        turns.push(Turn { text: (*text).into(), tokens, finish: "stop", feedback: None });
        let prompt = prompt(3, "1+1=", "2");
        let place =
            environment.push(Turns { round: 1, episode, prompt, sample: 0, turns: turns.clone(), turns_max: 8 });
        let mut come = Vec::new();
        while come.is_empty() {
            come = environment.arrived(Instant::now() + Duration::from_secs(1))?;
        }
        assert_eq!((come.len(), come[0].0), (1, place));
        let one = come.remove(0).1;
        let Feedback::Text(feedback) = &one.feedback else { panic!("no text: {one:?}") };
        turns.last_mut().expect("one").feedback = Some(feedback.clone());
        replies.push(one);
    }
    Ok(replies)
}

/// Checks all their replies to a, b and c.
fn assert_counts(replies: &[Reply], what: &str) {
    for (i, (reply, text)) in replies.iter().zip(["a", "b", "c"]).enumerate() {
        let n = i + 1;
        let Feedback::Text(feedback) = &reply.feedback else { panic!("{what}: {reply:?}") };
        assert_eq!(
            (feedback.clone(), reply.reward, reply.done),
            (format!("<{n}:{text}:7>"), Some(n as f64 / 2.0), n == 3),
            "{what}"
        );
        assert!(reply.failed.is_none() && reply.extra().get("n").is_none_or(|x| *x == n as f32), "{what}: {reply:?}");
    }
}

#[test]
fn every_form_of_an_environment_gives_equal_answers_and_separates_episodes() {
    for (what, code) in COUNTS {
        let (environment, _dir) = in_python(code);
        let mut environment = environment.unwrap_or_else(|e| panic!("{what}: {e}"));
        let first = run_turns(&mut environment, 1, &["a", "b"]).expect(what);
        assert_counts(&run_turns(&mut environment, 2, &["a", "b", "c"]).expect(what), what);
        assert_counts(&first, what);
    }
    let server = Server::start();
    let dir = tempfile::tempdir().expect("a directory");
    let mut environment = environment(&format!("\"{}\"", server.url("turn")), dir.path()).expect("a server");
    assert_counts(&run_turns(&mut environment, 1, &["a", "b", "c"]).expect("answers"), "a server");
    let silent = run_turns(&mut environment, 3, &["silent"]).expect("null is an absent field");
    assert!(silent[0].reward == Some(1.5) && !silent[0].done, "{silent:?}");
    let refused = run_turns(&mut environment, 2, &["bad"]).expect_err("an error");
    assert!(refused.kind == Kind::Service && refused.message.contains("no such tool"), "{refused}");
}

#[test]
fn a_server_shows_images_of_the_folder_of_the_job() {
    let (server, fixture) = (Server::start(), Fixture::new("qwen3"));
    let (texts, token) = texts(&fixture, None);
    let config = config(&format!("environment = \"{}\"", server.url("turn")));
    let context = RewardContext { texts: Some(Arc::new(texts)), ..RewardContext::default() };
    let opened = Environment::new(&config, &config.environment[0], fixture.dir.path(), &context);
    let reply = run_turns(&mut opened.expect("a server"), 1, &["look"]).expect("answers").remove(0);
    let shown = ["rgb.png", "tiny.png"].map(|name| std::fs::read(fixture.dir.path().join(name)).expect("reads"));
    assert!(reply.seen.iter().map(|image| image.file.bytes()).eq(shown.iter().map(|file| &file[..])));
    let seen: usize = reply.seen.iter().map(|image| image.tokens).sum();
    assert_eq!(reply.tokens.iter().filter(|other| **other == token).count(), seen);
}

#[test]
fn turns_are_replayed_if_their_process_has_died() {
    let (environment, _dir) = in_python(COUNTS[0].1);
    let mut environment = environment.expect("a class");
    let replies = run_turns(&mut environment, 1, &["a", "die", "c"]).expect("the second attempt");
    let feedback: Vec<String> = replies.iter().map(|reply| format!("{:?}", reply.feedback)).collect();
    assert_eq!(feedback, ["Text(\"<1:a:7>\")", "Text(\"<2:die:7>\")", "Text(\"<3:c:7>\")"]);
}

#[test]
fn an_environment_that_cannot_be_used_is_named_before_work_starts() {
    for (code, why) in [
        ("def step(a): pass", "the file has no environment, which is a class with step(self, text)"),
        ("class A:\n  def step(self, text): pass\nclass B(A): pass", "the file has several environments (A, B)"),
        ("import nothing_of_the_kind", "No module named"),
        ("1 +", "SyntaxError"),
    ] {
        let (environment, _dir) = in_python(code);
        let error = environment.expect_err(code);
        assert!(error.kind == Kind::Usage && error.message.contains(why), "{code}: {error}");
    }
    let dir = tempfile::tempdir().expect("a directory");
    for (toml, why) in [
        ("{ turns_max = 3 }", "needs either one Python file (python) or servers (http)"),
        ("{ python = \"a.py\", http = \"http://a:1/x\" }", "needs either one Python file (python) or servers (http)"),
        ("[\"a.py\", \"b.py\"]", "at most 1 reward.environment"),
        ("\"nowhere.py\"", "reward.environment: cannot find"),
    ] {
        let error = environment(toml, dir.path()).expect_err(toml);
        assert!(error.message.contains(why), "{toml}: {error}");
    }
}

#[test]
fn an_invalid_answer_to_a_turn_is_a_failure_with_its_reason() {
    let open = |on_failure: &str| {
        let dir = tempfile::tempdir().expect("a directory");
        let code = "import os, time\nclass Does:\n  def step(self, text): return eval(text)";
        std::fs::write(dir.path().join("env.py"), code).expect("writes");
        let toml = format!("environment = \"env.py\"\nretries = 0\ntimeout_s = 5\non_failure = \"{on_failure}\"");
        let config = config(&toml);
        let context = RewardContext::default();
        (Environment::new(&config, &config.environment[0], dir.path(), &context).expect("loads"), dir)
    };
    let (mut drops, _dir) = open("drop");
    for (i, (does, why)) in [
        ("1 / 0", "ZeroDivisionError"),
        ("1", "step must return (feedback, reward, done) or a dict (got int)"),
        ("{'feedback': 'x'}", "step must return a dict with reward or done"),
        ("('', 'many', True)", "the reward must be a number (got 'many'"),
        ("('', float('nan'), True)", "the reward must be a finite number (got nan)"),
        ("(7, 0.0, False)", "(got 7)"),
        ("{'next_observation': 'other', 'done': False}", "must begin with observation and action"),
        ("time.sleep(1000)", "no answer within 5 s while answering a turn"),
        ("os._exit(4)", "its process ended while answering a turn"),
    ]
    .into_iter()
    .enumerate()
    {
        let replies = run_turns(&mut drops, i, &[does]).expect("it drops");
        assert!(replies[0].failed.as_ref().is_some_and(|found| found.contains(why)), "{does}: {replies:?}");
    }
    let stopped = run_turns(&mut open("stop").0, 1, &["1 / 0"]).expect_err("it stops");
    assert!(stopped.kind == Kind::Service && stopped.message.contains("ZeroDivisionError"), "{stopped}");
}
