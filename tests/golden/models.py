"""Makes the goldens of tests/parity: tiny random models of each family, and the results of transformers for them.

    python tests/golden/models.py            # needs torch, transformers >= 5, safetensors

Writes tests/golden/models/NAME/ (a Hugging Face directory) and tests/golden/models/NAME.safetensors:
  tokens, cu_seqlens   packed rows
  logprobs             log p(next token) of every row that has one, temperature 1
  logprobs_t, entropy  the same and the entropy at temperature TEMPERATURE
  grad.PARAMETER       gradient of the loss below by autograd
  greedy               prompt and continuation by generate(do_sample=False)
  values               (reward models) the score at every position
  scores               (reward models) scores of the sequence classifier for the rows as one padded batch
Loss: sum_i weight_i * logprobs_t_i + ENTROPY_COEF * sum_i entropy_i, weight_i = ((7 i) mod 11 - 3) / 10. The loss of a
reward model is sum_i weight_i * value_i. All in float64, eager attention, each sequence alone. (The norms and the softmax
of transformers are float32 inside, whatever the model's dtype.)
"""

import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

OUT = Path(__file__).parent / "models"
LENGTHS = [1, 2, 31, 33, 70]
TEMPERATURE = 0.7
ENTROPY_COEF = 0.05
PROMPT, NEW = 5, 40

BASE = dict(vocab_size=131, num_hidden_layers=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
            attention_dropout=0.0)

# name: (config class, model class, config, dtype on disk, shard size, spelling of config.json)
MODELS = {
    "llama2": ("LlamaConfig", "LlamaForCausalLM", dict(
        hidden_size=48, intermediate_size=60, num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0), tie_word_embeddings=False,
    ), torch.float32, None, 4),
    "llama3": ("LlamaConfig", "LlamaForCausalLM", dict(
        hidden_size=40, intermediate_size=51, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0,
                             high_freq_factor=4.0, original_max_position_embeddings=32),
    ), torch.float32, "45KB", 5),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(
        hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, sliding_window=7,
        head_dim=8, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=1000.0),
    ), torch.bfloat16, "25KB", 5),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", dict(
        hidden_size=36, intermediate_size=44, num_attention_heads=3, num_key_value_heads=1, use_sliding_window=True,
        sliding_window=9, max_window_layers=1, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=10000.0),
    ), torch.float32, None, 4),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(
        hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
        tie_word_embeddings=False,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32),
    ), torch.float16, None, 5),
    "reward": ("LlamaConfig", "LlamaForSequenceClassification", dict(
        hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, num_labels=1,
        tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ), torch.float32, None, 5),
    "reward-qwen2": ("Qwen2Config", "Qwen2ForSequenceClassification", dict(
        hidden_size=24, intermediate_size=36, num_attention_heads=3, num_key_value_heads=1, num_labels=1,
        tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ), torch.float32, None, 4),
}


def randomise(model, generator):
    """Weights large enough that the softmax is far from uniform, biases and norms that differ by element."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if "norm" in name:
            p.data = 1.0 + 0.2 * noise
        elif name.endswith("bias"):
            p.data = 0.3 * noise
        elif "embed_tokens" in name:
            p.data = noise
        else:
            p.data = noise * 1.2 / p.shape[1] ** 0.5


def as_transformers_4(path):
    """Rewrites config.json in the spelling of transformers 4."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    if config.get("head_dim") == config["hidden_size"] // config["num_attention_heads"]:
        config.pop("head_dim")
    config["transformers_version"] = "4.46.0"
    path.write_text(json.dumps(config, indent=2) + "\n")


