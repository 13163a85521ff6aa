// norm_squares  sums[first + b] = sum of x[i]^2 over block b of x, in f64 and in the CPU's order: element i of a block belongs to
// lane i mod 32, lanes ascend, then the upper half of the lanes is added to the lower half until one is left
// x (len) f32; sums (ceil(len / values)) f64; the last block may be shorter
// grid ceil(blocks / 8), block 256: a warp a block, 128 bytes of a warp at a time; any alignment
// roofline 4 len bytes
#include "common.cuh"

KERNEL __launch_bounds__(256) norm_squares(const float* x, double* sums, u64 first, u64 len, u64 values, u64 blocks) {
    u64 block = (u64)blockIdx.x * (blockDim.x / WARP) + warp_id();
    if (block >= blocks) return;
    u64 end = (block + 1) * values < len ? (block + 1) * values : len, at = block * values + lane_id();
    double sum = 0.0;
    // Loads are started ahead of the chain of sums.
    for (; at + 7 * WARP < end; at += 8 * WARP) {
        float ahead[8];
#pragma unroll
        for (int j = 0; j < 8; j++) ahead[j] = x[at + j * WARP];
#pragma unroll
        for (int j = 0; j < 8; j++) sum += (double)ahead[j] * ahead[j];
    }
    for (; at < end; at += WARP) sum += (double)x[at] * x[at];
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
    if (lane_id() == 0) sums[first + block] = sum;
}
