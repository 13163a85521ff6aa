#!/usr/bin/env bash
# Writes bench/sass.md: what ptxas makes of the loops in which kernels multiply, read off the machine code.
# Usage: bench/kernels-sass.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/jobs/setup.sh"
ensure_nvcc
ensure_nvdisasm
tables=$(mktemp)
trap 'rm -f "$tables"' EXIT
cd "$root"
SASS_TABLES=$tables RLHF_REQUIRE_NVCC=1 cargo test --release --test kernels -- --exact sass::hot_loops_keep_to_their_instructions_without_local_memory
{
  cat <<TEXT
# What ptxas makes of the hot loops

The innermost loops with tensor core instructions, in the machine code that $("$RLHF_NVCC" --version | grep -o 'release .*' | head -1 | sed 's/release /nvcc /; s/,.*//') makes of \`cuda/\`, as nvdisasm
lists it. \`bench/kernels-sass.sh\` writes this file; the facts of \`tests/kernels/sass.rs\` hold its main figures. All of it is
reckoned: none of these kernels has run on a GPU.

Of a loop the way is taken on which most products and copies are: that of a tile which no mask touches, with the next tile under
way.

## Instructions of one turn of a warp

- slots: instructions for each mma.m16n8k16 (HMMA). A scheduler issues one a clock, an A100 takes 8 clocks for the product.
- copies: cp.async of 16 bytes a lane. global: other accesses of memory. local: spilled registers.

| kernel | architecture | all | mma | slots | ldmatrix | shared | copies | global | MUFU | f32 | min, max, select | convert | shuffle | barriers | local | integer | moves | branches |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
TEXT
  sed '/^$/,$d' "$tables"
  cat <<'TEXT'

## Clocks of one turn of a warp

- The clocks of each unit of a sub-partition, by the throughputs that the CUDA programming guide declares; of shared memory (128
  bytes a clock of a multiprocessor) a quarter belongs to each. An mma takes 8 clocks on an A100 (2048 multiply-adds at 1024 a
  clock of a multiprocessor), on a H100 4 / 0.629: mma.sync reached 62.9 % of its peak (arXiv:2501.12084,
  as quoted). Neither that figure nor the guide's has been compared with its text.
- stalls: the sum of the clocks that control bits make a warp wait between instructions, where no other warp fills them. Their
  places are those of Mesa's compiler (`nak`) and arXiv:1804.06826.
- behind: the fewest products between a group of copies and the wait for it: the next tile travels meanwhile.
- bound: the share of the tensor cores' rate that the slowest unit allows; alone and together: what a model of the scheduler
  reaches with one warp, and with the blocks of threads that fit on a multiprocessor of an A100. It assumes 24 clocks for shared
  memory, 18 for MUFU, 700 for memory, and knows nothing of L2, DRAM, instruction caches or register banks. Shares are of the
  rate of mma.sync, so those of sm_90a are of 62.9 % of the peak.
- Only kernels whose time is that of products have the last column: decoding (paged_decode, paged_scores, paged_values) and
  products of few rows are bound by memory.

| kernel | architecture | tensor | shared | MUFU | f32, IMAD | integer, min, convert | issue | stalls | behind | bound | alone | together |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
TEXT
  sed '1,/^$/d' "$tables"
} >bench/sass.md.partial
mv bench/sass.md.partial bench/sass.md
