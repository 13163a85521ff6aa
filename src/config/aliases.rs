//! What a key is called elsewhere: by OpenRLHF, TRL, verl, NeMo-RL and transformers.

use super::{Config, verl};
use toml::{Table, Value};

/// Keys of ours, and what other systems call them.
const ALIASES: &[(&str, &str)] = &[
    ("job.kind", "algorithm method trainer trainer_type task"),
    ("job.name", "run_name experiment_name wandb_run_name"),
    ("job.dir", "output_dir save_path ckpt_path default_local_dir logging_dir"),
    ("job.device", "use_cpu"),
    ("job.seed", "random_seed data_seed"),
    ("job.steps", "max_steps num_steps total_training_steps train_steps num_episodes total_episodes total_epochs"),
    (
        "model.actor",
        "pretrain model_name_or_path model_path model_name actor_path policy_model sft_model sft_model_path model_revision",
    ),
    ("model.reference", "ref_model ref_pretrain ref_model_path reference_model"),
    ("model.critic", "critic_pretrain value_model critic_model value_model_path"),
    ("model.teachers", "teacher teacher_model teacher_model_name_or_path teacher_path"),
    (
        "model.adapter",
        "adapter adapters adapter_path adapter_name_or_path lora_path lora_adapter_path peft_path ref_adapter_name",
    ),
    ("model.freeze", "freeze_layers freeze_modules frozen_layers"),
    ("model.vision", "freeze_vision_tower freeze_visual_encoder train_vision_tower freeze_vit"),
    ("model.quantize", "load_in_4bit quantization nf4 bnb_4bit_quant_type ds.load_in_4bit"),
    ("lora.rank", "lora lora_r lora_rank lora_dim use_lora use_peft peft peft_config ds.lora.rank"),
    ("lora.alpha", "lora_alpha ds.lora.alpha"),
    ("lora.targets", "lora_target_modules target_modules ds.lora.target_modules"),
    ("lora.target_parameters", "target_parameters lora_target_parameters"),
    ("lora.exclude", "exclude_modules lora_exclude_modules"),
    ("lora.rslora", "use_rslora"),
    ("lora.layers", "layers_to_transform"),
    ("lora.init", "init_lora_weights lora_init lora_a_init_method"),
    ("lora.train_also", "modules_to_save lora_modules_to_save"),
    ("model.router_aux_loss_coef", "aux_loss_coef moe_aux_loss_coeff output_router_logits"),
    ("model.dtype", "bf16 fp16 precision param_dtype torch_dtype mixed_precision"),
    ("mesh.collective_timeout_s", "ddp_timeout"),
    ("mesh.data", "dp dp_size data_parallel_size"),
    ("mesh.tensor", "tp tp_size tensor_parallel_size tensor_model_parallel_size ds_tensor_parallel_size"),
    (
        "mesh.sequence",
        "ring_attn_size cp cp_size context_parallel_size ulysses_sequence_parallel_size sequence_parallel_size",
    ),
    ("mesh.expert", "ep ep_size expert_parallel_size expert_model_parallel_size"),
    ("mesh.pipeline", "pp pp_size pipeline_parallel_size pipeline_model_parallel_size"),
    ("mesh.pipeline_chunks", "vpp vpp_size virtual_pipeline_model_parallel_size"),
    ("mesh.zero", "zero_stage zero_optimization stage fsdp accelerator_config parallelism_config fsdp_config"),
    (
        "mesh.offload",
        "adam_offload ref_reward_offload optimizer_offload param_offload cpu_offload offload_optimizer ref_offload teacher_offload",
    ),
    ("mesh.placement", "colocate_all_models colocate_actor_ref actor_num_gpus_per_node placement_group"),
    ("mesh.async_updates_max", "async_train async_queue_size staleness_threshold max_off_policy_steps partial_rollout"),
    (
        "data.prompts",
        "prompt_data dataset dataset_name dataset_config train_files train_data train_dataset data_path prompt_dataset",
    ),
    ("data.pretrain", "pretrain_data pretrain_dataset"),
    ("data.weights", "prompt_data_probs dataset_probs probs mixer"),
    ("data.rows_max", "max_samples train_max_samples"),
    ("data.prompt_key", "input_key prompt_column question_key dataset_text_field"),
    ("data.response_key", "output_key completion_key target_key"),
    ("data.label_key", "answer_key ground_truth reference_key solution_key"),
    ("data.template", "input_template prompt_template"),
    ("data.messages_key", "multiturn"),
    ("data.chat_template", "apply_chat_template use_chat_template"),
    ("data.chat_template_args", "chat_template_kwargs enable_thinking"),
    ("data.prompt_tokens_max", "prompt_max_len max_prompt_length max_input_length"),
    ("data.long_prompts", "truncation_mode"),
    ("data.order", "shuffle_dataset group_by_length train_sampling_strategy"),
    ("data.row_tokens_max", "max_len max_length max_seq_length max_seq_len block_size cutoff_len"),
    ("data.prompt_split", "train_split dataset_split dataset_train_split"),
    ("data.eval_split", "test_split validation_split dataset_test_split"),
    ("data.split.eval_files", "eval_dataset val_files"),
    (
        "rollout.prompts_per_step",
        "rollout_batch_size num_prompts_per_step gen_batch_size generation_batch_size steps_per_generation batch_size",
    ),
    (
        "rollout.samples_per_prompt",
        "n_samples_per_prompt num_generations num_generations_per_prompt rollout_n num_return_sequences",
    ),
    (
        "rollout.response_tokens_max",
        "max_new_tokens generate_max_len max_completion_length max_response_length response_length max_tokens",
    ),
    ("rollout.response_tokens_min", "min_new_tokens min_tokens"),
    (
        "rollout.dynamic_sampling.prompts_max_factor",
        "dynamic_filtering filter_groups use_dynamic_sampling dynamic_sampling_max_gen_batches",
    ),
    ("rollout.dynamic_sampling.low", "dynamic_filtering_reward_range dynamic_filtering_range"),
    ("rollout.tensor", "vllm_tensor_parallel_size"),
    ("rollout.graphs", "enforce_eager"),
    ("rollout.ignore_eos", "stop_token"),
    ("rollout.stop", "stop_strings stop_words"),
    ("rollout.repetition_penalty", "rep_penalty"),
    ("rollout.kv_dtype", "kv_cache_dtype"),
    ("rollout.kv_bytes_max", "gpu_memory_utilization vllm_gpu_memory_utilization"),
    ("rollout.batch_max", "max_num_seqs micro_rollout_batch_size"),
    ("reward.environment", "agent_func_path agent environment env tools multi_turn interaction_config_path"),
    ("reward.models", "reward_pretrain reward_model_path"),
    ("reward.python", "reward_funcs reward_func reward_function custom_reward_function reward_fn reward_weights"),
    ("reward.http", "remote_rm_url rm_url reward_url remote_reward_url"),
    ("reward.judge", "judges llm_judge judge_model generative_reward_model"),
    ("reward.timeout_s", "reward_timeout remote_rm_timeout"),
    ("reward.workers", "num_reward_workers reward_num_workers"),
    ("ppo.advantage", "advantage_estimator adv_estimator scale_rewards multi_objective_aggregation"),
    ("ppo.advantage_std", "no_advantage_std_norm"),
    ("ppo.lambda", "lambd gae_lambda lam"),
    ("ppo.loss", "importance_sampling_level policy_loss_type"),
    ("ppo.sapo_tau_positive", "sapo_temperature_pos"),
    ("ppo.sapo_tau_negative", "sapo_temperature_neg"),
    (
        "ppo.clip_low",
        "eps_clip cliprange clip_range clip_ratio clip_eps epsilon eps_clip_low eps_clip_low_high ratio_clip_min clip_ratio_low",
    ),
    ("ppo.clip_high", "eps_clip_high epsilon_high ratio_clip_max clip_ratio_high"),
    ("ppo.dual_clip", "clip_ratio_c ratio_clip_c delta"),
    ("ppo.value_clip", "cliprange_value value_clip_range vf_clip"),
    ("ppo.entropy_coef", "entropy_loss_coef entropy_coeff ent_coef"),
    ("ppo.kl_coef", "init_kl_coef kl_loss_coef beta kl_ctrl_coef reference_policy_kl_penalty"),
    ("ppo.kl_estimator", "kl_penalty use_kl_estimator_k3"),
    ("ppo.kl_in", "use_kl_loss use_kl_in_reward"),
    ("ppo.kl_weighted", "use_bias_correction_kl"),
    ("ppo.kl_target", "target_kl target"),
    ("ppo.kl_horizon", "horizon"),
    ("ppo.reward_clip", "reward_clip_range cliprange_reward"),
    ("ppo.reward_normalize", "whiten_rewards"),
    ("ppo.aggregation", "loss_agg_mode loss_type token_level_loss"),
    ("ppo.correction", "enable_vllm_is_correction tis rollout_is importance_sampling_correction"),
    ("ppo.overlong_penalty", "overlong_penalty_factor"),
    ("ppo.mask_truncated", "mask_truncated_completions overlong_filtering"),
    ("ppo.overlong_buffer_tokens", "overlong_buffer_len overlong_buffer"),
    ("ppo.ptx_coef", "ptx_coef ptx_loss_coef"),
    ("ppo.critic_warmup_steps", "critic_warmup freezing_actor_steps value_pretrain_steps"),
    ("ppo.critic_epochs", "critic_steps_per_actor critic_updates"),
    ("ppo.lambda_alpha", "length_adaptive_lambda"),
    ("ppo.epochs", "num_ppo_epochs ppo_epochs max_epochs num_iterations"),
    (
        "ppo.minibatch_samples",
        "train_batch_size ppo_mini_batch_size mini_batch_size train_global_batch_size per_device_train_batch_size gradient_accumulation_steps num_mini_batches",
    ),
    (
        "ppo.microbatch_tokens_max",
        "micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu train_micro_batch_size train_max_tokens_per_gpu",
    ),
    ("dpo.loss", "ipo"),
    ("dpo.nll_coef", "nll_loss_coef cpo_alpha"),
    ("step_reward.placeholder", "placeholder_token step_separator"),
    ("sft.epochs", "num_train_epochs num_epochs"),
    ("sft.loss_on", "pretrain_mode completion_only_loss assistant_only_loss train_on_input train_on train_on_inputs"),
    ("distill.on_policy", "lmbda on_policy_distillation"),
    ("distill.divergence", "kl_type distill_loss"),
    ("distill.ce_coef", "kd_coef kd_ratio"),
    ("gradient.recompute", "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing"),
    ("optim.actor.lr", "lr learning_rate actor_learning_rate actor_lr policy_lr"),
    ("optim.critic.lr", "critic_learning_rate critic_lr value_lr"),
    ("optim.actor.betas", "adam_betas adam_beta1 adam_beta2"),
    ("optim.actor.eps", "adam_epsilon adam_eps"),
    ("optim.actor.weight_decay", "l2 wd"),
    ("optim.actor.clip_norm", "max_grad_norm max_norm grad_clip gradient_clipping clip_grad"),
    ("optim.actor.schedule", "lr_scheduler lr_scheduler_type lr_schedule"),
    ("optim.actor.warmup_ratio", "lr_warmup_ratio warmup_steps lr_warmup_steps"),
    ("optim.actor.floor_ratio", "min_lr min_lr_ratio lr_scheduler_kwargs"),
    ("optim.actor.ema_beta", "enable_ema ema ema_decay"),
    ("data.eval_sets", "eval_datasets val_datasets eval_tasks"),
    ("eval.samples_per_prompt", "eval_n_samples_per_prompt num_tests_per_prompt val_n num_generations_eval"),
    ("eval.temperature", "eval_temperature val_temperature"),
    ("eval.pass_at", "pass_at_k k_value"),
    ("eval.every_steps", "eval_steps test_freq eval_strategy val_period evaluation_strategy"),
    ("checkpoint.every_steps", "save_steps save_freq save_period save_interval disable_ds_ckpt save_strategy"),
    ("eval.patience", "early_stopping_patience early_stopping"),
    ("checkpoint.best_metric", "metric_for_best_model best_metric_key"),
    ("checkpoint.best_mode", "greater_is_better best_metric_mode"),
    ("checkpoint.export_best", "load_best_model_at_end save_best_checkpoint"),
    ("checkpoint.keep_last", "max_ckpt_num save_total_limit keep_top_k"),
    ("metrics.print_every", "logging_steps logging_first_step logging_strategy"),
    ("metrics.samples_every_steps", "log_completions"),
    ("metrics.samples_count", "num_completions_to_print"),
    ("metrics.tensorboard", "use_tensorboard report_to logger"),
];

