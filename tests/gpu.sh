#!/usr/bin/env bash
# Checks and measures this machine's GPUs with what lies beside this script in a bundle (bench/bundle.sh): kernel tests, PPO on 1,
# 2 and 4 ranks with products of either mode, the verbs that ask a model, the speed of kernels beside the machine's peaks and
# beside PyTorch; two short modules of kernel tests under compute-sanitizer, where there is one.
#
#   ./gpu.sh [report]          default: gpu-report.md here; ends in under 8 minutes
#
# What matters most comes first: tests, one job, speed against the targets. Each section has a time limit, and the report is
# written anew as one ends, its summary at the top, so that a section that hangs loses only itself. What was not run says why.
# The exit code is 0 if nothing failed, 1 if something did, 3 if there is no GPU. A target that is missed is no failure.
#
# Beside the report lies what was measured, a JSON object a line (gpu-report.jsonl).
#
# GPU_SH_SECONDS=180 ends earlier, GPU_SH_ROOMS is a pattern of the kernel tests to run.
set -uo pipefail
here=$(cd "$(dirname "$(readlink -f "$0")")" && pwd)
report=$(realpath -m "${1:-gpu-report.md}")
work=$(mktemp -d)
begin=$SECONDS
whole_s=${GPU_SH_SECONDS:-460}
failures=0
is_done=no
: >"$work/body"
: >"$work/results"
: >"$work/record"
: >"$work/failed"
machine="no GPU was found"
for part in rlhf-hpc mpirun bin/kernels quickstart/ppo.toml gpu_verbs.sh; do
    [ -e "$here/$part" ] && continue
    echo "error: $here/$part is missing" >&2
    echo "hint: this script runs in the folder that bench/bundle.sh makes" >&2
    exit 2
done

# ---- the report ----

say() { printf '%s\n' "$@" | tee -a "$work/body"; }
section() { say "" "## $*" ""; }
# A line of the summary: what, its seconds, how it ended.
result() { printf '| %s | %s | %s |\n' "$1" "$2" "$3" >>"$work/results"; }
failed() {
    failures=$((failures + 1))
    say "" "FAILED: $*"
    echo "- $*" >>"$work/failed"
}
block() { # text
    [ -z "$1" ] || say "" '```' "$1" '```'
}
skipped() { # what, why
    say "" "skipped: $1: $2"
    result "$1" "" "skipped: $2"
}

# Rows of the works that have a target: from the records of `bench cuda`, and from the comparison with PyTorch.
targets() {
    {
        sed -n 's/.*"work":"\([^"]*\)","verdict":"\(target [^"]*\)".*/| \1 | \2 |/p' "$work/record"
        [ ! -e "$work/peers" ] || sed -n 's/^| \([^|]*\) |.*| \(target [^|]*\) |$/| \1 | \2 |/p' "$work/peers"
    } | sed 's/| target \(.*\), measured \(.*\): \(.*\) |$/| \1 | \2 | \3 |/; s/| target \([^|]*\) |$/| \1 | | |/'
}

summary() {
    local reached missed
    echo "# GPU report, $started UTC"
    echo
    if [ "$is_done" = no ]; then echo "**This run has not ended: after $((SECONDS - begin)) s, failures: $failures.**"
    elif [ "$failures" = 0 ]; then echo "**Nothing failed.** $((SECONDS - begin)) s."
    else echo "**Failures: $failures.** $((SECONDS - begin)) s."; fi
    [ ! -s "$work/failed" ] || { echo && cat "$work/failed"; }
    printf '\n%s\n\n' "$machine"
    echo "Bundle: $(head -1 "$here/BUNDLE" 2>/dev/null || echo 'unknown')."
    printf '\n| Section | Seconds | Result |\n|---|---|---|\n'
    cat "$work/results"
    printf '\n## Targets\n\n'
    reached=$(targets | grep -c '| reached |$') missed=$(targets | grep -c '| missed |$')
    if [ -z "$(targets)" ]; then
        echo "None was measured."
    else
        echo "$reached reached, $missed missed. Shares are of the peaks that the same run measured."
        printf '\n| Work | Target | Measured | Verdict |\n|---|---|---|---|\n'
        targets
    fi
}

publish() {
    { summary && cat "$work/body"; } | cat -s >"$work/report" && cp "$work/report" "$report"
    cp "$work/record" "${report%.md}.jsonl"
}
started=$(date -u '+%F %T')
warming=
trap 'publish; [ -z "$warming" ] || kill "$warming" 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 143' TERM INT

