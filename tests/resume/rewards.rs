//! Runs whose responses are sent to functions and services while others are being sampled.

use crate::process::Running;
use crate::resume::job::{Job, place, signal};
use crate::server::Server;
use rlhf_hpc::checkpoint::newest;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Records its calls in a file, and hangs while the file `hangs` exists.
const REWARD: &str = "import os, time\n\
                      def reward_func(queries, prompts, labels, **kwargs):\n    \
                          open('called', 'w').close()\n    \
                          while os.path.exists('hangs'): time.sleep(0.01)\n    \
                          return [len(q) - len(p) + 0.5 for q, p in zip(queries, prompts)]";

/// The directory of a job's reward.
fn reward(name: &str) -> PathBuf {
    let dir = place().join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("writes");
    std::fs::write(dir.join("reward.py"), REWARD).expect("writes");
    dir
}

fn job(name: &str, source: String) -> Job {
    Job::ppo(name).with("reward.rule=[] job.steps=2 gradient.order=fixed").set(source)
}

fn python(dir: &Path, batch: usize) -> String {
    format!("reward.python={{ file = \"{}\", batch = {batch} }}", dir.join("reward.py").display())
}

fn http(server: &Server, behaviour: &str) -> String {
    format!("reward.http={{ url = \"{}\", name = \"reward_func\" }}", server.url(behaviour))
}

#[test]
fn samples_and_scores_do_not_depend_on_ranks_workers_batches_or_who_scores() {
    let (dir, server) = (reward("streams"), Server::start());
    let sets = "eval.every_steps=1 checkpoint.every_steps=0";
    let alone = job("streams-1", python(&dir, 1)).with(sets).done();
    for (name, source, ranks, more) in [
        ("streams-ranks", python(&dir, 3), 2, "reward.workers=2"),
        ("streams-http", http(&server, "right"), 2, "reward.workers=2"),
    ] {
        job(name, source).on(ranks).with(sets).with(more).done().assert_same(&alone);
    }
    // Ranks that share matrices have the same responses and divide them.
    let shared =
        job("streams-tensor", python(&dir, 0)).on(2).with(sets).with("mesh.tensor=2 gradient.order=fast").done();
    for key in ["score_mean", "eval_reward_mean"] {
        assert_eq!(shared.numbers(key)[0], alone.numbers(key)[0], "{key}");
    }
}

/// Steps whose sampling takes far longer than a score.
const LONG: &str = "job.steps=1 rollout.prompts_per_step=40 rollout.samples_per_prompt=1 rollout.response_tokens_max=200 \
                    rollout.stop_token_ids=[] rollout.ignore_eos=true rollout.batch_max=1 eval.every_steps=0";

#[test]
fn a_response_is_scored_before_the_rollout_has_ended() {
    let dir = reward("early");
    let job = job("early", python(&dir, 1)).with(LONG);
    let mut running = job.start();
    running.wait_until(|| dir.join("called").exists());
    signal("USR1", running.pid());
    running.end().assert(85, &["stopped at step "]);
    let saved = newest(&job.checkpoints()).expect("whole").expect("saved");
    let work = saved.file("work.bin").expect("listed");
    assert!(work[0] == 0 && (1..40).contains(&work[1]), "{} responses are finished", work[1]);
    job.done();
}

#[test]
fn a_hanging_or_failing_reward_ends_the_run_as_configured_and_a_fixed_one_resumes_it() {
    let (dir, server) = (reward("fixed"), Server::start());
    let fault = dir.join("hangs");
    let while_fault = |mode: &str| http(&server, &format!("{mode}{}", fault.display()));
    let whole = job("fixed-whole", python(&dir, 1)).done();
    let short = "reward.timeout_s=5 reward.retries=0";
    for (name, source, sets, code, words) in [
        ("fixed-hang", python(&dir, 1), short, 75, "failed after 1 attempt: no answer within 5 s while scoring"),
        ("fixed-500", while_fault("500"), "", 75, "it answered 500"),
        ("fixed-asked", python(&dir, 1), "", 85, "stopped at step 0"),
    ] {
        std::fs::write(&fault, "").expect("writes");
        let _ = std::fs::remove_file(dir.join("called"));
        let job = job(name, source).on(2).with(sets);
        let mut running = job.start();
        if code == 85 {
            running.wait_until(|| dir.join("called").exists());
            signal("USR1", running.pid());
        }
        running.end().assert(code, &[words]);
        assert!(newest(&job.checkpoints()).expect("whole").expect("saved").file("work.bin").is_ok(), "{name}");
        std::fs::remove_file(&fault).expect("there");
        job.done().assert_same(&whole);
    }
}

