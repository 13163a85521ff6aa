// Rotary position embedding, half-split order (arXiv:2104.09864), in place.
#include "eight.cuh"

// Heads that share what a thread reads of the table.
#define ROPE_HEADS 4

// rope_rotate  (x[i], x[i + e/2]) turned by the angle of the row's position, by its opposite where sign is -1
// q (t, heads e), k (t, kv_heads e) bf16, k unread where kv_heads is 0; positions (t) u32; cos, sin (positions, e/2) f32
// grid ceil(t ceil((heads + kv_heads) / 4) e/16 / 256), block 256: eight pairs of four heads a thread; needs e % 16 == 0
// roofline 4 t (heads + kv_heads) e bytes
KERNEL __launch_bounds__(256) rope_rotate(bf16* q, bf16* k, const u32* positions, const float* cos, const float* sin,
                                          float sign, u32 t, u32 heads, u32 kv_heads, u32 half) {
    u32 chunks = half / 8, fours = (heads + kv_heads + ROPE_HEADS - 1) / ROPE_HEADS;
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= t * fours * chunks) return;
    u32 at = index % chunks * 8, four = index / chunks % fours, row = index / chunks / fours;
    bf16* place[ROPE_HEADS];
    Eight low[ROPE_HEADS], high[ROPE_HEADS];
#pragma unroll
    for (u32 j = 0; j < ROPE_HEADS; j++) {
        u32 head = four * ROPE_HEADS + j;
        bool of_q = head < heads;
        u64 rank = of_q ? (u64)row * heads + head : (u64)row * kv_heads + (head - heads);
        place[j] = head < heads + kv_heads ? (of_q ? q : k) + rank * 2 * half + at : nullptr;
        if (!place[j]) continue;
        low[j] = load_eight(place[j]);
        high[j] = load_eight(place[j] + half);
    }
    float c[8], s[8];
    u64 angle = (u64)positions[row] * half + at;
    load_eight(cos + angle, c);
    load_eight(sin + angle, s);
#pragma unroll
    for (u32 j = 0; j < ROPE_HEADS; j++) {
        if (!place[j]) continue;
        float a[8], b[8];
        widen(low[j], a);
        widen(high[j], b);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float x = a[i], y = b[i], turn = sign * s[i];
            a[i] = fmaf(x, c[i], -y * turn);
            b[i] = fmaf(y, c[i], x * turn);
        }
        store_eight(place[j], a);
        store_eight(place[j] + half, b);
    }
}
