// The backward of attention: the work of a block on its keys.
#pragma once
#include "attention.cuh"
#include "softcap.cuh"

#define BACKWARD_THREADS 256
// The thread that signals other blocks. Its warp waits for no other block.
#define TELLER 224
// Rows of a step, and rows of a step for which one warp computes scores.
#define ROWS 64
#define HALF 32

// The form of a gradient: bf16, f32, or f32 that is added to the old value.
#define ROUND 0
#define ADD 2

// Keys of a span from its key `at` on, `left` of them to the span's end, and all of its rows. Positions count from the
// first key here, that of the first row is `past`. For the span's rows: the first block of counters, and the first
// eight in `sums`.
struct KeyTile {
    i32 row, rows, past, key_row, left, at, block, eight;
};

template <int E> struct Shape {
    // Keys of two warps in units of 16, and keys of the block.
    static constexpr int M = E <= 128 ? 2 : 1, KEYS = 64 * M;
    // Tiles of rows of q and of d_o in shared memory: with two, the next ones are copied during the work on these.
    static constexpr int SLOTS = E <= 128 ? 2 : 1;
    // A warp has 16 DM rows of dq, and 16 DN columns at a time, one of PARTS.
    static constexpr int DM = E % 64 == 0 ? 2 : 1, TIMES = E <= 128 ? 1 : 2, PARTS = 2 * DM * TIMES;
    static constexpr int DN = (E / 16 + PARTS - 1) / PARTS;
};

// Where (key, row) lies in a tile of WIDTH bf16 a key; keys are turned against each other by eights of rows, so that neither
// the rows of eight keys nor the pairs of rows that a warp writes meet in a bank.
DEVICE int swizzle(int width, int key) { return width == ROWS ? key % 8 : key / 2 % 4; }

// lse in base 2; infinity for a row without visible keys or beyond the end, so that p is 0.
DEVICE float log2_of(float lse) { return lse > -infinity() ? lse * LOG2_E : infinity(); }

// Whether any of 32 rows from `row` on attends to any of `width` keys from `key` on.
DEVICE bool meets(const KeyTile& tile, i32 keys, i32 window, i32 key, i32 width, i32 row) {
    return key < keys && row < tile.rows && tile.past + least(tile.rows, row + HALF) > key &&
           tile.past + row - window < key + width - 1;
}

// Sets masked scores to -inf; `ahead`: the position of the first row minus that of the first key.
template <int M> DEVICE void hide(float (&s)[M][4][4], i32 ahead, i32 keys, i32 window) {
    if (ahead >= 16 * M - 1 && ahead + HALF - 1 < window && keys >= 16 * M) return;
    const i32 key = lane_id() / 4;
    ahead += lane_id() % 4 * 2 - key;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const i32 later = m * 16 + h * 8, seen = key + later < keys ? window : 0;
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if ((u32)(ahead - later + n * 8 + i) >= (u32)seen) s[m][n][2 * h + i] = -infinity();
                }
        }
}

// Factors of a product to a tile of `width`, from the eight of rows `eight` on.
template <int M> DEVICE void put(const u32 (&x)[M][2][4], bf16* to, int width, int eight) {
    const int key = lane_id() / 4, turned = swizzle(width, key);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bf16* at = to + (m * 16 + i % 2 * 8 + key) * width + ((eight + 2 * k + i / 2) ^ turned) * 8;
                *(u32*)(at + lane_id() % 4 * 2) = x[m][k][i];
            }
}

// And back, of the first 32 rows.
template <int M> DEVICE void get(u32 (&x)[M][2][4], const bf16* from, int width) {
    const int key = lane_id() % 16, turned = swizzle(width, key);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            load_matrices(x[m][k], from + (m * 16 + key) * width + ((2 * k + lane_id() / 16) ^ turned) * 8);
        }
}

// The index of a tile among the tiles that add to the dq of a block of rows, in the order of their keys.
struct Order {
    u32 before;
    bool last;
};

template <int E> DEVICE Order order_of(const KeyTile& tile, i32 window, i32 r) {
    constexpr int KEYS = Shape<E>::KEYS;
    const i32 past = tile.past + tile.at, end = tile.past + least(tile.rows, r + ROWS);
    return Order{(u32)(tile.at / KEYS - most(0, past + r + 1 - window) / KEYS), least(tile.left, end) <= KEYS};
}

