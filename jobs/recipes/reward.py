"""The reward of a job: `python = "reward.py"` in [reward].

Each rank runs this file in its own process and calls the function below with a batch of responses. Its output is in
DIR/logs/reward-rank-N.log. A call that fails is retried and then ends the run. There is no default score.
"""

import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reward(prompts, completions, labels, **columns):
    """Returns a score for each response. `labels` contains the field that data.label_key names. `columns` contains every
    field of the rows by its name. A response is a list of messages if its row has messages, else a text."""
    return [score(text_of(completion), label) for completion, label in zip(completions, labels)]


def text_of(completion):
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def score(text, label):
    """Returns 1 if the last number of the text is the last number of the label, else 0. A long text scores slightly less."""
    right = last_number(label)
    return float(right is not None and last_number(text) == right) - min(len(text) / 20_000, 0.1)


def last_number(text):
    numbers = NUMBER.findall(str(text).replace(",", ""))
    return float(numbers[-1]) if numbers else None
