#!/usr/bin/env bash
# Answers each prompt with the best of several responses, as a reward model sees them: JSON lines with prompt, response and reward.
# Usage: best-of-n.sh MODEL REWARD_MODEL PROMPTS.jsonl OUT.jsonl     (SAMPLES=4 TOKENS=256)
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# = 4 ] || usage
sampled "$1" "$2" "$3" 0 "$4.scored"
selected "$4" --best 1 < "$4.scored"
rm "$4.scored"
