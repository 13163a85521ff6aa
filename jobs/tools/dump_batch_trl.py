"""Writes updates of TRL's GRPOTrainer as batches for `rlhf-hpc replay --batch`. In a training script, next to this file
and dump_batch.py, before trainer.train():  import dump_batch_trl; dump_batch_trl.dump(trainer)"""

import torch
from dump_batch import merged, save

MEANS = dict(grpo="sequence", sapo="sequence", bnpo="token", dapo="token", cispo="token", dr_grpo="sequence_sum_fixed")


def settings(trainer):
    a, kind, end = trainer.args, trainer.args.loss_type, trainer.processing_class.eos_token_id
    loss = "gspo" if a.importance_sampling_level == "sequence" else kind if kind in ("cispo", "sapo") else "clip"
    weighted, apart = bool(trainer.beta and a.use_bias_correction_kl), a.multi_objective_aggregation != "sum_then_normalize"
    if kind not in MEANS or (loss == "gspo" and weighted) or (len(trainer.reward_funcs) > 1 and apart):
        raise ValueError("a batch has no loss_type vespo or luspo, no normalize_then_sum, and no weighted KL with one ratio per sequence")
    high = trainer.epsilon_high - (1 if loss == "cispo" else 0)  # TRL's bound of cispo is the ratio itself
    return {"ppo.loss": loss, "ppo.aggregation": MEANS[kind], "ppo.reward_clip": "[-3e38, 3e38]", "ppo.kl_estimator": "k3",
            "ppo.advantage": "dr-grpo" if a.scale_rewards in ("none", False) else "grpo", "batch.group_epsilon": "1e-4",
            "batch.group_std": "batch" if a.scale_rewards == "batch" else "sample", "ppo.clip_low": trainer.epsilon_low,
            "ppo.clip_high": high, "ppo.dual_clip": a.delta or 0.0, "ppo.kl_in": "loss" if trainer.beta else "none",
            "ppo.kl_coef": trainer.beta, "ppo.kl_weighted": weighted, "ppo.entropy_coef": a.entropy_coef, "rollout.temperature": trainer.temperature,
            "ppo.sapo_tau_positive": a.sapo_temperature_pos, "ppo.sapo_tau_negative": a.sapo_temperature_neg, "batch.end_tokens": end,
            "rollout.response_tokens_max": trainer.max_completion_length, "rollout.samples_per_prompt": trainer.num_generations,
            "batch.loss_sequences": a.per_device_train_batch_size * a.gradient_accumulation_steps, "batch.mean_of_microbatches": kind == "bnpo"}


def dump(trainer):
    generate, compute, clip = trainer._generate_and_score_completions, trainer._compute_loss, trainer.accelerator.clip_grad_norm_
    kept, parts = {}, []
    def keep(name):
        function = getattr(trainer, name)
        setattr(trainer, name, lambda *a, **k: kept.__setitem__(name, function(*a, **k)) or kept[name])

    def generated(inputs):
        found = generate(inputs)
        n, first = len(found["completion_ids"]), len(found["completion_ids"]) * trainer.accelerator.process_index
        scores = (kept["_calculate_rewards"].cpu() * trainer.reward_weights.cpu()).nansum(1)[first:][:n]
        return found | {"scores": scores, "group": (torch.arange(n) + first) // trainer.num_generations}

    def loss(model, inputs):
        value, both = compute(model, inputs), lambda of: torch.cat([inputs["prompt" + of], inputs["completion" + of]], 1)
        new, entropy, _ = kept["_get_per_token_logps_and_entropies"]
        part = {"logprobs": new, "old_logprobs": inputs.get("old_per_token_logps", new), "entropy": entropy, "input_ids": both("_ids")}
        part |= {"ref_logprobs": inputs["ref_per_token_logps"]} if trainer.beta else {}
        part |= {"attention_mask": both("_mask"), "response_mask": inputs["completion_mask"] * inputs.get("tool_mask", 1)}
        part |= {name: inputs[name] for name in ("advantages", "scores", "group")}
        own = {"loss": value.detach(), "items": float(inputs["num_items_in_batch"])}
        if trainer.model.training:  # not in an evaluation
            parts.append({name: x.detach().cpu() for name, x in part.items()} | own)
        return value

    def clipped(*args, **more):
        norm, own, a = clip(*args, **more), settings(trainer), trainer.args
        scale = a.gradient_accumulation_steps / a.steps_per_generation / trainer.accelerator.num_processes
        items, loss = max(part.pop("items") for part in parts) * scale, sum(part.pop("loss") for part in parts)
        own["batch.loss_tokens"] = items if a.loss_type in ("dapo", "cispo") else None
        save("trl", "update", merged(parts) | {"loss": loss, "grad_norm": norm}, own)
        return parts.clear() or norm
    [keep(name) for name in ("_calculate_rewards", "_get_per_token_logps_and_entropies")]
    trainer._generate_and_score_completions, trainer._compute_loss, trainer.accelerator.clip_grad_norm_ = generated, loss, clipped
