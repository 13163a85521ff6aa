"""Makes the goldens of tests/parity/vision.rs: tiny random models that read images, and the results of transformers.

    python tests/golden/vision.py [NAME...]  # all, or these; needs torch, transformers >= 5.24, peft 0.21.2, safetensors

Writes tests/golden/models/NAME/ (a Hugging Face directory) and tests/golden/models/NAME.safetensors: as models.py, and
  grids, patches       the grid (t, h, w) of each image, and the random patches of all images, one after another
  images               the number of images of each row
  merged, deep.I       the rows of the tower for all images, and those behind layer I of the language model
  prompt               the length of the prompt of `greedy`, which is the beginning of the last row with its image
Images are random patches, so no decoder is needed. Gradients are named as the parameters of transformers 5.

With `adapters` as the first name: tests/golden/adapters/NAME/ (a random adapter of PEFT on that model, f32) and
tests/golden/adapters/NAME.safetensors, as adapters.py, for the rows of the model's golden.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from adapters import OUT as ADAPTERS
from adapters import save_new
from models import ENTROPY_COEF, TEMPERATURE, randomise, with_exact_states
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

OUT = Path(__file__).parent / "models"
IMAGE, VIDEO, START, END = 128, 129, 126, 127
# The pieces of each row: a number of text tokens, or the grid of an image.
ROWS = [[(1, 4, 6), 3], [17], [5, (1, 10, 2), 2, (1, 6, 8), 11], [4, (1, 2, 2), (1, 8, 14), 9]]
TEXT = dict(vocab_size=131, num_hidden_layers=3, max_position_embeddings=128, attention_dropout=0.0,
            hidden_size=24, intermediate_size=20, num_attention_heads=3, num_key_value_heads=1, bos_token_id=1,
            eos_token_id=2, pad_token_id=None)
IDS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
           tie_word_embeddings=False)
# name: (config class, model class, seed, text_config, vision_config)
MODELS = {
    "vision-qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", 3, dict(
        TEXT, rope_parameters=dict(rope_type="default", rope_theta=200.0, mrope_section=[1, 2, 1])), dict(
        depth=3, hidden_size=24, intermediate_size=13, num_heads=3, patch_size=3, temporal_patch_size=2,
        window_size=24, fullatt_block_indexes=[1], out_hidden_size=24)),
    "vision-qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", 5, dict(
        TEXT, head_dim=14, rope_parameters=dict(rope_type="default", rope_theta=200.0, mrope_section=[3, 2, 2],
                                                mrope_interleaved=True)), dict(
        depth=4, hidden_size=20, intermediate_size=13, num_heads=5, patch_size=2, temporal_patch_size=2,
        out_hidden_size=24, num_position_embeddings=25, deepstack_visual_indexes=[0, 2])),
    "vision-qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", 7, dict(
        TEXT, head_dim=16, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        linear_conv_kernel_dim=3, linear_key_head_dim=6, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_value_head_dim=10, rope_parameters=dict(
            rope_type="default", rope_theta=100.0, partial_rotary_factor=0.75, mrope_section=[2, 2, 2],
            mrope_interleaved=True)), dict(
        depth=2, hidden_size=24, intermediate_size=13, num_heads=2, patch_size=3, temporal_patch_size=2,
        out_hidden_size=24, num_position_embeddings=9)),
}

# The targets of each adapter, and more settings. "all-linear" of PEFT also means the tower.
TUNED = {
    "vision-qwen2_5_vl": dict(target_modules=["q_proj", "up_proj", "attn.qkv", "mlp.0"], alpha_pattern={"qkv": 9}),
    "vision-qwen3_vl": dict(target_modules="all-linear", rank_pattern={"linear_fc1": 3}),
    "vision-qwen3_5": dict(target_modules=["in_proj_qkv", "v_proj", "attn.proj", "linear_fc2"], use_rslora=True),
}


def load(name, dtype):
    return getattr(transformers, MODELS[name][1]).from_pretrained(OUT / name, attn_implementation="eager", dtype=dtype)


def as_old_files(directory):
    """The config.json and the names of the files of Qwen2.5-VL: the keys of the language model beside the others, and
    `visual.*` beside `model.*`."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"], text["rope_scaling"] = rope["rope_theta"], {"type": "mrope", "mrope_section": rope["mrope_section"]}
    for key in ("model_type", "layer_types"):
        text.pop(key, None)
    config = {**text, **{key: value for key, value in config.items() if key not in ("dtype",)}, "torch_dtype": "float32"}
    path.write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
               for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def pieces_of(row, generator):
    """The tokens of a row and the grids of its images."""
    tokens, grids = [], []
    for piece in row:
        if isinstance(piece, tuple):
            grids.append(piece)
            tokens += [START] + [IMAGE] * (piece[1] * piece[2] // 4) + [END]
        else:
            tokens += torch.randint(0, 126, (piece,), generator=generator).tolist()
    return torch.tensor(tokens), grids


def forward(model, tokens, grids, patches, dtype):
    images = {}
    if grids:
        images = dict(pixel_values=patches.to(dtype), image_grid_thw=torch.tensor(grids))
    kinds = (tokens == IMAGE).int()[None]
    return model(input_ids=tokens[None], mm_token_type_ids=kinds, attention_mask=torch.ones_like(tokens)[None],
                 use_cache=False, **images).logits[0]


def numbers(model, rows, patches, dtype, out):
    logprobs, scaled_logprobs, entropies, start = [], [], [], 0
    for tokens, grids in rows:
        count = sum(h * w for _, h, w in grids)
        logits = forward(model, tokens, grids, patches[start:start + count], dtype)[:-1]
        start += count
        target = tokens[1:, None]
        logprobs.append(torch.log_softmax(logits, -1).gather(1, target)[:, 0])
        scaled = torch.log_softmax(logits / TEMPERATURE, -1)
        scaled_logprobs.append(scaled.gather(1, target)[:, 0])
        entropies.append(-(scaled.exp() * scaled).sum(-1))
    out["logprobs"], out["logprobs_t"], out["entropy"] = map(torch.cat, (logprobs, scaled_logprobs, entropies))
    weight = ((torch.arange(len(out["logprobs_t"])) * 7) % 11 - 3).double() / 10
    return (weight * out["logprobs_t"]).sum() + ENTROPY_COEF * out["entropy"].sum()


def greedy(model, rows, patches, dtype, out, new=12):
    tokens, grids = rows[-1]
    prompt = len(tokens) - 5
    count = sum(h * w for _, h, w in grids)
    found, margins = tokens[:prompt], []
    with torch.no_grad():
        generated = model.generate(found[None], attention_mask=torch.ones_like(found)[None], do_sample=False,
                                   max_new_tokens=new, eos_token_id=None, pad_token_id=0,
                                   mm_token_type_ids=(found == IMAGE).int()[None],
                                   pixel_values=patches[-count:].to(dtype), image_grid_thw=torch.tensor(grids))[0]
        top = forward(model, generated, grids, patches[-count:], dtype)[prompt - 1:-1].topk(2)
    assert torch.equal(top.indices[:, 0], generated[prompt:]), "generate and the forward pass part"
    margin = (top.values[:, 0] - top.values[:, 1]).min().item()
    assert margin > 1e-3 and not (generated[prompt:] == IMAGE).any(), f"take another seed ({margin})"
    out["greedy"], out["prompt"] = generated, torch.tensor([prompt])


def make(name):
    config_class, model_class, seed, text, vision = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    config = getattr(transformers, config_class)(text_config=text, vision_config=vision, **IDS)
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config)
    randomise(model, generator, 1.0)
    directory = OUT / name
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    if name == "vision-qwen2_5_vl":
        as_old_files(directory)
    model, out, single = load(name, torch.float64), {}, {}
    rows = [pieces_of(row, generator) for row in ROWS]
    grids = [grid for _, of_row in rows for grid in of_row]
    width = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    patches = torch.randn((sum(h * w for _, h, w in grids), width), generator=generator)
    with torch.no_grad():
        seen = model.model.get_image_features(patches.double(), torch.tensor(grids))
    out["merged"] = torch.cat(list(seen.pooler_output))
    for i, rows_behind in enumerate(getattr(seen, "deepstack_features", None) or []):
        out[f"deep.{i}"] = torch.cat(list(rows_behind)) if isinstance(rows_behind, tuple) else rows_behind
    numbers(model, rows, patches, torch.float64, out).backward()
    for parameter, p in model.named_parameters():
        if p.grad is not None:
            out[f"grad.{parameter}"] = p.grad
    greedy(model, rows, patches, torch.float64, out)
    numbers(load(name, torch.float32), rows, patches, torch.float32, single)
    apart = (out["logprobs"] - single["logprobs"]).abs().max().item()
    assert apart < 1e-4, f"float32 and float64 part by {apart}"
    out = {k: v.detach().to(torch.float32 if v.is_floating_point() else torch.int32).contiguous()
           for k, v in out.items()}
    out["tokens"] = torch.cat([tokens for tokens, _ in rows]).int()
    out["cu_seqlens"] = torch.tensor([0] + [len(tokens) for tokens, _ in rows]).cumsum(0).int()
    out["grids"], out["patches"] = torch.tensor(grids).int(), patches
    out["images"] = torch.tensor([len(of_row) for _, of_row in rows]).int()
    save_file(out, OUT / f"{name}.safetensors")
    print(name, f"float32 and float64 part by {apart:.1e}")


