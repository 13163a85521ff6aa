// Copies, casts and sums of flat runs, columns and rows.
#include "rows.cuh"

// y = y + s x for eight values of a thread, rounded once; any alignment.
template <class T> DEVICE void add_scaled(float s, const T* x, T* y, u64 len) {
    u64 at = flat_eight();
    if (at >= len) return;
    int count = eight_or_rest(at, len);
    bool aligned = is_aligned(x) && is_aligned(y);
    float a[8], b[8];
    load_up_to(x + at, count, aligned, a);
    load_up_to(y + at, count, aligned, b);
#pragma unroll
    for (int i = 0; i < 8; i++) b[i] = fmaf(s, a[i], b[i]);
    store_up_to(y + at, count, aligned, b);
}

// add_f32  y = y + x
// x, y (len) f32
// grid ceil(len / 2048), block 256, eight values a thread; any alignment
// roofline 12 len bytes
KERNEL __launch_bounds__(256) add_f32(const float* x, float* y, u64 len) { add_scaled(1.0f, x, y, len); }

// A thread copies `each` neighbouring columns of a row, 8 or 1; eight only if all of them are aligned to 16 bytes.
// A row has `across` such threads, or there is one row.
#define COLUMNS_PARAMETERS(From, To) \
    const From *from, u64 from_stride, To *to, u64 to_stride, u32 rows, u64 width, u32 each, u32 across
#define COLUMNS_ARGUMENTS from, from_stride, to, to_stride, rows, width, each, across

template <class From, class To> DEVICE void columns(COLUMNS_PARAMETERS(From, To)) {
    u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x, row = 0, column = index * each;
    if (rows != 1) {
        // Short division: the host has counted the threads in 32 bits.
        row = (u32)index / across;
        column = (u64)((u32)index % across) * each;
    }
    if (row >= rows || column >= width) return;
    from += row * from_stride + column;
    to += row * to_stride + column;
    if (each == 1) return store(to, load(from));
    float x[8];
    load_eight(from, x);
    store_eight(to, x);
}

// scale_bf16  x = s x
// x (len) bf16
// grid ceil(len / 2048), block 256, eight values a thread; any alignment
// roofline 4 len bytes
KERNEL __launch_bounds__(256) scale_bf16(float s, bf16* x, u64 len) {
    u64 at = flat_eight();
    if (at >= len) return;
    int count = eight_or_rest(at, len);
    bool aligned = is_aligned(x);
    float a[8];
    load_up_to(x + at, count, aligned, a);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] *= s;
    store_up_to(x + at, count, aligned, a);
}

// add_scaled_bf16  y = y + s x, rounded once
// x, y (len) bf16
// grid ceil(len / 2048), block 256, eight values a thread; any alignment
// roofline 6 len bytes
KERNEL __launch_bounds__(256) add_scaled_bf16(float s, const bf16* x, bf16* y, u64 len) {
    add_scaled(s, x, y, len);
}

// columns_bf16  to[r][c] = from[r][c], rows of both a stride apart
// from (rows, from_stride), to (rows, to_stride) bf16, of which `width` columns
// grid ceil(rows width / each / 256), block 256; needs across = width / each; each = 1, or 8 where all is in
// multiples of 8 at 16-byte alignment
// roofline 4 rows width bytes
KERNEL __launch_bounds__(256) columns_bf16(COLUMNS_PARAMETERS(bf16, bf16)) { columns(COLUMNS_ARGUMENTS); }

// columns_f32  as columns_bf16, f32 to f32
// grid and needs as columns_bf16
// roofline 8 rows width bytes
KERNEL __launch_bounds__(256) columns_f32(COLUMNS_PARAMETERS(float, float)) { columns(COLUMNS_ARGUMENTS); }

// columns_to_bf16  as columns_bf16, f32 rounded to bf16
// grid and needs as columns_bf16
// roofline 6 rows width bytes
KERNEL __launch_bounds__(256) columns_to_bf16(COLUMNS_PARAMETERS(float, bf16)) { columns(COLUMNS_ARGUMENTS); }

// columns_to_f32  as columns_bf16, bf16 to f32
// grid and needs as columns_bf16
// roofline 6 rows width bytes
KERNEL __launch_bounds__(256) columns_to_f32(COLUMNS_PARAMETERS(bf16, float)) { columns(COLUMNS_ARGUMENTS); }

// gather_rows  y[i] = x[rows[i]]
// x (any, d), y (count, d) bf16; rows (count) u32; eights = d / 8
// grid ceil(count eights / 256), block 256, eight values a thread; needs d % 8 == 0
// roofline 4 count d bytes
KERNEL __launch_bounds__(256) gather_rows(const bf16* x, const u32* rows, bf16* y, u32 count, u32 eights) {
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count * eights) return;
    ((Eight*)y)[index] = ((const Eight*)x)[(u64)rows[index / eights] * eights + index % eights];
}

// scatter_rows  x[key - first] += sum of y[i] over the i of that key, ascending, rounded once; other keys are left
// y (count, d), x (n, d) bf16; keys (lists), starts (lists + 1), rows (count) u32: the i of each key
// grid (lists, ceil(d / (8 block))), block 32 to 256, eight columns a thread; needs d % 8 == 0
// roofline 2 count d + 4 lists d bytes
KERNEL __launch_bounds__(256) scatter_rows(const bf16* y, const u32* keys, const u32* starts, const u32* rows, bf16* x,
                                           u32 first, u32 n, u32 d) {
    add_lists(y, keys, starts, rows, x, first, n, d);
}
