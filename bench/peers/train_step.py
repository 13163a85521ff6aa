"""One training step: forward, cross-entropy, backward, clip, AdamW (fused). With bf16 everything is bf16."""

import torch

import peer

parser = peer.arguments(__doc__)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--tokens", type=int, default=256)
args = peer.start(parser)


def prepare(attention):
    model = peer.load(args, attention).train()
    rows = torch.randint(3, model.config.vocab_size, (args.batch, args.tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)

    def work():
        model(rows, labels=rows, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return work


peer.report(args, "train_step", args.batch * args.tokens, prepare)
