// Statistics of logits = h W^T that are never stored: the head's product with the softmax behind it, for scoring.
//
// Each logit is one ascending chain of k16 products, so its bits are those of the exact product; the order of the sums is
// that of softmax.cuh, so the statistics are those of `linear_logprob_stats_f32` over stored logits, bitwise.
#include "softmax.cuh"

#define FUSED_ROWS 128
#define FUSED_THREADS 256
// Elements of k in a stage: rows of 64 bytes, four chunks of 16.
#define FUSED_K 32
#define STAGES 4
#define STAGE_BYTES ((FUSED_ROWS + STRIP) * FUSED_K * 2)
// Floats from row to row of a tile of logits: 8 banks further each, so that a warp's pairs meet no bank twice.
#define LOGITS_STRIDE (STRIP + 8)
// Tiles of rows that run at the same time over the same part of W, so that both stay in L2.
#define GROUP 8
#define ROWS_OF_WARP (FUSED_ROWS * WARP / FUSED_THREADS)

// The chunk c of a row in a stage. Eight rows that are read together meet no bank twice.
DEVICE bf16* chunk_of(bf16* tile, int row, int c) { return tile + row * FUSED_K + (c ^ (row >> 1 & 3)) * 8; }

// Where this thread copies from: the chunk threadIdx.x % 4 of a row, at k = 0, and of the one 64 rows further on.
struct Source {
    const bf16* at;
    // Rows from this one to the last.
    i64 left;
};

// For 128 rows of x from `first`.
DEVICE Source source(const bf16* x, i64 first, i64 rows, int width) {
    i64 row = first + threadIdx.x / 4;
    return Source{x + row * width + threadIdx.x % 4 * 8, rows - row};
}

// Starts the copies of elements k .. k + 31; what lies outside is 0, and is not read.
DEVICE void fetch(bf16* tile, const Source& from, int k, int width) {
    // 64 rows further on chunks are permuted alike.
    bf16* to = chunk_of(tile, threadIdx.x / 4, threadIdx.x % 4);
    bool within = k + (int)threadIdx.x % 4 * 8 < width;
    copy_async(to, from.at + k, within && from.left > 0);
    copy_async(to + 64 * FUSED_K, from.at + k + (i64)64 * width, within && from.left > 64);
}

// The warp's 64 x 32 logits += its rows of h by its rows of W.
DEVICE void multiply(float (&d)[4][4][4], bf16* h, bf16* w) {
    int l = lane_id(), m0 = warp_id() / 4 * 64, n0 = warp_id() % 4 * 32;
    u32 a[2][4][4], b[2][2][4];
    // Both steps' factors first: the second's arrive while the first's are multiplied.
#pragma unroll
    for (int k = 0; k < 2; k++) {
        for (int j = 0; j < 2; j++) load_matrices(b[k][j], chunk_of(w, n0 + 16 * j + l / 16 * 8 + l % 8, 2 * k + l / 8 % 2));
        for (int i = 0; i < 4; i++) load_matrices(a[k][i], chunk_of(h, m0 + 16 * i + l % 16, 2 * k + l / 16));
    }
#pragma unroll
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                u32 columns[2] = {b[k][j / 2][j % 2 * 2], b[k][j / 2][j % 2 * 2 + 1]};
                mma(d[i][j], a[k][i], columns);
            }
}

struct alignas(8) Two {
    float at[2];
};

// Puts the warp's logits into the tile and clears them.
DEVICE void put(float (&d)[4][4][4], float* logits) {
    int g = lane_id() / 4, q = lane_id() % 4, m0 = warp_id() / 4 * 64, n0 = warp_id() % 4 * 32;
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            float* at = logits + (m0 + 16 * i + g) * LOGITS_STRIDE + n0 + 8 * j + 2 * q;
            *(Two*)at = Two{{d[i][j][0], d[i][j][1]}};
            *(Two*)(at + 8 * LOGITS_STRIDE) = Two{{d[i][j][2], d[i][j][3]}};
            for (int e = 0; e < 4; e++) d[i][j][e] = 0.0f;
        }
}

