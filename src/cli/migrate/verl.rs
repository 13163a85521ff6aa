//! Options of verl that belong together.

use super::draft::Draft;
use super::given::Given;
use super::layout::{self, Group};
use super::paths;
use super::shared::{missing_reward, rounded, words};
use super::table::Kind;
use crate::error::Result;
use toml::{Table, Value};

const ACTOR: &str = "actor_rollout_ref.actor";

/// The options of a resource pool for the reward models.
const POOL: [&str; 6] = [
    "reward.reward_model.enable_resource_pool",
    "reward_model.enable_resource_pool",
    "reward.reward_model.n_gpus_per_node",
    "reward_model.n_gpus_per_node",
    "reward.reward_model.nnodes",
    "reward_model.nnodes",
];

pub fn combine(draft: &mut Draft) -> Result<()> {
    rows(draft)?;
    advantage(draft);
    policy(draft);
    kl(draft);
    optimizers(draft);
    lora(draft);
    rewards(draft);
    run(draft);
    Ok(())
}

fn rows(draft: &mut Draft) -> Result<()> {
    paths::set_rows(draft, "data.train_files", None)?;
    draft.imply("data.chat_template", true, "prompts of verl are messages");
    draft.imply("data.label_key", "reward_model.ground_truth", "the label of verl's rows");
    let every = draft.number(&["trainer.test_freq"]).unwrap_or(-1.0);
    if every > 0.0 {
        let all = draft.list(&["data.val_files"]);
        let (files, _) = paths::sources(draft, &all);
        draft.set("data.split.by", "file", &["data.val_files"]);
        draft.set("data.split.eval_files", files, &["data.val_files"]);
        draft.set("data.eval_split", "test", &["data.val_files"]);
        draft.set("eval.every_steps", every as i64, &["trainer.test_freq"]);
        let names =
            ["do_sample", "temperature", "n"].map(|name| format!("actor_rollout_ref.rollout.val_kwargs.{name}"));
        if draft.is_true(&["actor_rollout_ref.rollout.val_kwargs.do_sample"]) {
            let temperature = draft.number(&["actor_rollout_ref.rollout.val_kwargs.temperature"]).unwrap_or(0.0);
            draft.set("eval.temperature", temperature, &[&names[1], &names[0]]);
            let n = draft.number(&["actor_rollout_ref.rollout.val_kwargs.n"]).unwrap_or(1.0) as i64;
            if temperature > 0.0 {
                draft.set("eval.samples_per_prompt", n, &[&names[2]]);
                draft.set("eval.pass_at", vec![Value::from(n)], &[&names[2]]);
            }
        }
    } else {
        for name in ["data.val_files", "trainer.test_freq"] {
            if draft.given(name).is_some() {
                draft.note(name, Kind::Needless, "no evaluation during training, because test_freq is not above 0");
            }
        }
    }
    let side = draft.text(&["data.truncation"]).unwrap_or_default();
    let names = ["data.filter_overlong_prompts", "data.truncation"];
    match (draft.is_true(&names[..1]), side.as_str()) {
        (true, _) | (_, "error") => draft.set("data.long_prompts", "reject", &names),
        (_, "left") => draft.set("data.long_prompts", "truncate_left", &names),
        (_, "right") => draft.set("data.long_prompts", "truncate_right", &names),
        _ => draft.note(names[1], Kind::Missing, "the middle of a prompt is not cut"),
    }
    Ok(())
}

fn advantage(draft: &mut Draft) {
    const NAMES: [&str; 2] = ["algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"];
    let by_std = draft.is_true(&NAMES[1..]);
    let name = draft.text(&NAMES[..1]).unwrap_or_default();
    let name = name.to_lowercase();
    let ours = match name.rsplit('.').next().unwrap_or_default() {
        "gae" => "gae",
        "grpo" if by_std => "grpo",
        "grpo" => "dr-grpo",
        "reinforce_plus_plus" => "reinforce++",
        "reinforce_plus_plus_baseline" => "reinforce++-baseline",
        "rloo" => "rloo",
        "remax" => "remax",
        other => {
            let note = format!("no estimator {other}");
            return draft.note(NAMES[0], Kind::Missing, note);
        }
    };
    draft.set("ppo.advantage", ours, &NAMES);
    draft.imply("ppo.reward_clip", [-1e9, 1e9].map(Value::from).to_vec(), "verl does not clip scores");
}

