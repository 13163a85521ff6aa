#!/usr/bin/env bash
# Iterative DPO (arXiv:2405.07863): in each round the model samples responses, a reward model scores them, and DPO learns from
# the best and the worst response to each prompt. The next round starts from the new model, which is also its reference.
# The last model is OUT/dpo-ROUNDS/export.
# Usage: iterative-dpo.sh MODEL REWARD_MODEL PROMPTS.jsonl OUT [key.path=value ...]     (RANKS=2 ROUNDS=3 SAMPLES=4 TOKENS=256)
# The keys override dpo.toml in this folder, for example data.chat_template=true or optim.actor.lr=5e-7.
# Run the same command again to resume.
set -euo pipefail
. "$(dirname "$0")/common.sh"
arguments 4 "$@"
model=$1 reward=$2 prompts=$3 out=$4
shift 4
mkdir -p "$out"
for round in $(seq "$rounds"); do
  sampled "$model" "$reward" "$prompts" "$round" "$out/scored-$round.jsonl"
  selected "$out/scored-$round.jsonl" "$out/pairs-$round.jsonl" --pairs
  say "round $round of $rounds: DPO on the pairs"
  launch "$ranks" "$here/dpo.toml" model.actor="$model" data.prompts="$out/pairs-$round.jsonl" job.dir="$out/dpo-$round" "$@"
  model=$out/dpo-$round/export
done
say "the model: $model"
