//! Options of OpenRLHF that belong together.

use super::draft::Draft;
use super::launch::is_python;
use super::layout::{self, Group};
use super::paths;
use super::shared::{missing_reward, numbers, set_schedule, words};
use super::table::Kind;
use crate::error::Result;
use toml::{Table, Value};

const CHAT: &[&str] = &["apply_chat_template", "data.apply_chat_template"];

pub fn combine(draft: &mut Draft) -> Result<()> {
    let is_ppo = draft.kind == "ppo";
    run(draft);
    rows(draft)?;
    fields(draft);
    lengths(draft, is_ppo);
    schedules(draft, is_ppo);
    let targets = draft.name(&["target_modules", "ds.lora.target_modules"]);
    words(draft, targets, "lora.targets");
    if is_ppo {
        policy(draft);
        kl(draft);
        sources(draft);
        corrections(draft);
        let episodes = draft.name(&["num_episodes", "train.num_episodes"]);
        let passes = draft.number(&[episodes]).unwrap_or(1.0);
        paths::set_steps(draft, passes, &[episodes]);
        placement(draft);
    } else {
        layout::set_processes(draft);
    }
    Ok(())
}

fn run(draft: &mut Draft) {
    let [save, checkpoints] =
        [&["save_path", "ckpt.output_dir"], &["ckpt_path", "ckpt.path"]].map(|names| draft.name(names));
    let name = if draft.given(save).is_none() && draft.given(checkpoints).is_some() { checkpoints } else { save };
    if let Some(dir) = draft.text(&[name]) {
        draft.set("job.dir", paths::local(&dir), &[name]);
    }
    if name == save && draft.given(checkpoints).is_some() {
        draft.note(checkpoints, Kind::Computed, "checkpoints are in `checkpoints/` of job.dir");
    }
    let best = draft.name(&["ckpt.best_metric_key"]);
    if let Some(metric) = draft.text(&[best]).filter(|metric| !metric.is_empty()) {
        draft.note(best, Kind::Approximate, format!("set checkpoint.best_metric to our metric for {metric}"));
    }
}

fn rows(draft: &mut Draft) -> Result<()> {
    let name = draft.name(&["prompt_data", "data.prompt_dataset", "dataset", "data.dataset"]);
    let split =
        draft.name(&["prompt_split", "data.prompt_split", "train_split", "dataset_split", "data.dataset_split"]);
    let of_hub = paths::set_rows(draft, name, Some(split))?;
    let sources = draft.value("data.prompts").and_then(Value::as_array).map_or(0, Vec::len);
    let weights = draft.name(&["prompt_data_probs", "data.prompt_probs", "dataset_probs", "data.dataset_probs"]);
    let all: Vec<f64> = numbers(&draft.list(&[weights])).flatten().collect();
    if sources > 1 && all.len() == sources {
        draft.set("data.weights", all.into_iter().map(Value::from).collect::<Vec<_>>(), &[weights]);
    } else if draft.given(weights).is_some() {
        draft.note(weights, Kind::Needless, "one source");
    }
    evaluation(draft, of_hub);
    let pretrain = draft.list(&["pretrain_data"]);
    if draft.kind == "ppo" && !pretrain.is_empty() {
        let (texts, _) = paths::sources(draft, &pretrain);
        draft.set("data.pretrain", texts, &["pretrain_data"]);
        if let Some(coef) = draft.number(&["ptx_coef"]) {
            draft.set("ppo.ptx_coef", coef, &["ptx_coef"]);
        }
    } else if draft.given("ptx_coef").is_some() {
        draft.note("ptx_coef", Kind::Needless, "no effect without pretrain_data");
    }
    Ok(())
}

