// paged_decode_E  o = softmax(scale q k^T) v   arXiv:2205.14135, arXiv:2309.06180; causal, with a window
// Up to 16 rows (token, head of the group) of a sequence: a new token, or a few, of each sequence.
// q, o (t, h, E) bf16; keys, values (pages, g, PAGE, E) bf16, or of paged_decode_codes_E as kv_append_codes has them;
// sequences (s, 4), tiles (tiles, 2) i32: sequence, first row; blocks u32: pages of all sequences, one after the other
// grid (tiles, g), block 128; a warp takes a block of keys of a stage for the scores, then columns for the values: the chain
// over keys stays whole. While scores are computed values come, and the other way round.
// needs sm_80, dynamic shared memory: two blocks of keys and of values, and what warps exchange
// roofline 4 E g bytes a key, in 8 bits 2 (E + 1) g: keys and values once, for all heads of a group
#include "paged.cuh"

#define WARPS (THREADS / WARP)

// Keys and values in flight. Four blocks of threads fit an SM: 35 KiB each if rows are long, and 128 registers per
// thread.
template <int E> struct Stage {
    // Blocks of keys.
    static constexpr int BLOCKS = E > 64 && E <= 128 ? 1 : 2;
    static constexpr int ROWS = BLOCKS * Block<E>::KEYS;
    static constexpr int TILE = ROWS * Tile<E>::STRIDE;
};

// Shared by the warps of a decoding block, in addition to the tiles.
template <int BLOCKS> struct Exchange {
    float max[BLOCKS][16];
    float sum[BLOCKS][2][WARP];
    // Left operands [block of keys][16 keys][lane]
    Eight p[BLOCKS][4][WARP];
};

// Computes the scores of this warp's block of a stage, and shares their maxima with the other warps.
template <int E, int N, class EXCHANGE>
DEVICE void decode_scores(float (&s)[N][4], const u32 (&q)[E / 16][4], const bf16* keys, int first,
                          const KeyRange& key_range, float cap, EXCHANGE* exchange) {
    int warp = warp_id(), lane = lane_id();
    scores<E>(s, q, keys + warp * 8 * N * Tile<E>::STRIDE);
    if (cap > 0.0f) cap_scores(s, cap);
    mask(s, first + warp * 8 * N, key_range);
    float max[2];
    maxima(max, s);
    if (lane % 4 == 0) {
        exchange->max[warp][lane / 4] = max[0];
        exchange->max[warp][lane / 4 + 8] = max[1];
    }
}

// Probabilities of this warp's block, relative to the rows' maximum there.
template <int N, class EXCHANGE>
DEVICE void decode_probabilities(float (&s)[N][4], float low, float high, float scale, EXCHANGE* exchange) {
    int warp = warp_id(), lane = lane_id();
    exchange->sum[warp][0][lane] = probabilities<0>(s, low, scale);
    exchange->sum[warp][1][lane] = probabilities<1>(s, high, scale);
#pragma unroll
    for (int step = 0; step < N / 2; step++) {
        u32 a[4];
        packed(a, s, step);
        exchange->p[warp][step][lane] = Eight{{a[0], a[1], a[2], a[3]}};
    }
}

// Combines a run with the earlier ones, and resets the state for the next one.
template <int PAIRS>
DEVICE void end_run(float (&before)[PAIRS][2][4], Running& past, float (&o)[PAIRS][2][4], Running& row, float scale) {
    Join both[2];
    for (int i = 0; i < 2; i++) {
        both[i] = join(past.max[i], past.sum[i], row.max[i], sum_of_lanes(row.sum[i]), scale);
        past.max[i] = both[i].max;
        past.sum[i] = both[i].sum;
    }
    row = running();
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float& x = o[j][i / 4][i % 4];
            before[j][i / 4][i % 4] = joined(both[i % 4 / 2], before[j][i / 4][i % 4], x);
            x = 0.0f;
        }
    }
}

