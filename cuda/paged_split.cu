// Decode for few sequences with long contexts. One block of threads per sequence and head would leave most of the GPU
// idle, so scores are split by keys, and results by columns and by runs (key_segments.cuh). Within a run, a block of
// threads processes the keys in order. If rows have several runs, a third kernel combines them.
//
// Estimated, not yet run on a GPU: 100,000 keys of one sequence, E = 128, g = 8, groups of 4, on 108 SMs that copy 1.7 TB/s.
//   keys and values, read once: 410 MB, 241 us: what 100 % would be
//   scores: 205 MB read, 14 MB of scores and maxima written, 129 us; 3128 blocks, two an SM: one has 64 KiB under way while
//     the other computes for 2 to 3 us of the 8 us that both take at an SM's share; begin and end 4 us
//   values: 205 MB, 121 us, and 51 MB of scores from the L2; 800 blocks of 4096 keys and 32 columns, two an SM (78 KiB of shared
//     memory each), 64 KiB under way an SM, where 1.7 TB/s at 1 us need 16; a stage of 256 keys is 16 mma that wait for each
//     other, 0.45 us of the 2.1 us that its 16 KiB take at half an SM's share; begin and end 6 us
//   join: 25 runs, 0.4 MB from the L2, 5 us; two further launches 3 us
//   268 us in all, 90 %; 18 us of it do not shrink with the keys: 81 % at 32,768 keys, 85 % from about 55,000 on
// With a chain over all keys (32 blocks of columns, 180 us for values, which 391 stages of 0.45 us take alone) it was 76 % at best.
#include "paged.cuh"

// Blocks of keys of a stage, one a warp.
#define BLOCKS 4

// Scores of decoding tiles between the two kernels, f32, of this key/value head and tile.
struct Scratch {
    // [row][key], keys counted from the first of the tile
    float* scores;
    // [block of keys][16]: the largest score of each row
    float* max;
    // Keys of a row, and what lies there: whole stages.
    u64 stride;
    // [run][row]: columns, maximum and sum, where rows see several runs
    float* parts;
    i32 rows_max;
};

DEVICE Scratch scratch_of(float* scores, float* max, float* parts, i32 rows_max, u64 stride, i32 runs, i32 tile, int dim,
                          int keys) {
    u64 at = (u64)tile * gridDim.y + blockIdx.y, rows = at * rows_max;
    return Scratch{scores + rows * stride, max + at * (stride / keys) * 16, stride, parts + rows * runs * (dim + 8), rows_max};
}

template <int E, class T>
DEVICE void split_scores(u8* shared, const Paged& paged, const Work& work, const Scratch& scratch, i32) {
    constexpr int KEYS = Block<E>::KEYS, N = KEYS / 8;
    bf16* keys = (bf16*)shared;
    int lane = lane_id(), r = lane / 4, start = blockIdx.x * BLOCKS * KEYS;
    if (work.first + start >= work.end) return;
    const Head head = head_of<E, T>(paged, work);
    const u32 pages = pages_of(head, work.first + start, work.end);
    load_tile<E, BLOCKS * KEYS, T>(keys, paged.keys, paged.kv_heads, head, pages, work.first + start, work.end);
    copy_commit();
    KeyRange seen = key_range(work, r);
    u32 q[E / 16][4];
    load_queries<E>(q, paged, work, r);
    copy_wait<0>();
    expand_tile<E, BLOCKS * KEYS, T>(keys);
    SYNC_BLOCK();
    int block = blockIdx.x * BLOCKS + warp_id();
    float s[N][4], max[2];
    scores<E>(s, q, keys + warp_id() * KEYS * Tile<E>::STRIDE);
    if (paged.cap > 0.0f) cap_scores(s, paged.cap);
    mask(s, work.first + block * KEYS, seen);
    maxima(max, s);
    for (int i = 0; i < 2; i++) {
        int row = r + 8 * i;
        if (row >= work.rows) continue;
        if (lane % 4 == 0) scratch.max[block * 16 + row] = max[i];
        float* to = scratch.scores + row * scratch.stride + block * KEYS + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < N; n++) *(Both*)(to + n * 8) = Both{{s[n][2 * i], s[n][2 * i + 1]}};
    }
}

