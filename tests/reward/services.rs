//! Requests to functions and services: their contents, their recipients, and the handling of requests without a good
//! answer.

use crate::reward::python::{Job, says, scores};
use crate::reward::server::Server;
use crate::reward::{comes_true, config, prompt, response};
use rlhf_hpc::error::{Kind, Result};
use rlhf_hpc::experience::{Response, RowFields};
use rlhf_hpc::reward::{Reward, RewardContext, Scored};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn at(reward: &str, more: &str) -> Reward {
    let retries = if more.contains("retries") { "" } else { "retries = 0\n" };
    let toml = format!("http = {reward}\n{retries}{more}");
    Reward::new(&config(&toml), Path::new("."), &RewardContext::default()).unwrap_or_else(|e| panic!("{toml}: {e}"))
}

fn score(reward: &mut Reward, texts: &[&str]) -> Result<Vec<Scored>> {
    let prompts: Vec<_> = (0..texts.len() as u64).map(|id| prompt(id, "1+1=", "2")).collect();
    let responses: Vec<Response> = texts.iter().map(|text| response(text, 1)).collect();
    reward.score(&prompts.iter().collect::<Vec<_>>(), &responses.iter().collect::<Vec<_>>())
}

/// Actions of a Python function on a bad response, one of each kind (python.rs has all), and the reason in the message.
const PYTHON: &[(&str, &str)] =
    &[("time.sleep(1000)", "no answer within 3 s"), ("raise ValueError('out of tea')", "ValueError: out of tea")];

/// Actions of a service, and the reason in the message.
const HTTP: &[(&str, &str)] = &[
    ("hang", "no answer within 3 s"),
    ("slow", "no answer within 3 s"),
    ("500", "it answered 500 Internal Server Error: out of tea"),
    ("400", "it answered 422 Unprocessable Entity: [2Jno such\tfield"),
    ("redirect", "with a redirect to /right, but redirects are not followed"),
    ("flood", "its answer exceeds the maximum size"),
    ("garbage", "its answer does not follow the protocol"),
    ("list", "its answer does not follow the protocol"),
    ("empty", "its answer does not follow the protocol"),
    ("nan", "its answer does not follow the protocol"),
    ("cut", ""),
    ("close", ""),
    ("nothing", "its answer has no \"rewards\""),
    ("more", "one number per response (got 2 for 1)"),
    ("huge", "out of the range of f32"),
    ("text", "reward 0 must be a number (got \"0.5\")"),
    ("null", "reward 0 must be a number (got null)"),
];

/// Checks a reward that fails on the response `bad`: the results of it and of others if failures drop, and if they
/// stop.
fn ends_as_declared(make: &dyn Fn(&str) -> Reward, what: &str, words: &str) {
    let scored = score(&mut make("on_failure = \"drop\""), &["1", "bad", "333"]).unwrap();
    let why = scored[1].failed.as_deref().unwrap_or_else(|| panic!("{what}: {scored:?}"));
    assert!(why.contains(words) && !why.is_empty(), "{what}: {why}");
    assert_eq!((scored[0].score, scored[2].score), (1.5, 3.5), "{what}");
    let mut reward = make("on_failure = \"stop\"");
    let error = score(&mut reward, &["1", "bad", "333"]).unwrap_err();
    assert_eq!((error.kind, error.exit_code()), (Kind::Service, 75), "{what}: {error}");
    says(&error, &["failed after 1 attempt: ", words]);
    assert!(error.message.chars().all(|c| !c.is_control() || matches!(c, '\n' | '\t')), "{what}: {:?}", error.message);
    assert_eq!(scores(&score(&mut reward, &["1", "22"]).unwrap()), [1.5, 2.5], "{what}: the next request");
}

