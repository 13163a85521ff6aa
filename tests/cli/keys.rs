//! Keys of a job and overrides on the command line: errors are reported before anything is created.

use super::command;
use super::fixture::Fixture;
use rlhf_hpc::config;
use rlhf_hpc::error::format_bytes;

/// Asserts that the start-up checks of the fixture's job with an override fail with all of `words`, the hint included.
fn is_refused(fixture: &Fixture, sets: &[String], words: &[&str]) {
    let error = config::load(&fixture.path("job.toml"), sets).and_then(|config| config.check()).expect_err("refused");
    let said = format!("{}\n{}", error.message, error.hint.as_deref().unwrap_or_default());
    assert!(error.exit_code() == 2 && words.iter().all(|word| said.contains(word)), "{sets:?}: {words:?} in {said}");
}

#[test]
fn a_job_file_that_cannot_be_read_is_named() {
    let fixture = Fixture::new();
    fixture.run(&["nosuch.toml"]).refused(2, &["job file nosuch.toml does not exist"]).hinted("rlhf-hpc ppo.toml");
    fixture.run(&["run", "nosuch.toml"]).refused(2, &["nosuch.toml"]);
    fixture.run(&["run", "."]).refused(74, &["cannot read ."]);
}

/// Replacements in a job file: the old text, the new text, and fragments of the error and of its hint.
const EDITS: &[(&str, &str, &[&str], &str)] = &[
    ("kind = \"ppo\"", "kind = ppo", &["job.toml", "line 3", "kind = ppo"], ""),
    ("kind = \"ppo\"", "kind = \"ppo\"\nkind = \"sft\"", &["line 4", "duplicate"], ""),
    (
        "prompts_per_step",
        "promts_per_step",
        &["job.toml", "line 17", "unknown key `promts_per_step`"],
        "`rollout.prompts_per_step`",
    ),
    ("[job]", "[optm.actor]\nlr = 1e-5\n[job]", &["unknown key `optm`"], "`optim`"),
    ("\nsteps = 2", "\nsteps = \"two\"", &["line 6", "job.steps must be an integer (got a string \"two\")"], ""),
    ("[job]", "mesh = 2\n[job]", &["line 2: `mesh = 2`: mesh must be a table"], "write [mesh]"),
    ("kind = \"ppo\"", "kind = \"grpo\"", &["line 3", "unknown value `grpo`"], "ppo.advantage = \"grpo\""),
    ("kind = \"ppo\"", "kind = \"gspo\"", &["line 3", "unknown value `gspo`"], "ppo.loss = \"gspo\""),
    ("kind = \"ppo\"", "", &["job.kind is missing"], "jobs/reference.toml"),
    ("actor = \"model\"", "", &["model.actor is missing"], "jobs/reference.toml"),
    ("prompts = [\"questions\"]", "", &["data.prompts is missing"], "jobs/reference.toml"),
    ("rule = \"exact\"", "", &["no reward is set"], "reward.python = \"reward.py\""),
];

#[test]
fn errors_in_a_job_file_name_the_line_or_the_key() {
    let fixture = Fixture::new();
    let whole = fixture.text("job.toml");
    for (from, to, words, hint) in EDITS {
        assert!(whole.contains(from), "{from}");
        fixture.write("job.toml", whole.replacen(from, to, 1));
        is_refused(&fixture, &[], &[*words, &[*hint]].concat());
    }
}

