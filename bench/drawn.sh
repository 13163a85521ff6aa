#!/usr/bin/env bash
# Draws small jobs and holds each to what a job promises, on GPUs that are played on the CPU (or on CPUs: --device cpu). See
# drawn.py for what is held, and for the options.
#
#   bench/drawn.sh [--seed 0] [--count 20] [--ranks 1,2,4] [--device gpu|cpu]
#
# Jobs that fail stay in WORK (default: target/drawn), each with the lines that ran.
set -euo pipefail
cd "$(dirname "$0")/.."
. jobs/setup.sh
build .
work=$(realpath -m "${WORK:-target/drawn}")
libraries=$work/libraries
mkdir -p "$libraries"
PLAYED_LIBRARIES=$libraries cargo test --release --locked --test kernels -- --exact \
    driver::a_machine_s_libraries_stand_in_one_folder >"$work/libraries.log" 2>&1 || { cat "$work/libraries.log"; exit 1; }
export RLHF_HPC_PLAYED_GPU=$libraries/libcublasLt.so.12 RLHF_CUBLASLT_LIB=$libraries/libcublasLt.so.12
export RLHF_HPC_PLAYED_NCCL=$libraries/libnccl.so.2
exec python3 bench/drawn.py --binary "$RLHF_HPC" --work "$work" "$@"
