//! Values of keys that have other names here than in other systems.

/// A key, values from other systems, and the hint that names ours.
const VALUES: &[(&str, &str, &str)] = &[
    ("job.kind", "prm process_reward_model process_reward process_reward_modeling", "set job.kind = \"step_reward\""),
    ("job.kind", "rm reward rmt reward_modeling bradley_terry", "set job.kind = \"reward_model\""),
    ("job.kind", "kd gkd opd distillation knowledge_distillation", "set job.kind = \"distill\""),
    ("job.kind", "supervised fine_tuning finetune finetuning instruct", "set job.kind = \"sft\""),
    ("job.kind", "pretrain pretraining pt cpt", "set job.kind = \"sft\" and sft.loss_on = \"all\""),
    ("job.kind", "evaluation evaluate test val_only", "set job.kind = \"eval\""),
    (
        "job.kind",
        "dapo",
        "set job.kind = \"ppo\" and ppo.advantage = \"grpo\"; `rlhf-hpc jobs copy dapo` copies the recipe",
    ),
    ("job.kind", "cdpo", "set job.kind = \"dpo\" and dpo.label_smoothing above 0"),
    ("job.kind", "reinforce reinforce_plus_plus", "set job.kind = \"ppo\" and ppo.advantage = \"reinforce++\""),
    ("job.kind", "dr_grpo", "set job.kind = \"ppo\" and ppo.advantage = \"dr-grpo\""),
    ("ppo.advantage", "ppo", "set ppo.advantage = \"gae\", the estimator of PPO"),
    ("ppo.advantage", "reinforce reinforce_plus_plus", "set ppo.advantage = \"reinforce++\""),
    (
        "ppo.advantage",
        "reinforce_baseline reinforce_plus_plus_baseline reinforce++_baseline",
        "set ppo.advantage = \"reinforce++-baseline\"",
    ),
    ("ppo.advantage", "group_norm dapo", "set ppo.advantage = \"grpo\""),
    ("ppo.advantage", "dr_grpo drgrpo", "set ppo.advantage = \"dr-grpo\""),
    ("ppo.loss", "ppo vanilla ppo_clip clipped pg", "set ppo.loss = \"clip\""),
    ("ppo.loss", "dapo bnpo", "set ppo.loss = \"clip\" and ppo.aggregation = \"token\""),
    ("ppo.loss", "grpo", "set ppo.loss = \"clip\" and ppo.aggregation = \"sequence\""),
    ("ppo.loss", "dr_grpo", "set ppo.loss = \"clip\" and ppo.aggregation = \"sequence_sum_fixed\""),
    ("ppo.aggregation", "token_mean dapo bnpo", "set ppo.aggregation = \"token\""),
    ("ppo.aggregation", "seq_mean_token_mean grpo", "set ppo.aggregation = \"sequence\""),
    ("ppo.aggregation", "seq_mean_token_sum_norm dr_grpo", "set ppo.aggregation = \"sequence_sum_fixed\""),
    ("ppo.kl_estimator", "kl", "set ppo.kl_estimator = \"k1\""),
    ("ppo.kl_estimator", "mse", "set ppo.kl_estimator = \"k2\""),
    ("ppo.kl_estimator", "low_var_kl", "set ppo.kl_estimator = \"k3\""),
    ("dpo.loss", "dpo", "set dpo.loss = \"sigmoid\""),
    ("dpo.loss", "cdpo robust", "set dpo.loss = \"sigmoid\" and dpo.label_smoothing above 0"),
    ("dpo.loss", "sft", "set dpo.nll_coef, which adds the loss of the chosen response"),
    ("distill.divergence", "kl fkl forward", "set distill.divergence = \"forward_kl\""),
    ("distill.divergence", "rkl reverse", "set distill.divergence = \"reverse_kl\""),
    ("distill.divergence", "js", "set distill.divergence = \"jsd\""),
    ("model.quantize", "4bit int4 4 bnb bitsandbytes qlora fp4 true", "set model.quantize = \"nf4\""),
    ("lora.init", "kaiming kaiming_uniform default true", "set lora.init = \"uniform\""),
    (
        "lora.init",
        "pissa olora loftq corda eva lora_ga",
        "set lora.init = \"uniform\" or \"gaussian\", which leave the base model as it is",
    ),
    ("rollout.kv_dtype", "fp8_e4m3 float8_e4m3fn float8", "set rollout.kv_dtype = \"fp8\", which is e4m3"),
    ("rollout.kv_dtype", "bf16 bfloat16 f32", "set rollout.kv_dtype = \"model\": keys and values in model.dtype"),
    ("model.dtype", "bfloat16 torch.bfloat16", "set model.dtype = \"bf16\""),
    ("model.dtype", "float32 fp32 torch.float32 float full", "set model.dtype = \"f32\""),
    (
        "model.dtype",
        "fp16 float16 f16 half torch.float16",
        "set model.dtype = \"bf16\" or \"f32\": a model with f16 files loads, but f16 is not supported in memory",
    ),
    ("job.device", "cuda nvidia cuda:0", "set job.device = \"gpu\""),
    ("optim.actor.schedule optim.critic.schedule", "cosine_with_min_lr", "set schedule = \"cosine\" and floor_ratio"),
    (
        "optim.actor.schedule optim.critic.schedule",
        "constant_with_warmup",
        "set schedule = \"constant\" and warmup_ratio",
    ),
    ("gradient.recompute", "full", "set gradient.recompute = \"block\""),
    ("gradient.recompute", "selective", "set gradient.recompute = \"attention\""),
    ("data.order", "random shuffle", "set data.order = \"shuffled\""),
];

/// What to set instead of the value `word` of `key`.
pub(super) fn meant(key: &str, word: &str) -> Option<&'static str> {
    let word = word.to_lowercase().replace('-', "_");
    let has = |words: &str, one: &str| words.split(' ').any(|other| other == one);
    VALUES.iter().find(|(keys, words, _)| has(keys, key) && has(words, &word)).map(|(.., hint)| *hint)
}
