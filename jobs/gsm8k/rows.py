#!/usr/bin/env python3
"""Word problems in the form of GSM8K, for machines that cannot get the public rows: rows.py --out DIR [--form verl|openai]

Writes DIR/train.jsonl and DIR/test.jsonl. A row has the columns of openai/gsm8k (question, answer with "#### 72") or of
verl's examples (data_source, prompt, ability, reward_model, extra_info). All problems differ, so no test problem is
trained on. The same options give the same rows on every machine.
"""

import argparse
import json
import os
import random

NAMES = ["Anna", "Ben", "Carla", "David", "Ella", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam"]
THINGS = ["apples", "pencils", "stickers", "marbles", "cookies", "stamps", "eggs", "tickets"]
ASK = 'Let\'s think step by step and output the final answer after "####".'


def step(text, left, sign, right, value):
    """A step of a solution with the marks of GSM8K: `text 3 * 4 = <<3*4=12>>12`"""
    return f"{text} {left} {sign} {right} = <<{left}{sign}{right}={value}>>{value}"


def boxes(rng, name, thing):
    a, b = rng.randint(3, 9), rng.randint(4, 12)
    c = rng.randint(2, a * b - 1)
    text = f"{name} buys {a} boxes with {b} {thing} each and gives away {c} of them. How many {thing} does {name} have left?"
    left = a * b - c
    return text, [step(f"{name} buys", a, "*", b, a * b) + f" {thing}.", step("Then", a * b, "-", c, left) + " are left."], left


def wages(rng, name, thing):
    a, b, c = rng.randint(9, 25), rng.randint(2, 8), rng.randint(2, 8)
    text = (
        f"{name} earns ${a} an hour. On Saturday {name} works {b} hours, and on Sunday {c} hours. "
        f"How many dollars does {name} earn?"
    )
    total = (b + c) * a
    return text, [step(f"{name} works", b, "+", c, b + c) + " hours.", step("That is", b + c, "*", a, total) + " dollars."], total


def change(rng, name, thing):
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    paid = -(-a * b // 10) * 10 + 10
    text = f"{name} buys {a} packs of {thing} at ${b} each and pays with ${paid}. How many dollars of change does {name} get?"
    left = paid - a * b
    return text, [step("The packs cost", a, "*", b, a * b) + ".", step("The change is", paid, "-", a * b, left) + "."], left


def book(rng, name, thing):
    a, b, left = rng.randint(8, 40), rng.randint(2, 9), rng.randint(5, 90)
    text = f"A book has {a * b + left} pages. {name} reads {a} pages a day for {b} days. How many pages are left?"
    steps = [step(f"{name} reads", a, "*", b, a * b) + " pages.", step("Then", a * b + left, "-", a * b, left) + " are left."]
    return text, steps, left


def together(rng, name, thing):
    a, k = rng.randint(4, 40), rng.randint(2, 6)
    other = rng.choice([one for one in NAMES if one != name])
    text = f"{name} has {a} {thing}. {other} has {k} times as many. How many {thing} do they have together?"
    both = a + a * k
    return text, [step(f"{other} has", a, "*", k, a * k) + f" {thing}.", step("Together they have", a, "+", a * k, both) + "."], both


def tank(rng, name, thing):
    a, b, c = rng.randint(6, 20), rng.randint(5, 40), rng.randint(1, 5)
    text = (
        f"A pump fills a tank with {a} liters of water a minute, but a leak loses {c} liters a minute. "
        f"How many liters are in the tank after {b} minutes?"
    )
    steps = [step("Each minute adds", a, "-", c, a - c) + " liters.", step("That gives", a - c, "*", b, (a - c) * b) + " liters."]
    return text, steps, (a - c) * b


def problem(rng):
    make = rng.choice([boxes, wages, change, book, together, tank])
    text, steps, result = make(rng, rng.choice(NAMES), rng.choice(THINGS))
    return text, "\n".join(steps) + f"\n#### {result}", str(result)


def row(form, split, i, question, answer, result):
    if form == "openai":
        return {"question": question, "answer": answer}
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {ASK}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": result},
        "extra_info": {"split": split, "index": i, "answer": answer, "question": question},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--form", choices=["verl", "openai"], default="verl", help="the columns (verl)")
    parser.add_argument("--train", type=int, default=1000, help="rows of train.jsonl (1000)")
    parser.add_argument("--test", type=int, default=200, help="rows of test.jsonl (200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the problems (1)")
    options = parser.parse_args()
    rng, all_rows = random.Random(options.seed), {}
    while len(all_rows) < options.train + options.test:
        question, answer, result = problem(rng)
        all_rows.setdefault(question, (answer, result))
    os.makedirs(options.out, exist_ok=True)
    items = list(all_rows.items())
    for split, part in [("train", items[: options.train]), ("test", items[options.train :])]:
        with open(os.path.join(options.out, f"{split}.jsonl"), "w", encoding="utf-8") as file:
            for i, (question, (answer, result)) in enumerate(part):
                file.write(json.dumps(row(options.form, split, i, question, answer, result)) + "\n")


if __name__ == "__main__":
    main()
