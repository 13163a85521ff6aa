"""Code that the peer scripts share: arguments, the model, the clock, and the one line of JSON they print."""

import argparse
import json
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def arguments(description, model_required=True):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=model_required, help="Hugging Face model directory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--attention", choices=["eager", "sdpa"], help="default: the faster of both")
    return parser


def start(parser):
    """Parses, and sets threads and seed."""
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    return args


def load(args, attention):
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPES[args.dtype], attn_implementation=attention)
    # Every response has its full length: no token ends it.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def median_s(work, repeats):
    """Median seconds of `work()` after one call that warms up."""
    work()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def report(args, work, tokens, prepare):
    """Times `prepare(attention)()` for each attention asked for and prints the faster as JSON."""
    tried = [args.attention] if args.attention else ["eager", "sdpa"]
    seconds = {attention: median_s(prepare(attention), args.repeats) for attention in tried}
    attention = min(seconds, key=seconds.get)
    print(
        json.dumps(
            {
                "work": work,
                "median_s": seconds[attention],
                "tokens_per_s": tokens / seconds[attention],
                "dtype": args.dtype,
                "threads": args.threads,
                "repeats": args.repeats,
                "attention": attention,
                "torch": torch.__version__,
            }
        )
    )
