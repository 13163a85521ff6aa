"""Makes the goldens of src/model/adapter_files.rs: adapters of PEFT for the tiny models, and the modules that it adapts.

    python tests/golden/lora.py              # needs torch, transformers >= 5, peft 0.21.2

Writes tests/golden/lora.json, for each case below: the model, adapter_config.json as PEFT saves it, [rank, scale] of
each adapted module by its name in a language model, and the names of the parameters that train whole. Writes tests/golden/lora/NAME/, an adapter
directory for each case with a directory. Element i of each tensor is (i mod 61 - 30) / 32, which f16 and bf16 hold
exactly.

Checks by hand that PEFT reads what this program writes:

    ADAPTER_DIR=/tmp/adapters cargo test --lib an_adapter_that_is_written
    python tests/golden/lora.py /tmp/adapters   # loads each one, and compares the logits with those of PEFT's own
"""

import json
import shutil
import sys
import warnings
from pathlib import Path

import models
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent

# name: (model, dtype of the files or None for no directory, settings of PEFT)
CASES = {
    "all": ("llama2", None, dict(target_modules="all-linear")),
    "all-qwen3": ("qwen3", None, dict(target_modules="all-linear", exclude_modules=["o_proj", "mlp.up_proj"])),
    "names": ("llama3", torch.float32, dict(target_modules=["q_proj", "v_proj"], r=2, lora_alpha=5)),
    "tails": ("mistral", torch.bfloat16, dict(
        target_modules=["self_attn.q_proj", "down_proj"], layers_to_transform=[1], r=3, use_rslora=True)),
    "whole-name": ("mistral", None, dict(
        target_modules=["model.layers.0.self_attn.q_proj", "down_proj"], layers_to_transform=1,
        layers_pattern="layers")),
    "regex": ("qwen2", torch.float16, dict(target_modules=r"model\.layers\.\d+\.(mlp\.gate|self_attn\.[kv])_proj", r=4)),
    "regex-exclude": ("qwen2", None, dict(target_modules=r".*_proj", exclude_modules=r".*layers\.0\..*")),
    "patterns": ("qwen3", torch.float32, dict(
        target_modules="all-linear", r=8, lora_alpha=12,
        rank_pattern={"q_proj": 3, r"layers\.1\.mlp\..*": 2, "^model.layers.0.mlp.up_proj": 5, "proj": 1},
        alpha_pattern={"self_attn.[kv]_proj": 7, "down_proj": 2.5})),
    "rslora-patterns": ("llama2", None, dict(
        target_modules=["k_proj", "o_proj"], r=8, use_rslora=True, rank_pattern={"o_proj": 2}, alpha_pattern={"k": 3})),
    "saved": ("llama3", torch.float32, dict(target_modules=["q_proj"], r=1, modules_to_save=["norm", "lm_head"])),
    "saved-mlp": ("qwen2", None, dict(target_modules="all-linear", modules_to_save=["mlp"])),
    "scores": ("reward", torch.float32, dict(target_modules="all-linear", r=2, task_type="SEQ_CLS")),
    "scores-tied": ("reward-qwen2", torch.bfloat16, dict(
        target_modules=["v_proj"], r=2, task_type="SEQ_CLS", modules_to_save=["embed_tokens"],
        init_lora_weights="gaussian")),
    "joined": ("phi3-short", torch.bfloat16, dict(target_modules="all-linear", r=2)),
    "joined-names": ("glm4", None, dict(target_modules=["gate_up_proj", "k_proj"], modules_to_save=["norm"])),
    "inside": ("gemma3", torch.bfloat16, dict(
        target_modules=r".*language_model.*\.(q|up)_proj", rank_pattern={r"layers\.1\.mlp.up_proj": 1}, r=2,
        modules_to_save=["language_model.norm"])),
    # Routers and experts.
    "all-mixtral": ("mixtral", None, dict(target_modules="all-linear", r=2)),
    "all-qwen3_moe": ("qwen3_moe", None, dict(target_modules="all-linear", r=3, use_rslora=True)),
    "all-qwen3_next": ("qwen3_next", None, dict(target_modules="all-linear", r=2)),
    "all-qwen3_5_moe": ("qwen3_5_moe_text", None, dict(target_modules="all-linear", r=2)),
    "all-gpt_oss": ("gpt_oss", None, dict(target_modules="all-linear", r=2)),
    "all-glm4_moe": ("glm4_moe", None, dict(target_modules="all-linear", r=2)),
    "all-deepseek_v3": ("deepseek_v3", None, dict(target_modules="all-linear", r=2)),
    "all-glm4_moe_lite": ("glm4_moe_lite", None, dict(target_modules="all-linear", r=2)),
    "experts": ("qwen3_moe", torch.bfloat16, dict(target_modules=["gate_proj", "up_proj", "gate", "o_proj"], r=2)),
    "experts-layers": ("qwen3_next", None, dict(
        target_modules=["v_proj"], layers_to_transform=[1], exclude_modules=["gate"], r=2,
        target_parameters=["experts.down_proj", "mlp.gate.weight"])),
    "experts-patterns": ("gpt_oss", torch.float32, dict(
        target_modules=[], target_parameters=["experts.down_proj", "layers.0.mlp.experts.gate_up_proj", "router.weight"],
        r=4, lora_alpha=6, use_rslora=True, rank_pattern={"down_proj": 2, "router": 1},
        alpha_pattern={"router.weight": 3})),
    "experts-linear": ("glm4_moe", torch.float16, dict(
        target_modules=["k_proj"], target_parameters=["shared_experts.up_proj.weight", "gate_up_proj"], r=2)),
}


