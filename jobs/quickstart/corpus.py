#!/usr/bin/env python3
"""Makes arithmetic questions with worked answers, and demonstrations that are wrong on purpose, as JSONL.

Each question is solved in steps of one digit, so that a small model can learn it:

kind   prompt         worked answer              the systematic mistake
add    47+38=         7+8=15 4+3+1=8 85          forgets the carry:           7+8=15 4+3=7 75
sub    53-28=         13-8=5 5-2-1=2 25          forgets the borrow:          13-8=5 5-2=3 35
mul    47*6=          7*6=42 4*6=24+4=28 282     forgets the carry:           7*6=42 4*6=24 242
max    max(47,38)=    4>3 47                     compares the last digits:    7<8 38

If a question allows the mistake, most of its demonstrations make it. A model that imitates them then gives a wrong greedy
response. The right response keeps a good share of the probability, so that a reward can find it.

A row has prompt, response (right), demonstration (may be wrong), answer, kind, split (train, then eval) and mistake. The
mistake is none, systematic, or slip: the steps are right and the final answer is off. No pair of operands is in both
splits, in either order and of any kind. All eval questions are different. The same options give the same rows on every
machine.
"""

import argparse
import json
import os
import sys

ATTEMPTS_MAX = 10_000
# Share of the questions that do not allow the systematic mistake and are kept. The others are replaced by harder ones, so
# that a model that makes the mistake is wrong about half of the time.
EASY_KEPT = 0.5
# Share of the mistakes that are systematic, if a systematic one is possible.
SYSTEMATIC = 0.9
# The last word of a counter, which separates the random numbers by use.
HELD_OUT, QUESTION, NOISE, EASY = 1, 2, 3, 4


def philox(key, counter):
    """Ten rounds of Philox 4x32 (Salmon et al., SC11, section 4.2): four random words from the key and the counter alone."""
    (k0, k1), (c0, c1, c2, c3), word = key, counter, 0xFFFF_FFFF
    for _ in range(10):
        p0, p1 = 0xD251_1F53 * c0, 0xCD9E_8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & word, p0 >> 32 ^ c3 ^ k1, p0 & word
        k0, k1 = k0 + 0x9E37_79B9 & word, k1 + 0xBB67_AE85 & word
    return c0, c1, c2, c3


