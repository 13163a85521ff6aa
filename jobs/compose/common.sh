# shellcheck shell=bash
# Sourced by the scripts in this folder: finds the binary and defines their common functions.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
. "$root/jobs/setup.sh"
# Environment variables: ranks, rounds, responses per prompt, and the maximum tokens of a response.
ranks=${RANKS:-2} rounds=${ROUNDS:-3} samples=${SAMPLES:-4} tokens=${TOKENS:-256}

# Prints the comment at the top of the script, which describes it and its usage.
usage() {
  sed -n '2,/^set /{s/^# //p}' "$0" >&2
  exit 2
}

# arguments LEAST ARGUMENTS: prints the usage if there are fewer than LEAST arguments. The first three must be existing paths.
arguments() {
  local least=$1 path
  shift
  [ $# -ge "$least" ] || usage
  for path in "${@:1:3}"; do
    [ -e "$path" ] || { echo "error: $path does not exist" >&2; exit 2; }
  done
  binary "$root"
}

# sampled MODEL REWARD_MODEL PROMPTS SEED OUT: samples responses and scores them, unless OUT exists.
sampled() {
  [ ! -f "$5" ] || return 0
  say "sampling $samples responses to each prompt of $3 with $1, scoring them with $2"
  launch "$ranks" generate --model "$1" --input "$3" --samples "$samples" --max-new-tokens "$tokens" --seed "$4" > "$5.unscored"
  launch "$ranks" reward --model "$2" --input "$5.unscored" > "$5.partial"
  mv "$5.partial" "$5"
  rm "$5.unscored"
}

# selected SCORED OUT OPTIONS: writes the scored responses that `select` keeps.
selected() {
  local scored=$1 out=$2
  shift 2
  "$RLHF_HPC" select --input "$scored" "$@" > "$out.partial"
  mv "$out.partial" "$out"
}
