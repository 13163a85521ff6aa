"""Makes the goldens of tests/parity: tiny random models of each family, and the results of transformers for them.

    python tests/golden/models.py [NAME...]  # all, or these; needs torch, transformers >= 5.24, safetensors

Writes tests/golden/models/NAME/ (a Hugging Face directory) and tests/golden/models/NAME.safetensors:
  tokens, cu_seqlens   packed rows
  logprobs             log p(next token) of every row that has one, temperature 1
  logprobs_t, entropy  the same and the entropy at temperature TEMPERATURE
  grad.PARAMETER       gradient of the loss below by autograd, under the parameter's name in the directory's files
  greedy               prompt and continuation by generate(do_sample=False)
  prompt               the length of that prompt, if it is not PROMPT
  values               (reward models) the score at every position
  scores               (reward models) scores of the sequence classifier for the rows as one padded batch
  aux_loss             (mixtures of experts with a softmax) the load-balancing loss of transformers over all rows
  aux.PARAMETER        its gradient, where it is not zero
Loss: sum_i weight_i * logprobs_t_i + ENTROPY_COEF * sum_i entropy_i, weight_i = ((7 i) mod 11 - 3) / 10. The loss of a
reward model is sum_i weight_i * value_i. All in float64, eager attention, each sequence alone. (The norms and the softmax
of transformers are float32 inside, whatever the model's dtype.) Each model must give the same log-probs in float32.
"""

import inspect
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from shapes import BASE, MODELS, PROMPT, setting
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

OUT = Path(__file__).parent / "models"
# One tensor for all experts.
STACKED = ("qwen3_moe-stacked", "qwen3_5_moe")
WITH_FURTHER_LAYERS = ("qwen3_5_moe", "qwen3_next")
TEMPERATURE = 0.7
ENTROPY_COEF = 0.05


def with_exact_states():
    """Lets transformers compute the states of the gated delta rule in the model's dtype, not in float32."""
    families = transformers.models
    for module in (families.qwen3_5.modeling_qwen3_5, families.qwen3_5_moe.modeling_qwen3_5_moe,
                   families.qwen3_next.modeling_qwen3_next):
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            source = inspect.getsource(inspect.unwrap(getattr(module, name))).replace("torch.float32", "query.dtype")
            exec(source[source.index("def "):], vars(module))


def randomise(model, generator, embed):
    """Weights large enough that the softmax is far from uniform, biases and norms that differ by element.

    A tied head prefers the token that was read. A smaller embedding and a last norm with factors of either sign leave
    the choice to the layers."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if embed < 1.0 and name.endswith("model.norm.weight"):
            p.data = p.data - 1.0 + noise
        elif "norm" in name or "ln_" in name:
            p.data = p.data + 0.2 * noise
        elif name.endswith("bias"):
            p.data = 0.3 * noise
        elif name.endswith("sinks"):
            p.data = 1.0 + noise
        elif name.endswith("A_log"):
            p.data = noise - 2.0
        elif "embed_tokens" in name:
            p.data = embed * noise
        else:
            p.data = noise * 1.2 / p.shape[-1] ** 0.5
    for _, b in corrections(model):
        b.data = 0.15 * torch.randn(b.shape, generator=generator)


def corrections(model):
    """The numbers by which routers choose experts, which are float32 in the files of any dtype."""
    return [(name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]


def as_transformers_4(path):
    """Rewrites config.json in the spelling of transformers 4."""
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    rope = text.pop("rope_parameters")
    if "full_attention" in rope:
        sliding, rope = rope["sliding_attention"], rope["full_attention"]
        if sliding["rope_theta"] != rope["rope_theta"]:
            text["rope_local_base_freq"] = sliding["rope_theta"]
    text["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        text["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if rope["rope_type"] == "longrope":
        rope["type"] = rope.pop("rope_type")
        rope.pop("original_max_position_embeddings")
    text["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    if text["model_type"] == "qwen3_next":
        text["full_attention_interval"] = text["layer_types"].index("full_attention") + 1
    text.pop("layer_types", None)
    text.pop("no_rope_layers", None)
    if "hidden_activation" in text:
        text["hidden_act"] = "gelu"  # Some files say so; hidden_activation counts.
    if text["model_type"] == "qwen3_moe":
        text["num_experts"] = text.pop("num_local_experts")
    if "_sliding_window_pattern" in text:
        text["sliding_window_pattern"] = text.pop("_sliding_window_pattern")
    if text.get("head_dim") == text["hidden_size"] // text["num_attention_heads"]:
        text.pop("head_dim")
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.46.0"
    path.write_text(json.dumps(config, indent=2) + "\n")


def rename_to_modules(path):
    """Gives the tensors the names of the modules; save_pretrained writes the old ones."""
    prefix = "language_model.model."
    tensors = {f"model.language_model.{name.removeprefix(prefix)}" if name.startswith(prefix) else f"model.{name}": t
               for name, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def add_further_layers(path, generator):
    """Adds tensors of layers that predict further tokens, as released files have them. Transformers skips them."""
    tensors = {"mtp.fc.weight": torch.randn((3, 5), generator=generator), "mtp.norm.weight": torch.ones(3).half()}
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


def dequantised(blocks, scales):
    """The matrices (experts, inputs, outputs) of MXFP4: groups of 32 inputs of an output with a power of two, two values in
    a byte, the lower half first."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([table, -table])
    values = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1).flatten(-2)
    values = values * 2.0 ** (scales.float() - 127)[..., None]
    return values.flatten(-2).transpose(1, 2).contiguous()