/// What needs no key here, or has none yet.
const ANSWERS: &[(&str, &str)] = &[
    (
        "set `reward.models.normalize` of the reward model's table: scores by the mean and std of its config.json",
        "normalize_reward",
    ),
    (
        "adapters have no dropout: with it, log-probabilities at sampling would differ from those in training",
        "dropout lora_dropout ds.lora.dropout",
    ),
    (
        "adapters are plain LoRA or rsLoRA (`lora.rslora`): DoRA and methods that change the base are not supported",
        "use_dora dora use_qalora pissa olora loftq loftq_config peft_type lora_bias",
    ),
    ("quantized weights are nf4 only: set model.quantize = \"nf4\"", "load_in_8bit"),
    (
        "jobs/tools/metrics_to.py sends metrics.jsonl to Weights & Biases or MLflow",
        "wandb use_wandb wandb_project wandb_org wandb_group mlflow swanlab",
    ),
    (
        "rows are always packed; with microbatch_tokens_max = 1 each has a pass of its own",
        "packing packing_samples use_remove_padding padding_free",
    ),
    ("run the same command again to resume", "load_checkpoint resume_from_checkpoint"),
    ("`ppo.truncated_score_coef` is similar: cut responses get a share of their score", "missing_eos_penalty"),
    ("this is not in this release", "sync_ref_model"),
    ("attention is always fused", "flash_attn attn_implementation use_flash_attention"),
    (
        "the process that trains samples, too: there is no inference server to set",
        "vllm_num_engines use_vllm vllm_mode vllm_sync_backend enable_prefix_caching vllm_enable_sleep sglang",
    ),
    (
        "nothing of Ray or DeepSpeed is needed: mpirun starts the ranks",
        "ray deepspeed deepspeed_config ds_config num_nodes nnodes n_gpus_per_node ref_num_nodes actor_num_nodes critic_num_nodes",
    ),
];

