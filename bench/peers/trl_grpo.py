"""The job of jobs/arithmetic in TRL: GRPO with the same model, rows, batch and reward, for some steps; prints the seconds of each.

Usage: trl_grpo.py MODEL_DIR ROWS.jsonl [--steps N] [--dtype bfloat16|float32] [--threads N]

Needs torch, transformers, trl and datasets. The mini-batch is 8 samples per pass, 8 passes per optimizer step.
"""

import argparse
import re
import tempfile
import time

import torch
from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimer(TrainerCallback):
    def __init__(self):
        self.last = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        print(f"step {state.global_step}: {now - self.last:.1f} s", flush=True)
        self.last = now


def number(completions, answer, **columns):
    """1 if the last number of the response is the answer, else 0."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(re.findall(r"-?\d+", text)[-1:] == [right]) for text, right in zip(texts, answer)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = load_dataset("json", data_files=options.rows, split="train").filter(lambda row: row["split"] == "train")
    rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,  # the weights are of the dtype; no autocast
        model_init_kwargs={"dtype": options.dtype},
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        num_generations=8,
        max_completion_length=128,
        temperature=1.0,
        beta=0.0,
        learning_rate=3e-6,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        seed=1,
    )
    GRPOTrainer(options.model, reward_funcs=number, args=config, train_dataset=rows, callbacks=[StepTimer()]).train()


if __name__ == "__main__":
    main()