/// Overrides on the command line, and fragments of the error and of its hint.
const OVERRIDES: &[(&[&str], &[&str], &str)] = &[
    // No such key, no assignment.
    (
        &["job.seed=1", "optim.actor.learning_rat=1"],
        &["override `optim.actor.learning_rat=1`", "unknown key `learning_rat`"],
        "`optim.actor.lr`",
    ),
    (&["ppo.kl_coeff=0.1"], &["`kl_coeff`"], "`ppo.kl_coef`"),
    (&["job.no_such_thing_at_all=1"], &["unknown key `no_such_thing_at_all`"], "known here: check, collectives"),
    (&["job.kind.deep=1"], &["override `job.kind.deep=1`", "kind is not a table"], ""),
    (&["job.steps"], &["`job.steps` has no `=`"], "key.path=value"),
    (&["job..steps=1"], &["`job..steps=1` has an empty key"], "key.path=value"),
    // Another type, an unknown word, nothing.
    (&["job.steps=many"], &["job.steps=many", "must be an integer (got a string \"many\")"], ""),
    (&["job.export=1"], &["job.export must be true or false (got an integer `1`)"], ""),
    (&["data.prompts={}"], &["data.prompts must be a list (got a table"], ""),
    (
        &["mesh.placement=[{roles=[\"actor\"],ranks=1}]"],
        &["mesh.placement.ranks must be a string (got an integer `1`)"],
        "",
    ),
    (&["ppo.gamma=high"], &["ppo.gamma must be a number (got a string \"high\")"], ""),
    (&["job.steps=-1"], &["must be an integer of at least 0 (got an integer `-1`)"], ""),
    (&["ppo.advantage=gea"], &["unknown value `gea`"], "did you mean `gae`?"),
    (&["data.order=zigzag"], &["unknown value `zigzag`"], "sequential, shuffled"),
    (&["reward.rule=exakt"], &["unknown value \"exakt\"", "exact | number | regex | format | length"], ""),
    (&["data.prompts=[]"], &["data.prompts is empty"], "shard prefixes or files of rows"),
    (&["model.actor="], &["model.actor must be a directory"], ""),
    (&["job.dir="], &["job.dir must be a directory"], ""),
    // A key of a later release.
    (&["job.kind=ppp"], &["unknown value `ppp`"], "`ppo`"),
    // Meshes.
    (
        &["mesh.pipeline=2"],
        &["2 pipeline x 1 sequence x 1 tensor needs 2 ranks, but mpirun started 1"],
        "mesh.pipeline = 1",
    ),
    (&["mesh.sequence=2"], &["2 sequence x 1 tensor needs 2 ranks, but mpirun started 1"], "mesh.sequence = 1"),
    (&["mesh.tensor=8"], &["8 tensor needs 8 ranks, but mpirun started 1"], "mesh.tensor = 1"),
    (&["mesh.zero=4"], &["mesh.zero must be between 0 and 3"], "mesh.zero = 1"),
    (&["mesh.tensor=9000000000000000000"], &["mesh.tensor"], ""),
    (&["mesh.tensor=0"], &["mesh.tensor must be between 1 and"], "mesh.tensor = 1"),
    (&["mesh.data=2"], &["needs 2 ranks"], "run with -n 2"),
    (
        &["mesh.placement=[{ roles = [\"actor\"], ranks = \"0..1\" }]"],
        &["mesh.placement has no place for the reward"],
        "add it to the roles",
    ),
    // Sampling masks.
    (&["rollout.keep_sampling_mask=true"], &["no filter excludes tokens"], "set rollout.top_k, top_p or min_p"),
    (
        &["rollout.keep_sampling_mask=true", "rollout.top_k=5", "rollout.repetition_penalty=1.5"],
        &["rollout.keep_sampling_mask is true, but rollout.repetition_penalty = 1.5 samples from other logits"],
        "ppo.correction",
    ),
    (
        &[
            "rollout.keep_sampling_mask=true",
            "rollout.top_k=5",
            "job.kind=distill",
            "model.teachers=[\"model\"]",
            "distill.on_policy=true",
        ],
        &["rollout.keep_sampling_mask does not support distill jobs, which compare whole distributions"],
        "which is for ppo jobs",
    ),
    (&["rollout.tensor=2"], &["rollout.tensor = 2", "needs 2 ranks"], "rollout.tensor = 1"),
    (&["rollout.tensor=2", "rollout.data=2"], &["needs 4 ranks, but the mesh has 1"], ""),
    // Rewards and estimators.
    (&["reward.rule=regex"], &["reward.rule \"regex\" needs a pattern"], "pattern ="),
    (&["reward.python=nosuch.py"], &["nosuch.py"], ""),
    (&["reward.http=judge"], &["reward.http = \"judge\" is not a URL"], "http://HOST:PORT/PATH"),
    (
        &["reward.http=http://a b/"],
        &["reward.http = \"http://a b/\" is not a URL (invalid uri"],
        "http://HOST:PORT/PATH",
    ),
    (&["reward.http={ weight = 0.5 }"], &["reward.http must have a url"], ""),
    (&["reward.remote_rm_url=http://a:1"], &["unknown key `remote_rm_url`"], "`reward.http`"),
    (&["reward.rule={ kind = \"exact\", weight = 0.0 }"], &["at least one reward must have a weight other than 0"], ""),
    (&["ppo.advantage=reinforce++-baseline"], &["\"reinforce++-baseline\"", "at least 2"], "compares the samples"),
    (&["ppo.advantage=rloo"], &["ppo.advantage = \"rloo\"", "at least 2"], "compares the samples"),
    (&["ppo.advantage=grpo"], &["\"grpo\"", "(got 1)", "at least 2"], "compares the samples"),
    (&["ppo.advantage=dr-grpo"], &["ppo.advantage = \"dr-grpo\"", "at least 2"], "compares the samples"),
    // Several keys together.
    (
        &["rollout.prompts_per_step=16777216", "rollout.samples_per_prompt=65536"],
        &["= 1099511627776)", "at most 16777216 responses per step"],
        "",
    ),
    (&["ppo.kl_in=loss"], &["kl_in = \"loss\"", "k1"], "k2"),
    (&["ppo.advantage=reinforce++", "ppo.critic_warmup_steps=3"], &["no critic to warm up"], ""),
    (&["ppo.ptx_coef=0.1"], &["ppo.ptx_coef must be", "(got 0.1)", "data.pretrain"], ""),
    (&["data.pretrain=[\"x.jsonl\"]"], &["ppo.ptx_coef must be", "(got 0)", "data.pretrain"], ""),
    (&["optim.critic.ema_beta=1"], &["optim.critic.ema_beta must be", "(got 1)"], ""),
    (&["eval.patience=2"], &["eval.patience above 0 needs checkpoint.best_metric"], "eval_loss"),
    (
        &["checkpoint.best_metric=eval_loss", "eval.every_steps=0"],
        &["\"eval_loss\" needs eval.every_steps above 0"],
        "eval.every_steps",
    ),
    (
        &["ppo.overlong_buffer_tokens=9", "ppo.overlong_tokens_max=8"],
        &["ppo.overlong_tokens_max must be at least", "= 9 (got 8)"],
        "",
    ),
    // Evaluations without a result.
    (
        &["job.kind=sft", "data.eval_sets=[{name=\"a\",prompts=\"a\"}]"],
        &["data.eval_sets is for ppo and eval jobs; sft jobs evaluate on data.eval_split only"],
        "job.kind = \"eval\"",
    ),
    (
        &["job.kind=eval", "eval.samples_per_prompt=4"],
        &["must be 1 with eval.temperature = 0 (got 4)"],
        "set eval.temperature",
    ),
    (
        &["job.kind=eval", "eval.temperature=1e-6"],
        &["eval.temperature must be 0 (greedy) or at least 0.001 (got 0.000001)"],
        "",
    ),
    (
        &["eval.pass_at=[1,2]"],
        &["eval.pass_at must be between 1 and eval.samples_per_prompt = 1 (got 2)"],
        "at least k",
    ),
    (&["eval.pass_at=0"], &["eval.pass_at must be between 1 and", "(got 0)"], ""),
    (
        &["data.eval_sets=[{name=\"a\",prompts=\"a\"},{name=\"a\",prompts=\"b\"}]"],
        &["data.eval_sets has two sets named \"a\""],
        "",
    ),
    (&["data.eval_sets=[{name=\"a\"}]"], &["data.eval_sets: a has no prompts"], ""),
    (
        &["data.eval_sets=[{name=\"a/b\",prompts=\"a\"}]"],
        &["data.eval_sets: set 1 has the invalid name \"a/b\""],
        "letters, digits",
    ),
    (&["job.kind=sft", "job.steps=0", "sft.epochs=0.0"], &["sft.epochs or job.steps must be above 0"], ""),
    (&["job.kind=distill"], &["model.teachers must name at least one teacher"], "model.teachers = [\"DIR\"]"),
    (
        &["job.kind=distill", "model.teachers=[\"model\"]", "model.teacher_weights=[1,2]"],
        &["model.teacher_weights must have one number for each entry of model.teachers (got 2 for 1)"],
        "",
    ),
    (
        &["job.kind=distill", "model.teachers=[\"model\"]", "model.teacher_weights=[0]"],
        &["model.teacher_weights must be positive"],
        "",
    ),
    (
        &["job.kind=distill", "model.teachers=[\"model\"]", "distill.full_vocabulary=false"],
        &["the rows are not sampled"],
        "distill.on_policy = true",
    ),
    (
        &["job.kind=distill", "model.teachers=[\"model\"]", "distill.full_vocabulary=false", "distill.on_policy=true"],
        &["distill.full_vocabulary = false", "reverse KL"],
        "distill.divergence = \"reverse_kl\"",
    ),
    (
        &["job.kind=distill", "model.teachers=[\"model\"]", "mesh.placement=[{roles=[\"actor\"],ranks=\"0..1\"}]"],
        &["mesh.placement does not support distill jobs, which have all roles on all ranks"],
        "remove mesh.placement",
    ),
    (&["job.kind=dpo", "job.steps=0", "dpo.epochs=0.0"], &["dpo.epochs or job.steps must be above 0"], ""),
    (
        &["job.kind=reward_model", "job.steps=0", "reward_model.epochs=0.0"],
        &["reward_model.epochs or job.steps must be above 0"],
        "",
    ),
    (&["job.kind=kto", "kto.minibatch_samples=1"], &["kto.minibatch_samples must be", "2", "(got 1)"], ""),
    (
        &["job.kind=step_reward", "step_reward.reward_tokens=[\"+\"]"],
        &["reward_tokens must have at least 2", "(got [\"+\"])"],
        "",
    ),
    (&["job.kind=step_reward", "step_reward.reward_tokens=[\"+\", \"+\"]"], &["has \"+\" twice"], ""),
    (
        &["job.kind=sft", "sft.pretrain_coef=0.5"],
        &["sft.pretrain_coef must be above 0 if data.pretrain is set", "(got 0.5)"],
        "",
    ),
    (&["job.kind=dpo", "data.pretrain=[\"a.jsonl\"]"], &["data.pretrain is set, but dpo jobs do not use it"], ""),
    (&["data.chat_template_args.messages=1"], &["data.chat_template_args must not contain \"messages\""], ""),
    (&["data.chat_template_args.thinks=true"], &["needs data.chat_template = true"], ""),
];

