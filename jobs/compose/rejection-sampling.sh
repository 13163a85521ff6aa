#!/usr/bin/env bash
# Rejection sampling (RAFT, arXiv:2304.06767): fine-tunes a model on the best of its own responses, in several rounds.
# The last model is OUT/sft-ROUNDS/export.
# Usage: rejection-sampling.sh MODEL REWARD_MODEL PROMPTS.jsonl OUT [key.path=value ...]     (RANKS=2 ROUNDS=3 SAMPLES=4 TOKENS=256)
# The keys override sft.toml in this folder, for example data.chat_template=true or optim.actor.lr=1e-5.
# Run the same command again to resume.
set -euo pipefail
. "$(dirname "$0")/common.sh"
arguments 4 "$@"
model=$1 reward=$2 prompts=$3 out=$4
shift 4
mkdir -p "$out"
for round in $(seq "$rounds"); do
  sampled "$model" "$reward" "$prompts" "$round" "$out/scored-$round.jsonl"
  selected "$out/scored-$round.jsonl" "$out/best-$round.jsonl" --best 1
  say "round $round of $rounds: SFT on the best responses"
  launch "$ranks" "$here/sft.toml" model.actor="$model" data.prompts="$out/best-$round.jsonl" job.dir="$out/sft-$round" "$@"
  model=$out/sft-$round/export
done
say "the model: $model"
