use std::path::PathBuf;
use std::sync::Arc;

use rlhf_hpc::error::{Error, Kind, Result};
use rlhf_hpc::experience::{Prompt, Response, RowFields};
use rlhf_hpc::reward::{Reward, RewardContext, Scored};
use serde_json::json;
use tempfile::TempDir;

use crate::reward::{config, prompt, response};

/// A directory with a job's reward.py.
pub struct Job {
    pub dir: TempDir,
}

impl Job {
    pub fn new(source: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("reward.py"), source).unwrap();
        Self { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// By default both responses are in one call without a retry, so each test sees its failure once.
    pub fn reward(&self, more: &str) -> Result<Reward> {
        self.in_run(more, &RewardContext::default())
    }

    pub fn in_run(&self, more: &str, context: &RewardContext) -> Result<Reward> {
        let python = if more.contains("python") { "" } else { "python = { file = \"reward.py\", batch = 0 }\n" };
        let retries = if more.contains("retries") { "" } else { "retries = 0\n" };
        Reward::new(&config(&format!("{python}{retries}{more}")), self.dir.path(), context)
    }

    #[track_caller]
    pub fn score(&self, more: &str) -> Result<Vec<Scored>> {
        score(&mut self.reward(more).unwrap())
    }

    #[track_caller]
    pub fn service_error(&self, more: &str) -> Error {
        let error = self.score(more).unwrap_err();
        assert_eq!(error.kind, Kind::Service, "{error}");
        error
    }

    #[track_caller]
    pub fn usage_error(&self, more: &str) -> Error {
        let error = self.reward(more).unwrap_err();
        assert_eq!(error.kind, Kind::Usage, "{error}");
        error
    }
}

/// Two responses.
pub fn score(reward: &mut Reward) -> Result<Vec<Scored>> {
    let prompts = [prompt(0, "1+1=", "2"), prompt(1, "2+3=", "5")];
    let responses = [response("2", 1), response("6", 1)];
    reward.score(&prompts.each_ref(), &responses.each_ref())
}

pub fn scores(scored: &[Scored]) -> Vec<f32> {
    scored.iter().map(|s| s.score).collect()
}

#[track_caller]
pub fn says(error: &Error, words: &[&str]) {
    for word in words {
        assert!(error.message.contains(word), "no {word:?} in: {error}");
    }
}

#[test]
fn openrlhf_functions_may_return_a_tensor_or_a_dict() {
    let tensor = r"
class Tensor:
    ndim = 1
    def __init__(self, data): self.data = data
    def tolist(self): return self.data
";
    let job =
        Job::new(&format!("{tensor}\ndef reward_func(queries, prompts, labels):\n    return Tensor([[0.5], [True]])"));
    assert_eq!(scores(&job.score("").unwrap()), [0.5, 1.0]);
    let job = Job::new(&format!(
        r#"{tensor}
def reward_func(queries, prompts, labels):
    logs = {{"share": [0.25, float("nan")], "constant": 3, "list": Tensor([1, 2])}}
    return {{"rewards": Tensor([1, -2]), "scores": [0.1, 0.2], "extra_logs": logs}}
"#
    ));
    let scored = job.score("").unwrap();
    assert_eq!(scores(&scored), [1.0, -2.0]);
    assert_eq!((scored[0].extra["share"], scored[0].extra["scores"]), (0.25, 0.1));
    assert_eq!((scored[1].extra["constant"], scored[1].extra["list"]), (3.0, 2.0));
    assert!(!scored[1].extra.contains_key("share"), "a log that is not a number is left out");
}

#[test]
fn trl_functions_get_completions_and_columns() {
    let job = Job::new(
        r#"
def accuracy(prompts, completions, answer, **kwargs):
    assert prompts == ["1+1=", "2+3="] and kwargs["completion_ids"] == [[7], [7]], kwargs
    return [float(c == a) for c, a in zip(completions, answer)]
"#,
    );
    let python = "python = { file = \"reward.py\", batch = 0, label_argument = \"answer\" }\n";
    assert_eq!(scores(&job.score(python).unwrap()), [1.0, 0.0]);
    let error = job.usage_error("");
    says(&error, &["'accuracy'", "'answer'", "label_argument"]);
    let job = Job::new("async def later(completions, **kwargs):\n    return [len(c) for c in completions]");
    assert_eq!(scores(&job.score("").unwrap()), [1.0, 1.0]);
}

#[test]
fn trl_functions_may_abstain_if_another_reward_scores() {
    let job = Job::new("def some(completions, **kwargs):\n    return [0.5, None]");
    let scored =
        job.score("rule = { kind = \"number\", wrong = -1.0 }\npython = { file = \"reward.py\", batch = 0 }").unwrap();
    assert_eq!(scores(&scored), [1.5, -1.0]);
    assert_eq!((scored[0].extra["some"], scored[1].extra.get("some")), (0.5, None));
    says(&job.service_error(""), &["every reward abstained", "prompt 1"]);
    let job = Job::new("def reward_func(queries, prompts, labels):\n    return [0.5, None]");
    says(&job.service_error(""), &["reward 1 is None"]);
}

#[test]
fn text_is_passed_exactly() {
    let texts = ["a\nb\r\n\tc", "\"\\ \u{0} \u{7f} \u{1b}[31m", "\u{2028}\u{85}\u{feff}", "数学 🙂 e\u{301}", " ", ""];
    let job = Job::new(
        r#"
import json
TEXTS = json.load(open("texts.json", encoding="utf-8"))
def f(prompts, completions, labels, source):
    return [float(p == c == l == t) for p, c, l, t in zip(prompts, completions, labels, TEXTS)]
"#,
    );
    std::fs::write(job.path("texts.json"), serde_json::to_string(&texts).unwrap()).unwrap();
    let prompts = texts.map(|text| prompt(0, text, text));
    let responses = texts.map(|text| response(text, 1));
    let scored = job.reward("").unwrap().score(&prompts.each_ref(), &responses.each_ref()).unwrap();
    assert_eq!(scores(&scored), [1.0; 6]);
}

#[test]
fn a_batch_larger_than_any_pipe_is_scored() {
    let job = Job::new("def f(completions, **kwargs):\n    return [len(c) for c in completions]");
    let prompts: Vec<Prompt> = (0..3000).map(|i| prompt(i, &"p".repeat(500), "")).collect();
    let responses: Vec<Response> = (0..3000).map(|i| response(&"r".repeat(i), 10)).collect();
    let prompts: Vec<&Prompt> = prompts.iter().collect();
    let responses: Vec<&Response> = responses.iter().collect();
    let scored = job.reward("").unwrap().score(&prompts, &responses).unwrap();
    assert!(scored.iter().enumerate().all(|(i, s)| s.score == i as f32));
}

#[test]
fn output_and_input_of_the_function_do_not_affect_the_protocol() {
    let job = Job::new(
        r#"
import os, subprocess, sys
print("loading")
os.write(1, b"{\"function\": \"forged\"}\n")
def f(completions, **kwargs):
    print("{\"id\": 1, \"rewards\": [9, 9]}")
    os.write(1, b"raw\n")
    subprocess.run(["echo", "from a child"])
    sys.__stdout__.write("more\n")
    try:
        input()
        return [0, 0]
    except EOFError:
        return [1, 2]
"#,
    );
    let mut reward = job.reward("").unwrap();
    for _ in 0..3 {
        assert_eq!(scores(&score(&mut reward).unwrap()), [1.0, 2.0]);
    }
}

#[test]
fn much_output_slow_code_and_local_modules_are_allowed_and_the_child_is_kept() {
    let job = Job::new(
        r"
import sys, time, nearby
calls = 0
def f(completions, **kwargs):
    global calls
    calls += 1
    sys.stderr.write('x' * 5_000_000)
    print('y' * 5_000_000)
    time.sleep(0.7)
    return nearby.judge(calls, completions)
",
    );
    std::fs::write(job.path("nearby.py"), "def judge(calls, completions):\n    return [calls, 5]").unwrap();
    let mut reward = job.reward("timeout_s = 60").unwrap();
    for calls in [1.0, 2.0] {
        assert_eq!(scores(&score(&mut reward).unwrap()), [calls, 5.0]);
    }
}

/// Fails on its first calls, or when it is loaded, then answers. A file keeps the count across child processes.
fn failing_first(times: usize, is_loaded: bool, fault: &str) -> Job {
    let (at_load, at_call) = if is_loaded { ("fails()", "None") } else { ("", "fails()") };
    Job::new(&format!(
        r#"
import os, signal, sys, time
def fails():
    with open("calls", "a") as calls:
        calls.write("x")
    if os.path.getsize("calls") <= {times}:
        {fault}
{at_load}
def f(completions, **kwargs):
    return {at_call} or [1, 2]
"#
    ))
}

fn calls(job: &Job) -> usize {
    std::fs::read(job.path("calls")).unwrap().len()
}

#[test]
fn any_failure_is_retried_in_a_new_child() {
    for (fault, is_loaded) in [
        ("os._exit(3)", false),
        ("time.sleep(1000)", false),
        ("raise RuntimeError('flaky')", false),
        ("os._exit(3)", true),
        ("time.sleep(1000)", true),
        ("raise RuntimeError('flaky')", true),
    ] {
        let job = failing_first(2, is_loaded, fault);
        let timeout = if fault.contains("sleep") { "timeout_s = 2.0\nstart_timeout_s = 8.0" } else { "" };
        let scored = job.score(&format!("retries = 2\n{timeout}")).unwrap();
        assert_eq!((scores(&scored), calls(&job)), (vec![1.0, 2.0], 3), "{fault}");
    }
    for (fault, is_loaded, words) in [
        ("return [1]", false, "1 attempt: "),
        ("return [1, float('nan')]", false, "1 attempt: "),
        ("return nothing_of_the_kind", false, "1 attempt: "),
        ("return 1 + 'a'", false, "1 attempt: "),
        ("import nothing_of_the_kind", true, "ModuleNotFoundError"),
    ] {
        let job = failing_first(2, is_loaded, fault);
        let error = job.in_run("retries = 2", &RewardContext::default()).and_then(|mut reward| score(&mut reward));
        let error = error.expect_err(fault);
        says(&error, &[words]);
        let hint = error.hint.unwrap_or_default();
        assert!(calls(&job) == 1 && !hint.contains("timeout_s") && !hint.contains("reward.retries"), "{fault}: {hint}");
    }
    let job = failing_first(9, true, "os._exit(3)");
    let error = job.usage_error("retries = 1");
    assert!(error.to_string().contains("it failed after 2 attempts"), "{error}");
    assert_eq!(calls(&job), 2);
}

#[test]
fn a_child_that_dies_hangs_or_raises_is_named_with_its_attempts_and_no_control_characters() {
    for (fault, more, words) in [
        ("os.kill(os.getpid(), signal.SIGKILL)", "", &["1 attempt", "signal: 9", "scoring"][..]),
        ("print('thinking'); time.sleep(1000)", "timeout_s = 1.0", &["no answer within 1 s", "thinking"]),
        ("sys.exit('enough')", "", &["SystemExit: enough"]),
        (
            "print('\\x1b[2J\\x07last words'); os._exit(3)",
            "retries = 2",
            &["f of ", "reward.py", "3 attempts", "exit status: 3", "[2Jlast words"],
        ),
        ("raise ValueError('\\x1b[2J\\x07boom')", "", &["Traceback", "reward.py", "line 7", "ValueError: [2Jboom"]),
    ] {
        let job = failing_first(99, false, fault);
        let error = job.service_error(more);
        says(&error, words);
        assert!(error.message.chars().all(|c| !c.is_control() || c == '\n'), "{:?}", error.message);
        assert_eq!((calls(&job), error.exit_code()), (if more.contains("retries") { 3 } else { 1 }, 75), "{fault}");
    }
}

#[test]
fn an_invalid_value_is_never_a_score() {
    for (result, words) in [
        ("[1]", "1 entries for 2 responses"),
        ("[1, 2, 3]", "3 entries for 2 responses"),
        ("[]", "0 entries for 2 responses"),
        ("[1, float('nan')]", "reward 1 must be a finite number (got nan)"),
        ("[float('-inf'), 1]", "reward 0 must be a finite number (got -inf)"),
        ("['0.5', 1]", "type str"),
        ("'12'", "the result must be a list of 2 numbers (got str)"),
        ("[[1, 2], 3]", "type list"),
        ("[1j, 1]", "type complex"),
        ("None", "NoneType"),
        ("0.5", "the result must be a list of 2 numbers (got float)"),
        ("{'reward': [1, 2]}", "the result must be a dict with 'rewards'"),
        ("{'rewards': [1]}", "1 entries for 2 responses"),
        ("{'rewards': [1, 2], 'extra_logs': {'a': [1]}}", "extra_logs['a'] has 1 entries"),
        ("[1e300, 1]", "out of the range of f32"),
        ("[10 ** 400, 1]", "OverflowError"),
    ] {
        let job = Job::new(&format!("def f(completions, **kwargs):\n    return {result}"));
        says(&job.service_error(""), &[words]);
    }
}

#[test]
fn code_that_writes_into_the_protocol_is_detected() {
    for (forged, words) in [
        (r#"b"rubbish\n""#, "its answer does not follow the protocol"),
        (r#"b"\xff\xfe\n""#, "its answer does not follow the protocol"),
        (r#"b"{\"id\": 77, \"rewards\": [1, 2]}\n""#, "answered request 77"),
        (r#"b"{\"id\": 1, \"rewards\": [1]}\n""#, "one number per response (got 1 for 2)"),
        (r#"b"{\"id\": 1, \"rewards\": [NaN, 1]}\n""#, "its answer does not follow the protocol"),
        (r#"b"{\"id\": 1, \"rewards\": [1, 2], \"extra\": {\"a\": []}}\n""#, "one number per response (got 0 for 2)"),
        (r#"b"x" * 3_000_000"#, "its answer exceeds the maximum size"),
    ] {
        let job = Job::new(&format!(
            r#"
import os
def f(completions, **kwargs):
    for fd in range(3, 20):
        try:
            if os.readlink(f"/proc/self/fd/{{fd}}").startswith("pipe:"):
                data = {forged}
                while data:
                    data = data[os.write(fd, data):]
        except OSError:
            pass
    return [1, 2]
"#
        ));
        says(&job.service_error(""), &[words]);
    }
}

#[test]
fn a_child_gets_the_configured_environment_memory_and_gpus() {
    // Cargo sets CARGO_MANIFEST_DIR for tests. The child must not see it unless it is passed on.
    let passed = "pass_env = [\"CARGO_MANIFEST_DIR\"]";
    let hidden = "[os.environ.get(f'{n}_VISIBLE_DEVICES') for n in ('CUDA', 'HIP', 'ROCR')] == ['', '-1', '']";
    let child = |sees: &str, setting: &str| {
        let job = Job::new(&format!("import os\ndef f(completions, **kwargs):\n    return [float({sees})] * 2"));
        job.score(&format!("python = {{ file = \"reward.py\", batch = 0, {setting} }}"))
    };
    for (sees, setting, want) in [
        ("'PATH' in os.environ", "gpu = false", 1.0),
        ("'CARGO_MANIFEST_DIR' in os.environ", "gpu = false", 0.0),
        ("'CARGO_MANIFEST_DIR' in os.environ", passed, 1.0),
        (hidden, "gpu = false", 1.0),
        (hidden, "gpu = true", 0.0),
        ("len(bytearray(1 << 30)) > 0", "memory_max_gib = 0.0", 1.0),
    ] {
        assert_eq!(scores(&child(sees, setting).unwrap()), [want; 2], "{sees}, {setting}");
    }
    says(&child("len(bytearray(1 << 30)) > 0", "memory_max_gib = 0.5").unwrap_err(), &["MemoryError"]);
}

#[test]
fn files_that_cannot_be_used_are_rejected_before_work_starts() {
    for (source, more, words) in [
        ("def f(x):\n    return x", "", "no function has the signature"),
        ("def f(completions): pass\ndef g(completions): pass", "", "several functions have a known signature (f, g)"),
        ("def f(completions): pass", "python = { file = \"reward.py\", function = \"g\" }", "no function 'g'"),
        ("def g(x): pass", "python = { file = \"reward.py\", function = \"g\" }", "'g' must have the signature"),
        ("def reward_func(queries): pass", "", "it must take (queries, prompts, labels)"),
        ("def f(completions, images): pass", "", "no value for its argument 'images'"),
        ("def f(completions:", "", "SyntaxError"),
        ("import no_such_module", "", "No module named 'no_such_module'"),
        ("raise SystemExit(4)", "", "SystemExit"),
        ("import os; os._exit(5)", "", "exit status: 5"),
        ("import time; time.sleep(1000)", "start_timeout_s = 1.0", "no answer within 1 s while loading"),
        ("", "python = \"nowhere.py\"", "nowhere.py"),
        ("", "python = { file = \"reward.py\", interpreter = \"no-such-python\" }", "no-such-python"),
        ("", "python = { file = \"reward.py\", interpreter = \"./reward.py\" }", "cannot start"),
        ("", "python = { weight = 2.0 }", "must name a file"),
    ] {
        let error = Job::new(source).usage_error(more);
        says(&error, &[words]);
        let hint = error.hint.unwrap_or_default();
        assert_eq!(hint.contains("interpreter = \"venv/bin/python\""), source.contains("no_such_module"), "{hint}");
        let lasts = words.contains("argument") || words.contains("no-such-python");
        assert!(!(lasts && hint.contains("start_timeout_s")), "{hint}");
    }
}

#[test]
fn an_interpreter_that_is_not_python_is_detected() {
    use std::os::unix::fs::PermissionsExt;
    for (script, words) in [
        ("echo hello", "its answer does not follow the protocol"),
        ("cat /dev/zero", "its answer exceeds the maximum size"),
        ("exec 1>&-; sleep 1000", "it closed its output while loading"),
        ("echo '{}'", "it did not name a function"),
    ] {
        let job = Job::new("");
        let path = job.path("fake");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        says(&job.usage_error("python = { file = \"reward.py\", interpreter = \"./fake\" }"), &[words]);
    }
}

/// Rows of two prompts with what their files hold.
fn rows(first: serde_json::Value, second: serde_json::Value) -> RewardContext {
    let rows = [first, second].map(|mut row| RowFields {
        prompt: row["prompt"].take(),
        columns: row["columns"].as_object().cloned().unwrap_or_default(),
    });
    let columns = rows.iter().flat_map(|row| row.columns.keys().cloned()).collect();
    RewardContext { rows: Some(Arc::new(move |id| Ok(rows[id as usize].clone()))), columns, ..RewardContext::default() }
}

/// The examples of TRL's and OpenRLHF's documentation, in our words: a file, what the rows hold, the responses, the
/// scores.
#[test]
fn the_examples_of_other_frameworks_run_as_they_are() {
    let text = |prompt: &str, columns: serde_json::Value| json!({"prompt": prompt, "columns": columns});
    let chat = |say: &str| json!({"prompt": [{"role": "user", "content": say}], "columns": {}});
    let cases = [
        (
            "def punish_long(completions, **kwargs):\n    return [-float(len(c)) for c in completions]",
            [text("a", json!({})), text("b", json!({}))],
            ["four", "seventh"],
            [-4.0, -7.0],
        ),
        (
            "import re\ndef accuracy(completions, ground_truth, **kwargs):\n    \
             found = [re.search(r'\\\\boxed\\{(.*?)\\}', c) for c in completions]\n    \
             return [1.0 if m and m.group(1) == t else 0.0 for m, t in zip(found, ground_truth)]",
            [text("a", json!({"ground_truth": "4"})), text("b", json!({"ground_truth": "5"}))],
            ["so \\boxed{4}", "so \\boxed{7}"],
            [1.0, 0.0],
        ),
        (
            "import re\ndef shape(completions, **kwargs):\n    \
             said = [messages[0]['content'] for messages in completions]\n    \
             return [float(bool(re.match('<think>.*?</think><answer>.*?</answer>$', t))) for t in said]",
            [chat("Add 1 and 2."), chat("Add 3 and 4.")],
            ["<think>1+2</think><answer>3</answer>", "7"],
            [1.0, 0.0],
        ),
        (
            "def last_word(prompts, completions, **kwargs):\n    \
             assert [m[-1]['role'] for m in prompts] == ['user', 'user'] and completions[0][0]['role'] == 'assistant'\n    \
             return [float(c[0]['content'] in p[-1]['content']) for p, c in zip(prompts, completions)]",
            [chat("say yes"), chat("say no")],
            ["yes", "yes"],
            [1.0, 0.0],
        ),
        (
            "def reward_func(queries, prompts, labels, **kwargs):\n    \
             assert [q.removeprefix(p) for q, p in zip(queries, prompts)] == kwargs['completions'], (queries, prompts)\n    \
             assert kwargs['completions'] == ['is 2', 'is 2'] and kwargs['prompt_id'] == [0, 1], kwargs\n    \
             rewards = [float(q.endswith(l)) for q, l in zip(queries, labels)]\n    \
             return {'rewards': rewards, 'scores': rewards, 'extra_logs': {'level': kwargs['level']}}",
            [text("a", json!({"level": 1})), text("b", json!({"level": 2}))],
            ["is 2", "is 2"],
            [1.0, 0.0],
        ),
    ];
    for (source, [first, second], answers, want) in cases {
        let mut reward = Job::new(source).in_run("", &rows(first, second)).unwrap_or_else(|e| panic!("{source}: {e}"));
        let prompts = [prompt(0, "1+1=", "2"), prompt(1, "2+3=", "5")];
        let responses = answers.map(|answer| response(answer, 1));
        let scored =
            reward.score(&prompts.each_ref(), &responses.each_ref()).unwrap_or_else(|e| panic!("{source}: {e}"));
        assert_eq!(scores(&scored), want, "{source}");
    }
}

#[test]
fn a_field_missing_in_some_rows_is_none_there_and_one_missing_in_all_rows_is_named() {
    let job = Job::new("def by_task(completions, task):\n    return [1.0 if t == 'math' else None for t in task]");
    let of = |columns| json!({"prompt": "a", "columns": columns});
    let with_rule = "python = { file = \"reward.py\", batch = 0 }\nrule = \"exact\"";
    let mut reward = job.in_run(with_rule, &rows(of(json!({"task": "math"})), of(json!({})))).unwrap();
    assert_eq!(scores(&score(&mut reward).unwrap()), [2.0, 0.0]);
    let error = job.in_run("", &rows(of(json!({"kind": "math"})), of(json!({})))).unwrap_err();
    says(&error, &["no value for its argument 'task'", "available are", "kind", "--keep-field task"]);
}

#[test]
fn a_function_that_the_file_imports_is_found_by_name() {
    let job = Job::new("from judges import length");
    std::fs::write(
        job.path("judges.py"),
        "def length(completions, **kwargs):\n    return [len(c) for c in completions]",
    )
    .unwrap();
    let python = "python = { file = \"reward.py\", batch = 0, function = \"length\" }";
    assert_eq!(scores(&job.score(python).unwrap()), [1.0, 1.0]);
}
