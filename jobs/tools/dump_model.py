"""Writes what transformers computes for a text, for `rlhf-hpc verify MODEL --against DUMP.safetensors`.

    python dump_model.py MODEL DUMP.safetensors [--dtype float32] [--text FILE | --ids 1,2,3] [--new 16] [--tokens 64]

Tensors: ids (t), hidden.0 ... hidden.L (t, d; L layers), logits (t, v), greedy (n). `rlhf-hpc help verify` describes them.
"""

import argparse

import torch
import transformers
from safetensors.torch import save_file

TEXT = "The quick brown fox counts: 12 + 345 = 357, then 3.5% of 1,000. Are the logits equal? She computed them again."
parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("out")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--text")
parser.add_argument("--ids", type=lambda text: [int(id) for id in text.split(",")])
parser.add_argument("--new", type=int, default=16)
parser.add_argument("--tokens", type=int, default=64)
args = parser.parse_args()
model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
about = {"dtype": str(model.dtype), "model": args.model, "program": f"transformers {transformers.__version__}"}
ids = args.ids
if ids is None:
    about["text"] = open(args.text).read() if args.text else TEXT
    ids = transformers.AutoTokenizer.from_pretrained(args.model)(about["text"]).input_ids[: args.tokens]
with torch.no_grad():
    row = torch.tensor([ids])
    found = model(row, output_hidden_states=True)
    tensors = {f"hidden.{i}": state[0].float().contiguous() for i, state in enumerate(found.hidden_states)}
    for _ in range(args.new):
        row = torch.cat([row, model(row).logits[:, -1:].argmax(-1)], 1)
tensors |= {"ids": torch.tensor(ids), "logits": found.logits[0].float().contiguous(), "greedy": row[0, len(ids) :].clone()}
save_file(tensors, args.out, about)
