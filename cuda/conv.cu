// The causal convolution of each channel, then silu: y_t = silu(sum_j w_j x_(t - n + 1 + j)), n taps w. Inputs before a
// sequence are 0. The sum is one ascending chain over the taps.
#include "eight.cuh"
#include "glu.cuh"
#include "states.cuh"

#define TAPS_MAX 4
// Tokens of a block of the forward.
#define TOKENS 32

// w (channels, n) bf16, eight channels from `at` on: taps[j][i].
DEVICE void load_taps(const bf16* w, int at, int n, float (&taps)[TAPS_MAX][8]) {
#pragma unroll
    for (int j = 0; j < TAPS_MAX; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) taps[j][i] = j < n ? to_f32(w[(at + i) * n + j]) : 0.0f;
}

// Eight channels of input t of a sequence whose row 0 is `first`; before it those of the page, where the last of n - 1 is
// input -1; or 0.
DEVICE void load_input(const bf16* first, const float* past, int t, int n, int channels, float (&x)[8]) {
    if (t >= 0) return load_eight(first + (i64)t * channels, x);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = 0.0f;
    if (past) load_eight(past + (i64)(n - 1 + t) * channels, x);
}

// The sums of token t, before silu.
DEVICE void sums_of(const bf16* first, const float* past, const float (&taps)[TAPS_MAX][8], int t, int n, int channels,
                    float (&sum)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < TAPS_MAX; j++) {
        if (j >= n) continue;
        float x[8];
        load_input(first, past, t - n + 1 + j, n, channels, x);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = fmaf(taps[j][i], x[i], sum[i]);
    }
}

// conv_forward  y_t = silu(sum_j w_j x_(t - n + 1 + j))
// x, y (t, channels), w (channels, n) bf16; sequences, slots, pages as states.cuh: a page has the n - 1 inputs before the
// first new token (n - 1, channels) from value `offset` on
// grid (sequences, ceil(longest / 32), ceil(channels / 256)), block 256: a warp a token, eight channels a lane; needs
// channels % 8 == 0, n <= 4
// roofline 4 t channels bytes
KERNEL __launch_bounds__(256) conv_forward(const bf16* x, const bf16* w, const i32* sequences, const i32* slots, float* pages,
                                           u64 page_len, u64 offset, bf16* y, i32 channels, i32 n) {
    const Sequence sequence = ((const Sequence*)sequences)[blockIdx.x];
    const int at = (blockIdx.z * WARP + lane_id()) * 8, begin = blockIdx.y * TOKENS;
    if (at >= channels || begin >= sequence.tokens) return;
    const float* past = sequence.past > 0 ? page_of(sequence, slots, pages, page_len) : nullptr;
    if (past) past += offset + at;
    float taps[TAPS_MAX][8];
    load_taps(w, at, n, taps);
    const u64 first = (u64)sequence.row * channels + at;
    for (int t = begin + warp_id(); t < begin + TOKENS && t < sequence.tokens; t += 256 / WARP) {
        float sum[8];
        sums_of(x + first, past, taps, t, n, channels, sum);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = sum[i] * sigmoid(sum[i]);
        store_eight(y + first + (i64)t * channels, sum);
    }
}

// conv_keep  the last n - 1 inputs of each sequence to its page, after conv_forward
// as conv_forward
// grid (sequences, ceil(channels / 1024)), block 128, eight channels a thread; needs channels % 8 == 0, n <= 4
// roofline 8 n channels bytes a sequence
KERNEL __launch_bounds__(128) conv_keep(const bf16* x, const i32* sequences, const i32* slots, float* pages, u64 page_len,
                                        u64 offset, i32 channels, i32 n) {
    const Sequence sequence = ((const Sequence*)sequences)[blockIdx.x];
    const int at = (blockIdx.y * 128 + threadIdx.x) * 8;
    float* page = page_of(sequence, slots, pages, page_len);
    if (at >= channels || !page) return;
    page += offset + at;
    // Ascending, so that an input is read before a later one takes its place.
    for (int j = 0; j < n - 1; j++) {
        float kept[8];
        load_input(x + (u64)sequence.row * channels + at, sequence.past > 0 ? page : nullptr, sequence.tokens - n + 1 + j, n,
                   channels, kept);
        store_eight(page + (i64)j * channels, kept);
    }
}

