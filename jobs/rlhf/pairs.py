#!/usr/bin/env python3
"""Makes preferences, labeled responses and labeled steps from the quickstart's corpus, as JSONL.

Each question whose demonstration makes the systematic mistake gives rows in three files of --out:

pairs.jsonl   prompt, chosen (the right worked answer), rejected (the demonstration), split; some training pairs are flipped
kto.jsonl     prompt, response, label (true: right), split: both sides of the pairs, one per row
steps.jsonl   prompt (question and steps, each followed by the placeholder), label ("+" until the first wrong step, then "-"), split

The same options give the same rows on every machine.
"""

import argparse
import json
import os
import random

PLACEHOLDER = ";"


def labels(shown, right):
    """Returns a label for each step: right as long as all steps so far are the ones of the right answer."""
    right, found, all_right = right.split(" "), [], True
    for i, step in enumerate(shown.split(" ")):
        all_right = all_right and right[i:i + 1] == [step]
        found.append("+" if all_right else "-")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="rows written by jobs/quickstart/corpus.py")
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument("--flipped", type=float, default=0.05, help="share of the training pairs with the wrong side chosen (0.05)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    files = {name: open(os.path.join(options.out, name + ".jsonl"), "w", encoding="utf-8") for name in ("pairs", "kto", "steps")}

    def write(name, row):
        files[name].write(json.dumps(row, separators=(",", ":")) + "\n")

    flipped = count = 0
    with open(options.corpus, encoding="utf-8") as corpus:
        for row in map(json.loads, corpus):
            if row["mistake"] != "systematic":
                continue
            prompt, split, right, wrong = row["prompt"], row["split"], row["response"], row["demonstration"]
            sides = [right, wrong]
            if split == "train" and rng.random() < options.flipped:
                sides.reverse()
                flipped += 1
            write("pairs", {"prompt": prompt, "chosen": sides[0], "rejected": sides[1], "split": split})
            for label, side in zip((True, False), sides):
                write("kto", {"prompt": prompt, "response": side, "label": label, "split": split})
            shown = rng.choice((right, wrong))
            steps = "".join(f"{step} {PLACEHOLDER}" for step in shown.split(" "))
            write("steps", {"prompt": prompt + steps, "label": labels(shown, right), "split": split})
            count += 1
    for file in files.values():
        file.close()
    print(f"pairs: {count} pairs, {flipped} of them flipped, in {options.out}")


if __name__ == "__main__":
    main()
