"""Whether transformers generates the same greedy tokens from an exported directory as rlhf-hpc does.

usage: same_tokens.py BINARY MODEL_DIR PROMPTS.jsonl [NEW_TOKENS]

Each line of PROMPTS.jsonl is {"prompt": str}. Needs torch and transformers. Prints one line a prompt that differs and a
summary, and exits 1 if any differs where transformers itself was not within 1e-4 of a tie.
"""

import json
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    binary, directory, prompts_file = sys.argv[1:4]
    new_tokens = int(sys.argv[4]) if len(sys.argv) > 4 else 32
    prompts = [json.loads(line)["prompt"] for line in open(prompts_file, encoding="utf-8")]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    command = [binary, "generate", "--model", directory, "--input", prompts_file, "--temperature", "0",
               "--max-new-tokens", str(new_tokens)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ours = [json.loads(line)["tokens"] for line in output.splitlines()]
    equal, ties, wrong = 0, 0, 0
    for prompt, mine in zip(prompts, ours, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, output_logits=True,
                                 return_dict_in_generate=True, pad_token_id=tokenizer.eos_token_id or 0)
        theirs = out.sequences[0, ids.shape[1]:].tolist()
        if theirs == mine:
            equal += 1
            continue
        at = next((i for i, (a, b) in enumerate(zip(theirs, mine)) if a != b), min(len(theirs), len(mine)))
        top = out.logits[at][0].topk(2).values if at < len(out.logits) else None
        if top is not None and float(top[0] - top[1]) < 1e-4:
            ties += 1
        else:
            wrong += 1
            print(f"differs at token {at} of {prompt!r}: transformers {theirs[at:at + 5]}, rlhf-hpc {mine[at:at + 5]}")
    print(f"{len(prompts)} prompts: {equal} equal, {ties} part at a tie within 1e-4, {wrong} differ")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
