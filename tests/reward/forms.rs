//! The signatures of other frameworks, asynchronous functions, and the log.

use crate::reward::python::{Job, says, score, scores};
use crate::reward::{config, prompt, response};
use rlhf_hpc::experience::{Prompt, Response, RowFields};
use rlhf_hpc::reward::environment::{Environment, Turn, Turns};
use rlhf_hpc::reward::{Notes, Reward, RewardContext};
use rlhf_hpc::sys::bounded_log::BoundedLog;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};

const ASYNC: &str = r"
import asyncio, time
calls = 0
async def f(completions, **kwargs):
    global calls
    calls += 1
    text = completions[0]
    if text == 'blocks': time.sleep(1000)
    if text == 'hangs': await asyncio.sleep(1000)
    if text == 'raises': raise RuntimeError('out of tea')
    await asyncio.sleep(0.2)
    return [len(text) + 0.5]
";

/// The scores of `texts` in single calls, and the seconds that they took.
fn timed(job: &Job, more: &str, texts: &[&str]) -> (Vec<Result<f32, String>>, f64) {
    let mut reward = job.reward(&format!("python = \"reward.py\"\n{more}")).unwrap();
    let prompts: Vec<Prompt> = (0..texts.len() as u64).map(|id| prompt(id, "1+1=", "2")).collect();
    let responses: Vec<Response> = texts.iter().map(|text| response(text, 1)).collect();
    let start = Instant::now();
    let scored = reward.score(&prompts.iter().collect::<Vec<_>>(), &responses.iter().collect::<Vec<_>>()).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    (scored.into_iter().map(|scored| scored.failed.map_or(Ok(scored.score), Err)).collect(), seconds)
}

#[test]
fn calls_of_an_asynchronous_function_are_awaited_together_in_the_order_of_responses() {
    let job = Job::new(ASYNC);
    let texts: Vec<String> = (0..64).map(|i| "x".repeat(i % 7)).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let (found, seconds) = timed(&job, "", &texts);
    let want: Vec<_> = texts.iter().map(|text| Ok(text.len() as f32 + 0.5)).collect();
    assert_eq!(found, want);
    // One after the other they would take 12.8 s.
    assert!(seconds < 6.0, "{seconds} s");
}

#[test]
fn a_failed_awaited_call_does_not_change_other_scores() {
    let job = Job::new(ASYNC);
    for (bad, words) in [
        ("raises", "RuntimeError: out of tea"),
        ("hangs", "no answer within 2 s while scoring"),
        ("blocks", "no answer within 2 s while scoring"),
    ] {
        let (found, _) = timed(&job, "timeout_s = 2.0\non_failure = \"drop\"", &["a", "bb", bad, "dddd"]);
        let good: Vec<_> = [0, 1, 3].iter().map(|&i: &usize| found[i].clone()).collect();
        assert_eq!(good, [Ok(1.5), Ok(2.5), Ok(4.5)], "{bad}");
        assert!(found[2].as_ref().is_err_and(|why| why.contains(words)), "{bad}: {found:?}");
    }
}

#[test]
fn turns_of_an_asynchronous_environment_are_awaited_together() {
    let dir = tempfile::tempdir().unwrap();
    let code = "import asyncio\nclass E:\n    async def step(self, text):\n        await asyncio.sleep(0.2)\n        \
                return text + '!', len(text), False\n";
    std::fs::write(dir.path().join("env.py"), code).unwrap();
    let config = config("environment = \"env.py\"");
    let mut environment =
        Environment::new(&config, &config.environment[0], dir.path(), &RewardContext::default()).unwrap();
    let start = Instant::now();
    for episode in 0..48 {
        let turn = Turn { text: "x".repeat(episode), tokens: vec![1], finish: "stop", feedback: None };
        let prompt = prompt(3, "1+1=", "2");
        environment.push(Turns { round: 1, episode, prompt, sample: 0, turns: vec![turn], turns_max: 8 });
    }
    let mut replies = Vec::new();
    while replies.len() < 48 {
        replies.extend(environment.arrived(Instant::now() + Duration::from_secs(1)).unwrap());
    }
    assert!(replies.iter().all(|(place, reply)| reply.reward == Some(*place as f64)));
    assert!(start.elapsed().as_secs_f64() < 5.0, "{:?}", start.elapsed());
}

fn context(columns: &[serde_json::Value]) -> RewardContext {
    let rows: Vec<RowFields> = columns
        .iter()
        .map(|columns| RowFields { columns: columns.as_object().cloned().unwrap(), ..RowFields::default() })
        .collect();
    let names = rows[0].columns.keys().cloned().collect();
    let rows: rlhf_hpc::reward::Lookup = Arc::new(move |id| Ok(rows[id as usize].clone()));
    RewardContext { rows: Some(rows), columns: names, steps: 9, ..RewardContext::default() }
}

