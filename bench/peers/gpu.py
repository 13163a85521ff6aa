"""PyTorch's matmul, attention, norms, log-softmax and AdamW on a GPU, next to ours with a record of `bench cuda`.

    python3 gpu.py [--ours RECORD] [--device cpu] [--small]

Prints a Markdown table. Workloads have the names of `bench cuda`. Times are from CUDA events around several calls, the
median of several rounds. A workload that fails is reported in its row, and the exit code is 1. `--small` on a CPU checks
that all of them run.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

ROUNDS = 7
# Bytes of inputs that are read in turn, so that no call finds them in the GPU's cache.
ROTATED_BYTES = 512 << 20

args = None


def n(real):
    return min(max(real // 32, 8), 64) if args.small else real


def batch_s(work, calls):
    if args.device != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - begin) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / calls


def seconds(work):
    """Median seconds of one call, in batches of 30 ms, after calls that warm up."""
    work()
    calls = 1 if args.small else max(1, int(0.03 / max(batch_s(work, 2), 1e-6)))
    batch_s(work, calls)
    return statistics.median(batch_s(work, calls) for _ in range(2 if args.small else ROUNDS))


def matrix(*shape, dtype=torch.bfloat16, **more):
    return torch.randn(*shape, device=args.device, dtype=dtype, **more)


def product(m, wide, k):
    """Name, seconds, FLOPs, bytes; weights are used in turn."""
    turns = 2 if args.small else -(-ROTATED_BYTES // (2 * wide * k))
    x, ws = matrix(m, k), [matrix(wide, k) for _ in range(turns)]
    turn = 0

    def work():
        nonlocal turn
        turn = (turn + 1) % turns
        F.linear(x, ws[turn])

    return f"product, {m} x {wide} x {k}", seconds(work), 2 * m * wide * k, 2 * (wide * k + m * (wide + k))


def copy():
    x = torch.rand(n(1 << 14), n(1 << 14), device=args.device)
    y = torch.empty_like(x)
    return f"copy of {x.numel() >> 18} MiB", seconds(lambda: y.copy_(x)), 0, 8 * x.numel()


def flash():
    """PyTorch's flash backend alone, where this release can choose one."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def heads_shared(q, k, v):
    """PyTorch's attention with shared key heads: like ours, or over repeated key heads in releases that cannot."""
    shared = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    try:
        shared(q, k, v)
        return shared, k, v
    except (TypeError, RuntimeError):
        k, v = (x.detach().repeat_interleave(q.shape[1] // x.shape[1], 1).requires_grad_() for x in (k, v))
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), k, v


def attention(backward):
    tokens, (heads, kv_heads), dim = n(8192), (4, 1) if args.small else (32, 8), 128
    q, k, v = (matrix(1, each, tokens, dim, requires_grad=True) for each in (heads, kv_heads, kv_heads))
    flops = 2 * heads * dim * tokens * tokens
    of = f"{tokens} tokens, {heads} heads of {dim} over {kv_heads}"
    with flash():
        attend, k, v = heads_shared(q, k, v)
        if not backward:
            with torch.no_grad():
                forward = seconds(lambda: attend(q, k, v))
            return f"attention forward, {of}", forward, flops, 4 * q.numel() + 4 * tokens * kv_heads * dim
        out = attend(q, k, v)
        slope = torch.randn_like(out)
        work = lambda: torch.autograd.grad(out, (q, k, v), slope, retain_graph=True)
        return f"attention backward, {of}", seconds(work), 2.5 * flops, 8 * q.numel() + 8 * tokens * kv_heads * dim


def log_softmax(dtype, name):
    rows, vocabulary = n(4096), n(32000)
    logits = matrix(rows, vocabulary, dtype=dtype)
    chosen = torch.randint(vocabulary, (rows, 1), device=args.device)
    work = lambda: F.log_softmax(logits, -1, dtype=torch.float32).gather(1, chosen)
    return f"log-softmax, {rows} x {vocabulary} {name}", seconds(work), 0, logits.numel() * logits.element_size()


def rmsnorm():
    rows, width = n(16384), n(4096)
    x, w = matrix(rows, width), matrix(width)
    if not hasattr(F, "rms_norm"):
        raise RuntimeError(f"torch {torch.__version__} has no rms_norm")
    return f"rmsnorm, {rows} x {width}", seconds(lambda: F.rms_norm(x, (width,), w, 1e-5)), 0, 4 * rows * width


def adamw():
    parameters = n(8192) ** 2
    weight = torch.nn.Parameter(torch.randn(parameters, device=args.device))
    weight.grad = torch.randn_like(weight)
    step = torch.optim.AdamW([weight], lr=1e-6, fused=True)
    # Weight and two moments are read and written, the gradient is read; ours writes bf16 weights, too.
    return f"adamw, {parameters} parameters", seconds(step.step), 0, 28 * parameters


def ours(path):
    """The seconds of the fastest mode for each workload of a record, and the mode."""
    best = {}
    if not path:
        return best
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            result = json.loads(line)
            name, mode = result["work"], ""
            for one in ("exact", "fast"):
                if f", {one}," in name:
                    name, mode = name.replace(f", {one}", ""), one
            if name not in best or result["seconds"] < best[name][0]:
                best[name] = (result["seconds"], mode)
    return best


def main():
    global args
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ours", help="a record of bench cuda")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    capability = torch.cuda.get_device_capability()[0] if args.device == "cuda" else 0
    print(f"torch {torch.__version__} with CUDA {torch.version.cuda} on {name}\n")
    print("| Work | PyTorch | TFLOP/s | GB/s | Ours | Ours / PyTorch, in speed | Target |\n|---|---|---|---|---|---|---|", flush=True)
    best, failures = ours(args.ours), 0
    works = [
        ("product", lambda: product(n(8192), n(8192), n(8192))),
        ("copy", copy),
        ("attention forward", lambda: attention(False)),
        ("attention backward", lambda: attention(True)),
        ("log-softmax f32", lambda: log_softmax(torch.float32, "f32")),
        ("log-softmax bf16", lambda: log_softmax(torch.bfloat16, "bf16")),
        ("rmsnorm", rmsnorm),
        ("adamw", adamw),
        ("product of one row", lambda: product(1, n(11008), n(4096))),
        ("product of many rows", lambda: product(n(8192), n(11008), n(4096))),
    ]
    for about, work in works:
        try:
            name, took, flops, moved = work()
        except Exception as error:  # noqa: BLE001 - one failure must not lose the others
            failures += 1
            print(f"| {about} | failed: {str(error).splitlines()[0][:150] if str(error) else type(error).__name__} | | | | | |", flush=True)
            continue
        finally:
            if args.device == "cuda":
                torch.cuda.empty_cache()
        mine, mode = best.get(name, (None, ""))
        shown = f"{1e3 * mine:.4f} ms{f', {mode}' if mode else ''}" if mine else "-"
        ratio = took / mine if mine else None
        target = ""
        # The target for GPUs newer than sm_80.
        if name.startswith("attention forward") and ratio and (capability >= 9 or args.small):
            verdict = "too small to judge" if args.small else "reached" if ratio >= 1 else "missed"
            target = f"target PyTorch's flash backend, measured {ratio:.0%} of its speed: {verdict}"
        rate = lambda value: f"{value:.1f}" if value >= 0.05 else "-"
        print(
            f"| {name} | {1e3 * took:.4f} ms | {rate(flops / took / 1e12)} | {rate(moved / took / 1e9)} | {shown} |"
            f" {f'{ratio:.0%}' if ratio else '-'} | {target} |",
            flush=True,
        )
    return 1 if failures else 0


sys.exit(main())
