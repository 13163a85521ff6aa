#!/usr/bin/env bash
# Rehearses what a machine with GPUs runs: makes a bundle, brings it to a bare system (bash, a few tools, glibc, nothing of this
# project), and runs gpu.sh there from start to end on a driver, a cuBLASLt, an NCCL and an nvidia-smi that are played. Sizes are
# tiny; the lines that run are those that run on a GPU.
#
#   tests/rehearsal.sh [folder]          default: target/rehearsal, where the report stays
#
# BUNDLE names a bundle that is there already, ROOMS is a pattern of the rooms of facts to run ('.': all). Without the right to
# change the root (unshare, chroot) it runs in place. Kernels are played only where the binary has machine code, so it needs a
# compiler of CUDA as bench/bundle.sh does.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:-target/rehearsal}")
bundle=${BUNDLE:-$folder/bundle}
tools="bash sh env cat cp rm mkdir mv ls tee head tail cut tr sort uniq wc date mktemp nproc realpath readlink dirname basename id
    sed grep df timeout sleep printf true uname touch chmod ln"

mkdir -p "$folder"
[ -n "${BUNDLE:-}" ] || bench/bundle.sh "$bundle"

root=$folder/root
rm -rf "$root" "$folder/report.md"
mkdir -p "$root"/{bin,proc,dev,tmp,elsewhere,played,lib64} "$root/usr"
ln -s ../bin "$root/usr/bin"
cp -a "$bundle" "$root/elsewhere/a folder"
fact=driver::a_machine_s_libraries_stand_in_one_folder
PLAYED_LIBRARIES=$root/played "$bundle/bin/kernels" --exact "$fact" >"$folder/libraries.log" 2>&1 ||
    { cat "$folder/libraries.log"; exit 1; }

