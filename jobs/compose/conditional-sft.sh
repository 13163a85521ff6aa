#!/usr/bin/env bash
# Conditional SFT (arXiv:2308.12050): the model learns every response after a prompt that contains the response's reward. A
# prompt with a high reward then makes it give good responses. The model is OUT/sft/export. Prompt it with
# "PROMPT <rm_score>: 2.50 ", where the reward is as high as the best ones in OUT/rows.jsonl.
# Usage: conditional-sft.sh MODEL REWARD_MODEL PROMPTS.jsonl OUT [key.path=value ...]     (RANKS=2 SAMPLES=4 TOKENS=256)
# The keys override sft.toml in this folder, for example data.chat_template=true or optim.actor.lr=1e-5.
# TEMPLATE replaces '{input} <rm_score>: {reward} '.
set -euo pipefail
. "$(dirname "$0")/common.sh"
arguments 4 "$@"
model=$1 reward=$2 prompts=$3 out=$4
shift 4
mkdir -p "$out"
sampled "$model" "$reward" "$prompts" 0 "$out/scored.jsonl"
selected "$out/scored.jsonl" "$out/rows.jsonl" --template "${TEMPLATE:-{input\} <rm_score>: {reward\} }"
say "SFT on all responses, each after its reward"
launch "$ranks" "$here/sft.toml" model.actor="$model" data.prompts="$out/rows.jsonl" job.dir="$out/sft" "$@"
say "the model: $out/sft/export"
