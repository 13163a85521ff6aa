"""The reward of a job: `python = "reward.py"` in [reward].

Each rank runs this file in a process of its own and calls the function below with a batch of responses. What it prints is in
DIR/logs/reward-rank-N.log. An error is tried again and then ends the run: a score that nobody gave does not exist.
"""

import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reward(prompts, completions, labels, **columns):
    """A score for each response. `labels` are the fields that data.label_key names; `columns` has every field of the rows by
    its name. A response to a row with messages is a list of messages, else a text."""
    return [score(text_of(completion), label) for completion, label in zip(completions, labels)]


def text_of(completion):
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def score(text, label):
    """1 where the last number of the text is that of the label, else 0; and a little less for a long text."""
    right = last_number(label)
    return float(right is not None and last_number(text) == right) - min(len(text) / 20_000, 0.1)


def last_number(text):
    numbers = NUMBER.findall(str(text).replace(",", ""))
    return float(numbers[-1]) if numbers else None
