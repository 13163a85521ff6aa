//! Options of TRL that belong together.

use super::draft::Draft;
use super::given::Given;
use super::layout;
use super::paths;
use super::shared::{missing_reward, numbers, rounded, set_schedule, words};
use super::table::Kind;
use crate::error::Result;
use std::path::Path;
use toml::{Table, Value};

const WIDE: [f64; 2] = [-1e9, 1e9];

pub fn combine(draft: &mut Draft) -> Result<()> {
    let method = draft.launch.dialect.command.clone();
    rows(draft)?;
    batches(draft, &method);
    optimizer(draft, &method);
    lora(draft);
    match method.as_str() {
        "grpo" | "rloo" => groups(draft, &method),
        "ppo" => ppo(draft),
        "dpo" | "cpo" | "orpo" => preference(draft, &method),
        "gkd" | "distillation" => distillation(draft),
        _ => {}
    }
    lengths(draft, &method);
    intervals(draft);
    layout::set_processes(draft);
    Ok(())
}

/// The revision of a model, and the folder of a data set, that are parts of their names here.
fn of_repositories(draft: &mut Draft, rows_of_hub: bool) {
    let actor = draft.value("model.actor").and_then(Value::as_str).map(str::to_owned);
    if let (Some(name), Some(revision)) = (actor, draft.given("model_revision").map(Given::text)) {
        match paths::at_revision(&name, &revision) {
            Some(name) => draft.set("model.actor", name, &["model_name_or_path", "model_revision"]),
            None => draft.note("model_revision", Kind::Needless, "a directory has no revisions"),
        }
    }
    let Some(folder) = draft.given("dataset_config").map(Given::text) else { return };
    let sources = draft.value("data.prompts").and_then(Value::as_array).cloned().unwrap_or_default();
    if !rows_of_hub {
        draft.note("dataset_config", Kind::Approximate, "files have no configurations: name the files that train");
        return;
    }
    let within = |source: &Value| Value::from(format!("{}/{folder}", source.as_str().unwrap_or_default()));
    draft.set("data.prompts", sources.iter().map(within).collect::<Vec<_>>(), &["dataset_name", "dataset_config"]);
}

fn rows(draft: &mut Draft) -> Result<()> {
    let of_hub = paths::set_rows(draft, "dataset_name", Some("dataset_train_split"))?;
    of_repositories(draft, of_hub);
    let evaluates =
        !["no", ""].contains(&draft.text(&["eval_strategy", "evaluation_strategy"]).unwrap_or_default().as_str());
    if evaluates && of_hub {
        let split = draft.text(&["dataset_test_split"]).unwrap_or_else(|| "test".to_owned());
        draft.set("data.eval_split", split, &["dataset_test_split"]);
    } else if draft.given("dataset_test_split").is_some() {
        let (kind, note) = if evaluates {
            (Kind::Approximate, "files have no splits: set data.split, then eval.every_steps")
        } else {
            (Kind::Needless, "no evaluation")
        };
        draft.note("dataset_test_split", kind, note);
    }
    if draft.kind == "sft" {
        draft.set("data.response_key", "completion", &[]);
        if let Some(field) = draft.given("dataset_text_field").map(Given::text) {
            draft.set("data.prompt_key", field, &["dataset_text_field"]);
        }
        let all = |draft: &Draft, name| draft.given(name).is_some_and(|_| !draft.is_true(&[name]));
        if draft.is_true(&["assistant_only_loss"]) || draft.is_true(&["completion_only_loss"]) {
            draft.set("sft.loss_on", "response", &["assistant_only_loss", "completion_only_loss"]);
        } else if all(draft, "completion_only_loss") {
            draft.set("sft.loss_on", "all", &["completion_only_loss"]);
        } else {
            draft.imply("sft.loss_on", "response", "TRL learns all tokens of rows of text or messages: \"all\"");
        }
    } else if draft.kind == "kto" {
        draft.set("data.response_key", "completion", &[]);
        draft.set("data.label_key", "label", &[]);
    } else if draft.kind == "step_reward" {
        draft.set("data.label_key", "labels", &[]);
    }
    draft.head.push("rows with messages, which TRL calls conversational, need data.chat_template = true".to_owned());
    Ok(())
}

