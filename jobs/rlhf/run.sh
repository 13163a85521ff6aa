#!/usr/bin/env bash
# Runs the whole RLHF pipeline on this machine's CPU, in about ten minutes:
#   SFT: a small model learns from noisy demonstrations.
#   reward model: learns from pairs of responses.
#   PPO: learns from the reward model alone.
#   DPO, IPO, SimPO, KTO: learn from the pairs directly.
#   distillation: a student learns from the PPO model.
#   process reward model: learns which steps are right.
# The rule that knows the right answers only measures.
# Usage: jobs/rlhf/run.sh     (FRESH=1 starts over)
# Run the same command again to resume. All results are in jobs/rlhf/work.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
. "$root/jobs/setup.sh"
enter "$root" "$here"
quickstart=../quickstart

# job NAME JOB.toml [key.path=value ...]: runs the job in work/NAME unless it is finished.
job() {
  local name=$1 file=$2
  shift 2
  [ -f "work/$name/export/model.safetensors" ] || launch 2 "$file" job.dir="work/$name" "$@"
}

if [ ! -f work/shards/questions.idx ]; then
  say "questions, demonstrations, preferences"
  python3 $quickstart/corpus.py --rows 24000 --seed 1 --out work/arithmetic.jsonl
  python3 pairs.py work/arithmetic.jsonl --out work
  shuf -n 3 --random-source=<(yes) work/pairs.jsonl
  "$RLHF_HPC" tokenizer work/arithmetic.jsonl --vocabulary 264 --out work/tokenizer --force
  "$RLHF_HPC" init --config $quickstart/model.json --tokenizer work/tokenizer --out work/base --force --seed 1
  "$RLHF_HPC" shard work/arithmetic.jsonl --tokenizer work/tokenizer --out work/shards/questions --force \
    --response-key demonstration --label-key answer --split-field split
fi
say "supervised fine-tuning on noisy demonstrations"
job sft $quickstart/sft.toml model.actor=work/base data.prompts=work/shards/questions sft.epochs=5
say "a reward model from the pairs"
job rm reward-model.toml
say "PPO against the reward model"
job ppo ppo.toml
say "the same with a weak KL penalty: over-optimization"
job ppo-free ppo.toml ppo.kl_coef=0.1 job.steps=40
say "DPO, IPO, SimPO and KTO"
job dpo dpo.toml
job ipo dpo.toml dpo.loss=ipo dpo.nll_coef=1 optim.actor.lr=1e-4
job simpo dpo.toml dpo.loss=simpo dpo.beta=10 dpo.nll_coef=1 optim.actor.lr=1e-4
job kto kto.toml
say "on-policy distillation from the PPO model"
job distill distill.toml
say "a process reward model"
job step-reward step-reward.toml

say "greedy responses to held-out questions"
grep '"split":"eval"' work/arithmetic.jsonl > work/ask.jsonl
for model in sft ppo ppo-free dpo ipo simpo kto distill; do
  "$RLHF_HPC" generate --model "work/$model/export" --input work/ask.jsonl --temperature 0 --max-new-tokens 32 \
    > "work/$model.jsonl" 2> work/generate.log || { cat work/generate.log >&2; exit 1; }
done
python3 results.py work
"$RLHF_HPC" report work/ppo work/ppo-free --out work/report.html
