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
# If data.chat_template=true is among the others, prompts go through the chat template.
arguments() {
  local least=$1 path argument
  shift
  [ $# -ge "$least" ] || usage
  for path in "${@:1:3}"; do
    [ -e "$path" ] || { echo "error: $path does not exist" >&2; exit 2; }
  done
  asking=()
  for argument in "${@:$((least + 1))}"; do
    [ "$argument" != data.chat_template=true ] || asking=(--chat-template)
  done
  binary "$root"
}

# inputs ARGS: the arguments, and a checksum of each file that they name, also in folders.
inputs() {
  local argument
  printf '%s\n' "$@"
  for argument in "$@"; do
    [ ! -e "$argument" ] || find -L "$argument" -type f -exec cksum {} + | LC_ALL=C sort
  done
}

# sampled MODEL REWARD_MODEL PROMPTS SEED OUT: samples responses and scores them, unless OUT has them. OUT.inputs says what they
# were made from. Responses of other inputs are not reused.
sampled() {
  local sampling=(--model "$1" --input "$3" --samples "$samples" --max-new-tokens "$tokens" --seed "$4" ${asking[@]+"${asking[@]}"})
  local scoring=(--model "$2") made
  made=$(inputs "${sampling[@]}" "${scoring[@]}")
  if [ -f "$5" ]; then
    [ "$made" != "$(cat "$5.inputs" 2>/dev/null)" ] || return 0
    say "$5 has responses of other models, prompts or settings, and is made again"
    rm -f "$5" "$5.inputs"
  fi
  say "sampling $samples responses to each prompt of $3 with $1, scoring them with $2"
  launch "$ranks" generate "${sampling[@]}" > "$5.unscored"
  launch "$ranks" reward "${scoring[@]}" --input "$5.unscored" > "$5.partial"
  printf '%s\n' "$made" > "$5.inputs"
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
