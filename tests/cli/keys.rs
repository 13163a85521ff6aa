//! Keys of a job and overrides of the command line: what is wrong is named before anything is made.

use super::command;
use super::room::Room;

#[test]
fn a_job_file_that_does_not_exist_is_named() {
    let room = Room::new();
    room.run(&["nosuch.toml"]).refused(2, &["job file nosuch.toml does not exist"]).hinted("rlhf-hpc ppo.toml");
    room.run(&["run", "nosuch.toml"]).refused(2, &["nosuch.toml"]);
    room.run(&["run", "."]).refused(74, &["cannot read ."]);
}

#[test]
fn a_job_that_is_no_toml_names_the_line() {
    let room = Room::new();
    room.write("job.toml", "[job]\nkind = ppo\n");
    room.job(&[]).refused(2, &["job.toml", "line 2", "kind = ppo"]);
    room.write("job.toml", "[job]\nkind = \"ppo\"\nkind = \"sft\"\n");
    room.job(&[]).refused(2, &["line 3", "duplicate"]);
}

#[test]
fn an_unknown_key_comes_with_the_key_that_was_meant() {
    let room = Room::new();
    let job = room.text("job.toml").replace("prompts_per_step", "promts_per_step");
    room.write("job.toml", job);
    room.job(&[]).refused(2, &["job.toml", "line 17", "unknown key `promts_per_step`"]).hinted("`prompts_per_step`");
}

#[test]
fn an_unknown_table_comes_with_the_one_that_was_meant() {
    let room = Room::new();
    room.write("job.toml", room.text("job.toml") + "[optm.actor]\nlr = 1e-5\n");
    room.job(&[]).refused(2, &["unknown key `optm`"]).hinted("`optim`");
}

#[test]
fn an_unknown_override_is_named_with_the_key_that_was_meant() {
    let room = Room::new();
    let words = ["override `optim.actor.learning_rat=1`", "unknown key `learning_rat`"];
    room.refuses(2, &["job.seed=1", "optim.actor.learning_rat=1"], &words).hinted("known here: lr, betas");
    room.refuses(2, &["ppo.kl_coeff=0.1"], &["`kl_coeff`"]).hinted("`kl_coef`");
    room.refuses(2, &["job.kind.deep=1"], &["override `job.kind.deep=1`", "kind is not a table"]);
}

#[test]
fn an_override_that_is_no_assignment_shows_how_to_write_one() {
    let room = Room::new();
    room.refuses(2, &["job.steps"], &["`job.steps` has no `=`"]).hinted("key.path=value");
    room.refuses(2, &["job..steps=1"], &["`job..steps=1` has an empty key"]).hinted("key.path=value");
}

#[test]
fn a_value_of_the_wrong_type_is_refused_with_both_types() {
    let room = Room::new();
    room.refuses(2, &["job.steps=many"], &["job.steps=many", "string \"many\"", "u64"]);
    room.refuses(2, &["job.export=1"], &["job.export=1", "integer `1`", "boolean"]);
    room.refuses(2, &["data.prompts=questions"], &["string \"questions\"", "sequence"]);
    room.refuses(2, &["ppo.gamma=high"], &["string \"high\"", "f32"]);
    room.refuses(2, &["job.steps=-1"], &["integer `-1`", "u64"]);
    let job = room.text("job.toml").replace("\nsteps = 2", "\nsteps = \"two\"");
    room.write("job.toml", job);
    room.job(&[]).refused(2, &["line 6", "string \"two\"", "u64"]);
}

#[test]
fn an_unknown_word_comes_with_those_that_are_known() {
    let room = Room::new();
    room.refuses(2, &["ppo.advantage=gea"], &["unknown value `gea`"]).hinted("did you mean `gae`?");
    room.refuses(2, &["data.order=zigzag"], &["unknown value `zigzag`"]).hinted("sequential, shuffled");
    room.refuses(2, &["reward.rule=exakt"], &["unknown value \"exakt\"", "exact | number | regex | format | length"]);
}