template <int E, class T> DEVICE void decode(const Paged& paged) {
    DYNAMIC_SHARED(shared);
    constexpr int KEYS = Block<E>::KEYS, BLOCKS = Stage<E>::BLOCKS, PAIRS = (E / 16 + WARPS - 1) / WARPS;
    bf16 *keys = (bf16*)shared, *values = keys + Stage<E>::TILE;
    auto* exchange = (Exchange<BLOCKS>*)(values + Stage<E>::TILE);
    int warp = warp_id(), lane = lane_id(), r = lane / 4;
    Work work = work_of<E, Stage<E>::ROWS>(paged, blockIdx.x, 16);
    const Head head = head_of<E, T>(paged, work);
    KeyRange seen = key_range(work, r);
    // The result of the current run, and that of the earlier runs.
    Running row = running(), past = running();
    float o[PAIRS][2][4] = {}, before[PAIRS][2][4] = {};
    u32 pages = pages_of(head, work.first, work.end);
    load_tile<E, Stage<E>::ROWS, T>(keys, paged.keys, paged.kv_heads, head, pages, work.first, work.end);
    copy_commit();
    for (int first = work.first; first < work.end; first += Stage<E>::ROWS) {
        if (first % RUN == 0) end_run(before, past, o, row, paged.scale);
        load_tile<E, Stage<E>::ROWS, T>(values, paged.values, paged.kv_heads, head, pages, first, work.end);
        copy_commit();
        pages = pages_of(head, first + Stage<E>::ROWS, work.end);
        copy_wait<1>();
        expand_tile<E, Stage<E>::ROWS, T>(keys);
        SYNC_BLOCK();  // the keys are there
        float s[KEYS / 8][4];
        if (warp < BLOCKS) {
            // Read again for each stage, from the L1: kept, they would use the registers of the fourth block of
            // threads.
            u32 q[E / 16][4];
            load_queries<E>(q, paged, work, r);
            decode_scores<E>(s, q, keys, first, seen, paged.cap, exchange);
        }
        SYNC_BLOCK();  // the maxima are there, and nobody reads the keys
        load_tile<E, Stage<E>::ROWS, T>(keys, paged.keys, paged.kv_heads, head, pages, first + Stage<E>::ROWS, work.end);
        copy_commit();
        float decay[BLOCKS][2];
        float low = row.max[0], high = row.max[1];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            for (int i = 0; i < 2; i++) {
                float max = fmaxf(row.max[i], exchange->max[b][r + 8 * i]);
                decay[b][i] = decay_of(row.max[i], max, paged.scale);
                row.max[i] = max;
            }
            if (b == warp) low = row.max[0], high = row.max[1];
        }
        if (warp < BLOCKS) decode_probabilities(s, low, high, paged.scale, exchange);
        copy_wait<1>();
        expand_tile<E, Stage<E>::ROWS, T>(values);
        SYNC_BLOCK();  // the values and probabilities are there
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            for (int i = 0; i < 2; i++) row.sum[i] = fmaf(row.sum[i], decay[b][i], exchange->sum[b][i][lane]);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                rescale(o[j][0], decay[b][0], decay[b][1]);
                rescale(o[j][1], decay[b][0], decay[b][1]);
            }
            for (int step = 0; step < KEYS / 16; step++) {
                Eight p = exchange->p[b][step][lane];
                const bf16* tile = values + (b * KEYS + step * 16) * Tile<E>::STRIDE;
#pragma unroll
                for (int j = 0; j < PAIRS; j++) {
                    int column = (warp + j * WARPS) * 16;
                    if (column < E) add_values<E>(o[j][0], o[j][1], p.pair, tile + column);
                }
            }
        }
        SYNC_BLOCK();  // nobody reads the values, probabilities and maxima
    }
    end_run(before, past, o, row, paged.scale);
    float inverses[2] = {1.0f / past.sum[0], 1.0f / past.sum[1]};
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        int column = (warp + j * WARPS) * 16;
        if (column >= E) continue;
        store_result<E>(paged, work, r, column, before[j][0], inverses);
        store_result<E>(paged, work, r, column + 8, before[j][1], inverses);
    }
    copy_wait<0>();
}

KERNEL __launch_bounds__(128) paged_decode_32(PAGED_PARAMETERS) { decode<32, bf16>(PAGED); }
KERNEL __launch_bounds__(128) paged_decode_64(PAGED_PARAMETERS) { decode<64, bf16>(PAGED); }
KERNEL __launch_bounds__(128, 4) paged_decode_80(PAGED_PARAMETERS) { decode<80, bf16>(PAGED); }
KERNEL __launch_bounds__(128, 4) paged_decode_96(PAGED_PARAMETERS) { decode<96, bf16>(PAGED); }
KERNEL __launch_bounds__(128, 4) paged_decode_128(PAGED_PARAMETERS) { decode<128, bf16>(PAGED); }
KERNEL __launch_bounds__(128) paged_decode_256(PAGED_PARAMETERS) { decode<256, bf16>(PAGED); }
KERNEL __launch_bounds__(128) paged_decode_codes_32(PAGED_PARAMETERS) { decode<32, u8>(PAGED); }
KERNEL __launch_bounds__(128) paged_decode_codes_64(PAGED_PARAMETERS) { decode<64, u8>(PAGED); }
KERNEL __launch_bounds__(128, 4) paged_decode_codes_80(PAGED_PARAMETERS) { decode<80, u8>(PAGED); }
KERNEL __launch_bounds__(128, 4) paged_decode_codes_96(PAGED_PARAMETERS) { decode<96, u8>(PAGED); }
KERNEL __launch_bounds__(128, 4) paged_decode_codes_128(PAGED_PARAMETERS) { decode<128, u8>(PAGED); }
KERNEL __launch_bounds__(128) paged_decode_codes_256(PAGED_PARAMETERS) { decode<256, u8>(PAGED); }
