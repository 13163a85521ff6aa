#!/usr/bin/env bash
# Runs the tests that are too long for every change: a failure of each library call, a thousand kills, the plan of every
# layout, tensors beyond 2^31 values. Run by hand; its output is recorded in bench/runs. Usage: tests/long.sh [PART OF A
# NAME]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/jobs/setup.sh"
ensure_packages
ensure_rust
ensure_nvcc
cd "$root"
cargo test --release --locked --no-fail-fast --test library --test program --test kernels "$@" -- --ignored --nocapture
