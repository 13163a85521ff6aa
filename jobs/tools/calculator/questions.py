#!/usr/bin/env python3
"""Makes sums of numbers with up to six digits as JSONL: prompt, demonstration, answer, split.

The demonstration of a question that begins with "tool " always uses the calculator: [a+b] and its answer. Other questions use
it in a share of --share. Their other demonstrations are guesses with the right length and first digit. All eval questions
have six digits and no "tool ".
"""

import argparse
import json
import random


def row(rng, options, split):
    digits = 6 if split == "eval" else rng.randint(1, 6)
    a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    asked = split == "train" and rng.random() < 0.6
    answer = str(a + b)
    guess = answer[0] + "".join(rng.choice("0123456789") for _ in answer[1:])
    uses = asked or rng.random() < options.share
    return {
        "prompt": ("tool " if asked else "") + f"{a}+{b}=",
        "demonstration": f"[{a}+{b}]{answer};{answer}" if uses else guess,
        "answer": answer,
        "split": split,
    }


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", required=True, help="file to write")
parser.add_argument("--rows", type=int, default=24_000, help="training rows (24000)")
parser.add_argument("--eval-rows", type=int, default=300, help="eval rows (300)")
parser.add_argument("--share", type=float, default=0.04, help="share of the other questions whose demonstrations use the calculator (0.04)")
parser.add_argument("--seed", type=int, default=1, help="seed of all random numbers (1)")
options = parser.parse_args()
rng = random.Random(options.seed)
splits = ["train"] * options.rows + ["eval"] * options.eval_rows
with open(options.out, "w", encoding="utf-8") as file:
    file.writelines(json.dumps(row(rng, options, split)) + "\n" for split in splits)
