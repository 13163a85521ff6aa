//! Evaluation of several sets with several samples: in a PPO job, and in jobs that only evaluate models and checkpoints
//! on any ranks.

use super::job::{Job, place};
use crate::cli::command;
use rlhf_hpc::metrics::eval_rows::{EvalAnswer, EvalResponses, EvalRow};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Once;

/// A job with two sets besides the eval split, one of them with labels of its own. All answers are recorded.
fn evaluated(name: &str) -> Job {
    static ROWS: Once = Once::new();
    ROWS.call_once(|| {
        let rows = ["f", "40"].map(|right| format!(r#"{{"prompt": "{right} is ", "right": "{right}"}}"#));
        std::fs::write(place().join("hard.jsonl"), rows.join("\n")).expect("writes");
    });
    let sets = r#"[{ name = "hard", prompts = "hard.jsonl", label_key = "right" }, { name = "again", prompts = "questions", split = "eval" }]"#;
    Job::ppo(name)
        .with("job.steps=2 data.label_key=answer eval.every_steps=2 metrics.eval_rows_max=100")
        .with("eval.samples_per_prompt=4 eval.temperature=0.9 eval.pass_at=[1,2,4]")
        .set(format!("data.eval_sets={sets}"))
}

/// The numbers of the evaluation after `step`.
fn numbers(job: &Job, step: u64) -> Map<String, Value> {
    let line = job.timeless_metrics().into_iter().find(|line| line["step"] == step).expect("a line");
    line.into_iter().filter(|(key, _)| key.starts_with("eval")).collect()
}

#[test]
fn an_evaluation_job_has_the_metrics_of_the_training_job_at_its_step_on_any_ranks() {
    let ppo = evaluated("eval-ppo").done();
    for (name, ranks, model, step) in [
        ("model", 0, "model.actor=model", 0),
        ("checkpoint", 0, "model.actor=runs/eval-ppo/checkpoints/step-2", 2),
        ("run", 2, "model.actor=runs/eval-ppo", 2),
        ("tensor", 2, "model.actor=runs/eval-ppo mesh.tensor=2", 2),
        ("sharded", 2, "model.actor=runs/eval-ppo/checkpoints mesh.zero=3", 2),
    ] {
        let alone = evaluated(&format!("eval-{name}")).with("job.kind=eval").with(model).on(ranks).done();
        assert_eq!(alone.metrics().len(), 1, "{name}");
        assert_eq!(numbers(&alone, step), numbers(&ppo, step), "{name}");
        assert_eq!(alone.eval_rows(), BTreeMap::from([(step, ppo.eval_rows().remove(&step).expect("rows"))]), "{name}");
        for none in ["checkpoints", "export", "rollouts"] {
            assert!(!alone.dir.join(none).exists(), "{name}: {none}");
        }
    }
    let keys = numbers(&ppo, 2);
    for key in ["eval_pass_at_2", "eval_avg_at_4", "eval_majority_at_4", "eval/hard/pass_at_4", "eval/again/samples"] {
        assert!(keys.contains_key(key), "{key} is not in {keys:?}");
    }
}

#[test]
fn an_evaluation_job_of_a_checkpoint_takes_frozen_weights_from_the_base_model_of_its_job() {
    for (what, tuned, base, mesh) in [
        ("lora", "lora.rank=2 lora.train_also=[\"norm\"]", "", "mesh.tensor=2 mesh.zero=3"),
        ("nf4", "lora.rank=2", " model.quantize=nf4", "mesh.zero=3"),
        ("frozen", "model.freeze=[\"layers.0\"]", "", "mesh.tensor=2 mesh.zero=3"),
    ] {
        let ppo = evaluated(&format!("eval-of-{what}")).with(&format!("{tuned}{base}")).done();
        let run = format!("model.actor=runs/eval-of-{what}{base}");
        let of = |name: &str, sets: &str, ranks: usize| {
            evaluated(&format!("eval-{what}-{name}")).with("job.kind=eval").with(sets).on(ranks).done()
        };
        for (name, more, ranks) in [("run", "", 0), ("shared", mesh, 2)] {
            let sets = format!("{run} {more}");
            assert_eq!(numbers(&of(name, sets.trim_end(), ranks), 2), numbers(&ppo, 2), "{what}, {name}");
        }
        let mut models = vec![("whole", format!("model.actor=runs/eval-of-{what}/whole"))];
        let mut line = format!("export runs/eval-of-{what} --out runs/eval-of-{what}/whole");
        if what != "frozen" {
            line += " --merged";
            models.push(("adapter", format!("model.actor=model model.adapter=runs/eval-of-{what}/export{base}")));
            let twice = format!("job.kind=eval model.adapter=runs/eval-of-{what}/export {run}");
            evaluated("eval-twice").with(&twice).run().refused(2, &["model.adapter must be empty with "]);
        }
        command::run(place(), &line.split(' ').collect::<Vec<_>>()).well();
        for (name, model) in models {
            // The random numbers of a model are those of step 0.
            let greedy = |(job, step): (&Job, u64)| {
                let rows = job.eval_rows().remove(&step).expect("rows");
                answers(&rows, "").iter().map(|row| row[0].response.clone()).collect::<Vec<_>>()
            };
            let [mine, saved] = [(&of(name, &model, 0), 0), (&ppo, 2)].map(greedy);
            assert_eq!(mine, saved, "{what}, {name}");
        }
    }
}

#[test]
fn beam_search_replaces_greedy_responses_and_equals_generate_on_any_ranks() {
    let of = |name: &str, ranks: usize| {
        let sets =
            "job.kind=eval data.label_key=answer metrics.eval_rows_max=100 eval.beams=3 rollout.stop_token_ids=[]";
        let job = Job::ppo(name).with(sets).with("model.actor=model rollout.batch_max=4").on(ranks).done();
        job.eval_rows().remove(&0).expect("an evaluation")
    };
    let rows = of("eval-beams", 0);
    assert_eq!(rows, of("eval-beams-2", 2));
    let prompts: Vec<String> = rows.iter().map(|row| json!({ "prompt": row.prompt }).to_string()).collect();
    std::fs::write(place().join("searched.jsonl"), prompts.join("\n")).expect("writes");
    let line = "generate --model model --input searched.jsonl --beams 3 --max-new-tokens 12";
    let searched = command::run(place(), &line.split(' ').collect::<Vec<_>>()).well();
    let searched = command::rows(&searched.stdout);
    assert_eq!(searched.len(), rows.len());
    for (of_eval, searched) in answers(&rows, "").iter().zip(&searched) {
        assert_eq!(of_eval[0].response, searched["text"].as_str().expect("a text"));
    }
}

/// The answers of the rows of a set.
fn answers<'a>(rows: &'a [EvalRow], of: &str) -> Vec<&'a [EvalAnswer]> {
    let of = |row: &'a EvalRow| match &row.responses {
        EvalResponses::Answers { set, answers, .. } if set == of => Some(&answers[..]),
        _ => None,
    };
    rows.iter().filter_map(of).collect()
}