#[test]
fn a_missing_required_key_is_named() {
    let room = Room::new();
    let whole = room.text("job.toml");
    for (line, key) in [
        ("kind = \"ppo\"", "job.kind"),
        ("actor = \"model\"", "model.actor"),
        ("prompts = [\"questions\"]", "data.prompts"),
    ] {
        room.write("job.toml", whole.replace(line, ""));
        room.job(&[]).refused(2, &[&format!("{key} is missing")]).hinted("jobs/reference.toml");
    }
    room.write("job.toml", &whole);
    room.refuses(2, &["data.prompts=[]"], &["data.prompts is empty"]).hinted("shard prefixes or JSONL files");
    room.refuses(2, &["model.actor="], &["model.actor is empty"]);
    room.refuses(2, &["job.dir="], &["job.dir is empty"]);
}

#[test]
fn overrides_are_texts_numbers_truths_and_lists() {
    let room = Room::new();
    let overrides = [
        "job.name=a run of mine",
        "optim.actor.lr=2.5e-4",
        "optim.actor.betas=[0.8, 0.9]",
        "ppo.reward_clip=[-1.5, 2.0]",
        "gradient.recompute=true",
        "data.prompts=[\"questions\"]",
        "reward.rule={ kind = \"number\", right = 2.0 }",
        "rollout.stop=[\"!\", \"??\"]",
        "mesh.data=auto",
        "mesh.tensor=1",
    ];
    room.job(&[&overrides[..], &["job.steps=1"]].concat()).well();
    let resolved = room.text("run/config.resolved.toml");
    for line in [
        "name = \"a run of mine\"",
        "lr = 0.00025",
        "betas = [0.8, 0.9]",
        "reward_clip = [-1.5, 2.0]",
        "recompute = true",
        "kind = \"number\"",
        "stop = [\"!\", \"??\"]",
        "data = \"auto\"",
        "tensor = 1",
    ] {
        assert!(resolved.lines().any(|l| l == line), "{line:?} is not in\n{resolved}");
    }
}

#[test]
fn a_later_override_wins() {
    let room = Room::new();
    room.job(&["job.seed=1", "job.seed=2", "job.steps=1"]).well();
    assert!(room.text("run/config.resolved.toml").contains("\nseed = 2\n"));
}

#[test]
fn job_kinds_of_a_later_release_are_refused_by_name() {
    let room = Room::new();
    for kind in ["dpo", "kto", "reward_model", "step_reward", "distill"] {
        let words = format!("job.kind = \"{kind}\" is not in this release");
        room.refuses(2, &[&format!("job.kind={kind}")], &[&words]).hinted("\"sft\" and \"ppo\"");
    }
    room.refuses(2, &["job.kind=ppp"], &["unknown value `ppp`"]).hinted("`ppo`");
}

#[test]
fn rewards_of_a_later_release_are_refused_by_name() {
    let room = Room::new();
    room.refuses(2, &["reward.http=[\"http://localhost:1\"]"], &["reward.http", "later release"]).hinted("reward.rule");
    room.refuses(2, &["reward.models=[\"rm\"]"], &["reward.models", "later release"]).hinted("reward.python");
}

#[test]
fn meshes_that_do_not_fit_are_refused_by_name() {
    let room = Room::new();
    for (key, value, words, hint) in [
        ("pipeline", "2", "mesh.pipeline = 2", "mesh.pipeline = 1"),
        ("sequence", "2", "2 sequence x 1 tensor needs 2 ranks, mpirun started 1", "mesh.sequence = 1"),
        ("tensor", "8", "8 tensor needs 8 ranks, mpirun started 1", "mesh.tensor = 1"),
        ("zero", "4", "mesh.zero = 4", "mesh.zero = 1"),
        ("tensor", "0", "mesh.tensor = 0", "mesh.tensor = 1"),
    ] {
        room.refuses(2, &[&format!("mesh.{key}={value}")], &[words]).hinted(hint);
    }
    let placement = "mesh.placement=[{ roles = [\"actor\"], ranks = \"0..1\" }]";
    room.refuses(2, &[placement], &["mesh.placement has no place for the reward"]).hinted("name it in the roles");
    room.refuses(2, &["rollout.tensor=2"], &["rollout.tensor = 2", "needs 2 ranks"]).hinted("rollout.tensor = 1");
}

