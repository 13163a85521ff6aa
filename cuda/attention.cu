// Causal grouped-query attention over packed rows, with optional sliding window. arXiv:2205.14135, 2307.08691.
#include "attention.cuh"
#include "key_segments.cuh"
#include "softcap.cuh"

// The form of o: bf16, f32, or f32 merged with the result over other keys that is in (o, lse).
#define ROUND 0
#define MERGE 2

// Sets masked scores of row r of the warp's tile to -inf; s has the scores of keys from `key` on, `half` the row's
// part.
template <int N> DEVICE void hide(float (&s)[N][4], int half, i32 r, const Tile& tile, i32 window, i32 key) {
    const i32 first = tile.past + r + 1 - window, at = key + lane_id() % 4 * 2 - first;
    // One comparison for both ends.
    const u32 seen = (u32)most(0, end_key(tile, r) - first);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if ((u32)(at + n * 8 + i) >= seen) s[n][2 * half + i] = -infinity();
        }
}

// Turns scores of keys from `key` on into probabilities, relative to each row's largest score so far; with `hides`,
// some scores are masked. `sums` covers the lane's own columns. `decay` rescales the earlier sums: it is exactly 1 if
// no score of this block is larger, so that fully masked blocks may be skipped.
template <int M, int N>
DEVICE void softmax(float (&s)[M][N][4], float (&largest)[M][2], float (&sums)[M][2], float (&decay)[M][2], float to_log2,
                    bool hides, const Tile& tile, i32 window, i32 key) {
    float top[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (hides) hide(s[m], h, m * 16 + h * 8 + lane_id() / 4, tile, window, key);
            top[m][h] = largest[m][h];
#pragma unroll
            for (int n = 0; n < N; n++) top[m][h] = fmaxf(top[m][h], fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        }
    // Separate loops, so that the rows' shuffles and powers do not wait for each other.
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            top[m][h] = fmaxf(top[m][h], shuffle_xor(top[m][h], 1));
            top[m][h] = fmaxf(top[m][h], shuffle_xor(top[m][h], 2));
            decay[m][h] = exp2_fast((largest[m][h] - top[m][h]) * to_log2);
            largest[m][h] = top[m][h];
            float base = top[m][h] * to_log2, sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; i++) {
                    s[m][n][i] = exp2_fast(fmaf(s[m][n][i], to_log2, -base));
                    sum[i % 2] += s[m][n][i];
                }
            sums[m][h] = fmaf(sums[m][h], decay[m][h], sum[0] + sum[1]);
        }
}

// o = o / sum and lse; if merged, l = ln(exp l0 + exp l1), o = exp(l0 - l) o0 + exp(l1 - l) o1. Sets `by` to the factor
// of the warp's rows, and `held` to the factor of the values in o.
template <int M>
DEVICE void finish(const float (&largest)[M][2], const float (&sums)[M][2], float (&by)[M][2], float (&held)[M][2],
                   float scale, float* lse, i32 heads, i32 rows, bool merge) {
    int lane = lane_id();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            i32 r = m * 16 + h * 8 + lane / 4;
            float sum = sums[m][h];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            float all = sum > 0.0f ? fmaf(largest[m][h], scale, logf(sum)) : -infinity();
            by[m][h] = sum > 0.0f ? 1.0f / sum : 0.0f;
            held[m][h] = 0.0f;
            if (merge) {
                // Read by the lane that will write, so that no lane reads a new value.
                float old = shuffle(lane % 4 == 0 && r < rows ? lse[(i64)r * heads] : -infinity(), lane / 4 * 4);
                if (old > -infinity()) {
                    float top = fmaxf(old, all), both = top + logf(expf(old - top) + expf(all - top));
                    held[m][h] = expf(old - both);
                    by[m][h] *= expf(all - both);
                    all = both;
                }
            }
            if (lane % 4 == 0 && r < rows) lse[(i64)r * heads] = all;
        }
}

