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
from peft import LoraConfig, PeftModel, get_peft_model
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
    "gpt_oss": dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], alpha_pattern={"v_proj": 9}),
    # Adapters of experts and routers, for the model of the same name without the suffix.
    "qwen3_moe-experts": {},
    "mixtral-experts": dict(target_modules=["w1", "w2", "w3", "gate", "k_proj"], use_rslora=True, lora_alpha=2),
    "gpt_oss-experts": dict(target_modules=["o_proj"], rank_pattern={"experts.down_proj": 2},
                            alpha_pattern={"gate_up_proj": 5},
                            target_parameters=["experts.gate_up_proj", "mlp.experts.down_proj", "router.weight"]),
    "qwen3_next-experts": {},
    "deepseek_v3-experts": dict(r=3, seed=400),
    "glm4_moe-experts": dict(target_modules=["v_proj"], target_parameters=[
        "experts.gate_up_proj", "shared_experts.down_proj.weight", "layers.0.mlp.up_proj.weight"]),
    "qwen3_5_moe_text-experts": dict(target_parameters=["experts.down_proj", "gate.weight"]),
    "qwen3_moe-stacked-experts": dict(target_modules=["down_proj"]),
    # Saved with transformers 4, one adapter for each matrix.
    "qwen3_moe-old": dict(target_modules=["q_proj", "gate", "gate_proj", "up_proj", "down_proj"]),
    "mixtral-old": dict(target_modules=["w1", "w2", "w3"], use_rslora=True, lora_alpha=3),
}

SUFFIXES = ["-experts", "-old"]


def model_of(name):
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def save_old(directory, settings, model, generator):
    """Writes an adapter as PEFT did with transformers 4, whose experts and routers were linear layers."""
    tensors = {}

    def add(module, outputs, inputs):
        r = settings["r"]
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn((r, inputs), generator=generator) / inputs**0.5
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn((outputs, r), generator=generator) / 4
    targets, is_numbered = settings["target_modules"], "w1" in settings["target_modules"]
    for name, p in model.named_parameters():
        module, _, last = name.rpartition(".")
        # Not of dense layers, whose adapters PEFT leaves out with transformers 5.
        is_target = module.rpartition(".")[2] in targets and not module.endswith("_proj") or "self_attn" in module
        if last == "weight" and is_target and module.rpartition(".")[2] in targets:
            add(module.replace(".mlp.", ".block_sparse_moe.") if is_numbered else module, *p.shape)
        if last in ("gate_up_proj", "down_proj"):
            parts = {"gate_up_proj": ["w1", "w3"], "down_proj": ["w2"]}[last] if is_numbered else \
                {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}[last]
            for e in range(p.shape[0]):
                for part in parts:
                    old = module.replace(".mlp.", ".block_sparse_moe.") if is_numbered else module
                    add(f"{old}.{e}.{part}", p.shape[1] // len(parts), p.shape[2])
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"base_model_name_or_path": f"models/{model_of(directory.name)}", "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "fan_in_fan_out": False,
              "inference_mode": True, "lora_dropout": 0.0, **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make(name, seed):
    own = {**SETTINGS[name]}
    generator = torch.Generator().manual_seed(own.pop("seed", seed))
    is_value = name.startswith("reward")
    model = models.load(model_of(name), torch.float64)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **own}
    directory = OUT / name
    if name.endswith("-old"):
        save_old(directory, settings, model, generator)
        adapted = PeftModel.from_pretrained(model, directory, is_trainable=True, autocast_adapter_dtype=False)
    else:
        config = LoraConfig(task_type="SEQ_CLS" if is_value else "CAUSAL_LM", **settings)
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    trained = {key: p for key, p in adapted.named_parameters() if p.requires_grad}
    for key, p in trained.items():
        if "lora_" in key and not name.endswith("-old"):
            noise = torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5
            p.data = (noise if "lora_A" in key else 0.5 * noise).double()
    prefix = "base_model.model."
    plain = {key.replace(".default", "").replace(".modules_to_save", ""): p for key, p in trained.items()}
    if not name.endswith("-old"):
        save_new(adapted, directory, plain, name)
    rows = [torch.randint(3, 131, (n,), generator=generator) for n in LENGTHS]
    write_numbers(adapted, directory, (rows, plain, prefix), is_value)


def save_new(adapted, directory, plain, name):
    # Else PEFT compares vocabularies, for which it reads a config.json that transformers may reject.
    adapted.save_pretrained(directory, save_embedding_layers=False)
    (directory / "README.md").unlink()
    save_file({key: p.detach().float().contiguous() for key, p in plain.items()},
              directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"models/{model_of(name)}"
    for key in ("target_modules", "target_parameters"):
        if isinstance(config[key], list):
            config[key] = sorted(config[key])
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_numbers(adapted, directory, trained, is_value):
    (rows, plain, prefix), name = trained, directory.name
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
