// One tile of y = act(gate) up, with gate = a Wgate^T and up = a Wup^T: gate and up are not written to memory.
//
// Half of the tile's columns are gate's and half are up's: each warp has RUN of one, then RUN of the other. So a lane
// has the gate and the up of an output side by side. Except for the source of W's rows, it equals the GEMM with one W
// that contains both: blocks, slices and steps are the same, and gate and up, rounded to bf16, have the same bits
// (tile.cuh).
#pragma once
#include "matmul.cuh"
#include "glu.cuh"

// Like Copier, with two operands of one shape, ALONG: RUN lines of the first, RUN of the second, the next RUN of the
// first, ...
template <class SLICE, int THREADS, int RUN> struct PairCopier {
    static constexpr int OVER = SLICE::CHUNKS < 8 ? SLICE::CHUNKS : 8, DOWN = THREADS / OVER;
    static_assert(SLICE::CHUNKS % OVER == 0 && SLICE::LINES % DOWN == 0 && DOWN % 8 == 0, "threads share a slice evenly");
    static_assert(DOWN == RUN || DOWN % (2 * RUN) == 0, "a thread's lines take turns, or are all of one operand");

    Operand from;
    // This thread's first chunk, of the next slice and within every slice: of its first line's operand, and of the other.
    const bf16* at[2];
    int line, column;
    u32 place;

    DEVICE PairCopier start(Operand first, const bf16* second, int line, int column) {
        int down = threadIdx.x / OVER, over = threadIdx.x % OVER, run = down / RUN;
        line += run / 2 * RUN + down % RUN;
        column += over * 8;
        i64 at = (i64)line * first.stride + column;
        const bf16 *one = first.values + at, *other = second + at;
        return PairCopier{first, {run % 2 ? other : one, run % 2 ? one : other}, line, column, SLICE::place(down, over)};
    }

    // Copies a slice, and advances by `columns`.
    DEVICE void copy(PairCopier& c, u8* slice, int, int columns) {
#pragma unroll
        for (int j = 0; j < SLICE::CHUNKS; j += OVER) {
            bool is_there = c.column + 8 * j < c.from.width;
#pragma unroll
            for (int i = 0; i < SLICE::LINES; i += DOWN) {
                int line = i / RUN / 2 * RUN;
                const bf16* from = c.at[i / RUN % 2] + (i64)line * c.from.stride + 8 * j;
                u8* to = slice + c.place + (i * OVER + j * SLICE::LINES) * 16;
                copy_async(to, from, is_there && c.line + line < c.from.lines);
            }
        }
        c.column += columns;
        c.at[0] += columns;
        c.at[1] += columns;
    }
};

// A tile of gate and up.
template <class TILE> struct Paired : TILE {
    using CopierB = PairCopier<typename TILE::B, TILE::THREADS, TILE::WARP_COLUMNS / 2>;
};

// The output.
template <class TILE> struct Halved : TILE {
    static constexpr int COLUMNS = TILE::COLUMNS / 2, WARP_COLUMNS = TILE::WARP_COLUMNS / 2, MMA_OVER = TILE::MMA_OVER / 2;
};

// Two neighbouring sums with their biases, from `column` on, rounded as in memory.
DEVICE u32 finished(float first, float second, const bf16* bias, int column, int columns) {
    if (bias && column < columns) first += load(bias + column);
    if (bias && column + 1 < columns) second += load(bias + column + 1);
    return pack(first, second);
}

// The tile of y of a block, over `slices` slices. `y.bias` is gate's.
template <class TILE, class ACT>
DEVICE void product_glu(int block, Operand a, Operand gate, const bf16* up, const bf16* up_bias, int slices, Result<bf16> y) {
    DYNAMIC_SHARED(shared);
    using OUT = Halved<TILE>;
    int tile_row, tile_column;
    int down = (y.rows + OUT::ROWS - 1) / OUT::ROWS, over = (y.columns + OUT::COLUMNS - 1) / OUT::COLUMNS;
    tile_of_block(block, down, over, tile_row, tile_column);
    auto from_a = TILE::CopierA::start(a, tile_row * OUT::ROWS, 0);
    auto from_b = Paired<TILE>::CopierB::start(gate, up, tile_column * OUT::COLUMNS, 0);
    Sums<Paired<TILE>> sums = {};
    multiply_slices<Paired<TILE>>(shared, from_a, from_b, slices, sums);
    Sums<OUT> act;
    int column = tile_column * OUT::COLUMNS + warp_id() % OUT::OVER * OUT::WARP_COLUMNS + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < OUT::MMA_DOWN; i++) {
#pragma unroll
        for (int j = 0; j < OUT::MMA_OVER; j++) {
            const float(&g)[4] = sums.at[i][j], (&u)[4] = sums.at[i][j + OUT::MMA_OVER];
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                u32 gates = finished(g[k], g[k + 1], y.bias, column + 8 * j, y.columns);
                u32 ups = finished(u[k], u[k + 1], up_bias, column + 8 * j, y.columns);
                act.at[i][j][k] = ACT::gated(low_of(gates), low_of(ups));
                act.at[i][j][k + 1] = ACT::gated(high_of(gates), high_of(ups));
            }
        }
    }
    y.bias = nullptr;
    put_sums(shared, act, y, tile_row, tile_column);
}
