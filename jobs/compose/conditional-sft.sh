#!/usr/bin/env bash
# Conditional SFT (arXiv:2308.12050): every response is learned from behind a prompt that names its reward; asked for a high one, the
# model answers accordingly. The model is OUT/sft/export; ask it "PROMPT <rm_score>: 2.50 ", with a reward as high as the best of
# OUT/rows.jsonl.
# Usage: conditional-sft.sh MODEL REWARD_MODEL PROMPTS.jsonl OUT [key.path=value ...]     (RANKS=2 SAMPLES=4 TOKENS=256)
# The keys are those of sft.toml beside this script: optim.actor.lr=1e-5. TEMPLATE replaces '{input} <rm_score>: {reward} '.
set -euo pipefail
. "$(dirname "$0")/common.sh"
arguments 4 "$@"
model=$1 reward=$2 prompts=$3 out=$4
shift 4
mkdir -p "$out"
sampled "$model" "$reward" "$prompts" 0 "$out/scored.jsonl"
selected "$out/scored.jsonl" "$out/rows.jsonl" --template "${TEMPLATE:-{input\} <rm_score>: {reward\} }"
say "SFT on all of them, each behind its reward"
launch "$ranks" "$here/sft.toml" model.actor="$model" data.prompts="$out/rows.jsonl" job.dir="$out/sft" "$@"
say "the model: $out/sft/export"
