// A tile of a GEMM on tensor cores: its operands' slices in shared memory, and the loop over them. c(r, j) = sum_s a(r,
// s) b(j, s), bf16 factors, f32 sums.
//
// The bitwise guarantee: each output is one chain of mma instructions of 16 values of s each, ascending from 0.
// For every tile shape, an output comes from the same instructions with the same factors in the same positions: rows
// of c are always the rows of an mma, columns its columns. So its bits depend neither on the family of tiles nor on the
// row's position.
//
// A block's operands come in slices of DEPTH values of s, by asynchronous copies into a ring of STAGES stages; there is one
// barrier per slice. Fragments of the next step are loaded while the tensor cores work on this one; or four warps hand whole
// slices to the tensor cores (wgmma, where the chip has it), which gives the same bits.
#pragma once
#include "common.cuh"

// The layout of an operand in memory: ALONG is [row][s], ACROSS is [s][row].
enum Lies { ALONG, ACROSS };

// A matrix in memory: `lines` of `width` values, `stride` apart (a multiple of 8; the address is aligned to 16).
struct Operand {
    const bf16* values;
    int stride, lines, width;
};

// ---- a slice in shared memory ----

// ROWS x DEPTH values of an operand, in lines as in memory, in chunks of 16 bytes.
//
// Chunks are permuted within a line, so that eight neighbouring lines have the same chunk in eight different eighths of
// 128 bytes: load_matrices and the copies then meet no bank twice. Lines of 64 bytes share 128 bytes in pairs; of longer ones
// the first 128 bytes of all lines come first.
template <int ROWS, int DEPTH, Lies LIES> struct Slice {
    static constexpr int LINES = LIES == ALONG ? ROWS : DEPTH;
    static constexpr int CHUNKS = (LIES == ALONG ? DEPTH : ROWS) / 8;
    static constexpr int BYTES = ROWS * DEPTH * 2;

    // Bytes from the slice's start to a chunk.
    DEVICE u32 place(u32 line, u32 chunk) {
        if (CHUNKS >= 8) return (chunk / 8 * LINES + line) * 128 + (chunk % 8 ^ line % 8) * 16;
        return (line * CHUNKS + (chunk ^ line / 2 % 4)) * 16;
    }

    // The 16 x 16 factors `a` of an mma: rows `row`.., values 16 step.. of s.
    DEVICE void load_a(u32 (&a)[4], const u8* slice, u32 row, u32 step) {
        u32 lane = lane_id();
        if (LIES == ALONG) load_matrices(a, slice + place(row + lane % 16, 2 * step ^ lane / 16));
        else load_matrices_transposed(a, slice + place(16 * step + lane / 16 * 8 + lane % 8, row / 8 ^ lane / 8 % 2));
    }

    // The factors `b` of two neighbouring mma: rows `row`.. and `row` + 8...
    DEVICE void load_b(u32 (&b)[4], const u8* slice, u32 row, u32 step) {
        u32 lane = lane_id();
        if (LIES == ALONG) load_matrices(b, slice + place(row + lane / 16 * 8 + lane % 8, 2 * step ^ lane / 8 % 2));
        else load_matrices_transposed(b, slice + place(16 * step + lane % 16, row / 8 ^ lane / 16));
    }
};

// Copies slices of one operand, one after the other. Eight neighboring threads (four if a line has no more) copy
// neighboring chunks of a line, so that 128 bytes are read in one piece. Values outside the matrix are zero.
//
// A thread's lines are a multiple of 8 apart: all its chunks have the same permutation, so one offset and one address
// with constant steps describe them all.
//
// RAGGED: the width need not be a multiple of 8, and values between width and stride may be anything, also NaN: the
// chunk at the end of a line is put together value by value.
template <class SLICE, int THREADS, bool RAGGED> struct Copier {
    static constexpr int OVER = SLICE::CHUNKS < 8 ? SLICE::CHUNKS : 8, DOWN = THREADS / OVER;
    static_assert(SLICE::CHUNKS % OVER == 0 && SLICE::LINES % DOWN == 0 && DOWN % 8 == 0, "threads share a slice evenly");

    Operand from;
    // This thread's first chunk, of the next slice and within every slice.
    const bf16* at;
    int line, column;
    u32 place;

    DEVICE Copier start(Operand from, int line, int column) {
        int down = threadIdx.x / OVER, over = threadIdx.x % OVER;
        line += down;
        column += over * 8;
        return Copier{from, from.values + (i64)line * from.stride + column, line, column, SLICE::place(down, over)};
    }

    // Copies a slice, and advances by `lines` and `columns`.
    DEVICE void copy(Copier& c, u8* slice, int lines, int columns) {
#pragma unroll
        for (int j = 0; j < SLICE::CHUNKS; j += OVER) {
            int left = c.from.width - c.column - 8 * j;
            if (RAGGED && left > 0 && left < 8) {
                copy_ends(c, slice, j, left);
                continue;
            }
#pragma unroll
            for (int i = 0; i < SLICE::LINES; i += DOWN) {
                const bf16* from = c.at + (i64)i * c.from.stride + 8 * j;
                copy_async(slice + c.place + (i * OVER + j * SLICE::LINES) * 16, from, c.line + i < c.from.lines && left > 0);
            }
        }
        c.line += lines;
        c.column += columns;
        c.at += (i64)lines * c.from.stride + columns;
    }

    // The chunks of this thread's lines in which `left` values are left.
    DEVICE void copy_ends(const Copier& c, u8* slice, int j, int left) {
#pragma unroll 1
        for (int i = 0; i < SLICE::LINES; i += DOWN) {
            const bf16* from = c.at + (i64)i * c.from.stride + 8 * j;
            u16 values[8];
#pragma unroll
            for (int k = 0; k < 8; k++) values[k] = k < left && c.line + i < c.from.lines ? from[k].bits : 0;
            Eight some;
            for (int k = 0; k < 4; k++) some.pair[k] = values[2 * k] | (u32)values[2 * k + 1] << 16;
            *(Eight*)(slice + c.place + (i * OVER + j * SLICE::LINES) * 16) = some;
        }
    }
};

