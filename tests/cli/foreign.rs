//! Keys and options of other systems, on the command line and in a job: the error names ours.

use super::fixture::Fixture;
use rlhf_hpc::config;

/// A command line, and fragments of its error and hint.
const LINES: &[(&str, &[&str])] = &[
    ("job.toml --lr 3e-6", &["unrecognized argument: --lr", "write `optim.actor.lr=3e-6`"]),
    ("job.toml --lr=3e-6", &["write `optim.actor.lr=3e-6`"]),
    ("plan job.toml --rollout_batch_size 64", &["write `rollout.prompts_per_step=64`"]),
    ("job.toml --kl_coef 0.1", &["write `ppo.kl_coef=0.1`"]),
    ("job.toml --job.steps 4", &["write `job.steps=4`"]),
    ("job.toml --load_in_4bit", &["write `model.quantize=VALUE`"]),
    ("job.toml --ds.lora.rank 16", &["write `lora.rank=16`"]),
    ("job.toml --lora_dropout 0.1", &["adapters have no dropout"]),
    ("job.toml --dry_run", &["write --dry-run"]),
    ("generate --max_new_tokens 4", &["write --max-new-tokens"]),
    ("generate --lr 4", &["rlhf-hpc VERB --help"]),
    ("train job.toml", &["`train` is neither a verb nor an existing job file", "write `rlhf-hpc run job.toml`"]),
    ("train_ppo job.toml", &["write `rlhf-hpc run job.toml`", "job.kind"]),
    ("--dry-run nosuch.toml", &["job file nosuch.toml does not exist"]),
    ("plann job.toml", &["did you mean `plan`?"]),
    ("job.yaml", &["a job is a TOML file (got YAML)", "kind = \"ppo\""]),
    ("job.json", &["a job is a TOML file (got JSON)"]),
];

#[test]
fn a_command_line_of_another_system_is_rejected_with_our_equivalent() {
    let fixture = Fixture::new();
    fixture.write("job.yaml", "# GRPO\ntrainer:\n  total_epochs: 3\n");
    fixture.write("job.json", "{\"job\": {\"kind\": \"ppo\"}}");
    for (line, words) in LINES {
        fixture.run(&line.split(' ').collect::<Vec<_>>()).refused(2, words);
    }
}

/// An override of a job, and a fragment of its hint.
const VALUES: &[(&str, &str)] = &[
    ("job.kind=prm", "job.kind = \"step_reward\""),
    ("job.kind=rm", "job.kind = \"reward_model\""),
    ("job.kind=Process-Reward-Model", "job.kind = \"step_reward\""),
    ("job.kind=simpo", "job.kind = \"dpo\" and dpo.loss = \"simpo\""),
    ("job.kind=rloo", "job.kind = \"ppo\" and ppo.advantage = \"rloo\""),
    ("ppo.advantage=ppo", "\"gae\""),
    ("ppo.advantage=reinforce_plus_plus", "\"reinforce++\""),
    ("ppo.advantage=group_norm", "\"grpo\""),
    ("ppo.aggregation=seq-mean-token-mean", "\"sequence\""),
    ("ppo.kl_estimator=low_var_kl", "\"k3\""),
    ("model.dtype=bfloat16", "\"bf16\""),
    ("model.dtype=fp16", "f16 is not supported in memory"),
    ("job.device=cuda", "job.device = \"gpu\""),
    ("optim.actor.schedule=cosine_with_min_lr", "floor_ratio"),
    ("lora_r=8", "`lora.rank`"),
    ("model.lora_adapter_path=a", "`model.adapter`"),
    ("lora.dropout=0.1", "adapters have no dropout"),
    ("lora_dropout=0.1", "adapters have no dropout"),
    ("use_dora=true", "DoRA and methods that change the base are not supported"),
    ("load_in_8bit=true", "model.quantize = \"nf4\""),
    ("model.quantize=4bit", "model.quantize = \"nf4\""),
    ("lora.init=pissa", "leave the base model as it is"),
    ("lora.critic.ranks=3", "`rank`"),
    // verl, by the whole path.
    ("algorithm.adv_estimator=grpo", "verl's name for `ppo.advantage`"),
    ("actor_rollout_ref.rollout.n=8", "verl's name for `rollout.samples_per_prompt`"),
    ("actor_rollout_ref.actor.optim.lr=1e-6", "verl's name for `optim.actor.lr`"),
    ("critic.optim.lr=1e-5", "verl's name for `optim.critic.lr`"),
    ("data.train_batch_size=64", "verl's name for `rollout.prompts_per_step`"),
    ("train_batch_size=64", "`ppo.minibatch_samples`"),
    ("trainer.logger=[\"wandb\"]", "verl's name for `metrics.tensorboard`"),
    ("trainer.n_gpus_per_node=8", "mpirun starts the ranks"),
    ("reward_model.model.path=m", "verl's name for `reward.models`"),
    ("actor_rollout_ref.model.lora_rank=8", "verl's name for `lora.rank`"),
    ("actor_rollout_ref.model.lora.alpha=8", "verl's name for `lora.alpha`"),
    ("critic.model.lora_rank=8", "verl's name for `lora.critic`"),
    ("actor_rollout_ref.actor.fsdp_config.forward_prefetch=true", "`rlhf-hpc help from-verl`"),
];

#[test]
fn a_value_or_key_of_another_system_leads_to_ours() {
    let fixture = Fixture::new();
    for (set, hint) in VALUES {
        let error = config::load(&fixture.path("job.toml"), &[(*set).to_string()]).expect_err(set);
        let text = format!("{} {}", error.message, error.hint.unwrap_or_default());
        assert!(text.contains(hint), "{set}: {hint} in {text}");
    }
}

#[test]
fn each_key_of_a_table_of_verl_is_named_with_ours_and_its_line() {
    let job = "[algorithm]\nadv_estimator = \"grpo\"\n[actor_rollout_ref.rollout]\nn = 8\n[trainer]\n";
    let error = config::parse(job, &[]).expect_err("keys of verl").message;
    for words in [
        "line 2: `adv_estimator = \"grpo\"`: unknown key `algorithm.adv_estimator` (verl's name for `ppo.advantage`",
        "line 4: `n = 8`: unknown key `actor_rollout_ref.rollout.n` (verl's name for `rollout.samples_per_prompt`",
        "unknown key `trainer`",
    ] {
        assert!(error.contains(words), "{words} in {error}");
    }
    let fixture = Fixture::new();
    for (key, ours) in [("trainer.total_epochs", "job.steps"), ("rollout.n", "rollout.samples_per_prompt")] {
        let page = fixture.run(&["help", key]).well();
        assert!(page.stdout.contains(&format!("# {ours}\n")) || page.stdout.contains(ours), "{}", page.stdout);
    }
}

#[test]
fn a_run_warns_once_about_unused_keys() {
    let fixture = Fixture::new();
    let ended =
        fixture.job(&["--dry-run", "sft.epochs=3.0", "dpo.beta=0.3", "ppo.kl_in=none", "ppo.kl_coef=0.5"]).well();
    ended.assert(0, &["keys of the job that have no effect in it", "sft.epochs", "dpo.beta", "ppo.kl_coef (needs"]);
    let ended = fixture.job(&["--dry-run"]).well();
    assert!(!ended.stderr.contains("no effect"), "{}", ended.stderr);
}
