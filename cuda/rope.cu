// Rotary position embedding, half-split order (arXiv:2104.09864), in place.
#include "rope.cuh"

// rope_rotate  (x[i], x[i + e/2]) turned by the angle of the row's position, by its opposite where sign is -1; q then times
// the position's factor
// q (t, heads e), k (t, kv_heads e) bf16, k unread where kv_heads is 0; positions (t) u32; cos, sin (positions, e/2) f32;
// factors (positions) f32, or null
// grid ceil(t ceil((heads + kv_heads) / 4) e/16 / 256), block 256: eight pairs of four heads a thread; needs e % 16 == 0
// roofline 4 t (heads + kv_heads) e bytes
KERNEL __launch_bounds__(256, 3) rope_rotate(bf16* q, bf16* k, const u32* positions, const float* cos, const float* sin,
                                          const float* factors, float sign, u32 t, u32 heads, u32 kv_heads, u32 half) {
    turn_heads(positions, cos, sin, factors, sign, t, heads + kv_heads, half, [=](u32 row, u32 head) {
        u64 rank = head < heads ? (u64)row * heads + head : (u64)row * kv_heads + (head - heads);
        bf16* at = (head < heads ? q : k) + rank * 2 * half;
        return Turn{at, at, true, head < heads};
    });
}