/// A judge that answers with at most `tokens` tokens.
fn judge(prompt: &str, pattern: &str, tokens: usize) -> String {
    format!(
        "reward.judge={{ dir = \"model\", prompt = '{prompt}', pattern = '{pattern}', tokens_max = {tokens}, weight = 0.5 }}"
    )
}

const JUDGED: &str = "{prompt}{response} of {label}: ";

#[test]
fn a_judge_scores_equally_on_any_layout_and_an_answer_without_a_score_is_a_failure() {
    let of = |name: &str, pattern: &str, prompt: &str| job(name, judge(prompt, pattern, 24)).with("eval.every_steps=2");
    let digit = "[0-9]";
    let drops = |name: &str| of(name, digit, JUDGED).with("reward.on_failure=drop");
    let alone = drops("judge-1").done();
    assert!(alone.numbers("reward_std")[0] > 0.0 && alone.numbers("eval_samples")[0] > 0.0);
    drops("judge-2").on(2).done().assert_same(&alone);
    drops("judge-placed").placed(&[("actor reference", 1), ("critic reward", 1)]).done().assert_same(&alone);
    // These layouts sum gradients in another order, so only the first step has the same weights.
    let first = |job: &Job| job.rollouts()["step_000001"]["score"].clone();
    for (name, layout) in [("judge-tensor", "mesh.tensor=2"), ("judge-zero", "mesh.zero=3")] {
        let job = drops(name).on(2).with(layout).with("gradient.order=fast job.steps=1").done();
        assert!(first(&job) == first(&alone), "{layout}: {:?}, alone {:?}", first(&job), first(&alone));
    }
    of("judge-none", "never said", JUDGED)
        .run()
        .assert(75, &["reward.judge: \"model\" failed on a response to prompt ", "no score in its answer"]);
    of("judge-none", digit, JUDGED).with("reward.on_failure=drop").done().assert_same(&alone);
    let long = "{prompt}".repeat(100) + "{response}";
    of("judge-long", digit, &long)
        .run()
        .assert(75, &["reward.judge: \"model\" failed on a response to prompt ", "its context is 256"]);
    of("judge-field", digit, "{response}{nosuch}")
        .run()
        .assert(2, &["prompt has the field {nosuch}, but rows have no such field"]);
    of("judge-blind", digit, "{prompt}").run().assert(2, &["prompt must contain {response}"]);
}

/// A reward that is called when a rank's decoding has ended, before the judge begins. Its third call stops the trainer
/// if the file `asks` exists.
const ASKS: &str = r#"
import os, signal
calls = 0
def trainer():
    pid = os.getppid()
    while os.path.basename(os.readlink(f"/proc/{pid}/exe")) != "rlhf-hpc":
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    return pid
def reward_func(queries, prompts, labels, **kwargs):
    global calls
    calls += 1
    if calls == 3 and os.path.exists("asks"):
        os.kill(trainer(), signal.SIGTERM)
    return [1.0] * len(queries)
"#;

#[test]
fn a_judge_that_is_interrupted_loses_no_response_and_the_same_command_resumes() {
    let dir = reward("judge-stops");
    std::fs::write(dir.join("reward.py"), ASKS).expect("writes");
    let sets = "rollout.batch_max=1 eval.every_steps=1 checkpoint.every_steps=0 reward.on_failure=drop";
    let of = |name: &str| job(name, judge(JUDGED, "[0-9]", 200)).set(python(&dir, 0)).with(sets);
    let whole = of("judge-whole").done();
    let asks = dir.join("asks");
    let job = of("judge-stops").on(2);
    let stopped = || {
        job.run().assert(85, &["stopped at step ", "SIGTERM"]);
        newest(&job.checkpoints()).expect("whole").expect("saved")
    };
    std::fs::write(&asks, "").expect("writes");
    // The first evaluation makes two calls before: for greedy and for sampled responses.
    let work = stopped().file("work.bin").expect("the judge is part of the step");
    assert_eq!(work[..2], [0, 16], "all responses are finished, none is learned from");
    // The step and the greedy responses make one call each before.
    assert!(stopped().manifest.state["run"]["eval_due"] == true, "the judge is part of the evaluation");
    std::fs::remove_file(&asks).expect("there");
    job.done().assert_same(&whole);
}