fn evaluation(draft: &mut Draft, of_hub: bool) {
    let names = ["eval_steps", "eval.steps"];
    let steps = draft.name(&names);
    let split = draft.name(&["eval_split", "eval.split"]);
    let every = draft.number(&[steps]).unwrap_or(-1.0);
    let files = draft.name(&["eval_dataset", "eval.dataset"]);
    let sampled =
        [["eval_temperature", "eval.temperature"], ["eval_n_samples_per_prompt", "eval.n_samples_per_prompt"]];
    if every <= 0.0 {
        for name in [&[steps, files, split][..], &sampled.concat()].concat() {
            if draft.given(name).is_some() {
                draft.note(name, Kind::Needless, "no evaluation, because eval_steps is not above 0");
            }
        }
        return;
    }
    let given = draft.list(&[files]);
    if !given.is_empty() {
        let (sources, _) = paths::sources(draft, &given);
        draft.set("data.split.by", "file", &[files]);
        draft.set("data.split.eval_files", sources, &[files]);
        draft.set("data.eval_split", "test", &[files]);
        draft.items.remove("data.prompt_split");
        if draft.given(split).is_some() {
            draft.note(split, Kind::Approximate, "the files of the evaluation are named");
        }
    } else if of_hub && draft.kind != "ppo" && draft.known.contains_key(split) {
        let name = draft.text(&[split]).unwrap_or_else(|| "test".into());
        draft.set("data.eval_split", name, &[split]);
    } else {
        for name in [steps, split] {
            if draft.given(name).is_some() {
                draft.note(
                    name,
                    Kind::Approximate,
                    "no held-out rows are named: set data.split, then eval.every_steps",
                );
            }
        }
        return;
    }
    draft.set("eval.every_steps", every as i64, &[steps]);
    if draft.kind == "ppo" {
        let [temperature, samples] = sampled.map(|names| draft.name(&names));
        if let Some(value) = draft.number(&[temperature]) {
            draft.set("eval.temperature", value, &[temperature]);
        }
        if let Some(n) = draft.number(&[samples]) {
            draft.set("eval.samples_per_prompt", n as i64, &[samples]);
            draft.set("eval.pass_at", vec![Value::from(n as i64)], &[samples]);
        }
    }
}

/// The fields of a row, and the template of its prompt.
fn fields(draft: &mut Draft) {
    let is_chat = draft.is_true(CHAT);
    let [input, output] = [&["input_key", "data.input_key"], &["output_key", "data.output_key"]].map(|n| draft.name(n));
    let several = draft.name(&["multiturn", "data.multiturn"]);
    let has_responses = ["sft", "kto", "distill"].contains(&draft.kind);
    if let Some(key) = draft.text(&[input]).filter(|_| draft.known.contains_key(input)) {
        let response = draft.text(&[output]);
        if has_responses && response.is_none() && is_chat {
            draft.set("data.messages_key", key, &[input, several]);
            if draft.kind == "sft" && !draft.is_true(&[several]) && !draft.items.contains_key("sft.loss_on") {
                draft.imply(
                    "sft.loss_on",
                    "last_response",
                    "the last answer of a conversation, as without --multiturn",
                );
            }
        } else {
            draft.set("data.prompt_key", key, &[input]);
        }
        if let Some(response) = response.filter(|_| has_responses) {
            draft.set("data.response_key", response, &[output]);
        }
    }
    let template = draft.name(&["input_template", "data.input_template"]);
    let text = draft.text(&[template]).map(|text| text.replace("\\n", "\n"));
    match text.filter(|text| text.contains("{}")) {
        Some(_) if is_chat && draft.given(template).is_some() => {
            draft.note(template, Kind::Needless, "a chat template is applied");
        }
        Some(_) if is_chat => {}
        // The default of the table has lost the space at its end.
        Some(text) => {
            let text = if draft.given(template).is_some() { text } else { format!("{} ", text.trim_end()) };
            draft.set("data.template", text, &[template]);
        }
        None => {}
    }
}

