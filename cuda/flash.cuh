// One order of arithmetic for causal attention (arXiv:2205.14135), so that a row has the same bits from every kernel.
//
// Keys are processed in ascending blocks of Block<E>::KEYS, aligned to the start of the sequence. For a row with
// running maximum m of its scores, sum l of its probabilities and result o, each block computes, in f32:
//   s = q.k, a chain of mma over head dims, ascending from 0, capped (softcap.cuh) if there is a cap; -inf where the row
//   does not see the key
//   m' = max(m, max s)                   decay = 2^((m - m') scale), where scale holds log2(e)
//   p = 2^(fma(s, scale, -(m' scale)))   l = fma(l, decay, even + odd), the sums of a lane's even and odd columns, ascending
//   o = o decay, then a chain of mma adds p v over keys, ascending, p rounded to bf16
// and at the end l is the sum of four lanes, o = o (1 / l). Many keys are split into segments of such blocks
// (key_segments.cuh). A fully masked block does not change a row, so it may be skipped. All multiply-adds are explicit
// fmaf: the compiler has nothing to contract.
#pragma once
#include "key_segments.cuh"

// Keys of one block of the softmax, as where packed rows are attended to.
template <int E> struct Block {
    static constexpr int KEYS = E <= 128 ? 64 : 32;
};

// Rows of shared tiles are padded by 16 bytes: their stride is an odd number of 16 bytes, so that the eight rows
// of a matrix are in different banks.
template <int E> struct Tile {
    static constexpr int STRIDE = E + 8;
};

// The visible keys from .. to of two of a warp's sixteen rows: lane / 4 and lane / 4 + 8.
struct KeyRange {
    int from[2], to[2];
};

// Maximum and sum of the same two rows. The sums are of this lane's columns.
struct Running {
    float max[2], sum[2];
};

DEVICE Running running() { return Running{{LOWEST, LOWEST}, {0.0f, 0.0f}}; }

// s (16, 8 N) = q k^T; `keys` is a tile (8 N, E).
template <int E, int N> DEVICE void scores(float (&s)[N][4], const u32 (&q)[E / 16][4], const bf16* keys) {
    int lane = lane_id();
    const bf16* row = keys + (lane % 8 + lane / 16 * 8) * Tile<E>::STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < N; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < E / 16; k++) {
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 b[4];
            load_matrices(b, row + n * 8 * Tile<E>::STRIDE + k * 16);
            u32 even[2] = {b[0], b[1]}, odd[2] = {b[2], b[3]};
            mma(s[n], q[k], even);
            mma(s[n + 1], q[k], odd);
        }
    }
}

// -inf where a row does not see a key; `first` is the block's first key.
template <int N> DEVICE void mask(float (&s)[N][4], int first, const KeyRange& key_range) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        // One comparison for both ends: a key before the first is large as u32.
        const u32 seen = key_range.to[r] - key_range.from[r], column = first + 2 * (lane_id() % 4) - key_range.from[r];
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (column + n * 8 + i >= seen) s[n][2 * r + i] = -infinity();
            }
        }
    }
}

// The largest score of each of the two rows.
template <int N> DEVICE void maxima(float (&max)[2], const float (&s)[N][4]) {
    for (int r = 0; r < 2; r++) {
        float x = -infinity();
#pragma unroll
        for (int n = 0; n < N; n++) x = fmaxf(x, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        x = fmaxf(x, shuffle_xor(x, 1));
        max[r] = fmaxf(x, shuffle_xor(x, 2));
    }
}

// The factor of a row when its maximum grows from `from` to `to`.
DEVICE float decay_of(float from, float to, float scale) { return exp2_fast((from - to) * scale); }

// Scores to probabilities for the maximum of a row, and their sum over this lane's columns.
template <int R, int N> DEVICE float probabilities(float (&s)[N][4], float max, float scale) {
    float base = max * scale, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 2 * R; i < 2 * R + 2; i++) {
            s[n][i] = exp2_fast(fmaf(s[n][i], scale, -base));
            sum[i % 2] += s[n][i];
        }
    }
    return sum[0] + sum[1];
}

// o += p v over 16 keys and 16 columns; `values` is a tile of rows of E at the first of them.
template <int E> DEVICE void add_values(float (&even)[4], float (&odd)[4], const u32 (&p)[4], const bf16* values) {
    int lane = lane_id();
    u32 b[4];
    load_matrices_transposed(b, values + lane % 16 * Tile<E>::STRIDE + lane / 16 * 8);
    u32 left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
    mma(even, p, left);
    mma(odd, p, right);
}

DEVICE void rescale(float (&o)[4], float low, float high) {
    o[0] *= low;
    o[1] *= low;
    o[2] *= high;
    o[3] *= high;
}

// Probabilities of 16 keys as the left operand of a product.
template <int N> DEVICE void packed(u32 (&a)[4], const float (&s)[N][4], int step) {
    a[0] = pack(s[2 * step][0], s[2 * step][1]);
    a[1] = pack(s[2 * step][2], s[2 * step][3]);
    a[2] = pack(s[2 * step + 1][0], s[2 * step + 1][1]);
    a[3] = pack(s[2 * step + 1][2], s[2 * step + 1][3]);
}

// 1 / l of a row, whose sums are in four lanes.
DEVICE float inverse(float sum) {
    return 1.0f / sum_of_lanes(sum);
}
