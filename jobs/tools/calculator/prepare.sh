# shellcheck shell=bash
# Sourced by run.sh and by bench/single_rollout.sh, in the folder of this file. It makes questions, and fine-tunes the model
# from which the jobs start.

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