fn policy(draft: &mut Draft) {
    const BATCH: &str = "actor_rollout_ref.actor.ppo_mini_batch_size";
    const TOKENS: &str = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu";
    const CLIP: &str = "actor_rollout_ref.actor.clip_ratio";
    const GROUPS: [&str; 2] = ["algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches"];
    const WEIGHTS: &str = "algorithm.rollout_correction.rollout_is";
    let samples = draft.number(&["actor_rollout_ref.rollout.n"]).unwrap_or(1.0);
    let prompts = draft.number(&[BATCH]).unwrap_or(256.0);
    let all = draft.number(&["data.train_batch_size"]).unwrap_or(1024.0) * samples;
    draft.set("ppo.minibatch_samples", (prompts * samples).min(all) as i64, &[BATCH, "actor_rollout_ref.rollout.n"]);
    if let Some(tokens) =
        draft.number(&[TOKENS]).filter(|_| draft.is_true(&["actor_rollout_ref.actor.use_dynamic_bsz"]))
    {
        draft.set("ppo.microbatch_tokens_max", tokens as i64, &[TOKENS]);
    } else {
        draft.imply("ppo.microbatch_tokens_max", "auto", "losses do not depend on it");
    }
    let sides = [
        ("ppo.clip_low", "actor_rollout_ref.actor.clip_ratio_low"),
        ("ppo.clip_high", "actor_rollout_ref.actor.clip_ratio_high"),
    ];
    for (key, name) in sides {
        let used = if draft.given(name).is_some() || draft.given(CLIP).is_none() { name } else { CLIP };
        if let Some(clip) = draft.number(&[used]) {
            draft.set(key, clip, &[used]);
        }
    }
    if draft.is_true(&GROUPS[..1]) {
        let most = draft.number(&GROUPS[1..]).filter(|most| *most > 1.0).unwrap_or(10.0);
        draft.set("rollout.dynamic_sampling.prompts_max_factor", most as i64, &GROUPS);
    }
    if draft.is_true(&["actor_rollout_ref.rollout.multi_turn.enable"]) {
        let name = "actor_rollout_ref.rollout.multi_turn.enable";
        draft.note(name, Kind::Missing, "write an environment: `rlhf-hpc help tools`");
    }
    match draft.text(&[WEIGHTS]).as_deref() {
        Some("token") => {
            draft.set("ppo.correction", "tis", &[WEIGHTS]);
            draft.set("ppo.correction_low", 0.0, &[WEIGHTS]);
            let name = "algorithm.rollout_correction.rollout_is_threshold";
            let high = draft.number(&[name]).unwrap_or(2.0);
            draft.set("ppo.correction_high", high, &[name]);
        }
        Some("sequence") => draft.note(WEIGHTS, Kind::Missing, "weights are those of tokens"),
        _ => {}
    }
}

