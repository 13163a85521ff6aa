// The KV cache of a layer: pages of PAGE tokens, [g][PAGE][e] for keys and for values. In 8 bits, PAGE powers follow each head.
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

// kv_append_codes  keys[page of token][g][token % PAGE] = k[row][g] in 8 bits (kv_codes.cuh), values alike of v; k has been turned
// k, v (t, g e) bf16; keys, values (pages, g, PAGE (e + 1)) u8: codes [PAGE][e] and powers [PAGE] of a head; slots as kv_append
// grid ceil(2 t g wide / 256), block 256: eight values a thread, wide threads a head, e / 8 rounded up to a power of two; needs
// e % 8 == 0, e <= 256
// roofline 6 t g e bytes
KERNEL __launch_bounds__(256) kv_append_codes(const bf16* k, const bf16* v, u8* keys, u8* values, const i32* slots, u32 t,
                                              u32 kv_heads, u32 e, u32 wide) {
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x, at = index % wide * 8, all = index / wide;
    const u32 row = all / (2 * kv_heads), head = all % (2 * kv_heads) % kv_heads;
    const bool is_key = all % (2 * kv_heads) < kv_heads;
    const i32 slot = row < t ? slots[row] : -1;
    const bool is_there = slot >= 0 && at < e;
    float x[8] = {};
    if (is_there) load_eight((is_key ? k : v) + ((u64)row * kv_heads + head) * e + at, x);
    const u32 power = power_of(x, wide);
    if (!is_there) return;
    u8* to = (is_key ? keys : values) + ((u64)(slot / PAGE) * kv_heads + head) * (PAGE * (e + 1));
    *(Codes*)(to + slot % PAGE * e + at) = codes_of(x, power);
    if (at == 0) to[PAGE * e + slot % PAGE] = (u8)power;
}

// kv_round  x = the nearest values in 8 bits (kv_codes.cuh)
// x (heads, e) bf16 in place
// grid ceil(heads wide / 256), block 256, wide as kv_append_codes; needs e % 8 == 0, e <= 256
// roofline 4 heads e bytes
KERNEL __launch_bounds__(256) kv_round(bf16* x, u32 heads, u32 e, u32 wide) {
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x, head = index / wide, at = index % wide * 8;
    const bool is_there = head < heads && at < e;
    bf16* own = x + (u64)head * e + at;
    float values[8] = {};
    if (is_there) load_eight(own, values);
    const u32 power = power_of(values, wide);
    if (is_there) *(Eight*)own = values_of(codes_of(values, power), power);
}

// kv_copy_pages  page to[i] = page from[i], for keys and values
// keys, values (pages, page_len) of two bytes each; pairs (n, 2) i32: from, to; no page is both read and written
// grid (n, ceil(page_len / 2048)), block 256, eight values a thread; needs page_len % 8 == 0
// roofline 8 n page_len bytes
KERNEL kv_copy_pages(bf16* keys, bf16* values, const i32* pairs, u64 page_len) {
    u64 at = ((u64)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (at >= page_len) return;
    u64 from = pairs[2 * blockIdx.x] * page_len + at, to = pairs[2 * blockIdx.x + 1] * page_len + at;
    *(Eight*)(keys + to) = *(const Eight*)(keys + from);
    *(Eight*)(values + to) = *(const Eight*)(values + from);
}
