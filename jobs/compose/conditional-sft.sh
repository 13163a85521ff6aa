#!/usr/bin/env bash
# Conditional SFT (arXiv:2308.12050): every response is learned from behind a prompt that names its reward; asked for a high one, the
# model answers accordingly. The model is OUT/sft/export; ask it "PROMPT <rm_score>: 5.00 ".
# Usage: conditional-sft.sh MODEL REWARD_MODEL PROMPTS.jsonl OUT [key.path=value ...]     (RANKS=2 SAMPLES=4 TOKENS=256)
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# -ge 4 ] || usage
model=$1 reward=$2 prompts=$3 out=$4
shift 4
mkdir -p "$out"
sampled "$model" "$reward" "$prompts" 0 "$out/scored.jsonl"
selected "$out/rows.jsonl" --template "${TEMPLATE:-{input\} <rm_score>: {reward\} }" < "$out/scored.jsonl"
launch "$ranks" "$here/sft.toml" model.actor="$model" data.prompts="$out/rows.jsonl" job.dir="$out/sft" "$@"
