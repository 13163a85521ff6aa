// Root mean square norm over groups of n values (arXiv:1910.07467); a row may hold several groups (qk-norm: one per head).
#include "eight.cuh"

// Eights of a group that a thread holds at most.
#define FORWARD_HELD 2

// A thread's sum over its eight values, in their order.
DEVICE float squares_of(const Eight& eight) {
    float x[8], sum = 0.0f;
    widen(eight, x);
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(x[i], x[i], sum);
    return sum;
}

DEVICE Eight scaled(const Eight& x, const Eight& w, float offset, float scale) {
    float a[8], b[8];
    widen(x, a);
    widen(w, b);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = a[i] * scale * (b[i] + offset);
    return narrow(a);
}

// One block per group. Its values and those of w are loaded before the sum needs them, and are read once.
DEVICE void forward_wide(const bf16* x, const bf16* w, float offset, float eps, bf16* y, float* rstd, i32 n, float over_n, float* room) {
    u64 start = (u64)blockIdx.x * n;
    Eight held[FORWARD_HELD], weights[FORWARD_HELD];
#pragma unroll
    for (int c = 0; c < FORWARD_HELD; c++) {
        int at = (c * (int)blockDim.x + (int)threadIdx.x) * 8;
        if (at >= n) continue;
        held[c] = load_eight(x + start + at);
        weights[c] = load_eight(w + at);
    }
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < FORWARD_HELD; c++) {
        int at = (c * (int)blockDim.x + (int)threadIdx.x) * 8;
        if (at < n) squares += squares_of(held[c]);
    }
    float scale = inverse_sqrt(fmaf(block_sum(squares, room), over_n, eps));
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
#pragma unroll
    for (int c = 0; c < FORWARD_HELD; c++) {
        int at = (c * (int)blockDim.x + (int)threadIdx.x) * 8;
        if (at < n) *(Eight*)(y + start + at) = scaled(held[c], weights[c], offset, scale);
    }
}

// Sum over the `lanes` neighbouring lanes (a power of 2) that share a group, in all of them.
DEVICE float lanes_sum(float x, int lanes) {
    for (int other = lanes / 2; other > 0; other /= 2) x += shuffle_xor(x, other);
    return x;
}

// 2^shift lanes a group, eight values each.
DEVICE void forward_narrow(const bf16* x, const bf16* w, float offset, float eps, bf16* y, float* rstd, i32 n, float over_n, u32 shift,
                           u32 groups) {
    // Threads of the grid may be more than 32 bits count.
    u32 group = blockIdx.x * (blockDim.x >> shift) + (threadIdx.x >> shift), at = (threadIdx.x & ((1u << shift) - 1)) * 8;
    bool here = group < groups && (int)at < n;
    u64 start = (u64)group * n + at;
    Eight held = {}, weights = {};
    if (here) {
        held = load_eight(x + start);
        weights = load_eight(w + at);
    }
    float scale = inverse_sqrt(fmaf(lanes_sum(squares_of(held), 1 << shift), over_n, eps));
    if (!here) return;
    if (at == 0) rstd[group] = scale;
    *(Eight*)(y + start) = scaled(held, weights, offset, scale);
}

// rmsnorm_forward  y = x * rstd * (w + offset), rstd = 1 / sqrt(mean(x^2) + eps); over_n is 1 / n
// x, y (groups, n) bf16; w (n) bf16; rstd (groups) f32, kept for backward
// grid groups, block up to 1024, up to twice eight values a thread; needs n % 8 == 0, n <= 16384
// roofline 4 groups n bytes
KERNEL __launch_bounds__(1024, 2) rmsnorm_forward(const bf16* x, const bf16* w, float offset, float eps, bf16* y, float* rstd, i32 n, float over_n) {
    SHARED float room[WARP + 1];
    forward_wide(x, w, offset, eps, y, rstd, n, over_n, room);
}