fn lengths(draft: &mut Draft, is_ppo: bool) {
    let name = draft.name(&["max_len", "data.max_len"]);
    let longest = draft.number(&[name]).map(|tokens| tokens as i64);
    if !is_ppo {
        if let Some(tokens) = longest {
            draft.set("data.row_tokens_max", tokens, &[name]);
            draft.set("data.prompt_tokens_max", tokens, &[name]);
            draft.imply("data.long_prompts", "truncate_right", "longer rows are cut there");
        }
        return;
    }
    if let Some(tokens) = draft.number(&["prompt_max_len"]) {
        draft.set("data.prompt_tokens_max", tokens as i64, &["prompt_max_len"]);
        draft.imply("data.long_prompts", "truncate_right", "longer prompts are cut there");
    } else if let Some(tokens) = longest.filter(|_| draft.known.contains_key("data.max_len")) {
        let new = draft.number(&["rollout.max_new_tokens"]).map_or(tokens / 2, |new| new as i64).min(tokens - 1);
        draft.set("rollout.response_tokens_max", new, &["rollout.max_new_tokens", name]);
        draft.set("data.prompt_tokens_max", tokens - new, &[name]);
        if draft.given(name).is_some() {
            let note = format!("prompts have {} tokens and responses {new}, in all {tokens}", tokens - new);
            draft.note(name, Kind::Approximate, note);
        }
    }
}

/// Schedules of the learning rate. Options without a role are those of the critic, too.
fn schedules(draft: &mut Draft, is_ppo: bool) {
    for (role, names, floors) in [
        ("actor", ["lr_scheduler", "actor.lr_scheduler"], ["min_lr_ratio", "actor.min_lr_ratio"]),
        ("critic", ["critic.lr_scheduler", "lr_scheduler"], ["critic.min_lr_ratio", "min_lr_ratio"]),
    ] {
        if role == "critic" && !is_ppo {
            continue;
        }
        let (name, floor) = (draft.name(&names), draft.name(&floors));
        let least = draft.number(&[floor]).unwrap_or(0.1);
        set_schedule(draft, role, name, Some((least, floor)));
    }
    if is_ppo && draft.known.contains_key("adam_betas") {
        for key in ["betas", "weight_decay", "clip_norm", "warmup_ratio"] {
            if let Some(item) = draft.items.get(&format!("optim.actor.{key}")).cloned() {
                draft.items.insert(format!("optim.critic.{key}"), item);
            }
        }
    }
}

fn policy(draft: &mut Draft) {
    let both = draft.name(&["eps_clip", "actor.eps_clip"]);
    let apart: Vec<f64> = numbers(&draft.list(&["actor.eps_clip_low_high"])).flatten().collect();
    if let [low, high] = apart[..] {
        draft.set("ppo.clip_low", low, &["actor.eps_clip_low_high"]);
        draft.set("ppo.clip_high", high, &["actor.eps_clip_low_high"]);
        if draft.given(both).is_some() {
            draft.note(both, Kind::Needless, "eps_clip_low_high is used");
        }
    } else if let Some(clip) = draft.number(&[both]) {
        draft.set("ppo.clip_low", clip, &[both]);
        draft.set("ppo.clip_high", clip, &[both]);
    }
    let (enable, beta) = (draft.name(&["enable_ema", "train.enable_ema"]), draft.name(&["ema_beta", "train.ema_beta"]));
    if draft.is_true(&[enable]) {
        let decay = draft.number(&[beta]).unwrap_or(0.992);
        draft.set("optim.actor.ema_beta", decay, &[enable, beta]);
    } else if draft.given(beta).is_some() {
        draft.note(beta, Kind::Needless, "no effect without enable_ema");
    }
    let range = "algo.dynamic_filtering_range";
    let bounds: Vec<f64> = numbers(&draft.list(&[range])).flatten().collect();
    if draft.is_true(&["algo.dynamic_filtering_enable"])
        && let [low, high] = bounds[..]
    {
        draft.set("rollout.dynamic_sampling.low", low, &[range]);
        draft.set("rollout.dynamic_sampling.high", high, &[range]);
    } else if draft.given(range).is_some() {
        draft.note(range, Kind::Needless, "no effect without dynamic_filtering_enable");
    }
    if let Some(path) = draft.text(&["train.agent_func_path"]) {
        draft.set("reward.environment", vec![Value::from(entry("python", &path))], &["train.agent_func_path"]);
    }
}

fn entry(key: &str, value: &str) -> Table {
    Table::from_iter([(key.to_owned(), Value::from(paths::local(value)))])
}

