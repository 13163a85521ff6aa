"""Prints a table of questions, right answers and the responses of two models: compare.py QUESTIONS BEFORE AFTER.

The three files are JSONL, and their lines correspond.
"""

import json
import re
import sys


def rows(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def marked(text, answer):
    """Marks a response as the reward of the job scores it: by its last number."""
    numbers = re.findall(r"-?\d+", text)
    return f"{'✓' if numbers[-1:] == [answer] else '✗'} {' '.join(text.split())}"


questions, before, after = map(rows, sys.argv[1:])
table = [["question", "right answer", "before PPO", "after PPO"]]
for question, *models in zip(questions, before, after):
    answer = question["answer"]
    table.append([question["prompt"], answer, *(marked(model["text"], answer) for model in models)])
widths = [max(map(len, column)) for column in zip(*table)]
for row in table:
    print("  " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