/// Checks in this process if the keys alone show the error, else with the program.
#[test]
fn errors_in_an_override_show_the_correct_form() {
    let fixture = Fixture::new();
    for (overrides, words, hint) in OVERRIDES {
        let sets: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        match config::load(&fixture.path("job.toml"), &sets).and_then(|config| config.check()) {
            Err(_) => is_refused(&fixture, &sets, &[*words, &[*hint]].concat()),
            Ok(()) => drop(fixture.refuses(2, overrides, words).hinted(hint)),
        }
    }
}

#[test]
fn an_evaluation_needs_prompts_or_eval_sets() {
    let of = |sets: &[&str]| {
        let job = "job.kind = \"eval\"\nmodel.actor = \"m\"\nreward.rule = \"exact\"\n";
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_string()).collect();
        config::parse(job, &sets).and_then(|config| config.check())
    };
    assert_eq!(of(&["data.eval_sets=[{name=\"a\",prompts=\"a\"}]"]), Ok(()));
    assert_eq!(of(&["data.prompts=p", "eval.samples_per_prompt=2", "eval.temperature=1.0"]), Ok(()));
    assert!(of(&[]).expect_err("no rows").message.contains("data.prompts is missing"));
}

/// Keys of other systems, in the table where a user might write them, and the error.
const WORDS: &[(&str, &str)] = &[
    ("ppo.learning_rate", "`optim.actor.lr`"),
    ("job.lr", "`optim.actor.lr` or `optim.critic.lr`"),
    ("rollout.max_new_tokens", "`rollout.response_tokens_max`"),
    ("job.rollout_batch_size", "`rollout.prompts_per_step`"),
    ("optim.actor.max_grad_norm", "`optim.actor.clip_norm`"),
    ("job.gradient_checkpointing", "`gradient.recompute`"),
    ("ppo.init_kl_coef", "`ppo.kl_coef`"),
    ("ppo.eps_clip", "`ppo.clip_low`"),
    ("job.micro_train_batch_size", "`ppo.microbatch_tokens_max` or `sft.microbatch_tokens_max`"),
    ("job.num-generations", "`rollout.samples_per_prompt`"),
    ("model.lora_rank", "`lora.rank`"),
    ("model.load_in_4bit", "`model.quantize`"),
    ("step_reward.placeholder_token", "`step_reward.placeholder`"),
    ("metrics.wandb", "jobs/tools/metrics_to.py"),
    ("job.temperature", "`rollout.temperature`"),
    ("trainer.learning_rate", "`optim.actor.lr`"),
    ("trainer.resume_mode", "a key of verl that this program does not need or have"),
];

