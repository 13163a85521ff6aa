#!/usr/bin/env python3
"""Prints the table of run.sh: results.py WORK RLHF_WORK."""

import json
import os
import statistics
import sys


def rows(*path):
    path = os.path.join(*path, "metrics.jsonl")
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def values(run, key):
    return [row[key] for row in run if key in row]


def ppo(work):
    """Returns name, gain of held-out accuracy, seconds of a step and memory of each PPO run that has ended."""
    runs = {name: rows(work, name) for name in sorted(os.listdir(work)) if name.startswith("ppo-")}
    for name, run in runs.items():
        right = values(run, "eval_accuracy_greedy")
        if len(right) > 1:
            seconds = statistics.median(values(run, "time_step_s"))
            yield name, right[0], right[-1], seconds, max(values(run, "memory_arena_peak_bytes"))


def main():
    work, rlhf = sys.argv[1:]
    table = list(ppo(work))
    full = next((last - first for name, first, last, *_ in table if name == "ppo-full"), None)
    print("| PPO | held-out greedy accuracy | gain | of full training's gain | s per step | tensors per rank |")
    print("|---|---|---|---|---|---|")
    for name, first, last, seconds, memory in table:
        gain = last - first
        share = f"{100 * gain / full:.0f} %" if full else ""
        print(f"| {name} | {100 * first:.1f} to {100 * last:.1f} % | {100 * gain:.1f} | {share} | {seconds:.2f} "
              f"| {memory / 2**20:.0f} MiB |")
    print()
    print("| | all weights | adapters |\n|---|---|---|")
    for name, of_full, key in [("reward model", "rm", "eval_accuracy"), ("DPO", "dpo", "eval_accuracy")]:
        ends = [values(rows(*path), key)[-1:] for path in [(rlhf, of_full), (work, f"{of_full}-lora")]]
        shown = [f"{100 * end[0]:.1f} %" if end else "not run" for end in ends]
        print(f"| {name}, {key} | {shown[0]} | {shown[1]} |")


if __name__ == "__main__":
    main()