/// The devices of the launch.
fn devices(draft: &Draft) -> f64 {
    let of = draft.launch.processes;
    let total = of.total.or(of.per_node.map(|per_node| per_node * of.nodes.unwrap_or(1)));
    total.unwrap_or(1).max(1) as f64
}

fn batches(draft: &mut Draft, method: &str) {
    const NAMES: [&str; 2] = ["per_device_train_batch_size", "gradient_accumulation_steps"];
    let [per_device, accumulation] = NAMES.map(|name| draft.number(&[name]).unwrap_or(1.0));
    let batch = per_device * accumulation * devices(draft);
    let epochs = draft.number(&["num_train_epochs"]).unwrap_or(3.0);
    let steps = draft.number(&["max_steps"]).filter(|steps| *steps > 0.0);
    draft.imply("method.microbatch_tokens_max", "auto", "losses do not depend on it");
    match method {
        "grpo" | "rloo" => {
            let n = draft.number(&["num_generations"]).unwrap_or(8.0);
            let each = draft.number(&["steps_per_generation"]).unwrap_or(accumulation);
            let all = draft.number(&["generation_batch_size"]).unwrap_or(per_device * devices(draft) * each);
            let prompts = (all / n).floor().max(1.0);
            let of = ["generation_batch_size", "steps_per_generation", NAMES[0], NAMES[1], "num_generations"];
            draft.set("rollout.prompts_per_step", prompts as i64, &of);
            draft.set("ppo.minibatch_samples", (batch.min(prompts * n)) as i64, &NAMES);
            let iterations = draft.number(&["num_iterations"]).unwrap_or(1.0);
            let updates = (all / batch).max(1.0) * iterations;
            match steps {
                Some(steps) => draft.set("job.steps", (steps / updates).ceil() as i64, &["max_steps"]),
                None => paths::set_steps(draft, epochs, &["num_train_epochs"]),
            }
        }
        "ppo" => {
            let prompts = draft.number(&["batch_size"]).unwrap_or(batch);
            let parts = draft.number(&["num_mini_batches"]).unwrap_or(1.0).max(1.0);
            draft.set("rollout.prompts_per_step", prompts as i64, &["batch_size", NAMES[0], NAMES[1]]);
            draft.set(
                "ppo.minibatch_samples",
                ((prompts / parts) as i64).max(1),
                &["num_mini_batches", NAMES[0], NAMES[1]],
            );
            match draft.number(&["total_episodes"]) {
                Some(all) => draft.set("job.steps", (all / prompts).ceil() as i64, &["total_episodes"]),
                None => paths::set_steps(draft, epochs, &["num_train_epochs"]),
            }
        }
        _ => {
            draft.set("method.minibatch_samples", batch as i64, &NAMES);
            match steps {
                Some(steps) => draft.set("job.steps", steps as i64, &["max_steps"]),
                None => draft.set("method.epochs", epochs, &["num_train_epochs"]),
            }
        }
    }
    if steps.is_some() && draft.given("num_train_epochs").is_some() {
        draft.note("num_train_epochs", Kind::Needless, "max_steps is used");
    }
}

/// Optimizer steps of the job, if they are known.
fn updates(draft: &Draft) -> Option<f64> {
    let whole = |key: &str| draft.value(key).and_then(Value::as_integer).map(|number| number as f64);
    let steps = whole("job.steps");
    if draft.kind != "ppo" {
        let epochs = draft.value("method.epochs").and_then(Value::as_float);
        let batch = whole(&draft.key("method.minibatch_samples"))?;
        return steps.or_else(|| Some((epochs.unwrap_or(1.0) * draft.rows? as f64 / batch).ceil()));
    }
    Some(steps? * updates_per_step(draft))
}

