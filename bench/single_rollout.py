"""Prints held-out accuracy by sampled tokens, as a mean over seeds: single_rollout.py WORK SEED...

WORK/grpo-SEED, single-SEED and flash-SEED are the runs of bench/single_rollout.sh. Between two evaluations, accuracy is
interpolated linearly.
"""

import json
import sys

RUNS = ("grpo", "single", "flash")


def curve(path):
    """Points (sampled tokens, held-out accuracy) of a run. Tokens of the environment count as sampled ones."""
    points, tokens = [], 0
    with open(f"{path}/metrics.jsonl", encoding="utf-8") as file:
        for row in map(json.loads, file):
            tokens += row.get("response_tokens_mean", 0) * row.get("samples", 0)
            if "eval_accuracy_greedy" in row:
                points.append((tokens, row["eval_accuracy_greedy"]))
    return points


def at(points, tokens):
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x0 <= tokens <= x1:
            return y0 + (y1 - y0) * (tokens - x0) / max(x1 - x0, 1)
    return points[-1][1]


work, seeds = sys.argv[1], sys.argv[2:]
curves = {run: [curve(f"{work}/{run}-{seed}") for seed in seeds] for run in RUNS}
last = min(points[-1][0] for all_seeds in curves.values() for points in all_seeds)
marks = [last * i / 8 for i in range(9)]
print("tokens     " + "".join(f"{mark / 1000:8.0f}k" for mark in marks))
for run in RUNS:
    means = [sum(at(points, mark) for points in curves[run]) / len(seeds) for mark in marks]
    print(f"{run:11}" + "".join(f"{100 * mean:8.1f}%" for mean in means))
for run in RUNS:
    ends = "  ".join(f"{points[-1][0] / 1000:.0f}k tokens, {100 * points[-1][1]:.1f} %" for points in curves[run])
    print(f"{run} at its end, by seed: {ends}")