/// What is meant by `wrong`, which is not a key of the table `of`, whose keys are `known`.
pub(super) fn elsewhere(of: &[&str], wrong: &str, known: &[&str]) -> String {
    let word = wrong.to_lowercase().replace('-', "_");
    let has = |words: &str| words.split(' ').any(|other| other == word);
    let within = |key: &str| of.iter().chain([&key]).copied().collect::<Vec<_>>().join(".");
    if let Some(key) = verl::ours(&within(wrong)) {
        return format!("verl's name for `{key}`");
    }
    if let Some((answer, _)) = ANSWERS.iter().find(|(_, words)| has(words)) {
        return (*answer).to_string();
    }
    // A table of verl's may hold a key with another system's name, as in `trainer.learning_rate`.
    if verl::is_foreign(&within(wrong)) && !ALIASES.iter().any(|(_, words)| has(words)) {
        return "a key of verl that this program does not need or have; `rlhf-hpc help from-verl` lists the others"
            .into();
    }
    let keys = keys();
    let called_so = ALIASES.iter().filter(|(_, words)| has(words)).flat_map(|(key, _)| {
        // Batches and epochs are of both kinds of job.
        let of_sft = key.strip_prefix("ppo.").map(|name| format!("sft.{name}")).filter(|key| keys.contains(key));
        std::iter::once((*key).to_string()).chain(of_sft)
    });
    let elsewhere = keys.iter().filter(|key| key.rsplit('.').next() == Some(&word)).cloned();
    let mut meant: Vec<String> = called_so.collect();
    let others: Vec<String> = elsewhere.filter(|key| !meant.contains(key)).collect();
    meant.extend(others);
    if meant.is_empty() {
        meant.extend(nearest(wrong, known).map(within));
    }
    if meant.is_empty() {
        let nearly = |other: &str| other.len() > 4 && edit_distance(&word, other) == 1;
        let of = ALIASES.iter().find(|(_, words)| words.split(' ').any(nearly));
        meant.extend(of.map(|(key, _)| (*key).to_string()));
    }
    if meant.is_empty() {
        let last: Vec<&str> = keys.iter().filter_map(|key| key.rsplit('.').next()).collect();
        let near = nearest(wrong, &last);
        meant.extend(keys.iter().filter(|key| key.rsplit('.').next() == near).cloned());
    }
    match meant.as_slice() {
        [] => format!("known here: {}", known.join(", ")),
        meant => {
            let meant: Vec<String> = meant.iter().map(|key| format!("`{key}`")).collect();
            format!("did you mean {}?", meant.join(" or "))
        }
    }
}

