"""Makes the goldens of nf4: values that bitsandbytes quantizes on the CPU, and a model that transformers saves with it.

    python tests/golden/nf4.py        # needs torch, transformers >= 5, bitsandbytes 0.50.2

Writes tests/golden/nf4/:
  values.safetensors   for each CASE: CASE.values f32, its codes, absmax and dequantized bf16, as `quantize_4bit` gives them;
                       CASE.nested.* the double quantization of absmax, with its offset, and the dequantized bf16
  plain, nested        directories of a tiny model, saved with double quantization off and on
  plain.safetensors, nested.safetensors   NAME: the bf16 value of each quantized weight, by `dequantize_4bit`
The 8-bit quantizer of bitsandbytes on the CPU rounds values to 65,536 steps before it looks for the nearest code; that on
the GPU does not.
"""

import json
import os
import pathlib
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"
import bitsandbytes.functional as F  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

OUT = pathlib.Path(__file__).parent / "nf4"
# Whole blocks; a short last block; one short block; an odd number of columns; a block of zeros.
CASES = {"whole": (8, 128), "short": (5, 100), "single": (3, 6), "odd": (7, 33), "zeros": (4, 64), "many": (260, 68)}


def values():
    generator, out = torch.Generator().manual_seed(7), {}
    out["map"] = F.create_dynamic_map()
    for name, shape in CASES.items():
        w = torch.randn(shape, generator=generator) * 0.05
        if name == "zeros":
            w[1] = 0.0
        if name == "many":
            w *= torch.rand((shape[0], 1), generator=generator)
        out[f"{name}.values"] = w
        codes, state = F.quantize_4bit(w, quant_type="nf4", blocksize=64)
        out[f"{name}.codes"], out[f"{name}.absmax"] = codes.reshape(-1), state.absmax
        out[f"{name}.bf16"] = F.dequantize_4bit(codes, state).to(torch.bfloat16)
        codes, state = F.quantize_4bit(w, quant_type="nf4", blocksize=64, compress_statistics=True)
        assert torch.equal(codes.reshape(-1), out[f"{name}.codes"])
        out[f"{name}.nested.codes"], out[f"{name}.nested.largest"] = state.absmax, state.state2.absmax
        out[f"{name}.nested.offset"] = state.offset.reshape(1)
        out[f"{name}.nested.bf16"] = F.dequantize_4bit(codes, state).to(torch.bfloat16)
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, OUT / "values.safetensors")


def model():
    config = transformers.Qwen2Config(
        vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(3)
    full = OUT / "full"
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(full)
    for name, nested in [("plain", False), ("nested", True)]:
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested, bnb_4bit_compute_dtype=torch.bfloat16)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            full, quantization_config=quantization, dtype=torch.bfloat16, device_map="cpu")
        shutil.rmtree(OUT / name, ignore_errors=True)
        model.save_pretrained(OUT / name)
        (OUT / name / "generation_config.json").unlink()
        weights = {}
        for module, linear in model.named_modules():
            state = getattr(getattr(linear, "weight", None), "quant_state", None)
            if state is not None:
                w = F.dequantize_4bit(linear.weight.data, state)
                assert w.dtype == torch.bfloat16
                weights[f"{module}.weight"] = w.contiguous()
        save_file(weights, OUT / f"{name}.safetensors")
    shutil.rmtree(full)
    print(json.dumps(json.loads((OUT / "nested/config.json").read_text())["quantization_config"]))


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    values()
    model()