// Adds a strip of logits to the sums of the warp's rows, and tells the targets in it.
DEVICE void take(Part (&parts)[ROWS_OF_WARP], const float* logits, u64 first, u64 rows, int column, i32 v,
                 float inverse_temperature, const i32* places, float* targets) {
    int mine = column + 4 * lane_id();
#pragma unroll
    for (int i = 0; i < ROWS_OF_WARP; i++) {
        int row = warp_id() * ROWS_OF_WARP + i;
        const float* from = logits + row * LOGITS_STRIDE;
        Four four = *(const Four*)(from + 4 * lane_id());
        float z[4];
        for (int j = 0; j < 4; j++) z[j] = mine + j < v ? times(four.at[j], inverse_temperature) : -infinity();
        add(parts[i], z);
    }
    int row = warp_id() * ROWS_OF_WARP + lane_id();
    if (lane_id() < ROWS_OF_WARP && first + row < rows) {
        int place = places[first + row] - column;
        if (place >= 0 && place < STRIP && column + place < v) {
            targets[first + row] = logits[row * LOGITS_STRIDE + place];
        }
    }
}

// linear_logprob_fused  sums of each span of 2048 columns of each row of h W^T / temperature, and the targets' logits
// h (rows, K) bf16; W (V, K) bf16; places (rows) i32; spans (rows, ceil(V / 2048), 4) f32; targets (rows) f32, written where
// the place lies in 0..V
// grid ceil(ceil(rows / 128) / 8) 8 ceil(V / 2048), block 256: tiles of 128 rows x 128 columns, 8 warps of 64 x 32, shared
// 132 KiB: four stages of copies and a tile of logits; needs K % 8 == 0
// roofline 2 rows V K flops
KERNEL __launch_bounds__(FUSED_THREADS) linear_logprob_fused(
    const bf16* h, const bf16* w, u64 rows, i32 v, i32 width, float inverse_temperature, const i32* places, Part* spans,
    float* targets) {
    DYNAMIC_SHARED(room);
    float* logits = (float*)(room + STAGES * STAGE_BYTES);
    int span_count = (v + SPAN - 1) / SPAN;
    u64 tile_row = (u64)blockIdx.x / (GROUP * span_count) * GROUP + blockIdx.x % GROUP, first = tile_row * FUSED_ROWS;
    if (first >= rows) return;
    int span = blockIdx.x / GROUP % span_count, column = span * SPAN;
    int end = column + SPAN < v ? column + SPAN : v;
    int steps_of_tile = (width + FUSED_K - 1) / FUSED_K, steps = (end - column + STRIP - 1) / STRIP * steps_of_tile;
    float d[4][4][4] = {};
    Part parts[ROWS_OF_WARP];
    for (int i = 0; i < ROWS_OF_WARP; i++) parts[i] = no_part();
    Source of_h = source(h, first, rows, width), of_w = source(w, column, v, width);
    int next_k = 0;
    auto start = [&](int step) {
        bf16* stage = (bf16*)(room + step % STAGES * STAGE_BYTES);
        if (step < steps) {
            fetch(stage, of_h, next_k, width);
            fetch(stage + FUSED_ROWS * FUSED_K, of_w, next_k, width);
            next_k += FUSED_K;
            if (next_k >= width) next_k = 0, of_w.at += (i64)STRIP * width, of_w.left -= STRIP;
        }
        copy_commit();
    };
    for (int step = 0; step < STAGES - 1; step++) start(step);
    for (int step = 0, k = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        SYNC_BLOCK();
        start(step + STAGES - 1);
        bf16* stage = (bf16*)(room + step % STAGES * STAGE_BYTES);
        multiply(d, stage, stage + FUSED_ROWS * FUSED_K);
        if (++k < steps_of_tile) continue;
        k = 0;
        put(d, logits);
        SYNC_BLOCK();
        take(parts, logits, first, rows, column, v, inverse_temperature, places, targets);
        column += STRIP;
    }
#pragma unroll
    for (int i = 0; i < ROWS_OF_WARP; i++) {
        u64 row = first + warp_id() * ROWS_OF_WARP + i;
        Part part = warp_merge(parts[i]);
        if (lane_id() == 0 && row < rows) spans[row * span_count + span] = part;
    }
}

// linear_logprob_finish  the statistics of rows from the sums of their spans
// spans (rows, count, 4) f32; targets (rows) f32; places (rows) i32; stats (rows, 4) f32
// grid ceil(rows / 4), block 128: a warp a row
// roofline 16 rows count bytes
KERNEL linear_logprob_finish(const Part* spans, i32 count, const float* targets, const i32* places, u64 rows, i32 v,
                             Stats* stats) {
    u64 row = (u64)blockIdx.x * 4 + warp_id();
    if (row >= rows) return;
    Stats found = finished(merged(spans + row * count, count));
    if (lane_id() > 0) return;
    i32 place = places[row];
    found.target = place >= 0 && place < v ? targets[row] : 0.0f;
    stats[row] = found;
}
