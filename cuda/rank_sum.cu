// Sums of the values that the ranks of a group sent, in one order for every element.
#include "eight.cuh"

// Parts that are loaded at once: the sum itself is one chain.
#define PARTS_AHEAD 4

template <class T> DEVICE const T* part_at(const T* x, const T* parts, u64 stride, int rank, int r) {
    return r == rank ? x : parts + (u64)r * stride;
}

template <class T> DEVICE void sum_in_order(T* x, const T* parts, u64 stride, int rank, int ranks, u64 len) {
    u64 at = flat_eight();
    if (at >= len) return;
    int count = eight_or_rest(at, len);
    x += at;
    parts += at;
    bool whole = count == 8 && is_aligned(x) && is_aligned(parts) && stride * sizeof(T) % 16 == 0;
    float sum[8];
    load_up_to(part_at(x, parts, stride, rank, 0), count, whole, sum);
    for (int first = 1; first < ranks; first += PARTS_AHEAD) {
        float ahead[PARTS_AHEAD][8];
        if (whole) {
#pragma unroll
            for (int j = 0; j < PARTS_AHEAD; j++) {
                if (first + j < ranks) load_eight(part_at(x, parts, stride, rank, first + j), ahead[j]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < PARTS_AHEAD; j++) {
                if (first + j < ranks) load_up_to(part_at(x, parts, stride, rank, first + j), count, false, ahead[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < PARTS_AHEAD; j++) {
            if (first + j >= ranks) continue;
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] += ahead[j][i];
        }
    }
    store_up_to(x, count, whole, sum);
}

// rank_sum_f32  x = ((part 0 + part 1) + part 2) + ..., where x holds part `rank` on entry
// x (len), parts (ranks, stride) f32, of which part `rank` is not read
// grid ceil(len / 2048), block 256, eight values a thread; any alignment, 16 bytes at once where all begin at multiples
// roofline 4 (ranks + 1) len bytes
KERNEL __launch_bounds__(256) rank_sum_f32(float* x, const float* parts, u64 stride, i32 rank, i32 ranks, u64 len) {
    sum_in_order(x, parts, stride, rank, ranks, len);
}

// rank_sum_bf16  the same of bf16, added in f32 and rounded once
// grid and needs as rank_sum_f32
// roofline 2 (ranks + 1) len bytes
KERNEL __launch_bounds__(256) rank_sum_bf16(bf16* x, const bf16* parts, u64 stride, i32 rank, i32 ranks, u64 len) {
    sum_in_order(x, parts, stride, rank, ranks, len);
}

// Groups have at most 2^TREE_LEVELS ranks.
#define TREE_LEVELS 12

// rank_tree_f32  x = ((part 0 + part 1) + (part 2 + part 3)) + ..., where x holds part `rank` on entry
// x (len), parts (ranks, stride) f32, of which part `rank` is not read; ranks is a power of two
// grid ceil(len / 256), block 256, a value a thread
// roofline 4 (ranks + 1) len bytes
KERNEL __launch_bounds__(256) rank_tree_f32(float* x, const float* parts, u64 stride, i32 rank, i32 ranks, u64 len) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= len) return;
    // Pending sums of 1, 2, 4 ... parts, one for each bit of the number of parts so far.
    float waiting[TREE_LEVELS];
#pragma unroll
    for (int level = 0; level < TREE_LEVELS; level++) waiting[level] = 0.0f;
    float sum = 0.0f;
    for (int r = 0; r < ranks; r++) {
        sum = r == rank ? x[at] : parts[(u64)r * stride + at];
        bool carries = true;
#pragma unroll
        for (int level = 0; level < TREE_LEVELS; level++) {
            bool pairs = carries && (r >> level & 1);
            if (pairs) {
                sum = waiting[level] + sum;
            } else if (carries) {
                waiting[level] = sum;
                carries = false;
            }
        }
    }
    x[at] = sum;
}
