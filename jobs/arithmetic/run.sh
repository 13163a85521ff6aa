#!/usr/bin/env bash
# Teaches a public instruct model to do two-step arithmetic, on a CPU: makes questions, plans the job, trains by GRPO, exports, and
# compares held-out answers before and after.
# Usage: jobs/arithmetic/run.sh MODEL_DIR [key.path=value ...]     (overrides for the job; FRESH=1 starts over)
# Run it again to resume. All results are in jobs/arithmetic/work.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
if [ $# = 0 ] || [ ! -f "$1/config.json" ]; then
  echo "usage: jobs/arithmetic/run.sh MODEL_DIR [key.path=value ...]" >&2
  echo "MODEL_DIR is a Hugging Face directory of an instruct model with a chat template, for example Qwen2.5-Coder-0.5B-Instruct" >&2
  exit 2
fi
model=$(realpath "$1")
shift
. "$root/jobs/setup.sh"
enter "$root" "$here"

say "questions"
python3 rows.py --out work/rows.jsonl
head -n 2 work/rows.jsonl
say "the plan"
"$RLHF_HPC" plan job.toml model.actor="$model" "$@" --response-tokens 48
say "GRPO"
"$RLHF_HPC" job.toml model.actor="$model" "$@"

say "held-out questions before and after"
python3 compare.py work/run
