#!/usr/bin/env bash
# Checks and measures this machine's GPUs with what lies beside this script in a bundle (bench/bundle.sh): every kernel fact, the
# PPO quickstart on 1, 2 and 4 ranks of one GPU and with products of either mode, the speed of kernels beside the machine's peaks and beside PyTorch.
#
#   ./gpu.sh [report]          default: gpu-report.md here; ends in under 8 minutes
#
# Each section has a time limit and writes its part as it ends, so that one which hangs loses only itself. What was not run says
# why. The exit code is 0 if nothing failed, 1 if something did, 3 if there is no GPU.
set -uo pipefail
here=$(cd "$(dirname "$(readlink -f "$0")")" && pwd)
report=${1:-gpu-report.md}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
begin=$SECONDS
whole_s=460
failures=0
for part in rlhf-hpc mpirun bin/kernels quickstart/ppo.toml; do
    [ -e "$here/$part" ] && continue
    echo "error: $here/$part is missing" >&2
    echo "hint: this script runs in the folder that bench/bundle.sh makes" >&2
    exit 2
done

say() { printf '%s\n' "$@" | tee -a "$report"; }
section() { say "" "## $*" ""; }
failed() {
    failures=$((failures + 1))
    say "FAILED: $*"
}
skipped() { say "skipped: $*"; }

limited() { # seconds command...: at most as long, and never beyond the time of the whole
    local left=$((whole_s - (SECONDS - begin)))
    local most=$(($1 < left ? $1 : left))
    shift
    [ "$most" -gt 0 ] || return 124
    timeout --signal=TERM --kill-after=5 "$most" "$@" </dev/null
}

how_it_ended() { # exit code
    case "$1" in
        0) echo "passed" ;;
        124 | 137) echo "not ended within its time" ;;
        *) echo "exit code $1" ;;
    esac
}

: >"$report"
say "# GPU report, $(date -u '+%F %T') UTC" "" "\`$(head -1 "$here/BUNDLE" 2>/dev/null || echo 'no bundle')\`"

# ---- the machine ----

section "Machine"
limited 30 "$here/rlhf-hpc" info >"$work/info" 2>&1
code=$?
say '```' "$(cat "$work/info")" "$(command -v nvidia-smi >/dev/null && limited 20 nvidia-smi \
    --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv 2>&1)" '```'
[ "$code" = 0 ] || failed "rlhf-hpc info: $(how_it_ended "$code")"
if ! grep -Eq '^cuda +driver' "$work/info" || grep -Eq '^cuda .* 0 GPUs' "$work/info"; then
    section "Kernel facts, PPO, speed"
    skipped "no GPU: $(sed -n 's/^cuda *//p' "$work/info" | head -1)"
    exit 3
fi

# ---- kernel facts ----

# One process for each room of facts: a kernel that breaks the GPU's context takes no other room with it. Rooms that are about
# played libraries need a compiler and the sources.
facts() { # -ve or -e, pattern of rooms: all but those, or those; second of the whole until which rooms begin
    local rooms room passed=0 broken=() late=() code log
    rooms=$("$here/bin/kernels" --list 2>/dev/null | sed -n 's/: test$//p' | cut -d: -f1 | sort -u |
        grep -Ev '^(played|carried|emulation|faults|driver|nccl|run_nccl)$' | grep -E "$1" "$2")
    for room in $rooms; do
        if [ $((SECONDS - begin)) -ge "$3" ]; then
            late+=("$room")
            continue
        fi
        log=$work/facts-$room
        # A filter finds its text in the middle of a name, too: run_loss is no room of loss.
        RLHF_HPC_KERNELS=gpu limited 60 "$here/bin/kernels" "$room::" --skip "_$room::" --test-threads=1 >"$log" 2>&1
        code=$?
        passed=$((passed + $(grep -c '^test .* ok$' "$log")))
        [ "$code" = 0 ] && continue
        broken+=("$room")
        say "### $room: $(how_it_ended "$code")" '```' "$(grep -E '^test .*FAILED|panicked at|^kernel |error|assert' -A2 "$log" |
            cut -c1-300 | head -30)" "$(tail -1 "$log" | cut -c1-300)" '```'
        if [ "$code" != 124 ] && [ "$code" != 137 ]; then alone "$room" "$log"; fi
    done
    say "$passed facts passed; rooms with failures: ${broken[*]:-none}; rooms for which there was no time: ${late[*]:-none}"
    [ "${#broken[@]}" = 0 ]
}

