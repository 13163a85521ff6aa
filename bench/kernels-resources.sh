#!/usr/bin/env bash
# Writes bench/resources.md: registers, shared memory and spills of every kernel, as the compiler reports them.
# Usage: bench/kernels-resources.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/jobs/setup.sh"
ensure_nvcc
export RLHF_REQUIRE_NVCC=1
build "$root"
# Hides a GPU, so that the compiler's report covers both architectures.
RLHF_CUDA_LIB=/nowhere "$RLHF_HPC" info --kernels >"$root/bench/resources.md.partial"
mv "$root/bench/resources.md.partial" "$root/bench/resources.md"
