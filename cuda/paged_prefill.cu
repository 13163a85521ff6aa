// paged_prefill_E  o = softmax(scale q k^T) v   arXiv:2205.14135, arXiv:2309.06180; causal, with a window
// Many rows (token, head of the group) of a sequence: a prompt, or a part of it after cached tokens. A launch covers
// the run of keys from .. to. If rows have several runs, there is a launch for each, ascending. Between launches, rows
// are in `before`.
// q, o (t, h, E) bf16; keys, values (pages, g, PAGE, E) bf16, or of paged_prefill_codes_E as kv_append_codes has them;
// sequences (s, 4), tiles (tiles, 2) i32: sequence, first row; blocks u32: pages of all sequences, one after the other
// grid (tiles, g), block 128: 128 rows (E = 256: 64), which share the copies from the cache. While scores are computed
// values are copied, and the other way round.
// before (t, h, E + 8) f32: columns, maximum, sum; unread if no row has keys of two runs
// needs sm_80, dynamic shared memory: the rows of q, a block of keys and one of values
// roofline 4 E flops for each pair of a row and a visible key
#include "paged.cuh"

// Rows of a warp in units of 16, and rows of a block. Two units share the warp's loads from shared memory. For E = 256
// the result of one fills the registers.
template <int E> struct Rows {
    static constexpr int M = E <= 128 ? 2 : 1;
    static constexpr int WARP_ROWS = 16 * M;
    static constexpr int BLOCK_ROWS = THREADS / WARP * WARP_ROWS;
};

// s (16 M, 8 N) = q k^T; q: the warp's rows in shared memory, keys: a tile (8 N, E).
template <int E, int M, int N> DEVICE void scores(float (&s)[M][N][4], const bf16* q, const bf16* keys) {
    int lane = lane_id();
    q += lane % 16 * Tile<E>::STRIDE + lane / 16 * 8;
    keys += (lane % 8 + lane / 16 * 8) * Tile<E>::STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < E; k += 16) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_matrices(a[m], q + m * 16 * Tile<E>::STRIDE + k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 b[4];
            load_matrices(b, keys + n * 8 * Tile<E>::STRIDE + k);
            u32 even[2] = {b[0], b[1]}, odd[2] = {b[2], b[3]};
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(s[m][n], a[m], even);
                mma(s[m][n + 1], a[m], odd);
            }
        }
    }
}

// Turns scores of a block into probabilities relative to the rows' maxima there, and computes the decay of earlier
// sums.
template <int N> DEVICE void take_block(Running& row, float (&decay)[2], float (&s)[N][4], float scale) {
    float max[2];
    maxima(max, s);
    for (int i = 0; i < 2; i++) {
        max[i] = fmaxf(row.max[i], max[i]);
        decay[i] = decay_of(row.max[i], max[i], scale);
        row.max[i] = max[i];
    }
    row.sum[0] = fmaf(row.sum[0], decay[0], probabilities<0>(s, max[0], scale));
    row.sum[1] = fmaf(row.sum[1], decay[1], probabilities<1>(s, max[1], scale));
}

// o (16 M, E) += p v; p: 16 M rows of 16 K probabilities, values: a tile (16 K, E).
template <int E, int M, int K>
DEVICE void add_block(float (&o)[M][E / 8][4], const u32 (&p)[M][K][4], const bf16* values) {
    values += lane_id() % 16 * Tile<E>::STRIDE + lane_id() / 16 * 8;
#pragma unroll
    for (int step = 0; step < K; step++) {
#pragma unroll
        for (int n = 0; n < E / 8; n += 2) {
            u32 b[4];
            load_matrices_transposed(b, values + step * 16 * Tile<E>::STRIDE + n * 8);
            u32 even[2] = {b[0], b[1]}, odd[2] = {b[2], b[3]};
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(o[m][n], p[m][step], even);
                mma(o[m][n + 1], p[m][step], odd);
            }
        }
    }
}

// The ends of the visible keys of the warp's first and last row. The keys begin a window earlier.
struct Reach {
    int top, bottom;
};

DEVICE Reach reach(const Work& work, int base, int rows) {
    // No block of keys begins before 0.
    if (base >= work.rows) return Reach{0, 0};
    return Reach{last_key(work, clamped_row(work, base)), last_key(work, clamped_row(work, base + rows - 1))};
}

// Combines the rows of a tile with the earlier runs. Returns whether they are finished; otherwise they are stored in
// `before`.
template <int E, int M>
DEVICE bool end_run(float (&o)[M][E / 8][4], Running (&row)[M], const Work& work, int r, i32 from, i32 to, float* before,
                    float scale) {
    const bool is_first = work.first >= from, is_last = work.end <= to;
    if (work.first >= to || work.end <= from) return false;
    if (is_first && is_last) return true;
#pragma unroll
    for (int m = 0; m < M; m++) {
        float* held[2];
        for (int i = 0; i < 2; i++) {
            int at = r + 16 * m + 8 * i;
            held[i] = at < work.rows ? before + place(work, work.row + at) * Held<E>::STRIDE : nullptr;
        }
        if (!is_first) join_held<E>(o[m], row[m].max, row[m].sum, held, scale);
        SYNC_WARP();  // no lane has yet to read what one writes
        if (!is_last) hold<E>(o[m], row[m].max, row[m].sum, held);
    }
    return is_last;
}

