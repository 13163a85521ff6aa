#!/usr/bin/env bash
# Measures memory by ZeRO stage: predicted (verb `plan`) and measured bytes per rank, for stages 0 to 3 on 1, 2 and 4
# ranks.
#
#   bench/zero.sh            about 10 minutes on two cores
#
# One sft job on generated rows with a model of about 100 million random f32 weights. Writes OUT/zero.md and
# OUT/zero.csv (OUT: bench/runs/<date>-<cpu>-zero). RANKS ("1 2 4"), STAGES ("0 1 2 3"), DTYPE (f32), STEPS (3), SETS
# (more overrides). If there are more ranks than cores, times are meaningless, but memory is not. Needs mpirun and
# python3.
set -euo pipefail
cd "$(dirname "$0")/.."

ranks="${RANKS:-1 2 4}" stages="${STAGES:-0 1 2 3}" dtype="${DTYPE:-f32}" steps="${STEPS:-3}" sets="${SETS:-}"
ours="$(realpath "${RLHF_HPC:-target/release/rlhf-hpc}")"
cpu="$(awk -F': *' '/^model name/ { print $2; exit }' /proc/cpuinfo)"
slug="$(echo "${cpu:-cpu}" | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9' '-' | sed 's/^-*//; s/-*$//')"
out="${OUT:-bench/runs/$(date +%F)-$slug-zero}"
mkdir -p "$out"
out="$(realpath "$out")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
load_before="$(cut -d' ' -f1-3 /proc/loadavg)"

config() { # width mlp layers heads vocabulary
    printf '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": %d, "hidden_size": %d,
    "intermediate_size": %d, "num_hidden_layers": %d, "num_attention_heads": %d, "num_key_value_heads": %d,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
    "bos_token_id": 1, "eos_token_id": 0}\n' "$5" "$1" "$2" "$3" "$4" $(($4 / 4))
}

cd "$work"
config 768 2048 12 12 16000 >large.json
config 64 128 1 4 512 >small.json
# Rows of about 250 tokens each: the plan counts rows as long as the job allows, here 256.
awk 'BEGIN { srand(7); for (i = 0; i < 96; i++) { text = "";
    for (j = 0; j < 250; j++) text = text sprintf("%c", 97 + int(26 * rand()));
    printf "{\"prompt\": \"%d:\", \"response\": \"%s\"}\n", i, text } }' >rows.jsonl
"$ours" tokenizer rows.jsonl --vocabulary 264 --out tokenizer --force >/dev/null
for size in large small; do "$ours" init --config "$size.json" --tokenizer tokenizer --out "$size" --force >/dev/null; done
cat >sft.toml <<JOB
[job]
kind = "sft"
steps = $steps
threads = 1
export = false
[model]
actor = "large"
dtype = "$dtype"
[data]
prompts = ["rows.jsonl"]
row_tokens_max = 256
[sft]
minibatch_samples = 32
microbatch_tokens_max = 1024
[checkpoint]
every_steps = 0
JOB

launch() { # ranks model stage name
    export OMPI_MCA_mpi_yield_when_idle=1
    local root=""
    [ "$(id -u)" = 0 ] && root=--allow-run-as-root
    # shellcheck disable=SC2086
    mpirun $root --oversubscribe --bind-to none -n "$1" "$ours" run sft.toml "model.actor=$2" "mesh.zero=$3" "job.dir=$4" \
        $sets >"$4.log" 2>&1 || { tail -5 "$4.log" >&2; return 1; }
}

for n in $ranks; do
    # The memory of a process other than its tensors, MPI included.
    launch "$n" small 0 "base-$n"
    for stage in $stages; do
        echo "$n ranks, stage $stage" >&2
        # shellcheck disable=SC2086
        "$ours" plan sft.toml "mesh.zero=$stage" $sets --ranks "$n" --json >"plan-$n-$stage.json"
        launch "$n" large "$stage" "run-$n-$stage"
        rm -rf "run-$n-$stage/checkpoints"
    done
done

cd - >/dev/null
{
    echo "# Memory by ZeRO stage on $cpu, $(date +%F)"
    echo
    echo "- commit $(git rev-parse --short HEAD 2>/dev/null)$(git diff --quiet HEAD 2>/dev/null || echo ' with changes'), $("$ours" --version); load average before and after: $load_before; $(cut -d' ' -f1-3 /proc/loadavg)"
    echo "- sft, $steps steps, $dtype, 1 thread per rank, about 100 million parameters (Llama shape: width 768, 12 layers, vocabulary 16000); 32 rows of about 250 tokens per step, at most 1024 tokens per micro-batch"
    echo "- MiB of the rank that uses most. Predicted by \`plan\`; tensors: peak use of the arena; resident: peak resident memory above that of the same program with a tiny model, without that model's tensors"
    [ -z "$sets" ] || echo "- overrides: $sets"
    echo
    python3 bench/zero.py "$work" "$out/zero.csv" "$ranks" "$stages"
} >"$out/zero.md"
cat "$out/zero.md"
