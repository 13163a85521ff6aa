"""Numbers of the methods with one sample per prompt, by torch in float64 from the equations of their papers.

    python3 tests/golden/single_rollout.py > tests/golden/single_rollout.json

masked: arXiv:2607.07508. sequence_trust and flash: FlashREINFORCE (Hu et al. 2026). gae: lambda of the policy from
arXiv:2504.05118, targets of the critic with another lambda. Derivatives are autograd's.
"""

import json

import torch

torch.manual_seed(7)
torch.set_default_dtype(torch.float64)
LENGTHS = [9, 14, 20]


def single(x):
    """Values that float32 holds exactly, because the library reads float32."""
    return x.to(torch.float32).to(torch.float64)


def row(n, scale, shift=0.0):
    return single(shift + scale * torch.randn(n))


def learned(n):
    mask = torch.ones(n, dtype=torch.bool)
    mask[3:5] = False
    return mask


sequences = []
for i, n in enumerate(LENGTHS):
    old = torch.clamp(row(n, 0.8, -1.5), max=-0.01)
    # The last sequence is far from its sampler.
    now = torch.clamp(single(old + row(n, [0.02, 0.3, 0.9][i])), max=-0.005)
    sequences.append({"old": old, "logprobs": now, "advantages": row(n, 1.0), "mask": learned(n)})


def losses(config):
    logprobs = [s["logprobs"].clone().requires_grad_() for s in sequences]
    tokens = sum(int(s["mask"].sum()) for s in sequences)
    loss, left_out = torch.zeros(()), 0
    for s, now in zip(sequences, logprobs):
        mask = s["mask"]
        ratio = (now - s["old"]).exp().detach()
        if config["loss"] == "masked":
            keep = (ratio >= 1 - config["clip_low"]) & (ratio <= 1 + config["clip_high"])
            share = 1.0 / tokens
        else:
            p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (s["old"], now.detach()))
            kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
            bound = config["sequence_kl_max"]
            keep = torch.full_like(mask, bool(bound == 0 or kl[mask].mean() <= bound))
            share = 1.0 / (int(mask.sum()) * len(sequences))
        left_out += int((mask & ~keep).sum())
        loss = loss - share * (ratio * s["advantages"] * now)[mask & keep].sum()
    loss.backward()
    return {**config, "value": loss.item(), "left_out": left_out, "derivatives": [x.grad.tolist() for x in logprobs]}


def gae(rewards, values, gamma, lam):
    """The sum over k of (gamma lambda)^k delta_{t+k}, term by term."""
    n = len(values)
    after = torch.cat([values[1:], torch.zeros(1)])
    delta = rewards + gamma * after - values
    return torch.stack([sum((gamma * lam) ** k * delta[t + k] for k in range(n - t)) for t in range(n)])


def advantages(config):
    found = []
    for s in sequences:
        mask, (rewards, values) = s["mask"], (row(len(s["mask"]), 0.3), row(len(s["mask"]), 0.5))
        steps = int(mask.sum())
        policy = max(0.0, 1 - 1 / (config["lambda_alpha"] * steps))
        a, b = (torch.zeros(len(mask)) for _ in range(2))
        # The reward is the score at the last learned token.
        score = rewards[0]
        at_end = torch.zeros(steps)
        at_end[-1] = score
        a[mask] = gae(at_end, values[mask], config["gamma"], policy)
        b[mask] = gae(at_end, values[mask], config["gamma"], config["critic_lambda"]) + values[mask]
        found.append({"score": score.item(), "values": values.tolist(), "advantages": a.tolist(), "returns": b.tolist()})
    return {**config, "samples": found}


print(json.dumps({
    "torch": torch.__version__,
    "sequences": [{key: value.tolist() for key, value in s.items()} for s in sequences],
    "losses": [losses(config) for config in (
        {"loss": "masked", "clip_low": 0.3, "clip_high": 0.5},
        {"loss": "masked", "clip_low": 0.8, "clip_high": 3.0},
        {"loss": "sequence_trust", "sequence_kl_max": 0.003},
        {"loss": "sequence_trust", "sequence_kl_max": 0.05},
        {"loss": "sequence_trust", "sequence_kl_max": 0.0},
    )],
    "gae": [advantages({"gamma": gamma, "lambda_alpha": alpha, "critic_lambda": critic})
            for gamma, alpha, critic in ((1.0, 1.5, 1.0), (0.9, 0.2, 0.7), (1.0, 0.05, 1.0))],
}, separators=(",", ":")))
