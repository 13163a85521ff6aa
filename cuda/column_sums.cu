// parts_add  y[c] += sum_b parts[b][c], b in 32 chains (b mod 32, ascending), the chains added in order
// parts (blocks, columns) f32; y (columns) f32
// grid ceil(columns / 32), block 1024: a lane a column, a warp a chain
// roofline 4 blocks columns bytes
#include "common.cuh"

KERNEL __launch_bounds__(1024) parts_add(const float* parts, float* y, u32 blocks, u32 columns) {
    SHARED float chains[WARP][WARP];
    u32 column = blockIdx.x * WARP + lane_id();
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (u32 b = warp_id(); b < blocks; b += WARP) sum += parts[(u64)b * columns + column];
    }
    chains[warp_id()][lane_id()] = sum;
    SYNC_BLOCK();
    if (warp_id() != 0 || column >= columns) return;
    float all = 0.0f;
    for (int k = 0; k < WARP; k++) all += chains[k][lane_id()];
    y[column] += all;
}