#[test]
fn a_ppo_job_without_a_reward_is_refused() {
    let room = Room::new();
    let job = room.text("job.toml").replace("[reward]\nrule = \"exact\"\n", "");
    room.write("job.toml", job);
    room.refuses(2, &[], &["no reward is set"]).hinted("reward.python = \"reward.py\"");
    room.refuses(2, &["reward.rule=regex"], &["reward.rule \"regex\" needs a pattern"]).hinted("pattern =");
    room.refuses(2, &["reward.python=nosuch.py"], &["nosuch.py"]);
    room.refuses(2, &["reward.rule={ kind = \"exact\", weight = 0.0 }"], &["every reward has weight 0"]);
}

#[test]
fn estimators_that_compare_samples_need_two_of_them() {
    let room = Room::new();
    for name in ["reinforce++-baseline", "rloo", "grpo", "dr-grpo"] {
        let words = [&format!("ppo.advantage = \"{name}\"")[..], "samples_per_prompt = 1", "at least 2"];
        room.refuses(2, &[&format!("ppo.advantage={name}")], &words).hinted("compares the samples");
    }
}

#[test]
fn values_out_of_range_are_refused_with_the_range() {
    let room = Room::new();
    for (key, value, needed) in [
        ("job.steps", "0", "at least 1"),
        ("rollout.temperature", "0.0", "above 0"),
        ("rollout.top_p", "1.5", "from 0 to 1"),
        ("rollout.prompts_per_step", "0", "at least 1"),
        ("rollout.response_tokens_min", "9", "response_tokens_max = 4"),
        ("ppo.clip_low", "-0.1", "from 0 to 1"),
        ("ppo.dual_clip", "0.5", "more than 1"),
        ("ppo.epochs", "0", "at least 1"),
        ("ppo.minibatch_samples", "0", "at least 1"),
        ("optim.actor.lr", "-1e-4", "from 0 to 1000"),
        ("optim.critic.betas", "[0.9, 1.0]", "not including 1"),
        ("checkpoint.max_hours", "-1.0", "from 0 to 87600"),
        ("data.prompt_tokens_max", "0", "at least 1"),
        ("gradient.chunks", "0", "at least 1"),
        ("mesh.collective_timeout_s", "-1.0", "from 0 to 31536000"),
        ("eval.correct_at", "nan", "a finite number"),
        ("job.threads", "1000000", "from 0 to 4096"),
        ("job.steps", "9223372036854775807", "from 0 to 1000000000"),
        ("rollout.prompts_per_step", "1000000000000", "at most 16777216"),
        ("rollout.samples_per_prompt", "100000000", "at most 65536"),
        ("rollout.response_tokens_max", "9000000000000000000", "at most 134217728"),
        ("rollout.batch_max", "9000000000000000000", "at most 65536"),
        ("data.prompt_tokens_max", "9000000000000000000", "at most 134217728"),
        ("data.length_group_rows", "9000000000000000000", "at most 1000000000"),
        ("ppo.minibatch_samples", "9000000000000000000", "at most 16777216"),
        ("ppo.epochs", "9000000000000000000", "at most 10000"),
        ("ppo.microbatch_tokens_max", "9000000000000000000", "at most 134217728"),
        ("gradient.chunks", "9000000000000000000", "at most 65536"),
        ("mesh.collective_timeout_s", "inf", "not finite"),
        ("mesh.tensor", "9000000000000000000", "mesh.tensor"),
        ("reward.timeout_s", "1e300", "up to 31536000"),
        ("reward.timeout_s", "inf", "not finite"),
        ("checkpoint.max_hours", "inf", "not finite"),
        ("ppo.kl_coef", "inf", "a number from 0 up"),
        ("metrics.samples_count", "9000000000000000000", "from 0 to 1000000000"),
    ] {
        room.refuses(2, &[&format!("{key}={value}")], &[key, needed]);
    }
    let many = ["rollout.prompts_per_step=16777216", "rollout.samples_per_prompt=65536"];
    room.refuses(2, &many, &["1099511627776 responses a step", "at most 16777216"]);
    room.refuses(2, &["ppo.kl_in=loss"], &["kl_in = \"loss\"", "k1"]).hinted("k2");
    let overlong = ["ppo.overlong_buffer_tokens=9", "ppo.overlong_tokens_max=8"];
    room.refuses(2, &overlong, &["ppo.overlong_tokens_max is 8", "at least", "9"]);
    room.refuses(2, &["job.kind=sft", "job.steps=0", "sft.epochs=0.0"], &["sft.epochs is 0", "above 0"]);
}

