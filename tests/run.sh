#!/usr/bin/env bash
# Sets up, builds, and runs all tests. Usage: tests/run.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/jobs/setup.sh"
ensure_packages
ensure_rust
# A test makes a certificate.
command -v openssl >/dev/null || apt_install openssl || { echo "error: openssl is missing (Debian: openssl)" >&2; exit 2; }
cd "$root"
# The python3 of a version manager is a script that looks for the real one at each start.
PATH="$(dirname "$(python3 -c 'import sys; print(sys.executable)')"):$PATH"
# Many tests only wait for jobs that they start.
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$((3 * $(nproc)))}"
# Also builds the binary.
cargo test --release --locked --no-fail-fast
