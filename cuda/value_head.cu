// values[t] = sum_d h[t][d] w[d]
#include "eight.cuh"

// Groups of eight values that a thread loads at once.
#define VALUE_AHEAD 4

// value_head_forward  values[t] = sum over d of h[t][d] w[d]
// h (t, d), w (d) bf16; values (t) f32
// grid ceil(t / 8), block 256: a warp a row, eight neighbouring columns a lane at a time; needs d % 8 == 0
// roofline 2 t d bytes
KERNEL __launch_bounds__(256) value_head_forward(const bf16* h, const bf16* w, float* values, u32 t, u32 d) {
    u32 row = blockIdx.x * (blockDim.x / WARP) + warp_id();
    if (row >= t) return;
    const bf16* own = h + (u64)row * d;
    float sum = 0.0f;
    for (u32 start = lane_id() * 8; start < d; start += VALUE_AHEAD * WARP * 8) {
        Eight ahead[VALUE_AHEAD];
#pragma unroll
        for (u32 j = 0; j < VALUE_AHEAD; j++) {
            u32 at = start + j * WARP * 8;
            if (at < d) ahead[j] = load_eight(own + at);
        }
#pragma unroll
        for (u32 j = 0; j < VALUE_AHEAD; j++) {
            u32 at = start + j * WARP * 8;
            if (at >= d) continue;
            float x[8], y[8];
            widen(ahead[j], x);
            load_eight(w + at, y);
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(x[i], y[i], sum);
        }
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) values[row] = sum;
}

// value_head_backward  dh[t][d] = dvalues[t] w[d]; parts[b][d] = sum of dvalues[t] h[t][d] over the rows of block b
// h, dh (t, d), w (d) bf16; dvalues (t) f32; parts (blocks, d) f32, which parts_add adds to dw
// grid (ceil(t / each), ceil(d / (8 block))), block 32 to 256, eight columns a thread; needs d % 8 == 0
// roofline 4 t d bytes
KERNEL __launch_bounds__(256) value_head_backward(const bf16* h, const bf16* w, const float* dvalues, bf16* dh, float* parts,
                                                  u32 t, u32 d, u32 each) {
    u32 at = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (at >= d) return;
    float weights[8], sum[8] = {};
    load_eight(w + at, weights);
    u32 end = (blockIdx.x + 1) * each < t ? (blockIdx.x + 1) * each : t;
    for (u32 start = blockIdx.x * each; start < end; start += VALUE_AHEAD) {
        Eight ahead[VALUE_AHEAD];
        float dvalue[VALUE_AHEAD];
#pragma unroll
        for (u32 j = 0; j < VALUE_AHEAD; j++) {
            if (start + j >= end) continue;
            ahead[j] = load_eight(h + (u64)(start + j) * d + at);
            dvalue[j] = dvalues[start + j];
        }
#pragma unroll
        for (u32 j = 0; j < VALUE_AHEAD; j++) {
            if (start + j >= end) continue;
            float x[8], to[8];
            widen(ahead[j], x);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sum[i] = fmaf(dvalue[j], x[i], sum[i]);
                to[i] = dvalue[j] * weights[i];
            }
            store_eight(dh + (u64)(start + j) * d + at, to);
        }
    }
    store_eight(parts + (u64)blockIdx.x * d + at, sum);
}
