#!/usr/bin/env bash
# Trains a small model from scratch on this machine's CPU. It makes a corpus of arithmetic questions and a tokenizer,
# fine-tunes a new model on noisy demonstrations, improves it with PPO against a rule, and compares both models.
# Usage: jobs/quickstart/run.sh [key.path=value ...]     (overrides for the PPO job; FRESH=1 starts over)
# MODEL=qwen3_5.json trains a model of that shape instead of model.json: layers with the gated delta rule. With
# MODEL=qwen3_moe.json layers have mixtures of experts.
# RANKS=4 jobs/quickstart/run.sh mesh.pipeline=4 trains on four pipeline stages, one for each layer.
# Run the same command again to resume. All results are in jobs/quickstart/work.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
. "$root/jobs/setup.sh"
enter "$root" "$here"

if [ ! -f work/shards/questions.idx ]; then
  say "a corpus, a tokenizer, shards"
  python3 corpus.py --rows 12000 --seed 1 --out work/arithmetic.jsonl
  shuf -n 4 --random-source=<(yes) work/arithmetic.jsonl
  "$RLHF_HPC" tokenizer work/arithmetic.jsonl --vocabulary 264 --out work/tokenizer --force
  "$RLHF_HPC" shard work/arithmetic.jsonl --tokenizer work/tokenizer --out work/shards/questions --force \
    --response-key demonstration --label-key answer --split-field split
fi
model=${MODEL:-model.json}
if [ -f work/model.json ] && ! cmp -s "$model" work/model.json; then
  echo "error: $here/work has the results of another model than $model; set FRESH=1 to replace them" >&2
  exit 2
fi
if [ ! -f work/base/model.safetensors ]; then
  say "a new model"
  cp "$model" work/model.json
  "$RLHF_HPC" init --config "$model" --tokenizer work/tokenizer --out work/base --force --seed 1
fi
if [ ! -f work/sft/export/model.safetensors ]; then
  say "supervised fine-tuning on noisy demonstrations"
  launch "${RANKS:-2}" sft.toml
fi
say "PPO with the right answer as reward"
launch "${RANKS:-2}" ppo.toml "$@"

say "the same questions before and after"
grep -m 8 '"split":"eval"' work/arithmetic.jsonl > work/ask.jsonl
for model in sft ppo; do
  "$RLHF_HPC" generate --model "work/$model/export" --input work/ask.jsonl --temperature 0 --max-new-tokens 32 \
    --no-chat-template > "work/$model.jsonl" 2> work/generate.log || { cat work/generate.log >&2; exit 1; }
done
python3 compare.py work/ask.jsonl work/sft.jsonl work/ppo.jsonl

say "what to try next, in $root"
program=${RLHF_HPC#"$root/"}
echo "  $program generate --model jobs/quickstart/work/ppo/export --no-chat-template --prompt '58+67='"
echo "  $program samples jobs/quickstart/work/ppo --worst 5"
echo "  $program jobs copy grpo"
