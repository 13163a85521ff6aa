// Gradients of causal grouped-query attention over packed rows. arXiv:2205.14135 algorithm 4, 2307.08691 section 3.1.
//
// p = exp(scale s - lse), s = q.k; ds = p (d_o.v - delta), delta = d_o.o; dq = scale ds k, dk = scale ds^T q, dv = p^T d_o.
// Two kernels walk the same pairs of tiles, one for dk and dv, one for dq, so that each sum is one chain in one block. Scores
// are computed twice; in return no sum waits for another block, and none depends on when a block runs.
#include "attention.cuh"

#define SIDE 64

// What becomes of a gradient: bf16, f32, or f32 that is added to what stands there.
#define ROUND 0
#define ADD 2

// delta of a row and head: the sum of d_o o, by a fixed half warp.
template <class T> DEVICE void delta_of(const T* o, const bf16* d_o, float* delta, i32 head_dim, u64 count) {
    const u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 16;
    const int lane = threadIdx.x % 16 * 8;
    float sum = 0.0f;
    if (at < count && lane < head_dim) {
        const T* left = o + at * head_dim + lane;
        const Eight right = *(const Eight*)(d_o + at * head_dim + lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum = fmaf(load(left + 2 * i), low_of(right.pair[i]), sum);
            sum = fmaf(load(left + 2 * i + 1), high_of(right.pair[i]), sum);
        }
    }
    for (int lanes = 8; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
    if (at < count && lane == 0) delta[at] = sum;
}

// lse as a power of 2; where a row saw nothing, or is not there: infinity, so that p is 0.
DEVICE float log2_of(float lse) { return lse > -infinity() ? lse * LOG2_E : infinity(); }

// dk and dv of 64 keys under one key head: warps hold 16 keys each, and walk the rows that see them, in blocks of 64 aligned
// to the first row of the span, ascending, for each block all heads of the group. While d_o.v is computed q comes, while
// dk is, the next d_o.
template <int E>
DEVICE void backward_keys(const bf16* q, const bf16* k, const bf16* v, const bf16* d_o, const float* lse, const float* delta,
                          const Tile* tiles, i32 first, i32 heads, i32 group, i32 window, float scale, void* dk, void* dv,
                          i32 form) {
    constexpr int STRIDE = Layout<E>::STRIDE, N = SIDE / 8;
    DYNAMIC_SHARED(shared);
    bf16* k_tile = (bf16*)shared;              // (64, E)
    bf16* v_tile = k_tile + SIDE * STRIDE;     // (64, E)
    bf16* q_tile = v_tile + SIDE * STRIDE;     // (64, E)
    bf16* d_tile = q_tile + SIDE * STRIDE;     // (64, E)
    float* statistics = (float*)(d_tile + SIDE * STRIDE);  // lse (64), delta (64)
    const i32 kv_heads = heads / group, kv_head = blockIdx.x % kv_heads, q_stride = heads * E, k_stride = kv_heads * E;
    tiles += first + blockIdx.x / kv_heads;
    Tile tile = *tiles;
    const i64 k_at = ((i64)tile.key_row * kv_heads + kv_head) * E;
    const i64 row = (i64)tile.row * heads + kv_head * group;
    q += row * E, d_o += row * E;
    // The thread's statistic: lse in the first two warps, delta in the others.
    const float* statistic = (threadIdx.x < SIDE ? lse : delta) + row;
    const i32 end = least(tile.rows, tile.keys - 1 + window - tile.past), base = warp_id() * 16;
    float dk_sum[1][E / 8][4], dv_sum[1][E / 8][4];
    clear(dk_sum), clear(dv_sum);

    auto read = [&](i32 r, i32 head) {
        r += threadIdx.x % SIDE;
        const float x = r < tile.rows ? statistic[(i64)r * heads + head] : -infinity();
        return threadIdx.x < SIDE ? log2_of(x) : r < tile.rows ? x : 0.0f;
    };
    auto copy = [&](bf16* to, const bf16* from, i32 r, i32 head) {
        if (r < end) copy_rows<E, SIDE>(to, from + ((i64)r * heads + head) * E, q_stride, tile.rows - r);
        copy_commit();
    };
    i32 r = most(0, -tile.past) / SIDE * SIDE, head = 0;
    copy_rows<E, SIDE>(k_tile, k + k_at, k_stride, tile.keys);
    copy_rows<E, SIDE>(v_tile, v + k_at, k_stride, tile.keys);
    copy(d_tile, d_o, r, head);
    float next = read(r, head);
    while (r < end) {
        // Whether any row sees any of the warp's keys.
        const bool sees = base < tile.keys && tile.past + least(tile.rows, r + SIDE) > base &&
                          tile.past + r - window < base + 15;
        float s[1][N][4], dp[1][N][4];
        copy_wait<0>();
        SYNC_BLOCK();  // d_o is there, and no warp needs q or the statistics before
        copy(q_tile, q, r, head);
        statistics[threadIdx.x] = next;
        const i32 at = r;
        head = head + 1 < group ? head + 1 : 0;
        if (head == 0) r += SIDE;
        next = read(r, head);
        if (sees) multiply<E, 1, N>(dp, v_tile + base * STRIDE, d_tile);
        copy_wait<0>();
        SYNC_BLOCK();  // q and the statistics are there
        u32 p[1][N / 2][4], ds[1][N / 2][4];
        if (sees) {
            multiply<E, 1, N>(s, k_tile + base * STRIDE, q_tile);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const i32 column = n * 8 + lane_id() % 4 * 2 + i % 2, key = base + i / 2 * 8 + lane_id() / 4;
                    const bool seen = (u32)(tile.past + at + column - key) < (u32)window;
                    const float x = seen ? exp2_fast(fmaf(s[0][n][i], scale * LOG2_E, -statistics[column])) : 0.0f;
                    s[0][n][i] = x;
                    dp[0][n][i] = x * (dp[0][n][i] - statistics[SIDE + column]);
                }
            pack_rows(p[0], s[0]);
            pack_rows(ds[0], dp[0]);
            accumulate<E, 1, N / 2>(dv_sum, p, d_tile);
        }
        SYNC_BLOCK();  // no warp needs d_o
        copy(d_tile, d_o, r, head);
        if (sees) accumulate<E, 1, N / 2>(dk_sum, ds, q_tile);
    }
    copy_wait<0>();
    SYNC_BLOCK();  // what was copied first is there, also where no row sees a key
    tile = *tiles;
    const i64 at = ((i64)(tile.key_row + base) * kv_heads + kv_head) * E;
    const float by[1][2] = {{scale, scale}}, old = form == ADD ? 1.0f : 0.0f, held[1][2] = {{old, old}};
    scale_rows(dk_sum, by);
    if (form == ROUND) {
        store_rows<E, 1>(dk_sum, k_tile + base * STRIDE, (bf16*)dk + at, k_stride, tile.keys - base);
        store_rows<E, 1>(dv_sum, v_tile + base * STRIDE, (bf16*)dv + at, k_stride, tile.keys - base);
    } else {
        add_rows<E, 1>(dk_sum, held, (float*)dk + at, k_stride, tile.keys - base);
        add_rows<E, 1>(dv_sum, held, (float*)dv + at, k_stride, tile.keys - base);
    }
}