// ---- the tile ----

// A block's tile: ROWS x COLUMNS of c, slices of DEPTH, DOWN x OVER warps (each with its own outputs), STAGES slices in
// flight.
template <int ROWS_, int COLUMNS_, int DEPTH_, int DOWN, int OVER_, int STAGES_, Lies A_LIES = ALONG, Lies B_LIES = ALONG,
          bool RAGGED = false>
struct Tile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DEPTH = DEPTH_, OVER = OVER_, STAGES = STAGES_;
    static constexpr int THREADS = DOWN * OVER * WARP;
    // Sizes of a warp's part.
    static constexpr int WARP_ROWS = ROWS / DOWN, WARP_COLUMNS = COLUMNS / OVER;
    static constexpr int MMA_DOWN = WARP_ROWS / 16, MMA_OVER = WARP_COLUMNS / 8;
    static constexpr int STEPS = DEPTH / 16;
    static constexpr Lies LIES_A = A_LIES, LIES_B = B_LIES;
    // Whether each group of four warps has 64 rows and all columns, as wgmma requires.
    static constexpr bool IS_WIDE = OVER == 1 && WARP_ROWS == 16 && DOWN % 4 == 0 && DEPTH == 64;
    using A = Slice<ROWS, DEPTH, A_LIES>;
    using B = Slice<COLUMNS, DEPTH, B_LIES>;
    using CopierA = Copier<A, THREADS, RAGGED>;
    using CopierB = Copier<B, THREADS, false>;
    static constexpr int STAGE_BYTES = A::BYTES + B::BYTES;
    // A warp's strip of 16 rows of sums before they are written: f32, lines padded by 8 so that neighbours use
    // different banks.
    static constexpr int OUT_LINE = WARP_COLUMNS + 8, OUT_FLOATS = 16 * OUT_LINE;
    static_assert(OUT_FLOATS * 4 * DOWN * OVER <= STAGE_BYTES * STAGES, "strips fit where slices were");
    static_assert(STEPS % 2 == 0 && MMA_OVER % 2 == 0 && MMA_DOWN * 16 * DOWN == ROWS, "whole mma, steps in pairs");
};

// The factors of one step of a warp.
template <class TILE> struct Fragments {
    u32 a[TILE::MMA_DOWN][4];
    u32 b[TILE::MMA_OVER][2];
};

template <class TILE> struct Sums {
    float at[TILE::MMA_DOWN][TILE::MMA_OVER][4];
};

template <class TILE> DEVICE void load_fragments(Fragments<TILE>& f, const u8* stage, u32 step) {
    u32 row = warp_id() / TILE::OVER * TILE::WARP_ROWS, column = warp_id() % TILE::OVER * TILE::WARP_COLUMNS;
#pragma unroll
    for (int i = 0; i < TILE::MMA_DOWN; i++) TILE::A::load_a(f.a[i], stage, row + 16 * i, step);
#pragma unroll
    for (int j = 0; j < TILE::MMA_OVER; j += 2) {
        u32 two[4];
        TILE::B::load_b(two, stage + TILE::A::BYTES, column + 8 * j, step);
        f.b[j][0] = two[0], f.b[j][1] = two[1], f.b[j + 1][0] = two[2], f.b[j + 1][1] = two[3];
    }
}

template <class TILE> DEVICE void multiply(Sums<TILE>& sums, const Fragments<TILE>& f) {
#pragma unroll
    for (int i = 0; i < TILE::MMA_DOWN; i++) {
#pragma unroll
        // Back and forth, so that neighbouring instructions share a factor.
        for (int j = 0; j < TILE::MMA_OVER; j++) {
            int over = i % 2 ? TILE::MMA_OVER - 1 - j : j;
            mma(sums.at[i][over], f.a[i], f.b[over]);
        }
    }
}