fn kl(draft: &mut Draft) {
    let coef = draft.name(&["init_kl_coef", "algo.kl.init_coef"]);
    let in_loss = draft.name(&["use_kl_loss", "algo.kl.use_loss"]);
    let estimator = draft.name(&["kl_estimator", "algo.kl.estimator", "use_kl_estimator_k3"]);
    let beta = draft.number(&[coef]).unwrap_or(0.01);
    if beta == 0.0 && draft.value("ppo.kl_target").is_none() {
        draft.set("ppo.kl_in", "none", &[coef]);
        for name in [coef, in_loss, estimator] {
            if draft.given(name).is_some() {
                draft.note(name, Kind::Computed, "a coefficient of 0: ppo.kl_in = \"none\"");
            }
        }
        return;
    }
    draft.set("ppo.kl_coef", beta, &[coef]);
    let is_in_loss = draft.is_true(&[in_loss]);
    draft.set("ppo.kl_in", if is_in_loss { "loss" } else { "reward" }, &[in_loss]);
    let used = match estimator {
        "use_kl_estimator_k3" if draft.is_true(&[estimator]) => "k3".to_owned(),
        "use_kl_estimator_k3" => "k1".to_owned(),
        _ => draft.text(&[estimator]).unwrap_or_else(|| "k1".to_owned()),
    };
    if is_in_loss && used == "k1" {
        draft.set("ppo.kl_estimator", "k2", &[estimator]);
        draft.note(
            estimator,
            Kind::Approximate,
            "k1 in the loss has no useful gradient: \"k2\" has that of the reverse KL",
        );
    } else {
        draft.set("ppo.kl_estimator", used, &[estimator]);
    }
}

/// The sources of rewards.
fn sources(draft: &mut Draft) {
    let (models, url) = (
        draft.name(&["reward_pretrain", "reward.model_name_or_path"]),
        draft.name(&["remote_rm_url", "reward.remote_url"]),
    );
    let normalize = draft.name(&["normalize_reward", "reward.normalize_enable"]);
    let all = draft.list(&[models]);
    if !all.is_empty() {
        let dirs: Vec<String> =
            all.iter().flat_map(|value| value.split(',')).map(|one| paths::model(draft, one)).collect();
        let is_normalized = draft.is_true(&[normalize]);
        let table = |dir: String| {
            let mut table = entry("dir", &dir);
            if is_normalized {
                table.insert("normalize".into(), true.into());
            }
            Value::from(table)
        };
        draft.set("reward.models", dirs.into_iter().map(table).collect::<Vec<_>>(), &[models, normalize]);
    } else if draft.given(normalize).is_some() {
        draft.note(normalize, Kind::Needless, "no reward model");
    }
    let urls = draft.list(&[url]);
    let (files, urls): (Vec<&str>, Vec<&str>) =
        urls.iter().flat_map(|value| value.split(',')).partition(|one| is_python(one));
    let list = |all: &[&str], key: &str| -> Vec<Value> { all.iter().map(|one| entry(key, one).into()).collect() };
    if !files.is_empty() {
        draft.set("reward.python", list(&files, "file"), &[url]);
    }
    if !urls.is_empty() {
        let urls: Vec<Value> = urls.iter().map(|url| (*url).into()).collect();
        draft.set("reward.http", urls, &[url]);
    }
    if !["reward.models", "reward.python", "reward.http", "reward.environment"]
        .iter()
        .any(|key| draft.value(key).is_some())
    {
        missing_reward(draft, models);
    }
}

fn corrections(draft: &mut Draft) {
    let [level, mode, bounds] =
        ["level", "mode", "threshold"].map(|name| format!("algo.advantage.is_correction_{name}"));
    let names = ["algo.advantage.is_correction_level", "algo.advantage.is_correction_mode"];
    let text = |draft: &Draft, name: &'static str| draft.text(&[name]).unwrap_or_default();
    let (of, how) = (text(draft, names[0]), text(draft, names[1]));
    let used = match (of.as_str(), how.as_str()) {
        ("token", "clip") => "tis",
        ("token", _) => "icepop",
        ("seq" | "sequence", "mask") => "sequence_mask",
        ("" | "off", _) => {
            for name in [&level, &mode, &bounds] {
                if draft.given(name).is_some() {
                    draft.note(name, Kind::Needless, "corrections are off");
                }
            }
            return;
        }
        _ => return draft.note(&level, Kind::Missing, "this correction has no counterpart"),
    };
    draft.set("ppo.correction", used, &names);
    let limits: Vec<f64> = numbers(&draft.list(&["algo.advantage.is_correction_threshold"])).flatten().collect();
    let name = &["algo.advantage.is_correction_threshold"];
    match limits[..] {
        [low, high] => {
            draft.set("ppo.correction_low", low, name);
            draft.set("ppo.correction_high", high, name);
        }
        [high] => draft.set("ppo.correction_high", high, name),
        _ => {}
    }
}

