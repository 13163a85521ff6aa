#!/usr/bin/env bash
# Iterative DPO (arXiv:2405.07863): the model answers, a reward model compares its answers, DPO learns from the best and the worst of
# each prompt, and the next round begins with what was learned, which is its reference, too. The last model is OUT/dpo-ROUNDS/export.
# Usage: iterative-dpo.sh MODEL REWARD_MODEL PROMPTS.jsonl OUT [ROUNDS] [key.path=value ...]     (RANKS=2 SAMPLES=4 TOKENS=256)
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# -ge 4 ] || usage
model=$1 reward=$2 prompts=$3 out=$4 rounds=${5:-3}
shift $(($# < 5 ? 4 : 5))
mkdir -p "$out"
for round in $(seq "$rounds"); do
  sampled "$model" "$reward" "$prompts" "$round" "$out/scored-$round.jsonl"
  selected "$out/pairs-$round.jsonl" --pairs < "$out/scored-$round.jsonl"
  launch "$ranks" "$here/dpo.toml" model.actor="$model" data.prompts="$out/pairs-$round.jsonl" job.dir="$out/dpo-$round" "$@"
  model=$out/dpo-$round/export
done