// rmsnorm_forward_narrow  as rmsnorm_forward, for groups that lanes of a warp share
// grid ceil(groups lanes / 256), block 256; needs n % 8 == 0, 2^shift lanes the power of 2 from n / 8 on, at most 32
// roofline 4 groups n bytes
KERNEL __launch_bounds__(256) rmsnorm_forward_narrow(const bf16* x, const bf16* w, float offset, float eps, bf16* y, float* rstd, i32 n,
                                                     float over_n, u32 shift, u32 groups) {
    forward_narrow(x, w, offset, eps, y, rstd, n, over_n, shift, groups);
}

// dx of eight values, added to what is there; adds their part of dw.
DEVICE Eight pulled_back(const Eight& x, const Eight& w, const Eight& dy, const Eight& dx, float offset, float scale, float pull,
                         float (&dw)[8]) {
    float a[8], b[8], d[8], to[8];
    widen(x, a);
    widen(w, b);
    widen(dy, d);
    widen(dx, to);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        to[i] += scale * ((b[i] + offset) * d[i] - a[i] * pull);
        dw[i] = fmaf(d[i], a[i] * scale, dw[i]);
    }
    return narrow(to);
}

DEVICE float products_of(const Eight& x, const Eight& w, const Eight& dy, float offset) {
    float a[8], b[8], d[8], sum = 0.0f;
    widen(x, a);
    widen(w, b);
    widen(dy, d);
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(a[i] * (b[i] + offset), d[i], sum);
    return sum;
}