fn kl(draft: &mut Draft) {
    let in_reward = "algorithm.use_kl_in_reward";
    let in_loss = "actor_rollout_ref.actor.use_kl_loss";
    let (place, enable, coef, kind) = if draft.is_true(&[in_loss]) {
        ("loss", in_loss, "actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.kl_loss_type")
    } else if draft.is_true(&[in_reward]) {
        ("reward", in_reward, "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    } else {
        draft.set("ppo.kl_in", "none", &[in_loss, in_reward]);
        for name in [
            "actor_rollout_ref.actor.kl_loss_coef",
            "actor_rollout_ref.actor.kl_loss_type",
            "algorithm.kl_ctrl.kl_coef",
            "algorithm.kl_penalty",
        ] {
            if draft.given(name).is_some() {
                draft.note(name, Kind::Needless, "no KL in the loss and none in the reward");
            }
        }
        return;
    };
    if draft.is_true(&[in_loss]) && draft.is_true(&[in_reward]) {
        draft.note(in_reward, Kind::Missing, "the KL is in the loss or in the reward, not in both");
    }
    draft.set("ppo.kl_in", place, &[enable]);
    if let Some(beta) = draft.number(&[coef]) {
        draft.set("ppo.kl_coef", beta, &[coef]);
    }
    let name = draft.text(&[kind]).unwrap_or_default();
    match name.as_str() {
        "kl" | "k1" if place == "reward" => draft.set("ppo.kl_estimator", "k1", &[kind]),
        "kl" | "k1" => {
            draft.set("ppo.kl_estimator", "k2", &[kind]);
            draft.note(
                kind,
                Kind::Approximate,
                "k1 in the loss has no useful gradient: \"k2\" has that of the reverse KL",
            );
        }
        "mse" | "k2" => draft.set("ppo.kl_estimator", "k2", &[kind]),
        "low_var_kl" | "k3" => draft.set("ppo.kl_estimator", "k3", &[kind]),
        other => draft.note(kind, Kind::Missing, format!("no estimator {other}")),
    }
    if place == "reward" && draft.text(&["algorithm.kl_ctrl.type"]).is_some_and(|kind| kind == "adaptive") {
        let [target, horizon] = [("algorithm.kl_ctrl.target_kl", 0.1), ("algorithm.kl_ctrl.horizon", 1e4)]
            .map(|(name, default)| draft.number(&[name]).unwrap_or(default));
        draft.set("ppo.kl_target", target, &["algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.type"]);
        draft.set("ppo.kl_horizon", horizon, &["algorithm.kl_ctrl.horizon"]);
    }
}

fn optimizers(draft: &mut Draft) {
    let passes = draft.number(&["trainer.total_epochs"]).unwrap_or(30.0);
    match draft.number(&["trainer.total_training_steps"]).filter(|steps| *steps > 0.0) {
        Some(steps) => draft.set("job.steps", steps as i64, &["trainer.total_training_steps"]),
        None => paths::set_steps(draft, passes, &["trainer.total_epochs"]),
    }
    let whole = |key: &str| draft.value(key).and_then(Value::as_integer).map(|number| number as f64);
    let samples =
        whole("rollout.prompts_per_step").unwrap_or(1024.0) * whole("rollout.samples_per_prompt").unwrap_or(1.0);
    let per_step =
        (samples / whole("ppo.minibatch_samples").unwrap_or(samples)).max(1.0) * whole("ppo.epochs").unwrap_or(1.0);
    let updates = whole("job.steps").map_or(1.0, |steps| steps * per_step);
    let roles = [
        (
            "actor",
            ["actor_rollout_ref.actor.optim.lr_warmup_steps", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"],
        ),
        ("critic", ["critic.optim.lr_warmup_steps", "critic.optim.lr_warmup_steps_ratio"]),
    ];
    for (role, [steps, ratio]) in roles {
        let key = format!("optim.{role}.warmup_ratio");
        if let Some(count) = draft.number(&[steps]).filter(|steps| *steps >= 0.0) {
            draft.set(&key, rounded((count / updates).min(1.0)), &[steps]);
        } else {
            let share = draft.number(&[ratio]).unwrap_or(0.0);
            draft.set(&key, share, &[ratio]);
        }
        draft.imply(&format!("optim.{role}.decay_vectors"), true, "norms and biases decay there, too");
    }
}

fn lora(draft: &mut Draft) {
    for (prefix, key) in [("actor_rollout_ref.model", "lora"), ("critic.model", "lora.critic")] {
        let names = [format!("{prefix}.lora_rank"), format!("{prefix}.lora.rank")];
        let ranks = names.map(|name| draft.known.keys().copied().find(|known| *known == name).unwrap_or_default());
        let rank = draft.number(&ranks).unwrap_or(0.0);
        if rank <= 0.0 {
            continue;
        }
        draft.set(&format!("{key}.rank"), rank as i64, &ranks);
        let of = |name: &str| draft.known.keys().copied().find(|known| *known == format!("{prefix}.{name}"));
        let [alpha, targets, exclude] =
            ["lora_alpha", "target_modules", "exclude_modules"].map(|name| of(name).unwrap_or_default());
        let value = draft.number(&[alpha]).unwrap_or(16.0);
        draft.set(&format!("{key}.alpha"), value, &[alpha]);
        words(draft, targets, &format!("{key}.targets"));
        words(draft, exclude, &format!("{key}.exclude"));
    }
}

fn rewards(draft: &mut Draft) {
    let enable = draft.name(&["reward.reward_model.enable", "reward_model.enable"]);
    let model = draft.name(&["reward.reward_model.model_path", "reward_model.model.path"]);
    if draft.is_true(&[enable])
        && let Some(dir) = draft.text(&[model])
    {
        let dir = paths::model(draft, &dir);
        draft.set("reward.models", vec![Value::from(dir)], &[model, enable]);
    }
    let path = draft.name(&["reward.custom_reward_function.path", "custom_reward_function.path"]);
    let function = draft.name(&["reward.custom_reward_function.name", "custom_reward_function.name"]);
    if let Some(file) = draft.text(&[path]) {
        let table = Table::from_iter([("file".to_owned(), Value::from(paths::local(&file)))]);
        draft.set("reward.python", vec![Value::from(table)], &[path]);
        let called = draft.text(&[function]).unwrap_or_else(|| "compute_score".to_owned());
        draft.note(
            path,
            Kind::Approximate,
            format!("add reward_func(queries, prompts, labels, **kwargs), which calls {called}"),
        );
        return;
    }
    let sources = draft.value("data.prompts").map(Value::to_string).unwrap_or_default();
    if sources.contains("gsm8k") {
        let rule = [("kind", "number"), ("extract", r"#### (-?[0-9.,]+)")];
        let rule = rule.map(|(key, value)| (key.to_owned(), Value::from(value)));
        draft.imply(
            "reward.rule",
            vec![Value::from(Table::from_iter(rule))],
            "the score that verl gives rows of gsm8k",
        );
    } else if draft.value("reward.models").is_none() {
        missing_reward(draft, path);
        draft.note(path, Kind::Missing, "verl chooses a score by data_source: write it into reward.py");
    }
}

/// The ranks of all roles, and those of the reward models if these have a resource pool of their own.
fn groups(draft: &Draft, nodes: usize, per_node: usize) -> Vec<Group> {
    let [enable, pool_gpus, pool_nodes] = [&POOL[..2], &POOL[2..4], &POOL[4..]];
    let has_pool = draft.is_true(enable) && draft.value("reward.models").is_some();
    let mut all = Group { roles: vec!["actor", "critic", "reference", "reward"], nodes, per_node };
    if !has_pool {
        return vec![all];
    }
    all.roles.pop();
    let [nodes, per_node] =
        [(pool_nodes, 1.0), (pool_gpus, 8.0)].map(|(names, default)| draft.number(names).unwrap_or(default) as usize);
    vec![all, Group { roles: vec!["reward"], nodes, per_node }]
}

fn run(draft: &mut Draft) {
    let name = draft.text(&["trainer.experiment_name"]).unwrap_or_else(|| "run".to_owned());
    let project = draft.text(&["trainer.project_name"]).unwrap_or_else(|| "verl".to_owned());
    let dir = draft.text(&["trainer.default_local_dir"]).filter(|dir| !dir.contains("${"));
    let dir = dir.map_or_else(|| format!("checkpoints/{project}/{name}"), |dir| paths::local(&dir));
    draft.set("job.dir", dir, &["trainer.default_local_dir"]);
    if draft.given("trainer.logger").is_some() {
        let writes = draft.list(&["trainer.logger"]).iter().any(|logger| logger == "tensorboard");
        draft.set("metrics.tensorboard", writes, &["trainer.logger"]);
    }
    if draft.is_true(&["trainer.val_only"]) {
        draft.note("trainer.val_only", Kind::Approximate, "set job.kind = \"eval\"");
    }
    if draft.value("ppo.advantage").and_then(Value::as_str) == Some("gae")
        && let Some(critic) = draft.text(&["critic.model.path"])
    {
        let dir = paths::model(draft, &critic);
        draft.set("model.critic", dir, &["critic.model.path"]);
    }
    let [nodes, gpus] = [("trainer.nnodes", 1.0), ("trainer.n_gpus_per_node", 8.0)]
        .map(|(name, default)| draft.number(&[name]).unwrap_or(default).max(1.0) as usize);
    layout::set_groups(draft, &groups(draft, nodes, gpus), &POOL);
    let strategy = draft.given("actor_rollout_ref.actor.strategy").map(Given::text);
    if strategy.is_some_and(|strategy| strategy == "megatron") {
        draft.note(
            &format!("{ACTOR}.strategy"),
            Kind::Approximate,
            "mesh.tensor is left to the plan, and mesh.pipeline is 1 unless it is set",
        );
    }
}