#[test]
fn a_password_in_a_url_is_used_but_nothing_that_a_run_writes_or_prints_contains_it() {
    let server = Server::start();
    let url = server.url("right").replace("http://", "http://someone:PASSWORD@") + "?key=TOKEN";
    let job = |name: &str, url: &str| {
        job(name, format!("reward.http=\"{url}\"")).with("job.steps=1 metrics.tensorboard=true")
    };
    let made = job("secret", &url);
    let ended = made.run();
    assert!(!format!("{}{}", ended.stdout, ended.stderr).contains("PASSWORD"), "{}", ended.stderr);
    ended.assert(0, &["http://***:***@127.0.0.1"]);
    let mut dirs = vec![made.dir.clone()];
    let mut files = 0;
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() && !path.is_symlink() {
                dirs.push(path);
            } else if path.is_file() {
                let bytes = std::fs::read(&path).expect("reads");
                let has = |secret: &[u8]| bytes.windows(secret.len()).any(|window| window == secret);
                assert!(!has(b"PASSWORD") && !has(b"TOKEN") && !has(b"someone"), "{}", path.display());
                files += 1;
            }
        }
    }
    assert!(files > 10, "{files} files");
    let failing = job("secret-500", &url.replace("right", "500")).with("reward.retries=0").run();
    assert!(!failing.stderr.contains("PASSWORD"), "{}", failing.stderr);
    failing.assert(75, &["error: ", "/500?key=***: it answered 500"]);
    assert!(failing.stderr.contains("http://***:***@127.0.0.1"), "{}", failing.stderr);
    // The recorded job cannot run: the secret is missing.
    job("secret-copied", "http://***:***@127.0.0.1:1/right")
        .run()
        .assert(2, &["has *** in place of a secret", "header_env"]);
}

#[test]
fn a_dry_run_reports_an_unreachable_server() {
    let url = Server::start().url("right");
    let dry = |source: String| job("dead", source).with("reward.retries=0").dry().run();
    dry(format!("reward.http=\"{url}\"")).assert(75, &["reward.http = ", &url, "does not accept connections"]);
    dry(format!("reward.environment=\"{url}\"")).assert(75, &["reward.environment = ", &url]);
}

/// A self-signed certificate for localhost, with its key.
fn certificate(dir: &Path) -> PathBuf {
    let [key, pem] = ["key.pem", "server.pem"].map(|name| dir.join(name));
    // The command of `rlhf-hpc help services`.
    let line = "req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=localhost -addext subjectAltName=DNS:localhost \
                -addext basicConstraints=critical,CA:FALSE";
    let mut openssl = Command::new("openssl");
    let made = openssl.args(line.split_whitespace()).arg("-keyout").arg(&key).arg("-out").arg(&pem).output();
    let made = made.expect("openssl is on PATH (Debian: openssl)");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let both = [&key, &pem].map(|path| std::fs::read(path).expect("reads")).concat();
    std::fs::write(&pem, both).expect("writes");
    pem
}

#[test]
fn a_service_with_a_trusted_certificate_scores_and_another_one_ends_the_run_before_its_first_step() {
    let dir = reward("tls");
    let pem = certificate(&dir);
    let server = Server::with(&[&pem]);
    let url = server.url("right").replace("http://127.0.0.1", "https://localhost");
    // A directory with a certificate does not make up for a missing file.
    let more = dir.join("more");
    std::fs::create_dir(&more).and_then(|()| std::fs::copy(&pem, more.join("server.pem"))).expect("writes");
    let run = |name: &str, url: &str, trusted: &Path| {
        let job = job(name, format!("reward.http={{ url = \"{url}\", name = \"reward_func\" }}"));
        let mut command = job.with("job.steps=1").command();
        command.env("SSL_CERT_FILE", trusted).env_remove("SSL_CERT_DIR");
        if name == "tls-dir" {
            command.env("SSL_CERT_DIR", &more);
        }
        Running::new(command).end()
    };
    run("tls", &url, &pem).assert(0, &[]);
    let unknown = certificate(&reward("tls-other"));
    let without = Server::start();
    let plain = without.url("right").replace("http:", "https:");
    for (name, url, trusted, why) in [
        ("tls-unknown", &url, &unknown, "is not trusted: invalid peer certificate: BadSignature"),
        ("tls-host", &url.replace("localhost", "127.0.0.1"), &pem, "certificate not valid for name \"127.0.0.1\""),
        ("tls-plain", &plain, &pem, "is not trusted: received corrupt message"),
        ("tls-nothing", &url, &dir.join("missing.pem"), "missing.pem"),
        ("tls-dir", &url, &dir.join("missing.pem"), "missing.pem"),
    ] {
        run(name, url, trusted).assert(2, &["error: ", why, "hint: export SSL_CERT_FILE=FILE"]);
    }
}

#[test]
fn a_run_that_mostly_waits_for_rewards_names_the_keys_that_help() {
    let dir = reward("slow");
    let slow = REWARD.replace("open('called', 'w').close()", "time.sleep(0.3)");
    std::fs::write(dir.join("reward.py"), slow).expect("writes");
    let ended = job("slow", python(&dir, 1)).run();
    assert_eq!(ended.stderr.matches("was spent waiting for rewards").count(), 1, "{}", ended.stderr);
    ended.assert(0, &["raise reward.workers, raise batch in [[reward.python]]"]);
}