// Columns of the result that one block of threads computes: eight a warp.
template <int E> struct Columns {
    static constexpr int COUNT = E % 32 ? 16 : 32;
    static constexpr int STRIDE = COUNT + 8;
    static constexpr int CHUNKS = COUNT / 8;
    static constexpr int ROWS = BLOCKS * Block<E>::KEYS;
    // Values of one stage.
    static constexpr int TILE = ROWS * STRIDE;
    // Rows that all threads copy at once.
    static constexpr int STEP = 2 * THREADS / CHUNKS;
    static_assert(ROWS % STEP == 0, "whole rounds of all threads");
};

// The buffers from the warps that compute probabilities to the warps that add values: two, used alternately.
struct Handed {
    Eight p[BLOCKS][4][WARP];
    float sum[BLOCKS][2][WARP];
    float decay[BLOCKS][16];
};

// Starts copies of some columns of a stage of values; `head` begins at the first of them, `pages` are those of the stage.
template <int E, class T>
DEVICE void load_columns(bf16* tile, const void* cache, u32 kv_heads, const Head& head, u32 pages, int first, int end) {
    using C = Columns<E>;
    constexpr int STEP = C::STEP;
    const int own = threadIdx.x / C::CHUNKS, chunk = threadIdx.x % C::CHUNKS;
#pragma unroll
    for (int i = 0; i < C::ROWS; i += STEP) {
        const int row = own + i;
        const u64 page = start_of<E, T>(shuffle(pages, row / PAGE), kv_heads);
        const T* from = (const T*)cache + (page + (head.offset + row % PAGE * E + chunk * 8));
        if constexpr (PageHead<E, T>::IS_CODES) {
            u8* line = (u8*)(tile + row * C::STRIDE);
            copy_async<8>(line + Landing<C::COUNT>::CODES + chunk * 8, from, first + row < end);
            const u32 power = head.offset - blockIdx.x * C::COUNT + PAGE * E + row % PAGE / 4 * 4;
            const T* powers = (const T*)cache + (page + power);
            if (chunk == 0) copy_async<4>(line + Landing<C::COUNT>::POWER, powers, first + row < end);
        } else {
            copy_async(tile + row * C::STRIDE + chunk * 8, from, first + row < end);
        }
    }
}

// Turns codes that have landed in some columns of a stage into bf16, before the barrier after which others read them.
template <int E, class T> DEVICE void expand_columns(bf16* tile) {
    using C = Columns<E>;
    if constexpr (PageHead<E, T>::IS_CODES) {
        expand<C::COUNT, C::STRIDE, C::ROWS, C::STEP>(tile, threadIdx.x / C::CHUNKS, threadIdx.x % C::CHUNKS);
    }
}

// A block of scores in memory; rows beyond the end are 0.
template <int N>
DEVICE void load_scores(float (&s)[N][4], float (&max)[BLOCKS][2], const Scratch& scratch, int rows, int stage) {
    int lane = lane_id(), r = lane / 4, block = stage * BLOCKS + warp_id() % BLOCKS;
    for (int i = 0; i < 2; i++) {
        int row = r + 8 * i;
        bool there = row < rows;
        const float* from = scratch.scores + row * scratch.stride + block * 8 * N + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < N; n++) {
            Both two = there ? *(const Both*)(from + n * 8) : Both{{0.0f, 0.0f}};
            s[n][2 * i] = two.at[0];
            s[n][2 * i + 1] = two.at[1];
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) max[b][i] = there ? scratch.max[(stage * BLOCKS + b) * 16 + row] : 0.0f;
    }
}

// Probabilities of this warp's block of a stage, and the decay of its rows.
template <int N>
DEVICE void hand_over(Handed* handed, float (&s)[N][4], const float (&max)[BLOCKS][2], Running& row, float scale) {
    int lane = lane_id(), own = warp_id() % BLOCKS;
    float at[2] = {row.max[0], row.max[1]};
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        for (int i = 0; i < 2; i++) {
            float to = fmaxf(row.max[i], max[b][i]);
            if (b == own) {
                at[i] = to;
                if (lane % 4 == 0) handed->decay[b][lane / 4 + 8 * i] = decay_of(row.max[i], to, scale);
            }
            row.max[i] = to;
        }
    }
    handed->sum[own][0][lane] = probabilities<0>(s, at[0], scale);
    handed->sum[own][1][lane] = probabilities<1>(s, at[1], scale);