# After a fault all later facts of a process fail: each of those that did runs once more alone.
alone() {
    local fact code
    for fact in $(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$2" | head -12); do
        RLHF_HPC_KERNELS=gpu limited 20 "$here/bin/kernels" "$fact" --exact >"$work/fact" 2>&1
        code=$?
        say "- \`$fact\` alone: $(how_it_ended "$code")"
    done
}

section "Kernel facts on the GPU, against naive sums in f64"
# shellcheck source=/dev/null
(. "$here/environment.sh" && facts -ve '^run' 240) || failed "kernel facts"

# ---- PPO ----

prepare() {
    cp -r "$here/quickstart" "$work/"
    cd "$work/quickstart" && mkdir -p work || return 1
    # The kernels' smallest head dim is 64.
    sed -i 's/"num_attention_heads": 4/"num_attention_heads": 2/; s/"num_key_value_heads": 2/"num_key_value_heads": 1/
        s/"head_dim": 32/"head_dim": 64/' model.json
    "$here/rlhf-hpc" corpus --rows 4000 --seed 1 --out work/arithmetic.jsonl &&
        "$here/rlhf-hpc" tokenizer work/arithmetic.jsonl --vocabulary 264 --out work/tokenizer &&
        "$here/rlhf-hpc" shard work/arithmetic.jsonl --tokenizer work/tokenizer --out work/shards/questions \
            --response-key demonstration --label-key answer --split-field split &&
        "$here/rlhf-hpc" init --config model.json --tokenizer work/tokenizer --out work/base --seed 1
}

ppo() { # ranks settings...: sets run
    local code seconds=$SECONDS log
    run=$(echo "ppo-$*" | tr -c 'a-z0-9\n' -)
    log=$work/$run
    (
        cd "$work/quickstart" || exit 1
        limited 60 "$here/mpirun" --bind-to none --oversubscribe -n "$1" "$here/bin/rlhf-hpc" ppo.toml model.actor=work/base \
            job.dir="work/$run" job.steps=5 job.device=gpu model.dtype=bf16 "${@:2}"
    ) >"$log" 2>&1
    code=$?
    say "$1 ranks ${*:2}, 5 steps: $(how_it_ended "$code"), $((SECONDS - seconds)) s" '```' "$(grep -v '^$' "$log" | tail -12 | cut -c1-200)" '```'
    [ "$code" = 0 ] || failed "PPO on $1 ranks ${*:2}"
}

# The steps of a run beside each other: what a mode costs and saves, and how far ratios begin from one.
steps() { # run
    local file=$work/quickstart/work/$1/metrics.jsonl key values
    [ -e "$file" ] || return
    for key in time_step_s time_old_logprobs_s sampler_gap_max logprob_gap_max; do
        values=$(sed -n "s/.*\"$key\":\([^,}]*\).*/\1/p" "$file" | tr '\n' ' ')
        say "- $1, $key: ${values:-none}"
    done
}

section "PPO quickstart: one rank on one GPU, then 2 and 4 ranks that share it, the last with ZeRO 3"
if (prepare) >"$work/prepare" 2>&1; then
    CUDA_VISIBLE_DEVICES=$(echo "${CUDA_VISIBLE_DEVICES:-0}" | cut -d, -f1)
    export CUDA_VISIBLE_DEVICES
    ppo 1
    exact=$run
    fast=
    if grep -Eq '^cublaslt +none' "$work/info"; then
        skipped "fast products: $(sed -n 's/^cublaslt *//p' "$work/info")"
    else
        ppo 1 job.products=fast
        fast=$run
    fi
    ppo 2
    ppo 4
    # Weights that are divided, and come together in another layout to sample.
    ppo 4 mesh.zero=3 mesh.tensor=1 rollout.tensor=2
    say "" "Seconds and gaps of each step, by mode of products:" ""
    steps "$exact"
    [ -z "$fast" ] || steps "$fast"
else
    failed "the quickstart's model and data: $(tail -2 "$work/prepare")"
fi

# ---- speed ----

section "Speed of the kernels, beside the peaks of this machine; products in both modes, exact and fast"
limited 90 "$here/rlhf-hpc" bench cuda >"$work/bench" 2>&1
code=$?
if [ "$code" = 0 ]; then
    say '```' "$(cat "$work/bench")" '```'
elif grep -Eqi 'suite|unknown|needs kernels' "$work/bench"; then
    skipped "this binary has no bench of the kernels on a GPU"
else
    say '```' "$(tail -12 "$work/bench" | cut -c1-200)" '```'
    failed "bench cuda: $(how_it_ended "$code")"
fi

section "PyTorch on the same GPU"
if python3 -c 'import torch; assert torch.cuda.is_available()' 2>"$work/torch"; then
    limited 90 python3 "$here/gpu.py" >"$work/peers" 2>&1
    code=$?
    say "$(cut -c1-200 "$work/peers")"
    [ "$code" = 0 ] || failed "PyTorch: $(how_it_ended "$code")"
else
    skipped "python3 has no torch with CUDA ($(tail -1 "$work/torch" | cut -c1-100))"
fi

# ---- whole jobs ----

section "Whole tiny jobs on the GPU, against the CPU and each other"
# shellcheck source=/dev/null
(. "$here/environment.sh" && facts -e '^run' "$whole_s") || failed "facts about whole jobs"

say "" "$failures failures; $((SECONDS - begin)) s."
[ "$failures" = 0 ]
