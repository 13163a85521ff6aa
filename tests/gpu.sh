#!/usr/bin/env bash
# Checks and measures this machine's GPUs with the files of a bundle (bench/bundle.sh), where this script is. It
# reports:
#
# - the resources that the driver gives each kernel, and kernel tests
# - PPO on 1, 2 and 4 ranks with GEMMs of either mode, and the verbs that use a model
# - the speed of kernels compared with the machine's peaks and with PyTorch
# - six kernels under ncu and short tests under compute-sanitizer, if these tools are installed
#
#   ./gpu.sh [report]          default: gpu-report.md here; ends in under 10 minutes
#
# The most informative parts come first: tests of the most important kernels, one job with the gaps of its self-test,
# and the rates of GEMMs, to which all targets are relative. Then come the other targets; tests of tensors beyond 2^32
# values are last. Each section has a time limit. The report is written again after each section, with the summary at
# the top, so a section that hangs loses only itself. Skipped parts give the reason. The exit code is 0 if nothing
# failed, 1 if something did, 3 if a GPU was not found. A missed target is not a failure.
#
# The measurements are in gpu-report.jsonl next to the report, one JSON object per line.
#
# GPU_SH_SECONDS=180 ends earlier, GPU_SH_MODULES is a pattern of the kernel tests to run.
set -uo pipefail
here=$(cd "$(dirname "$(readlink -f "$0")")" && pwd)
report=$(realpath -m "${1:-gpu-report.md}")
work=$(mktemp -d)
begin=$SECONDS
whole_s=${GPU_SH_SECONDS:-540}
failures=0
is_done=no
touch "$work/body" "$work/results" "$work/record" "$work/failed"
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
row() { printf '| %s | %s | %s |\n' "$@" >>"$work/results"; } # what, seconds, how it ended
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
    row "$1" "" "skipped: $2"
}

# Rows of the workloads that have a target: from the records of `bench cuda`, and from the comparison with PyTorch.
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
        echo "No target was measured."
    else
        echo "$reached reached, $missed missed. Shares are relative to the peaks of this run, in brackets to the declared peaks."
        printf '\n| Work | Target | Measured | Verdict |\n|---|---|---|---|\n'
        targets
    fi
}

publish() {
    { summary && cat "$work/body"; } | cat -s >"$work/report" && cp "$work/report" "$report"
    cp "$work/record" "${report%.md}.jsonl"
}
started=$(date -u '+%F %T')
trap 'publish; rm -rf "$work"' EXIT
trap 'exit 143' TERM INT

# ---- limits ----

left() { echo $((whole_s - (SECONDS - begin))); }

how_it_ended() { # exit code
    case "$1" in
        0) echo "passed" ;;
        124 | 137) echo "did not end within its time limit" ;;
        *) echo "exit code $1" ;;
    esac
}

# Runs a command with a time limit, and never beyond the time of the whole. Sets `code`, `ended` (text) and `took`
# (seconds).
try() { # seconds, log, command...
    local log=$2 most=$(($1 < $(left) ? $1 : $(left))) from=$SECONDS
    shift 2
    code=124
    if [ "$most" -gt 0 ]; then
        timeout --signal=TERM --kill-after=5 "$most" "$@" </dev/null >"$log" 2>&1
        code=$?
    fi
    took=$((SECONDS - from))
    ended=$(how_it_ended "$code")
}

# Adds a row about the last command to the summary, and a failure if it failed.
result() { # what, more words
    row "$1" "$took" "$ended${2:+, $2}"
    [ "$code" = 0 ] || failed "$1: $ended${2:+, $2}"
    publish
}

is_time_for() { # what, seconds that it needs at least
    [ "$(left)" -ge "$2" ] && return
    skipped "$1" "no time was left"
    return 1
}

# ---- the machine ----

has_none() { grep -Eq "^$1 +none" "$work/info"; }

