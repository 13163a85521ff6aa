#!/usr/bin/env python3
"""Prints a table of the results of run.sh and writes the picture WORK/over-optimisation.svg: results.py WORK.

The picture shows the reward model's score and the rule's score over the KL from the reference, for PPO with a strong and
with a weak KL penalty.
"""

import json
import math
import os
import sys

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 320, 52, 56, 52, 44
RULE, SCORE = "eval_reward/number", "eval_reward/rm"
COLOURS = {RULE: "#d62728", SCORE: "#1f77b4"}


def rows(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def right(work, model):
    """Returns the share of responses that end with the right number, in percent."""
    answers = rows(work, model + ".jsonl")
    return 100 * sum(row["text"].split(" ")[-1:] == [row["answer"]] for row in answers) / len(answers)


def sampled(work, run):
    """Returns the number of responses and of tokens that a run sampled to learn from."""
    steps = rows(work, run, "metrics.jsonl")
    return [sum(row.get(key, 0) for row in steps) for key in ("samples", "tokens")]


def last(work, run, key):
    return [row[key] for row in rows(work, run, "metrics.jsonl") if key in row][-1]


def curve(work, run):
    """Returns the KL and both scores at each evaluation."""
    return [(row.get("kl_mean", 0.0), row[SCORE], row[RULE]) for row in rows(work, run, "metrics.jsonl") if RULE in row]


def picture(work):
    runs = {"ppo": curve(work, "ppo"), "ppo-free": curve(work, "ppo-free")}
    points = [point for run in runs.values() for point in run]
    # Ticks at multiples of 0.05 nats, and five ticks at whole scores.
    far, low = 0.05 * math.ceil(max(kl for kl, *_ in points) / 0.05), math.floor(min(score for _, score, _ in points))
    high = low + 5 * math.ceil((max(score for _, score, _ in points) - low) / 5)

    def at(kl, share):
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * kl / far:.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (1 - share):.1f}"

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for tenth in range(0, 11, 2):
        (x, y), end = at(0, tenth / 10).split(","), at(far, 0).split(",")[0]
        out.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#dddddd"/>')
        down = float(y) + 4
        out.append(f'<text x="{LEFT - 8}" y="{down:.1f}" text-anchor="end" fill="{COLOURS[RULE]}">{10 * tenth} %</text>')
        score = low + (high - low) * tenth / 10
        out.append(f'<text x="{WIDTH - RIGHT + 8}" y="{down:.1f}" fill="{COLOURS[SCORE]}">{score:.0f}</text>')
    for i in range(round(far / 0.05) + 1):
        x = at(0.05 * i, 0).split(",")[0]
        out.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#444444">{0.05 * i:.2f}</text>')
    out.append(
        f'<text x="{WIDTH // 2}" y="{HEIGHT - 8}" text-anchor="middle" fill="#444444">KL from the reference, nats per token</text>'
    )
    words = [("right answers by the rule (left)", RULE), ("score of the reward model (right)", SCORE)]
    for i, (what, key) in enumerate(words):
        out.append(f'<text x="{LEFT + 330 * i}" y="20" fill="{COLOURS[key]}">{what}</text>')
    out.append(f'<text x="{LEFT}" y="38" fill="#444444">filled: kl_coef 1.0; hollow, dashed: 0.1</text>')
    for run, found in runs.items():
        dash, found = (' stroke-dasharray="5 4"' if run == "ppo-free" else ""), sorted(found)
        for key in (RULE, SCORE):
            places = [at(kl, rule if key == RULE else (score - low) / (high - low)) for kl, score, rule in found]
            out.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{COLOURS[key]}" stroke-width="2"{dash}/>')
            fill = "#ffffff" if dash else COLOURS[key]
            for x, y in (place.split(",") for place in places):
                out.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{fill}" stroke="{COLOURS[key]}"/>')
    with open(os.path.join(work, "over-optimisation.svg"), "w", encoding="utf-8") as file:
        file.write("\n".join([*out, "</svg>"]) + "\n")


def main():
    work = sys.argv[1]
    base = right(work, "sft")
    print(f"  reward model            {100 * last(work, 'rm', 'eval_accuracy'):.1f} % of held-out pairs")
    print(f"  process reward model    {100 * last(work, 'step-reward', 'eval_accuracy'):.1f} % of held-out steps")
    print("  model                   right answers")
    for model in ("sft", "ppo", "ppo-free", "dpo", "ipo", "simpo", "kto", "distill"):
        share = right(work, model)
        print(f"  {model:<24}{share:.1f} %{'' if model == 'sft' else f'  {share - base:+.1f} points'}")
    (ppo, ppo_tokens), (student, tokens) = sampled(work, "ppo"), sampled(work, "distill")
    print(f"  distill learned from {student} responses ({tokens} tokens), ppo from {ppo} ({ppo_tokens} tokens)")
    picture(work)
    print(f"  picture of over-optimization: {work}/over-optimisation.svg")


if __name__ == "__main__":
    main()
