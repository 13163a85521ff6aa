"""Draws the jobs of drawn.py: models, layouts and settings, each from its seed and number."""

import json
import random


def model(draw, device):
    """A config.json."""
    family = draw.choice(["llama", "mistral", "qwen2", "qwen3"])
    dims = [32, 64, 80, 96, 128, 256] if device == "gpu" else [8, 16, 24, 32, 64, 80]
    kv = draw.choice([1, 2, 2, 4])
    config = {
        "architectures": [{"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family] + "ForCausalLM"],
        "model_type": family,
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "hidden_size": draw.choice([32, 40, 64, 96]),
        "intermediate_size": draw.choice([32, 48, 64, 96, 128]),
        "num_key_value_heads": kv,
        "num_attention_heads": kv * draw.choice([1, 2, 2, 2, 3, 4]),
        "head_dim": draw.choices(dims, [4] + [1] * (len(dims) - 1))[0],
        "vocab_size": draw.choice([264, 265, 267, 272, 300]),
        "max_position_embeddings": draw.choice([96, 128, 256]),
        "tie_word_embeddings": draw.random() < 0.4,
        "initializer_range": 0.1,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": draw.choice([1, [1, 2]]),
        "rope_theta": draw.choice([1000.0, 10000.0]),
    }
    scaling = draw.choice([None, None, "linear", "llama3", "yarn", "dynamic"])
    if scaling:
        config["rope_scaling"] = {"rope_type": scaling, "factor": draw.choice([2.0, 4.0])}
    if scaling == "llama3":
        config["rope_scaling"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    if scaling == "yarn":
        config["rope_scaling"] |= {"original_max_position_embeddings": 32}
    if family == "llama":
        config |= {"attention_bias": draw.random() < 0.3, "mlp_bias": draw.random() < 0.3}
    if family == "mistral":
        config["sliding_window"] = draw.choice([None, 1, 5, 16, 33])
    if family in ("qwen2", "qwen3") and draw.random() < 0.5:
        config |= {"use_sliding_window": True, "sliding_window": draw.choice([3, 7, 20]), "max_window_layers": draw.choice([0, 1])}
    if family == "qwen3":
        config["attention_bias"] = draw.random() < 0.3
    return config


def layout(draw, ranks, kind, device, sets):
    """Axes, ZeRO, and what the rollout has of its own."""
    axes = [(d, s, t) for d in (1, 2, 4) for s in (1, 2, 4) for t in (1, 2, 4) if d * s * t == ranks]
    data, sequence, tensor = draw.choice(axes)
    if sequence > 1 or draw.random() < 0.5:
        sets["mesh.sequence"] = sequence
    if draw.random() < 0.8 or sequence > 1:
        sets["mesh.tensor"] = tensor
        if draw.random() < 0.5:
            sets["mesh.data"] = data
    if draw.random() < 0.9:
        sets["mesh.zero"] = draw.choice([0, 1, 2, 3])
    if draw.random() < 0.3:
        sets["mesh.offload"] = draw.choice([["optimizer"], ["roles"], ["optimizer", "roles"]])
    if draw.random() < 0.25:
        sets["gradient.order"] = "fixed"
        sets["gradient.chunks"] = draw.choice([4, 8, 3])
        if draw.random() < 0.9:
            sets["mesh.zero"] = min(sets.get("mesh.zero", 1), 1)
            sets |= {"mesh.sequence": 1, "mesh.tensor": 1}
            sets.pop("mesh.data", None)
    if draw.random() < 0.25:
        sets["gradient.recompute"] = True
    if kind == "ppo" and draw.random() < 0.5:
        sets["rollout.tensor"] = draw.choice([n for n in (1, 2, 4) if n <= ranks])
        if draw.random() < 0.2:
            sets["rollout.data"] = ranks // sets["rollout.tensor"]
    if kind == "ppo" and ranks > 1 and draw.random() < 0.25:
        cut = draw.choice([n for n in range(1, ranks)])
        for key in ("mesh.data", "mesh.sequence", "rollout.data"):
            sets.pop(key, None)
        least = min(cut, ranks - cut)
        sets["mesh.tensor"] = draw.choice([n for n in (1, 2) if n <= least])
        if sets.get("rollout.tensor", 1) > cut:
            sets.pop("rollout.tensor")
        moved = draw.choice([["critic", "reward"], ["critic", "reference", "reward"], ["reward"], ["reference"]])
        kept = [role for role in ("actor", "critic", "reference", "reward") if role not in moved]
        sets["mesh.placement"] = [{"roles": kept, "ranks": f"0..{cut}"}, {"roles": moved, "ranks": f"{cut}..{ranks}"}]
    if device == "gpu" and ranks > 1 and draw.random() < 0.3:
        sets["job.collectives"] = draw.choice(["mpi", "auto"])


def ppo(draw, sets, config):
    """Settings of rollout, rewards and losses."""
    prompts, samples = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3])
    sets["rollout.prompts_per_step"], sets["rollout.samples_per_prompt"] = prompts, samples
    sets["rollout.response_tokens_max"] = response = draw.choice([1, 2, 5, 8, 17, 40])
    grouped = ["reinforce++-baseline", "rloo", "grpo", "dr-grpo"] if samples > 1 or draw.random() < 0.05 else []
    sets["ppo.advantage"] = draw.choice(["gae", "gae", "gae", "reinforce++"] + grouped)
    sets["ppo.minibatch_samples"] = draw.choice([1, 2, 3, 4, prompts * samples, 100])
    sets["ppo.microbatch_tokens_max"] = draw.choice([1, 16, 40, 64, 128, 1024])
    may = lambda chance, key, *values: sets.update({key: draw.choice(values)}) if draw.random() < chance else None
    may(0.2, "rollout.response_tokens_min", 1, response)
    may(0.3, "rollout.temperature", 0.7, 1.3)
    may(0.2, "rollout.top_k", 1, 2, 20)
    may(0.2, "rollout.top_p", 0.0, 0.5, 0.9)
    may(0.2, "rollout.min_p", 0.05, 1.0)
    may(0.2, "rollout.repetition_penalty", 1.2, 0.9)
    may(0.5, "rollout.stop_token_ids", list(range(40, 60)))
    may(0.2, "rollout.stop", ["1"], ["a", "+"])
    may(0.2, "rollout.ignore_eos", True)
    may(0.4, "rollout.batch_max", 1, 2, 3, 5)
    may(0.3, "rollout.prefill_tokens_max", 1, 5, 16)
    bytes_a_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    may(0.3, "rollout.kv_bytes_max", *(bytes_a_token * n for n in (32, 64, 96, 160, 320)))
    may(0.3, "rollout.graphs", False)
    may(0.2, "ppo.gamma", 0.9)
    may(0.3, "ppo.lambda", 0.9, 0.0)
    may(0.2, "ppo.truncation", "bootstrap")
    may(0.2, "ppo.advantage_std", False)
    may(0.4, "ppo.loss", "clip", "gspo", "cispo")
    may(0.3, "ppo.aggregation", "token", "sequence", "sequence_sum_fixed")
    may(0.2, "ppo.dual_clip", 1.5, 3.0)
    may(0.2, "ppo.value_clip", 0.0, 0.1)
    may(0.2, "ppo.entropy_coef", 0.01, -0.01)
    if sets.get("ppo.loss") != "gspo" or draw.random() < 0.05:
        may(0.3, "ppo.correction", "tis", "icepop", "sequence_mask")
    may(0.3, "ppo.kl_in", "reward", "none", "loss")
    may(0.3, "ppo.kl_estimator", "k1", "k2", "k3")
    if sets.get("ppo.kl_in") == "loss" and draw.random() < 0.95:
        sets["ppo.kl_estimator"] = draw.choice(["k2", "k3"])
    if sets.get("ppo.kl_in") != "none":
        may(0.1, "ppo.kl_target", 0.1)
        may(0.1, "ppo.kl_coef", 0.0, 0.2)
    may(0.1, "ppo.reward_normalize", True)
    may(0.1, "ppo.overlong_buffer_tokens", min(2, response))
    may(0.1, "ppo.truncated_score_coef", 0.5, -1.0)
    may(0.3, "ppo.epochs", 2, 3)
    may(0.3, "ppo.old_logprobs", "rollout", "recompute")
    sets["reward.rule"] = draw.choice([{"kind": "regex", "pattern": "[0-9a-f]"}, {"kind": "length", "tokens_max": 3, "tokens_slack": 4}])


def job(seed, number, args):
    """Everything of one job."""
    draw = random.Random(f"{seed} {number}")
    device = args.device
    ranks = draw.choice([int(n) for n in args.ranks.split(",")])
    kind = args.kind or draw.choice(["ppo", "ppo", "ppo", "sft"])
    config, sets = model(draw, device), {"job.kind": kind, "job.device": device}
    sets |= {"job.check": device == "gpu" and draw.random() < 0.1, "job.seed": draw.randrange(100), "job.steps": draw.choice([1, 2, 2, 3])}
    sets |= {"job.threads": 1, "metrics.samples_every_steps": 0, "metrics.tensorboard": False}
    for role in ("actor", "critic"):
        sets[f"optim.{role}.lr"] = draw.choice([1e-3, 3e-4])
        sets[f"optim.{role}.schedule"] = draw.choice(["constant", "cosine", "linear"])
        sets[f"optim.{role}.clip_norm"] = draw.choice([0.0, 0.5, 1.0])
        sets[f"optim.{role}.weight_decay"] = draw.choice([0.0, 0.1])
    sets["checkpoint.every_steps"] = draw.choice([0, 1, 1])
    if device == "gpu":
        sets["job.products"] = draw.choice(["exact", "exact", "exact", "fast", "auto"])
        if draw.random() < 0.3:
            sets["model.dtype"] = "bf16"
    elif draw.random() < 0.3:
        sets["model.dtype"] = draw.choice(["bf16", "f32"])
    sets["data.prompt_tokens_max"] = draw.choice([8, 12, 40])
    sets["data.long_prompts"] = draw.choice(["reject", "truncate_left", "truncate_right"] + ["window"] * (kind == "ppo"))
    if sets["data.long_prompts"] == "window":
        sets["data.window_overlap_tokens"] = 3
    sets["data.order"] = draw.choice(["shuffled", "sequential", "length_grouped"])
    if draw.random() < 0.3:
        sets |= {"data.split.by": "ratio", "data.split.eval_ratio": 0.1, "data.eval_split": "test", "eval.every_steps": draw.choice([1, 2])}
        sets["eval.samples_max"] = draw.choice([1, 3])
    layout(draw, ranks, kind, device, sets)
    if kind == "ppo":
        ppo(draw, sets, config)
    else:
        sets["sft.minibatch_samples"] = draw.choice([1, 3, 8])
        sets["sft.microbatch_tokens_max"] = draw.choice([1, 32, 64, 128, 1024])
        sets["sft.loss_on"] = draw.choice(["response", "all"])
        if draw.random() < 0.3:
            sets["data.row_tokens_max"] = draw.choice([20, 40])
    if sets.get("job.products") == "auto" and draw.random() < 0.7:
        sets["job.products"] = "exact"
    then = draw.choice(["stops", "stops", "signal", "elsewhere", "elsewhere", "indifferent", "one", "cpu"])
    if ranks == 1 and then == "one":
        then = "cpu"
    if device == "cpu" and then == "cpu":
        then = "one" if ranks > 1 else "stops"
    if then == "indifferent" and kind == "ppo":
        # Which layout the plan chooses for the rollout does depend on its cache.
        sets.setdefault("rollout.tensor", sets.get("mesh.tensor", 1))
    if then in ("one", "cpu") and kind == "ppo":
        # What a step measures is then of equal weights.
        sets |= {"ppo.minibatch_samples": 100, "ppo.epochs": 1}
    return draw, ranks, config, sets, then


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(v)}" for key, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)
