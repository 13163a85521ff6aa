#!/usr/bin/env bash
# Measures the speed table: ours and the peers in turn, two threads each, several rounds in one run.
#
#   bench/run.sh [tiny|small|all|collectives]        about 12 minutes for all
#
# Writes bench/runs/<date>-<cpu>/README.md, raw.csv, kernels.txt and, for all, collectives.md and collectives.csv (on 2
# and 4 ranks, needs mpirun). For collectives it writes only these two. Peers need a Python with torch and transformers
# (PEER_PYTHON=/path/to/python; default: python3) and are skipped without them. Settings:
# ROUNDS (3), THREADS (2), DTYPES ("f32 bf16"), REPEATS of ours in a round (3), OUT (the folder to write), LIMIT_S
# (540): no second or third round begins later than that many seconds (for f32, half as many) after the start.
set -uo pipefail
cd "$(dirname "$0")/.."

which="${1:-all}"
case "$which" in
    tiny | small) sizes="$which" ;;
    all) sizes="tiny small" ;;
    collectives) sizes="" ;;
    *) echo "usage: bench/run.sh [tiny|small|all|collectives]" >&2; exit 2 ;;
esac
rounds="${ROUNDS:-3}" threads="${THREADS:-2}" dtypes="${DTYPES:-f32 bf16}" repeats="${REPEATS:-3}"
limit="${LIMIT_S:-540}"
python="${PEER_PYTHON:-python3}"
ours="${RLHF_HPC:-target/release/rlhf-hpc}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false

if [ ! -x "$ours" ]; then
    echo "building (cargo build --release)" >&2
    cargo build --release || exit 1
fi
cpu="$(awk -F': *' '/^model name/ { print $2; exit }' /proc/cpuinfo)"
slug="$(echo "${cpu:-cpu}" | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9' '-' | sed 's/^-*//; s/-*$//')"
out="${OUT:-bench/runs/$(date +%F)-$slug}"
models=target/bench-models
mkdir -p "$out" "$models"
raw="$out/raw.csv"
lines="$(mktemp)"
trap 'rm -f "$lines"' EXIT

run_collectives() {
    command -v mpirun >/dev/null || { echo "collectives are skipped: no mpirun" >&2; return; }
    local lines="$out/collectives.json" root=""
    [ "$(id -u)" = 0 ] && root=--allow-run-as-root
    : >"$lines"
    for ranks in 2 4; do
        echo "collectives, $ranks ranks" >&2
        # More ranks than cores: one that waits must let others run.
        # shellcheck disable=SC2086
        OMPI_MCA_mpi_yield_when_idle=1 timeout --foreground 300 mpirun $root --oversubscribe --bind-to none -n "$ranks" \
            "$ours" bench collectives --repeats "${COLLECTIVE_REPEATS:-9}" --json </dev/null | grep '^{' >>"$lines"
    done
    awk -v csv=1 -f bench/collectives.awk "$lines" >"$out/collectives.csv"
    {
        echo "# Collectives on $cpu, $(nproc) cores, $(date +%F)"
        echo
        echo "Load average $(cut -d' ' -f1-3 /proc/loadavg) after; $(mpirun --version | head -1); commit" \
            "$(git rev-parse --short HEAD 2>/dev/null)$(git diff --quiet HEAD 2>/dev/null || echo ' with changes')."
        awk -f bench/collectives.awk "$lines"
    } >"$out/collectives.md"
    rm -f "$lines"
}

if [ "$which" = collectives ]; then
    run_collectives
    cat "$out/collectives.md"
    exit 0
fi

versions="$("$python" -c 'import torch, transformers; print(f"torch {torch.__version__}, transformers {transformers.__version__}")' 2>/dev/null)"
if [ -z "$versions" ]; then
    echo "peers are skipped: $python has no torch and transformers (set PEER_PYTHON)" >&2
fi

model() { # the directory that ours and the peers load, or the built-in shape
    if [ -z "$versions" ]; then echo "$1"; return; fi
    local dir="$models/$1"
    [ -f "$dir/model.safetensors" ] || "$python" bench/peers/make_model.py "$1" "$dir" >/dev/null 2>&1
    if [ -f "$dir/model.safetensors" ]; then echo "$dir"; else echo "$1"; fi
}

keep() { # round who size task: standard input's JSON lines
    while IFS= read -r line; do
        case "$line" in '{'*) printf '%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" "$line" >>"$lines" ;; esac
    done
}

