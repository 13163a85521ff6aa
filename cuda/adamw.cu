// AdamW with decoupled weight decay (arXiv:1711.05101) over flat runs.
#include "eight.cuh"

// The part of element `at`: the first part whose end is beyond it.
DEVICE u32 part_of(const u64* ends, u32 parts, u64 at) {
    u32 low = 0, high = parts - 1;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (ends[middle] > at) high = middle;
        else low = middle + 1;
    }
    return low;
}

// adamw_step  m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p -= lr (m/bias1 / (sqrt(v/bias2) + eps) + decay p); w = p
// p, m, v (len) f32; g (len) f32, multiplied by grad_scale first; w (len) bf16, p rounded
// ends (parts) u64, the last is len; decays (parts) f32: the weight decay of the elements below an end
// grid ceil(len / 2048), block 256, eight values a thread; any alignment, accesses of 16 bytes (of w: 8) where all are aligned
// roofline 30 len bytes
KERNEL __launch_bounds__(256) adamw_step(float* p, const float* g, float* m, float* v, bf16* w, u64 len, const u64* ends,
                                         const float* decays, u32 parts, float lr, float grad_scale, float beta1,
                                         float beta2, float step_size, float inverse_sqrt_bias2, float eps) {
    // A warp has 256 neighbouring values. Each thread has four of them, and the four that are 128 further, so that the
    // lanes read contiguous memory at once.
    const u64 first = flat_eight() / (8 * WARP) * (8 * WARP) + 4 * lane_id();
    if (first >= len) return;
    bool aligned = is_aligned(p) && is_aligned(g) && is_aligned(m) && is_aligned(v) && is_aligned(w);
    float ps[2][4], gs[2][4], ms[2][4], vs[2][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u64 at = first + h * 4 * WARP;
        const int count = four_or_rest(at, len);
        load_up_to(p + at, count, aligned, ps[h]);
        load_up_to(g + at, count, aligned, gs[h]);
        load_up_to(m + at, count, aligned, ms[h]);
        load_up_to(v + at, count, aligned, vs[h]);
    }
    u32 part = part_of(ends, parts, first);
    u64 end = ends[part];
    float decay = lr * decays[part];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u64 at = first + h * 4 * WARP;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // A part may end before or within the four. Values beyond the last part belong to none.
            while (at + i >= end && part + 1 < parts) {
                end = ends[++part];
                decay = lr * decays[part];
            }
            float gradient = gs[h][i] * grad_scale;
            ms[h][i] = fmaf(beta1, ms[h][i], (1.0f - beta1) * gradient);
            vs[h][i] = fmaf(beta2, vs[h][i], (1.0f - beta2) * gradient * gradient);
            float denominator = fmaf(sqrtf(vs[h][i]), inverse_sqrt_bias2, eps);
            ps[h][i] -= fmaf(step_size, ms[h][i] / denominator, decay * ps[h][i]);
        }
        const int count = four_or_rest(at, len);
        store_up_to(p + at, count, aligned, ps[h]);
        store_up_to(m + at, count, aligned, ms[h]);
        store_up_to(v + at, count, aligned, vs[h]);
        store_up_to(w + at, count, aligned, ps[h]);
    }
}

// adamw_average  y = beta y + (1-beta) p: the moving average of the parameters after an update
// p, y (len) f32
// grid ceil(len / 2048), block 256, eight values a thread; any alignment
// roofline 12 len bytes
KERNEL __launch_bounds__(256) adamw_average(const float* p, float* y, u64 len, float beta) {
    u64 at = flat_eight();
    if (at >= len) return;
    int count = eight_or_rest(at, len);
    bool aligned = is_aligned(p) && is_aligned(y);
    float a[8], b[8];
    load_up_to(p + at, count, aligned, a);
    load_up_to(y + at, count, aligned, b);
#pragma unroll
    for (int i = 0; i < 8; i++) b[i] = fmaf(beta, b[i], (1.0f - beta) * a[i]);
    store_up_to(y + at, count, aligned, b);
}
