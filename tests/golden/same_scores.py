"""Whether transformers scores rows by an exported reward model as rlhf-hpc does: each row alone, and all in padded batches.

usage: same_scores.py BINARY MODEL_DIR ROWS.jsonl

Each line of ROWS.jsonl is {"tokens": [int]}. Needs torch and transformers. Prints the largest differences, and exits 1 where
one is above 1e-5.
"""

import json
import subprocess
import sys

import torch
from transformers import AutoModelForSequenceClassification

BATCH = 16


def main():
    binary, directory, rows_file = sys.argv[1:4]
    rows = [torch.tensor(json.loads(line)["tokens"]) for line in open(rows_file, encoding="utf-8")]
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    command = [binary, "reward", "--model", directory, "--input", rows_file, "--device", "cpu"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ours = torch.tensor([json.loads(line)["reward"] for line in output.splitlines()])
    pad = next(token for token in range(model.config.vocab_size) if all(row[-1] != token for row in rows))
    with torch.no_grad():
        alone = torch.cat([model(row[None]).logits[:, 0] for row in rows])
        # The last token that is not this one is scored.
        model.config.pad_token_id = pad
        padded = []
        for start in range(0, len(rows), BATCH):
            batch = rows[start:start + BATCH]
            tokens = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=pad)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
            padded.append(model(tokens, attention_mask=mask).logits[:, 0])
    gaps = [float((ours - theirs).abs().max()) for theirs in (alone, torch.cat(padded))]
    lengths = [len(row) for row in rows]
    print(f"{type(model).__name__}, {len(rows)} rows of {min(lengths)} to {max(lengths)} tokens, scores from "
          f"{float(ours.min()):.4f} to {float(ours.max()):.4f}: {gaps[0]:.1e} apart alone, {gaps[1]:.1e} in padded batches")
    sys.exit(1 if max(gaps) > 1e-5 else 0)


if __name__ == "__main__":
    main()
