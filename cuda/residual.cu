// residual_add  y = y + x, rounded once
// x, y (len) bf16
// grid ceil(len / 2048), block 256, eight values a thread; needs len % 8 == 0 and 16-byte alignment
// roofline 6 len bytes
#include "common.cuh"

KERNEL residual_add(const bf16* x, bf16* y, u64 len) {
    u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (at >= len) return;
    Eight a = *(const Eight*)(x + at), b = *(const Eight*)(y + at);
    for (int i = 0; i < 4; i++) {
        b.pair[i] = pack(low_of(a.pair[i]) + low_of(b.pair[i]), high_of(a.pair[i]) + high_of(b.pair[i]));
    }
    *(Eight*)(y + at) = b;
}