#[test]
fn keys_of_other_systems_are_rejected_with_our_key() {
    let fixture = Fixture::new();
    for (key, hint) in WORDS {
        is_refused(&fixture, &[format!("{key}=1")], &["unknown key", hint]);
    }
}

#[test]
fn all_errors_of_a_job_are_reported_together() {
    let fixture = Fixture::new();
    let wrong = fixture.text("job.toml").replace("seed = 5", "sede = 5").replace("\nsteps = 2", "\nsteps = true");
    fixture.write("job.toml", wrong);
    let words = [
        "job.toml: 3 mistakes",
        "line 5: `sede = 5`: unknown key `sede` (did you mean `job.seed`?)",
        "line 6: `steps = true`: job.steps must be an integer (got a boolean `true`)",
        "override `ppo.lr=1`: unknown key `lr` (did you mean `optim.actor.lr` or `optim.critic.lr`?)",
    ];
    fixture.refuses(2, &["ppo.lr=1"], &words);
    let fixture = Fixture::new();
    let numbers = ["ppo.gamma=2.0", "data.split.eval_ratio=3.0"];
    fixture.refuses(
        2,
        &numbers,
        &["2 mistakes", "ppo.gamma must be", "(got 2)", "data.split.eval_ratio must be", "(got 3)"],
    );
}

