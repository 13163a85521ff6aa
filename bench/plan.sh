#!/usr/bin/env bash
# Compares the predictions of `plan` with measured runs on this machine's CPUs: peak memory above the start-up baseline,
# and seconds per step.
#
#   bench/plan.sh [CASE ...]        cases: the names below; all of them take about 20 minutes on two cores
#
# Every case is a job on a new model with random weights, of 500 MB and more per rank: plan --json, then a run of a few
# steps. Baseline: the resident memory at the start of the run, before its models (memory_start_bytes in metrics.jsonl).
# STEPS (3): measured steps after one warm-up step. WORK (target/bench-plan): the working directory.
set -euo pipefail
cd "$(dirname "$0")/.."
root="$PWD"
ours="${RLHF_HPC:-$root/target/release/rlhf-hpc}"
work="${WORK:-target/bench-plan}"
steps="${STEPS:-3}"
mkdir -p "$work"
cd "$work"
export OMPI_MCA_mpi_yield_when_idle=1

# Rows of mixed lengths: responses of 60 to 460 tokens; prompts of 20 to 300.
mixed_sft='data.prompts=["mixed-sft.jsonl"] data.row_tokens_max=600'
mixed_ppo='data.prompts=["mixed-ppo.jsonl"] data.prompt_tokens_max=320 ppo.microbatch_tokens_max=2048'

# Offloaded state in files is read when it is saved.
saving='checkpoint.every_steps=1 checkpoint.keep_last=1'