def as_released(directory, generator):
    """Gives the experts of gpt-oss random values in MXFP4, and config.json the keys of the first files: no rope, no alpha,
    no types of layers."""
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, shape, generator=generator).to(torch.uint8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key in ("layer_types", "swiglu_alpha"):
        config.pop(key)
    config |= {"rope_parameters": None, "experts_per_token": config["num_experts_per_tok"],
               "initial_context_length": 4096,
               "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
                                       "quant_method": "mxfp4"}}
    path.write_text(json.dumps(config, indent=2) + "\n")


def name_in_files(parameter, saved):
    """The name of a parameter in the directory's files, whose tensors are `saved`."""
    old = parameter.replace("model.language_model.", "language_model.model.")
    return next(name for name in (parameter, old, f"language_model.{parameter}") if name in saved)


def in_files(parameter, value, saved):
    """The parts of a parameter's value with their names in the directory's files, whose tensors are `saved`."""
    if f"{parameter}_blocks" in saved:
        yield parameter, value
        return
    if ".mlp.experts." not in parameter or parameter in saved:
        mixtral = parameter.replace(".mlp.gate.", ".block_sparse_moe.gate.")
        yield (mixtral if mixtral in saved else name_in_files(parameter, saved)), value
        return
    module, _, last = parameter.rpartition(".")
    old = module.replace(".mlp.", ".block_sparse_moe.")
    is_old = f"{old}.0.w1.weight" in saved
    for e, matrix in enumerate(value):
        parts = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}[last]
        for part, rows in zip(parts, matrix.chunk(len(parts))):
            numbered = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part]
            yield (f"{old}.{e}.{numbered}.weight" if is_old else f"{module}.{e}.{part}.weight"), rows


def language_model_numbers(model, rows, out, prompt=PROMPT, new=40):
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
    start = rows[-1][:prompt][None]
    with torch.no_grad():
        greedy = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=new,
                                eos_token_id=None, pad_token_id=0)[0]
        top = model(input_ids=greedy[None], use_cache=False).logits[0, prompt - 1:-1].topk(2)
    assert len(greedy) == prompt + new
    assert torch.equal(top.indices[:, 0], greedy[prompt:]), "generate and the forward pass part"
    margin = (top.values[:, 0] - top.values[:, 1]).min().item()
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
        # Padding that lies outside every window sees nothing, and is NaN in torch: then each row is scored alone.
        if out["scores"].isnan().any():
            out["scores"] = torch.cat([model(input_ids=row[None], use_cache=False).logits[:, 0] for row in rows])
    out["values"] = torch.cat([model.score(model.model(input_ids=row[None], use_cache=False)[0])[0, :, 0]
                               for row in rows])
    weight = ((torch.arange(len(out["values"])) * 7) % 11 - 3).double() / 10
    return (weight * out["values"]).sum()


def balance_loss(model, rows):
    """The load-balancing loss over the tokens of all rows together."""
    logits = [model(input_ids=row[None], use_cache=False, output_router_logits=True).router_logits for row in rows]
    joined = tuple(torch.cat(of_layer) for of_layer in zip(*logits))
    config = model.config.get_text_config()
    count = getattr(config, "num_local_experts", None) or config.num_experts
    chosen = config.num_experts_per_tok
    return sys.modules[type(model).__module__].load_balancing_loss_func(joined, count, chosen)