// dq of 64 rows of one head: warps hold 16 rows each, and walk the keys in blocks of 64 aligned to the first key of the span,
// ascending. While d_o.v is computed the keys come, while dq is, the next values.
template <int E>
DEVICE void backward_queries(const bf16* q, const bf16* k, const bf16* v, const bf16* d_o, const float* lse,
                             const float* delta, const Tile* tiles, i32 first, i32 heads, i32 group, i32 window, float scale,
                             void* dq, i32 form) {
    constexpr int STRIDE = Layout<E>::STRIDE, N = SIDE / 8;
    DYNAMIC_SHARED(shared);
    bf16* q_tile = (bf16*)shared;              // (64, E)
    bf16* d_tile = q_tile + SIDE * STRIDE;     // (64, E)
    bf16* k_tile = d_tile + SIDE * STRIDE;     // (64, E)
    bf16* v_tile = k_tile + SIDE * STRIDE;     // (64, E)
    tiles += first + blockIdx.x / heads;
    Tile tile = *tiles;
    const i32 head = blockIdx.x % heads, q_stride = heads * E, k_stride = heads / group * E, base = warp_id() * 16;
    const i64 row = (i64)tile.row * heads + head, k_at = (i64)tile.key_row * k_stride + head / group * E;
    k += k_at, v += k_at;
    i32 key = first_key(tile, window, 0) / SIDE * SIDE;
    const i32 end = end_key(tile, tile.rows - 1);
    copy_rows<E, SIDE>(q_tile, q + row * E, q_stride, tile.rows);
    copy_rows<E, SIDE>(d_tile, d_o + row * E, q_stride, tile.rows);
    copy_rows<E, SIDE>(v_tile, v + (i64)key * k_stride, k_stride, tile.keys - key);
    copy_commit();

    // From here on the tile is that of the warp.
    tile = of_warp(tile, base, 16);
    q_tile += base * STRIDE, d_tile += base * STRIDE;
    float dq_sum[1][E / 8][4], lse_of[2], delta_of[2];
    clear(dq_sum);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const i32 r = lane_id() / 4 + h * 8;
        const i64 at = row + (i64)(base + r) * heads;
        lse_of[h] = log2_of(r < tile.rows ? lse[at] : -infinity());
        delta_of[h] = r < tile.rows ? delta[at] : 0.0f;
    }
    for (; key < end; key += SIDE) {
        const i32 last = tile.rows - 1;
        const bool sees = last >= 0 && key < end_key(tile, last) && key + SIDE > first_key(tile, window, 0);
        float s[1][N][4], dp[1][N][4];
        copy_wait<0>();
        SYNC_BLOCK();  // the values are there, and no warp needs the keys before
        copy_rows<E, SIDE>(k_tile, k + (i64)key * k_stride, k_stride, tile.keys - key);
        copy_commit();
        if (sees) multiply<E, 1, N>(dp, d_tile, v_tile);
        copy_wait<0>();
        SYNC_BLOCK();  // the keys are there, and no warp needs the values
        if (key + SIDE < end) {
            copy_rows<E, SIDE>(v_tile, v + (i64)(key + SIDE) * k_stride, k_stride, tile.keys - key - SIDE);
        }
        copy_commit();
        if (!sees) continue;
        multiply<E, 1, N>(s, q_tile, k_tile);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const i32 j = key + n * 8 + lane_id() % 4 * 2 + i % 2, position = tile.past + lane_id() / 4 + i / 2 * 8;
                const bool seen = (u32)(position - j) < (u32)window && j < tile.keys;
                const float p = seen ? exp2_fast(fmaf(s[0][n][i], scale * LOG2_E, -lse_of[i / 2])) : 0.0f;
                dp[0][n][i] = p * (dp[0][n][i] - delta_of[i / 2]);
            }
        u32 ds[1][N / 2][4];
        pack_rows(ds[0], dp[0]);
        accumulate<E, 1, N / 2>(dq_sum, ds, k_tile);
    }
    tile = of_warp(*tiles, base, 16);
    const i64 at = ((i64)tile.row * heads + head) * E;
    const float by[1][2] = {{scale, scale}}, old = form == ADD ? 1.0f : 0.0f, held[1][2] = {{old, old}};
    scale_rows(dq_sum, by);
    if (form == ROUND) store_rows<E, 1>(dq_sum, q_tile, (bf16*)dq + at, q_stride, tile.rows);
    else add_rows<E, 1>(dq_sum, held, (float*)dq + at, q_stride, tile.rows);
}

