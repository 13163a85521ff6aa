"""Writes rollouts and updates of OpenRLHF as batches for `rlhf-hpc replay --batch`. Put this file and dump_batch.py into
PYTHONPATH, and append this line to trainer/ppo_utils/experience_maker.py, trainer/ray/ppo_actor.py and ray/ppo_critic.py:
import dump_batch_openrlhf; dump_batch_openrlhf.wrap(globals())"""

import torch
from dump_batch import joined, replace, save, watched

ESTIMATORS = {"reinforce": "reinforce++", "reinforce_baseline": "reinforce++-baseline", "group_norm": "grpo", "dr_grpo": "dr-grpo"}
COLUMNS = {"response_mask": "action_mask", "sample_logprobs": "rollout_log_probs", "old_logprobs": "action_log_probs",
           "input_ids": "sequences"} | {name: name for name in ("attention_mask", "values", "returns", "advantages")}
ROLLOUT = (("temperature", "temperature"), ("samples_per_prompt", "n_samples_per_prompt"))


def settings(args, beta):
    a, kl, p = args.algo.advantage, args.algo.kl, args.actor
    correction = {"seq-mask-tis": "sequence_mask"}.get(a.is_correction_type, a.is_correction_type)
    low, high = a.is_correction_threshold if a.is_correction_enable else (0.5, 5.0)
    return {"ppo.advantage": ESTIMATORS.get(a.estimator, a.estimator), "ppo.advantage_std": not a.no_std_norm, "ppo.lambda": a.lambd,
            "ppo.gamma": a.gamma if a.estimator in ("gae", "reinforce") else 1.0, "ppo.reward_clip": list(args.reward.clip_range),
            "ppo.kl_in": "loss" if kl.use_loss else "reward", "ppo.kl_coef": beta, "ppo.kl_estimator": kl.estimator,
            "ppo.loss": "gspo" if p.policy_loss_type == "gspo" else "clip", "ppo.clip_low": p.eps_clip_low_high[0],
            "ppo.clip_high": p.eps_clip_low_high[1], "ppo.dual_clip": p.dual_clip or 0.0, "ppo.value_clip": args.critic.value_clip,
            "ppo.correction": correction if a.is_correction_enable else "none", "ppo.correction_low": low, "ppo.correction_high": high,
            "ppo.entropy_coef": p.entropy_coef or 0.0, **{f"rollout.{key}": getattr(args.rollout, of) for key, of in ROLLOUT}}


columns = lambda all, **more: {ours: joined([getattr(e, name) for e in all]) for ours, name in (COLUMNS | more).items()}


def wrap(space):
    kept = {"compute_approx_kl": [], "compute_reward": []}
    for name in kept if "RemoteExperienceMaker" in space else ():  # it keeps neither the reference nor the rewards
        space[name] = lambda *a, f=space[name], name=name, **k: kept[name].append((a, f(*a, **k))) or kept[name][-1][1]
    def rollout(self, all, made):
        kl, beta, found = joined([e.kl for e in all]), self.kl_ctl.value, made(self, all)
        base = joined([a[1] for a, _ in kept["compute_approx_kl"]] or [e.base_action_log_probs for e in all])
        rewards, group = joined([r for _, r in kept["compute_reward"]]), torch.tensor([i for e in all for i in e.index])
        more = {"kl": None if self.args.algo.kl.use_loss else kl, "ref_logprobs": base, "rewards": rewards, "group": group // self.args.rollout.n_samples_per_prompt}
        save("openrlhf", "rollout", columns(all, scores="rewards") | more, settings(self.args, beta))
        [calls.clear() for calls in kept.values()]
        return found
    def update(self, e, *rest, made, name, **more):
        seen, backward, strategy = {}, self.strategy.backward, self.strategy
        hook = watched(getattr(self, f"{name}_loss_fn"), seen)
        strategy.backward = lambda total, *a, **k: seen.update(total=total) or backward(total, *a, **k)
        status = made(self, e, *rest, **more)
        (strategy.backward, o), _ = (backward, seen["options"]), hook.remove()
        alone = strategy.accumulated_gradient == 1 and o["dp_size"] == 1  # the norm is of this batch
        norm = float(status.get("metrics", status)[f"{name}_grad_norm"]) if alone else None
        totals = {"batch.loss_tokens": o["batch_num_tokens"] / o["dp_size"], "batch.loss_sequences": o["global_batch_size"] / o["dp_size"]}
        found = {"new_values": seen["given"][0], "value_loss": seen["found"], "critic_grad_norm": norm}
        if name == "actor":
            found = {"logprobs": seen["given"][0], "loss": seen["total"], "policy_loss": seen["found"][0], "grad_norm": norm}
        own = settings(self.args, float(rest[0]) if name == "actor" else 0.0) | {key: float(x) for key, x in totals.items()}
        save("openrlhf", name, columns([e], ref_logprobs="base_action_log_probs") | found, own)
        return status
    replace(space, "RemoteExperienceMaker", "compute_advantages_and_returns", rollout)
    replace(space, "ActorPPOTrainer", "training_step", update, name="actor")
    replace(space, "CriticPPOTrainer", "training_step", update, name="critic")