// Scores to probabilities; lse: that of the first row, as a power of 2.
template <int M> DEVICE void to_probabilities(float (&s)[M][4][4], const float* lse, float to_log2) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const Two base = *(const Two*)(lse + n * 8 + lane_id() % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4 * M; i++) {
            float& x = s[i / 4][n][i % 4];
            x = exp2_fast(fmaf(x, to_log2, -base.at[i % 2]));
        }
    }
}

// d_o.v to ds.
template <int M> DEVICE void to_slopes(float (&ds)[M][4][4], const float (&p)[M][4][4], const float* delta) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const Two less = *(const Two*)(delta + n * 8 + lane_id() % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4 * M; i++) {
            float& x = ds[i / 4][n][i % 4];
            x = p[i / 4][n][i % 4] * (x - less.at[i % 2]);
        }
    }
}

// ds of scores before their cap, from ds of capped ones. A capped score in base 2 is log2 p + lse, so it need not stay in
// registers; lse: as above, inverse: 1 / cap in the same unit.
template <int M> DEVICE void uncap(float (&ds)[M][4][4], const float (&p)[M][4][4], const float* lse, float inverse) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const Two base = *(const Two*)(lse + n * 8 + lane_id() % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4 * M; i++) {
            ds[i / 4][n][i % 4] *= cap_slope((log2_fast(p[i / 4][n][i % 4]) + base.at[i % 2]) * inverse);
            // Otherwise the compiler would compute all at once and spill registers.
            if (i % 4 == 3) SYNC_WARP();
        }
    }
}

// dq (16 DM, 16 DN) += ds^T k over 64 keys; ds: the first of them and the first row, k: the first and the first column.
template <int E>
DEVICE void add_product(float (&dq)[Shape<E>::DM][2 * Shape<E>::DN][4], const bf16* ds, int eight, const bf16* k, int pairs) {
    constexpr int STRIDE = Layout<E>::STRIDE, DM = Shape<E>::DM, DN = Shape<E>::DN;
    const int lane = lane_id();
    ds += (lane / 16 * 8 + lane % 8) * ROWS;
    k += lane % 16 * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 rows[DM][4];
#pragma unroll
        for (int m = 0; m < DM; m++) {
            load_matrices_transposed(rows[m], ds + j * 16 * ROWS + ((eight + 2 * m + lane / 8 % 2) ^ lane % 8) * 8);
        }
#pragma unroll
        for (int n = 0; n < DN; n++) {
            if (n >= pairs) continue;
            u32 both[4];
            load_matrices_transposed(both, k + j * 16 * STRIDE + n * 16);
            u32 left[2] = {both[0], both[1]}, right[2] = {both[2], both[3]};
#pragma unroll
            for (int m = 0; m < DM; m++) {
                mma(dq[m][2 * n], rows[m], left);
                mma(dq[m][2 * n + 1], rows[m], right);
            }
        }
    }
}

// Calls body(eight, n, x, y) for the eights of a warp's part of dq of which rows are there, and for its columns, in eights.
template <int E, class T>
DEVICE void each_pair(const float (&dq)[Shape<E>::DM][2 * Shape<E>::DN][4], i32 rows, int pairs, const T& body) {
#pragma unroll
    for (int i = 0; i < 2 * Shape<E>::DM; i++) {
        if (i * 8 >= rows) continue;
#pragma unroll
        for (int n = 0; n < 2 * Shape<E>::DN; n++) {
            if (n < 2 * pairs) body(i, n, dq[i / 2][n][i % 2 * 2], dq[i / 2][n][i % 2 * 2 + 1]);
        }
    }
}

// Adds a warp's part of dq to `sums`, in which eight rows and eight columns have the order of a warp: even columns,
// then odd ones. Stores and additions have 128 bytes.
template <int E>
DEVICE void give_part(const float (&dq)[Shape<E>::DM][2 * Shape<E>::DN][4], float* sums, i32 heads, i32 rows, int pairs,
                      bool is_first) {
    const i32 eight = heads * 8 * E;
    sums += lane_id();
    if (is_first) {
        each_pair<E>(dq, rows, pairs, [=](int i, int n, float x, float y) {
            float* at = sums + i * (i64)eight + n * 64;
            at[0] = x, at[WARP] = y;
        });
    } else {
        each_pair<E>(dq, rows, pairs, [=](int i, int n, float x, float y) {
            float* at = sums + i * (i64)eight + n * 64;
            add_in_memory(at, x), add_in_memory(at + WARP, y);
        });
    }
}