// conv_slope  dsum_t = dy_t silu'(sum_t) in place of dy, for whole sequences
// x, dy (t, channels), w (channels, n) bf16; sequences as states.cuh
// grid and needs as conv_forward
// roofline 6 t channels bytes
KERNEL __launch_bounds__(256) conv_slope(const bf16* x, const bf16* w, const i32* sequences, bf16* dy, i32 channels, i32 n) {
    const Sequence sequence = ((const Sequence*)sequences)[blockIdx.x];
    const int at = (blockIdx.z * WARP + lane_id()) * 8, begin = blockIdx.y * TOKENS;
    if (at >= channels || begin >= sequence.tokens) return;
    float taps[TAPS_MAX][8];
    load_taps(w, at, n, taps);
    const u64 first = (u64)sequence.row * channels + at;
    for (int t = begin + warp_id(); t < begin + TOKENS && t < sequence.tokens; t += 256 / WARP) {
        float sum[8], slope[8];
        sums_of(x + first, nullptr, taps, t, n, channels, sum);
        load_eight(dy + first + (i64)t * channels, slope);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float s = sigmoid(sum[i]);
            slope[i] *= s * (1.0f + sum[i] * (1.0f - s));
        }
        store_eight(dy + first + (i64)t * channels, slope);
    }
}

// conv_backward  dx_t = sum_j w_j dsum_(t + n - 1 - j); parts[b][c][j] = sum_t dsum_t[c] x_(t - n + 1 + j)[c] over the `each`
// rows of block b
// x, dsum (conv_slope), dx (t, channels), w (channels, n) bf16; bounds (t, 2) u32: the first row of a row's sequence, and its
// end; parts (ceil(t / each), channels, n) f32, which parts_add adds to dw
// grid (ceil(t / each), ceil(channels / 256)), block 32, eight channels a lane; needs channels % 8 == 0, n <= 4
// roofline 6 t channels bytes
KERNEL __launch_bounds__(32) conv_backward(const bf16* x, const bf16* w, const u32* bounds, const bf16* dsum, bf16* dx,
                                           float* parts, u32 t, u32 each, i32 channels, i32 n) {
    const int at = (blockIdx.y * WARP + lane_id()) * 8;
    if (at >= channels) return;
    float taps[TAPS_MAX][8], sums[TAPS_MAX][8] = {};
    load_taps(w, at, n, taps);
    for (u32 row = blockIdx.x * each; row < (blockIdx.x + 1) * each && row < t; row++) {
        const u32 first = bounds[2 * row], end = bounds[2 * row + 1];
        float slope[8], to[8] = {};
        load_eight(dsum + (u64)row * channels + at, slope);
#pragma unroll
        for (int j = 0; j < TAPS_MAX; j++) {
            if (j >= n) continue;
            const u32 ahead = n - 1 - j;
            float values[8];
            if (row + ahead < end) {
                load_eight(dsum + (u64)(row + ahead) * channels + at, values);
#pragma unroll
                for (int i = 0; i < 8; i++) to[i] = fmaf(taps[j][i], values[i], to[i]);
            }
            if (row >= first + ahead) {
                load_eight(x + (u64)(row - ahead) * channels + at, values);
#pragma unroll
                for (int i = 0; i < 8; i++) sums[j][i] = fmaf(slope[i], values[i], sums[j][i]);
            }
        }
        store_eight(dx + (u64)row * channels + at, to);
    }
    float* part = parts + ((u64)blockIdx.x * channels + at) * n;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < TAPS_MAX; j++) {
            if (j < n) part[i * n + j] = sums[j][i];
        }
}

// state_copy_page  page to = page from
// pages (any, page_len) f32
// grid ceil(page_len / 1024), block 256, four values a thread
// roofline 8 page_len bytes
KERNEL __launch_bounds__(256) state_copy_page(float* pages, u32 from, u32 to, u64 page_len) {
    const u64 begin = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    for (u64 at = begin; at < begin + 4 && at < page_len; at++) pages[to * page_len + at] = pages[from * page_len + at];
}