#pragma unroll
    for (int step = 0; step < N / 2; step++) {
        u32 a[4];
        packed(a, s, step);
        handed->p[own][step][lane] = Eight{{a[0], a[1], a[2], a[3]}};
    }
}

// o += p v over 32 keys and eight columns.
DEVICE void add_column(float (&o)[4], const Eight& low, const Eight& high, const bf16* values, int stride) {
    u32 b[4];
    load_matrices_transposed(b, values + lane_id() * stride);
    u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    mma(o, low.pair, first);
    mma(o, high.pair, second);
}

// Adds a stage to this warp's eight columns.
template <int E> DEVICE void take_over(const Handed* handed, Running& row, float (&o)[4], const bf16* values) {
    constexpr int KEYS = Block<E>::KEYS, STRIDE = Columns<E>::STRIDE;
    int lane = lane_id();
    for (int b = 0; b < BLOCKS; b++) {
        float decay[2] = {handed->decay[b][lane / 4], handed->decay[b][lane / 4 + 8]};
        for (int i = 0; i < 2; i++) row.sum[i] = fmaf(row.sum[i], decay[i], handed->sum[b][i][lane]);
        rescale(o, decay[0], decay[1]);
#pragma unroll
        for (int step = 0; step < KEYS / 16; step += 2) {
            const bf16* tile = values + (b * KEYS + step * 16) * STRIDE + warp_id() * 8;
            add_column(o, handed->p[b][step][lane], handed->p[b][step + 1][lane], tile, STRIDE);
        }
    }
}

// Writes the rows' state of a run for the combining kernel: columns and sums from warps that add values, maxima from
// one that computes probabilities.
template <int E>
DEVICE void leave_part(const Scratch& scratch, const Work& work, i32 run, int column, const Running& row,
                       const float (&o)[4]) {
    int lane = lane_id(), warp = warp_id();
    for (int i = 0; i < 2; i++) {
        float sum = sum_of_lanes(row.sum[i]);
        int r = lane / 4 + 8 * i;
        if (r >= work.rows) continue;
        float* to = scratch.parts + ((u64)run * scratch.rows_max + r) * Held<E>::STRIDE;
        if (warp < Columns<E>::COUNT / 8) {
            *(Both*)(to + column + warp * 8 + 2 * (lane % 4)) = Both{{o[2 * i], o[2 * i + 1]}};
        }
        if (column > 0 || lane % 4 > 0) continue;
        if (warp == 0) to[E + 1] = sum;
        if (warp == BLOCKS) to[E] = row.max[i];
    }
}

// Four warps add a stage of values while four others compute the probabilities of the next one.
template <int E, class T>
DEVICE void split_values(u8* shared, const Paged& paged, const Work& work, const Scratch& scratch, i32 run) {
    using C = Columns<E>;
    constexpr int N = Block<E>::KEYS / 8;
    bf16* values = (bf16*)shared;
    Handed* handed = (Handed*)(values + 3 * C::TILE);
    Head head = head_of<E, T>(paged, work);
    // The keys of this run, and its first stage among those of the tile.
    const int from = work.first / RUN * RUN + run * RUN;
    const int first = work.first > from ? work.first : from, end = work.end < from + RUN ? work.end : from + RUN;
    const int before = (first - work.first) / C::ROWS, stages = (end - first + C::ROWS - 1) / C::ROWS;
    if (first >= end) return;
    int column = blockIdx.x * C::COUNT;
    head.offset += column;
    bool makes = warp_id() >= BLOCKS, adds = warp_id() < C::COUNT / 8;
    Running row = running();
    float o[4] = {}, s[N][4], max[BLOCKS][2];
    if (makes) load_scores(s, max, scratch, work.rows, before);
    u32 pages = pages_of(head, first, end);
    load_columns<E, T>(values, paged.values, paged.kv_heads, head, pages, first, end);
    copy_commit();
    pages = pages_of(head, first + C::ROWS, end);
    for (int stage = 0; stage <= stages; stage++) {
        int next = stage + 1;
        load_columns<E, T>(values + next % 3 * C::TILE, paged.values, paged.kv_heads, head, pages, first + next * C::ROWS, end);
        copy_commit();
        pages = pages_of(head, first + (next + 1) * C::ROWS, end);
        if (makes && stage < stages) {
            hand_over(handed + stage % 2, s, max, row, paged.scale);
            if (next < stages) load_scores(s, max, scratch, work.rows, before + next);
        }
        if (adds && stage > 0) take_over<E>(handed + (stage + 1) % 2, row, o, values + (stage + 2) % 3 * C::TILE);
        copy_wait<1>();
        expand_columns<E, T>(values + stage % 3 * C::TILE);
        SYNC_BLOCK();  // this stage's probabilities and values are there, and nobody reads the one before
    }
    const bool is_alone = work.first >= from && work.end <= from + RUN;
    if (!is_alone) leave_part<E>(scratch, work, run, column, row, o);
    if (adds && is_alone) {
        float inverses[2] = {inverse(row.sum[0]), inverse(row.sum[1])};
        store_result<E>(paged, work, lane_id() / 4, column + warp_id() * 8, o, inverses);
    }
    copy_wait<0>();
}

