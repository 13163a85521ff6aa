//! Errors under a launcher: printed once, not once per rank, and every rank ends.

use super::command;
use super::fixture::Fixture;

#[test]
fn errors_of_all_ranks_and_a_dry_run_are_printed_once() {
    let fixture = Fixture::new();
    let run = |arguments: &[&str]| command::mpirun(fixture.root(), 2, arguments);
    for (arguments, code, words) in [
        (&["run", "job.toml", "ppo.kl_coeff=0.1"][..], 2, "unknown key `kl_coeff`"),
        (
            &["run", "job.toml", "data.prompt_split=dev"],
            65,
            "data.prompt_split must name a split of the data (got \"dev\";",
        ),
        (&["run", "job.toml", "job.dir=/proc/nosuch"], 74, "cannot create /proc/nosuch"),
        (&["genrate", "job.toml"], 2, "`genrate` is neither a verb"),
        (&["logprobs", "--model", "nosuch", "--input", "rows.jsonl"], 65, "nosuch"),
    ] {
        run(arguments).refused(code, &[words]);
    }
    fixture.untouched();
    assert_eq!(run(&["--version"]).well().stdout.lines().count(), 1);
    let dry = run(&["run", "job.toml", "--dry-run"]).well();
    assert_eq!(dry.stderr.matches("ready to start").count(), 1, "{}", dry.stderr);
    assert!(dry.stderr.contains("2 data x 1 pipeline"), "{}", dry.stderr);
    fixture.untouched();
}

#[test]
fn a_mesh_that_does_not_match_the_number_of_ranks_is_rejected() {
    let fixture = Fixture::new();
    let fixed = "gradient.order = \"fixed\"";
    for (ranks, sets, words, hint) in [
        (2, "mesh.data=3", &["needs 3 ranks, but mpirun started 2"][..], "run with -n 3"),
        (3, "gradient.order=fixed", &[fixed, "got 3", "power of two"], "1, 2, 4"),
        (3, "mesh.tensor=3", &["tensor = 3", "heads"], "set tensor to "),
        (3, "mesh.tensor=1 mesh.zero=1 rollout.tensor=3", &["rollout.tensor = 3", "heads"], "set tensor to "),
        (2, "gradient.order=fixed mesh.sequence=2", &[fixed, "2 sequence"], "gradient.order = \"fast\""),
        (2, "gradient.order=fixed mesh.zero=2", &[fixed, "zero = 2"], "gradient.order = \"fast\""),
    ] {
        let line: Vec<&str> = ["run", "job.toml"].into_iter().chain(sets.split(' ')).collect();
        command::mpirun(fixture.root(), ranks, &line).refused(2, words).hinted(hint);
    }
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
fn model_verbs_distribute_rows_over_the_ranks_and_answer_like_one_rank() {
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
    command::mpirun(fixture.root(), 2, &bad).refused(2, &["--input - needs a single rank"]).hinted("pass a file");
    fixture.write("bad.jsonl", "{\"tokens\": [5, 6]}\n{\"tokens\": []}\n");
    let bad = [&drawn[..], &["--input", "bad.jsonl"]].concat();
    command::mpirun(fixture.root(), 2, &bad).refused(65, &["bad.jsonl line 2", "at least 1 token"]);
}
