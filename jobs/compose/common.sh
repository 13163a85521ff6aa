# shellcheck shell=bash
# Sourced by the scripts beside it: the binary, and what they have in common.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
. "$root/jobs/setup.sh"
# Ranks, rounds, responses to a prompt and their longest length, of the environment.
ranks=${RANKS:-2} rounds=${ROUNDS:-3} samples=${SAMPLES:-4} tokens=${TOKENS:-256}

# What the script does, and its usage, out of its own first lines.
usage() {
  sed -n '2,/^set /{s/^# //p}' "$0" >&2
  exit 2
}

# arguments LEAST ARGUMENTS: says how the script is used where there are fewer than LEAST, or a file of the first three is missing.
arguments() {
  local least=$1 path
  shift
  [ $# -ge "$least" ] || usage
  for path in "${@:1:3}"; do
    [ -e "$path" ] || { echo "error: $path does not exist" >&2; exit 2; }
  done
  binary "$root"
}

# sampled MODEL REWARD_MODEL PROMPTS SEED OUT: responses to the prompts with their rewards, once.
sampled() {
  [ ! -f "$5" ] || return 0
  say "$samples responses to each prompt of $3 by $1, scored by $2"
  launch "$ranks" generate --model "$1" --input "$3" --samples "$samples" --max-new-tokens "$tokens" --seed "$4" > "$5.drawn"
  launch "$ranks" reward --model "$2" --input "$5.drawn" > "$5.partial"
  mv "$5.partial" "$5"
  rm "$5.drawn"
}

# selected SCORED OUT OPTIONS: what `select` takes of the scored responses.
selected() {
  local scored=$1 out=$2
  shift 2
  "$RLHF_HPC" select --input "$scored" "$@" > "$out.partial"
  mv "$out.partial" "$out"
}
