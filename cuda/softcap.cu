// Soft caps of logits: y = c tanh(x / c) (arXiv:2408.00118, section 2).
#include "eight.cuh"
#include "softcap.cuh"

// softcap_forward  x = c tanh(x / c), in place
// x (len) f32
// grid ceil(len / 1024), block 256, four values a thread; any alignment
// roofline 8 len bytes
KERNEL __launch_bounds__(256) softcap_forward(float* x, float cap, u64 len) {
    const u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (at >= len) return;
    const int count = len - at < 4 ? (int)(len - at) : 4;
    const bool aligned = (u64)x % 16 == 0;
    const float inverse = reciprocal_fast(cap);
    float a[4];
    load_up_to(x + at, count, aligned, a);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = capped(a[i], cap, inverse);
    store_up_to(x + at, count, aligned, a);
}

// softcap_backward  dy = dy (1 - (y / c)^2), in place; 0 where y is no finite number, as in columns that pad rows
// y (len) f32; dy (len) bf16
// grid ceil(len / 2048), block 256, eight values a thread; needs len % 8 == 0 and 16-byte alignment
// roofline 8 len bytes
KERNEL __launch_bounds__(256) softcap_backward(const float* y, bf16* dy, float cap, u64 len) {
    const u64 at = flat_eight();
    if (at >= len) return;
    const float inverse = reciprocal_fast(cap);
    float a[8], d[8];
    load_eight(y + at, a);
    load_eight(dy + at, d);
#pragma unroll
    for (int i = 0; i < 8; i++) d[i] *= cap_slope(times(a[i], inverse));
    store_eight(dy + at, d);
}
