// Sums of rows that share a destination, from lists: destination keys[i] receives rows[starts[i]..starts[i + 1]], in order.
#pragma once
#include "eight.cuh"

// Rows that are loaded at once: a token may occur a thousand times, and its sum is one chain.
#define ROWS_AHEAD 8

// to[destination][at..at + 8] += its rows of `from`, one after another in f32, rounded where `to` is bf16 once. Block x is
// a list, block y a stretch of columns; destinations outside first..first + n are left.
template <class T>
DEVICE void add_lists(const bf16* from, const u32* keys, const u32* starts, const u32* rows, T* to, u32 first, u32 n,
                      u32 width) {
    u32 at = (blockIdx.y * blockDim.x + threadIdx.x) * 8, place = keys[blockIdx.x] - first;
    // Also where the key lies below `first`: the difference is then beyond every n.
    if (at >= width || place >= n) return;
    u32 begin = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    T* own = to + (u64)place * width + at;
    float sum[8], x[8];
    load_eight(own, sum);
    for (u32 k = begin; k < end; k += ROWS_AHEAD) {
        Eight ahead[ROWS_AHEAD];
#pragma unroll
        for (u32 j = 0; j < ROWS_AHEAD; j++) {
            if (k + j < end) ahead[j] = load_eight(from + (u64)rows[k + j] * width + at);
        }
#pragma unroll
        for (u32 j = 0; j < ROWS_AHEAD; j++) {
            if (k + j >= end) continue;
            widen(ahead[j], x);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] += x[i];
        }
    }
    store_eight(own, sum);
}
