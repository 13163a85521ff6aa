#!/usr/bin/env bash
# Sets up, builds, and passes all tests. Usage: tests/run.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/jobs/setup.sh"
build "$root"
cd "$root"
cargo test --release --locked --no-fail-fast
