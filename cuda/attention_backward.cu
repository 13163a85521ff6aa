// Gradients of causal grouped-query attention over packed rows. arXiv:2205.14135 algorithm 4, 2307.08691 section 3.1.
//
// p = exp(scale s - lse), s = q.k; ds = p (d_o.v - delta), delta = d_o.o; dq = scale ds k, dk = scale ds^T q, dv = p^T d_o.
// One kernel computes all five GEMMs of a pair of tiles: a block has 128 keys of one key head and loops over the rows
// that attend to them, in steps of 64 for each head of the group, from the last rows to the first. dk and dv stay in
// registers: two warps share 32 keys, each computes s and d_o.v for half of the step's rows, and one accumulates dk,
// the other dv. So each has half of its factors in its own registers and half in shared memory. From there all warps
// compute the step's ds k.
//
// dq is a sum over blocks, in f32 and in one order: a counter for 64 rows and a head is the number of the next block
// that may add, ascending by keys. The first block stores instead of adding, the last one rounds. No order of blocks
// can hang or change a bit: blocks choose their work by the order in which they start, keys ascending, so each waits
// only for blocks that have started. Waits are short: all blocks of a span loop in the same direction, and an earlier
// one is ahead.
//
// Estimate for a step of head dim 128 on an A100 (not yet run on a GPU): 2560 tensor core instructions, 5120 clocks;
// shared memory 4224 wavefronts of ldmatrix and 600 others, one clock each; about 1150 instructions of each of 8 warps,
// 2300 of the 5120 slots of a scheduler; 32 KiB read from L2 and 32 KiB added there, at most 13 bytes per clock of a
// multiprocessor, and L2 has about 47. So tensor cores and shared memory are equally busy. At half the peak rate of the
// tensor cores, the other half of the time remains for work that does not overlap. Head dim 64: 2560 clocks of tensor
// cores, 2900 of shared memory.
#include "attention_backward.cuh"
#include "eight.cuh"

// delta of a row and head: the sum of d_o o, by a fixed half warp.
template <class T> DEVICE void delta_of(const T* o, const bf16* d_o, float* delta, i32 head_dim, u64 count) {
    const u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 16;
    float sum = 0.0f;
    for (int lane = threadIdx.x % 16 * 8; at < count && lane < head_dim; lane += 128) {
        float left[8], right[8];
        load_eight(o + at * head_dim + lane, left);
        load_eight(d_o + at * head_dim + lane, right);
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(left[i], right[i], sum);
    }
    for (int lanes = 8; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
    if (at < count && threadIdx.x % 16 == 0) delta[at] = sum;
}

#define PARAMETERS                                                                                                       \
    const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *d_o, const float *lse, const float *delta,                  \
        const KeyTile *tiles, u32 *counters, float *sums, i32 heads, i32 group, i32 window, float scale, float cap,      \
        void *dq, i32 dq_form, void *dk, void *dv, i32 dk_form
#define ARGUMENTS \
    q, k, v, d_o, lse, delta, tiles, counters, sums, heads, group, window, scale, cap, dq, dq_form, dk, dv, dk_form

// attention_delta  delta[t][h] = sum_e d_o[t][h][e] o[t][h][e]
// o (T, heads, E) bf16, or f32 (attention_delta_f32); d_o (T, heads, E) bf16; delta (count = T heads) f32
// grid ceil(count / 8), block 128, 16 threads a row and head; needs E % 8 == 0, 16-byte alignment
// roofline 4 E bytes a row and head, 6 E where o is f32
KERNEL attention_delta(const bf16* o, const bf16* d_o, float* delta, i32 head_dim, u64 count) {
    delta_of(o, d_o, delta, head_dim, count);
}
KERNEL attention_delta_f32(const float* o, const bf16* d_o, float* delta, i32 head_dim, u64 count) {
    delta_of(o, d_o, delta, head_dim, count);
}

// attention_backward_E  dk[j] = scale sum_t ds[t][j] q[t], dv[j] = sum_t p[t][j] d_o[t] over all heads of the group,
// dq[t] = scale sum_j ds[t][j] k[j]; with a cap, ds has the factor 1 - tanh(q.k / cap)^2, and p is of capped scores
// q, d_o (T, heads E), k, v (T', heads / group E) bf16; lse, delta (T, heads) f32; dq as q, dk, dv as k and v: bf16 (form 0),
// f32 (1), or f32 that is added to (2); keys without rows get 0
// tiles: up to 128 keys (of E = 256: 64) and all rows of their span, those of a span ascending; counters: 1 and one for each
// block of 64 rows and each head, all 0, as they are again at the end; sums: f32 for the rows of all spans of several tiles
// grid tiles x heads / group, block 256; shared memory as Shape<E>; needs 16-byte alignment
// roofline 10 E flops for each pair of a row and a visible key
KERNEL __launch_bounds__(256, 1) attention_backward_32(PARAMETERS) { backward<32>(ARGUMENTS); }
KERNEL __launch_bounds__(256, 1) attention_backward_64(PARAMETERS) { backward<64>(ARGUMENTS); }
KERNEL __launch_bounds__(256, 1) attention_backward_80(PARAMETERS) { backward<80>(ARGUMENTS); }
KERNEL __launch_bounds__(256, 1) attention_backward_96(PARAMETERS) { backward<96>(ARGUMENTS); }
KERNEL __launch_bounds__(256, 1) attention_backward_128(PARAMETERS) { backward<128>(ARGUMENTS); }
KERNEL __launch_bounds__(256, 1) attention_backward_256(PARAMETERS) { backward<256>(ARGUMENTS); }