/// Optimizer steps of a step of the job.
fn updates_per_step(draft: &Draft) -> f64 {
    let whole = |key: &str, default: f64| draft.value(key).and_then(Value::as_integer).map_or(default, |n| n as f64);
    if draft.kind != "ppo" {
        return 1.0;
    }
    let samples = whole("rollout.prompts_per_step", 1.0) * whole("rollout.samples_per_prompt", 1.0);
    (samples / whole("ppo.minibatch_samples", samples)).max(1.0).ceil() * whole("ppo.epochs", 1.0)
}

fn optimizer(draft: &mut Draft, method: &str) {
    let betas = [("adam_beta1", 0.9), ("adam_beta2", 0.999)];
    let values = betas.map(|(name, default)| Value::from(draft.number(&[name]).unwrap_or(default)));
    draft.set("optim.actor.betas", values.to_vec(), &["adam_beta1", "adam_beta2"]);
    if let Some(steps) =
        draft.number(&["warmup_steps"]).filter(|steps| *steps > 0.0 || draft.given("warmup_ratio").is_none())
    {
        let ratio = if steps < 1.0 { Some(steps) } else { updates(draft).map(|all| rounded((steps / all).min(1.0))) };
        match ratio {
            Some(ratio) => draft.set("optim.actor.warmup_ratio", ratio, &["warmup_steps"]),
            None => draft.note("warmup_steps", Kind::Missing, "the number of steps is unknown: pass --rows N"),
        }
    }
    let rate = draft.number(&["learning_rate"]).unwrap_or(5e-5);
    let kwargs = draft.text(&["lr_scheduler_kwargs"]).unwrap_or_default();
    let kwargs: serde_json::Value = serde_json::from_str(&kwargs.replace('\'', "\"")).unwrap_or_default();
    let least = kwargs["min_lr_rate"].as_f64().or_else(|| Some(kwargs["min_lr"].as_f64()? / rate));
    set_schedule(draft, "actor", "lr_scheduler_type", least.map(|least| (rounded(least), "lr_scheduler_kwargs")));
    if method == "ppo" {
        draft.set("optim.actor.lr", rate, &["learning_rate"]);
        draft.set("optim.critic.lr", rate, &["learning_rate"]);
        for key in ["betas", "eps", "weight_decay", "clip_norm", "schedule", "warmup_ratio", "floor_ratio"] {
            if let Some(item) = draft.items.get(&format!("optim.actor.{key}")).cloned() {
                draft.items.insert(format!("optim.critic.{key}"), item);
            }
        }
    }
}

