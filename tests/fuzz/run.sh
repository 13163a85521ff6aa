#!/usr/bin/env bash
# Runs a fuzz target (fuzz_targets/main.rs) without cargo-fuzz. Usage: run.sh TARGET INPUTS [OPTION OF LIBFUZZER]...
set -euo pipefail
cd "$(dirname "$0")"
# The versions of the program. Only the program, the targets and the decoder of JPEG files are instrumented: so most
# parsers are, as serde's are compiled into the program.
[ -e Cargo.lock ] || cp ../../Cargo.lock .
export RUSTC_WRAPPER=$PWD/rustc.sh CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target} HDF5_USE_FILE_LOCKING=FALSE
cargo build --quiet
foreign=$CARGO_TARGET_DIR/debug/foreign
export TARGET=$1
SEEDS=corpus/$TARGET $foreign
mkdir -p artifacts
exec $foreign -runs="$2" -max_len=16384 -timeout=60 -rss_limit_mb=8192 -detect_leaks=0 -print_final_stats=1 \
  -artifact_prefix="artifacts/$TARGET-" "${@:3}" "corpus/$TARGET"
