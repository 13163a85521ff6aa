// The searches of a block in a row of logits: the largest, the k-th largest, the smallest likeliest set, the sampled
// token. The order of everything is fixed; the results are those of the CPU's sampler.
#pragma once
#include "softmax.cuh"

#define SAMPLE_THREADS 512
// Tokens whose probabilities are added as one in f32, then tile by tile in f64.
#define TILE 256
// Tokens among which the border of the likeliest set is found by sorting.
#define CANDIDATES 1024

// Passes over a row take tokens threadIdx.x, then SAMPLE_THREADS further on; with this many loads under way at once.
#define PASS _Pragma("unroll 4") for

// Four counts, read at once.
struct alignas(16) Counts {
    u32 at[4];
};

// Shared memory of a row's block.
struct SampleRoom {
    float* tiles;                // ceil(v / TILE)
    u64* candidates;             // CANDIDATES
    double* warps;               // SAMPLE_THREADS / WARP
    Counts* counts;              // SAMPLE_THREADS
    u32* found;                  // 1
};

// The values of all threads, folded in one order, in all threads.
template <class T, class F> DEVICE T block_fold(T x, F f, void* room) {
    T* warps = (T*)room;
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) x = f(x, shuffle_xor(x, lanes));
    if (lane_id() == 0) warps[warp_id()] = x;
    SYNC_BLOCK();
    x = warps[0];
    for (int w = 1; w < SAMPLE_THREADS / WARP; w++) x = f(x, warps[w]);
    SYNC_BLOCK();
    return x;
}

template <class T> DEVICE T block_total(T x, void* room) {
    return block_fold(x, [](T a, T b) { return a + b; }, room);
}

// A row and what is kept of it: e = exp((x - max) / temperature) where x reaches `least`; e below `cut` are 0, as are those
// equal to it after the token `last`.
struct Kept {
    const float* x;
    int v;
    float max, inverse_temperature, least, cut;
    int last;
};

DEVICE float e_at(const Kept& row, int token) {
    float x = row.x[token];
    float e = exp_as_cpu(times(x - row.max, row.inverse_temperature));
    bool kept = x >= row.least && e >= row.cut && (e > row.cut || token <= row.last);
    return kept ? e : 0.0f;
}

DEVICE float row_max(const float* x, int v, void* room) {
    float best = -infinity();
    PASS (int i = threadIdx.x; i < v; i += SAMPLE_THREADS) best = fmaxf(best, x[i]);
    return block_fold(best, [](float a, float b) { return fmaxf(a, b); }, room);
}

// The first token whose x is `max`, or 0.
DEVICE int first_of(const float* x, int v, float max, void* room) {
    int first = v;
    for (int i = threadIdx.x; i < v && first == v; i += SAMPLE_THREADS) first = x[i] == max ? i : v;
    first = block_fold(first, [](int a, int b) { return a < b ? a : b; }, room);
    return first < v ? first : 0;
}

// ---- sums of probabilities ----

// The e of each tile, added as the CPU does: 16 lanes, each ascending, then lanes as a tree. Half a warp a tile.
DEVICE void sum_tiles(const Kept& row, float* tiles) {
    int count = (row.v + TILE - 1) / TILE, lane = lane_id() % 16, half = lane_id() / 16;
    for (int pair = warp_id(); 2 * pair < count; pair += SAMPLE_THREADS / WARP) {
        int tile = 2 * pair + half;
        float sum = 0.0f;
        for (int i = 0; i < TILE / 16; i++) {
            int token = tile * TILE + 16 * i + lane;
            if (token < row.v) sum += e_at(row, token);
        }
        for (int lanes = 8; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
        if (lane == 0 && tile < count) tiles[tile] = sum;
    }
    SYNC_BLOCK();
}

DEVICE double sum_of_lower_lanes(double own) {
    double sum = own;
    for (int lanes = 1; lanes < WARP; lanes *= 2) {
        double other = shuffle(sum, (lane_id() - lanes) & (WARP - 1));
        if (lane_id() >= lanes) sum += other;
    }
    double lower = shuffle(sum, (lane_id() - 1) & (WARP - 1));
    return lane_id() > 0 ? lower : 0.0;
}

// Where a running sum crosses a border, and the sum before it.
struct Crossing {
    int at;
    double before;
};

// The first of n masses above 0 with which `before` and all masses up to it exceed `target` (or reach it, where `reach`);
// the last above 0 where none does; 0 where none is above 0. By one warp, in all lanes; each lane has a run of masses.
template <class F> DEVICE Crossing cross(F mass, int n, double before, double target, bool reach) {
    int run = (n + WARP - 1) / WARP, start = lane_id() * run, end = start + run < n ? start + run : n;
    double own = 0.0;
    for (int i = start; i < end; i++) own += (double)mass(i);
    before += sum_of_lower_lanes(own);
    int at = -1;
    bool crossed = false;
    double sum = before;
    for (int i = start; i < end && !crossed; i++) {
        double m = (double)mass(i);
        if (m > 0.0) {
            at = i;
            before = sum;
            crossed = reach ? sum + m >= target : sum + m > target;
        }
        sum += m;
    }
    // The first lane that crossed, else the last that has a mass.
    int best = crossed ? WARP + WARP - lane_id() : at >= 0 ? lane_id() : -1;
    int top = best;
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        int other = shuffle_xor(top, lanes);
        top = other > top ? other : top;
    }
    int from = top > WARP - 1 ? 2 * WARP - top : top < 0 ? 0 : top;
    return Crossing{top < 0 ? 0 : shuffle(at, from), shuffle(before, from)};
}

