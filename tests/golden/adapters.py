"""Makes goldens of adapters: the results of PEFT for the tiny models of models.py, each with a random adapter.

    python tests/golden/adapters.py [NAME...]  # all, or these; needs torch, transformers >= 5, peft 0.21.2, safetensors

Writes tests/golden/adapters/NAME/ (an adapter directory, f32) and tests/golden/adapters/NAME.safetensors: `loss`, and
the tensors that models.py lists, with 12 greedy tokens and with gradients of the trained parameters only. All in
float64. All linear layers, unless a model lists some, have rank 4; B is not 0; the models differ in alpha, rslora and
patterns.
"""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import models
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

OUT = Path(__file__).parent / "adapters"
LENGTHS = [2, 13, 24]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

# The settings of each model that differ from rank 4 and alpha 6.
SETTINGS = {
    "llama2": {},
    "llama3": dict(use_rslora=True, lora_alpha=3),
    "mistral": dict(rank_pattern={"k_proj": 1, "layers.0.mlp.up_proj": 7}),
    "qwen2": dict(alpha_pattern={"self_attn.*": 10}),
    "qwen3": dict(target_modules=["q_proj", "v_proj", "down_proj"], layers_to_transform=[1]),
    "reward": {},
    "reward-qwen2": dict(use_rslora=True, lora_alpha=2),
    # Adapters of joined matrices.
    "phi3-short": {},
    "glm4": dict(rank_pattern={"gate_up_proj": 3}, alpha_pattern={"q_proj": 9}),
    "gemma3_text": dict(target_modules=["q_proj", "k_proj", "o_proj", "up_proj"], layers_to_transform=[0, 5]),
    # Not the vision tower, which has modules of the same names.
    "gemma3": dict(target_modules=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"),
    "olmo2": {},
    "granite": dict(use_rslora=True, lora_alpha=3),
    "qwen3_5_text": dict(rank_pattern={"in_proj_qkv": 3, "in_proj_a": 2}),
    # Of mixtures, PEFT takes some names for tensors of all experts.
    "deepseek_v3": dict(target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
                        rank_pattern={"kv_b_proj": 3}),
    "deepseek_v3-plain": dict(target_modules=["q_proj", "kv_b_proj"], use_rslora=True, lora_alpha=3),
    "qwen3_next": dict(target_modules=[*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"],
                       rank_pattern={"in_proj_qkvz": 3, "in_proj_ba": 2}),
    "qwen3_5_moe_text": dict(target_modules=[*ATTENTION, "in_proj_qkv", "in_proj_b", "out_proj", "gate_proj",
                                             "up_proj", "down_proj"], lora_alpha=5),
    # With "all-linear", PEFT also adapts the tensors of all experts.
    "gpt_oss": dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], alpha_pattern={"v_proj": 9}),
}


def make(name, seed):
    generator = torch.Generator().manual_seed(seed)
    is_value = name.startswith("reward")
    model = models.load(name, torch.float64)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **SETTINGS[name]}
    config = LoraConfig(task_type="SEQ_CLS" if is_value else "CAUSAL_LM", **settings)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    trained = {key: p for key, p in adapted.named_parameters() if p.requires_grad}
    for key, p in trained.items():
        if "lora_" in key:
            noise = torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5
            p.data = (noise if "lora_A" in key else 0.5 * noise).double()
    directory = OUT / name
    # Else PEFT compares vocabularies, for which it reads a config.json that transformers may reject.
    adapted.save_pretrained(directory, save_embedding_layers=False)
    (directory / "README.md").unlink()
    prefix = "base_model.model."
    plain = {key.replace(".default", "").replace(".modules_to_save", ""): p for key, p in trained.items()}
    save_file({key: p.detach().float().contiguous() for key, p in plain.items()},
              directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"models/{name}"
    if not isinstance(config["target_modules"], str):
        config["target_modules"] = sorted(config["target_modules"])
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    rows = [torch.randint(3, 131, (n,), generator=generator) for n in LENGTHS]
    inner, out = adapted.base_model.model.eval(), {}
    numbers = models.value_numbers if is_value else partial(models.language_model_numbers, new=12)
    out["loss"] = numbers(inner, rows, out)
    out["loss"].backward()
    for key, p in plain.items():
        out[f"grad.{key.removeprefix(prefix)}"] = p.grad
    out = {key: tensor.detach().to(torch.float32 if tensor.is_floating_point() else torch.int32).contiguous()
           for key, tensor in out.items()}
    out["tokens"] = torch.cat(rows).int()
    out["cu_seqlens"] = torch.tensor([0] + LENGTHS).cumsum(0).int()
    save_file(out, OUT / f"{name}.safetensors")
    for path in [OUT / f"{name}.safetensors", *directory.iterdir()]:
        path.chmod(0o644)


if __name__ == "__main__":
    models.with_exact_states()
    for number, name in enumerate(SETTINGS):
        if name in sys.argv[1:] or len(sys.argv) == 1:
            shutil.rmtree(OUT / name, ignore_errors=True)
            make(name, 300 + number)