def config_of(name):
    """The configuration of a directory. The first files of Phi-3 say "su", which transformers 5.24 renames too late to
    find the original length."""
    fields = json.loads((OUT / name / "config.json").read_text().replace('"type": "su"', '"type": "longrope"'))
    return getattr(transformers, MODELS[name][0]).from_dict(fields)


def load(name, dtype):
    model_class = getattr(transformers, MODELS[name][1])
    config = config_of(name)
    config._experts_implementation = "eager"
    if name == "gpt_oss-mxfp4":
        config._attn_implementation = "eager"
        tensors = load_file(OUT / name / "model.safetensors")
        for blocks in [part for part in tensors if part.endswith("_blocks")]:
            matrix = blocks.removesuffix("_blocks")
            tensors[matrix] = dequantised(tensors.pop(blocks), tensors.pop(f"{matrix}_scales"))
        model = model_class(config)
        model.load_state_dict(tensors)
        return model.to(dtype).eval()
    return model_class.from_pretrained(OUT / name, config=config, attn_implementation="eager", dtype=dtype)


def save_model(name, generator):
    config_class, model_class, fields, dtype, shard, spelling = MODELS[name]
    if "text_config" in fields:
        fields = {**fields, "text_config": {**BASE, **fields["text_config"]}}
    else:
        fields = {**BASE, **fields}
    config = getattr(transformers, config_class)(**fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config)
    randomise(model, generator, setting(name, "embed"))
    exact = [b.clone() for _, b in corrections(model)]
    model.to(dtype)
    for (_, b), values in zip(corrections(model), exact):
        b.data = values
    directory = OUT / name
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory, save_original_format=name not in STACKED,
                          **({"max_shard_size": shard} if shard else {}))
    if spelling == 4:
        as_transformers_4(directory / "config.json")
    if name in WITH_FURTHER_LAYERS:
        add_further_layers(directory / "model.safetensors", generator)
    if name == "gpt_oss-mxfp4":
        as_released(directory, generator)
    if name == "gemma3":
        rename_to_modules(directory / "model.safetensors")


def make(name, seed):
    generator = torch.Generator().manual_seed(seed)
    save_model(name, generator)
    # What was saved is what is run: the spelling above is read by transformers too.
    model = load(name, torch.float64)
    lengths, prompt = setting(name, "lengths"), setting(name, "prompt")
    rows = [torch.randint(0, 131, (n,), generator=generator) for n in lengths]
    numbers, checked = value_numbers, "values"
    if not name.startswith("reward"):
        numbers, checked = partial(language_model_numbers, prompt=prompt, new=setting(name, "new")), "logprobs"
    out, single = {}, {}
    numbers(model, rows, out).backward()
    numbers(load(name, torch.float32), rows, single)
    apart = (out[checked] - single[checked]).abs().max().item()
    assert apart < 1e-4, f"float32 and float64 part by {apart}"
    saved = {key for file in (OUT / name).glob("*.safetensors") for key in load_file(file)}
    for parameter, p in model.named_parameters():
        if p.grad is not None:
            out.update({f"grad.{name}": part for name, part in in_files(parameter, p.grad, saved)})
    if hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func") and not name.startswith("reward"):
        model.zero_grad(set_to_none=True)
        out["aux_loss"] = balance_loss(model, rows)[None]
        out["aux_loss"].sum().backward()
        for parameter, p in model.named_parameters():
            if p.grad is not None and p.grad.any():
                out.update({f"aux.{part}": rows_of for part, rows_of in in_files(parameter, p.grad, saved) if rows_of.any()})
    out = {k: v.detach().to(torch.float32 if v.is_floating_point() else torch.int32).contiguous()
           for k, v in out.items()}
    out["tokens"] = torch.cat(rows).int()
    out["cu_seqlens"] = torch.tensor([0] + lengths).cumsum(0).int()
    if prompt != PROMPT:
        out["prompt"] = torch.tensor([prompt]).int()
    save_file(out, OUT / f"{name}.safetensors")
    if name == "phi3-short":
        # As the first files of Phi-3 do.
        path = OUT / name / "config.json"
        path.write_text(path.read_text().replace('"type": "longrope"', '"type": "su"'))


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
    with_exact_states()
    for number, name in enumerate(MODELS):
        if name in sys.argv[1:] or len(sys.argv) == 1:
            make(name, setting(name, "seed") or 100 + number)
    rope_frequencies()
