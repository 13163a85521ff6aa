// A gate for each row: y[i] = sigmoid(g[i]) x[i]
#include "eight.cuh"
#include "glu.cuh"

// row_gate_forward  y[r][c] = sigmoid(g[r]) x[r][c]
// g (t) f32; x, y (t, d) bf16; eights = d / 8
// grid ceil(t eights / 256), block 256, eight values a thread; needs d % 8 == 0 and 16-byte alignment
// roofline 4 t d bytes
KERNEL __launch_bounds__(256) row_gate_forward(const float* g, const bf16* x, bf16* y, u32 t, u32 eights) {
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= t * eights) return;
    const float s = sigmoid(g[index / eights]);
    float values[8];
    load_eight(x + (u64)index * 8, values);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] *= s;
    store_eight(y + (u64)index * 8, values);
}

// row_gate_backward  dx = s dy in place of dy, dg = s (1 - s) sum_c x dy, s = sigmoid(g)
// g, dg (t) f32; x, dy (t, d) bf16
// grid ceil(t / 8), block 256: a warp a row, eight neighbouring columns a lane at a time; needs d % 8 == 0 and 16-byte
// alignment
// roofline 6 t d bytes
KERNEL __launch_bounds__(256) row_gate_backward(const float* g, const bf16* x, bf16* dy, float* dg, u32 t, u32 d) {
    const u32 row = blockIdx.x * (blockDim.x / WARP) + warp_id();
    if (row >= t) return;
    const float s = sigmoid(g[row]);
    float sum = 0.0f;
    for (u32 at = lane_id() * 8; at < d; at += WARP * 8) {
        float values[8], slopes[8];
        load_eight(x + (u64)row * d + at, values);
        load_eight(dy + (u64)row * d + at, slopes);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sum = fmaf(values[i], slopes[i], sum);
            slopes[i] *= s;
        }
        store_eight(dy + (u64)row * d + at, slopes);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) dg[row] = sum * (s * (1.0f - s));
}
