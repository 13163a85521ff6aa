#!/usr/bin/env bash
# Trains a model on GSM8K: plans the job, trains it, and compares held-out answers before and after.
# Usage: jobs/gsm8k/run.sh MODEL [ROWS] [key.path=value ...]
#   MODEL  a Hugging Face directory of an instruct model, or its name on the Hub if the local cache has it
#   ROWS   rows of openai/gsm8k (question, answer) or those of verl's examples (prompt, reward_model.ground_truth), unchanged:
#          a file (with train.parquet, test.parquet next to it is held out), a folder, or hf://openai/gsm8k/main.
#          Without it, word problems of the same form are made.
# JOB=grpo (the default), ppo, or cpu, which is GRPO with adapters and small batches. RANKS=8 starts 8 ranks. FRESH=1 starts over.
# Run it again to resume. All results are in jobs/gsm8k/work.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
if [ $# = 0 ] || [ ! -f "$here/${JOB:=grpo}.toml" ]; then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
fi
path() { if [ -e "$1" ]; then realpath "$1"; else echo "$1"; fi; }
model=$(path "$1")
shift
rows=
if [ $# != 0 ] && [[ $1 != *=* ]]; then
  rows=$(path "$1")
  shift
fi
. "$root/jobs/setup.sh"
enter "$root" "$here"

if [ -z "$rows" ]; then
  say "word problems in the form of GSM8K, because no rows were named"
  python3 rows.py --out work/rows
  head -n 1 work/rows/train.jsonl
  rows=$here/work/rows
fi
keys=("model.actor=$model" "data.prompts=$rows" "job.dir=work/$JOB")
# The names of columns are plain text in Parquet, too.
if [ -e "$rows" ] && grep -raqm 1 ground_truth "$rows"; then
  keys+=(data.prompt_key=prompt data.label_key=reward_model.ground_truth)
fi
if [ -f "$rows" ]; then
  held=$(dirname "$rows")/$(basename "$rows" | sed s/train/test/)
  if [ "$held" != "$rows" ] && [ -f "$held" ]; then
    keys+=(data.split.by=file "data.split.eval_files=$held")
  else
    keys+=(data.split.by=ratio)
  fi
fi
say "the plan"
"$RLHF_HPC" plan "$JOB.toml" "${keys[@]}" "$@"
say "training"
if [ "${RANKS:-1}" = 1 ]; then
  "$RLHF_HPC" "$JOB.toml" "${keys[@]}" "$@"
else
  launch "$RANKS" "$JOB.toml" "${keys[@]}" "$@"
fi
say "held-out questions before and after"
python3 ../arithmetic/compare.py "work/$JOB"
