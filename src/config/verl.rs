//! Keys of verl by their full path. Its tables have other names than ours, and some names mean something else in other
//! systems: `data.train_batch_size` counts the prompts of a step.

use super::effect::is_within;

/// Tables of verl's configuration that are not ours.
const TABLES: &[&str] = &[
    "actor_rollout_ref",
    "algorithm",
    "critic",
    "custom_reward_function",
    "distillation",
    "global_profiler",
    "ray_kwargs",
    "sandbox_fusion",
    "skip",
    "trainer",
    "transfer_queue",
];

/// A prefix of paths, and the keys below it, each followed by ours.
type Keys = (&'static str, &'static [(&'static str, &'static str)]);

const KEYS: &[Keys] = &[
    (
        "actor_rollout_ref.actor",
        &[
            ("optim.lr", "optim.actor.lr"),
            ("optim.lr_warmup_steps_ratio", "optim.actor.warmup_ratio"),
            ("optim.lr_warmup_steps", "optim.actor.warmup_ratio"),
            ("optim.total_training_steps", "job.steps"),
            ("optim.weight_decay", "optim.actor.weight_decay"),
            ("optim.betas", "optim.actor.betas"),
            ("optim.clip_grad", "optim.actor.clip_norm"),
            ("optim.min_lr_ratio", "optim.actor.floor_ratio"),
            ("optim.num_cycles", "optim.actor.schedule"),
            ("optim.lr_scheduler_type", "optim.actor.schedule"),
            ("optim.warmup_style", "optim.actor.schedule"),
            ("fsdp_config.param_offload", "mesh.offload"),
            ("fsdp_config.optimizer_offload", "mesh.offload"),
            ("fsdp_config.fsdp_size", "mesh.zero"),
            ("fsdp_config.strategy", "mesh.zero"),
            ("fsdp_config.model_dtype", "model.dtype"),
            ("fsdp_config.dtype", "model.dtype"),
            ("fsdp_config.seed", "job.seed"),
            ("fsdp_config.ulysses_sequence_parallel_size", "mesh.sequence"),
            ("ulysses_sequence_parallel_size", "mesh.sequence"),
            ("strategy", "mesh.zero"),
            ("ppo_mini_batch_size", "ppo.minibatch_samples"),
            ("ppo_micro_batch_size", "ppo.microbatch_tokens_max"),
            ("ppo_micro_batch_size_per_gpu", "ppo.microbatch_tokens_max"),
            ("ppo_max_token_len_per_gpu", "ppo.microbatch_tokens_max"),
            ("ppo_epochs", "ppo.epochs"),
            ("clip_ratio", "ppo.clip_low"),
            ("clip_ratio_low", "ppo.clip_low"),
            ("clip_ratio_high", "ppo.clip_high"),
            ("clip_ratio_c", "ppo.dual_clip"),
            ("tau_pos", "ppo.sapo_tau_positive"),
            ("tau_neg", "ppo.sapo_tau_negative"),
            ("policy_loss.loss_mode", "ppo.loss"),
            ("loss_agg_mode", "ppo.aggregation"),
            ("loss_scale_factor", "ppo.aggregation"),
            ("entropy_coeff", "ppo.entropy_coef"),
            ("use_kl_loss", "ppo.kl_in"),
            ("kl_loss_coef", "ppo.kl_coef"),
            ("kl_loss_type", "ppo.kl_estimator"),
            ("grad_clip", "optim.actor.clip_norm"),
            ("data_loader_seed", "job.seed"),
        ],
    ),
    (
        "actor_rollout_ref.ref",
        &[
            ("strategy", "mesh.zero"),
            ("fsdp_config.param_offload", "mesh.offload"),
            ("ulysses_sequence_parallel_size", "mesh.sequence"),
        ],
    ),
    (
        "actor_rollout_ref.rollout",
        &[
            ("n", "rollout.samples_per_prompt"),
            ("temperature", "rollout.temperature"),
            ("top_k", "rollout.top_k"),
            ("top_p", "rollout.top_p"),
            ("do_sample", "rollout.temperature"),
            ("seed", "job.seed"),
            ("prompt_length", "data.prompt_tokens_max"),
            ("response_length", "rollout.response_tokens_max"),
            ("ignore_eos", "rollout.ignore_eos"),
            ("gpu_memory_utilization", "rollout.kv_bytes_max"),
            ("engine_kwargs.vllm.kv_cache_dtype", "rollout.kv_dtype"),
            ("enforce_eager", "rollout.graphs"),
            ("tensor_model_parallel_size", "rollout.tensor"),
            ("data_parallel_size", "rollout.data"),
            ("max_num_batched_tokens", "rollout.prefill_tokens_max"),
            ("max_num_seqs", "rollout.batch_max"),
            ("calculate_log_probs", "ppo.old_logprobs"),
            ("val_kwargs.temperature", "eval.temperature"),
            ("val_kwargs.n", "eval.samples_per_prompt"),
            ("val_kwargs.do_sample", "eval.temperature"),
            ("multi_turn.max_assistant_turns", "reward.environment.turns_max"),
            ("multi_turn.max_user_turns", "reward.environment.turns_max"),
            ("multi_turn", "reward.environment"),
            ("agent", "reward.environment"),
        ],
    ),
    (
        "actor_rollout_ref.model",
        &[
            ("path", "model.actor"),
            ("enable_gradient_checkpointing", "gradient.recompute"),
            ("lora_rank", "lora.rank"),
            ("lora_alpha", "lora.alpha"),
            ("target_modules", "lora.targets"),
            ("exclude_modules", "lora.exclude"),
            ("lora_adapter_path", "model.adapter"),
            ("lora.rank", "lora.rank"),
            ("lora.alpha", "lora.alpha"),
            ("lora.target_modules", "lora.targets"),
            ("lora.exclude_modules", "lora.exclude"),
            ("lora.adapter_path", "model.adapter"),
        ],
    ),
    (
        "algorithm",
        &[
            ("adv_estimator", "ppo.advantage"),
            ("norm_adv_by_std_in_grpo", "ppo.advantage"),
            ("gamma", "ppo.gamma"),
            ("lam", "ppo.lambda"),
            ("use_kl_in_reward", "ppo.kl_in"),
            ("kl_penalty", "ppo.kl_estimator"),
            ("kl_ctrl.type", "ppo.kl_target"),
            ("kl_ctrl.kl_coef", "ppo.kl_coef"),
            ("kl_ctrl.horizon", "ppo.kl_horizon"),
            ("kl_ctrl.target_kl", "ppo.kl_target"),
            ("filter_groups", "rollout.dynamic_sampling.prompts_max_factor"),
            ("rollout_correction.rollout_is", "ppo.correction"),
            ("rollout_correction.rollout_rs", "ppo.correction"),
            ("rollout_correction.rollout_is_threshold", "ppo.correction_high"),
            ("rollout_correction.rollout_rs_threshold", "ppo.correction_high"),
            ("rollout_correction.bypass_mode", "ppo.old_logprobs"),
        ],
    ),
    (
        "critic",
        &[
            ("optim.lr", "optim.critic.lr"),
            ("optim.lr_warmup_steps_ratio", "optim.critic.warmup_ratio"),
            ("optim.lr_warmup_steps", "optim.critic.warmup_ratio"),
            ("optim.total_training_steps", "job.steps"),
            ("optim.weight_decay", "optim.critic.weight_decay"),
            ("optim.betas", "optim.critic.betas"),
            ("optim.clip_grad", "optim.critic.clip_norm"),
            ("optim.min_lr_ratio", "optim.critic.floor_ratio"),
            ("optim.num_cycles", "optim.critic.schedule"),
            ("optim.lr_scheduler_type", "optim.critic.schedule"),
            ("optim.warmup_style", "optim.critic.schedule"),
            ("grad_clip", "optim.critic.clip_norm"),
            ("cliprange_value", "ppo.value_clip"),
            ("enable", "ppo.advantage"),
            ("strategy", "mesh.zero"),
            ("model.path", "model.critic"),
            ("model.enable_gradient_checkpointing", "gradient.recompute"),
            ("model.lora_rank", "lora.critic"),
            ("model.lora_alpha", "lora.critic"),
            ("model.target_modules", "lora.critic"),
            ("model.exclude_modules", "lora.critic"),
            ("model.lora", "lora.critic"),
            ("ppo_mini_batch_size", "ppo.minibatch_samples"),
            ("ppo_micro_batch_size", "ppo.microbatch_tokens_max"),
            ("ppo_micro_batch_size_per_gpu", "ppo.microbatch_tokens_max"),
            ("ppo_max_token_len_per_gpu", "ppo.microbatch_tokens_max"),
            ("ppo_epochs", "ppo.critic_epochs"),
            ("data_loader_seed", "job.seed"),
            ("ulysses_sequence_parallel_size", "mesh.sequence"),
        ],
    ),
    (
        "data",
        &[
            ("train_files", "data.prompts"),
            ("val_files", "data.split.eval_files"),
            ("train_max_samples", "data.rows_max"),
            ("val_max_samples", "eval.samples_max"),
            ("reward_fn_key", "reward.python"),
            ("max_prompt_length", "data.prompt_tokens_max"),
            ("max_response_length", "rollout.response_tokens_max"),
            ("train_batch_size", "rollout.prompts_per_step"),
            ("gen_batch_size", "rollout.dynamic_sampling.prompts_max_factor"),
            ("tool_config_path", "reward.environment"),
            ("function_tool_path", "reward.environment"),
            ("shuffle", "data.order"),
            ("seed", "job.seed"),
            ("filter_overlong_prompts", "data.long_prompts"),
            ("truncation", "data.long_prompts"),
            ("apply_chat_template_kwargs", "data.chat_template_args"),
        ],
    ),
    (
        "trainer",
        &[
            ("total_epochs", "job.steps"),
            ("total_training_steps", "job.steps"),
            ("project_name", "job.name"),
            ("experiment_name", "job.name"),
            ("logger", "metrics.tensorboard"),
            ("log_val_generations", "metrics.eval_rows_max"),
            ("validation_data_dir", "metrics.eval_rows_max"),
            ("rollout_data_dir", "metrics.rollouts_every_steps"),
            ("save_freq", "checkpoint.every_steps"),
            ("esi_redundant_time", "checkpoint.max_hours"),
            ("max_actor_ckpt_to_keep", "checkpoint.keep_last"),
            ("max_critic_ckpt_to_keep", "checkpoint.keep_last"),
            ("val_only", "job.kind"),
            ("test_freq", "eval.every_steps"),
            ("critic_warmup", "ppo.critic_warmup_steps"),
            ("default_local_dir", "job.dir"),
            ("device", "job.device"),
            ("v1", "mesh.async_updates_max"),
        ],
    ),
    (
        "reward",
        &[
            ("num_workers", "reward.workers"),
            ("custom_reward_function", "reward.python"),
            ("reward_manager", "ppo.overlong_buffer_tokens"),
            ("reward_model", "reward.models"),
            ("sandbox_fusion", "reward.http"),
        ],
    ),
    (
        "reward_model",
        &[
            ("num_workers", "reward.workers"),
            ("reward_manager", "ppo.overlong_buffer_tokens"),
            ("enable", "reward.models"),
            ("enable_resource_pool", "mesh.placement"),
            ("model", "reward.models"),
            ("overlong_buffer", "ppo.overlong_buffer_tokens"),
            ("reward_kwargs", "ppo.overlong_buffer_tokens"),
        ],
    ),
    ("custom_reward_function", &[("path", "reward.python"), ("name", "reward.python")]),
    ("sandbox_fusion", &[("url", "reward.http")]),
    (
        "distillation",
        &[
            ("enabled", "job.kind"),
            ("distillation_loss.loss_mode", "distill.divergence"),
            ("teacher_models", "model.teachers"),
        ],
    ),
];