#[test]
fn a_single_text_is_accepted_for_a_list() {
    let fixture = Fixture::new();
    let listed = fixture.text("job.toml");
    fixture.write("job.toml", listed.replace("prompts = [\"questions\"]", "prompts = \"questions\""));
    fixture.job(&["rollout.stop=x", "--dry-run"]).well();
    fixture.job(&["data.prompts=questions", "--dry-run"]).well();
}

#[test]
fn overrides_are_texts_numbers_booleans_and_lists() {
    let fixture = Fixture::new();
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
        "ppo.overlong_buffer_tokens=2",
    ];
    // A later one wins.
    fixture.job(&[&overrides[..], &["job.seed=1", "job.seed=2", "job.steps=1"]].concat()).well();
    let resolved = fixture.text("run/config.resolved.toml");
    for line in [
        "name = \"a run of mine\"",
        "seed = 2",
        "lr = 0.00025",
        "betas = [0.8, 0.9]",
        "reward_clip = [-1.5, 2.0]",
        "recompute = \"block\"",
        "kind = \"number\"",
        "stop = [\"!\", \"??\"]",
        "data = 1",
        "tensor = 1",
        // The penalty on long responses ends at the longest one by default.
        "overlong_tokens_max = 4",
    ] {
        assert!(resolved.lines().any(|l| l == line), "{line:?} is not in\n{resolved}");
    }
}

