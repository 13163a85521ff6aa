#!/usr/bin/env python3
"""Preferences, labelled responses and labelled steps from answers to the quickstart's questions, as JSONL.

Reads what a model answered (`rlhf-hpc generate --input arithmetic.jsonl`: the question's fields and `text`) and writes to --out:

pairs.jsonl   prompt, chosen (the right worked answer), rejected (a wrong one), split; some training pairs are flipped
kto.jsonl     prompt, response, label: both sides of the pairs, one a row
steps.jsonl   prompt (question and steps, each followed by the placeholder), label ("+" until the first wrong step, then "-"), split

The wrong answer is the model's own; of a question that it answered rightly, the demonstration, where that is wrong; other questions are
left out. The same options give the same rows on every machine.
"""

import argparse
import json
import os
import random

PLACEHOLDER = ";"


def is_right(text, row):
    return text.split(" ")[-1:] == [row["answer"]]


def labels(text, right):
    """A label a step: right while all steps so far are those of the right answer."""
    right, found, all_right = right.split(" "), [], True
    for i, step in enumerate(text.split(" ")):
        all_right = all_right and right[i:i + 1] == [step]
        found.append("+" if all_right else "-")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", help="the answers, any number a question")
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument("--flipped", type=float, default=0.05, help="share of the training pairs with the wrong side chosen (0.05)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    files = {name: open(os.path.join(options.out, name + ".jsonl"), "w", encoding="utf-8") for name in ("pairs", "kto", "steps")}

    def write(name, row):
        files[name].write(json.dumps(row, separators=(",", ":")) + "\n")

    flipped = count = 0
    with open(options.answers, encoding="utf-8") as answers:
        for line in answers:
            row = json.loads(line)
            prompt, split, right, wrong = row["prompt"], row["split"], row["response"], row["text"]
            if is_right(wrong, row) or not wrong.strip():
                wrong = row["demonstration"]
            if wrong == right:
                continue
            sides = [right, wrong]
            if split == "train" and draw.random() < options.flipped:
                sides.reverse()
                flipped += 1
            write("pairs", {"prompt": prompt, "chosen": sides[0], "rejected": sides[1], "split": split})
            for label, side in zip((True, False), sides):
                write("kto", {"prompt": prompt, "response": side, "label": label, "split": split})
            shown = draw.choice((right, wrong))
            steps = "".join(f"{step} {PLACEHOLDER}" for step in shown.split(" "))
            write("steps", {"prompt": prompt + steps, "label": labels(shown, right), "split": split})
            count += 1
    for file in files.values():
        file.close()
    print(f"pairs: {count} pairs, {flipped} of them flipped, in {options.out}")


if __name__ == "__main__":
    main()