def language_model_numbers(model, rows, out):
    logprobs, logprobs_t, entropies = [], [], []
    for row in rows:
        if len(row) < 2:
            continue
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        target = row[1:, None]
        logprobs.append(torch.log_softmax(logits, -1).gather(1, target)[:, 0])
        scaled = torch.log_softmax(logits / TEMPERATURE, -1)
        logprobs_t.append(scaled.gather(1, target)[:, 0])
        entropies.append(-(scaled.exp() * scaled).sum(-1))
    out["logprobs"], out["logprobs_t"], out["entropy"] = map(torch.cat, (logprobs, logprobs_t, entropies))
    weight = ((torch.arange(len(out["logprobs_t"])) * 7) % 11 - 3).double() / 10
    loss = (weight * out["logprobs_t"]).sum() + ENTROPY_COEF * out["entropy"].sum()
    prompt = rows[-1][:PROMPT][None]
    with torch.no_grad():
        greedy = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW,
                                eos_token_id=None, pad_token_id=0)[0]
        top = model(input_ids=greedy[None], use_cache=False).logits[0, PROMPT - 1:-1].topk(2).values
    assert len(greedy) == PROMPT + NEW
    margin = (top[:, 0] - top[:, 1]).min().item()
    assert margin > 1e-3, f"a greedy choice hangs on {margin}: take another seed"
    out["greedy"] = greedy
    return loss


def value_numbers(model, rows, out):
    # The classifier scores the last token that is not this one; the last tokens of the rows are others.
    model.config.pad_token_id = 0
    assert all(row[-1] != 0 for row in rows)
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    with torch.no_grad():
        out["scores"] = model(input_ids=batch, attention_mask=mask, use_cache=False).logits[:, 0]
    out["values"] = torch.cat([model.score(model.model(input_ids=row[None], use_cache=False)[0])[0, :, 0]
                               for row in rows])
    weight = ((torch.arange(len(out["values"])) * 7) % 11 - 3).double() / 10
    return (weight * out["values"]).sum()


def make(name, seed):
    config_class, model_class, fields, dtype, shard, spelling = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    config = getattr(transformers, config_class)(**BASE, **fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config)
    randomise(model, generator)
    model.to(dtype)
    directory = OUT / name
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
    if spelling == 4:
        as_transformers_4(directory / "config.json")
    # What was saved is what is run: the spelling above is read by transformers too.
    model = getattr(transformers, model_class).from_pretrained(directory, attn_implementation="eager",
                                                              dtype=torch.float64)
    rows = [torch.randint(0, 131, (n,), generator=generator) for n in LENGTHS]
    out = {}
    numbers = value_numbers if name.startswith("reward") else language_model_numbers
    numbers(model, rows, out).backward()
    for parameter, p in model.named_parameters():
        out[f"grad.{parameter}"] = p.grad
    out = {k: v.detach().to(torch.float32 if v.is_floating_point() else torch.int32).contiguous()
           for k, v in out.items()}
    out["tokens"] = torch.cat(rows).int()
    out["cu_seqlens"] = torch.tensor([0] + LENGTHS).cumsum(0).int()
    save_file(out, OUT / f"{name}.safetensors")


def rope_frequencies():
    """Inverse frequencies of every supported scaling, head dim 24, as transformers computes them."""
    cases = [
        dict(rope_type="default", rope_theta=10000.0),
        dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
        dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=8192),
        dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0, original_max_position_embeddings=32768),
        dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, original_max_position_embeddings=4096, beta_fast=24.0,
             beta_slow=2.0, mscale=1.0, mscale_all_dim=0.707, truncate=False),
    ]
    out = []
    for case in cases:
        config = transformers.LlamaConfig(hidden_size=96, num_attention_heads=4, head_dim=24,
                                          max_position_embeddings=131072, rope_parameters=dict(case))
        if case["rope_type"] == "default":
            frequencies, factor = 1.0 / (10000.0 ** (torch.arange(0, 24, 2).float() / 24)), 1.0
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[case["rope_type"]](config, "cpu")
        out.append(dict(rope_parameters=case, inverse_frequencies=frequencies.tolist(), attention_factor=factor))
    (OUT / "rope.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for number, name in enumerate(MODELS):
        make(name, 100 + number)
    rope_frequencies()