#[test]
fn every_signature_of_trl_and_verl_gets_its_arguments() {
    let source = |name: &str| json!({"data_source": name, "extra_info": {"index": 3}});
    let context = context(&[source("first"), source("second")]);
    for (code, want) in [
        ("def reward_func(completion_ids, **kwargs):\n    return [len(ids) for ids in completion_ids]", [1.0, 1.0]),
        ("def f(completion_ids):\n    return [ids[0] for ids in completion_ids]", [7.0, 7.0]),
        ("def f(**kwargs):\n    return [float(c) for c in kwargs['completions']]", [2.0, 6.0]),
        ("def f(labels, **kwargs):\n    return [float(x) for x in labels]", [2.0, 5.0]),
        (
            "def f(completions, trainer_state, **kwargs):\n    state = trainer_state\n    \
             return [state.global_step / state.max_steps] * len(completions)",
            [4.0 / 9.0; 2],
        ),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    \
             return float(solution_str == ground_truth) + len(data_source) * extra_info['index']",
            [16.0, 18.0],
        ),
        (
            "async def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):\n    \
             return {'score': solution_str == ground_truth, 'length': len(solution_str)}",
            [1.0, 0.0],
        ),
        ("def helper(**kwargs): pass\ndef f(prompts, completions):\n    return [1, 2]", [1.0, 2.0]),
    ] {
        let mut reward = Job::new(code).in_run("", &context).unwrap_or_else(|e| panic!("{code}: {e}"));
        reward.steps_done = 4;
        let found = scores(&score(&mut reward).unwrap_or_else(|e| panic!("{code}: {e}")));
        assert_eq!(found, want, "{code}");
    }
    let job = Job::new("def compute_score(solution_str, ground_truth, unknown):\n    return 1");
    says(&job.usage_error(""), &["no value for its argument 'unknown'", "solution_str"]);
    let job = Job::new("def compute_score(solution_str, ground_truth):\n    return {'acc': 1}");
    says(&job.service_error(""), &["1 attempt: ", "a dict with 'score' (got {'acc': 1})"]);
}

#[test]
fn only_a_function_that_names_log_probabilities_gets_them() {
    let asks = |arguments: &str, body: &str| format!("def {arguments}:\n    return {body}\n");
    for (code, want) in [
        (asks("f(completions, logprobs)", "[sum(one) for one in logprobs]"), [-0.75, 0.0]),
        (asks("reward_func(queries, prompts, labels, logprobs)", "[sum(one) for one in logprobs]"), [-0.75, 0.0]),
        (asks("compute_score(solution_str, ground_truth, logprobs)", "sum(logprobs)"), [-0.75, 0.0]),
        (asks("f(completions, **kwargs)", "[float('logprobs' in kwargs)] * len(completions)"), [0.0, 0.0]),
    ] {
        let mut reward = Job::new(&code)
            .in_run("python = { file = \"reward.py\", batch = 0 }", &context(&[json!({}), json!({})]))
            .unwrap();
        let prompts = [prompt(0, "1+1=", "2"), prompt(1, "2+3=", "5")];
        let known = Response { logprobs: vec![-0.5, -0.25], ..response("2", 2) };
        let scored = reward.score(&[&prompts[0], &prompts[1]], &[&known, &response("6", 1)]).unwrap();
        assert_eq!(scores(&scored), want, "{code}");
    }
}

#[test]
fn metrics_of_a_trl_function_are_logged_and_text_is_reported_once_as_not_kept() {
    let job = Job::new(
        "def f(completions, log_extra, log_metric, **kwargs):\n    log_extra('level', [1, 2])\n    \
         log_extra('answer', list(completions))\n    log_metric('share', 0.25)\n    return [1, 1]",
    );
    let notes = Notes::default();
    let mut reward: Reward =
        job.in_run("", &RewardContext { notes: notes.clone(), ..RewardContext::default() }).unwrap();
    for _ in 0..2 {
        let scored = score(&mut reward).unwrap();
        assert_eq!(serde_json::to_value(&scored[1].extra).unwrap(), json!({"level": 2.0, "share": 0.25}));
    }
    let note = reward.next_note().unwrap();
    assert!(note.contains("reward.python reward.py: values of 'answer'") && note.contains("not kept"), "{note}");
    assert_eq!(notes.next(), None);
}

#[test]
fn the_output_of_a_function_goes_to_its_log() {
    let job = Job::new(
        "print('ready')\ndef f(completions, **kwargs):\n    print('asked', len(completions))\n    return [0, 0]",
    );
    let log = job.path("reward.log");
    let opened = Some(BoundedLog::open(&log).unwrap());
    let mut reward = job.in_run("", &RewardContext { log: opened, ..RewardContext::default() }).unwrap();
    score(&mut reward).unwrap();
    drop(reward);
    assert_eq!(std::fs::read_to_string(log).unwrap(), "ready\nasked 2\n");
}
