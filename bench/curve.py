#!/usr/bin/env python3
"""The reward and the held-out accuracy of a run over its steps, as an SVG picture.

Usage: bench/curve.py METRICS.jsonl > PICTURE.svg
"""

import json
import sys

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 300, 52, 40, 16, 40
SERIES = [
    ("reward_mean", "reward of the sampled responses", "#1f77b4"),
    ("eval_accuracy_greedy", "held-out accuracy, greedy", "#d62728"),
    ("eval_accuracy_sampled", "held-out accuracy, sampled", "#e39a2d"),
]


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    steps = max(row["step"] for row in rows)

    def at(step, value):
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / steps
        return f"{x:.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (1 - value):.1f}"

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for tenth in range(0, 11, 2):
        (x, y), end = at(0, tenth / 10).split(","), at(steps, tenth / 10).split(",")[0]
        out.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#dddddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end" fill="#444444">{tenth / 10:.1f}</text>')
    for step in range(0, steps + 1, max(1, steps // 5)):
        x = at(step, 0).split(",")[0]
        out.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#444444">{step}</text>')
    out.append(f'<text x="{WIDTH // 2}" y="{HEIGHT - 6}" text-anchor="middle" fill="#444444">step</text>')
    for i, (key, words, colour) in enumerate(SERIES):
        points = [(row["step"], row[key]) for row in rows if key in row]
        line = " ".join(at(step, value) for step, value in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        if key.startswith("eval_"):
            dots = (at(step, value).split(",") for step, value in points)
            out += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in dots]
        out.append(f'<rect x="{LEFT + 232 * i}" y="14" width="14" height="4" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + 232 * i + 20}" y="20" fill="#222222">{words}</text>')
    print("\n".join([*out, "</svg>"]))


main()
