"""One training step: forward, cross-entropy, backward, clip, AdamW (fused). With bf16 everything is bf16.

With --lora-rank, only adapters of PEFT on all linear layers train, with alpha twice the rank."""

import torch

import peer

parser = peer.arguments(__doc__)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--tokens", type=int, default=256)
parser.add_argument("--lora-rank", type=int, default=0)
args = peer.start(parser)


def prepare(attention):
    model = peer.load(args, attention).train()
    if args.lora_rank:
        from peft import LoraConfig, get_peft_model
        config = LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear")
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    rows = torch.randint(3, model.config.vocab_size, (args.batch, args.tokens))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), fused=True)

    def work():
        model(rows, labels=rows, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return work


peer.report(args, "train_step", args.batch * args.tokens, prepare)
