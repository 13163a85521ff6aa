#!/usr/bin/env bash
# The scaling of a PPO step over ranks: measured on 1 and 2 ranks with a core each, modelled beyond.
#
#   bench/scaling.sh            about 6 minutes on two cores; prints two tables in Markdown
#
# Measured: one job (random weights, 8 layers of width 512, 32 x (96 + 96) tokens) on 1 rank and on 2 ranks, one thread
# each, the layouts of 2 ranks in turn with the single rank before each, ROUNDS (3) times; medians of steps after the
# first. Efficiency: seconds on 1 rank / (ranks x seconds on `ranks` ranks). Modelled: the verb plan, for more ranks of
# this machine's cores with the network speed of --network-gb-s, and for the reference workload on A800-80G. RLHF_HPC:
# the binary. WORK (target/bench-scaling): the working directory.
set -euo pipefail
cd "$(dirname "$0")/.."
root="$PWD"
ours="${RLHF_HPC:-$root/target/release/rlhf-hpc}"
work="${WORK:-target/bench-scaling}"
rounds="${ROUNDS:-3}"
mkdir -p "$work"
cd "$work"
export OMPI_MCA_mpi_yield_when_idle=1
as_root=()
[ "$(id -u)" != 0 ] || as_root=(--allow-run-as-root)

layouts="
data        mesh.data=2 mesh.tensor=1 mesh.zero=1
data-zero3  mesh.data=2 mesh.tensor=1 mesh.zero=3
tensor      mesh.tensor=2 mesh.zero=1
sequence    mesh.sequence=2 mesh.tensor=1 mesh.zero=1
"

prepare() {
  cat > config.json <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 512,
 "intermediate_size": 1376, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192,
 "max_position_embeddings": 1024, "tie_word_embeddings": false, "torch_dtype": "float32",
 "bos_token_id": 0, "eos_token_id": 1}
JSON
  python3 "$root/jobs/quickstart/corpus.py" --rows 2000 --seed 1 --out corpus.jsonl
  "$ours" tokenizer corpus.jsonl --vocabulary 264 --out tokenizer --force
  "$ours" init --config config.json --tokenizer tokenizer --out model --force
  local text
  text=$(printf 'What is %s? ' $(seq 100 160))
  for i in $(seq 256); do printf '{"prompt": "%s"}\n' "$i $text"; done > rows.jsonl
  cat > ppo.toml <<'TOML'
[job]
kind = "ppo"
dir = "run"
steps = 3
threads = 1
export = false
[model]
actor = "model"
[data]
prompts = ["rows.jsonl"]
prompt_key = "prompt"
prompt_tokens_max = 96
long_prompts = "truncate_left"
[rollout]
prompts_per_step = 32
response_tokens_max = 96
ignore_eos = true
[[reward.rule]]
kind = "length"
[ppo]
minibatch_samples = 16
microbatch_tokens_max = 2048
[checkpoint]
every_steps = 0
[metrics]
samples_every_steps = 0
rollouts_every_steps = 0
TOML
}

median() { sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }

key() { # key file: its values but the first step's
  tail -n +2 "$2" | grep -o "\"$1\":[0-9.e+-]*" | cut -d: -f2
}

step() { # name ranks overrides...: adds the seconds of a run's steps to name.s
  local name=$1 ranks=$2
  shift 2
  rm -rf run
  local launch=()
  [ "$ranks" = 1 ] || launch=(mpirun "${as_root[@]}" --oversubscribe --bind-to none -n "$ranks")
  "${launch[@]}" "$ours" run ppo.toml "$@" < /dev/null > "$name.log" 2>&1 || { tail -3 "$name.log" >&2; return 1; }
  for what in time_step_s time_rollout_s time_train_s time_comm_exposed_s; do
    key "$what" run/metrics.jsonl >> "$name.$what"
  done
}

[ -f model/model.safetensors ] || prepare
rm -f ./*.time_*
for _ in $(seq "$rounds"); do
  echo "$layouts" | while read -r name overrides; do
    [ -n "$name" ] || continue
    step alone 1
    # shellcheck disable=SC2086
    step "$name" 2 $overrides
  done
done

of() { median < "$1.$2"; }
echo "Measured, one core per rank, load $(cut -d' ' -f1 /proc/loadavg) after:"
echo
echo "| layout | ranks | step s | rollout s | train s | exposed communication s | efficiency of the step | of rollout | of training |"
echo "|---|---|---|---|---|---|---|---|---|"
for name in alone data data-zero3 tensor sequence; do
  ranks=2
  [ "$name" != alone ] || ranks=1
  exposed=$( [ "$name" = alone ] && echo 0 || of "$name" time_comm_exposed_s)
  awk -v n="$name" -v r=$ranks -v s="$(of "$name" time_step_s)" -v o="$(of "$name" time_rollout_s)" \
    -v t="$(of "$name" time_train_s)" -v e="$exposed" -v s1="$(of alone time_step_s)" -v o1="$(of alone time_rollout_s)" \
    -v t1="$(of alone time_train_s)" 'BEGIN {
      printf "| %s | %d | %.3f | %.3f | %.3f | %.3f | %.0f %% | %.0f %% | %.0f %% |\n", n, r, s, o, t, e,
        100 * s1 / s / r, 100 * o1 / o / r, 100 * t1 / t / r }'
done

# Predicted seconds of a step and of its exposed communication, from the plan's JSON.
modelled() { # job ranks options...
  local job=$1 ranks=$2
  shift 2
  "$ours" plan "$job" --ranks "$ranks" --json "$@" 2> plan.err > plan.json || { head -1 plan.err; return; }
  grep -o '"step_s":[0-9.e+-]*' plan.json | head -1 | cut -d: -f2 | xargs printf '%.1f\n'
}

mkdir -p llama
cat > llama/config.json <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
 "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
 "max_position_embeddings": 4096, "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2}
JSON
llama=(--reward-model "$PWD/llama" "model.actor=$PWD/llama" "model.reference=$PWD/llama" "model.critic=$PWD/llama")

echo
echo "Modelled by the verb plan (declared peaks and efficiencies for GPUs; nothing here was run):"
echo
echo "| job | ranks | step s |"
echo "|---|---|---|"
for ranks in 8 16 32 64; do
  echo "| jobs/llama2-7b.toml, A800-80G | $ranks | $(modelled "$root/jobs/llama2-7b.toml" "$ranks" --gpu a800-80g "${llama[@]}") |"
done
