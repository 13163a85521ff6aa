// Code that forward and backward attention share: the rows and keys of a block, tiles of rows in shared memory,
// GEMMs of such tiles, and the writing of accumulators to memory.
//
// Each warp has its own 16 M rows in registers, and loops over tiles that all warps of the block read.
// In shared memory, the rows of a tile are E + 8 values apart: an odd number of 16 bytes, so that the eight rows that
// ldmatrix reads at one column are in different banks.
#pragma once
#include "common.cuh"

#define ATTENTION_THREADS 128
// Below every score, and finite, so that LOWEST - LOWEST is 0.
#define LOWEST -1.0e30f

// Rows of q and their keys, a part of a span. Positions count from the first key. The first row's position is `past`.
struct Tile {
    i32 row, rows, past, key_row, keys;
};

struct alignas(8) Two {
    float at[2];
};

DEVICE i32 least(i32 a, i32 b) { return a < b ? a : b; }
DEVICE i32 most(i32 a, i32 b) { return a > b ? a : b; }

// The visible keys of row r: the first, and the end.
DEVICE i32 first_key(const Tile& tile, i32 window, i32 r) { return most(0, tile.past + r + 1 - window); }
DEVICE i32 end_key(const Tile& tile, i32 r) { return least(tile.keys, tile.past + r + 1); }

// The rows of a tile from `base` on, at most `rows`; fewer or none at its end.
DEVICE Tile of_warp(Tile tile, i32 base, i32 rows) {
    tile.row += base, tile.past += base;
    tile.rows = least(tile.rows - base, rows);
    return tile;
}

template <int E> struct Layout {
    static_assert(E % 16 == 0 && E <= 256, "head dims are walked in steps of 16");
    // Values from one row in shared memory to the next.
    static constexpr int STRIDE = E + 8;
    static constexpr int CHUNKS = E / 8;
    // Threads that copy a row: a power of two, so that a thread stays in its column.
    static constexpr int WIDE = E <= 32 ? 4 : E <= 64 ? 8 : E <= 128 ? 16 : 32;
};

// Starts the copy of ROWS rows of E values, `stride` apart. Only `count` rows exist; the others become 0. Their
// addresses are computed, but an invalid copy reads nothing.
template <int E, int ROWS, int THREADS = ATTENTION_THREADS>
DEVICE void copy_rows(bf16* to, const bf16* from, i32 stride, i32 count) {
    using L = Layout<E>;
    constexpr int STEP = THREADS / L::WIDE;
    static_assert(ROWS % STEP == 0, "whole rounds of all threads");
    int column = threadIdx.x % L::WIDE, r = threadIdx.x / L::WIDE;
    if (column >= L::CHUNKS) return;
    to += r * L::STRIDE + column * 8;
    from += (i64)r * stride + column * 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, from += STEP * stride) copy_async(to + i * L::STRIDE, from, r + i < count);
}

// s (16 M, 8 N) = a b^T over E; a: the warp's rows, b: 8 N rows, both in shared memory.
template <int E, int M, int N> DEVICE void multiply(float (&s)[M][N][4], const bf16* a, const bf16* b) {
    constexpr int STRIDE = Layout<E>::STRIDE;
    int lane = lane_id();
    a += lane % 16 * STRIDE + lane / 16 * 8;
    b += (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < E; k += 16) {
        u32 rows[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_matrices(rows[m], a + m * 16 * STRIDE + k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 both[4];
            load_matrices(both, b + n * 8 * STRIDE + k);
            u32 left[2] = {both[0], both[1]}, right[2] = {both[2], both[3]};
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(s[m][n], rows[m], left);
                mma(s[m][n + 1], rows[m], right);
            }
        }
    }
}

// o (16 M, E) += p b; p (16 M, 16 K) in registers as bf16, b: 16 K rows of E in shared memory.
template <int E, int M, int K> DEVICE void accumulate(float (&o)[M][E / 8][4], const u32 (&p)[M][K][4], const bf16* b) {
    constexpr int STRIDE = Layout<E>::STRIDE;
    int lane = lane_id();
    b += lane % 16 * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < K; k++) {
#pragma unroll
        for (int n = 0; n < E / 8; n += 2) {
            u32 both[4];
            load_matrices_transposed(both, b + k * 16 * STRIDE + n * 8);
            u32 left[2] = {both[0], both[1]}, right[2] = {both[2], both[3]};
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(o[m][n], p[m][k], left);
                mma(o[m][n + 1], p[m][k], right);
            }
        }
    }
}

// Accumulators (16, 8 N) as the left operand of a GEMM: two neighbours make 16 columns.
template <int N> DEVICE void pack_rows(u32 (&p)[N / 2][4], const float (&s)[N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        p[k][0] = pack(s[2 * k][0], s[2 * k][1]);
        p[k][1] = pack(s[2 * k][2], s[2 * k][3]);
        p[k][2] = pack(s[2 * k + 1][0], s[2 * k + 1][1]);
        p[k][3] = pack(s[2 * k + 1][2], s[2 * k + 1][3]);
    }
}

template <int M, int N> DEVICE void clear(float (&x)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[m][n][i] = 0.0f;
}

// x = by x, a factor for each row.
template <int M, int N> DEVICE void scale_rows(float (&x)[M][N][4], const float (&by)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[m][n][i] *= by[m][i / 2];
}

// Writes the warp's first `rows` rows as bf16, 16 bytes at a time. `room`: that many rows of shared memory, which no
// other warp uses.
template <int E, int M> DEVICE void store_rows(const float (&x)[M][E / 8][4], bf16* room, bf16* to, i32 stride, i32 rows) {
    using L = Layout<E>;
    int lane = lane_id();
    SYNC_WARP();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < E / 8; n++) {
            bf16* at = room + (m * 16 + lane / 4) * L::STRIDE + n * 8 + lane % 4 * 2;
            *(u32*)at = pack(x[m][n][0], x[m][n][1]);
            *(u32*)(at + 8 * L::STRIDE) = pack(x[m][n][2], x[m][n][3]);
        }
    SYNC_WARP();
    int column = lane % L::WIDE;
    if (column >= L::CHUNKS) return;
    for (int r = lane / L::WIDE; r < least(rows, 16 * M); r += WARP / L::WIDE) {
        *(Eight*)(to + (i64)r * stride + column * 8) = *(const Eight*)(room + r * L::STRIDE + column * 8);
    }
}

// to = held to + x, as f32, for the warp's first `rows` rows; if a row's `held` is 0, its old value is not read.
template <int E, int M>
DEVICE void add_rows(const float (&x)[M][E / 8][4], const float (&held)[M][2], float* to, i32 stride, i32 rows) {
    int lane = lane_id();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = m * 16 + h * 8 + lane / 4;
            if (r >= rows) continue;
            float* row = to + (i64)r * stride + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < E / 8; n++) {
                Two sum = {{x[m][n][2 * h], x[m][n][2 * h + 1]}};
                if (held[m][h] != 0.0f) {
                    Two old = *(const Two*)(row + n * 8);
                    for (int i = 0; i < 2; i++) sum.at[i] = fmaf(held[m][h], old.at[i], sum.at[i]);
                }
                *(Two*)(row + n * 8) = sum;
            }
        }
}
