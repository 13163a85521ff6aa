//! Keys that only some jobs use. A job that sets such a key without its condition gets one warning at its start.

use super::Config;
use super::mesh::{Offload, RoleName};
use super::method::{self, MethodConfig, RowKind};
use super::optim::Schedule;
use super::reward::{RuleConfig, RuleKind};
use super::{data, optim};

/// Keys or tables that have an effect only if a condition holds: their names, the condition in words, and the
/// condition.
type Need<T> = (&'static str, &'static str, fn(&T) -> bool);

/// Keys of all jobs. The first condition of a key that does not hold is reported.
#[rustfmt::skip]
const NEEDS: &[Need<Config>] = &[
    (
        "job.steps job.export gradient optim.actor checkpoint metrics.print_every metrics.trace_steps data.weights data.rows_max data.order",
        "a job that trains", trains,
    ),
    ("rollout reward", "a job that samples: ppo, eval or on-policy distill", Config::samples),
    (
        "rollout.prompts_per_step rollout.samples_per_prompt rollout.response_tokens_schedule rollout.dynamic_sampling metrics.rollouts_every_steps \
         metrics.samples_every_steps metrics.samples_count",
        "a job that trains on samples: ppo or on-policy distill", trains_on_samples,
    ),
    ("rollout.response_tokens_grow_at", "job.kind = \"ppo\" and rollout.response_tokens_schedule",
        |c| c.kind() == "ppo" && !c.rollout.response_tokens_schedule.is_empty()),
    ("model.reference model.reference_adapter", "a loss or a KL with a reference model: kto, ppo, or dpo with \"sigmoid\" or \"ipo\"",
        |c| c.uses().reference),
    ("lora model.freeze model.critic_freeze model.vision", "a job that trains", trains),
    (
        "lora.alpha lora.targets lora.target_parameters lora.exclude lora.rslora lora.rank_pattern lora.alpha_pattern lora.layers lora.init \
         lora.train_also",
        "lora.rank above 0", |c| c.lora.is_on(RoleName::Actor) || c.uses().critic && c.lora.is_on(RoleName::Critic),
    ),
    ("lora.critic model.critic_freeze", "a critic: a ppo job with ppo.advantage = \"gae\"", |c| c.uses().critic),
    ("lora.actor", "an empty model.adapter, whose files have these settings",
        |c| c.model.adapter.as_os_str().is_empty()),
    ("model.freeze", "an actor without adapters, which freeze it",
        |c| !c.lora.is_on(RoleName::Actor) && c.model.adapter.as_os_str().is_empty()),
    ("model.critic_freeze", "a critic without adapters, which freeze it", |c| !c.lora.is_on(RoleName::Critic)),
    ("mesh.offload", "optimizer state, or models that are not trained", has_state_to_offload),

    ("data.pretrain_key data.pretrain_tokens_max", "data.pretrain", |c| !c.data.pretrain.is_empty()),
    ("data.eval_split data.eval_sets", "eval.every_steps above 0: its rows are held out and never evaluated",
        |c| c.eval.every_steps > 0 || !trains(c)),
    ("data.split", "a split that a job names: data.eval_split or data.prompt_split", names_a_split),
    ("data.split.eval_ratio data.split.seed", "data.split.by = \"ratio\"", |c| c.data.split.by == data::SplitBy::Ratio),
    ("data.split.field", "data.split.by = \"field\"", |c| c.data.split.by == data::SplitBy::Field),
    ("data.split.eval_files", "data.split.by = \"file\"", |c| c.data.split.by == data::SplitBy::File),
    ("data.response_key", "rows with a response: sft, kto or off-policy distill", has_responses),
    ("data.chosen_key data.rejected_key", "rows with pairs: reward_model or dpo",
        |c| c.uses().rows == RowKind::Pair),
    ("data.label_key", "a job that samples, kto or step_reward",
        |c| matches!(c.uses().rows, RowKind::Prompt | RowKind::Labelled | RowKind::Steps)),
    ("data.messages_key", "data.chat_template = true", |c| c.data.chat_template),
    ("data.window_overlap_tokens", "data.long_prompts = \"window\"",
        |c| c.data.long_prompts == data::LongPrompts::Window),
    ("data.row_tokens_max", "rows that are more than a prompt", |c| !c.samples()),
    ("data.prompt_tokens_max", "rows with a prompt; a text of step_reward is limited by data.row_tokens_max",
        |c| c.uses().rows != RowKind::Steps),
    ("data.length_group_rows", "data.order = \"length_grouped\"", |c| c.data.order == data::Order::LengthGrouped),
    ("data.curriculum_field", "data.order = \"curriculum\"", |c| c.data.order == data::Order::Curriculum),

    ("rollout.temperature", "eval.temperature = 0, which otherwise replaces it in an eval job",
        |c| trains(c) || !c.eval.draws()),
    ("rollout.top_k rollout.top_p rollout.min_p", "a temperature above 0",
        |c| c.rollout.temperature > 0.0 || c.eval.draws()),
    ("rollout.top_p rollout.min_p", "a rollout.top_k other than 1", |c| c.rollout.top_k != 1),
    ("reward.workers reward.timeout_s reward.retries", "reward.python, reward.http or reward.environment", has_requests),
    ("reward.start_timeout_s", "a Python file in reward.python or reward.environment", has_python),
    ("reward.on_failure", "a reward that can fail: python, http, judge or environment",
        |c| has_requests(c) || !c.reward.judge.is_empty()),
    (
        "reward.environment.python.name reward.environment.python.weight reward.environment.python.batch \
         reward.environment.python.label_argument",
        "[[reward.python]]: an environment has a name and a weight of its own", |_| false,
    ),

    ("gradient.chunks", "gradient.order = \"fixed\"", |c| c.gradient.order == optim::GradientOrder::Fixed),
    ("optim.actor.floor_ratio", "a schedule that decays", |c| c.optim.actor.schedule != Schedule::Constant),
    ("optim.critic.floor_ratio", "a schedule that decays", |c| c.optim.critic.schedule != Schedule::Constant),

    // 0 turns evaluations off, so it is no mistake in a job without held-out rows.
    ("eval.every_steps", "a job that trains, and data.eval_split or data.eval_sets",
        |c| c.eval.every_steps == 0 || trains(c) && has_held_out(c)),
    ("eval.samples_max eval.patience eval.correct_at eval.samples_per_prompt eval.pass_at eval.temperature eval.beams",
        "evaluations: eval.every_steps above 0 and data.eval_split, or an eval job", evaluates),
    ("eval.correct_at eval.samples_per_prompt eval.pass_at eval.temperature eval.beams",
        "a job that samples: ppo, eval or on-policy distill", Config::samples),
    ("eval.pass_at", "eval.temperature above 0", |c| c.eval.draws() || !trains(c)),
    ("eval.patience", "checkpoint.best_metric", |c| !c.checkpoint.best_metric.is_empty()),
    ("checkpoint.restore", "checkpoint.from", |c| !c.checkpoint.from.as_os_str().is_empty()),
    ("checkpoint.best_mode", "checkpoint.best_metric", |c| !c.checkpoint.best_metric.is_empty()),
    ("checkpoint.export_best", "job.export = true", |c| c.job.export),
    ("metrics.rollouts_keep_last", "recorded rollouts or evaluations",
        |c| trains_on_samples(c) && c.metrics.rollouts_every_steps > 0 || records_eval_rows(c)),
    ("metrics.eval_rows_max", "evaluations in a job other than sft and off-policy distill",
        |c| evaluates(c) && !c.uses().token_loss),
    ("metrics.samples_count", "metrics.samples_every_steps above 0", |c| c.metrics.samples_every_steps > 0),
];