// Adds the last part of dq and writes the result.
template <int E>
DEVICE void give_whole(const float (&dq)[Shape<E>::DM][2 * Shape<E>::DN][4], const float* sums, void* to, i32 heads, i32 rows,
                       int pairs, bool is_first, float scale, i32 form) {
    const int lane = lane_id();
    each_pair<E>(dq, rows, pairs, [=](int i, int n, float x, float y) {
        const i32 r = i * 8 + lane / 4;
        const float* at = sums + i * (i64)(heads * 8 * E) + n * 64 + lane;
        if (!is_first) x += at[0], y += at[WARP];
        if (r >= rows) return;
        x *= scale, y *= scale;
        const i64 place = (i64)r * heads * E + n * 8 + lane % 4 * 2;
        if (form == ROUND) {
            *(u32*)((bf16*)to + place) = pack(x, y);
            return;
        }
        Two* sum = (Two*)((float*)to + place);
        *sum = form == ADD ? Two{{sum->at[0] + x, sum->at[1] + y}} : Two{{x, y}};
    });
}

// The part that a tile has in the dq of the rows from `r` on; each warp adds its own when `wait` returns.
template <int E, class T>
DEVICE void add_queries(const bf16* ds_tile, const bf16* k_tile, const KeyTile& tile, i32 window, Order order, const T& wait,
                        float* sums, i32 heads, i32 head, i32 r, float scale, void* dq, i32 form) {
    using S = Shape<E>;
    constexpr int DM = S::DM, DN = S::DN, STRIDE = Layout<E>::STRIDE;
    const int own = warp_id() % (4 / DM) * 16 * DM;
    const i64 eight = (i64)(tile.eight + (r + own) / 8) * heads + head, row = (i64)(tile.row + r + own) * heads + head;
#pragma unroll 1
    for (int i = 0; i < S::TIMES; i++) {
        // The first column and how many there are, in sixteens.
        const int column = (warp_id() / (4 / DM) + i * 2 * DM) * DN;
        const int pairs = E / 16 % S::PARTS == 0 ? DN : least(DN, E / 16 - column);
        float part[DM][2 * DN][4];
        clear(part);
#pragma unroll
        for (int key = 0; key < S::KEYS; key += 64) {
            // The others have ds = 0.
            if (tile.past + r + ROWS <= key || tile.past + r - window >= key + 63) continue;
            add_product<E>(part, ds_tile + key * ROWS, own / 8, k_tile + key * STRIDE + column * 16, pairs);
        }
        if (i == 0) wait();
        float* held = sums + eight * (8 * E) + column * 128;
        const i32 rows = tile.rows - r - own;
        if (!order.last) {
            give_part<E>(part, held, heads, rows, pairs, order.before == 0);
            continue;
        }
        const i64 place = row * E + column * 16;
        void* to = form == ROUND ? (void*)((bf16*)dq + place) : (void*)((float*)dq + place);
        give_whole<E>(part, held, to, heads, rows, pairs, order.before == 0, scale, form);
    }
}

// A warp's keys from `base` on, `keys` of the tile's: dk or dv. `tile` may be overwritten.
template <int E>
DEVICE void give_keys(float (&sum)[Shape<E>::M][E / 8][4], bf16* tile, i32 base, float scale, void* to, i64 at, i32 stride,
                      i32 keys, i32 form) {
    constexpr int M = Shape<E>::M;
    float by[M][2], held[M][2];
#pragma unroll
    for (int i = 0; i < 2 * M; i++) by[i / 2][i % 2] = scale, held[i / 2][i % 2] = form == ADD ? 1.0f : 0.0f;
    scale_rows(sum, by);
    at += (i64)base * stride;
    if (form == ROUND) store_rows<E, M>(sum, tile + base * Layout<E>::STRIDE, (bf16*)to + at, stride, keys - base);
    else add_rows<E, M>(sum, held, (float*)to + at, stride, keys - base);
}

// The work of a block, chosen by the order in which blocks start, so that it only waits for blocks that have started.
struct Work {
    KeyTile tile;
    i32 kv_head;
    // Whether the earlier tiles had added when p and ds were ready.
    bool ready;
    // The counter to set once dq is written, and its value, for the thread TELLER. In shared memory to save registers.
    i32 told;
    u32 tells;
};

// Lets the next tile add. Needs a barrier before.
DEVICE void tell(Work& work, u32* counters) {
    if (threadIdx.x == TELLER && work.told >= 0) store_release(counters + work.told, work.tells);
}

