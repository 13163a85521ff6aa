#!/usr/bin/env bash
# Samples several responses to each prompt and keeps the one that a reward model scores highest. Nothing is trained.
# OUT.jsonl contains the rows of PROMPTS.jsonl with response and reward.
# Usage: best-of-n.sh MODEL REWARD_MODEL PROMPTS.jsonl OUT.jsonl [data.chat_template=true]     (RANKS=2 SAMPLES=4 TOKENS=256)
# With data.chat_template=true, each prompt is a user message in the model's chat template.
set -euo pipefail
. "$(dirname "$0")/common.sh"
arguments 4 "$@"
sampled "$1" "$2" "$3" 0 "$4.scored"
selected "$4.scored" "$4" --best 1
rm "$4.scored" "$4.scored.inputs"
say "the best of $samples responses: $4"