/// The keys of a rule that only some kinds of rules use.
const OF_RULE: &[Need<RuleConfig>] = &[
    ("extract strip", "a rule of a kind other than length", |rule| rule.kind != RuleKind::Length),
    ("ignore_case", "a rule of kind exact, regex or format", |rule| {
        !matches!(rule.kind, RuleKind::Number | RuleKind::Length)
    }),
    ("pattern", "a rule of kind regex or format", |rule| matches!(rule.kind, RuleKind::Regex | RuleKind::Format)),
    ("tolerance", "a rule of kind number", |rule| rule.kind == RuleKind::Number),
    ("tokens_min tokens_max tokens_slack", "a rule of kind length", |rule| rule.kind == RuleKind::Length),
];

fn trains(c: &Config) -> bool {
    c.uses().trains
}

fn trains_on_samples(c: &Config) -> bool {
    trains(c) && c.samples()
}

fn has_responses(c: &Config) -> bool {
    matches!(c.uses().rows, RowKind::Demonstration | RowKind::Labelled)
}

fn has_held_out(c: &Config) -> bool {
    !c.data.eval_split.is_empty() || !c.data.eval_sets.is_empty()
}

fn evaluates(c: &Config) -> bool {
    !trains(c) || c.eval.every_steps > 0 && has_held_out(c)
}