// Copies a slice of both operands to a stage, where `is_there` says that there is one, as a group.
template <class TILE>
DEVICE void copy_slices(u8* stage, typename TILE::CopierA& from_a, typename TILE::CopierB& from_b, bool is_there) {
    constexpr int A_LINES = TILE::LIES_A == ALONG ? 0 : TILE::DEPTH, B_LINES = TILE::LIES_B == ALONG ? 0 : TILE::DEPTH;
    if (is_there) {
        TILE::CopierA::copy(from_a, stage, A_LINES, TILE::DEPTH - A_LINES);
        TILE::CopierB::copy(from_b, stage + TILE::A::BYTES, B_LINES, TILE::DEPTH - B_LINES);
    }
    copy_commit();
}

#ifdef HAS_WGMMA
// As multiply_slices. The tensor cores work on one slice while the next is waited for, so copies keep two slices' distance.
template <class TILE>
DEVICE void multiply_slices_wide(u8* shared, typename TILE::CopierA& from_a, typename TILE::CopierB& from_b, int slices,
                                 Sums<TILE>& sums) {
    constexpr int STAGES = TILE::STAGES, A_ACROSS = TILE::LIES_A == ACROSS, B_ACROSS = TILE::LIES_B == ACROSS;
    // Bytes from one step of 16 values of s to the next.
    constexpr int A_STEP = A_ACROSS ? 16 * 128 : 32, B_STEP = B_ACROSS ? 16 * 128 : 32;
    static_assert(TILE::DEPTH * 128 == WGMMA_BLOCK && (!B_ACROSS || TILE::COLUMNS % 64 == 0), "blocks of 64 rows");
#pragma unroll
    for (int i = 0; i < STAGES - 2; i++) copy_slices<TILE>(shared + i * TILE::STAGE_BYTES, from_a, from_b, i < slices);
    // The 64 rows of these four warps are a separate block in either layout.
    const u8* a = shared + warp_id() / 4 * WGMMA_BLOCK;
    const u8* b = shared + TILE::A::BYTES;
    int read = 0, write = STAGES - 2;
    for (int slice = 0; slice < slices; slice++) {
        copy_wait<STAGES - 3>();
        wgmma_publish();
        SYNC_BLOCK();  // this slice is there, and nobody works on the one before the last
        wgmma_begin();
#pragma unroll
        for (int step = 0; step < TILE::STEPS; step++) {
            const int at = read * TILE::STAGE_BYTES;
            wgmma<A_ACROSS, B_ACROSS>(sums.at[0], wgmma_factor(a + at + step * A_STEP), wgmma_factor(b + at + step * B_STEP));
        }
        wgmma_commit();
        copy_slices<TILE>(shared + write * TILE::STAGE_BYTES, from_a, from_b, slice + STAGES - 2 < slices);
        wgmma_wait<1>();
        read = read == STAGES - 1 ? 0 : read + 1;
        write = write == STAGES - 1 ? 0 : write + 1;
    }
    wgmma_wait<0>();
    SYNC_BLOCK();
}
#endif

// sums += a b^T over `slices` slices, from the position of the copiers; values outside the operands count as zero.
// Afterwards no warp needs the shared memory.
template <class TILE>
DEVICE void multiply_slices(u8* shared, typename TILE::CopierA& from_a, typename TILE::CopierB& from_b, int slices,
                            Sums<TILE>& sums) {
#ifdef HAS_WGMMA
    if constexpr (TILE::IS_WIDE) return multiply_slices_wide<TILE>(shared, from_a, from_b, slices, sums);
#elif !defined(EMULATED)
    // Wide tiles are not started here: their sums and factors would not fit the registers.
    if constexpr (TILE::IS_WIDE) return __trap();
#endif
    constexpr int AHEAD = TILE::STAGES - 1;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) copy_slices<TILE>(shared + i * TILE::STAGE_BYTES, from_a, from_b, i < slices);
    Fragments<TILE> fragments[2];
    copy_wait<TILE::STAGES - 2>();
    SYNC_BLOCK();
    load_fragments(fragments[0], shared, 0);
    int read = 0, write = AHEAD;
    for (int slice = 0; slice < slices; slice++) {
#pragma unroll
        for (int step = 0; step < TILE::STEPS; step++) {
            // Before its last step: the next slice has arrived, and no warp reads the previous slice any more.
            if (step == TILE::STEPS - 1) {
                copy_wait<TILE::STAGES - 2>();
                SYNC_BLOCK();
                read = read == TILE::STAGES - 1 ? 0 : read + 1;
            }
            load_fragments(fragments[(step + 1) % 2], shared + read * TILE::STAGE_BYTES, (step + 1) % TILE::STEPS);
            if (step == 0) {
                copy_slices<TILE>(shared + write * TILE::STAGE_BYTES, from_a, from_b, slice + AHEAD < slices);
                write = write == TILE::STAGES - 1 ? 0 : write + 1;
            }
            multiply(sums, fragments[step % 2]);
        }
    }
    // All copies have completed, and the last, unused fragments have been read.
    SYNC_BLOCK();
}
