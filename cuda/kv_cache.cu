// The KV cache of a layer: pages of PAGE tokens, [g][PAGE][e] for keys and for values.
#include "paged.cuh"

// kv_append  keys[page of token][g][token % PAGE] = k[row][g], values alike
// k, v (t, g*e) bf16; keys, values (pages, g, PAGE, e) bf16; slots (t) i32: page * PAGE + place in the page,
// below 0 for rows that are not kept
// grid (t, ceil(g*e / 2048)), block 256, eight values a thread; needs e % 8 == 0
// roofline 8 t g e bytes
KERNEL kv_append(const bf16* k, const bf16* v, bf16* keys, bf16* values, const i32* slots, i32 kv_heads, i32 dim) {
    int at = (blockIdx.y * blockDim.x + threadIdx.x) * 8, width = kv_heads * dim;
    if (at >= width) return;
    int slot = slots[blockIdx.x];
    if (slot < 0) return;
    u64 from = (u64)blockIdx.x * width + at;
    u64 to = (u64)(slot / PAGE) * PAGE * width + (u64)(at / dim * PAGE + slot % PAGE) * dim + at % dim;
    *(Eight*)(keys + to) = *(const Eight*)(k + from);
    *(Eight*)(values + to) = *(const Eight*)(v + from);
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
