#!/usr/bin/env bash
# Trains a small vision-language model from scratch on this machine's CPU. It makes images of shapes, fine-tunes a new model
# of Qwen3-VL's shape on demonstrations that are mostly wrong, and improves it with GRPO against the right count: first with
# the vision tower as fine-tuning left it, then with the tower trained, too.
# Usage: jobs/vision/run.sh [key.path=value ...]     (overrides for the GRPO jobs; FRESH=1 starts over)
# Run the same command again to resume. All results are in jobs/vision/work.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
. "$root/jobs/setup.sh"
enter "$root" "$here"

if [ ! -f work/rows.jsonl ]; then
  say "images of shapes, a tokenizer"
  python3 shapes.py --rows 4000 --held-out 400 --seed 1 --out work
  echo 'How many shapes?' > work/words.txt
  "$RLHF_HPC" tokenizer work/words.txt --vocabulary 280 --out work/tokenizer --force
  python3 model.py work/tokenizer
fi
if [ ! -f work/base/model.safetensors ]; then
  say "a new model"
  "$RLHF_HPC" init --config work/tokenizer/config.json --tokenizer work/tokenizer --out work/base --force --seed 1
fi
if [ ! -f work/sft/export/model.safetensors ]; then
  say "supervised fine-tuning on demonstrations that are mostly wrong"
  launch 2 sft.toml
fi
say "GRPO with a frozen tower"
launch 2 grpo.toml "$@"
say "GRPO with a trained tower"
launch 2 grpo.toml job.dir=work/grpo-tower model.vision=train "$@"

say "what to try next, in $root"
program=${RLHF_HPC#"$root/"}
echo "  $program chat --model jobs/vision/work/grpo/export --image jobs/vision/work/images/04000.png"
echo "  $program samples jobs/vision/work/grpo --worst 5"