// A block processes its groups in order. Each thread keeps its columns, so dw is accumulated in registers.
template <int HELD>
DEVICE void backward_wide(const bf16* x, const bf16* w, float offset, const float* rstd, const bf16* dy, bf16* dx, float* parts, i32 n,
                          float over_n, u32 groups, u32 each, float* room) {
    // Whether registers hold w throughout and dx during the sum; else both are read when they are needed.
    constexpr bool HOLDS = HELD < 4;
    Eight weights[HELD];
    float dw[HELD][8] = {};
#pragma unroll
    for (int c = 0; c < HELD; c++) {
        int at = (c * (int)blockDim.x + (int)threadIdx.x) * 8;
        if (HOLDS && at < n) weights[c] = load_eight(w + at);
    }
    u32 end = (blockIdx.x + 1) * each < groups ? (blockIdx.x + 1) * each : groups;
    for (u32 group = blockIdx.x * each; group < end; group++) {
        u64 start = (u64)group * n;
        Eight xs[HELD], dys[HELD], dxs[HELD];
        float scale = rstd[group], products = 0.0f;
#pragma unroll
        for (int c = 0; c < HELD; c++) {
            int at = (c * (int)blockDim.x + (int)threadIdx.x) * 8;
            if (at >= n) continue;
            xs[c] = load_eight(x + start + at);
            dys[c] = load_eight(dy + start + at);
            if (HOLDS) dxs[c] = load_eight(dx + start + at);
        }
#pragma unroll
        for (int c = 0; c < HELD; c++) {
            int at = (c * (int)blockDim.x + (int)threadIdx.x) * 8;
            if (at < n) products += products_of(xs[c], HOLDS ? weights[c] : load_eight(w + at), dys[c], offset);
        }
        float pull = block_sum(products, room) * over_n * scale * scale;
#pragma unroll
        for (int c = 0; c < HELD; c++) {
            int at = (c * (int)blockDim.x + (int)threadIdx.x) * 8;
            if (at >= n) continue;
            if (!HOLDS) dxs[c] = load_eight(dx + start + at);
            Eight own = HOLDS ? weights[c] : load_eight(w + at);
            *(Eight*)(dx + start + at) = pulled_back(xs[c], own, dys[c], dxs[c], offset, scale, pull, dw[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < HELD; c++) {
        int at = (c * (int)blockDim.x + (int)threadIdx.x) * 8;
        if (at < n) store_eight(parts + (u64)blockIdx.x * n + at, dw[c]);
    }
}

// rmsnorm_backward_2  with v = w + offset: dx += rstd (v dy - x rstd^2 mean(v dy x)); parts[b] = sum of dy x rstd over the groups of block b
// x, dy, dx (groups, n) bf16; w (n) bf16; rstd (groups) f32; parts (blocks, n) f32, which parts_add adds to dw
// grid ceil(groups / each), block up to 512, up to twice eight values a thread; needs n % 8 == 0, n <= 8192
// roofline 8 groups n bytes
KERNEL __launch_bounds__(512) rmsnorm_backward_2(const bf16* x, const bf16* w, float offset, const float* rstd, const bf16* dy, bf16* dx,
                                                 float* parts, i32 n, float over_n, u32 groups, u32 each) {
    SHARED float room[WARP + 1];
    backward_wide<2>(x, w, offset, rstd, dy, dx, parts, n, over_n, groups, each, room);
}

// rmsnorm_backward_4  as rmsnorm_backward_2, up to four times eight values a thread
// grid ceil(groups / each), block up to 512; needs n % 8 == 0, n <= 16384
// roofline 8 groups n bytes
KERNEL __launch_bounds__(512) rmsnorm_backward_4(const bf16* x, const bf16* w, float offset, const float* rstd, const bf16* dy, bf16* dx,
                                                 float* parts, i32 n, float over_n, u32 groups, u32 each) {
    SHARED float room[WARP + 1];
    backward_wide<4>(x, w, offset, rstd, dy, dx, parts, n, over_n, groups, each, room);
}

// rmsnorm_backward_narrow  as rmsnorm_backward_2, for groups that lanes of a warp share
// grid ceil(groups / each), block 256; needs n % 8 == 0, shift as rmsnorm_forward_narrow, each % (256 >> shift) == 0
// roofline 8 groups n bytes
KERNEL __launch_bounds__(256) rmsnorm_backward_narrow(const bf16* x, const bf16* w, float offset, const float* rstd, const bf16* dy,
                                                      bf16* dx, float* parts, i32 n, float over_n, u32 shift, u32 groups,
                                                      u32 each) {
    // dw of every thread: eight values.
    SHARED Four sums[256 * 2];
    u32 lanes = 1u << shift, together = blockDim.x >> shift;
    u32 own = threadIdx.x >> shift, at = (threadIdx.x & (lanes - 1)) * 8;
    Eight weights = {};
    if ((int)at < n) weights = load_eight(w + at);
    float dw[8] = {};
    // All lanes take part in every sum; lanes without a group add nothing.
    for (u32 k = 0; k < each; k += together) {
        u32 group = blockIdx.x * each + k + own;
        bool here = group < groups && (int)at < n;
        u64 start = (u64)group * n + at;
        Eight xs = {}, dys = {}, dxs = {};
        float scale = 0.0f;
        if (here) {
            xs = load_eight(x + start);
            dys = load_eight(dy + start);
            dxs = load_eight(dx + start);
            scale = rstd[group];
        }
        float pull = lanes_sum(products_of(xs, weights, dys, offset), (int)lanes) * over_n * scale * scale;
        if (here) *(Eight*)(dx + start) = pulled_back(xs, weights, dys, dxs, offset, scale, pull, dw);
    }
    sums[threadIdx.x * 2] = Four{{dw[0], dw[1], dw[2], dw[3]}};
    sums[threadIdx.x * 2 + 1] = Four{{dw[4], dw[5], dw[6], dw[7]}};
    SYNC_BLOCK();
    if ((int)threadIdx.x >= n) return;
    const float* column = (const float*)sums + threadIdx.x;
    float sum = 0.0f;
    for (u32 k = 0; k < together; k++) sum += column[k * lanes * 8];
    parts[(u64)blockIdx.x * n + threadIdx.x] = sum;
}
