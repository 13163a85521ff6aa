// The layout of keys and values in a paged cache, and the copy of a tile of them to shared memory.
//
// A page holds PAGE tokens of all key/value heads: [g][PAGE][e], keys and values alike. So the tokens of one head of a page
// are one run of memory, read as a whole, and a row of 16 bytes each fits the tiles of `load_matrices`. Values are bf16, or
// codes (u8), where the powers of the PAGE tokens follow each head.
#pragma once
#include "flash.cuh"
#include "kv_codes.cuh"
#include "softcap.cuh"

#define PAGE 32
// Threads of a block.
#define THREADS 128

// Numbers of one sequence in the table of sequences.
struct Sequence {
    i32 past, tokens, row, blocks;
};

// One head of one sequence in the cache: the pages of the sequence, and the offset of the head in each.
struct Head {
    const u32* blocks;
    u32 offset;
};

// The pages of the keys from `first`, the start of a page, on: lane l has the l-th if it begins before `end`. Keys and
// values are in pages of the same numbers. They are read early, so that no copy waits for the table. Lanes exchange
// them at their use, so the compiler computes no address from them, and waits for none, before that.
DEVICE u32 pages_of(const Head& head, int first, int end) {
    const int key = first + lane_id() * PAGE;
    return head.blocks[(u32)(key < end ? key : end - 1) / PAGE];
}

// One head of a page of values T.
template <int E, class T> struct PageHead {
    static constexpr bool IS_CODES = sizeof(T) == 1;
    static constexpr int LEN = PAGE * (IS_CODES ? E + 1 : E);
};

// The start of a page. Read from the parameters, not kept in registers: prefill has none left.
template <int E, class T> DEVICE u64 start_of(u32 page, u32 kv_heads) {
    return (u64)(page * kv_heads) * PageHead<E, T>::LEN;
}

// Threads that share a row of a tile.
template <int E> struct Share {
    static constexpr int WIDE = E <= 32 ? 4 : E <= 64 ? 8 : E <= 128 ? 16 : 32, STEP = THREADS / WIDE;
};

// Starts copies of the keys first .. first + ROWS, or of their values, to a tile (ROWS, E); rows from `end` on are zeros. A thread
// stays in its column. Where they have landed, `expand_tile` comes next.
template <int E, int ROWS, class T>
DEVICE void load_tile(bf16* tile, const void* cache, u32 kv_heads, const Head& head, u32 pages, int first, int end) {
    constexpr int WIDE = Share<E>::WIDE, STEP = Share<E>::STEP, STRIDE = Tile<E>::STRIDE;
    const int column = threadIdx.x % WIDE, row = threadIdx.x / WIDE;
    const u32 own = head.offset + row * E + column * 8;
    static_assert(ROWS % PAGE == 0 && ROWS / PAGE <= WARP, "a lane has a page");
    const T* page[ROWS / PAGE];
#pragma unroll
    for (int p = 0; p < ROWS / PAGE; p++) page[p] = (const T*)cache + (start_of<E, T>(shuffle(pages, p), kv_heads) + own);
    if (column >= E / 8) return;
    // Existing rows, from this thread's first on.
    const int count = end - first - row;
    if constexpr (PageHead<E, T>::IS_CODES) {
        u8* line = (u8*)(tile + row * STRIDE);
        const int power = PAGE * E - row * E + row / 4 * 4;
#pragma unroll
        for (int i = 0; i < ROWS; i += STEP) {
            const T* from = page[i / PAGE];
            copy_async<8>(line + i * STRIDE * 2 + Landing<E>::CODES + column * 8, from + i % PAGE * E, i < count);
            if (column == 0) copy_async<4>(line + i * STRIDE * 2 + Landing<E>::POWER, from + (power + i % PAGE), i < count);
        }
    } else {
        tile += row * STRIDE + column * 8;
#pragma unroll
        for (int i = 0; i < ROWS; i += STEP) copy_async(tile + i * STRIDE, page[i / PAGE] + i % PAGE * E, i < count);
    }
}

// Turns codes that have landed in a tile into bf16, before the barrier after which others read it.
template <int E, int ROWS, class T> DEVICE void expand_tile(bf16* tile) {
    if constexpr (PageHead<E, T>::IS_CODES) {
        constexpr int WIDE = Share<E>::WIDE;
        expand<E, Tile<E>::STRIDE, ROWS, Share<E>::STEP>(tile, threadIdx.x / WIDE, threadIdx.x % WIDE);
    }
}