#define PARAMETERS                                                                                                       \
    const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *d_o, const float *lse, const float *delta,                  \
        const Tile *tiles, i32 first, i32 heads, i32 group, i32 window, float scale
#define ARGUMENTS q, k, v, d_o, lse, delta, tiles, first, heads, group, window, scale

// attention_delta  delta[t][h] = sum_e d_o[t][h][e] o[t][h][e]
// o (T, heads, E) bf16, or f32 (attention_delta_f32); d_o (T, heads, E) bf16; delta (count = T heads) f32
// grid ceil(count / 8), block 128, 16 threads a row and head; needs E % 8 == 0, E <= 128, 16-byte alignment
// roofline 4 E bytes a row and head, 6 E where o is f32
KERNEL attention_delta(const bf16* o, const bf16* d_o, float* delta, i32 head_dim, u64 count) {
    delta_of(o, d_o, delta, head_dim, count);
}
KERNEL attention_delta_f32(const float* o, const bf16* d_o, float* delta, i32 head_dim, u64 count) {
    delta_of(o, d_o, delta, head_dim, count);
}

// attention_backward_keys_E  dk[j] = scale sum_t ds[t][j] q[t], dv[j] = sum_t p[t][j] d_o[t] over all heads of the group
// q, d_o (T, heads E), k, v (T', heads / group E) bf16; lse, delta (T, heads) f32; dk, dv as k and v: bf16 (form 0),
// f32 (1), or f32 that is added to (2); tiles from `first` on: up to 64 keys and all rows of their span, heaviest first; keys
// without rows get 0
// grid tiles x heads / group, block 128; shared memory 256 (E + 8) bf16 and 128 f32; needs 16-byte alignment
// roofline 8 E flops for each pair of a row and a key that it sees
KERNEL __launch_bounds__(128, 2) attention_backward_keys_64(PARAMETERS, void* dk, void* dv, i32 form) {
    backward_keys<64>(ARGUMENTS, dk, dv, form);
}
KERNEL __launch_bounds__(128, 2) attention_backward_keys_80(PARAMETERS, void* dk, void* dv, i32 form) {
    backward_keys<80>(ARGUMENTS, dk, dv, form);
}
KERNEL __launch_bounds__(128, 2) attention_backward_keys_96(PARAMETERS, void* dk, void* dv, i32 form) {
    backward_keys<96>(ARGUMENTS, dk, dv, form);
}
KERNEL __launch_bounds__(128, 2) attention_backward_keys_128(PARAMETERS, void* dk, void* dv, i32 form) {
    backward_keys<128>(ARGUMENTS, dk, dv, form);
}

// attention_backward_queries_E  dq[t] = scale sum_j ds[t][j] k[j]
// as above; dq as q, its form as those; tiles: up to 64 rows and their keys, heaviest first
// grid tiles x heads, block 128; shared memory 256 (E + 8) bf16; needs 16-byte alignment
// roofline 6 E flops for each pair of a row and a key that it sees
KERNEL __launch_bounds__(128, 2) attention_backward_queries_64(PARAMETERS, void* dq, i32 form) {
    backward_queries<64>(ARGUMENTS, dq, form);
}
KERNEL __launch_bounds__(128, 2) attention_backward_queries_80(PARAMETERS, void* dq, i32 form) {
    backward_queries<80>(ARGUMENTS, dq, form);
}
KERNEL __launch_bounds__(128, 2) attention_backward_queries_96(PARAMETERS, void* dq, i32 form) {
    backward_queries<96>(ARGUMENTS, dq, form);
}
KERNEL __launch_bounds__(128, 2) attention_backward_queries_128(PARAMETERS, void* dq, i32 form) {
    backward_queries<128>(ARGUMENTS, dq, form);
}
