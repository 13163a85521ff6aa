// Rotation of heads by the angles of their rows' positions, in place (rope.cu) or while they are written to the cache
// (kv_cache.cu).
#pragma once
#include "eight.cuh"

// Heads that share a thread's loads from the table.
#define ROPE_HEADS 4

// The source and the destination of a head, whether it is rotated, and whether it is a query; a null source: nothing is
// done.
struct Turn {
    const bf16* from;
    bf16* to;
    bool turns, asks;
};

// Rotates `heads` heads of 2 half values in each of `t` rows, as described by `turn_of(row, head)`: (x[i], x[i + half])
// by the angle of the row's position, or by its opposite if sign is -1. Queries are then multiplied by the position's factor
// in `factors`; null: none. A thread has eight pairs of four heads.
template <class OF>
DEVICE void turn_heads(const u32* positions, const float* cos, const float* sin, const float* factors, float sign, u32 t,
                       u32 heads, u32 half, OF turn_of) {
    u32 chunks = half / 8, fours = (heads + ROPE_HEADS - 1) / ROPE_HEADS;
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= t * fours * chunks) return;
    u32 at = index % chunks * 8, four = index / chunks % fours, row = index / chunks / fours;
    Turn of[ROPE_HEADS];
    Eight low[ROPE_HEADS], high[ROPE_HEADS];
#pragma unroll
    for (u32 j = 0; j < ROPE_HEADS; j++) {
        u32 head = four * ROPE_HEADS + j;
        of[j] = head < heads ? turn_of(row, head) : Turn{};
        if (!of[j].from) continue;
        low[j] = load_eight(of[j].from + at);
        high[j] = load_eight(of[j].from + at + half);
    }
    float c[8], s[8];
    u64 angle = (u64)positions[row] * half + at;
    load_eight(cos + angle, c);
    load_eight(sin + angle, s);
    const float factor = factors ? factors[positions[row]] : 1.0f;
#pragma unroll
    for (u32 j = 0; j < ROPE_HEADS; j++) {
        if (!of[j].from) continue;
        float a[8], b[8];
        widen(low[j], a);
        widen(high[j], b);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float x = a[i], y = b[i], turn = sign * s[i];
            a[i] = of[j].turns ? fmaf(x, c[i], -y * turn) : x;
            b[i] = of[j].turns ? fmaf(y, c[i], x * turn) : y;
        }
        if (factors && of[j].asks) {
#pragma unroll
            for (int i = 0; i < 8; i++) a[i] *= factor, b[i] *= factor;
        }
        store_eight(of[j].to + at, a);
        store_eight(of[j].to + at + half, b);
    }
}
