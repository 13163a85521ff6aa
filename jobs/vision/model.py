#!/usr/bin/env python3
"""Adds tokens for images to a tokenizer, and writes the files of a small Qwen3-VL beside it: model.py TOKENIZER

The model has patches of 8 x 8 pixels, and one token for 2 x 2 patches: each cell of an image of shapes.py is a token.
"""

import json
import sys

folder = sys.argv[1]


def read(name):
    with open(f"{folder}/{name}", encoding="utf-8") as file:
        return json.load(file)


def write(name, value):
    with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)


tokenizer = read("tokenizer.json")
first = len(tokenizer["model"]["vocab"])
names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
ids = {name: first + i for i, name in enumerate(names)}
if not any(token["content"] in ids for token in tokenizer["added_tokens"]):
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    tokenizer["added_tokens"] += [{"id": ids[name], "content": name, **flags, "special": True} for name in names]
    write("tokenizer.json", tokenizer)

# A message's content is a text, or a list of parts.
template = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
write("tokenizer_config.json", {**read("tokenizer_config.json"), "chat_template": template})
write(
    "preprocessor_config.json",
    {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
    },
)
write(
    "config.json",
    {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "tie_word_embeddings": False,
        "dtype": "float32",
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": first + len(names),
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
        },
    },
)
