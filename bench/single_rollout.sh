#!/usr/bin/env bash
# Compares one response per prompt with GRPO (8 responses to each of 64 prompts) on the calculator at equal sampled tokens:
# PPO with a critic (jobs/single-rollout.toml), and FlashREINFORCE without one. All learn from 512 responses per step.
# Usage: bench/single_rollout.sh [key.path=value ...]     (overrides for all jobs; FRESH=1 starts over)
# Run the same command again to resume. Results are in jobs/tools/calculator/work.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
here=$root/jobs/tools/calculator
. "$root/jobs/setup.sh"
enter "$root" "$here"
. ./prepare.sh

one="$root/jobs/single-rollout.toml"
seeds=${SEEDS:-1 2 3}
for seed in $seeds; do
  say "seed $seed"
  launch 2 ppo.toml job.name=grpo job.seed="$seed" job.dir="work/grpo-$seed" eval.every_steps=5 "$@"
  launch 2 "$one" job.seed="$seed" job.dir="work/single-$seed" eval.every_steps=5 "$@"
  # FlashREINFORCE makes one update of each batch.
  launch 2 "$one" job.name=flash job.seed="$seed" job.dir="work/flash-$seed" eval.every_steps=5 model.critic_freeze=[] \
    optim.critic.lr=9e-6 ppo.advantage=flash-reinforce ppo.loss=sequence_trust ppo.lambda_alpha=0.0 ppo.clip_low=0.2 \
    ppo.clip_high=0.2 ppo.value_clip=0.2 ppo.critic_epochs=0 ppo.minibatch_samples=512 "$@"
done
say "right answers to held-out questions with six digits, by sampled tokens"
python3 "$root/bench/single_rollout.py" "$here/work" $seeds