# Programs and the libraries that they need; of libraries for the bundle glibc alone, and what the played ones are made of.
libraries() { ldd "$@" 2>/dev/null | sed -n 's/.* => \(\/[^ ]*\) (.*/\1/p; s/^\t\(\/[^ ]*\) (.*/\1/p' | sort -u; }
for tool in $tools; do cp -L "$(type -P "$tool")" "$root/bin/"; done
for library in $(libraries "$root"/bin/* "$root"/played/*); do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done
for name in libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libutil.so.1 libresolv.so.2 libnss_files.so.2; do
    path=$(ldconfig -p | sed -n "s/^\t$name (.*x86-64.*) => //p" | head -1)
    if [ -n "$path" ]; then
        mkdir -p "$root$(dirname "$path")"
        cp -L "$path" "$root$path"
    fi
done

cat >"$root/bin/nvidia-smi" <<'END'
#!/bin/bash
# Played: as many fields as are asked for, of two GPUs; again each second with -l.
again=no fields=
for word in "$@"; do
    case "$word" in
        --query-gpu=*) fields=${word#--query-gpu=} ;;
        -l) again=yes ;;
    esac
done
value() {
    case "$1" in
        name) echo "Played GPU" ;;
        driver_version) echo "580.00" ;;
        memory.total) echo 1024 ;;
        clocks.*) echo 1410 ;;
        power.*) echo 400.00 ;;
        temperature.gpu) echo 41 ;;
        *) echo Disabled ;;
    esac
}
while :; do
    for gpu in 0 1; do
        row=
        for field in ${fields//,/ }; do row="$row${row:+, }$(value "$field")"; done
        echo "$row"
    done
    [ "$again" = yes ] || exit 0
    sleep 1
done
END
chmod 755 "$root/bin/nvidia-smi"

# Few prompts, short responses: each kernel is played thread by thread.
ppo="job.steps=2 rollout.prompts_per_step=2 rollout.response_tokens_max=4 ppo.minibatch_samples=2 eval.every_steps=0"
# One room of each kind: alone, products of either mode, several ranks, whole jobs.
rooms=${ROOMS:-^(attention|copy|fast|residual|visit|reshard|run_loss)$}
settings=(HOME=/tmp TMPDIR=/tmp GPU_SH_SMALL=1 "GPU_SH_PPO=$ppo" "GPU_SH_ROOMS=$rooms" GPU_SH_SLOW=4 OMPI_MCA_mpi_yield_when_idle=1)
begin=$SECONDS
code=0
if [ "$(id -u)" = 0 ] && unshare --mount true 2>/dev/null; then
    where="a root of its own"
    export root
    # shellcheck disable=SC2016
    unshare --mount bash -c 'mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev" && shift 0 &&
        exec chroot "$root" /bin/env -i "$@"' rehearsal PATH=/bin LD_LIBRARY_PATH=/played \
        PLAYED_KERNELS=/played/libcublasLt.so.12 "${settings[@]}" "/elsewhere/a folder/gpu.sh" /tmp/report.md >"$folder/log" 2>&1 || code=$?
    cp "$root"/tmp/report.{md,jsonl} "$folder/"
else
    where="this system's root"
    env -i PATH="$root/bin:$PATH" LD_LIBRARY_PATH="$root/played" PLAYED_KERNELS="$root/played/libcublasLt.so.12" "${settings[@]}" \
        "$root/elsewhere/a folder/gpu.sh" "$folder/report.md" >"$folder/log" 2>&1 || code=$?
fi
echo "gpu.sh in $where: exit code $code, $((SECONDS - begin)) s; $folder/report.md"

wrong=0
must() { # words of a line that the report has
    grep -Eq -- "$1" "$folder/report.md" && return
    echo "error: the report has no line with: $1" >&2
    wrong=1
}
[ "$code" = 0 ] || { echo "error: exit code $code" >&2; wrong=1; }
must '^\*\*Nothing failed\.\*\*'
must '^Played GPU, driver 580.00, GPUs: 2; 1024 MiB'
must '^\| Machine \| [0-9]+ \| passed \|'
must '^\| Kernel facts \| [0-9]+ \| [0-9]+ facts passed in [0-9]+ rooms, rooms with failures: none \|'
must '^\| Facts about whole jobs \| [0-9]+ \| [0-9]+ facts passed in [0-9]+ rooms, rooms with failures: none \|'
for job in "one rank, exact products" "one rank, fast products" "2 ranks" "4 ranks" "4 ranks, ZeRO 3, tensor ranks to sample" \
    "2 ranks on 2 GPUs, NCCL"; do
    must "^\| PPO, $job \| [0-9]+ \| passed \|"
done
must '^\| Verbs \| [0-9]+ \| passed, logprobs 0\.[0-9]+ apart at most, reward 0\.[0-9]+ apart at most \|'
for part in attention streaming head decode train products; do must "^\| Speed: $part \| [0-9]+ \| passed, [0-9]+ works"; done
for target in 'attention forward, 64 tokens, 4 heads of 128.*60 % of product' 'attention backward.*50 % of product' \
    'decode attention, 2 x 64.*85 % of copy' 'rmsnorm, .*85 % of copy' 'adamw, .*85 % of copy' 'log-softmax, .* f32 .*85 % of copy' \
    'log-softmax fused.*70 % of product' 'decode 7B, 1 x .*graphs.*75 % of copy' 'training step 1B, .*exact.*45 % of product' \
    'training step 1B, .*fast.*45 % of product'; do
    must "^\| $target"
done
must '^\| Memcheck \|  \| skipped: there is no compute-sanitizer'
must '^Meanwhile: SM clock 1410 to 1410 MHz, '
# What PyTorch is held against: on a processor, where there is one at all.
if python3 -c 'import torch' 2>/dev/null; then
    python3 bench/peers/gpu.py --device cpu --small --ours "$folder/report.jsonl" | tee "$folder/peers.md" || wrong=1
    grep -q "^| attention forward.*target PyTorch's flash backend" "$folder/peers.md" || wrong=1
else
    echo "skipped: PyTorch's part, as python3 has no torch"
fi
for wrong_word in '^FAILED' 'command not found' 'No such file' 'unbound variable' 'syntax error'; do
    ! grep -n "$wrong_word" "$folder/report.md" "$folder/log" || wrong=1
done
if [ "$wrong" != 0 ]; then
    tail -40 "$folder/log"
    exit 1
fi
