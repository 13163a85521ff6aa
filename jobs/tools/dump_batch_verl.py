"""Writes rollouts and updates of verl as batches for `rlhf-hpc replay --batch`. Put this file and dump_batch.py into
PYTHONPATH, and append this line to verl/trainer/ppo/ray_trainer.py, workers/actor/dp_actor.py and workers/critic/dp_critic.py:
import dump_batch_verl; dump_batch_verl.wrap(globals())"""

from dump_batch import merged, replace, save

ESTIMATORS = {"reinforce_plus_plus": "reinforce++", "reinforce_plus_plus_baseline": "reinforce++-baseline"}
KL, MEANS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}, {"token-mean": "token", "seq-mean-token-mean": "sequence"}
SAME = [(name, name) for name in ("input_ids", "attention_mask", "response_mask", "values", "returns", "advantages")]
COLUMNS = SAME + [("old_log_probs", "old_logprobs"), ("ref_log_prob", "ref_logprobs")]
GIVEN = SAME + [("old_log_prob", "old_logprobs"), ("log_prob", "logprobs"), ("vpreds", "new_values")]


def settings(c, parts, columns):
    length = {"seq-mean-token-sum": 1, "seq-mean-token-sum-norm": getattr(c, "loss_scale_factor", None) or columns}.get(c.loss_agg_mode)
    mean, one = MEANS.get(c.loss_agg_mode, "sequence_sum_fixed"), 1 if c.loss_agg_mode == "seq-mean-token-sum-norm" else None
    own = {"batch.mean_of_microbatches": parts > 1, "rollout.response_tokens_max": length, "batch.loss_sequences": one}
    if hasattr(c, "cliprange_value"):
        return own | {"ppo.value_clip": c.cliprange_value, "batch.value_aggregation": mean}
    mode, (low, high) = c.policy_loss.get("loss_mode", "vanilla"), (c.clip_ratio if x is None else x for x in (c.clip_ratio_low, c.clip_ratio_high))
    return own | {"ppo.loss": {"vanilla": "clip"}.get(mode, mode), "ppo.clip_low": low, "ppo.clip_high": high, "ppo.aggregation": mean,
                  "ppo.dual_clip": c.get("clip_ratio_c", 3.0) if mode == "vanilla" else 0.0, "ppo.kl_in": "loss" if c.use_kl_loss else "none",
                  "ppo.kl_coef": c.kl_loss_coef, "ppo.kl_estimator": KL.get(c.kl_loss_type, c.kl_loss_type), "ppo.entropy_coef": c.entropy_coeff}


def wrap(space):
    parts, last, estimate = [], {}, space.get("compute_advantage")
    def advantages(data, adv_estimator, gamma=1.0, lam=1.0, num_repeat=1, norm_adv_by_std_in_grpo=True, config=None):
        b = estimate(data, adv_estimator, gamma, lam, num_repeat, norm_adv_by_std_in_grpo, config).batch
        ids, per_token = {}, (name := getattr(adv_estimator, "value", adv_estimator)) in ("gae", "reinforce_plus_plus")
        of = {ours: b[theirs] for theirs, ours in COLUMNS if theirs in b and (per_token or ours != "returns")}
        rewards = b["token_level_rewards"]  # with the KL in them
        of |= {"rewards": rewards} if per_token else {"scores": rewards.sum(-1)}
        of["group"] = [ids.setdefault(uid, len(ids)) for uid in data.non_tensor_batch.get("uid", range(len(rewards)))]
        name = "dr-grpo" if name == "grpo" and not norm_adv_by_std_in_grpo else ESTIMATORS.get(name, name)
        own = {"ppo.advantage": name, "ppo.gamma": gamma, "ppo.lambda": lam, "ppo.reward_clip": "[-3e38, 3e38]", "ppo.kl_in": "none"}
        save("verl", "rollout", of, own | {"batch.group_epsilon": 1e-6, "batch.whitening": "sample" if per_token or "++" in name else "by_estimator"})
        return data
    def forward(self, inputs, *args, made, **more):
        last.update(ids={ours: inputs[ours] for ours in ("input_ids", "attention_mask")}, temperature=more.get("temperature"),
                    reference={"ref_logprobs": inputs["ref_log_prob"]} if "ref_log_prob" in inputs else {})
        return made(self, inputs, *args, **more)
    def loss(made, **given):
        found, part = made(**given), {ours: given[of] for of, ours in GIVEN if of in given}
        parts.append((part | last["ids"] | last["reference"], found[0].detach().clone()))
        return found
    def step(self, made, name, value, norm):
        found, own = made(self), settings(self.config, len(parts), parts[0][0]["response_mask"].shape[1])
        tensors = merged([part for part, _ in parts]) | {value: sum(x for _, x in parts) / len(parts), norm: found}
        save("verl", name, tensors, own | {"rollout.temperature": last["temperature"]})
        return parts.clear() or found
    for of, *names in (("DataParallelPPOActor", "actor", "policy_loss", "grad_norm"), ("DataParallelPPOCritic", "critic", "value_loss", "critic_grad_norm")):
        replace(space, of, "_forward_micro_batch", forward)
        replace(space, of, "_optimizer_step", step, **dict(zip(("name", "value", "norm"), names)))
    if policy := space.get("get_policy_loss_fn"):
        space["get_policy_loss_fn"] = lambda mode: lambda **given: loss(policy(mode), **given)
    elif estimate:
        space["compute_advantage"] = advantages
    elif core := space.get("core_algos"):
        core.compute_value_loss = lambda made=core.compute_value_loss, **given: loss(made, **given)
