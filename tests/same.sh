#!/usr/bin/env bash
# Checks if two builds are bit-identical on this machine. Prints each job, its hash, and `same` or `DIFFERENT`.
#
#   tests/same.sh OLD [NEW]      two rlhf-hpc binaries; NEW is target/release/rlhf-hpc if left out
#
# Jobs: a short quickstart (SFT and PPO, 1 and 2 ranks), small jobs (estimators, ZeRO 0-3, tensor, sequence, placement,
# bf16, offload), generate and logprobs on the golden models. LONG=1: the whole quickstart. Exits with 1 if any differ.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -ge 1 ] || { sed -n 2,7p "$0" >&2; exit 2; }
old=$(realpath "$1") new=$(realpath "${2:-$root/target/release/rlhf-hpc}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMPI_MCA_mpi_yield_when_idle=1
sft_steps=${LONG:+0} ppo_steps=${LONG:+150}

launch() { # RANKS ARGS...
  local flags=(--oversubscribe --bind-to none -n "$1")
  [ "$(id -u)" != 0 ] || flags+=(--allow-run-as-root)
  mpirun "${flags[@]}" "$bin" "${@:2}" >>"$log" 2>&1
}

hash_of() { # the export of a job
  sha256sum "$1/export/model.safetensors" 2>/dev/null | cut -c1-16
}

job() { # NAME RANKS FILE SETTINGS...
  local name=$1 ranks=$2 file=$3
  launch "$ranks" "$file" "${@:4}" "job.dir=work/$name" "job.device=cpu" || echo "$name: failed" >>"$log"
  echo "$name $(hash_of "work/$name" | grep . || echo none)"
}

small() { # NAME RANKS SETTINGS...: two steps of PPO on the quickstart's model
  job "$1" "$2" ppo.toml job.steps=2 model.actor=work/sft-1/export rollout.prompts_per_step=16 rollout.samples_per_prompt=2 \
    ppo.minibatch_samples=16 eval.every_steps=0 'reward.rule={ kind = "regex", pattern = "[2468]$" }' "${@:3}"
}

all() {
  mkdir -p work
  python3 "$root/jobs/quickstart/corpus.py" --rows 3000 --seed 1 --out work/arithmetic.jsonl >>"$log" 2>&1
  "$bin" tokenizer work/arithmetic.jsonl --vocabulary 264 --out work/tokenizer >>"$log" 2>&1
  "$bin" shard work/arithmetic.jsonl --tokenizer work/tokenizer --out work/shards/questions \
    --response-key demonstration --label-key answer --split-field split >>"$log" 2>&1
  "$bin" init --config model.json --tokenizer work/tokenizer --out work/base --seed 1 >>"$log" 2>&1
  for ranks in 1 2; do
    job "sft-$ranks" $ranks sft.toml job.steps="${sft_steps:-30}"
    job "ppo-$ranks" $ranks ppo.toml job.steps="${ppo_steps:-3}" model.actor="work/sft-$ranks/export" eval.every_steps=2
  done
  small grpo-zero0 2 mesh.zero=0 ppo.advantage=grpo ppo.kl_in=loss ppo.kl_estimator=k3
  small rloo-zero1 2 mesh.zero=1 ppo.advantage=rloo ppo.loss=gspo
  small reinforce-zero2 2 mesh.zero=2 ppo.advantage=reinforce++ ppo.entropy_coef=0.01
  small baseline-zero3 2 mesh.zero=3 ppo.advantage=reinforce++-baseline ppo.loss=cispo
  small dr-grpo-tensor 2 mesh.tensor=2 ppo.advantage=dr-grpo ppo.aggregation=sequence_sum_fixed
  small gae-sequence 2 mesh.sequence=2
  small gae-fixed-order 2 gradient.order=fixed gradient.chunks=4
  small gae-placement 2 'mesh.placement=[{ roles = ["actor", "reference"], ranks = "0..1" }, { roles = ["critic", "reward"], ranks = "1..2" }]'
  small gae-bf16 2 model.dtype=bf16 rollout.top_p=0.9 ppo.correction=tis
  small gae-offload 2 'mesh.offload=["optimizer", "roles"]' ppo.epochs=2
  job sft-tensor-zero3 4 sft.toml job.steps=3 mesh.tensor=2 mesh.zero=3 eval.every_steps=0
  for model in llama2 llama3 mistral qwen2 qwen3; do
    echo '{"tokens":[5,17,99,3,42,8]}' | "$bin" generate --model "$root/tests/golden/models/$model" --input - --max-new-tokens 40 --samples 4 \
      --ignore-eos --device cpu >"work/$model.generate" 2>>"$log"
    echo '{"tokens":[5,17,99,3,42,8,100,7,7,1,64,12]}' | "$bin" logprobs --model "$root/tests/golden/models/$model" --input - --device cpu \
      >"work/$model.logprobs" 2>>"$log"
    echo "generate-$model $(sha256sum <"work/$model.generate" | cut -c1-16)"
    echo "logprobs-$model $(sha256sum <"work/$model.logprobs" | cut -c1-16)"
  done
}

for which in old new; do
  bin=${!which}
  mkdir -p "$work/$which"
  cp "$root"/jobs/quickstart/{model.json,sft.toml,ppo.toml} "$work/$which/"
  log=$work/$which/log
  (cd "$work/$which" && all) >"$work/$which.txt"
done
empty=$(printf '' | sha256sum | cut -c1-16)
paste -d' ' "$work/old.txt" "$work/new.txt" | awk -v empty="$empty" '{
  good = $2 == $4 && $2 != empty && $2 != "none"
  printf "%-20s %-16s %-16s %s\n", $1, $2, $4, good ? "same" : "DIFFERENT"
  bad += !good
} END { exit bad > 0 }' || { grep -h "failed\|error" "$work"/*/log >&2; exit 1; }