/// Groups of GPUs, each with its roles. Without colocation each role has its own GPUs.
fn placement(draft: &mut Draft) {
    let count = |draft: &Draft, role: &str| {
        let pairs = layout::ROLE_NAMES.iter().find(|(name, _)| *name == role).map(|(_, names)| *names);
        let [nodes, gpus] = pairs.expect("a role").map(|names| draft.number(&names).unwrap_or(1.0) as usize);
        (nodes, gpus)
    };
    let is_on = |draft: &Draft, names: &[&'static str]| draft.is_true(names);
    let engines = draft.number(&["vllm_num_engines", "vllm.num_engines"]).unwrap_or(0.0);
    let width = draft.number(&["vllm_tensor_parallel_size", "vllm.tensor_parallel_size"]).unwrap_or(1.0);
    let sampling = (engines * width) as usize;
    let mut groups = Vec::new();
    let uses = |draft: &Draft, key: &str| draft.value(key).is_some();
    let has_critic = draft.value("ppo.advantage").is_none_or(|value| value.as_str() == Some("gae"));
    let has_reference = draft.value("ppo.kl_in").and_then(Value::as_str) != Some("none");
    let has_rewards = uses(draft, "reward.models");
    let async_train = draft.is_true(&["train.async_enable"]);
    let all = is_on(draft, &["colocate_all_models", "train.colocate_all"]);
    if draft.launch.dialect.command == "ppo" {
        return layout::set_processes(draft);
    }
    let mut add = |roles: &[&'static str], (nodes, per_node): (usize, usize)| {
        groups.push(Group { roles: roles.to_vec(), nodes, per_node });
    };
    let actor = count(draft, "actor");
    if all {
        add(&["actor", "critic", "reference", "reward"], actor);
    } else {
        let with_reference = is_on(draft, &["colocate_actor_ref", "train.colocate_actor_ref"]);
        let with_reward = is_on(draft, &["colocate_critic_reward", "train.colocate_critic_reward"]);
        add(if with_reference { &["actor", "reference"] } else { &["actor"] }, actor);
        if has_reference && !with_reference {
            add(&["reference"], count(draft, "ref"));
        }
        if has_critic {
            add(if with_reward { &["critic", "reward"] } else { &["critic"] }, count(draft, "critic"));
        }
        if has_rewards && !(with_reward && has_critic) {
            add(&["reward"], count(draft, "reward"));
        }
    }
    if sampling > 0 && (!all || async_train) {
        let per_node = if sampling > actor.1 && actor.1 > 0 { actor.1 } else { sampling };
        add(&["rollout"], (sampling.div_ceil(per_node), per_node));
    }
    // Rules, functions and services need no GPU, and are asked from the last ranks.
    if !groups.iter().any(|group| group.roles.contains(&"reward")) {
        groups.last_mut().expect("the actor's").roles.push("reward");
    }
    let names: Vec<&str> = layout::ROLE_NAMES.iter().flat_map(|(_, pairs)| pairs.as_flattened()).copied().collect();
    layout::set_groups(draft, &groups, &names);
    if async_train {
        let updates = if draft.is_true(&["train.partial_rollout_enable"]) { 2 } else { 1 };
        return draft.set("mesh.async_updates_max", updates, &["train.async_enable", "train.partial_rollout_enable"]);
    }
    for name in ["train.async_queue_size", "train.partial_rollout_enable"] {
        if draft.given(name).is_some() {
            draft.note(name, Kind::Needless, "no effect without async_enable");
        }
    }
}