#[test]
fn values_out_of_range_are_rejected_with_the_range() {
    let fixture = Fixture::new();
    for (key, value, needed) in [
        ("job.steps", "0", "at least 1"),
        ("rollout.temperature", "0.0", "above 0"),
        ("rollout.top_p", "1.5", "between 0 and 1"),
        ("rollout.prompts_per_step", "0", "at least 1"),
        ("rollout.response_tokens_min", "9", "response_tokens_max = 4"),
        ("rollout.response_tokens_schedule", "[[2, 3], [2, 4]]", "ascending last steps"),
        ("rollout.response_tokens_schedule", "[[2, 9]]", "rollout.response_tokens_max = 4 (got [2, 9])"),
        ("ppo.critic_lambda", "-0.5", "between 0 and 1, or -1 for ppo.lambda"),
        ("ppo.clip_low", "-0.1", "between 0 and 1"),
        ("ppo.dual_clip", "0.5", "above 1"),
        ("ppo.epochs", "0", "at least 1"),
        ("ppo.minibatch_samples", "0", "at least 1"),
        ("optim.actor.lr", "-1e-4", "between 0 and 1000"),
        ("optim.critic.betas", "[0.9, 1.0]", "at least 0 and below 1"),
        ("checkpoint.max_hours", "-1.0", "between 0 and 87600"),
        ("data.prompt_tokens_max", "0", "at least 1"),
        ("gradient.chunks", "0", "at least 1"),
        ("mesh.collective_timeout_s", "-1.0", "between 0 and 31536000"),
        ("eval.correct_at", "nan", "a finite number"),
        ("job.threads", "1000000", "between 0 and 4096"),
        ("job.steps", "9223372036854775807", "between 0 and 1000000000"),
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
        ("reward.timeout_s", "1e300", "at most 31536000"),
        ("reward.timeout_s", "inf", "not finite"),
        ("checkpoint.max_hours", "inf", "not finite"),
        ("ppo.kl_coef", "inf", "at least 0"),
        ("ppo.gamma", "1.1", "ppo.gamma must be between 0 and 1 (got 1.1)"),
        ("metrics.samples_count", "9000000000000000000", "between 0 and 1000000000"),
    ] {
        is_refused(&fixture, &[format!("{key}={value}")], &[key, needed]);
    }
}

#[test]
fn a_dry_run_changes_nothing_in_the_run_directory() {
    let fixture = Fixture::new();
    fixture.jsonl("more.jsonl", &[serde_json::json!({ "prompt": "1+1=", "answer": "2" })]);
    let dry = |sets: &[&str]| drop(fixture.job(&[sets, &["--dry-run"]].concat()).well());
    let rows = ["data.prompts=[\"more.jsonl\"]", "data.prompt_split=", "data.eval_split=", "eval.every_steps=0"];
    dry(&rows);
    assert!(!fixture.path("run").exists(), "nor makes one");
    fixture.job(&["job.steps=1"]).well();
    // Leftovers that a start would remove, and records that it would repair.
    fixture.write("run/checkpoints/.step-9.partial/x", "x");
    fixture.write("run/.export.new-1/x", "x");
    fixture.write("run/metrics.jsonl", fixture.text("run/metrics.jsonl") + "{\"torn");
    let before = fixture.files("run");
    dry(&["job.steps=2", "job.name=other"]);
    assert!(fixture.files("run") == before, "{:?}", fixture.files("run").keys());
    assert!(!fixture.path(".run.dry-run").exists(), "what it wrote is gone");
    fixture.job(&["--dry-run", "job.steps=0"]).refused(2, &["job.steps must be at least 1"]);
    fixture.job(&["--dry-run", "model.actor=nowhere"]).refused(65, &["nowhere"]);
    assert!(!fixture.path(".run.dry-run").exists(), "of one that was refused, too");
}