/// The keys for what another system calls `name`.
pub(super) fn ours(name: &str) -> Vec<&'static str> {
    let word = name.trim_start_matches('-').to_lowercase().replace('-', "_");
    let of_verl = verl::ours_by_end(&word);
    if !of_verl.is_empty() {
        return of_verl;
    }
    ALIASES.iter().filter(|(_, words)| words.split(' ').any(|other| other == word)).map(|(key, _)| *key).collect()
}

/// What to write instead of the option `--name value` of a job: an override, or why there is none.
pub fn override_for(option: &str, value: Option<&str>) -> Option<String> {
    let word = option.trim_start_matches('-').to_lowercase().replace('-', "_");
    let has = |words: &str| words.split(' ').any(|other| other == word);
    if let Some((answer, _)) = ANSWERS.iter().find(|(_, words)| has(words)) {
        return Some((*answer).to_string());
    }
    let keys = keys();
    let is_key = |key: &&String| **key == word || key.strip_suffix(&word).is_some_and(|rest| rest.ends_with('.'));
    let mut meant: Vec<String> = ours(&word).into_iter().map(String::from).collect();
    meant.extend(keys.iter().filter(is_key).filter(|_| meant.is_empty()).cloned().collect::<Vec<_>>());
    let value = value.unwrap_or("VALUE");
    let shown: Vec<String> = meant.iter().take(3).map(|key| format!("`{key}={value}`")).collect();
    (!shown.is_empty()).then(|| format!("keys of a job are set without dashes: write {}", shown.join(" or ")))
}

