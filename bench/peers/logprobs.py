"""Log-probabilities of given tokens from hidden states: log_softmax(hidden @ W^T) and gather.

All tokens at once and in chunks of several sizes; the result is the fastest that fits in memory. With --model, W is the
head of that model.
"""

import json

import torch

import peer

parser = peer.arguments(__doc__, model_required=False)
parser.add_argument("--tokens", type=int, default=4096)
parser.add_argument("--hidden", type=int, default=512)
parser.add_argument("--vocabulary", type=int, default=151936)
parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256, 1024, 4096])
args = peer.start(parser)

if args.model:
    weight = peer.load(args, "eager").get_output_embeddings().weight.detach()
else:
    weight = (torch.randn(args.vocabulary, args.hidden) * 0.02).to(peer.DTYPES[args.dtype])
hidden = torch.randn(args.tokens, weight.shape[1]).to(weight.dtype)
tokens = torch.randint(weight.shape[0], (args.tokens, 1))


def work(chunk):
    @torch.inference_mode()
    def run():
        for rows, picked in zip(hidden.split(chunk), tokens.split(chunk)):
            torch.log_softmax((rows @ weight.T).float(), dim=-1).gather(1, picked)

    return run


seconds = {chunk: peer.median_s(work(chunk), args.repeats) for chunk in args.chunks}
chunk = min(seconds, key=seconds.get)
line = {"work": "logprobs", "median_s": seconds[chunk], "tokens_per_s": args.tokens / seconds[chunk]}
line |= {"dtype": args.dtype, "threads": args.threads, "repeats": args.repeats, "chunk": chunk}
print(json.dumps(line | {"by_chunk_s": seconds, "torch": torch.__version__}))
