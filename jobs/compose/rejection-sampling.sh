#!/usr/bin/env bash
# Rejection sampling (RAFT, arXiv:2304.06767): fine-tunes a model on the best of its own responses, round after round. The last model is
# OUT/sft-ROUNDS/export.
# Usage: rejection-sampling.sh MODEL REWARD_MODEL PROMPTS.jsonl OUT [ROUNDS] [key.path=value ...]     (RANKS=2 SAMPLES=4 TOKENS=256)
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# -ge 4 ] || usage
model=$1 reward=$2 prompts=$3 out=$4 rounds=${5:-2}
shift $(($# < 5 ? 4 : 5))
mkdir -p "$out"
for round in $(seq "$rounds"); do
  sampled "$model" "$reward" "$prompts" "$round" "$out/scored-$round.jsonl"
  selected "$out/best-$round.jsonl" --best 1 < "$out/scored-$round.jsonl"
  launch "$ranks" "$here/sft.toml" model.actor="$model" data.prompts="$out/best-$round.jsonl" job.dir="$out/sft-$round" "$@"
  model=$out/sft-$round/export
done