#[test]
fn the_next_start_removes_leftovers_of_a_killed_export_and_restores_the_previous_export() {
    let fixture = Fixture::new();
    fixture.job(&["job.steps=1"]).well();
    let whole = fixture.read("run/export/model.safetensors");
    std::fs::rename(fixture.path("run/export"), fixture.path("run/.export.old-77")).expect("renames");
    fixture.write("run/.export.new-77/model.safetensors", "half");
    fixture.job(&["job.steps=1", "job.export=false"]).well();
    assert!(!fixture.path("run/.export.new-77").exists() && !fixture.path("run/.export.old-77").exists());
    assert_eq!(fixture.read("run/export/model.safetensors"), whole);
}

#[test]
fn the_resolved_job_runs_like_its_original_and_has_no_automatic_value() {
    let fixture = Fixture::new();
    let job = fixture.job(&["ppo.loss=gspo", "job.steps=2"]).well();
    let resolved = fixture.text("run/config.resolved.toml");
    assert!(!resolved.contains("\"auto\""), "{resolved}");
    for line in
        ["threads = 1", "aggregation = \"sequence\"", "old_logprobs = \"rollout\"", "zero = 1", "collectives = \"mpi\""]
    {
        assert!(resolved.lines().any(|written| written == line), "no {line} in\n{resolved}");
    }
    let [reference, actor] = ["reference", "actor"].map(|key| {
        let line = resolved.lines().find_map(|line| line.strip_prefix(&format!("{key} = ")));
        line.expect("a model").to_string()
    });
    assert_eq!(reference, actor);
    fixture.run(&["run/config.resolved.toml", "job.dir=again"]).well();
    assert_eq!(fixture.read("run/export/model.safetensors"), fixture.read("again/export/model.safetensors"));
    // One figure is the planned memory: in the banner, at the end, and in each line.
    let lines = command::rows(&fixture.text("run/metrics.jsonl"));
    let planned = lines.iter().filter_map(|line| line["memory_planned_bytes"].as_u64());
    let planned: Vec<String> = planned.map(format_bytes).collect();
    let said = job.stderr.lines().filter(|line| line.contains(&format!(" {} planned per rank", planned[0])));
    assert_eq!((planned.len(), said.count(), &planned[0]), (2, 2, &planned[1]), "{}", job.stderr);
}

#[test]
fn paths_start_from_the_folder_of_the_job_file() {
    let fixture = Fixture::new();
    let elsewhere = tempfile::tempdir().unwrap();
    let job = fixture.path("job.toml");
    command::run(elsewhere.path(), &[job.to_str().unwrap(), "job.steps=1"]).well();
    assert!(fixture.path("run/config.resolved.toml").exists());
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    // Those of the command line start from the current folder.
    std::fs::create_dir(elsewhere.path().join("data")).unwrap();
    std::fs::copy(fixture.path("rows.jsonl"), elsewhere.path().join("data/rows.jsonl")).unwrap();
    let prompts = ["data.prompts=[\"data/rows.jsonl\"]", "data.prompt_split=", "data.eval_split="];
    let line = [&[job.to_str().unwrap(), "job.steps=1", "job.dir=here"], &prompts[..]].concat();
    command::run(elsewhere.path(), &line).well();
    assert!(elsewhere.path().join("here/config.resolved.toml").exists());
    for models in ["reward.models=nosuch", "reward.models=[{dir=\"nosuch\"}]", "reward.judge=nosuch"] {
        let words = [&*elsewhere.path().join("nosuch").display().to_string()];
        command::run(elsewhere.path(), &[job.to_str().unwrap(), "job.dir=here", models]).refused(65, &words);
    }
}
