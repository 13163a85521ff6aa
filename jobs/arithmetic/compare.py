"""Prints held-out accuracy before and after training, and a table of some greedy answers: compare.py RUN_DIR"""

import json
import os
import re
import sys


def rows(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def marked(answer):
    text = " ".join(answer["response"].split())
    text = text if len(text) <= 40 else "…" + text[-39:]
    return f"{'✓' if answer['score'] >= 1 else '✗'} {text}"


run = sys.argv[1]
evals = [row for row in rows(os.path.join(run, "metrics.jsonl")) if "eval_accuracy_greedy" in row]
first, last = evals[0], evals[-1]
for name, key in [("greedy", "eval_accuracy_greedy"), ("sampled", "eval_accuracy_sampled")]:
    print(f"  held-out {name:8} {100 * first[key]:5.1f} % -> {100 * last[key]:5.1f} %   (steps {first['step']} and {last['step']})")
print()
before, after = (rows(os.path.join(run, "eval", f"step-{row['step']}.jsonl")) for row in (first, last))
table = [["question", "answer", "before, greedy", "after, greedy"]]
for old, new in list(zip(before, after))[:10]:
    question = re.search(r"What is (.*?)\?", old["prompt"]).group(1)
    table.append([question, old["label"], marked(old["answers"][0]), marked(new["answers"][0])])
widths = [max(map(len, column)) for column in zip(*table)]
for row in table:
    print("  " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