/// Our key for a path of verl. A table of verl may include all keys below it.
pub(super) fn ours(path: &str) -> Option<&'static str> {
    let below = |(prefix, keys): &'static Keys| {
        let rest = path.strip_prefix(prefix)?.strip_prefix('.')?;
        keys.iter().find(|(key, _)| is_within(rest, key)).map(|(_, ours)| *ours)
    };
    KEYS.iter().find_map(below)
}

/// Our keys for the end of a path, such as `rollout.n` or `trainer.logger`.
pub(super) fn ours_by_end(end: &str) -> Vec<&'static str> {
    if let Some(key) = ours(end) {
        return vec![key];
    }
    let ends = |path: &str| end.contains('.') && path.strip_suffix(end).is_some_and(|rest| rest.ends_with('.'));
    let all =
        KEYS.iter().flat_map(|(prefix, keys)| keys.iter().map(move |(key, ours)| (format!("{prefix}.{key}"), *ours)));
    let mut found: Vec<&str> = all.filter(|(path, _)| ends(path)).map(|(_, ours)| ours).collect();
    found.dedup();
    found
}

/// Whether `path` is in a table that only verl has.
pub(super) fn is_foreign(path: &str) -> bool {
    TABLES.iter().any(|table| is_within(path, table))
}

/// Whether the keys of the table `path` are looked up one by one.
pub(super) fn is_table(path: &str) -> bool {
    is_foreign(path) || is_above_a_key(path)
}

fn is_above_a_key(path: &str) -> bool {
    let above =
        |(prefix, keys): &Keys| keys.iter().any(|(key, _)| format!("{prefix}.{key}").starts_with(&format!("{path}.")));
    KEYS.iter().any(above)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::reference;

    #[test]
    fn keys_of_verl_lead_to_keys_that_exist() {
        let known: Vec<String> = reference::all().iter().map(reference::Entry::path).collect();
        for (prefix, keys) in KEYS {
            for (key, ours) in *keys {
                assert!(known.iter().any(|path| path == ours), "{prefix}.{key} leads to {ours}");
            }
            let mut names: Vec<&str> = keys.iter().map(|(key, _)| *key).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), keys.len(), "{prefix} names a key twice");
        }
    }
}