fn records_eval_rows(c: &Config) -> bool {
    evaluates(c) && !c.uses().token_loss && c.metrics.eval_rows_max > 0
}

fn names_a_split(c: &Config) -> bool {
    let of_sets = c.data.eval_sets.iter().any(|set| !set.split.is_empty());
    of_sets || !c.data.eval_split.is_empty() || !c.data.prompt_split.is_empty()
}

fn has_python(c: &Config) -> bool {
    !c.reward.python.is_empty() || c.reward.environment.iter().any(|environment| !environment.python.is_empty())
}

fn has_requests(c: &Config) -> bool {
    has_python(c) || !c.reward.http.is_empty() || !c.reward.environment.is_empty()
}

fn has_state_to_offload(c: &Config) -> bool {
    let of_roles = c.uses().reference || c.uses().critic || !c.model.teachers.is_empty() || c.reward.has_models();
    c.mesh.offload.is_empty()
        || c.mesh.offload.contains(&Offload::Optimizer) && trains(c)
        || c.mesh.offload.contains(&Offload::Roles) && of_roles
}

/// The condition that `key` lacks in this job. Numbers in the path are indices of lists.
fn lacks(config: &Config, key: &str) -> Option<&'static str> {
    let parts: Vec<&str> = key.split('.').collect();
    if let ["reward", "rule", i, name] = parts[..]
        && let Some(rule) = i.parse::<usize>().ok().and_then(|i| config.reward.rule.get(i))
        && let Some(why) = unmet(OF_RULE.iter().map(|(keys, words, holds)| (*keys, *words, holds(rule))), name)
    {
        return Some(why);
    }
    let ignores_epochs = config.job.steps > 0 && config.method().epochs().is_some();
    let key = without_indices(key);
    unmet(conditions(config), &key)
        .or((ignores_epochs && key == format!("{}.epochs", config.kind())).then_some("job.steps = 0"))
}

/// Keys, their condition in words, and whether it holds.
type Condition = (&'static str, &'static str, bool);