DEVICE void take_work(Work& work, const KeyTile* tiles, u32* counters, i32 kv_heads) {
    const u32 number = take_number(counters);
    work.tile = tiles[number / (u32)kv_heads];
    work.kv_head = (i32)(number % (u32)kv_heads);
    // All tiles have added, and the next launch starts at 0 again.
    if (number + 1 == gridDim.x) store_release(counters, 0);
}

template <int E>
DEVICE void backward(const bf16* q, const bf16* k, const bf16* v, const bf16* d_o, const float* lse, const float* delta,
                     const KeyTile* tiles, u32* counters, float* sums, i32 heads, i32 group, i32 window, float scale,
                     float cap, void* dq, i32 dq_form, void* dk, void* dv, i32 dk_form) {
    using S = Shape<E>;
    constexpr int STRIDE = Layout<E>::STRIDE, M = S::M, KEYS = S::KEYS, SLOTS = S::SLOTS, TILE = ROWS * STRIDE;
    DYNAMIC_SHARED(shared);
    bf16* k_tile = (bf16*)shared;               // (KEYS, E)
    bf16* v_tile = k_tile + KEYS * STRIDE;      // (KEYS, E)
    bf16* q_tile = v_tile + KEYS * STRIDE;      // SLOTS x (64, E)
    bf16* d_tile = q_tile + SLOTS * TILE;       // SLOTS x (64, E)
    bf16* ds_tile = d_tile + SLOTS * TILE;      // (KEYS, 64)
    bf16* p_tile = ds_tile + KEYS * ROWS;       // (KEYS, 32): the later rows
    float* statistics = (float*)(p_tile + KEYS * HALF);  // 2 x (lse (64), delta (64))
    Work& work = *(Work*)(statistics + 4 * ROWS);
    if (threadIdx.x == 0) take_work(work, tiles, counters, heads / group);
    SYNC_BLOCK();
    const KeyTile& tile = work.tile;
    const i32 kv_heads = heads / group, kv_head = work.kv_head;
    const i32 keys = least(tile.left, KEYS), q_stride = heads * E, k_stride = kv_heads * E;
    const i64 k_at = ((i64)tile.key_row * kv_heads + kv_head) * E, row = (i64)tile.row * heads + kv_head * group;
    // Rows begin .. end attend to some of the keys.
    const i32 begin = most(0, -tile.past), end = least(tile.rows, keys - 1 + window - tile.past);
    const i32 first = begin / ROWS * ROWS;
    i32 r = begin < end ? (end - 1) / ROWS * ROWS : first - ROWS, head = 0, slot = 0;
    // Of scores, a warp has the keys from `base` on and the rows from `late` on; of gradients all of its pair's keys: dv, or dk.
    const int pair = warp_id() % 4, of_k = warp_id() / 4, base = pair * 16 * M, late = of_k * HALF;
    float sum[M][E / 8][4];
    clear(sum);

    auto read = [&](i32 r, i32 head) {
        const i32 at = r + (i32)threadIdx.x % ROWS;
        const bool is_there = r >= first && at < tile.rows && threadIdx.x < 2 * ROWS;
        const float x = is_there ? (threadIdx.x < ROWS ? lse : delta)[row + (i64)at * heads + head] : -infinity();
        return threadIdx.x < ROWS ? log2_of(x) : is_there ? x : 0.0f;
    };
    auto copy = [&](i32 r, i32 head, i32 slot) {
        const i64 at = row * E + ((i64)r * heads + head) * E;
        if (r >= first) {
            copy_rows<E, ROWS, BACKWARD_THREADS>(q_tile + slot * TILE, q + at, q_stride, tile.rows - r);
            copy_rows<E, ROWS, BACKWARD_THREADS>(d_tile + slot * TILE, d_o + at, q_stride, tile.rows - r);
        }
        copy_commit();
    };
    copy_rows<E, KEYS, BACKWARD_THREADS>(k_tile, k + k_at, k_stride, keys);
    copy_rows<E, KEYS, BACKWARD_THREADS>(v_tile, v + k_at, k_stride, keys);
    copy(r, head, 0);
    if (threadIdx.x < 2 * ROWS) statistics[threadIdx.x] = read(r, head);
    if (threadIdx.x == TELLER) work.told = -1;
    // The next step: the next head of the group, or the previous rows.
    auto following = [&]() { return head + 1 < group ? head + 1 : 0; };
    auto after = [&]() { return head + 1 < group ? r : r - ROWS; };
    while (r >= first) {
        copy_wait<0>();
        SYNC_BLOCK();  // the rows are there; no warp needs those before, their p or their ds; their dq is given
        auto counter = [&]() { return 1 + (tile.block + r / ROWS) * heads + kv_head * group + head; };
        auto may_add = [&]() {
            const u32 before = order_of<E>(tile, window, r).before;
            return before == 0 || load_acquire(counters + counter()) == before;
        };
        tell(work, counters);
        if (threadIdx.x == 0) work.ready = may_add();
        const float* of_rows = statistics + slot * 2 * ROWS + late;
        const bf16 *q_rows = q_tile + (SLOTS == 2 ? slot : 0) * TILE, *d_rows = d_tile + (SLOTS == 2 ? slot : 0) * TILE;
        if (SLOTS == 2) copy(after(), following(), slot ^ 1);
        u32 own[M][2][4];
        if (meets(tile, keys, window, base, 16 * M, r + late)) {
            float p[M][4][4], ds[M][4][4];
            u32 factors[M][2][4];
            multiply<E, M, 4>(p, k_tile + base * STRIDE, q_rows + late * STRIDE);
            if (cap > 0.0f) {
#pragma unroll
                for (int m = 0; m < M; m++) cap_scores(p[m], cap);
            }
            hide<M>(p, tile.past + r + late - base, keys - base, window);
            to_probabilities(p, of_rows, scale * LOG2_E);
            multiply<E, M, 4>(ds, v_tile + base * STRIDE, d_rows + late * STRIDE);
            to_slopes(ds, p, of_rows + ROWS);
            if (cap > 0.0f) uncap(ds, p, of_rows, reciprocal_fast(cap * scale * LOG2_E));
#pragma unroll
            for (int m = 0; m < M; m++) pack_rows(own[m], p[m]), pack_rows(factors[m], ds[m]);
            put<M>(factors, ds_tile + base * ROWS, ROWS, late / 8);
            if (of_k) {
                put<M>(own, p_tile + base * HALF, HALF, 0);
#pragma unroll
                for (int i = 0; i < 8 * M; i++) own[i / 8][i / 4 % 2][i % 4] = factors[i / 8][i / 4 % 2][i % 4];
            }
            accumulate<E, M, 2>(sum, own, (of_k ? q_rows : d_rows) + late * STRIDE);
        } else {
#pragma unroll
            for (int i = 0; i < 8 * M; i++) own[i / 8][i / 4 % 2][i % 4] = 0;
            put<M>(own, ds_tile + base * ROWS, ROWS, late / 8);
        }
        const float next = read(after(), following());
        SYNC_BLOCK();  // p and ds are there, and it is known whether the tiles before have added
        if (meets(tile, keys, window, base, 16 * M, r + HALF - late)) {
            get<M>(own, of_k ? ds_tile + base * ROWS : p_tile + base * HALF, of_k ? ROWS : HALF);
            accumulate<E, M, 2>(sum, own, (of_k ? q_rows : d_rows) + (HALF - late) * STRIDE);
        }
        if (SLOTS == 1) {
            SYNC_BLOCK();  // no warp needs the rows
            copy(after(), following(), 0);
        }
        const Order order = order_of<E>(tile, window, r);
        auto wait = [&]() {
            if (work.ready) return;
            while (lane_id() == 0 && !may_add()) pause();
            SYNC_WARP();
        };
        add_queries<E>(ds_tile, k_tile, tile, window, order, wait, sums, heads, kv_head * group + head, r, scale, dq, dq_form);
        if (threadIdx.x == TELLER) {
            // The last tile resets the counter for the next launch, without a signal.
            work.told = order.last && order.before == 0 ? -1 : counter(), work.tells = order.last ? 0 : order.before + 1;
        }
        slot ^= 1;
        if (threadIdx.x < 2 * ROWS) statistics[slot * 2 * ROWS + threadIdx.x] = next;
        r = after(), head = following();
    }
    copy_wait<0>();
    SYNC_BLOCK();  // what was copied first is there, also where no row sees a key; no warp needs keys or values
    tell(work, counters);
    give_keys<E>(sum, of_k ? k_tile : v_tile, base, of_k ? scale : 1.0f, of_k ? dk : dv, k_at, k_stride, keys, dk_form);
}
