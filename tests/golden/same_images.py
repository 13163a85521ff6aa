"""Whether transformers loads an exported model that reads images without a missing tensor, and computes what rlhf-hpc does.

usage: same_images.py BINARY MODEL_DIR ROWS.jsonl [NEW_TOKENS]

Each line of ROWS.jsonl has `messages`, and `images` as paths from its folder. Needs torch, transformers and Pillow. Compares
the tokens of the prompts (by the export's chat template and image processor), the greedy tokens other than those of images,
and the log-probabilities of these tokens, all in f32. Exits 1 for other tensors, prompts or tokens, except at a tie within 1e-4, and for
log-probabilities that are more than 1e-4 apart.
"""

import json
import pathlib
import subprocess
import sys

import torch
from PIL import Image, ImageOps
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


def main():
    binary, directory, rows_file = sys.argv[1:4]
    new_tokens = int(sys.argv[4]) if len(sys.argv) > 4 else 8
    rows = [json.loads(line) for line in open(rows_file, encoding="utf-8")]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    model, info = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    model.eval()
    names = ("image", "video", "vision_start", "vision_end")
    never = [token for name in names if (token := getattr(model.config, f"{name}_token_id", None)) is not None]
    others = {key: found for key, found in info.items() if found}
    command = [binary, "generate", "--model", directory, "--input", rows_file, "--temperature", "0",
               "--max-new-tokens", str(new_tokens), "--ignore-eos"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    prompts, equal, ties, wrong, apart = 0, 0, 0, 0, 0.0
    for row, mine in zip(rows, map(json.loads, output.splitlines()), strict=True):
        files = [Image.open(pathlib.Path(rows_file).parent / name) for name in row["images"]]
        files = [ImageOps.exif_transpose(image).convert("RGB") for image in files]
        seen = processor(files, return_tensors="pt")
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
        pad = tokenizer.convert_ids_to_tokens(model.config.image_token_id)
        for grid in seen["image_grid_thw"].tolist():
            text = text.replace(pad, "<image>" * (grid[1] * grid[2] // processor.merge_size**2), 1)
        ids = tokenizer(text.replace("<image>", pad), return_tensors="pt", add_special_tokens=False).input_ids
        prompts += ids[0].tolist() == mine["prompt_tokens"]
        start = ids.shape[1]
        images = {key: seen[key] for key in ("pixel_values", "image_grid_thw")}
        with torch.no_grad():
            theirs = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
                                    suppress_tokens=never,
                                    mm_token_type_ids=(ids == model.config.image_token_id).int(), **images)[0, start:]
            both = torch.cat([ids[0], torch.tensor(mine["tokens"])])[None]
            logits = model(both, mm_token_type_ids=(both == model.config.image_token_id).int(),
                           use_cache=False, **images).logits[0, start - 1:-1]
        logprobs = torch.log_softmax(logits, -1).gather(1, both[0, start:, None])[:, 0]
        apart = max(apart, float((logprobs - torch.tensor(mine["logprobs"])).abs().max()))
        if theirs.tolist() == mine["tokens"]:
            equal += 1
            continue
        logits[:, never] = -torch.inf
        top = logits.topk(2).values
        at = next(i for i, (a, b) in enumerate(zip(theirs.tolist(), mine["tokens"])) if a != b)
        is_tie = float(top[at, 0] - top[at, 1]) < 1e-4
        ties, wrong = ties + is_tie, wrong + (not is_tie)
    print(f"{type(model).__name__}: {len(rows)} rows, {prompts} equal prompts, {equal} equal responses, {ties} part at a tie "
          f"within 1e-4, {wrong} differ; log-probabilities at most {apart:.1e} apart; "
          f"{'all tensors are used' if not others else f'of the tensors: {others}'}")
    sys.exit(1 if wrong or others or prompts < len(rows) or apart > 1e-4 else 0)


if __name__ == "__main__":
    main()
