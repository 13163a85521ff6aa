#!/usr/bin/env bash
# Sets up, builds, and passes all tests. Usage: tests/run.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/jobs/setup.sh"
ensure_packages
ensure_rust
cd "$root"
# Many tests wait for jobs that they start.
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$((2 * $(nproc)))}"
# Builds the binary, too, beside the tests.
cargo test --release --locked --no-fail-fast
