"""One PPO step in plain torch: rollout, reference and value forward, GAE, one epoch of clipped losses, two AdamW.

The log-probabilities of sampling come from the logits that generate computes anyway, and the head is only applied to
response positions, so nothing is computed twice or for nothing.
"""

import torch
import torch.nn.functional as F
from transformers import AutoModel

import peer

parser = peer.arguments(__doc__)
parser.add_argument("--prompts", type=int, default=32)
parser.add_argument("--prompt-tokens", type=int, default=32)
parser.add_argument("--new-tokens", type=int, default=64)
args = peer.start(parser)
P, N = args.prompt_tokens, args.new_tokens


def token_logprobs(logits, tokens):
    """log p(token) of logits (B, N, V) at tokens (B, N)."""
    return -F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)


def response_logprobs(model, rows):
    logits = model(rows, use_cache=False, logits_to_keep=N + 1).logits
    return token_logprobs(logits[:, :-1], rows[:, P:])


class Critic(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        dtype = peer.DTYPES[args.dtype]
        self.body = AutoModel.from_pretrained(args.model, dtype=dtype, attn_implementation=attention)
        self.score = torch.nn.Linear(self.body.config.hidden_size, 1, bias=False, dtype=dtype)

    def forward(self, rows):
        hidden = self.body(rows, use_cache=False).last_hidden_state
        return self.score(hidden[:, P - 1 : -1]).squeeze(-1).float()


def gae(rewards, values, gamma=1.0, lam=0.95):
    advantages = torch.empty_like(rewards)
    following = torch.zeros(len(rewards))
    for t in reversed(range(N)):
        next_value = values[:, t + 1] if t + 1 < N else 0.0
        following = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * following
        advantages[:, t] = following
    return advantages, advantages + values


def update(optimizer, model, loss):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def prepare(attention):
    actor, reference, critic = peer.load(args, attention), peer.load(args, attention), Critic(attention)
    reference.requires_grad_(False)
    actor_optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=9e-6, betas=(0.9, 0.95), fused=True)
    prompts = torch.randint(3, actor.config.vocab_size, (args.prompts, P))
    mask = torch.ones_like(prompts)
    keywords = dict(max_new_tokens=N, do_sample=True, top_k=0, output_logits=True, return_dict_in_generate=True)

    def work():
        with torch.no_grad():
            rollout = actor.generate(prompts, attention_mask=mask, **keywords)
            rows = rollout.sequences.clone()
            old = token_logprobs(torch.stack(rollout.logits, 1), rows[:, P:])
            ref, old_values = response_logprobs(reference, rows), critic(rows)
            rewards = -0.01 * (old - ref)
            rewards[:, -1] += (rows[:, P:] % 2).float().mean(1)
            advantages, returns = gae(rewards, old_values)
            advantages = (advantages - advantages.mean()) / advantages.std().clamp_min(1e-8)
        ratio = (response_logprobs(actor, rows) - old).exp()
        policy_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        update(actor_optimizer, actor, policy_loss)
        values = critic(rows)
        clipped = old_values + (values - old_values).clamp(-0.2, 0.2)
        value_loss = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()
        update(critic_optimizer, critic, value_loss)

    return work


peer.report(args, "ppo_step", args.prompts * (P + N), prepare)
