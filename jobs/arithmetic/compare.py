"""Prints held-out accuracy before and after training, and a table of some greedy answers: compare.py RUN_DIR"""

import json
import os
import re
import sys


def rows(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def shortened(text):
    text = " ".join(text.split())
    return text if len(text) <= 40 else "…" + text[-39:]


def marked(answer):
    return f"{'✓' if answer['score'] >= 1 else '✗'} {shortened(answer['response'])}"


def asked(prompt):
    """The sum of "What is SUM?", or the end of the last question in a prompt."""
    found = re.search(r"What is (.*?)\?", prompt)
    return found.group(1) if found else shortened(prompt[: prompt.rfind("?") + 1] or prompt)


run = sys.argv[1]
evals = [row for row in rows(os.path.join(run, "metrics.jsonl")) if "eval_accuracy_greedy" in row]
first, last = evals[0], evals[-1]
for name, key in [("greedy", "eval_accuracy_greedy"), ("sampled", "eval_accuracy_sampled")]:
    print(f"  held-out {name:8} {100 * first[key]:5.1f} % -> {100 * last[key]:5.1f} %   (steps {first['step']} and {last['step']})")
print()
before, after = (rows(os.path.join(run, "eval", f"step-{row['step']}.jsonl")) for row in (first, last))
table = [["question", "answer", "before, greedy", "after, greedy"]]
for old, new in list(zip(before, after))[:10]:
    label = re.split(r"#### *", old["label"])[-1]
    table.append([asked(old["prompt"]), label, marked(old["answers"][0]), marked(new["answers"][0])])
widths = [max(map(len, column)) for column in zip(*table)]
for row in table:
    print("  " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
