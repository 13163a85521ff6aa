"""Writes a Llama with random weights: make_model.py tiny|small OUT_DIR"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "tiny": dict(hidden_size=256, num_hidden_layers=4, intermediate_size=688, vocab_size=2048),
    "small": dict(hidden_size=512, num_hidden_layers=8, intermediate_size=1408, vocab_size=8192),
}

size, out_dir = sys.argv[1:]
torch.manual_seed(0)
config = LlamaConfig(
    **SIZES[size],
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LlamaForCausalLM(config).save_pretrained(out_dir)
