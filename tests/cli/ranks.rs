//! Errors under a launcher: said once, not once a rank, and every rank ends.

use super::command;
use super::fixture::Fixture;

#[test]
fn an_error_on_every_rank_is_said_once() {
    let fixture = Fixture::new();
    let run = |arguments: &[&str]| command::mpirun(fixture.root(), 2, arguments);
    for (arguments, code, words) in [
        (&["run", "job.toml", "ppo.kl_coeff=0.1"][..], 2, "unknown key `kl_coeff`"),
        (&["run", "job.toml", "data.prompt_split=dev"], 65, "data.prompt_split = \"dev\""),
        (&["run", "job.toml", "model.actor=nosuch"], 65, "nosuch"),
        (&["run", "job.toml", "job.dir=/proc/nosuch"], 74, "cannot create /proc/nosuch"),
        (&["nosuch.toml"], 2, "job file nosuch.toml does not exist"),
        (&["run", "job.toml", "--nonsense"], 2, "--nonsense"),
        (&["verify", "job.toml"], 2, "the verb `verify` is not in this release"),
        (&["logprobs", "--model", "nosuch", "--input", "rows.jsonl"], 65, "nosuch"),
    ] {
        run(arguments).refused(code, &[words]);
    }
    fixture.untouched();
    assert_eq!(run(&["--version"]).well().stdout.lines().count(), 1);
}

#[test]
fn a_mesh_that_needs_other_ranks_than_were_started_is_refused() {
    let fixture = Fixture::new();
    let job = |ranks, data| command::mpirun(fixture.root(), ranks, &["run", "job.toml", data]);
    job(2, "mesh.data=3").refused(2, &["needs 3 ranks, mpirun started 2"]).hinted("run with -n 3");
    let words = ["gradient.order = \"fixed\"", "3 data ranks", "power of two"];
    command::mpirun(fixture.root(), 3, &["run", "job.toml", "gradient.order=fixed"])
        .refused(2, &words)
        .hinted("1, 2, 4");
    let layout = |ranks, sets: &[&str]| command::mpirun(fixture.root(), ranks, &[&["run", "job.toml"], sets].concat());
    layout(3, &["mesh.tensor=3"]).refused(2, &["tensor = 3", "heads"]).hinted("tensor can be");
    let rollout = ["mesh.tensor=1", "rollout.tensor=2", "rollout.data=2"];
    layout(2, &rollout).refused(2, &["needs 4 ranks, the mesh has 2"]);
    for (key, words) in [("mesh.sequence=2", "2 sequence"), ("mesh.tensor=2", "2 tensor"), ("mesh.zero=2", "zero = 2")]
    {
        let words = ["gradient.order = \"fixed\"", words];
        layout(2, &["gradient.order=fixed", key]).refused(2, &words).hinted("gradient.order = \"fast\"");
    }
    fixture.untouched();
}

#[test]
fn a_dry_run_is_reported_once_for_all_ranks() {
    let fixture = Fixture::new();
    let ended = command::mpirun(fixture.root(), 2, &["run", "job.toml", "--dry-run"]).well();
    assert_eq!(ended.stderr.matches("ready to start").count(), 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("2 data x 1 pipeline"), "{}", ended.stderr);
    fixture.untouched();
}

#[test]
fn a_verb_for_one_process_works_once_under_a_launcher() {
    let fixture = Fixture::new();
    let shard = ["shard", "rows.jsonl", "--tokenizer", "model", "--out", "again", "--label-key", "answer"];
    let ended = command::mpirun(fixture.root(), 2, &[&shard[..], &["--split-field", "split"]].concat()).well();
    assert_eq!(ended.stderr.matches("documents, ").count(), 1, "{}", ended.stderr);
    assert!(fixture.read("again.bin") == fixture.read("questions.bin"));
}

#[test]
fn verbs_that_ask_a_model_deal_the_rows_to_the_ranks_and_answer_as_one_does() {
    let fixture = Fixture::new();
    fixture.job(&["job.steps=1"]).well();
    fixture.run(&["export", "run", "--out", "critic", "--role", "critic"]).well();
    // More rows than ranks, rows of one token, and ranks without a row.
    let many: Vec<_> = (0..23).map(|i| serde_json::json!({ "tokens": vec![5 + i; 1 + i * 7 % 40] })).collect();
    fixture.jsonl("many.jsonl", &many);
    fixture.write("one.jsonl", "{\"tokens\": [5, 6]}\n");
    let drawn = ["generate", "--model", "model", "--max-new-tokens", "5", "--samples", "2", "--seed", "3"];
    let searched = ["generate", "--model", "model", "--max-new-tokens", "5", "--samples", "2", "--beams", "3"];
    for verb in [&drawn[..], &searched, &["logprobs", "--model", "model"], &["reward", "--model", "critic"]] {
        for (input, ranks) in [("many.jsonl", 3), ("one.jsonl", 2)] {
            let arguments = [verb, &["--input", input, "--device", "cpu"]].concat();
            let alone = fixture.run(&arguments).well();
            let dealt = command::mpirun(fixture.root(), ranks, &arguments).well();
            assert_eq!(dealt.stdout, alone.stdout, "{arguments:?}");
            let said = |words: &str| dealt.stderr.matches(words).count();
            assert_eq!(
                (said("tokens/s"), said(&format!(": {ranks} ranks, the first on "))),
                (1, 1),
                "{}",
                dealt.stderr
            );
        }
    }
    let bad = [&drawn[..], &["--input", "-"]].concat();
    command::mpirun(fixture.root(), 2, &bad).refused(2, &["--input - with several ranks"]).hinted("name a file");
    fixture.write("bad.jsonl", "{\"tokens\": [5, 6]}\n{\"tokens\": []}\n");
    let bad = [&drawn[..], &["--input", "bad.jsonl"]].concat();
    command::mpirun(fixture.root(), 2, &bad).refused(65, &["bad.jsonl line 2", "no tokens"]);
}