// Combines the warp's rows with the earlier key segments at `held`. Returns whether they are finished; otherwise they
// are stored there.
template <int E, int M>
DEVICE bool end_run(float (&out)[M][E / 8][4], float (&largest)[M][2], float (&sums)[M][2], const Tile& tile, i32 window,
                    i32 from, i32 to, float* held, i32 heads, float to_log2) {
    const i32 first = first_key(tile, window, 0), end = end_key(tile, tile.rows - 1);
    const bool is_first = first >= from, is_last = end <= to;
    const i32 base = warp_id() * 16 * M + lane_id() / 4;
    if (first >= to || end <= from) return false;
    if (is_first && is_last) return true;
#pragma unroll
    for (int m = 0; m < M; m++) {
        float* rows[2];
        for (int h = 0; h < 2; h++) {
            const i32 r = base + m * 16 + h * 8;
            const i64 at = (i64)(tile.row + r) * heads + blockIdx.x % heads;
            rows[h] = r < tile.rows ? held + at * Held<E>::STRIDE : nullptr;
        }
        if (!is_first) join_held<E>(out[m], largest[m], sums[m], rows, to_log2);
        SYNC_WARP();  // no lane has yet to read what one writes
        if (!is_last) hold<E>(out[m], largest[m], sums[m], rows);
    }
    return is_last;
}

// Each warp has 16 M rows of the tile. All warps process the keys in ascending blocks of 8 N, aligned to the first key
// of the span. Values are copied while scores are computed, then the next keys. Only keys of the segment `from` .. `to`
// are used.
template <int E, int M, int N>
DEVICE void forward(const bf16* q, const bf16* k, const bf16* v, const Tile* tiles, i32 first, i32 heads, i32 group,
                    i32 window, float scale, float cap, void* o, float* lse, i32 form, i32 from, i32 to, float* before) {
    constexpr int STRIDE = Layout<E>::STRIDE, KEYS = 8 * N;
    DYNAMIC_SHARED(shared);
    bf16* q_tile = (bf16*)shared;                // (64 M, E)
    bf16* k_tile = q_tile + 64 * M * STRIDE;     // (KEYS, E)
    bf16* v_tile = k_tile + KEYS * STRIDE;       // (KEYS, E)
    tiles += first + blockIdx.x / heads;
    Tile tile = *tiles;
    const i32 q_stride = heads * E, k_stride = heads / group * E, base = warp_id() * 16 * M;
    const i64 k_at = (i64)tile.key_row * k_stride + blockIdx.x % heads / group * E;
    k += k_at, v += k_at;
    i32 key = most(first_key(tile, window, 0) / KEYS * KEYS, from);
    const i32 end = least(end_key(tile, tile.rows - 1), to);
    copy_rows<E, 64 * M>(q_tile, q + (i64)tile.row * q_stride + blockIdx.x % heads * E, q_stride, tile.rows);
    copy_rows<E, KEYS>(k_tile, k + (i64)key * k_stride, k_stride, tile.keys - key);
    copy_commit();

    // From here on, `tile` describes the warp's own rows.
    tile = of_warp(tile, base, 16 * M);
    q_tile += base * STRIDE;
    float out[M][E / 8][4], largest[M][2], sums[M][2], by[M][2], held[M][2];
    clear(out);
#pragma unroll
    for (int i = 0; i < 2 * M; i++) largest[i / 2][i % 2] = LOWEST, sums[i / 2][i % 2] = 0.0f;

    for (; key < end; key += KEYS) {
        const i32 last = tile.rows - 1;
        const bool sees = last >= 0 && key < end_key(tile, last) && key + KEYS > first_key(tile, window, 0);
        float s[M][N][4];
        copy_wait<0>();
        SYNC_BLOCK();  // the keys are there, and no warp needs the values before
        copy_rows<E, KEYS>(v_tile, v + (i64)key * k_stride, k_stride, tile.keys - key);
        copy_commit();
        if (sees) multiply<E, M, N>(s, q_tile, k_tile);
        copy_wait<0>();
        SYNC_BLOCK();  // the values are there, and no warp needs the keys
        if (key + KEYS < end) {
            copy_rows<E, KEYS>(k_tile, k + (i64)(key + KEYS) * k_stride, k_stride, tile.keys - key - KEYS);
        }
        copy_commit();
        if (!sees) continue;
        if (cap > 0.0f) {
#pragma unroll
            for (int m = 0; m < M; m++) cap_scores(s[m], cap);
        }
        const bool hides = key + KEYS > end_key(tile, 0) || key < first_key(tile, window, last);
        softmax(s, largest, sums, by, scale * LOG2_E, hides, tile, window, key);
        if (any_not_one(by)) scale_rows(out, by);
        u32 p[M][N / 2][4];
#pragma unroll
        for (int m = 0; m < M; m++) pack_rows(p[m], s[m]);
        accumulate<E, M, N / 2>(out, p, v_tile);
    }
    // Read again, so that the loop need not keep it in registers. The barrier before it keeps the compiler from moving
    // later code into the loop.
    copy_wait<0>();
    SYNC_BLOCK();
    tile = *tiles;
    if (!end_run<E>(out, largest, sums, tile, window, from, to, before, heads, scale * LOG2_E)) return;
    tile = of_warp(tile, base, 16 * M);
    const i64 row = (i64)tile.row * heads + blockIdx.x % heads;
    finish(largest, sums, by, held, scale, lse + row, heads, tile.rows, form == MERGE);
    scale_rows(out, by);
    if (form == ROUND) store_rows<E, M>(out, q_tile, (bf16*)o + row * E, q_stride, tile.rows);
    else add_rows<E, M>(out, held, (float*)o + row * E, q_stride, tile.rows);
}