look_at_the_machine() {
    local first fields gpu driver memory sm mem watts mode ecc mig
    try 30 "$work/info" "$here/rlhf-hpc" info
    section "Machine"
    block "$(cat "$work/info")"
    fields=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,compute_mode,ecc.mode.current
    first=$(timeout 20 nvidia-smi --query-gpu="$fields,mig.mode.current" --format=csv,noheader,nounits 2>/dev/null)
    if [ -n "$first" ]; then
        IFS=, read -r gpu driver memory sm mem watts mode ecc mig <<<"$first"
        machine="$gpu, driver${driver}, GPUs: $(wc -l <<<"$first"); ${memory# } MiB, clocks up to ${sm# } MHz (memory ${mem# }),"
        machine="$machine power up to ${watts# } W, compute mode ${mode# }, ECC ${ecc# }, MIG ${mig# }; $(nproc) cores."
    elif grep -Eq '^cuda +driver' "$work/info"; then
        machine="$(sed -n 's/^ *GPU 0 at/GPU 0 at/p' "$work/info" | head -1) (no nvidia-smi: driver and clocks are unknown)."
    fi
    say "" "$machine"
    result "Machine"
    try 20 "$work/taken" "$here/rlhf-hpc" info --kernels
    say "" "$(cat "$work/taken")"
    result "Kernel resources" "with local memory: $(grep -c '^| .* [1-9][0-9]* |$' "$work/taken")"
    if ! grep -Eq '^cuda +driver' "$work/info" || grep -Eq '^cuda .* 0 GPUs' "$work/info"; then
        skipped "everything else" "no GPU: $(sed -n 's/^cuda *//p' "$work/info" | head -1)"
        is_done=yes
        exit 3
    fi
}

# ---- kernel tests ----

# Modules that are about emulated libraries need a compiler and the sources.
modules() { # -ve or -e, pattern of modules: all but those, or those
    "$here/bin/kernels" --list 2>/dev/null | sed -n 's/: test$//p' | cut -d: -f1 | sort -u |
        grep -Ev '^(embedded|emulation|driver|nccl)$' | grep -E "$1" "$2" | grep -E "${GPU_SH_MODULES:-.}"
}
# The most important ones: fragments, shared memory beyond 48 KiB, captures.
most='matmul|attention|paged_attention|linear_logprob|linear_logprob_fused|fast|sample|adamw|model|rollout'

# One process for each module of tests, some at once: a kernel that breaks the GPU's context affects no other module.
check_tests() { # what, second of the whole until which modules begin, modules: those for which there was no time are in `late`
    local what=$1 until=$2 from=$SECONDS at_once=$(($(nproc) / 4)) count=0 passed=0 ran=0 broken=() module log
    shift 2
    late=()
    at_once=$((at_once < 1 ? 1 : at_once > 4 ? 4 : at_once))
    for module in "$@"; do
        log=$work/tests-$module
        if [ $((SECONDS - begin)) -ge "$until" ]; then
            late+=("$module")
            continue
        fi
        [ "$count" -lt "$at_once" ] || { wait -n; count=$((count - 1)); }
        (
            # A filter also matches in the middle of a name: run_loss does not belong to loss.
            # Tests of far tensors take long under the emulation, which skips them by default.
            [ "$module" = far ] && ignored=--include-ignored || ignored=
            try 60 "$log" env RLHF_HPC_KERNELS=gpu "$here/bin/kernels" "$module::" --skip "_$module::" --test-threads=1 $ignored
            echo "$code" >"$log.code"
        ) &
        count=$((count + 1))
    done
    wait
    for module in "$@"; do
        log=$work/tests-$module
        [ -e "$log.code" ] || continue
        ran=$((ran + 1))
        passed=$((passed + $(grep -c '^test .* ok$' "$log")))
        ended=$(how_it_ended "$(cat "$log.code")")
        [ "$ended" != passed ] || continue
        broken+=("$module")
        say "" "### $module: $ended"
        block "$(grep -E '^test .*FAILED|panicked at|^kernel |error|assert' -A2 "$log" | cut -c1-300 | head -30
            grep -v '^$' "$log" | tail -1 | cut -c1-300)"
    done
    code=${#broken[@]} took=$((SECONDS - from))
    ended="$passed tests passed in $ran modules, modules with failures: ${broken[*]:-none}${late[*]:+, no time for: ${late[*]}}"
    say "" "$ended."
    result "$what"
}

# Short tests under CUDA's own checkers, if they are installed: accesses outside of a kernel's memory, threads of a
# block that use the same shared memory without a barrier between, and barriers that not all threads reach.
sanitizers() {
    local tool name log filter
    section "Kernel tests under compute-sanitizer"
    tool=$(PATH=$PATH:/usr/local/cuda/bin type -P compute-sanitizer)
    if [ -z "$tool" ]; then
        skipped "Sanitizers" "compute-sanitizer was not found in PATH or /usr/local/cuda/bin"
        return
    fi
    while read -r name filter; do
        is_time_for "$name" 15 || continue
        log=$work/$name
        # shellcheck disable=SC2086
        try 45 "$log" env RLHF_NO_CUDA_MEMORY_CACHING=1 RLHF_HPC_KERNELS=gpu "$tool" --tool="$name" --error-exitcode=99 \
            "$here/bin/kernels" $filter --test-threads=1
        block "$(grep -E '^=========|^test .*FAILED|panicked at' "$log" | cut -c1-300 | head -40)"
        result "$name" "$(grep -c '^test .* ok$' "$log") tests passed"
    done <<'END'
racecheck attention::rows_without_visible_keys matmul::a_gemm_added_to_another
memcheck copy:: --skip _copy:: ops:: --skip _ops:: attention::rows_without_visible_keys
synccheck attention::rows_without_visible_keys matmul::a_gemm_added_to_another
END
}

