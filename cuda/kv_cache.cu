// The KV cache of a layer: pages of PAGE tokens, [g][PAGE][e] for keys and for values.
#include "paged.cuh"
#include "rope.cuh"

// kv_append  q turned as by rope_rotate; keys[page of token][g][token % PAGE] = k[row][g] turned, values alike of v as it is
// q (t, heads e) in place, k, v (t, g e) bf16; keys, values (pages, g, PAGE, e) bf16; slots (t) i32: page * PAGE + place in the
// page, below 0 for rows that are not kept; positions (t) u32; cos, sin (positions, e/2), factors (positions) f32 as rope_rotate
// grid ceil(t ceil((heads + 2 g) / 4) e/16 / 256), block 256: eight pairs of four heads a thread; needs e % 16 == 0
// roofline 4 t (heads + 2 g) e bytes
KERNEL __launch_bounds__(256) kv_append(bf16* q, const bf16* k, const bf16* v, bf16* keys, bf16* values, const i32* slots,
                                        const u32* positions, const float* cos, const float* sin, const float* factors,
                                        u32 t, u32 heads, u32 kv_heads, u32 half) {
    turn_heads(positions, cos, sin, factors, 1.0f, t, heads + 2 * kv_heads, half, [=](u32 row, u32 head) {
        if (head < heads) {
            bf16* at = q + ((u64)row * heads + head) * 2 * half;
            return Turn{at, at, true, true};
        }
        bool is_key = head < heads + kv_heads;
        u32 own = head - heads - (is_key ? 0 : kv_heads);
        i32 slot = slots[row];
        if (slot < 0) return Turn{};
        u64 to = ((u64)(slot / PAGE) * kv_heads + own) * PAGE + slot % PAGE;
        const bf16* from = (is_key ? k : v) + ((u64)row * kv_heads + own) * 2 * half;
        return Turn{from, (is_key ? keys : values) + to * 2 * half, is_key, false};
    });
}

// kv_copy_pages  page to[i] = page from[i], for keys and values
// keys, values (pages, page_len) bf16; pairs (n, 2) i32: from, to; no page is both read and written
// grid (n, ceil(page_len / 2048)), block 256, eight values a thread; needs page_len % 8 == 0
// roofline 8 n page_len bytes
KERNEL kv_copy_pages(bf16* keys, bf16* values, const i32* pairs, u64 page_len) {
    u64 at = ((u64)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (at >= page_len) return;
    u64 from = pairs[2 * blockIdx.x] * page_len + at, to = pairs[2 * blockIdx.x + 1] * page_len + at;
    *(Eight*)(keys + to) = *(const Eight*)(keys + from);
    *(Eight*)(values + to) = *(const Eight*)(values + from);
}