run_ours() { # round size dtype suite
    echo "round $1: ours, $2 $3 $4" >&2
    local name="$2"
    [ "$4" = logprobs ] && name=tiny
    timeout 300 "$ours" bench "$4" --model "$(model "$name")" --dtype "$3" --threads "$threads" --repeats "$repeats" --json |
        keep "$1" ours "$2" "$4"
}

run_peer() { # round size dtype task script
    [ -n "$versions" ] || return 0
    local chosen="" known
    echo "round $1: torch, $2 $3 $4" >&2
    # The first round tries every variant (attention, chunk), the others only the fastest one.
    known="$(awk -F'\t' -v size="$2" -v task="$4" '$2 == "torch" && $3 == size && $4 == task { print $5 }' "$lines" |
        grep "\"dtype\": \"$3\"" | head -1)"
    [ -n "$known" ] || known="$(awk -F'\t' -v size="$2" -v task="$4" '$2 == "torch" && $3 == size && $4 == task { print $5 }' "$lines" | head -1)"
    chosen="$(echo "$known" | sed -n 's/.*"attention": "\([a-z]*\)".*/--attention \1/p; s/.*"chunk": \([0-9]*\).*/--chunks \1/p')"
    local given="--model $models/$2"
    [ "$4" = logprobs ] && given=""
    # shellcheck disable=SC2086
    timeout 240 "$python" "bench/peers/$5.py" $given $chosen --dtype "$3" --threads "$threads" --repeats 1 2>/dev/null |
        keep "$1" torch "$2" "$4" || echo "    the run failed or took more than 240 s" >&2
}

load_before="$(cut -d' ' -f1-3 /proc/loadavg)"
begin="$(date +%s)"
for dtype in $dtypes; do
    last="$rounds"
    [ "$dtype" = bf16 ] && last=$((rounds > 2 ? 2 : rounds))
    latest="$limit"
    [ "$dtype" = f32 ] && latest=$((limit / 2))
    for round in $(seq 1 "$last"); do
        if [ "$round" -gt 1 ] && [ $(($(date +%s) - begin)) -gt "$latest" ]; then
            echo "$dtype: $((round - 1)) of $last rounds, as the time limit is reached" >&2
            break
        fi
        for size in $sizes; do
            run_ours "$round" "$size" "$dtype" rollout
            run_peer "$round" "$size" "$dtype" rollout generate
            run_ours "$round" "$size" "$dtype" train
            run_peer "$round" "$size" "$dtype" train train_step
            run_ours "$round" "$size" "$dtype" ppo
            run_peer "$round" "$size" "$dtype" ppo ppo_step
        done
        run_ours "$round" large "$dtype" logprobs
        run_peer "$round" large "$dtype" logprobs logprobs
    done
done
for size in $sizes; do
    timeout 120 "$ours" bench kernels --model "$size" --threads "$threads" --repeats 5
done >"$out/kernels.txt"
[ "$which" = all ] && run_collectives
seconds=$(($(date +%s) - begin))
load_after="$(cut -d' ' -f1-3 /proc/loadavg)"

awk -F'\t' -v rounds_csv=1 -f bench/table.awk "$lines" >"$raw"
{
    echo "# Speed on $cpu, $(date +%F)"
    echo
    echo "- machine: $cpu, $(nproc) cores, $(awk '/MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo) memory;" \
        "$("$ours" info 2>/dev/null | sed -n 's/^kernels *//p')"
    echo "- load average before and after: $load_before; $load_after"
    echo "- ours: commit $(git rev-parse --short HEAD 2>/dev/null)$(git diff --quiet HEAD 2>/dev/null || echo ' with changes'), $("$ours" --version), $(rustc --version 2>/dev/null | cut -d' ' -f1-2)"
    echo "- peers: ${versions:-none (no torch here)}, as installed; the fastest of their attentions and chunk sizes"
    echo "- $threads threads each, in turn, up to $rounds rounds (bf16: 2; see \`raw.csv\`), $seconds s in all; medians over the rounds"
    echo
    awk -F'\t' -f bench/table.awk "$lines"
    echo
    echo "Shares are of the shortest possible time: the larger of FLOPs / multiply-add peak and bytes / read bandwidth. The peaks are"
    echo "measured between the repeats of the same process. The counts are defined at the top of \`src/cli/bench/cost.rs\`."
    echo "Every run is a row of \`raw.csv\`; single operations are in \`kernels.txt\`. Made by \`bench/run.sh $which\`."
} >"$out/README.md"
cat "$out/README.md"
