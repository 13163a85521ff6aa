# shellcheck shell=bash
# Sourced by the scripts beside it: the binary, and what they have in common.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
. "$root/jobs/setup.sh"
if [ -x "$root/bin/rlhf-hpc" ]; then RLHF_HPC=$root/bin/rlhf-hpc; else build "$root"; fi
# Ranks of the training jobs, responses to a prompt, and their longest length: RANKS, SAMPLES and TOKENS of the environment.
ranks=${RANKS:-2} samples=${SAMPLES:-4} tokens=${TOKENS:-256}

# sampled MODEL REWARD_MODEL PROMPTS SEED OUT: responses to the prompts with their rewards, once.
sampled() {
  [ ! -f "$5" ] || return 0
  "$RLHF_HPC" generate --model "$1" --input "$3" --samples "$samples" --max-new-tokens "$tokens" --seed "$4" |
    "$RLHF_HPC" reward --model "$2" --input - > "$5.partial"
  mv "$5.partial" "$5"
}

# selected OUT OPTIONS: what `select` takes of its standard input.
selected() {
  local out=$1
  shift
  "$RLHF_HPC" select "$@" > "$out.partial"
  mv "$out.partial" "$out"
}

usage() {
  sed -n 's/^# Usage: /usage: /p' "$0" >&2
  exit 2
}