// The parameters that all blocks of a launch share.
struct Paged {
    const bf16* q;
    // bf16 or codes
    const void *keys, *values;
    bf16* o;
    const Sequence* sequences;
    const u32* blocks;
    // (sequence, first row) of each tile
    const i32* tiles;
    i32 kv_heads, group, window;
    // the scale of scores times log2(e), and their cap before it is applied (0: none)
    float scale, cap;
};

// The parameters of a kernel, and the values that its blocks compute from them.
#define PAGED_PARAMETERS                                                                                              \
    const bf16 *q, const void *keys, const void *values, bf16 *o, const i32 *sequences, const u32 *blocks,            \
        const i32 *tiles, i32 kv_heads, i32 group, i32 window, float scale, float cap
#define PAGED Paged{q, keys, values, o, (const Sequence*)sequences, blocks, tiles, kv_heads, group, window, scale, cap}

// Rows of one sequence under one key/value head: row r is head r % group of token r / group.
struct Work {
    Sequence sequence;
    // The first row and the number of rows.
    i32 row, rows;
    i32 group, heads, kv_head, window;
    // The keys that are visible to any row, from the start of a block on.
    i32 first, end;
};

// The visible keys from .. to of a row.
DEVICE int last_key(const Work& work, int row) { return work.sequence.past + row / work.group + 1; }
DEVICE int first_key(const Work& work, int row) {
    int to = last_key(work, row);
    return to < work.window ? 0 : to - work.window;
}

// The sequence's row for a row of the tile. Rows beyond the end repeat the last one.
DEVICE int clamped_row(const Work& work, int r) { return work.row + (r < work.rows ? r : work.rows - 1); }

DEVICE KeyRange key_range(const Work& work, int r) {
    int low = clamped_row(work, r), high = clamped_row(work, r + 8);
    return KeyRange{{first_key(work, low), first_key(work, high)}, {last_key(work, low), last_key(work, high)}};
}

// The offset of a row in q and o, in units of head dims.
DEVICE u64 place(const Work& work, int row) {
    u64 token = work.sequence.row + row / work.group;
    return token * work.heads + work.kv_head * work.group + row % work.group;
}

// The work of a block of threads: a tile of up to `rows_max` rows of the key/value head blockIdx.y. Its keys begin at a
// multiple of KEYS, so if a kernel processes several blocks of keys at once, runs end at the end of its stages.
template <int E, int KEYS = Block<E>::KEYS> DEVICE Work work_of(const Paged& paged, int tile, int rows_max) {
    Work work;
    work.sequence = paged.sequences[paged.tiles[2 * tile]];
    work.row = paged.tiles[2 * tile + 1];
    work.rows = work.sequence.tokens * paged.group - work.row;
    if (work.rows > rows_max) work.rows = rows_max;
    work.group = paged.group;
    work.heads = paged.kv_heads * paged.group;
    work.kv_head = blockIdx.y;
    work.window = paged.window;
    work.first = first_key(work, work.row) / KEYS * KEYS;
    static_assert(RUN % KEYS == 0, "runs end where stages do");
    work.end = last_key(work, work.row + work.rows - 1);
    return work;
}

template <int E, class T> DEVICE Head head_of(const Paged& paged, const Work& work) {
    return Head{paged.blocks + work.sequence.blocks, (u32)work.kv_head * PageHead<E, T>::LEN};
}

// The 16 rows of a warp as the left operand of q k^T, straight from memory; `r` is this lane's upper row.
template <int E> DEVICE void load_queries(u32 (&q)[E / 16][4], const Paged& paged, const Work& work, int r) {
    const u32* low = (const u32*)(paged.q + place(work, clamped_row(work, r)) * E) + lane_id() % 4;
    const u32* high = (const u32*)(paged.q + place(work, clamped_row(work, r + 8)) * E) + lane_id() % 4;
#pragma unroll
    for (int k = 0; k < E / 16; k++) {
        q[k][0] = low[k * 8];
        q[k][1] = high[k * 8];
        q[k][2] = low[k * 8 + 4];
        q[k][3] = high[k * 8 + 4];
    }
}

// Eight columns of the result for this lane's two rows.
template <int E>
DEVICE void store_result(const Paged& paged, const Work& work, int r, int column, const float (&o)[4],
                         const float (&inverse)[2]) {
    for (int i = 0; i < 2; i++) {
        if (r + 8 * i >= work.rows) continue;
        bf16* to = paged.o + place(work, work.row + r + 8 * i) * E + column + 2 * (lane_id() % 4);
        *(u32*)to = pack(o[2 * i] * inverse[i], o[2 * i + 1] * inverse[i]);
    }
}
