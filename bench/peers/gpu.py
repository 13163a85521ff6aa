"""The peaks of a GPU (a large matmul, a large copy) and PyTorch's attention, log-softmax, matmul and AdamW beside them.

Prints a table. Times are of CUDA events around several calls each, the median of several rounds.
"""

import statistics

import torch
import torch.nn.functional as F

DEVICE = "cuda"


def seconds(work, calls=5, rounds=7):
    """Median seconds of one call, after calls that warm up."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / calls)
    return statistics.median(times)


def matrix(rows, columns):
    return torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)


def matmul_flops(m, n, k):
    x, w = matrix(m, k), matrix(n, k)
    return 2 * m * n * k / seconds(lambda: F.linear(x, w))


def copy_bytes():
    x = torch.empty(1 << 30, device=DEVICE, dtype=torch.uint8)
    y = torch.empty_like(x)
    return 2 * x.numel() / seconds(lambda: y.copy_(x))


def attention(tokens, heads, kv_heads, dim):
    """FLOPs a second, forward and backward, counting the causal half."""
    q = torch.randn(1, heads, tokens, dim, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(1, kv_heads, tokens, dim, device=DEVICE, dtype=torch.bfloat16).repeat_interleave(heads // kv_heads, 1)
        for _ in range(2)
    )
    k.requires_grad_(), v.requires_grad_()
    flops = 4 * heads * dim * tokens * tokens / 2
    forward = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)
    backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
    return flops / forward, 2.5 * flops / backward


def log_softmax(rows, vocabulary):
    logits = matrix(rows, vocabulary)
    chosen = torch.randint(vocabulary, (rows, 1), device=DEVICE)
    return logits.numel() * 2 / seconds(lambda: F.log_softmax(logits, -1, dtype=torch.float32).gather(1, chosen))


def adamw(parameters):
    weight = torch.nn.Parameter(torch.randn(parameters, device=DEVICE))
    weight.grad = torch.randn_like(weight)
    step = torch.optim.AdamW([weight], lr=1e-4, fused=True)
    # Weight and two moments are read and written, the gradient is read.
    return parameters * 28 / seconds(step.step)


def decode(weight_rows, weight_columns):
    """Bytes of weights a second where one row is multiplied by a matrix."""
    x, w = matrix(1, weight_columns), matrix(weight_rows, weight_columns)
    return w.numel() * 2 / seconds(lambda: F.linear(x, w), calls=20)


def main():
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}\n")
    flops, memory = matmul_flops(8192, 8192, 8192), copy_bytes()
    rows = [("matmul 8192 x 8192 x 8192, bf16: the peak", flops, "TFLOP/s", flops), ("copy of 1 GiB: the peak", memory, "GB/s", memory)]
    forward, backward = attention(8192, 32, 8, 128)
    rows += [
        ("attention forward, 8192 tokens, 32 heads of 128, causal", forward, "TFLOP/s", flops),
        ("attention backward", backward, "TFLOP/s", flops),
        ("matmul 2048 x 4096 x 4096", matmul_flops(2048, 4096, 4096), "TFLOP/s", flops),
        ("matmul 1 x 11008 x 4096, bytes of weights", decode(11008, 4096), "GB/s", memory),
        ("log-softmax and choice, 4096 x 128256 bf16, bytes of logits once", log_softmax(4096, 128256), "GB/s", memory),
        ("AdamW fused, 256 Mi f32 parameters", adamw(1 << 28), "GB/s", memory),
    ]
    print("| PyTorch | reached | share of the peak |\n|---|---|---|")
    for name, value, unit, peak in rows:
        scale = 1e12 if unit == "TFLOP/s" else 1e9
        print(f"| {name} | {value / scale:.1f} {unit} | {value / peak:.0%} |", flush=True)


main()
