// One tile of a GEMM and its output: d(r, j) = sum_s a(r, s) b(j, s), plus a bias and an addend c(r, j), or neither.
// tile.cuh describes the bitwise guarantees.
#pragma once
#include "tile.cuh"

// Tiles of rows that are next to each other in time: they share the other operand in the L2 cache.
#define TILES_OF_A_PATCH 8

// The output of a GEMM: (rows, columns) at `values`. `bias` (columns) may be null. The finished sum is added to
// `addend`, which has the strides of `values`: null for none, `values` itself, or a matrix that shares no memory with
// it.
template <class Y> struct Result {
    Y* values;
    int stride, rows, columns;
    const bf16* bias;
    const Y* addend;
};

// The tile of a block. Blocks that run at the same time compute a patch of tiles, which share slices in the L2 cache.
DEVICE void tile_of_block(int block, int down, int over, int& row, int& column) {
    int patch = block / (TILES_OF_A_PATCH * over), first = patch * TILES_OF_A_PATCH;
    int height = down - first < TILES_OF_A_PATCH ? down - first : TILES_OF_A_PATCH;
    int within = block % (TILES_OF_A_PATCH * over);
    row = first + within % height;
    column = within / height;
}

// ---- results ----

struct alignas(8) Two {
    float at[2];
};
// Four bf16.
struct alignas(8) Pairs {
    u32 pair[2];
};

DEVICE Four load_four(const float* from) { return *(const Four*)from; }
DEVICE Four load_four(const bf16* from) {
    Pairs p = *(const Pairs*)from;
    return Four{{low_of(p.pair[0]), high_of(p.pair[0]), low_of(p.pair[1]), high_of(p.pair[1])}};
}
DEVICE void store_four(float* to, Four x) { *(Four*)to = x; }
DEVICE void store_four(bf16* to, Four x) { *(Pairs*)to = Pairs{{pack(x.at[0], x.at[1]), pack(x.at[2], x.at[3])}}; }

// Four neighbouring sums with bias and addend, into y; each rounded once.
template <class Y> DEVICE void put(Result<Y>& y, bool whole, int row, int column, Four x) {
    i64 at = (i64)row * y.stride + column;
    Y* to = y.values + at;
    if (whole && column + 4 <= y.columns) {
        if (y.bias) {
            for (int i = 0; i < 4; i++) x.at[i] += load(y.bias + column + i);
        }
        if (y.addend) {
            Four c = load_four(y.addend + at);
            for (int i = 0; i < 4; i++) x.at[i] = c.at[i] + x.at[i];
        }
        store_four(to, x);
        return;
    }
    for (int i = 0; i < 4 && column + i < y.columns; i++) {
        float sum = x.at[i];
        if (y.bias) sum += load(y.bias + column + i);
        if (y.addend) sum = load(y.addend + at + i) + sum;
        store(to + i, sum);
    }
}

// Writes a warp's sums through shared memory, so that each line of the result is written contiguously.
template <class TILE, class Y>
DEVICE void put_sums(u8* shared, const Sums<TILE>& sums, Result<Y>& y, int tile_row, int tile_column) {
    float* strip = (float*)shared + warp_id() * TILE::OUT_FLOATS;
    int row = tile_row * TILE::ROWS + warp_id() / TILE::OVER * TILE::WARP_ROWS;
    int column = tile_column * TILE::COLUMNS + warp_id() % TILE::OVER * TILE::WARP_COLUMNS;
    int g = lane_id() / 4, q = lane_id() % 4;
    bool whole = y.stride % 4 == 0 && ((u64)y.values | (u64)y.addend) % (4 * sizeof(Y)) == 0;
    constexpr int FOURS = TILE::WARP_COLUMNS / 4;
#pragma unroll
    for (int i = 0; i < TILE::MMA_DOWN; i++) {
        SYNC_WARP();
#pragma unroll
        for (int j = 0; j < TILE::MMA_OVER; j++) {
            const float(&d)[4] = sums.at[i][j];
            *(Two*)(strip + g * TILE::OUT_LINE + 8 * j + 2 * q) = Two{{d[0], d[1]}};
            *(Two*)(strip + (g + 8) * TILE::OUT_LINE + 8 * j + 2 * q) = Two{{d[2], d[3]}};
        }
        SYNC_WARP();
        for (int at = lane_id(); at < 16 * FOURS; at += WARP) {
            int line = at / FOURS, four = at % FOURS * 4;
            int to_row = row + 16 * i + line, to_column = column + four;
            if (to_row >= y.rows || to_column >= y.columns) continue;
            put(y, whole, to_row, to_column, *(const Four*)(strip + line * TILE::OUT_LINE + four));
        }
    }
}

// ---- the GEMM ----

template <class TILE> DEVICE int tiles_of(int rows, int columns) {
    return (rows + TILE::ROWS - 1) / TILE::ROWS * ((columns + TILE::COLUMNS - 1) / TILE::COLUMNS);
}

// Computes a block's tile of d over `slices` slices. Values outside the operands count as zero.
template <class TILE, class Y> DEVICE void product(int block, Operand a, Operand b, int slices, Result<Y> y) {
    DYNAMIC_SHARED(shared);
    int tile_row, tile_column;
    int down = (y.rows + TILE::ROWS - 1) / TILE::ROWS, over = (y.columns + TILE::COLUMNS - 1) / TILE::COLUMNS;
    tile_of_block(block, down, over, tile_row, tile_column);
    constexpr bool A_ALONG = TILE::LIES_A == ALONG, B_ALONG = TILE::LIES_B == ALONG;
    int row = tile_row * TILE::ROWS, column = tile_column * TILE::COLUMNS;
    auto from_a = TILE::CopierA::start(a, A_ALONG ? row : 0, A_ALONG ? 0 : row);
    auto from_b = TILE::CopierB::start(b, B_ALONG ? column : 0, B_ALONG ? 0 : column);
    Sums<TILE> sums = {};
    multiply_slices<TILE>(shared, from_a, from_b, slices, sums);
    put_sums(shared, sums, y, tile_row, tile_column);
}