def base(name):
    return models.load(name, torch.float32)


def fill(tensor):
    values = (torch.arange(tensor.numel()) % 61 - 30) / 32
    return values.reshape(tensor.shape).to(tensor.dtype)


def of_parameter(key, layer):
    """The name of what an adapter changes: a module, or a parameter of all experts."""
    last = getattr(layer, "parameter_name", "weight")
    return key if last == "weight" else f"{key.replace('.base_layer', '')}.{last}"


def make(case):
    name, dtype, settings = CASES[case]
    config = LoraConfig(**{"task_type": "CAUSAL_LM", "lora_alpha": 16, **settings})
    model = get_peft_model(base(name), config)
    layers = {key: layer for key, layer in model.base_model.model.named_modules() if isinstance(layer, LoraLayer)}
    adapters = {of_parameter(key, layer).replace("language_model.", ""): [layer.r["default"], layer.scaling["default"]]
                for key, layer in layers.items()}
    out = HERE / "lora" / case
    # Else PEFT compares vocabularies, for which it reads a config.json that transformers rejects.
    model.save_pretrained(out, save_embedding_layers=False if name in ("phi3-short", "glm4_moe", "gpt_oss") else "auto")
    tensors = load_file(out / "adapter_model.safetensors")
    prefix = "base_model.model."
    whole = sorted(key.removeprefix(prefix).replace("language_model.", "") for key in tensors if ".lora_" not in key)
    config = json.loads((out / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"models/{name}"
    # PEFT writes its sets in any order.
    for key in ("target_modules", "exclude_modules", "modules_to_save", "target_parameters"):
        if isinstance(config[key], list):
            config[key] = sorted(set(config[key]))
    (out / "README.md").unlink()
    if dtype is None:
        shutil.rmtree(out)
    else:
        tensors = {key: fill(tensor.to(dtype)) for key, tensor in tensors.items()}
        save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
        (out / "adapter_model.safetensors").chmod(0o644)
        (out / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return {"model": name, "config": config, "adapters": adapters, "whole": whole}


def logits(name, adapter):
    model = PeftModel.from_pretrained(base(name), adapter).eval()
    tokens = torch.arange(3, 20)[None]
    model.config.pad_token_id = 0
    with torch.no_grad(), warnings.catch_warnings():
        return model(input_ids=tokens).logits


def check(written):
    """Compares adapters that this program wrote with those that PEFT wrote."""
    for directory in sorted(Path(written).iterdir()):
        name = CASES[directory.name][0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # missing or unexpected tensors are warnings
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", message=".* keys did not match any targeted module")
            ours = logits(name, directory)
        theirs = logits(name, HERE / "lora" / directory.name)
        assert (theirs - logits_of_base(name)).abs().max() > 0.01, "the adapter changes nothing"
        assert torch.equal(ours, theirs), f"{directory.name}: {(ours - theirs).abs().max()}"
        print(directory.name, "equal logits")


def logits_of_base(name):
    model = base(name).eval()
    model.config.pad_token_id = 0
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 20)[None]).logits


if __name__ == "__main__":
    if len(sys.argv) > 1:
        check(sys.argv[1])
    else:
        shutil.rmtree(HERE / "lora", ignore_errors=True)
        cases = {case: make(case) for case in CASES}
        (HERE / "lora.json").write_text(json.dumps(cases, indent=1, sort_keys=True) + "\n")
