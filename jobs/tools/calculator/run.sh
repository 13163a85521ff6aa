#!/usr/bin/env bash
# Teaches a small model to use a calculator, in some minutes on this machine's CPU. After SFT, the model can use it if the
# question asks for it, but seldom does otherwise. GRPO then rewards only right answers. A second GRPO run without the
# calculator does not learn them.
# Usage: jobs/tools/calculator/run.sh [key.path=value ...]     (overrides for the GRPO jobs; FRESH=1 starts over)
# Run the same command again to resume. All results are in jobs/tools/calculator/work.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
. "$root/jobs/setup.sh"
enter "$root" "$here"

if [ ! -f work/base/model.safetensors ]; then
  say "questions, and a new model"
  python3 questions.py --out work/questions.jsonl
  shuf -n 4 --random-source=<(yes) work/questions.jsonl
  "$RLHF_HPC" tokenizer work/questions.jsonl --vocabulary 264 --out work/tokenizer --force
  "$RLHF_HPC" shard work/questions.jsonl --tokenizer work/tokenizer --out work/shards/questions --force \
    --response-key demonstration --label-key answer --split-field split
  "$RLHF_HPC" init --config ../../quickstart/model.json --tokenizer work/tokenizer --out work/base --force --seed 1
fi
if [ ! -f work/sft/export/model.safetensors ]; then
  say "supervised fine-tuning"
  launch 2 sft.toml
fi
say "GRPO with the calculator"
launch 2 ppo.toml "$@"
say "the same without it"
launch 2 ppo.toml job.name=no-calculator job.dir=work/no-tools 'reward.environment=[]' 'reward.rule="number"' 'rollout.stop=[]' "$@"
say "right answers to held-out questions with six digits"
for run in tools no-tools; do
  python3 - "work/$run/metrics.jsonl" "$run" <<'PY'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
rows = [row for row in rows if "eval_accuracy_greedy" in row]
print(f"{sys.argv[2]:9} " + "  ".join(f"step {row['step']}: {100 * row['eval_accuracy_greedy']:.1f} %" for row in rows))
PY
done
"$RLHF_HPC" samples work/tools --best 3