fn lora(draft: &mut Draft) {
    const NAMES: [&str; 5] =
        ["lora_r", "lora_alpha", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save"];
    if !draft.is_true(&["use_peft"]) {
        for name in NAMES.into_iter().chain(["use_rslora", "lora_dropout"]) {
            if draft.given(name).is_some() {
                draft.note(name, Kind::Needless, "no effect without use_peft");
            }
        }
        return;
    }
    let [rank, alpha] =
        [("lora_r", 16.0), ("lora_alpha", 32.0)].map(|(name, default)| draft.number(&[name]).unwrap_or(default));
    draft.set("lora.rank", rank as i64, &["lora_r", "use_peft"]);
    draft.set("lora.alpha", alpha, &["lora_alpha"]);
    words(draft, "lora_target_modules", "lora.targets");
    words(draft, "lora_target_parameters", "lora.target_parameters");
    words(draft, "lora_modules_to_save", "lora.train_also");
    if draft.value("lora.targets").is_none() {
        let modules: Vec<Value> = ["q_proj", "v_proj"].map(Value::from).to_vec();
        draft.imply("lora.targets", modules, "the modules of PEFT for most families");
    }
    if draft.is_true(&["use_rslora"]) {
        draft.set("lora.rslora", true, &["use_rslora"]);
    }
}

fn groups(draft: &mut Draft, method: &str) {
    let beta = draft.number(&["beta"]).unwrap_or(0.0);
    if beta == 0.0 {
        draft.set("ppo.kl_in", "none", &["beta"]);
    } else {
        draft.set("ppo.kl_coef", beta, &["beta"]);
        draft.set("ppo.kl_in", if method == "grpo" { "loss" } else { "reward" }, &["beta"]);
        draft.set("ppo.kl_estimator", if method == "grpo" { "k3" } else { "k1" }, &["beta"]);
    }
    if beta != 0.0 && method == "grpo" {
        let is_sequence = draft.text(&["importance_sampling_level"]).is_some_and(|level| level == "sequence");
        let is_weighted = draft.is_true(&["use_bias_correction_kl"]);
        draft.set("ppo.kl_weighted", is_weighted && !is_sequence, &["use_bias_correction_kl"]);
        if is_weighted && is_sequence {
            draft.note("use_bias_correction_kl", Kind::Approximate, "no weight of the KL with one ratio per sequence");
        }
    }
    let loss = draft.text(&["loss_type"]).unwrap_or_default();
    let clip = draft.number(&["epsilon"]).unwrap_or(0.2);
    let high = draft.number(&["epsilon_high"]).unwrap_or(clip);
    draft.set("ppo.clip_low", clip, &["epsilon"]);
    let high = if loss == "cispo" { rounded((high - 1.0).max(0.0)) } else { high };
    draft.set("ppo.clip_high", high, &["epsilon_high", "epsilon"]);
    let range: Vec<f64> = numbers(&draft.list(&["reward_clip_range"])).flatten().collect();
    let range = <[f64; 2]>::try_from(range).unwrap_or(WIDE);
    draft.set("ppo.reward_clip", range.map(Value::from).to_vec(), &["reward_clip_range"]);
    if method == "rloo" {
        draft.imply("ppo.advantage", "rloo", "RLOO");
    } else {
        losses(draft, &loss);
    }
    rewards(draft);
}

/// The advantage and the loss of GRPO.
fn losses(draft: &mut Draft, loss: &str) {
    let scale = draft.text(&["scale_rewards"]).unwrap_or_default().to_lowercase();
    let apart = draft.text(&["multi_objective_aggregation"]).is_some_and(|how| how == "normalize_then_sum");
    let advantage = match scale.as_str() {
        _ if apart => "gdpo",
        "none" | "false" | "" if draft.given("scale_rewards").is_some() => "dr-grpo",
        "batch" => {
            draft.note("scale_rewards", Kind::Missing, "scores are not divided by their deviation over the batch");
            "grpo"
        }
        _ => "grpo",
    };
    draft.set("ppo.advantage", advantage, &["scale_rewards", "multi_objective_aggregation"]);
    let (policy, aggregation) = match loss {
        "dapo" | "bnpo" | "" => ("clip", "token"),
        "grpo" => ("clip", "sequence"),
        "dr_grpo" => ("clip", "sequence_sum_fixed"),
        "cispo" => ("cispo", "token"),
        "sapo" => ("sapo", "sequence"),
        other => return draft.note("loss_type", Kind::Missing, format!("no loss {other}")),
    };
    draft.set("ppo.loss", policy, &["loss_type"]);
    draft.set("ppo.aggregation", aggregation, &["loss_type"]);
    if draft.text(&["importance_sampling_level"]).is_some_and(|level| level.starts_with("sequence")) {
        draft.set("ppo.loss", "gspo", &["importance_sampling_level"]);
    }
}

/// Reward functions by their import paths, and reward models by their names.
fn rewards(draft: &mut Draft) {
    const NAMES: [&str; 2] = ["reward_funcs", "reward_weights"];
    let names: Vec<String> = draft.list(&["reward_funcs"]);
    let weights: Vec<f64> = numbers(&draft.list(&["reward_weights"])).flatten().collect();
    let (mut functions, mut models, mut of_trl) = (Vec::new(), Vec::new(), Vec::new());
    for (i, name) in names.iter().enumerate() {
        let mut table = Table::new();
        if let Some(weight) = weights.get(i) {
            table.insert("weight".into(), (*weight).into());
        }
        if name.contains('/') {
            table.insert("dir".into(), paths::model(draft, name).into());
            models.push(Value::from(table));
            continue;
        }
        let (module, function) = name.rsplit_once('.').unwrap_or(("", name));
        let file = if module.is_empty() { "reward.py".to_owned() } else { format!("{}.py", module.replace('.', "/")) };
        if module.is_empty() || module.starts_with("trl.") {
            of_trl.push(function.to_owned());
        }
        table.insert("file".into(), if module.starts_with("trl.") { "reward.py".to_owned() } else { file }.into());
        table.insert("function".into(), function.into());
        functions.push(Value::from(table));
    }
    if !of_trl.is_empty() {
        draft.note("reward_funcs", Kind::Approximate, format!("copy {} of TRL into reward.py", of_trl.join(", ")));
    }
    for (key, all) in [("reward.python", functions), ("reward.models", models)] {
        if !all.is_empty() {
            draft.set(key, all, &NAMES);
        }
    }
    if names.is_empty() {
        missing_reward(draft, "reward_funcs");
    }
}

fn ppo(draft: &mut Draft) {
    draft.imply("ppo.advantage", "gae", "PPO");
    draft.imply("ppo.kl_in", "reward", "PPO");
    draft.imply("ppo.reward_clip", WIDE.map(Value::from).to_vec(), "TRL does not clip scores");
    if let Some(clip) = draft.number(&["cliprange"]) {
        draft.set("ppo.clip_low", clip, &["cliprange"]);
        draft.set("ppo.clip_high", clip, &["cliprange"]);
    }
    let id = draft.number(&["stop_token_id"]);
    let stops_at_eos = draft.text(&["stop_token"]).is_some_and(|token| token == "eos");
    if let Some(id) = id {
        draft.set("rollout.stop_token_ids", vec![Value::from(id as i64)], &["stop_token_id"]);
    }
    if !stops_at_eos {
        draft.set("rollout.ignore_eos", true, &["stop_token"]);
    }
    if draft.value("reward.models").is_none() {
        missing_reward(draft, "reward_model_path");
    }
}

fn preference(draft: &mut Draft, method: &str) {
    let all = draft.list(&["loss_type"]);
    let loss = match (method, all.as_slice()) {
        ("orpo", _) => "orpo",
        ("cpo", [one]) if one == "simpo" => "simpo",
        ("dpo", [one]) if one == "sigmoid" => "sigmoid",
        ("dpo", [one]) if one == "ipo" => {
            draft.note("loss_type", Kind::Approximate, "log-probabilities are summed, and means over tokens there");
            "ipo"
        }
        ("dpo", []) => "sigmoid",
        _ => return draft.note("loss_type", Kind::Missing, format!("no loss {}", all.join(" "))),
    };
    if method == "orpo" {
        draft.imply("dpo.loss", loss, "ORPO");
    } else {
        draft.set("dpo.loss", loss, &["loss_type"]);
    }
}

fn distillation(draft: &mut Draft) {
    let beta = draft.number(&["beta"]).unwrap_or(0.5);
    let divergence =
        [(0.0, "forward_kl"), (1.0, "reverse_kl"), (0.5, "jsd")].into_iter().find(|(known, _)| *known == beta);
    match divergence {
        Some((_, name)) => draft.set("distill.divergence", name, &["beta"]),
        None => draft.note("beta", Kind::Missing, "a mixture of 0, 0.5 or 1"),
    }
    let share = if draft.known.contains_key("lmbda") { draft.number(&["lmbda"]).unwrap_or(0.5) } else { 1.0 };
    if share > 0.0 && share < 1.0 {
        draft.note("lmbda", Kind::Missing, "all rows are sampled, or none");
    }
    let samples = share >= 0.5;
    draft.set("distill.on_policy", samples, &["lmbda"]);
    if samples {
        let batch = draft.value("distill.minibatch_samples").cloned().unwrap_or_else(|| 64.into());
        draft.imply("rollout.prompts_per_step", batch, "one optimizer step for each batch of samples");
    } else {
        draft.imply("distill.ce_coef", 0.0, "the loss is the divergence alone");
        draft.set("data.response_key", "completion", &[]);
    }
}

fn lengths(draft: &mut Draft, method: &str) {
    let name = draft.name(&["max_length", "max_seq_length"]);
    if draft.kind == "ppo" {
        if draft.given("max_prompt_length").is_none() {
            draft
                .head
                .push("TRL does not limit prompts: longer ones than data.prompt_tokens_max are filtered".to_owned());
        } else {
            draft.imply("data.long_prompts", "truncate_left", "longer prompts are cut there");
        }
        return;
    }
    if let Some(tokens) = draft.number(&[name]).map(|tokens| tokens as i64) {
        draft.set("data.row_tokens_max", tokens, &[name]);
        draft.set_new("data.prompt_tokens_max", tokens, &[name]);
        if method != "reward" && !draft.items.contains_key("data.long_prompts") {
            draft.imply("data.long_prompts", "truncate_right", "longer rows are cut there");
        }
    }
    if let Some(text) = draft.given("step_separator").filter(|_| method == "prm").map(Given::text) {
        draft.set("step_reward.placeholder", text, &["step_separator"]);
    }
}

/// Intervals of evaluations, checkpoints and lines, in steps of the job.
fn intervals(draft: &mut Draft) {
    let per_step = updates_per_step(draft);
    let in_steps = |count: f64| (count / per_step).ceil().max(1.0) as i64;
    let share =
        |draft: &Draft, value: f64| if value < 1.0 { updates(draft).map(|all| value * all) } else { Some(value) };
    let strategy = draft.name(&["eval_strategy", "evaluation_strategy"]);
    let names =
        [("eval.every_steps", strategy, "eval_steps"), ("checkpoint.every_steps", "save_strategy", "save_steps")];
    for (key, strategy, count) in names {
        let epoch = updates(draft).zip(draft.number(&["num_train_epochs"])).map(|(all, epochs)| all / epochs);
        let every = match draft.text(&[strategy]).unwrap_or_default().as_str() {
            "steps" => draft.number(&[count, "logging_steps"]).and_then(|value| share(draft, value)),
            "epoch" => epoch,
            "best" => {
                draft.note(strategy, Kind::Approximate, "set checkpoint.best_metric (`rlhf-hpc help metrics`)");
                Some(0.0)
            }
            _ => Some(0.0),
        };
        match every {
            Some(count_of) if count_of <= 0.0 => draft.set(key, 0, &[strategy]),
            Some(count_of) => draft.set(key, in_steps(count_of), &[strategy, count]),
            None => draft.note(strategy, Kind::Approximate, "the number of steps is unknown: pass --rows N"),
        }
    }
    if let Some(every) = draft.number(&["logging_steps"]).filter(|every| *every >= 1.0) {
        draft.set("metrics.print_every", in_steps(every), &["logging_steps"]);
    }
    if draft.given("report_to").is_some() {
        let writes = draft.list(&["report_to"]).iter().any(|to| to == "tensorboard" || to == "all");
        draft.set("metrics.tensorboard", writes, &["report_to"]);
    }
    if draft.given("metric_for_best_model").is_some() {
        draft.note("metric_for_best_model", Kind::Approximate, "set checkpoint.best_metric (`rlhf-hpc help metrics`)");
        draft.items.remove("checkpoint.best_mode");
        draft.items.remove("checkpoint.export_best");
    }
    if draft.given("log_completions").is_some() && !draft.is_true(&["log_completions"]) {
        draft.set("metrics.samples_every_steps", 0, &["log_completions"]);
    }
    let dir = draft.value("job.dir").and_then(Value::as_str).map(paths::local);
    if let Some(dir) = dir.filter(|dir| Path::new(dir) != Path::new("")) {
        draft.set("job.dir", dir, &["output_dir"]);
    }
}