#define SPLIT_PARAMETERS                                                                                              \
    PAGED_PARAMETERS, float *scores, float *max, float *parts, i32 rows_max, u64 stride, i32 runs
#define SPLIT_BODY(E, T, runs_of_grid, half)                                                                               \
    {                                                                                                                   \
        DYNAMIC_SHARED(shared);                                                                                         \
        Paged paged = PAGED;                                                                                            \
        const i32 tile = blockIdx.z / runs_of_grid, run = blockIdx.z % runs_of_grid;                                    \
        Work work = work_of<E, BLOCKS * Block<E>::KEYS>(paged, tile, 16);                                               \
        half<E, T>(shared, paged, work, scratch_of(scores, max, parts, rows_max, stride, runs, tile, E, Block<E>::KEYS), run); \
    }

// paged_scores_E  scores of decoding tiles for four blocks of keys, masked, and the largest of each block
// as paged_decode_E and paged_decode_codes_E; scores (tiles, g, rows_max, stride), max (tiles, g, stride / KEYS, 16) f32
// grid (stages of the longest tile, g, tiles), block 128; a block of keys a warp
// needs sm_80, four blocks of keys of dynamic shared memory
// roofline 2 E g bytes a key, in 8 bits (E + 1) g, and 4 h of scores
KERNEL __launch_bounds__(128) paged_scores_32(SPLIT_PARAMETERS) SPLIT_BODY(32, bf16, 1, split_scores)
KERNEL __launch_bounds__(128) paged_scores_64(SPLIT_PARAMETERS) SPLIT_BODY(64, bf16, 1, split_scores)
KERNEL __launch_bounds__(128) paged_scores_80(SPLIT_PARAMETERS) SPLIT_BODY(80, bf16, 1, split_scores)
KERNEL __launch_bounds__(128) paged_scores_96(SPLIT_PARAMETERS) SPLIT_BODY(96, bf16, 1, split_scores)
KERNEL __launch_bounds__(128) paged_scores_128(SPLIT_PARAMETERS) SPLIT_BODY(128, bf16, 1, split_scores)
KERNEL __launch_bounds__(128) paged_scores_256(SPLIT_PARAMETERS) SPLIT_BODY(256, bf16, 1, split_scores)
KERNEL __launch_bounds__(128) paged_scores_codes_32(SPLIT_PARAMETERS) SPLIT_BODY(32, u8, 1, split_scores)
KERNEL __launch_bounds__(128) paged_scores_codes_64(SPLIT_PARAMETERS) SPLIT_BODY(64, u8, 1, split_scores)
KERNEL __launch_bounds__(128) paged_scores_codes_80(SPLIT_PARAMETERS) SPLIT_BODY(80, u8, 1, split_scores)
KERNEL __launch_bounds__(128) paged_scores_codes_96(SPLIT_PARAMETERS) SPLIT_BODY(96, u8, 1, split_scores)
KERNEL __launch_bounds__(128) paged_scores_codes_128(SPLIT_PARAMETERS) SPLIT_BODY(128, u8, 1, split_scores)
KERNEL __launch_bounds__(128) paged_scores_codes_256(SPLIT_PARAMETERS) SPLIT_BODY(256, u8, 1, split_scores)