# ---- limits ----

left() { echo $((whole_s - (SECONDS - begin))); }

limited() { # seconds command...: at most as long, and never beyond the time of the whole
    local left most
    left=$(left)
    most=$(($1 < left ? $1 : left))
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

is_time_for() { # what, seconds that it needs at least
    [ "$(left)" -ge "$2" ] && return
    skipped "$1" "no time was left"
    return 1
}

# ---- the machine ----

# What a CUDA library of the machine's PyTorch is, where the system's loader knows none.
of_python() { # library
    python3 - "$1" 2>/dev/null <<'END'
import glob, sys
found = [path for at in sys.path for path in glob.glob(f"{at}/nvidia/*/lib/{sys.argv[1]}.so.*")]
print(max(found, key=lambda path: path.rsplit("/")[-1]) if found else "")
END
}

smi() { # fields
    command -v nvidia-smi >/dev/null && limited 20 nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits 2>/dev/null
}

has_none() { grep -Eq "^$1 +none" "$work/info"; }

look_at_the_machine() {
    local seconds=$SECONDS code path first fields
    limited 30 "$here/rlhf-hpc" info >"$work/info" 2>&1
    code=$?
    for pair in nvrtc:libnvrtc:RLHF_NVRTC cublaslt:libcublasLt:RLHF_CUBLASLT_LIB nccl:libnccl:RLHF_NCCL_LIB; do
        IFS=: read -r name library variable <<<"$pair"
        has_none "$name" || continue
        path=$(of_python "$library")
        [ -n "$path" ] && export "$variable=$path"
    done
    if [ -n "${RLHF_NVRTC:-}${RLHF_CUBLASLT_LIB:-}${RLHF_NCCL_LIB:-}" ]; then
        limited 30 "$here/rlhf-hpc" info >"$work/info" 2>&1
        code=$?
    fi
    section "Machine"
    block "$(cat "$work/info")"
    fields=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,compute_mode,ecc.mode.current
    fields=$fields,mig.mode.current
    first=$(smi $fields)
    if [ -n "$first" ]; then
        IFS=, read -r gpu driver memory sm mem watts mode ecc mig <<<"$first"
        machine="$gpu, driver${driver}, GPUs: $(wc -l <<<"$first"); ${memory# } MiB, clocks up to ${sm# } MHz (memory ${mem# }),"
        machine="$machine power up to ${watts# } W, compute mode ${mode# }, ECC ${ecc# }, MIG ${mig# }; $(nproc) cores."
    elif grep -Eq '^cuda +driver' "$work/info"; then
        machine="$(sed -n 's/^ *GPU 0 at/GPU 0 at/p' "$work/info" | head -1) (no nvidia-smi: driver and clocks are not known)."
    fi
    say "" "$machine"
    result "Machine" $((SECONDS - seconds)) "$(how_it_ended "$code")"
    [ "$code" = 0 ] || failed "rlhf-hpc info: $(how_it_ended "$code")"
    if ! grep -Eq '^cuda +driver' "$work/info" || grep -Eq '^cuda .* 0 GPUs' "$work/info"; then
        skipped "everything else" "no GPU: $(sed -n 's/^cuda *//p' "$work/info" | head -1)"
        is_done=yes
        exit 3
    fi
    publish
}

# ---- kernel tests ----

# Rooms that are about emulated libraries need a compiler and the sources. The kernels that most depends on come first.
modules() { # -ve or -e, pattern of modules: all but those, or those
    local all
    all=$("$here/bin/kernels" --list 2>/dev/null | sed -n 's/: test$//p' | cut -d: -f1 | sort -u |
        grep -Ev '^(embedded|emulation|faults|driver|nccl|run_nccl)$' | grep -E "$1" "$2" |
        grep -E "${GPU_SH_ROOMS:-.}") || return
    printf '%s\n' attention paged_attention matmul linear_logprob linear_logprob_fused fast model | grep -Fx "$all"
    printf '%s\n' "$all" | grep -Evx 'attention|paged_attention|matmul|linear_logprob|linear_logprob_fused|fast|model'
}

# One process for each module of tests: a kernel that breaks the GPU's context takes no other module with it.
module() {
    # A filter finds its text in the middle of a name, too: run_loss is no module of loss.
    RLHF_HPC_KERNELS=gpu limited 60 "$here/bin/kernels" "$1::" --skip "_$1::" --test-threads=1 >"$work/tests-$1" 2>&1
    echo $? >"$work/tests-$1.code"
}

run_tests() { # second of the whole until which modules begin, modules: those for which there was no time are in `late`
    local until=$1 at_once=$(($(nproc) / 4)) module count=0
    shift
    late=()
    [ "$at_once" -ge 1 ] || at_once=1
    [ "$at_once" -le 4 ] || at_once=4
    for module in "$@"; do
        if [ $((SECONDS - begin)) -ge "$until" ]; then
            late+=("$module")
            continue
        fi
        [ "$count" -lt "$at_once" ] || { wait -n; count=$((count - 1)); }
        module "$module" &
        count=$((count + 1))
    done
    wait
}

# After a fault all later tests of a process fail: each of those that did runs once more alone.
alone() { # log
    local test code
    for test in $(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$1" | head -8); do
        [ "$(left)" -gt $((whole_s / 2)) ] || break
        RLHF_HPC_KERNELS=gpu limited 20 "$here/bin/kernels" "$test" --exact >"$work/test" 2>&1
        code=$?
        say "- \`$test\` alone: $(how_it_ended "$code")"
    done
}

tell_tests() { # what, seconds, modules
    local what=$1 seconds=$2 module log code passed=0 broken=() ran=0
    shift 2
    for module in "$@"; do
        log=$work/tests-$module
        [ -e "$log.code" ] || continue
        code=$(cat "$log.code")
        ran=$((ran + 1))
        passed=$((passed + $(grep -c '^test .* ok$' "$log")))
        [ "$code" = 0 ] && continue
        broken+=("$module")
        say "" "### $module: $(how_it_ended "$code")"
        block "$(grep -E '^test .*FAILED|panicked at|^kernel |error|assert' -A2 "$log" | cut -c1-300 | head -30
            grep -v '^$' "$log" | tail -1 | cut -c1-300)"
        if [ "$code" != 124 ] && [ "$code" != 137 ]; then alone "$log"; fi
    done
    local words="$passed tests passed in $ran modules, modules with failures: ${broken[*]:-none}${late[*]:+, no time for: ${late[*]}}"
    say "" "$words."
    result "$what" "$seconds" "$words"
    [ "${#broken[@]}" = 0 ] || failed "$what: ${broken[*]}"
    publish
}

check_tests() { # what, until, modules
    local what=$1 until=$2 seconds=$SECONDS
    shift 2
    run_tests "$until" "$@"
    tell_tests "$what" $((SECONDS - seconds)) "$@"
}

# Short modules under CUDA's own checker, where the machine has it: what a kernel reads or writes outside of its memory.
memcheck() {
    local tool code seconds=$SECONDS log=$work/memcheck module filters=()
    section "Kernel tests under compute-sanitizer"
    tool=$(PATH=$PATH:/usr/local/cuda/bin type -P compute-sanitizer)
    if [ -z "$tool" ]; then
        skipped "Memcheck" "there is no compute-sanitizer in PATH or /usr/local/cuda/bin"
        return
    fi
    for module in $(modules -e '^(copy|rmsnorm)$'); do filters+=("$module::" --skip "_$module::"); done
    if [ "${#filters[@]}" = 0 ]; then
        skipped "Memcheck" "its modules were not asked for"
        return
    fi
    is_time_for "Memcheck" 15 || return
    RLHF_NO_CUDA_MEMORY_CACHING=1 RLHF_HPC_KERNELS=gpu limited 60 "$tool" --tool=memcheck --error-exitcode=99 "$here/bin/kernels" "${filters[@]}" \
        --test-threads=1 >"$log" 2>&1
    code=$?
    block "$(grep -E '^=========|^test .*FAILED|panicked at' "$log" | cut -c1-300 | head -40)"
    result "Memcheck" $((SECONDS - seconds)) "$(how_it_ended "$code"), $(grep -c '^test .* ok$' "$log") tests passed"
    [ "$code" = 0 ] || failed "compute-sanitizer: $(how_it_ended "$code")"
    publish
}

# ---- PPO ----

prepare() {
    cp -r "$here/quickstart" "$work/"
    cd "$work/quickstart" && mkdir -p work || return 1
    "$here/rlhf-hpc" corpus --rows 4000 --seed 1 --out work/arithmetic.jsonl &&
        "$here/rlhf-hpc" tokenizer work/arithmetic.jsonl --vocabulary 264 --out work/tokenizer &&
        "$here/rlhf-hpc" shard work/arithmetic.jsonl --tokenizer work/tokenizer --out work/shards/questions \
            --response-key demonstration --label-key answer --split-field split &&
        "$here/rlhf-hpc" init --config model.json --tokenizer work/tokenizer --out work/base --seed 1
}

# Of a job's lines: its devices and steps, or where it failed the last ones.
told() { # exit code
    if [ "$1" = 0 ]; then
        tr '\r' '\n' | sed -n '/^  devices/,/^  mesh/p; /^  products/p; /^step /p; /^[0-9]* steps in/p; /^  memory .*at most/p'
    else
        tr '\r' '\n' | grep -v '^$' | tail -30
    fi | cut -c1-200
}

runs=()
ppo() { # what, ranks, settings...
    local what=$1 ranks=$2 code seconds=$SECONDS log name start
    shift 2
    is_time_for "PPO, $what" 15 || return
    name=$(tr '[:upper:]' '[:lower:]' <<<"$what" | tr -cs 'a-z0-9\n' -)
    log=$work/$name
    # One rank needs no launcher, and shows what it can where that does not start.
    start=("$here/rlhf-hpc")
    [ "$ranks" = 1 ] || start=("$here/mpirun" --bind-to none --oversubscribe -n "$ranks" "$here/bin/rlhf-hpc")
    (
        cd "$work/quickstart" || exit 1
        limited 60 "${start[@]}" ppo.toml model.actor=work/base job.dir="work/$name" job.steps=5 job.device=gpu \
            model.dtype=bf16 "$@"
    ) >"$log" 2>&1
    code=$?
    runs+=("$name")
    say "" "### PPO, $what: $(how_it_ended "$code"), $((SECONDS - seconds)) s"
    block "$(told "$code" <"$log")"
    result "PPO, $what" $((SECONDS - seconds)) "$(how_it_ended "$code")"
    [ "$code" = 0 ] || failed "PPO, $what"
    publish
}

# The steps of runs beside each other: what a mode costs and saves, and how far ratios begin from one.
steps() {
    local name key row
    say "" "Of each step, in the runs above:" "" "| Run | What | Step by step |" "|---|---|---|"
    for name in "${runs[@]}"; do
        for key in time_step_s time_old_logprobs_s sampler_gap_max logprob_gap_max; do
            row=$(sed -n "s/.*\"$key\":\([^,}]*\).*/\1/p" "$work/quickstart/work/$name/metrics.jsonl" 2>/dev/null | cut -c1-8 | tr '\n' ' ')
            [ -z "$row" ] || say "| $name | $key | $row|"
        done
    done
}

# ---- speed ----

# Each part in a process of its own, beside the peaks that this process measured; the clocks meanwhile.
speed() { # part, seconds, how often each work is measured
    local part=$1 code seconds=$SECONDS log=$work/bench-$1 counts reached without
    is_time_for "Speed: $part" 10 || return
    limited "$2" "$here/rlhf-hpc" bench cuda --part "$part" --repeats "${3:-7}" --record "$work/record-$part" \
        >"$log" 2>"$log.errors"
    code=$?
    [ ! -e "$work/record-$part" ] || cat "$work/record-$part" >>"$work/record"
    block "$(cat "$log")"
    counts=$(grep -c '^{' "$work/record-$part" 2>/dev/null)
    reached=$(sed -n 's/^\([0-9]* of [0-9]* targets reached\)$/, \1/p' "$log")
    without=$(sed -n 's/^skipped: /; skipped: /p' "$log" | tr -d '\n')
    result "Speed: $part" $((SECONDS - seconds)) "$(how_it_ended "$code"), ${counts:-0} works$reached$without"
    if [ "$code" != 0 ]; then
        block "$(tail -12 "$log.errors" | cut -c1-300)"
        failed "bench cuda --part $part: $(how_it_ended "$code")"
    fi
    publish
}

clocks_begin() {
    clocks=
    command -v nvidia-smi >/dev/null || return
    nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv,noheader,nounits -l 1 \
        >"$work/clocks" 2>/dev/null </dev/null &
    clocks=$!
}

range() { # column of the clocks, unit
    cut -d, -f"$1" "$work/clocks" | tr -d ' ' | grep -E '^[0-9.]+$' | sort -n | sed -n "1{h;s/\$/ to /p};\${s/\$/ $2/p}" | tr -d '\n'
}

clocks_end() {
    [ -n "$clocks" ] || return
    kill "$clocks" 2>/dev/null
    wait "$clocks" 2>/dev/null
    say "" "Meanwhile: SM clock $(range 1 MHz), memory clock $(range 2 MHz), power $(range 3 W), temperature $(range 4 C)."
}

# PyTorch's files may come from a slow disk: they are read beside the tests, long before they are needed.
warm_up() {
    command -v python3 >/dev/null || return
    limited 150 python3 -c 'import torch' >/dev/null 2>&1 &
    warming=$!
    # What waits for tests does not wait for this.
    disown
}

peers() {
    local code seconds=$SECONDS
    section "PyTorch on the same GPU"
    is_time_for "PyTorch" 15 || return
    if ! command -v python3 >/dev/null; then
        skipped "PyTorch" "there is no python3"
        return
    fi
    local look='import torch; assert torch.cuda.is_available(), "torch sees no GPU"'
    if ! limited 60 python3 -c "$look" 2>"$work/torch"; then
        skipped "PyTorch" "$(tail -1 "$work/torch" | cut -c1-100)"
        return
    fi
    limited 75 python3 "$here/gpu.py" --ours "$work/record" >"$work/peers" 2>"$work/peers.errors"
    code=$?
    say "$(cut -c1-300 "$work/peers")"
    result "PyTorch" $((SECONDS - seconds)) "$(how_it_ended "$code"), $(grep -c '^| .* ms |' "$work/peers") works"
    if [ "$code" != 0 ]; then
        block "$(tail -12 "$work/peers.errors" | cut -c1-300)"
        failed "PyTorch: $(how_it_ended "$code")"
    fi
    publish
}

# ---- the whole ----

look_at_the_machine
warm_up
# shellcheck source=tests/gpu_verbs.sh
. "$here/gpu_verbs.sh"
# shellcheck source=/dev/null
inside() { . "$here/environment.sh"; }
outside=${LD_LIBRARY_PATH:-}

section "Kernel tests on the GPU, against naive sums in f64"
inside
mapfile -t kernels < <(modules -ve '^run')
check_tests "Kernel tests" $((whole_s / 4)) "${kernels[@]}"
later=(${late[@]+"${late[@]}"})
export LD_LIBRARY_PATH=$outside

section "PPO quickstart on one GPU"
visible=${CUDA_VISIBLE_DEVICES:-}
has_model=no
if (prepare) >"$work/prepare" 2>&1; then
    has_model=yes
    CUDA_VISIBLE_DEVICES=$(echo "${visible:-0}" | cut -d, -f1)
    export CUDA_VISIBLE_DEVICES
    ppo "one rank, exact products" 1 job.gemm=exact
else
    block "$(tail -5 "$work/prepare")"
    failed "the quickstart's model and data"
fi

section "Speed of the kernels, beside the peaks of this machine"
clocks_begin
speed attention 45
speed streaming 30
speed head 30
# Calls that take up to a second each.
speed decode 60 5
speed train 60 5
clocks_end

peers

if [ "$has_model" = yes ]; then
    verbs
    section "PPO quickstart on 2 and 4 ranks that share the GPU, and with cuBLASLt's products"
    if has_none cublaslt; then
        skipped "PPO, fast products" "$(sed -n 's/^cublaslt *//p' "$work/info" | cut -c1-120)"
    else
        ppo "one rank, fast products" 1 job.gemm=cublaslt
    fi
    ppo "2 ranks" 2
    ppo "4 ranks" 4
    # Weights that are divided, and come together in another layout to sample.
    ppo "4 ranks, ZeRO 3, tensor ranks to sample" 4 mesh.zero=3 mesh.tensor=1 rollout.tensor=2
    if grep -Eq '^cuda .* [0-9]+ GPUs' "$work/info" && ! grep -Eq '^cuda .* 1 GPUs' "$work/info"; then
        if has_none nccl; then
            skipped "PPO, 2 GPUs" "$(sed -n 's/^nccl *//p' "$work/info" | cut -c1-120)"
        else
            if [ -n "$visible" ]; then export CUDA_VISIBLE_DEVICES=$visible; else unset CUDA_VISIBLE_DEVICES; fi
            ppo "2 ranks on 2 GPUs, NCCL" 2 job.collectives=nccl
        fi
    fi
    steps
fi

inside
memcheck
section "Whole tiny jobs on the GPU, against the CPU and each other; kernel tests that were left"
mapfile -t jobs < <(modules -e '^run')
check_tests "Tests of whole jobs" $((whole_s - 20)) ${later[@]+"${later[@]}"} "${jobs[@]}"
export LD_LIBRARY_PATH=$outside

section "Products of a 7B shape"
speed products 40

is_done=yes
publish
echo
summary
[ "$failures" = 0 ]