class Corpus:
    def __init__(self, options):
        self.options = options
        seed = (options.seed & 0xFFFF_FFFF, options.seed >> 32)
        self.key = philox(seed, (5, 0, 0, 0))[:2]

    def words(self, *counter):
        return philox(self.key, counter)

    def uniform(self, *counter):
        return (self.words(*counter)[0] >> 8) / 2**24

    def rows(self):
        train, eval_rows = self.options.rows, self.options.eval_rows
        for i in range(train):
            yield self.question(self.find(i, lambda problem: not self.is_held_out(problem)), i, "train")
        asked = set()
        for i in range(train, train + eval_rows):
            problem = self.find(i, lambda problem: self.is_held_out(problem) and problem not in asked)
            asked.add(problem)
            yield self.question(problem, i, "eval")

    def find(self, i, is_wanted):
        for attempt in range(ATTEMPTS_MAX):
            problem = self.candidate(i, attempt)
            is_asked = has_trap(problem) or self.uniform(i, attempt, 0, EASY) < EASY_KEPT
            if is_asked and is_wanted(problem):
                return problem
        of = self.options
        sys.exit(
            f"error: {of.digits} digits and an eval ratio of {of.eval_ratio} do not give {of.rows} training and "
            f"{of.eval_rows} distinct eval questions\nhint: ask for fewer eval rows or for more digits"
        )

    def candidate(self, i, attempt):
        words, lengths = self.words(i, attempt, 0, QUESTION), self.words(i, attempt, 1, QUESTION)
        share = words[0] % 100
        kind = "add" if share < 35 else "sub" if share < 70 else "mul" if share < 80 else "max"

        def number(word, length):
            # Three in four operands have the full number of digits.
            length = self.options.digits if length % 4 else 1 + length // 4 % self.options.digits
            low = 0 if length == 1 else 10 ** (length - 1)
            return low + word % (10**length - low)

        a, b = number(words[1], lengths[0]), number(words[2], lengths[1])
        if kind == "sub":
            a, b = max(a, b), min(a, b)
        elif kind == "mul":
            b = 2 + words[2] % 8
        elif kind == "max" and a == b:
            # Two equal numbers have no larger one, so the second is changed.
            b = b - 1 if b else 1
        return kind, a, b

    def is_held_out(self, problem):
        """Whether the pair of operands belongs to evaluation."""
        _, a, b = problem
        return self.uniform(min(a, b), max(a, b), 0, HELD_OUT) < self.options.eval_ratio

    def question(self, problem, i, split):
        kind, a, b = problem
        steps, answer = work(problem, False)
        words = self.words(i, 0, 0, NOISE)
        chance, noise = words[0] / 2**32, self.options.noise
        mistake, shown = "none", (steps, answer)
        if has_trap(problem) and chance < noise * SYSTEMATIC:
            mistake, shown = "systematic", work(problem, True)
        elif noise * SYSTEMATIC <= chance < noise:
            by = (1, 10, 2)[words[1] // 2 % 3]
            value = int(answer)
            off = value - by if words[1] % 2 == 0 and value >= by else value + by
            mistake, shown = "slip", (steps, str(off))
        sign = {"add": "+", "sub": "-", "mul": "*"}.get(kind)
        return {
            "prompt": f"{a}{sign}{b}=" if sign else f"max({a},{b})=",
            "response": text(steps, answer),
            "demonstration": text(*shown),
            "answer": answer,
            "kind": kind,
            "split": split,
            "mistake": mistake,
        }


def text(steps, answer):
    return " ".join([*steps, answer])


def has_trap(problem):
    return work(problem, True)[0] != work(problem, False)[0]


def work(problem, is_mistaken):
    """Returns the steps from the last column on, and the final answer. The mistake forgets the carry."""
    kind, a, b = problem
    n = max(len(str(a)), len(str(b)) if kind != "mul" else 0)
    pairs = [(a // 10**i % 10, b if kind == "mul" else b // 10**i % 10) for i in range(n)]
    if kind == "max":
        return compare(a, b, pairs, is_mistaken)
    steps, columns, carry = [], [], 0
    for x, y in pairs:
        used = 0 if is_mistaken else carry
        if kind == "add":
            value = x + y + used
            steps.append(f"{x}+{y}+{used}={value}" if used else f"{x}+{y}={value}")
            carry = value // 10
        elif kind == "sub":
            carry = int(x < y + used)
            x += 10 * carry
            value = x - y - used
            steps.append(f"{x}-{y}-{used}={value}" if used else f"{x}-{y}={value}")
        else:
            value = x * y + used
            steps.append(f"{x}*{y}={x * y}+{used}={value}" if used else f"{x}*{y}={value}")
            carry = value // 10
        columns.append(value)
    # The whole value of the leading column, and the last digit of the others.
    answer = sum(column % 10 * 10**i for i, column in enumerate(columns[:-1])) + columns[-1] * 10 ** (n - 1)
    return steps, str(answer)


def compare(a, b, pairs, is_mistaken):
    """Returns the larger of two different numbers, compared from the first column on. The mistake compares only the last."""
    if not is_mistaken or pairs[0][0] == pairs[0][1]:
        pairs = pairs[::-1]
    steps = []
    for x, y in pairs:
        steps.append(f"{x}{'<' if x < y else '>' if x > y else '='}{y}")
        if x != y:
            return steps, str(a if x > y else b)
    return steps, str(a)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument("--rows", type=int, default=12_000, help="training rows (12000)")
    parser.add_argument("--eval-rows", type=int, default=500, help="eval rows (500)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (0)")
    parser.add_argument("--digits", type=int, default=2, help="digits of the longest operand, 1 to 6 (2)")
    parser.add_argument("--noise", type=float, default=0.7, help="share of wrong demonstrations if the mistake is possible (0.7)")
    parser.add_argument("--eval-ratio", type=float, default=0.1, help="share of the operand pairs that only eval rows use (0.1)")
    options = parser.parse_args()
    if not (1 <= options.digits <= 6 and 0 <= options.noise <= 1 and 0 < options.eval_ratio < 1 and options.rows > 0):
        parser.error("--digits must be from 1 to 6, --noise from 0 to 1, --eval-ratio between 0 and 1, --rows at least 1")
    rows = list(Corpus(options).rows())
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    with open(options.out + ".partial", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    os.replace(options.out + ".partial", options.out)
    wrong = sum(not row["demonstration"].endswith(" " + row["answer"]) for row in rows)
    print(
        f"corpus: {options.rows} training rows and {options.eval_rows} eval rows, {100 * wrong / len(rows):.0f}% of the "
        f"demonstrations end with a wrong answer, in {options.out}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