# ---- PPO ----

prepare() {
    cp -r "$here/quickstart" "$work/"
    cd "$work/quickstart" || return 1
    "$here/rlhf-hpc" tokenizer work/arithmetic.jsonl --vocabulary 264 --out work/tokenizer &&
        "$here/rlhf-hpc" shard work/arithmetic.jsonl --tokenizer work/tokenizer --out work/shards/questions \
            --response-key demonstration --label-key answer --split-field split &&
        "$here/rlhf-hpc" init --config model.json --tokenizer work/tokenizer --out work/base --seed 1
}

# A job's devices and steps, or the last lines of its log if it failed.
excerpt() { # exit code
    if [ "$1" = 0 ]; then
        tr '\r' '\n' | sed -n '/^  devices/,/^  mesh/p; /^  gemm/p; /^step /p; /^[0-9]* steps in/p; /^  memory .*up to/p'
    else
        tr '\r' '\n' | grep -v '^$' | tail -30
    fi | cut -c1-200
}

runs=()
ppo() { # what, ranks, settings...
    local what=$1 ranks=$2 log name start
    shift 2
    is_time_for "PPO, $what" 15 || return
    name=$(tr '[:upper:]' '[:lower:]' <<<"$what" | tr -cs 'a-z0-9\n' -)
    log=$work/$name
    # One rank needs no launcher, and gives results even if that does not start.
    start=("$here/rlhf-hpc")
    [ "$ranks" = 1 ] || start=("$here/mpirun" --bind-to none --oversubscribe -n "$ranks" "$here/bin/rlhf-hpc")
    try 60 "$log" env -C "$work/quickstart" "${start[@]}" ppo.toml model.actor=work/base job.dir="work/$name" job.steps=5 \
        job.device=gpu model.dtype=bf16 "$@"
    runs+=("$name")
    say "" "### PPO, $what: $ended, $took s"
    block "$(excerpt "$code" <"$log")"
    result "PPO, $what"
}

# The steps of all runs: the cost of each mode, and the distance of the first ratios from one.
steps() {
    local name key row
    say "" "Each step of the runs above:" "" "| Run | What | Step by step |" "|---|---|---|"
    for name in "${runs[@]}"; do
        for key in time_step_s time_old_logprobs_s sampler_gap_max logprob_gap_max; do
            row=$(sed -n "s/.*\"$key\":\([^,}]*\).*/\1/p" "$work/quickstart/work/$name/metrics.jsonl" 2>/dev/null | cut -c1-8 | tr '\n' ' ')
            [ -z "$row" ] || say "| $name | $key | $row|"
        done
    done
}

# ---- speed ----

# Each part runs in a process of its own, with the peaks that this process measured.
speed() { # part, seconds, how often each work is measured
    local part=$1 log=$work/bench-$1 record=$work/record-$1 reached without
    is_time_for "Speed: $part" 10 || return
    try "$2" "$log" "$here/rlhf-hpc" bench cuda --part "$part" --repeats "${3:-7}" --record "$record"
    [ ! -e "$record" ] || cat "$record" >>"$work/record"
    block "$(cut -c1-300 "$log")"
    reached=$(sed -n 's/^\([0-9]* of [0-9]* targets reached\)$/, \1/p' "$log")
    without=$(sed -n 's/^skipped: /; skipped: /p' "$log" | tr -d '\n')
    result "Speed: $part" "$(cat "$record" 2>/dev/null | grep -c '^{') works$reached$without"
}

# One launch of each of six kernels under ncu: whether memory, L2 or the issue of instructions bounds it.
profile() {
    local tool kernel part log
    section "Six kernels under ncu"
    tool=$(PATH=$PATH:/usr/local/cuda/bin type -P ncu)
    if [ -z "$tool" ]; then
        skipped "ncu" "ncu was not found in PATH or /usr/local/cuda/bin"
        return
    fi
    while read -r part kernel; do
        is_time_for "ncu: $kernel" 10 || continue
        log=$work/ncu-$kernel
        # Clocks are the same as in the other sections. The profile is of the launch after the one that loads the
        # kernel.
        try 15 "$log" "$tool" --clock-control none --section SpeedOfLight --section MemoryWorkloadAnalysis --section Occupancy \
            --kernel-name "regex:^$kernel" --launch-skip 1 --launch-count 1 --kill yes \
            "$here/bin/rlhf-hpc" bench cuda --part "$part" --repeats 1
        say "" "### $kernel"
        block "$(grep -E 'Duration|Throughput|Hit Rate|Occupancy|Registers|ERR_' "$log" | sed 's/^ *//; s/  */ /g' | sort -u)"
        # Many sites restrict the counters: that is not a failure.
        if grep -q ERR_NVGPUCTRPERM "$log"; then
            skipped "ncu" "the driver restricts its counters to administrators (ERR_NVGPUCTRPERM)"
            return
        fi
        row "ncu: $kernel" "$took" "$ended"
    done <<'END'
products matmul_forward_256x128
products matmul_forward_64
attention attention_forward_128
attention attention_backward_128
attention paged_decode_128
head linear_logprob_fused
END
}