#define PARAMETERS                                                                                                      \
    const bf16 *q, const bf16 *k, const bf16 *v, const Tile *tiles, i32 first, i32 heads, i32 group, i32 window,        \
        float scale, float cap, void *o, float *lse, i32 form, i32 from, i32 to, float *before
#define ARGUMENTS q, k, v, tiles, first, heads, group, window, scale, cap, o, lse, form, from, to, before

// attention_forward_E  o[t] = sum_j softmax_j(scale q[t].k[j]) v[j] over the visible keys j of t; lse = ln sum_j exp(scale q.k)
// with a cap c > 0 of scaled scores, q.k becomes cap tanh(q.k / cap), cap = c / scale
// q (T, heads E), k, v (T', heads / group E) bf16; o (T, heads E) bf16 (form 0) or f32 (1; 2: merged); lse (T, heads) f32;
// tiles from `first` on: rows of q (128, of head dim 256: 64) and their keys, heaviest first
// of the key segment from .. to (key_segments.cuh): if tiles have several segments, there is one launch for each,
// ascending. Between launches, rows are in `before` (T, heads, E + 8) f32: columns, maximum, sum; unread if no tile has
// two segments
// grid tiles x heads (heads of a tile side by side: those of a group share keys in the cache), block 128; shared memory
// (rows + 2 keys of a block) (E + 8) bf16, two blocks of threads a multiprocessor; needs 16-byte alignment
// roofline 4 E flops for each pair of a row and a visible key
KERNEL __launch_bounds__(128, 3) attention_forward_32(PARAMETERS) { forward<32, 2, 8>(ARGUMENTS); }
KERNEL __launch_bounds__(128, 2) attention_forward_64(PARAMETERS) { forward<64, 2, 8>(ARGUMENTS); }
KERNEL __launch_bounds__(128, 2) attention_forward_80(PARAMETERS) { forward<80, 2, 8>(ARGUMENTS); }
KERNEL __launch_bounds__(128, 2) attention_forward_96(PARAMETERS) { forward<96, 2, 8>(ARGUMENTS); }
KERNEL __launch_bounds__(128, 2) attention_forward_128(PARAMETERS) { forward<128, 2, 8>(ARGUMENTS); }
KERNEL __launch_bounds__(128, 2) attention_forward_256(PARAMETERS) { forward<256, 1, 4>(ARGUMENTS); }
