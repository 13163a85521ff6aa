"""Reduces a full set of OpenRLHF numbers to the cases that tests/formulas compares with.

    python3 tests/golden/openrlhf.py FULL.json > tests/golden/openrlhf.json

FULL.json holds what OpenRLHF's own functions returned for seeded random inputs (its header names the revision and
torch's version): cases[] with name, fn, args, in, out and, where there is one, grad (d loss / d input). Float64 copies
and cases of losses that are not built are left out.
"""

import json
import sys

KEPT = (
    "policy_loss", "value_loss", "aggregate_loss", "aggregate_loss_empty_seq", "masked_normalize", "approx_kl",
    "approx_kl_clamp", "compute_reward", "gae", "reinforce_returns", "advantages", "overlong_penalty", "stop_properly",
    "adaptive_kl", "sft_loss", "kd_loss", "dpo", "pairwise", "logexp", "kto", "kto_vanilla",
)

full = json.load(open(sys.argv[1]))


def single(x):
    """A number as the nearest float32 prints it: shorter, and what the functions computed with."""
    if isinstance(x, float):
        return float(f"{x:.9g}")
    if isinstance(x, list):
        return [single(y) for y in x]
    if isinstance(x, dict):
        return {k: single(v) for k, v in x.items()}
    return x


cases, inputs = [], []
for case in full["cases"]:
    name = case["name"].split("/")[0]
    if name not in KEPT:
        continue
    kept = {"name": name, "args": case["args"], "out": single(case["out"])}
    if case.get("grad"):
        kept["grad"] = single(case["grad"])
    if "in" in case:
        # Many cases share their inputs: each is stored once.
        shared = single(case["in"])
        if shared not in inputs:
            inputs.append(shared)
        kept["in"] = inputs.index(shared)
    if name == "advantages":
        for batch in kept["out"]:
            batch.pop("info")
    cases.append(kept)

source = {k: v for k, v in full.items() if k != "cases" and k != "kto"}
json.dump({"source": source, "inputs": inputs, "cases": cases}, sys.stdout, separators=(",", ":"))