clocks_begin() {
    nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv,noheader,nounits -l 1 \
        >"$work/clocks" 2>/dev/null </dev/null &
    clocks=$!
}

range() { # column of the clocks, unit
    cut -d, -f"$1" "$work/clocks" | tr -d ' ' | grep -E '^[0-9.]+$' | sort -n | sed -n "1{h;s/\$/ to /p};\${s/\$/ $2/p}" | tr -d '\n'
}

clocks_end() {
    kill "$clocks" 2>/dev/null
    wait "$clocks" 2>/dev/null
    [ ! -s "$work/clocks" ] ||
        say "" "Meanwhile: SM clock $(range 1 MHz), memory clock $(range 2 MHz), power $(range 3 W), temperature $(range 4 C)."
}

peers() {
    section "PyTorch on the same GPU"
    is_time_for "PyTorch" 15 || return
    try 60 "$work/torch" python3 -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"'
    if [ "$code" != 0 ]; then
        skipped "PyTorch" "$(tail -1 "$work/torch" | cut -c1-100)"
        return
    fi
    try 75 "$work/peers" python3 "$here/gpu.py" --ours "$work/record"
    say "$(cut -c1-300 "$work/peers")"
    result "PyTorch" "$(grep -c '^| .* ms |' "$work/peers") works"
}

# ---- the whole ----

look_at_the_machine
# shellcheck source=tests/gpu_verbs.sh
. "$here/gpu_verbs.sh"
# shellcheck source=/dev/null
inside() { . "$here/environment.sh"; }
outside=${LD_LIBRARY_PATH:-}

section "Kernel tests on the GPU, compared with naive sums in f64"
inside
mapfile -t kernels < <(modules -e "^($most)$")
check_tests "Kernel tests" $((whole_s / 5)) ${kernels[@]+"${kernels[@]}"}
later=(${late[@]+"${late[@]}"})
export LD_LIBRARY_PATH=$outside

section "PPO quickstart on one GPU"
visible=${CUDA_VISIBLE_DEVICES:-}
has_model=no
if (prepare) >"$work/prepare" 2>&1; then
    has_model=yes
    CUDA_VISIBLE_DEVICES=$(echo "${visible:-0}" | cut -d, -f1)
    export CUDA_VISIBLE_DEVICES
    ppo "one rank, exact GEMMs" 1 job.gemm=exact
else
    block "$(tail -5 "$work/prepare")"
    failed "preparing the quickstart's model and data"
fi

section "Speed of the kernels, compared with the peaks of this machine"
clocks_begin
speed products 50
speed attention 45
# Calls that take up to a second each.
speed decode 50 5
speed train 50 5
speed head 25
speed streaming 25
clocks_end

inside
profile
export LD_LIBRARY_PATH=$outside
peers

if [ "$has_model" = yes ]; then
    section "PPO quickstart with cuBLASLt, and on 2 and 4 ranks that share the GPU"
    if has_none cublaslt; then
        skipped "PPO with cuBLASLt" "$(sed -n 's/^cublaslt *//p' "$work/info" | cut -c1-120)"
    else
        ppo "one rank, cuBLASLt" 1 job.gemm=cublaslt
    fi
    ppo "2 ranks" 2
    ppo "4 ranks" 4
    # Sharded weights, which are gathered in another layout to sample.
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
    verbs
fi

inside
sanitizers
section "Whole tiny jobs on the GPU, compared with the CPU and each other; the remaining kernel tests"
mapfile -t others < <(modules -ve "^(run.*|$most|far)$"; modules -e '^run')
check_tests "Other tests" $((whole_s - 30)) ${later[@]+"${later[@]}"} ${others[@]+"${others[@]}"}

section "Tensors beyond 2^32 values"
mapfile -t far < <(modules -e '^far$')
check_tests "Far tests" $((whole_s - 10)) ${far[@]+"${far[@]}"}
export LD_LIBRARY_PATH=$outside

is_done=yes
publish
echo
summary
[ "$failures" = 0 ]