/// The paths of all keys.
pub fn keys() -> Vec<String> {
    fn below(table: &Table, path: &str, keys: &mut Vec<String>) {
        for (key, value) in table {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            match value {
                // An empty one takes any keys.
                Value::Table(inner) if !inner.is_empty() => below(inner, &path, keys),
                _ => keys.push(path),
            }
        }
    }
    let mut keys = Vec::new();
    below(&Table::try_from(Config::default()).expect("a configuration is TOML"), "", &mut keys);
    keys
}

/// The known name within edit distance 1 + a third of its length, if any.
pub fn nearest<'a>(wrong: &str, known: &[&'a str]) -> Option<&'a str> {
    let near = known.iter().map(|name| (edit_distance(wrong, name), *name)).min();
    near.filter(|(distance, name)| *distance <= 1 + name.len() / 3).map(|(_, name)| name)
}

/// Levenshtein distance by one row of the dynamic programme.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aliases_of_other_systems_lead_to_existing_keys() {
        let keys = keys();
        for (key, words) in ALIASES {
            assert!(keys.contains(&(*key).to_string()), "{key} for {words}");
        }
        let all: Vec<&str> = ALIASES.iter().chain(ANSWERS).flat_map(|(_, words)| words.split(' ')).collect();
        let twice: Vec<&&str> =
            all.iter().filter(|word| all.iter().filter(|other| other == word).count() > 1).collect();
        assert!(twice.is_empty(), "{twice:?}");
    }
}