template <int E, class T> DEVICE void prefill(const Paged& paged, i32 from, i32 to, float* before) {
    DYNAMIC_SHARED(shared);
    constexpr int KEYS = Block<E>::KEYS, M = Rows<E>::M, N = KEYS / 8;
    bf16 *keys = (bf16*)shared, *values = keys + KEYS * Tile<E>::STRIDE;
    const int base = warp_id() * Rows<E>::WARP_ROWS, r = base + lane_id() / 4;
    bf16* q = values + (KEYS + base) * Tile<E>::STRIDE;
    Work work = work_of<E>(paged, blockIdx.x, Rows<E>::BLOCK_ROWS);
    if (work.first < from) work.first = from;
    if (work.end > to) work.end = to;
    const Head head = head_of<E, T>(paged, work);
    Reach seen = reach(work, base, Rows<E>::WARP_ROWS);
    for (int i = lane_id(); i < Rows<E>::WARP_ROWS * (E / 8); i += WARP) {
        int row = i / (E / 8), column = i % (E / 8) * 8;
        copy_async(q + row * Tile<E>::STRIDE + column, paged.q + place(work, clamped_row(work, base + row)) * E + column, true);
    }
    Running row[M];
    float o[M][E / 8][4] = {};
#pragma unroll
    for (int m = 0; m < M; m++) row[m] = running();
    u32 pages = pages_of(head, work.first, work.end);
    load_tile<E, KEYS, T>(keys, paged.keys, paged.kv_heads, head, pages, work.first, work.end);
    copy_commit();
    for (int first = work.first; first < work.end; first += KEYS) {
        bool any = first < seen.bottom && seen.top - paged.window < first + KEYS;
        copy_wait<0>();
        expand_tile<E, KEYS, T>(keys);
        SYNC_BLOCK();  // the keys are there, and nobody reads the values
        load_tile<E, KEYS, T>(values, paged.values, paged.kv_heads, head, pages, first, work.end);
        copy_commit();
        pages = pages_of(head, first + KEYS, work.end);
        float s[M][N][4];
        if (any) scores<E>(s, q, keys);
        copy_wait<0>();
        expand_tile<E, KEYS, T>(values);
        SYNC_BLOCK();  // the values are there, and nobody reads the keys
        load_tile<E, KEYS, T>(keys, paged.keys, paged.kv_heads, head, pages, first + KEYS, work.end);
        copy_commit();
        if (!any) continue;
        u32 p[M][N / 2][4];
        float decay[M][2];
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (paged.cap > 0.0f) cap_scores(s[m], paged.cap);
            if (first < seen.bottom - paged.window || first + KEYS > seen.top) {
                // Read again here and at the end, so that the loop need not keep it in registers.
                Work again = work_of<E>(paged, blockIdx.x, Rows<E>::BLOCK_ROWS);
                mask(s[m], first, key_range(again, r + 16 * m));
            }
            take_block(row[m], decay[m], s[m], paged.scale);
        }
        if (any_not_one(decay)) {
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int n = 0; n < E / 8; n++) rescale(o[m][n], decay[m][0], decay[m][1]);
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int step = 0; step < N / 2; step++) packed(p[m][step], s[m], step);
        }
        add_block<E>(o, p, values);
    }
    copy_wait<0>();
    SYNC_BLOCK();  // and the compiler moves no later code into the loop
    work = work_of<E>(paged, blockIdx.x, Rows<E>::BLOCK_ROWS);
    if (!end_run<E>(o, row, work, r, from, to, before, paged.scale)) return;
#pragma unroll
    for (int m = 0; m < M; m++) {
        float inverses[2] = {inverse(row[m].sum[0]), inverse(row[m].sum[1])};
#pragma unroll
        for (int n = 0; n < E / 8; n++) store_result<E>(paged, work, r + 16 * m, n * 8, o[m][n], inverses);
    }
}

#define PREFILL_PARAMETERS PAGED_PARAMETERS, i32 from, i32 to, float *before

KERNEL __launch_bounds__(128, 3) paged_prefill_32(PREFILL_PARAMETERS) { prefill<32, bf16>(PAGED, from, to, before); }
KERNEL __launch_bounds__(128, 2) paged_prefill_64(PREFILL_PARAMETERS) { prefill<64, bf16>(PAGED, from, to, before); }
KERNEL __launch_bounds__(128, 2) paged_prefill_80(PREFILL_PARAMETERS) { prefill<80, bf16>(PAGED, from, to, before); }
KERNEL __launch_bounds__(128, 2) paged_prefill_96(PREFILL_PARAMETERS) { prefill<96, bf16>(PAGED, from, to, before); }
KERNEL __launch_bounds__(128, 2) paged_prefill_128(PREFILL_PARAMETERS) { prefill<128, bf16>(PAGED, from, to, before); }
KERNEL __launch_bounds__(128, 2) paged_prefill_256(PREFILL_PARAMETERS) { prefill<256, bf16>(PAGED, from, to, before); }
KERNEL __launch_bounds__(128, 3) paged_prefill_codes_32(PREFILL_PARAMETERS) { prefill<32, u8>(PAGED, from, to, before); }
KERNEL __launch_bounds__(128, 2) paged_prefill_codes_64(PREFILL_PARAMETERS) { prefill<64, u8>(PAGED, from, to, before); }
KERNEL __launch_bounds__(128, 2) paged_prefill_codes_80(PREFILL_PARAMETERS) { prefill<80, u8>(PAGED, from, to, before); }
KERNEL __launch_bounds__(128, 2) paged_prefill_codes_96(PREFILL_PARAMETERS) { prefill<96, u8>(PAGED, from, to, before); }
KERNEL __launch_bounds__(128, 2) paged_prefill_codes_128(PREFILL_PARAMETERS) { prefill<128, u8>(PAGED, from, to, before); }
KERNEL __launch_bounds__(128, 2) paged_prefill_codes_256(PREFILL_PARAMETERS) { prefill<256, u8>(PAGED, from, to, before); }
