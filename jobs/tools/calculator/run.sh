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
. ./prepare.sh

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