// paged_values_E  o = softmax(scores) v for some columns of decoding tiles, in the order of paged_decode_E
// as paged_scores_E or paged_scores_codes_E, which comes before; parts (tiles, g, runs, rows_max, E + 8) f32: rows that see several runs end there
// grid (E / columns, g, tiles x runs), block 256; eight columns a warp, 32 a block, for E = 80 16
// needs sm_80, three stages of the columns of values and what the warps hand over of dynamic shared memory
// roofline 2 E g bytes a key, in 8 bits (E + 1) g, and 4 h of scores for each block of columns; a chain of KEYS / 16 mma a block of keys
KERNEL __launch_bounds__(256) paged_values_32(SPLIT_PARAMETERS) SPLIT_BODY(32, bf16, runs, split_values)
KERNEL __launch_bounds__(256) paged_values_64(SPLIT_PARAMETERS) SPLIT_BODY(64, bf16, runs, split_values)
KERNEL __launch_bounds__(256) paged_values_80(SPLIT_PARAMETERS) SPLIT_BODY(80, bf16, runs, split_values)
KERNEL __launch_bounds__(256) paged_values_96(SPLIT_PARAMETERS) SPLIT_BODY(96, bf16, runs, split_values)
KERNEL __launch_bounds__(256) paged_values_128(SPLIT_PARAMETERS) SPLIT_BODY(128, bf16, runs, split_values)
KERNEL __launch_bounds__(256) paged_values_256(SPLIT_PARAMETERS) SPLIT_BODY(256, bf16, runs, split_values)
KERNEL __launch_bounds__(256) paged_values_codes_32(SPLIT_PARAMETERS) SPLIT_BODY(32, u8, runs, split_values)
KERNEL __launch_bounds__(256) paged_values_codes_64(SPLIT_PARAMETERS) SPLIT_BODY(64, u8, runs, split_values)
KERNEL __launch_bounds__(256) paged_values_codes_80(SPLIT_PARAMETERS) SPLIT_BODY(80, u8, runs, split_values)
KERNEL __launch_bounds__(256) paged_values_codes_96(SPLIT_PARAMETERS) SPLIT_BODY(96, u8, runs, split_values)
KERNEL __launch_bounds__(256) paged_values_codes_128(SPLIT_PARAMETERS) SPLIT_BODY(128, u8, runs, split_values)
KERNEL __launch_bounds__(256) paged_values_codes_256(SPLIT_PARAMETERS) SPLIT_BODY(256, u8, runs, split_values)

// Columns of a row that a thread of paged_join computes, and runs that it reads at once.
#define JOINED 4
#define AHEAD 8

// paged_join  o = the combined runs of decoding tiles; rows with one run are already finished
// as paged_values_E, which comes before; dim: E
// grid (tiles, g, ceil(rows_max dim / 512)), block 128, four columns a thread
// needs sm_80
// roofline 4 rows (dim + 8) bytes a run, from the cache
KERNEL __launch_bounds__(128) paged_join(PAGED_PARAMETERS, const float* parts, i32 rows_max, i32 runs, i32 dim) {
    Paged paged = PAGED;
    // Where the first run begins does not depend on the head dim.
    Work work = work_of<64>(paged, blockIdx.x, 16);
    const int first = work.first / RUN, count = (work.end - 1) / RUN + 1 - first;
    const int at = (blockIdx.z * THREADS + threadIdx.x) * JOINED, r = at / dim, column = at % dim;
    if (count == 1 || r >= work.rows) return;
    const u64 tile = (u64)blockIdx.x * gridDim.y + blockIdx.y, step = (u64)rows_max * (dim + 8);
    parts += tile * runs * step + (u64)r * (dim + 8);
    float max = LOWEST, sum = 0.0f, x[JOINED] = {};
    for (int run = 0; run < count; run += AHEAD) {
        Four part[AHEAD];
        Both of_row[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            // An empty run changes nothing.
            part[i] = Four{{0.0f, 0.0f, 0.0f, 0.0f}}, of_row[i] = Both{{LOWEST, 0.0f}};
            if (run + i >= count) continue;
            part[i] = *(const Four*)(parts + (run + i) * step + column);
            of_row[i] = *(const Both*)(parts + (run + i) * step + dim);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            Join both = join(max, sum, of_row[i].at[0], of_row[i].at[1], scale);
            max = both.max, sum = both.sum;
#pragma unroll
            for (int j = 0; j < JOINED; j++) x[j] = joined(both, x[j], part[i].at[j]);
        }
    }
    const float inverse = 1.0f / sum;
    u32* to = (u32*)(o + place(work, work.row + r) * dim + column);
    to[0] = pack(x[0] * inverse, x[1] * inverse);
    to[1] = pack(x[2] * inverse, x[3] * inverse);
}