#[test]
fn the_penalty_on_long_responses_ends_at_the_longest_response_by_default() {
    let room = Room::new();
    room.job(&["ppo.overlong_buffer_tokens=2", "job.steps=1"]).well();
    assert!(room.text("run/config.resolved.toml").contains("\noverlong_tokens_max = 4\n"));
}

#[test]
fn a_dry_run_says_what_would_run_and_runs_nothing() {
    let room = Room::new();
    let ended = room.job(&["--dry-run"]).well();
    for words in ["ppo", "./model", "ready to start", "1 on 1 host", "2 steps", "planned per rank: weights"] {
        assert!(ended.stderr.contains(words), "{words:?} is not in:\n{}", ended.stderr);
    }
    room.untouched();
    room.refuses(2, &["job.steps=0", "--dry-run"], &["job.steps is 0"]);
}

#[test]
fn a_dry_run_changes_nothing_in_the_run_directory() {
    let room = Room::new();
    room.jsonl("more.jsonl", &[serde_json::json!({ "prompt": "1+1=", "answer": "2" })]);
    let dry = |sets: &[&str]| drop(room.job(&[sets, &["--dry-run"]].concat()).well());
    let rows = ["data.prompts=[\"more.jsonl\"]", "data.prompt_split=", "data.eval_split=", "eval.every_steps=0"];
    dry(&rows);
    assert!(!room.path("run").exists(), "nor makes one");
    room.job(&["job.steps=1"]).well();
    // What a start would clean up, and records that it would mend.
    room.write("run/checkpoints/.step-9.partial/x", "x");
    room.write("run/.export.new-1/x", "x");
    room.write("run/metrics.jsonl", room.text("run/metrics.jsonl") + "{\"torn");
    let before = room.files("run");
    dry(&["job.steps=2", "job.name=other"]);
    assert!(room.files("run") == before, "{:?}", room.files("run").keys());
    assert!(!room.path(".run.dry-run").exists(), "what it wrote is gone");
    room.job(&["--dry-run", "job.steps=0"]).refused(2, &["job.steps is 0"]);
    room.job(&["--dry-run", "model.actor=nowhere"]).refused(65, &["nowhere"]);
    assert!(!room.path(".run.dry-run").exists(), "of one that was refused, too");
}

#[test]
fn what_a_killed_export_left_is_removed_by_the_next_start_and_the_export_before_it_put_back() {
    let room = Room::new();
    room.job(&["job.steps=1"]).well();
    let whole = room.read("run/export/model.safetensors");
    std::fs::rename(room.path("run/export"), room.path("run/.export.old-77")).expect("renames");
    room.write("run/.export.new-77/model.safetensors", "half");
    room.job(&["job.steps=1", "job.export=false"]).well();
    assert!(!room.path("run/.export.new-77").exists() && !room.path("run/.export.old-77").exists());
    assert_eq!(room.read("run/export/model.safetensors"), whole);
}

#[test]
fn paths_start_from_the_folder_of_the_job_file() {
    let room = Room::new();
    let elsewhere = tempfile::tempdir().unwrap();
    let job = room.path("job.toml");
    command::run(elsewhere.path(), &[job.to_str().unwrap(), "job.steps=1"]).well();
    assert!(room.path("run/config.resolved.toml").exists());
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
}