# name ranks layers width mlp heads kv vocabulary job overrides...; a name that begins with qwen3 is a model of that
# family (norms of queries and keys, a head dim of its own), others are Llama models
cases="
small-f32      1 4 512 1408 8 8 8192    ppo
ppo-f32        1 8 768 2048 12 4 16000  ppo
ppo-bf16       1 8 768 2048 12 12 32000 ppo model.dtype=bf16
ppo-recompute  1 6 1024 2816 8 8 8192   ppo gradient.recompute=true ppo.microbatch_tokens_max=2048
sft-f32        1 8 768 2048 12 4 16000  sft
sft-bf16       1 8 768 2048 12 4 16000  sft model.dtype=bf16
zero0-2        2 8 768 2048 12 4 16000  ppo mesh.zero=0
zero1-2        2 8 768 2048 12 4 16000  ppo mesh.zero=1
zero2-2        2 8 768 2048 12 4 16000  ppo mesh.zero=2
zero3-2        2 8 768 2048 12 4 16000  ppo mesh.zero=3
zero1-4        4 8 768 2048 12 4 16000  sft mesh.zero=1
zero3-4        4 8 768 2048 12 4 16000  sft mesh.zero=3
tensor-2       2 8 768 2048 12 4 16000  ppo mesh.tensor=2
sequence-2     2 8 768 2048 12 4 16000  ppo mesh.sequence=2
sft-mixed      1 8 768 2048 12 4 16000  sft $mixed_sft
sft-mixed-bf16 1 8 768 2048 12 4 16000  sft $mixed_sft model.dtype=bf16
ppo-mixed      1 8 768 2048 12 4 16000  ppo $mixed_ppo
sft-mixed-2    2 8 768 2048 12 4 16000  sft $mixed_sft mesh.zero=2
early-eos      1 8 768 2048 12 4 16000  ppo rollout.ignore_eos=false
rollout-2      2 8 768 2048 12 4 16000  ppo rollout.tensor=2
rollout-2-z3   2 8 768 2048 12 4 16000  ppo mesh.zero=3 rollout.tensor=2
offload        1 4 512 1408 8 8 8192    ppo $saving mesh.offload=[\"optimizer\"]
offload-bf16   1 4 512 1408 8 8 8192    ppo $saving model.dtype=bf16 mesh.offload=[\"optimizer\"]
offload-roles  1 4 512 1408 8 8 8192    ppo $saving mesh.offload=[\"optimizer\",\"roles\"]
offload-2      2 4 512 1408 8 8 8192    ppo $saving mesh.zero=2 mesh.offload=[\"optimizer\"]
qwen3-f32      1 4 512 1408 8 4 16000   ppo
qwen3-bf16-2   2 4 512 1408 8 4 16000   ppo mesh.zero=2 model.dtype=bf16
placed         2 4 512 1408 8 8 8192    ppo mesh.placement=[{roles=[\"actor\",\"reference\"],ranks=\"0..1\"},{roles=[\"critic\",\"reward\"],ranks=\"1..2\"}]
"

model() { # name layers width mlp heads kv vocabulary
  [ -f "$1/model.safetensors" ] && return
  local family='"architectures": ["LlamaForCausalLM"], "model_type": "llama"'
  case $1 in qwen3*) family='"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128' ;; esac
  cat > "$1.json" <<JSON
{$family, "num_hidden_layers": $2, "hidden_size": $3,
 "intermediate_size": $4, "num_attention_heads": $5, "num_key_value_heads": $6, "vocab_size": $7,
 "max_position_embeddings": 1024, "tie_word_embeddings": false, "torch_dtype": "float32",
 "bos_token_id": 0, "eos_token_id": 1}
JSON
  "$ours" init --config "$1.json" --tokenizer tokenizer --out "$1" --force 2> /dev/null
}

job() { # kind model dir
  cat <<TOML
[job]
kind = "$1"
dir = "$3"
steps = $((steps + 1))
export = false
[model]
actor = "$2"
[data]
prompts = ["rows.jsonl"]
prompt_key = "prompt"
prompt_tokens_max = 96
long_prompts = "truncate_left"
response_key = "response"
row_tokens_max = 256
[rollout]
prompts_per_step = 32
response_tokens_max = 96
ignore_eos = true
[[reward.rule]]
kind = "length"
[ppo]
minibatch_samples = 16
microbatch_tokens_max = 1024
[sft]
minibatch_samples = 16
microbatch_tokens_max = 2048
[checkpoint]
every_steps = 0
[metrics]
samples_every_steps = 0
rollouts_every_steps = 0
TOML
}

value() { # key, from the JSON on standard input: its first number
  grep -o "\"$1\":[0-9.e+-]*" | head -1 | cut -d: -f2
}

measure() { # name ranks model kind overrides...; sets predicted_b predicted_s peak_b start_b step_s
  local name=$1 ranks=$2 model=$3 kind=$4
  shift 4
  rm -rf "run-$name"
  job "$kind" "$model" "run-$name" > "$name.toml"
  local launch=()
  [ "$ranks" = 1 ] || launch=(mpirun --allow-run-as-root --oversubscribe --bind-to none -n "$ranks")
  "${launch[@]}" "$ours" plan "$name.toml" "$@" --json > "$name.plan.json"
  "${launch[@]}" "$ours" run "$name.toml" "$@" > "$name.log" 2>&1 || { tail -3 "$name.log" >&2; return 1; }
  # Other load on the machine varies: the plan measures before and after the run.
  "${launch[@]}" "$ours" plan "$name.toml" "$@" --json > "$name.after.json"
  predicted_b=$(value resident_bytes < "$name.plan.json")
  predicted_s=$(cat "$name.plan.json" "$name.after.json" | grep -o '"chosen":{"fits":true,"step_s":[0-9.e+-]*' |
    sed 's/.*://' | awk '{ sum += $1 } END { print sum / NR }')
  peak_b=$(tail -1 "run-$name/metrics.jsonl" | value memory_peak_bytes)
  start_b=$(tail -1 "run-$name/metrics.jsonl" | value memory_start_bytes)
  # Frees disk space: weights are much larger than the other files.
  rm -rf "run-$name/checkpoints" "run-$name/export"
  step_s=$(tail -n "$steps" "run-$name/metrics.jsonl" | grep -o '"time_step_s":[0-9.e+-]*' | cut -d: -f2 | sort -g |
    awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }')
}

if [ ! -d tokenizer ]; then
  python3 "$root/jobs/quickstart/corpus.py" --rows 2000 --seed 1 --out corpus.jsonl
  "$ours" tokenizer corpus.jsonl --vocabulary 264 --out tokenizer --force
fi
if [ ! -f rows.jsonl ]; then
  # Long enough for every row to be cut to the same length. No two begin alike, as rows share equal pages of the KV
  # cache.
  for i in $(seq 256); do
    text=$(printf 'What is %s? ' $(seq $((99 + i)) $((159 + i))))
    printf '{"prompt": "%s", "response": "%s"}\n' "$text" "$text"
  done > rows.jsonl
fi
# rows, least and most characters (about as many tokens) of prompts, of responses: log-normal.
mixed() {
  awk -v rows="$1" -v pl="$2" -v pm="$3" -v rl="$4" -v rm="$5" 'function length_of(least, most) {
      z = sqrt(-2 * log(1 - rand())) * cos(6.283185307 * rand())
      n = int(exp(log(sqrt(least * most)) + 0.5 * z))
      return n < least ? least : n > most ? most : n
    }
    BEGIN {
      srand(7)
      for (i = 100; i < 200; i++) text = text "What is " i "? "
      for (i = 0; i < rows; i++)
        printf "{\"prompt\": \"%s\", \"response\": \"%s\"}\n", substr(i " " text, 1, length_of(pl, pm)), substr(text, 1, length_of(rl, rm))
    }'
}
[ -f mixed-sft.jsonl ] || mixed 256 12 60 60 460 > mixed-sft.jsonl
[ -f mixed-ppo.jsonl ] || mixed 256 20 300 60 460 > mixed-ppo.jsonl
printf '%-14s %5s %12s %12s %7s %10s %10s %7s\n' case ranks "predicted MB" "measured MB" ratio "predicted s" "measured s" ratio
echo "$cases" | while read -r name ranks layers width mlp heads kv vocabulary kind overrides; do
  [ -n "$name" ] || continue
  [ $# = 0 ] || [[ " $* " = *" $name "* ]] || continue
  made="m-$layers-$width-$mlp-$heads-$kv-$vocabulary"
  case $name in qwen3*) made="qwen3-$made" ;; esac
  model "$made" "$layers" "$width" "$mlp" "$heads" "$kv" "$vocabulary"
  # shellcheck disable=SC2086
  measure "$name" "$ranks" "$made" "$kind" $overrides < /dev/null || continue
  awk -v name="$name" -v ranks="$ranks" -v pb="$predicted_b" -v mb="$peak_b" -v base="$start_b" \
    -v ps="$predicted_s" -v ms="$step_s" 'BEGIN {
      m = mb - base
      printf "%-14s %5d %12.1f %12.1f %7.3f %10.3f %10.3f %7.3f\n", name, ranks, pb / 1e6, m / 1e6, pb / m, ps, ms, ps / ms }'
done
