//! `jobs/tools/metrics_to.py`, with stub modules of the services that record their calls.

use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const SERVICES: [(&str, &str); 3] = [
    (
        "calls.py",
        r#"
import json, os
def call(name, *values):
    with open(os.environ["CALLS"], "a") as out:
        out.write(json.dumps([name, *values]) + "\n")
"#,
    ),
    (
        "wandb.py",
        r#"
from calls import call
class Run:
    id, step = "w1", 2
    def log(self, numbers, step): call("log", step, numbers)
    def finish(self): call("finish")
def init(project, name, id, resume, config):
    call("init", project, name, id, config["optim.actor.lr"])
    return Run()
"#,
    ),
    (
        "mlflow.py",
        r#"
from types import SimpleNamespace as Of
from calls import call
def set_experiment(name): call("set_experiment", name)
def start_run(run_id, run_name):
    call("start_run", run_id, run_name)
    return Of(info=Of(run_id="m1"), data=Of(tags={"rlhf_hpc.last_step": "1"} if run_id else {}))
def log_params(params):
    assert len(params) <= 100
    call("log_params", params.get("optim.actor.lr"))
def log_metrics(numbers, step): call("log", step, numbers)
def set_tag(key, value): pass
def end_run(): call("finish")
"#,
    ),
];

const RESOLVED: &str = "[job]\nname = \"a\"\nsteps = 2\n[optim.actor]\nlr = 1e-6\n[eval]\nevery_steps = 2\n";

/// A run, and the records that were sent.
struct Sent(TempDir);

impl Sent {
    fn new(metrics: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let files = [("config.resolved.toml", RESOLVED), ("metrics.jsonl", metrics)];
        files.iter().chain(&SERVICES).for_each(|(name, text)| fs::write(dir.path().join(name), text).unwrap());
        Self(dir)
    }

    fn start(&self, options: &[&str]) -> Child {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/tools/metrics_to.py");
        let mut command = Command::new("python3");
        command.arg(script).args(options).args(["--every", "0.05"]).arg(self.0.path());
        command.env("PYTHONPATH", self.0.path()).env("CALLS", self.0.path().join("calls.jsonl"));
        command.env("PYTHONDONTWRITEBYTECODE", "1").stderr(Stdio::piped()).spawn().unwrap()
    }

    fn send(&self, options: &[&str]) -> Vec<Value> {
        let done = self.start(options).wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        self.calls()
    }

    fn calls(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.0.path().join("calls.jsonl")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

#[test]
fn each_whole_line_of_a_run_is_sent_once_with_its_step_and_the_configuration() {
    let lines = concat!(
        "{\"step\": 0, \"eval_reward_mean\": 0.25}\nnot a line\n",
        "{\"step\": 1, \"kl_mean\": null, \"reward_mean\": 0.5, \"nonfinite\": {\"kl_mean\": \"NaN\"}}\n{\"step\": 2, \"rew"
    );
    let logged = [json!(["log", 0, { "eval_reward_mean": 0.25 }]), json!(["log", 1, { "reward_mean": 0.5 }])];
    let begun = [json!(["init", "p", "a", null, 1e-6])];
    let finished = [json!(["finish"])];
    assert_eq!(Sent::new(lines).send(&["wandb", "--project", "p"]), [&begun[..], &logged, &finished].concat());
    let begun =
        [json!(["set_experiment", "rlhf-hpc"]), json!(["start_run", null, "n"]), json!(["log_params", "1e-06"])];
    assert_eq!(Sent::new(lines).send(&["mlflow", "--name", "n"]), [&begun[..], &logged, &finished].concat());
}

#[test]
fn a_run_continued_at_a_service_gets_only_the_missing_steps() {
    let lines = "{\"step\": 1, \"reward_mean\": 0.5}\n{\"step\": 2, \"reward_mean\": 0.75}\n";
    for (service, id) in [("wandb", "w1"), ("mlflow", "m1")] {
        let calls = Sent::new(lines).send(&[service, "--id", id]);
        let logged: Vec<&Value> = calls.iter().filter(|call| call[0] == "log").collect();
        assert_eq!(logged, [&json!(["log", 2, { "reward_mean": 0.75 }])], "{service}");
    }
}

#[test]
fn a_followed_run_is_sent_as_it_grows_across_a_resume_up_to_its_last_evaluation() {
    let sent = Sent::new("");
    let mut child = sent.start(&["wandb", "--follow"]);
    let one = "{\"step\": 1, \"reward_mean\": 0.5}\n";
    let last =
        ["{\"step\": 2, \"reward_mean\": 0.75}\n", "{\"step\": 2, \"reward_mean\": 0.75, \"eval_samples\": 4}\n"];
    // A resume cuts the file back to its checkpoint.
    let growing =
        [(one.to_string(), 2), (String::new(), 2), (format!("{one}{}", last[0]), 3), (one.to_owned() + last[1], 5)];
    for (text, calls) in growing {
        fs::write(sent.0.path().join("metrics.jsonl"), text).unwrap();
        let begin = Instant::now();
        while sent.calls().len() < calls {
            assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", sent.calls());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    assert!(child.wait().unwrap().success());
    let logged = [
        json!(["log", 1, { "reward_mean": 0.5 }]),
        json!(["log", 2, { "reward_mean": 0.75 }]),
        json!(["log", 2, { "eval_samples": 4 }]),
    ];
    assert_eq!(sent.calls()[1..4], logged);
}

#[test]
fn a_service_that_is_not_installed_and_a_directory_without_a_run_are_named() {
    let sent = Sent::new("");
    fs::write(sent.0.path().join("wandb.py"), "raise ModuleNotFoundError(\"No module named 'wandb'\", name='wandb')")
        .unwrap();
    let says = |sent: &Sent, words: &str| {
        let done = sent.start(&["wandb"]).wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!done.status.success() && said.contains(words) && !said.contains("Traceback"), "{said}");
    };
    says(&sent, "hint: python3 -m pip install wandb");
    fs::remove_file(sent.0.path().join("config.resolved.toml")).unwrap();
    says(&sent, "hint: give the directory (job.dir) of a run");
}
