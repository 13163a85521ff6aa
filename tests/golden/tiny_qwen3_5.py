"""Writes a tiny Qwen3.5 with a vision tower and random weights, with the files of a tokenizer that has the tokens of images.

    python tests/golden/tiny_qwen3_5.py OUT TOKENIZER     (needs torch, transformers >= 5.24)
"""

import shutil
import sys
from pathlib import Path

import torch
import transformers


def main():
    out, tokenizer = sys.argv[1:3]
    ids = transformers.AutoTokenizer.from_pretrained(tokenizer)
    token = lambda name: ids.convert_tokens_to_ids(f"<|{name}|>")
    text = dict(vocab_size=len(ids), hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, layer_types=["linear_attention"] * 3 + ["full_attention"],
                linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
                max_position_embeddings=512, bos_token_id=None, eos_token_id=ids.eos_token_id, pad_token_id=None,
                rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75,
                                     mrope_section=[2, 2, 2], mrope_interleaved=True))
    vision = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=8, temporal_patch_size=2,
                  spatial_merge_size=2, out_hidden_size=64, num_position_embeddings=64)
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    keys = [name.replace("pad", "token_id") if "pad" in name else f"{name}_token_id" for name in names]
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False,
                                        **dict(zip(keys, map(token, names))))
    torch.manual_seed(1)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(out)
    for file in Path(tokenizer).iterdir():
        shutil.copy(file, out)


if __name__ == "__main__":
    main()
