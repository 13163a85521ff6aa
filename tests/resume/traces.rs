//! Traces of steps: what they contain, when they are written, and that a run computes the same without them.

use crate::resume::job::Job;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// A complete event: rank, row, begin and end in ns.
struct Event {
    rank: u64,
    lane: u64,
    time: (u64, u64),
    json: Value,
}

impl Event {
    fn text(&self, key: &str) -> &str {
        self.json[key].as_str().unwrap_or_default()
    }
}

fn files(job: &Job) -> BTreeSet<String> {
    let Ok(entries) = std::fs::read_dir(job.dir.join("traces")) else { return BTreeSet::new() };
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

fn events(job: &Job, step: u64) -> Vec<Event> {
    let trace: Value = serde_json::from_slice(&job.read(&format!("traces/step-{step}.json"))).expect("JSON");
    assert_eq!(trace["otherData"]["step"], step);
    let all = trace["traceEvents"].as_array().expect("a list").iter();
    let ns = |value: &Value| (value.as_f64().expect("a time") * 1e3).round() as u64;
    let event = |json: &Value| {
        let [pid, lane] = ["pid", "tid"].map(|key| json[key].as_u64().expect("a number"));
        let rank = pid - 1;
        let start = ns(&json["ts"]);
        Event { rank, lane, time: (start, start + ns(&json["dur"])), json: json.clone() }
    };
    all.filter(|json| json["ph"] == "X").map(event).collect()
}

fn spans_of_a_row_are_in_order_and_nest(events: &[Event]) {
    // Perfetto joins rows of the same number, and has a use of its own for 0.
    let ranks: BTreeSet<(u64, u64)> = events.iter().map(|event| (event.lane, event.rank)).collect();
    let lanes: BTreeSet<u64> = ranks.iter().map(|(lane, _)| *lane).collect();
    assert!(lanes.len() == ranks.len() && !lanes.contains(&0), "{ranks:?}");
    let mut open: BTreeMap<(u64, u64), Vec<(u64, u64)>> = BTreeMap::new();
    let mut last: BTreeMap<(u64, u64), u64> = BTreeMap::new();
    for Event { rank, lane, time: (start, end), json } in events {
        let row = (*rank, *lane);
        assert!(last.insert(row, *start).is_none_or(|last| last <= *start), "{json}: times ascend");
        let outer = open.entry(row).or_default();
        outer.retain(|(_, until)| until > start);
        assert!(outer.iter().all(|(_, until)| end <= until), "{json} ends after a span around it");
        outer.push((*start, *end));
    }
}

fn collectives_are_on_all_ranks_of_their_group_at_the_same_time(events: &[Event]) {
    let mut calls: BTreeMap<(&str, u64), Vec<&Event>> = BTreeMap::new();
    for event in events.iter().filter(|event| event.text("cat") == "collective") {
        let group = event.json["args"]["group"].as_str().expect("a group");
        calls.entry((group, event.json["args"]["call"].as_u64().expect("a number"))).or_default().push(event);
    }
    assert!(calls.len() > 50, "{} collectives", calls.len());
    assert!(calls.keys().any(|(group, _)| group.starts_with("zero: ranks 0 to 1")), "{:?}", calls.keys());
    for ((group, number), found) in calls {
        let ranks: Vec<u64> = found.iter().map(|event| event.rank).collect();
        let names: BTreeSet<&str> = found.iter().map(|event| event.text("name")).collect();
        assert!(ranks == [0, 1] && names.len() == 1, "{group}, call {number}: {names:?} on {ranks:?}");
        let entered = found.iter().map(|event| event.time.0).max();
        let left = found.iter().map(|event| event.time.1).min();
        // The first rank of a broadcast may leave it before others enter.
        assert!(names.contains("broadcast_bytes") || entered <= left, "{group}, call {number}: {names:?}");
    }
}

fn each_rank_has_each_kind_of_span(events: &[Event]) {
    for rank in [0, 1] {
        let has = |category: &str, name: &str, labels: &[&str]| {
            let is_it = |event: &&Event| (event.rank, event.text("cat"), event.text("name")) == (rank, category, name);
            let found = events.iter().find(is_it).unwrap_or_else(|| panic!("rank {rank} has no {category} {name}"));
            for label in labels {
                assert!(found.json["args"][label].is_u64(), "{}", found.json);
            }
        };
        for phase in ["rollout", "reward", "score", "train", "evaluation", "checkpoint"] {
            has("phase", phase, &[]);
        }
        has("pass", "micro-batch", &["tokens", "rows"]);
        for pass in ["prefill", "decode", "forward", "backward"] {
            has("pass", pass, &["tokens", "sequences"]);
        }
        has("pass", "optimizer step", &[]);
        has("layer", "layer", &["layer", "tokens"]);
        for operation in ["matmul", "matmul dx", "matmul dW"] {
            has("operation", operation, &["m", "n", "k"]);
        }
        for operation in ["attention", "attention backward"] {
            has("operation", operation, &["tokens", "sequences", "heads", "head_dim"]);
        }
        has("collective", "all_reduce_max_f64", &["bytes", "call"]);
        has("reward", "rule regex", &["responses"]);
        has("wait", "rewards", &[]);
        let is_file =
            |event: &Event| event.rank == rank && event.text("cat") == "io" && event.text("name").starts_with("write ");
        assert!(events.iter().any(is_file), "rank {rank} writes its part of the checkpoint");
    }
}

#[test]
fn a_traced_run_computes_the_same_and_its_trace_has_the_work_of_all_ranks() {
    // Each rank samples its share.
    let sets = "job.steps=3 eval.every_steps=2 rollout.work_stealing=false";
    let plain = Job::ppo("untraced").on(2).with(sets).done();
    let traced = Job::ppo("traced").on(2).with(sets);
    let ended = traced.clone().with("metrics.trace_steps=[2,9]").run();
    ended.assert(0, &["metrics.trace_steps: the run has steps 1 to 3, and no step 9", "trace of step 2: "]);
    traced.assert_same(&plain);
    assert!(!plain.dir.join("traces").exists(), "no trace without the key");
    assert_eq!(files(&traced), ["step-2.json".to_string()].into());
    let events = events(&traced, 2);
    spans_of_a_row_are_in_order_and_nest(&events);
    collectives_are_on_all_ranks_of_their_group_at_the_same_time(&events);
    each_rank_has_each_kind_of_span(&events);
    let [page, without] = [&traced, &plain].map(|job| String::from_utf8(job.read("report.html")).expect("text"));
    for words in ["class=\"columns timeline\"", ">rank 1</text>", "<th>critical path</th>", "<th>waits most for</th>"] {
        assert!(page.contains(words) && !without.contains(words), "{words}");
    }
    let again = traced.rewound("traced-again", 1).done();
    assert_eq!(files(&again), BTreeSet::new(), "a resumed run removes the traces of later steps");
}

#[test]
fn a_file_requests_a_trace_of_the_next_step() {
    let job = Job::ppo("trace-request").with("job.steps=3");
    std::fs::create_dir_all(&job.dir).expect("a directory");
    let request = job.dir.join("trace.request");
    std::fs::write(&request, "").expect("writes");
    // It is found after the first step.
    job.run().assert(0, &["trace of step 2: "]);
    assert!(!request.exists() && files(&job) == ["step-2.json".to_string()].into());
    spans_of_a_row_are_in_order_and_nest(&events(&job, 2));
}
