#!/usr/bin/env bash
# Writes bench/counts.md: what the instructions of every kernel do on typical shapes, counted while its PTX runs on the CPU.
# Usage: bench/kernels-counts.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/jobs/setup.sh"
ensure_nvcc
counts=$(mktemp)
trap 'rm -f "$counts"' EXIT
cd "$root"
PTX_COUNTS=$counts cargo test --release --test kernels -- --exact ptx::shapes::typical_shapes_are_counted
{
  cat <<'TEXT'
# What the kernels' instructions do

Counted while the PTX of nvcc runs on the CPU (`tests/kernels/ptx`), on the shapes of `tests/kernels/ptx/shapes.rs`, four
blocks of each launch. `bench/kernels-counts.sh` writes this file. It counts PTX, not machine code: ptxas drops moves, fuses and
reorders, and nothing here knows of latency.

- mma, shared, global, f32: shares of the instructions that warps issue; shared with ldmatrix and cp.async.
- banks: passes over the banks of shared memory, against one for each 32, 16 or 8 lanes that are served together. 1 is no conflict.
- sectors: bytes of the 32-byte sectors that lanes touch, against the bytes that they ask for. 1 is all of them used; less where
  lanes read the same.

| kernel | threads | instructions of a warp | mma | shared | global | f32 | banks | sectors |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
TEXT
  awk '{
    split("", n)
    for (i = 8; i <= NF; i++) { split($i, pair, "="); n[pair[1]] = pair[2] }
    all = 0
    split("mma ldmatrix copy shared global f32 f64 integer conversion move lanes control", classes, " ")
    for (c in classes) all += n[classes[c]]
    blocks = $3 * $4 * $5; if (blocks > 4) blocks = 4
    share = 100 / all
    banks = n["wavefronts_least"] ? sprintf("%.2f", n["wavefronts"] / n["wavefronts_least"]) : ""
    sectors = n["bytes"] ? sprintf("%.2f", 32 * n["sectors"] / n["bytes"]) : ""
    row = sprintf("| %s | %d | %d | %.1f %% | %.1f %% | %.1f %% | %.1f %% | %s | %s |", $2, $6, all / (blocks * $6 / 32), n["mma"] * share, \
      (n["shared"] + n["ldmatrix"] + n["copy"]) * share, n["global"] * share, n["f32"] * share, banks, sectors)
    if (!($2 in seen)) { seen[$2] = 1; order[++kernels] = $2 }
    rows[$2] = row
  }
  END { for (k = 1; k <= kernels; k++) print rows[order[k]] }' "$counts"
} >bench/counts.md.partial
mv bench/counts.md.partial bench/counts.md