macro_rules! conditions {
    (
        own { $($(#[$about:meta])* $kind:ident => $table:ident: $($path:ident)::+,)* }
        shared { $($(#[$about_shared:meta])* $kind_shared:ident => $table_shared:ident: $($path_shared:ident)::+,)* }
    ) => {
        /// The table of each method, which only its kind of job uses.
        const TABLES: &[Need<Config>] = &[$((
            stringify!($table),
            concat!("job.kind = \"", stringify!($table), "\""),
            |config| config.is(stringify!($table)),
        ),)*];

        /// The tables of the methods, then keys of all jobs, then keys of methods.
        fn conditions(config: &Config) -> Vec<Condition> {
            let shared = config.shared();
            let of_jobs = TABLES.iter().chain(NEEDS).map(|(keys, words, holds)| (*keys, *words, holds(config)));
            let mut all: Vec<Condition> = of_jobs.collect();
            $(all.extend(method::$($path)::+::needs().iter().map(|(keys, words, holds)| {
                (*keys, *words, config.is(stringify!($table)) && holds(&config.$table, &shared))
            }));)*
            $(all.extend(method::$($path_shared)::+::needs().iter().map(|(keys, words, holds)| {
                (*keys, *words, holds(&config.$table_shared, &shared))
            }));)*
            all
        }
    };
}
method::with_methods!(conditions);

/// The first condition of `key` that does not hold.
fn unmet(conditions: impl IntoIterator<Item = Condition>, key: &str) -> Option<&'static str> {
    let names = |keys: &str| keys.split_whitespace().any(|name| is_within(key, name));
    conditions.into_iter().find(|(keys, _, holds)| !holds && names(keys)).map(|(_, why, _)| why)
}

/// Whether `key` is `name`, or in the table `name`.
pub(super) fn is_within(key: &str, name: &str) -> bool {
    key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Removes indices from a path: `reward.rule.0.kind` becomes `reward.rule.kind`.
pub(super) fn without_indices(key: &str) -> String {
    key.split('.').filter(|part| part.parse::<usize>().is_err()).collect::<Vec<_>>().join(".")
}

impl Config {
    /// The keys that the job sets and does not use, by the condition that they lack.
    pub fn unused_keys(&self) -> Vec<(&'static str, Vec<String>)> {
        let mut all: Vec<(&str, Vec<String>)> = Vec::new();
        for key in &self.given {
            let Some(why) = lacks(self, key) else { continue };
            let key = without_indices(key);
            match all.iter_mut().find(|(other, _)| *other == why) {
                Some((_, keys)) if keys.contains(&key) => {}
                Some((_, keys)) => keys.push(key),
                None => all.push((why, vec![key])),
            }
        }
        all
    }

    /// One warning that names all keys that the job sets and does not use.
    pub fn unused(&self) -> Option<String> {
        let shown = |key: &String| match self.of_base.get(key) {
            Some(file) => format!("{key} in {}", file.display()),
            None => key.clone(),
        };
        let all = self.unused_keys();
        let listed = |keys: &[String]| keys.iter().map(shown).collect::<Vec<_>>().join(", ");
        let groups: Vec<String> = all.iter().map(|(why, keys)| format!("{} (needs {why})", listed(keys))).collect();
        (!groups.is_empty()).then(|| format!("keys of the job that have no effect in it: {}", groups.join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{load, parse, reference};
    use std::path::{Path, PathBuf};

    /// Keys without a condition of their own: every job uses them, or every job that uses their table. The tables of
    /// methods are not listed, because methods declare the conditions of their keys. Keys of the machine (devices,
    /// memory, layouts, batch sizes of the sampler) are listed, because a job is used on several machines.
    const UNCONDITIONAL: &[(&str, &str)] = &[
        ("job", "kind name dir seed device collectives gemm check threads"),
        ("model", "actor adapter quantize dtype router_aux_loss_coef"),
        ("lora", "rank"),
        (
            "mesh",
            "data pipeline pipeline_chunks sequence tensor expert zero placement arena_bytes_max collective_timeout_s",
        ),
        ("data", "prompts pretrain prompt_split prompt_key template chat_template chat_template_args long_prompts"),
        ("data.eval_sets", "name prompts split prompt_key label_key"),
        ("data.split", "by"),
        (
            "rollout",
            "response_tokens_max response_tokens_expected response_tokens_min repetition_penalty stop stop_token_ids \
             ignore_eos batch_max prefill_tokens_max kv_dtype kv_bytes_max graphs work_stealing tensor data",
        ),
        ("rollout.dynamic_sampling", "low high prompts_max_factor"),
        ("reward", "rule python http models judge environment"),
        ("reward.rule", "kind name weight right wrong"),
        ("reward.python", "file function name weight interpreter label_argument batch pass_env gpu memory_max_gib"),
        ("reward.http", "url header_env name weight batch logprobs"),
        ("reward.models", "dir name weight normalize"),
        ("reward.judge", "dir prompt chat_template pattern tokens_max name weight"),
        ("reward.environment", "python http header_env turns_max name weight"),
        ("gradient", "order recompute"),
        ("optim.actor", "lr betas eps weight_decay decay_vectors clip_norm schedule warmup_ratio ema_beta"),
        ("optim.critic", "lr betas eps weight_decay decay_vectors clip_norm schedule warmup_ratio ema_beta"),
        ("checkpoint", "every_steps keep_last best_metric max_hours changed_inputs from"),
        ("metrics", "tensorboard report"),
    ];

    #[test]
    fn every_key_of_the_reference_has_its_own_condition_or_none() {
        let listed = |needs: &[&'static str], of: &str| -> Vec<String> {
            needs.iter().flat_map(|keys| keys.split_whitespace()).map(|key| format!("{of}{key}")).collect()
        };
        let of_jobs: Vec<&str> = conditions(&Config::default()).iter().map(|(names, ..)| *names).collect();
        let of_rules: Vec<&str> = OF_RULE.iter().map(|(names, ..)| *names).collect();
        let own = [listed(&of_jobs, ""), listed(&of_rules, "reward.rule.")].concat();
        let free: Vec<String> =
            UNCONDITIONAL.iter().flat_map(|(of, keys)| listed(&[keys], &format!("{of}."))).collect();
        let entries = reference::all();
        let known: Vec<String> = entries.iter().map(reference::Entry::path).collect();
        for entry in entries.iter().filter(|entry| !entry.key.is_empty() && !entry.table.is_empty()) {
            let (path, is_own) = (entry.path(), own.contains(&entry.path()));
            let is_of_method = TABLES.iter().any(|(table, ..)| *table == entry.table);
            let is_listed = is_own != free.contains(&path);
            assert!(is_listed || is_of_method, "{path} must be in NEEDS or in UNCONDITIONAL, and not in both");
        }
        // An environment's file is a table as in [[reward.python]].
        let is_known = |key: &&String| {
            let key = key.replace("environment.python.", "python.");
            known.iter().any(|path| is_within(path, &key))
        };
        let unknown: Vec<&String> = own.iter().chain(&free).filter(|key| !is_known(key)).collect();
        assert!(unknown.is_empty(), "{unknown:?} are no keys");
    }

    fn jobs(dir: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(dir).expect("a folder").map(|entry| entry.expect("an entry").path());
        entries.flat_map(|path| if path.is_dir() { jobs(&path) } else { vec![path] }).collect()
    }

    #[test]
    fn no_job_in_the_tree_sets_a_key_without_effect() {
        let all = jobs(&Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs"));
        let all: Vec<&PathBuf> = all.iter().filter(|path| path.extension().is_some_and(|e| e == "toml")).collect();
        assert!(all.len() > 20, "{all:?}");
        let warned = |path: &&PathBuf| Some(((*path).clone(), load(path, &[]).expect("a job").unused()?));
        let warned: Vec<_> = all.iter().filter_map(warned).collect();
        assert!(warned.is_empty(), "{warned:#?}");
    }

    /// Overrides of a job, and each warning's groups: the keys, and a part of the condition.
    const SET: &[(&str, &[(&str, &str)])] = &[
        (
            "job.kind=ppo sft.epochs=3 sft.loss_on=all dpo.beta=0.3",
            &[("dpo.beta", "\"dpo\""), ("sft.epochs, sft.loss_on", "\"sft\"")],
        ),
        (
            "job.kind=ppo ppo.advantage=grpo optim.critic.lr=1e-5 ppo.lambda=0.95",
            &[("optim.critic.lr, ppo.lambda", "has a critic")],
        ),
        ("job.kind=ppo ppo.kl_in=none ppo.kl_coef=0.5", &[("ppo.kl_coef", "ppo.kl_in")]),
        ("job.kind=ppo ppo.kl_in=none ppo.kl_coef=0.0", &[]),
        ("job.kind=ppo data.eval_split=test", &[("data.eval_split", "never evaluated")]),
        ("job.kind=ppo data.eval_split=test eval.every_steps=5", &[]),
        ("job.kind=ppo eval.every_steps=0", &[]),
        ("job.kind=eval data.eval_split=test", &[]),
        (
            "job.kind=ppo eval.every_steps=5 eval.samples_max=9",
            &[("eval.every_steps", "data.eval_split"), ("eval.samples_max", "evaluations")],
        ),
        (
            "job.kind=sft rollout.top_k=5 reward.rule=exact data.label_key=answer",
            &[("data.label_key", "kto"), ("reward.rule, rollout.top_k", "samples")],
        ),
        ("job.kind=ppo rollout.top_k=1 rollout.top_p=0.9", &[("rollout.top_p", "rollout.top_k")]),
        ("job.kind=dpo dpo.loss=orpo dpo.beta=0.2", &[("dpo.beta", "dpo.orpo_coef")]),
        ("job.kind=distill distill.on_policy=true distill.ce_coef=0.1", &[("distill.ce_coef", "on_policy = false")]),
        ("job.kind=ppo ppo.loss=cispo ppo.clip_low=0.1 ppo.clip_high=0.3", &[("ppo.clip_low", "\"gspo\"")]),
        ("job.kind=ppo reward.rule={kind=\"exact\",tolerance=0.1}", &[("reward.rule.tolerance", "kind number")]),
        (
            "job.kind=ppo reward.rule=[{kind=\"number\",tolerance=0.1},{kind=\"exact\",tokens_max=5}]",
            &[("reward.rule.tokens_max", "kind length")],
        ),
        (
            "job.kind=ppo reward.environment={python={file=\"e.py\",weight=2.0}}",
            &[("reward.environment.python.weight", "its own")],
        ),
        ("job.kind=sft job.steps=9 sft.epochs=2.0", &[("sft.epochs", "job.steps = 0")]),
        (
            "job.kind=sft checkpoint.best_mode=max mesh.offload=[\"roles\"]",
            &[("checkpoint.best_mode", "checkpoint.best_metric"), ("mesh.offload", "models that are not trained")],
        ),
        ("job.kind=sft lora.alpha=8", &[("lora.alpha", "lora.rank above 0")]),
        ("job.kind=sft lora.rank=8 lora.alpha=8 lora.rank_pattern={q_proj=2}", &[]),
        ("job.kind=sft lora.rank=8 lora.critic.rank=2", &[("lora.critic.rank", "a critic")]),
        ("job.kind=ppo lora.critic.rank=2 lora.init=gaussian", &[]),
        ("job.kind=sft lora.rank=8 model.freeze=mlp", &[("model.freeze", "without adapters")]),
        ("job.kind=sft lora.actor.rank=8 model.adapter=a", &[("lora.actor.rank", "model.adapter")]),
        ("job.kind=eval optim.actor.lr=1e-5 job.export=true", &[("job.export, optim.actor.lr", "that trains")]),
    ];

    #[test]
    fn one_warning_names_the_keys_that_a_job_sets_and_does_not_use() {
        for (sets, groups) in SET {
            let sets: Vec<String> = sets.split(' ').map(String::from).collect();
            let job = parse("model.actor = \"m\"\ndata.prompts = \"p\"", &sets).expect("a job");
            let warning = job.unused().unwrap_or_default();
            for (keys, why) in *groups {
                let found = warning.split(['(', ';', ')']).zip(warning.split(['(', ';', ')']).skip(1));
                let is_there = found.into_iter().any(|(named, needs)| {
                    named.trim().trim_start_matches("keys of the job that have no effect in it: ") == *keys
                        && needs.contains(why)
                });
                assert!(is_there, "{sets:?}: {keys} needs {why} in {warning}");
            }
            assert_eq!(warning.matches("(needs ").count(), groups.len(), "{sets:?}: {warning}");
        }
    }

    #[test]
    fn the_list_of_all_keys_that_a_run_writes_causes_no_warning() {
        let mut all = Config::default();
        (all.model.actor, all.data.prompts) = ("m".into(), vec!["p".into()]);
        all.reward.rule.push(RuleConfig::default());
        let text = all.to_toml();
        assert_eq!(parse(&text, &[]).expect("a job").unused(), None);
        let warning = parse(&text, &["dpo.beta=0.3".into()]).expect("a job").unused().expect("one");
        assert!(warning.contains("dpo.beta") && !warning.contains("sft"), "{warning}");
    }
}