#[test]
fn metrics_of_a_set_equal_those_computed_from_its_recorded_answers() {
    // A rule that some answers satisfy.
    let alone =
        evaluated("eval-numbers").with("job.kind=eval").set("reward.rule={kind=\"regex\",pattern=\"[0-9]\"}".into());
    let ended = alone.run().well();
    let (rows, line) = (alone.eval_rows().remove(&0).expect("rows"), numbers(&alone, 0));
    let of_line = |key: String| line[&key].as_f64().expect("a number");
    for (set, prefix, prompts) in [("", "eval_", 8), ("hard", "eval/hard/", 2), ("again", "eval/again/", 8)] {
        let rows = answers(&rows, set);
        assert_eq!(rows.len(), prompts, "{set}");
        let mean = |of: &dyn Fn(&[EvalAnswer]) -> f64| rows.iter().map(|row| of(row)).sum::<f64>() / rows.len() as f64;
        let close = |key: &str, expected: f64| {
            let found = of_line(format!("{prefix}{key}"));
            assert!((found - expected).abs() < 1e-12, "{prefix}{key}: {found}, needed {expected}");
        };
        let right = |answer: &EvalAnswer| f64::from(u8::from(answer.score >= 1.0));
        let drawn = |row: &[EvalAnswer]| row[1..].iter().map(right).collect::<Vec<_>>();
        close("accuracy_greedy", mean(&|row| right(&row[0])));
        close("avg_at_4", mean(&|row| drawn(row).iter().sum::<f64>() / 4.0));
        close("pass_at_1", mean(&|row| drawn(row).iter().sum::<f64>() / 4.0));
        close("pass_at_4", mean(&|row| drawn(row).iter().copied().fold(0.0, f64::max)));
        let pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)];
        close(
            "pass_at_2",
            mean(&|row| pairs.iter().map(|(a, b)| drawn(row)[*a].max(drawn(row)[*b])).sum::<f64>() / 6.0),
        );
        assert!(rows.iter().all(|row| row.len() == 5 && row[0].temperature == 0.0 && row[4].temperature == 0.9));
    }
    for words in ["  set ", "  eval split ", "  hard ", "pass@4", "majority@4"] {
        assert!(ended.stderr.contains(words), "{words:?} is not in:\n{}", ended.stderr);
    }
    let read = command::run(&alone.dir, &["samples", "."]).well();
    assert!(read.stdout.contains("18 held-out rows") && read.stdout.contains("set hard"), "{}", read.stdout);
    let page = String::from_utf8(alone.read("report.html")).expect("a text");
    assert!(page.contains("<th>hard</th>"), "the report has no table of sets");
}

#[test]
fn an_evaluation_job_is_planned_without_gradients_and_names_sets_it_cannot_evaluate() {
    let line = |more: &[&str]| {
        let sets = ["plan", "job.toml", "job.kind=eval", "data.prompts=[\"questions\"]"];
        command::run(place(), &[&sets, more].concat())
    };
    let plan = line(&[]).well().stdout;
    assert!(plan.contains("16 samples of") && plan.contains("responses to 8 prompts"), "{plan}");
    assert!(plan.contains("kv cache") && !plan.contains("gradients") && !plan.contains("optimizer state"), "{plan}");
    // Without other samples, the greedy answer counts as the sample.
    let greedy = Job::ppo("eval-greedy").with("job.kind=eval metrics.report=false").done();
    let line = numbers(&greedy, 0);
    assert_eq!(
        (&line["eval_pass_at_1"], &line["eval_avg_at_1"]),
        (&line["eval_accuracy_greedy"], &line["eval_accuracy_greedy"])
    );
    std::fs::write(place().join("none.jsonl"), "").expect("writes");
    for (sets, words) in [
        ("data.eval_sets=[{name=\"a\",prompts=\"none.jsonl\"}]", ["data.eval_sets, a", "has no rows"]),
        (
            "data.eval_sets=[{name=\"a\",prompts=\"questions\",split=\"tst\"}]",
            ["a: its split must name a split of the data (got \"tst\"", "eval, train"],
        ),
        ("model.actor=runs", ["model.actor", "runs"]),
    ] {
        Job::ppo("eval-refused").with("job.kind=eval").with(sets).run().refused(65, &words);
    }
}
