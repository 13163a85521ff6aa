"""transformers.generate: a batch of prompts, all responses of full length. Counts new tokens."""

import torch

import peer

parser = peer.arguments(__doc__)
parser.add_argument("--mode", choices=["greedy", "sampling"], default="sampling")
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--prompt-tokens", type=int, default=64)
parser.add_argument("--new-tokens", type=int, default=128)
args = peer.start(parser)


def prepare(attention):
    model = peer.load(args, attention).eval()
    prompts = torch.randint(3, model.config.vocab_size, (args.batch, args.prompt_tokens))
    # top_k = 0 turns off the default filter of generate.
    mode = dict(do_sample=True, top_k=0) if args.mode == "sampling" else dict(do_sample=False)
    mask = torch.ones_like(prompts)

    @torch.inference_mode()
    def work():
        rows = model.generate(prompts, attention_mask=mask, max_new_tokens=args.new_tokens, use_cache=True, **mode)
        assert rows.shape[1] == args.prompt_tokens + args.new_tokens

    return work


peer.report(args, f"generate_{args.mode}", args.batch * args.new_tokens, prepare)