def make_adapter(name):
    seed, of_model, out = 500 + MODELS[name][2], load_file(OUT / f"{name}.safetensors"), {}
    generator, directory = torch.Generator().manual_seed(seed), ADAPTERS / name
    shutil.rmtree(directory, ignore_errors=True)
    config = LoraConfig(task_type="CAUSAL_LM", **{"r": 2, "lora_alpha": 3, **TUNED[name]})
    adapted = get_peft_model(load(name, torch.float64), config, autocast_adapter_dtype=False)
    trained = {key: p for key, p in adapted.named_parameters() if p.requires_grad}
    for key, p in trained.items():
        noise = torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5
        p.data = (noise if "lora_A" in key else 0.5 * noise).double()
    plain = {key.replace(".default", ""): p for key, p in trained.items()}
    save_new(adapted, directory, plain, name)
    ends, grids = of_model["cu_seqlens"].tolist(), iter(of_model["grids"].tolist())
    rows = [(of_model["tokens"][a:b].long(), [tuple(next(grids)) for _ in range(count)])
            for a, b, count in zip(ends, ends[1:], of_model["images"].tolist())]
    out["loss"] = numbers(adapted.base_model.model.eval(), rows, of_model["patches"], torch.float64, out)
    out["loss"].backward()
    for key, p in plain.items():
        out[f"grad.{key.removeprefix('base_model.model.')}"] = p.grad
    out = {key: tensor.detach().float().contiguous() for key, tensor in out.items()}
    save_file(out, ADAPTERS / f"{name}.safetensors")
    for path in [ADAPTERS / f"{name}.safetensors", *directory.iterdir()]:
        path.chmod(0o644)
    print(name, len(plain), "matrices")


if __name__ == "__main__":
    with_exact_states()
    if sys.argv[1:2] == ["adapters"]:
        for name in sys.argv[2:] or TUNED:
            make_adapter(name)
    else:
        for name in sys.argv[1:] or MODELS:
            make(name)