// All tiles in f64, by each warp for itself.
DEVICE double total_of(const float* tiles, int count) {
    int run = (count + WARP - 1) / WARP, start = lane_id() * run;
    double sum = 0.0;
    for (int i = start; i < start + run && i < count; i++) sum += (double)tiles[i];
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
    return sum;
}

// ---- the border of a set of the largest ----
//
// Tokens have a key, larger for earlier ones in the order, and equal keys are ordered lowest token first. The border is
// the token with which the mass of all up to it reaches a target. Top-p: keys are the bits of e, the mass is e. Top-k:
// keys are the order of the logits, each of mass 1.

struct ByProbability {
    const Kept& row;
};

DEVICE u32 key_of(const ByProbability& tokens, int token) { return bits_of(e_at(tokens.row, token)); }
DEVICE double mass_of(const ByProbability&, u32 key) { return (double)float_of(key); }

struct ByLogit {
    const float* x;
};

DEVICE u32 key_of(const ByLogit& tokens, int token) {
    u32 u = bits_of(tokens.x[token]);
    return u ^ (u >> 31 ? 0xffffffffu : 0x80000000u);
}
DEVICE double mass_of(const ByLogit&, u32) { return 1.0; }
DEVICE float logit_of(u32 key) { return float_of(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }

struct Border {
    u32 key;
    int token;
};

// Keys in (low, high]; those above `high` have the mass `before`, short of the target, and those above `low` reach it.
struct Bracket {
    u32 low, high;
    double before, target;
};

// The sum of the counts of lower threads, and of all threads. A barrier is needed before `counts` is used again.
struct Place {
    int lower, all;
};

DEVICE Place place_of(int own, Counts* counts) {
    counts[threadIdx.x / 4].at[threadIdx.x % 4] = own;
    SYNC_BLOCK();
    Place place{0, 0};
    for (int t = 0; t < SAMPLE_THREADS; t += 4) {
        Counts others = counts[t / 4];
        for (int j = 0; j < 4; j++) {
            place.lower += t + j < (int)threadIdx.x ? others.at[j] : 0;
            place.all += others.at[j];
        }
    }
    return place;
}

// Sorts n (a power of two) ascending.
DEVICE void sort(u64* x, int n) {
    for (int size = 2; size <= n; size *= 2) {
        for (int stride = size / 2; stride > 0; stride /= 2) {
            SYNC_BLOCK();
            for (int i = threadIdx.x; i < n / 2; i += SAMPLE_THREADS) {
                int low = 2 * i - (i & (stride - 1)), high = low + stride;
                u64 a = x[low], b = x[high];
                if ((a > b) == ((low & size) == 0)) x[low] = b, x[high] = a;
            }
        }
    }
    SYNC_BLOCK();
}

// The borders below leave `found` to be read: a barrier is needed before it is used again. `sum_tiles`, which follows
// each border, has one, and so has `place_of`, with which each begins.

// The border among at most CANDIDATES tokens: sorted.
template <class T> DEVICE Border border_by_sorting(T tokens, int v, Bracket in, const SampleRoom& room) {
    int own = 0;
    PASS (int i = threadIdx.x; i < v; i += SAMPLE_THREADS) {
        u32 key = key_of(tokens, i);
        own += key > in.low && key <= in.high;
    }
    Place place = place_of(own, room.counts);
    int n = 1;
    while (n < place.all) n *= 2;
    for (int i = threadIdx.x; own > 0 && i < v; i += SAMPLE_THREADS) {
        u32 key = key_of(tokens, i);
        if (key > in.low && key <= in.high) room.candidates[place.lower++] = (u64)~key << 32 | (u32)i, own--;
    }
    for (int i = place.all + threadIdx.x; i < n; i += SAMPLE_THREADS) room.candidates[i] = ~0ull;
    sort(room.candidates, n);
    if (place.all == 0) return Border{0, v};
    auto key_at = [&](int i) { return ~(u32)(room.candidates[i] >> 32); };
    int at = cross([&](int i) { return mass_of(tokens, key_at(i)); }, place.all, in.before, in.target, true).at;
    Border border{key_at(at), (int)(u32)room.candidates[at]};
    // Not needed: without it registers are spilled on sm_90.
    SYNC_BLOCK();
    return border;
}

// The border among tokens that all have the key `in.high`.
template <class T> DEVICE Border border_among_equals(T tokens, int v, Bracket in, const SampleRoom& room) {
    double wanted = (in.target - in.before) / mass_of(tokens, in.high);
    // Runs of tokens, so that lower threads have lower tokens.
    int run = (v + SAMPLE_THREADS - 1) / SAMPLE_THREADS, start = threadIdx.x * run;
    int end = start + run < v ? start + run : v, own = 0;
    for (int i = start; i < end; i++) own += key_of(tokens, i) == in.high;
    Place place = place_of(own, room.counts);
    if (threadIdx.x == 0) room.found[0] = v;
    SYNC_BLOCK();
    if ((double)place.lower < wanted && wanted <= (double)(place.lower + own)) {
        int at = start;
        for (int n = place.lower; at < end; at++) {
            if (key_of(tokens, at) == in.high && (double)++n >= wanted) break;
        }
        room.found[0] = at;
    }
    SYNC_BLOCK();
    return Border{in.high, (int)room.found[0]};
}

// Narrowed by the mass above four levels at a time, descending, until the tokens in the bracket can be sorted or are alike.
template <class T>
DEVICE Border border_of(T tokens, int v, Bracket in, u32 (&levels)[4], const SampleRoom& room) {
    u32 above_low = v, above_high = 0;
    while (above_low - above_high > CANDIDATES && in.high - in.low > 1) {
        double mass[4] = {0.0, 0.0, 0.0, 0.0};
        u32 count[4] = {0, 0, 0, 0};
        for (int i = threadIdx.x; i < v; i += SAMPLE_THREADS) {
            u32 key = key_of(tokens, i);
            double own = mass_of(tokens, key);
            for (int l = 0; l < 4; l++) {
                mass[l] += key > levels[l] ? own : 0.0;
                count[l] += key > levels[l];
            }
        }
        bool reached = false;
        for (int l = 0; l < 4; l++) {
            double all = block_total(mass[l], room.warps);
            u32 above = block_total(count[l], room.warps);
            if (reached) continue;
            reached = all >= in.target;
            if (reached) in.low = levels[l], above_low = above;
            else in.high = levels[l], above_high = above, in.before = all;
        }
        u32 width = in.high - in.low;
        for (u32 l = 0; l < 4; l++) levels[l] = in.low + (u32)((u64)width * (4 - l) / 5);
    }
    if (above_low - above_high <= CANDIDATES) return border_by_sorting(tokens, v, in, room);
    return border_among_equals(tokens, v, in, room);
}

struct Cut {
    float e;
    int last;
};

// The smallest set, likeliest first, whose mass reaches `target`.
DEVICE Cut nucleus(const Kept& row, double target, const SampleRoom& room) {
    u32 levels[4] = {bits_of(0.1f), bits_of(0.01f), bits_of(1e-3f), bits_of(1e-5f)};
    Bracket in{0, bits_of(1.0f), 0.0, target};
    Border border = border_of(ByProbability{row}, row.v, in, levels, room);
    return Cut{float_of(border.key), border.token};
}

// A key that at least k tokens reach, and not many more: the k-th largest of the threads' largest. 0 where k is more than
// there are threads.
DEVICE u32 reached_by(ByLogit tokens, int v, u32 k, const SampleRoom& room) {
    if (k > SAMPLE_THREADS) return 0;
    u32 best = 0;
    PASS (int i = threadIdx.x; i < v; i += SAMPLE_THREADS) {
        u32 key = key_of(tokens, i);
        best = key > best ? key : best;
    }
    room.counts[threadIdx.x / 4].at[threadIdx.x % 4] = best;
    SYNC_BLOCK();
    u32 rank = 0;
    for (int t = 0; t < SAMPLE_THREADS; t += 4) {
        Counts others = room.counts[t / 4];
        for (int j = 0; j < 4; j++) {
            rank += others.at[j] > best || (others.at[j] == best && t + j < (int)threadIdx.x);
        }
    }
    if (rank == k - 1) room.found[0] = best;
    SYNC_BLOCK();
    return room.found[0];
}

// The k-th largest of x, 0 < k <= v.
DEVICE float kth_largest(const float* x, int v, u32 k, const SampleRoom& room) {
    ByLogit tokens{x};
    u32 reached = reached_by(tokens, v, k, room);
    Bracket in{reached > 0 ? reached - 1 : 0, 0xffffffffu, 0.0, (double)k};
    u64 width = in.high - in.low;
    u32 levels[4] = {in.low + (u32)(width / 2), in.low + (u32)(width / 8), in.low + (u32)(width / 64), in.low};
    return logit_of(border_of(tokens, v, in, levels, room).key);
}

// ---- the sample ----

// The first token whose cumulative sum exceeds `target`, by tiles and then within one.
DEVICE int draw(const Kept& row, double target, const SampleRoom& room) {
    const float* tiles = room.tiles;
    Crossing tile = cross([&](int i) { return tiles[i]; }, (row.v + TILE - 1) / TILE, 0.0, target, false);
    int start = tile.at * TILE, n = row.v - start < TILE ? row.v - start : TILE;
    // Every warp finds the same tile. Its e replace the candidates.
    float* e = (float*)room.candidates;
    if ((int)threadIdx.x < n) e[threadIdx.x] = e_at(row, start + threadIdx.x);
    SYNC_BLOCK();
    return start + cross([&](int i) { return e[i]; }, n, tile.before, target, false).at;
}
