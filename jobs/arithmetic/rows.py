#!/usr/bin/env python3
"""Arithmetic questions for a model that follows instructions: rows.py --out ROWS.jsonl [--train N] [--test N] [--seed N]

A row is {"prompt", "answer", "split"}. All questions differ, so no test question is trained on. The same options give the same
rows on every machine.
"""

import argparse
import json
import random


def question(rng):
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(10, 99)
    if rng.random() < 0.5:
        return f"What is {a} * {b} + {c}?", a * b + c
    return f"What is {c} - {a} * {b}?", c - a * b


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument("--train", type=int, default=192, help="rows of the split train (192)")
    parser.add_argument("--test", type=int, default=100, help="rows of the split test (100)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the questions (1)")
    options = parser.parse_args()
    # Python's generator and these two calls of it give the same numbers in every version since 3.2.
    rng, rows = random.Random(options.seed), {}
    while len(rows) < options.train + options.test:
        text, answer = question(rng)
        rows.setdefault(text, answer)
    with open(options.out, "w", encoding="utf-8") as file:
        for i, (text, answer) in enumerate(rows.items()):
            split = "train" if i < options.train else "test"
            prompt = f"{text} End with the result as a number."
            file.write(json.dumps({"prompt": prompt, "answer": str(answer), "split": split}) + "\n")


if __name__ == "__main__":
    main()