#[test]
fn a_failure_is_handled_as_configured_and_does_not_change_other_scores() {
    let server = Server::start();
    // On a busy machine, a valid answer may take seconds.
    let limit = |words: &str| if words.contains("within 3 s") { "timeout_s = 3.0" } else { "timeout_s = 60.0" };
    std::thread::scope(|scope| {
        for &(fault, words) in PYTHON {
            scope.spawn(move || {
                let job = Job::new(&format!(
                    "import os, time\ndef f(completions, **kwargs):\n    if 'bad' in completions:\n        {fault}\n    \
                     return [len(c) + 0.5 for c in completions]"
                ));
                let limit = limit(words);
                let make = |more: &str| job.reward(&format!("python = \"reward.py\"\n{limit}\n{more}")).unwrap();
                ends_as_declared(&make, fault, words);
            });
        }
        for &(mode, words) in HTTP {
            let url = server.url(&format!("{mode}/bad"));
            let make = move |more: &str| at(&format!("\"{url}\""), &format!("{}\n{more}", limit(words)));
            scope.spawn(move || ends_as_declared(&make, mode, words));
        }
    });
}

#[test]
fn a_service_gets_the_columns_of_rows_and_may_answer_with_logs() {
    let server = Server::start();
    let rows = [json!({"level": 7, "labels": "own", "task": "math"}), json!({"level": 8})];
    let columns = ["level", "labels", "task"].map(String::from).to_vec();
    let rows = rows.map(|row| RowFields { columns: row.as_object().unwrap().clone(), ..RowFields::default() });
    let rows: rlhf_hpc::reward::Lookup = Arc::new(move |id| Ok(rows[id as usize].clone()));
    let context = RewardContext { rows: Some(rows), columns, ..RewardContext::default() };
    let of = |behaviour: &str| {
        let toml = format!("http = {{ url = \"{}\", batch = 2 }}", server.url(behaviour));
        score(&mut Reward::new(&config(&toml), Path::new("."), &context).unwrap(), &["a", "b"])
    };
    let scored = of("logs").unwrap();
    assert_eq!(scores(&scored), [7.0, 8.0]);
    let extra = json!({"level": 7.0, "one": 1.0, "scores": 7.0});
    assert_eq!(serde_json::to_value(&scored[0].extra).unwrap(), extra);
    let error = of("echo").unwrap_err();
    says(&error, &[r#"{"keys": ["labels", "level", "prompts", "query", "task"], "level": [7, 8]}"#]);
}

#[test]
fn several_servers_share_a_reward_and_one_answers_for_another_that_fails() {
    let server = Server::start();
    let urls = format!("{{ url = [\"{}\", \"{}\"] }}", server.url("500"), server.url("right"));
    let texts = ["1", "22", "333", "4444", "55555"];
    assert_eq!(scores(&score(&mut at(&urls, "retries = 1"), &texts).unwrap()), [1.5, 2.5, 3.5, 4.5, 5.5]);
}

#[test]
fn an_unreachable_server_is_named_at_the_start() {
    let url = Server::start().url("right");
    let toml = format!("http = \"{url}\"\nretries = 1");
    let error = Reward::new(&config(&toml), Path::new("."), &RewardContext::default()).unwrap_err();
    assert_eq!(error.exit_code(), 75);
    says(&error, &[&url, "does not accept connections (2 attempts): ", "refused"]);
}

#[test]
fn scores_do_not_depend_on_workers_batches_or_the_order_in_which_responses_end() {
    let server = Server::start();
    let job = Job::new("def f(completions, **kwargs):\n    return [len(c) + 0.5 for c in completions]");
    let prompts: Vec<_> = (0..10).map(|id| prompt(id, "1+1=", "2")).collect();
    let responses: Vec<_> = (0..10).map(|i| response(&"x".repeat(i), 1)).collect();
    for (workers, batch) in [(1, 1), (2, 1), (1, 4), (2, 4), (2, 0)] {
        let http = format!("{{ url = \"{}\", batch = {batch}, name = \"f\" }}", server.url("right"));
        let python = format!("{{ file = \"reward.py\", batch = {batch} }}");
        for source in [format!("python = {python}"), format!("http = {http}")] {
            let toml = format!("{source}\nworkers = {workers}");
            let mut reward = Reward::new(&config(&toml), job.dir.path(), &RewardContext::default()).unwrap();
            let first = reward.expect(10);
            for i in [9, 0, 4, 8, 1, 5, 2, 6, 3, 7] {
                reward.push(first + i, &prompts[i], &responses[i]);
            }
            reward.flush();
            while !reward.wait(Instant::now() + Duration::from_secs(1)) {}
            let scored = reward.finish().unwrap();
            let want: Vec<f32> = (0..10).map(|i| i as f32 + 0.5).collect();
            assert_eq!(scores(&scored), want, "{toml}");
        }
    }
}

#[test]
fn a_response_is_scored_while_others_are_unfinished_and_a_batch_when_it_is_complete() {
    let job = Job::new(
        "def f(completions, **kwargs):\n    open('-'.join(completions), 'w').close()\n    return [1.0] * len(completions)",
    );
    let python = |batch| format!("python = {{ file = \"reward.py\", batch = {batch} }}");
    let [a, b, c] = ["a", "b", "c"].map(|text| response(text, 1));
    let prompt = prompt(0, "", "");
    let mut reward = job.reward(&python(1)).unwrap();
    let first = reward.expect(3);
    reward.push(first + 1, &prompt, &b);
    comes_true("b is scored alone", || job.path("b").exists());
    assert!(!reward.wait(Instant::now()));
    // Pending requests are dropped, as when a run stops. Then another round begins.
    reward.cancel();
    let mut reward = job.reward(&python(2)).unwrap();
    let first = reward.expect(3);
    for (place, response) in [(1, &b), (2, &c), (0, &a)] {
        reward.push(first + place, &prompt, response);
    }
    reward.flush();
    while !reward.wait(Instant::now() + Duration::from_secs(1)) {}
    assert_eq!(scores(&reward.finish().unwrap()), [1.0; 3]);
    assert!(job.path("a-b").exists() && !job.path("a").exists(), "neighbours are in one call");
}

#[test]
fn a_service_gets_log_probabilities_if_its_table_sets_it() {
    let server = Server::start();
    let table = |more: &str| format!("{{ url = \"{}\"{more} }}", server.url("logprobs"));
    let known = Response { logprobs: vec![-0.5, -0.25], ..response("ab", 2) };
    let prompt = prompt(0, "1+1=", "2");
    let scored = at(&table(", logprobs = true"), "").score(&[&prompt], &[&known]).unwrap();
    assert_eq!(scores(&scored), [-0.75]);
    says(&at(&table(""), "").score(&[&prompt], &[&known]).unwrap_err(), &["one number per response (got 0 for 1)"]);
}

#[test]
fn workers_share_the_work() {
    // Each call ends when both processes have one.
    let job = Job::new(
        "import os, time\ndef f(completions, **kwargs):\n    open(f'pid-{os.getpid()}', 'w').close()\n    \
         while sum(name.startswith('pid-') for name in os.listdir()) < 2: time.sleep(0.01)\n    return [1.0]",
    );
    let scored = score(&mut job.reward("python = \"reward.py\"\nworkers = 2").unwrap(), &["a", "b", "c"]).unwrap();
    assert_eq!(scores(&scored), [1.0; 3]);
}

#[test]
fn a_reward_that_never_answers_is_not_retried_for_ever() {
    let server = Server::start();
    let url = format!("\"{}\"", server.url("hang/bad"));
    let mut reward = at(&url, "workers = 20\ntimeout_s = 2.0\non_failure = \"drop\"");
    let scored = score(&mut reward, &["bad"; 60]).unwrap();
    let of = |words: &str| {
        scored.iter().filter(|scored| scored.failed.as_ref().is_some_and(|why| why.contains(words))).count()
    };
    let [late, spared] = [of("no answer within 2 s"), of("no further requests are sent")];
    assert!(late + spared == 60 && late < 40, "{late} late, {spared} not asked");
    assert_eq!(scores(&score(&mut reward, &["1", "22"]).unwrap()), [1.5, 2.5], "the next step");
}
