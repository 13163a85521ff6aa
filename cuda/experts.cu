// A mixture of experts around its products (grouped.cu): the router, the order of its rows, and sums over the experts of a row. Everything
// of a row depends on that row only. The host knows neither the choices nor how many rows an expert has.
#include "eight.cuh"

// Warps of a block in kernels where a warp has a row.
#define ROWS_OF_BLOCK 8

DEVICE u32 row_of_warp() { return blockIdx.x * ROWS_OF_BLOCK + warp_id(); }

// router_forward  p = softmax(logits); the k experts with the largest logits, of equal ones those with the lowest numbers; their weights g = p,
// divided by their sum if `renormalizes`
// logits (t, experts) f32, which p replaces; chosen (t, k) u32, ascending; g (t, k) f32
// grid ceil(t / 8), block 256, a warp a row; needs experts <= 1024, k <= 32
// roofline 8 t experts bytes
KERNEL __launch_bounds__(256) router_forward(float* logits, u32* chosen, float* g, u32 t, u32 experts, u32 k, u32 renormalizes) {
    u32 row = row_of_warp(), lane = lane_id();
    if (row >= t) return;
    float* own = logits + (u64)row * experts;
    // Bit i: this lane's expert 32 i + lane is chosen. NaN is below all numbers.
    u32 taken = 0, mine = 0;
    float largest = 0.0f;
    for (u32 i = 0; i < k; i++) {
        float best = -infinity();
        u32 at = experts;
        for (u32 j = 0, e = lane; e < experts; j++, e += WARP) {
            float x = own[e] == own[e] ? own[e] : -infinity();
            if ((taken >> j & 1) == 0 && (at == experts || x > best)) best = x, at = e;
        }
        for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
            float other = shuffle_xor(best, lanes);
            u32 place = shuffle_xor(at, lanes);
            if (other > best || (other == best && place < at)) best = other, at = place;
        }
        if (at % WARP == lane) taken |= 1u << at / WARP;
        if (i == lane) mine = at;
        if (i == 0) largest = best;
    }
    float sum = 0.0f;
    for (u32 e = lane; e < experts; e += WARP) sum += own[e] = exp2_fast((own[e] - largest) * LOG2_E);
    sum = warp_sum(sum);
    for (u32 e = lane; e < experts; e += WARP) own[e] = own[e] / sum;
    SYNC_WARP();
    // Lane i takes the chosen expert below which there are i others.
    u32 lower = 0, sorted = 0;
    for (u32 i = 0; i < k; i++) lower += shuffle(mine, i) < mine;
    for (u32 i = 0; i < k; i++) {
        u32 expert = shuffle(mine, i);
        if (shuffle(lower, i) == lane) sorted = expert;
    }
    float weight = lane < k ? own[sorted] : 0.0f, all = 0.0f;
    for (u32 i = 0; i < k; i++) all += shuffle(weight, i);
    if (lane >= k) return;
    chosen[(u64)row * k + lane] = sorted;
    g[(u64)row * k + lane] = renormalizes ? weight / all : weight;
}

// router_backward  dl = p (dp - sum p dp) where dp = dg for the chosen experts; renormalized, dl = g (dg - sum g dg) for them, else 0; with
// the slope a of p, dl += p (a - sum p a)
// p (t, experts), g and dg (t, k), a (experts) or null f32; chosen (t, k) u32; dl (t, experts) bf16
// grid ceil(t / 8), block 256, a warp a row; needs k <= 32
// roofline 6 t experts bytes
KERNEL __launch_bounds__(256) router_backward(const float* p, const u32* chosen, const float* g, const float* dg, const float* a, bf16* dl,
                                              u32 t, u32 experts, u32 k, u32 renormalizes) {
    u32 row = row_of_warp(), lane = lane_id();
    if (row >= t) return;
    p += (u64)row * experts, dl += (u64)row * experts;
    u64 at = (u64)row * k + lane;
    bool has = lane < k;
    u32 expert = has ? chosen[at] : 0;
    float weight = has ? g[at] : 0.0f, slope = has ? dg[at] : 0.0f, product = times(weight, slope), sum = 0.0f, mean = 0.0f;
    for (u32 i = 0; i < k; i++) sum += shuffle(product, i);
    if (a) {
        for (u32 e = lane; e < experts; e += WARP) mean += times(p[e], a[e]);
        mean = warp_sum(mean);
    }
    float of_chosen = times(weight, slope - sum);
    for (u32 first = 0; first < experts; first += WARP) {
        u32 e = first + lane;
        float x = e < experts ? p[e] : 0.0f, d = renormalizes ? 0.0f : -times(x, sum);
        for (u32 i = 0; i < k; i++) {
            float found = shuffle(of_chosen, i);
            if (shuffle(expert, i) == e) d = found;
        }
        if (e >= experts) continue;
        if (a) d += times(x, a[e] - mean);
        store(dl + e, d);
    }
}

// The sum of x over lower threads of the block; `all` is that of all threads. `room` holds a number for each warp.
DEVICE u32 sum_before(u32 x, u32* room, u32& all) {
    u32 sum = x, lane = lane_id(), before = 0;
    for (u32 lanes = 1; lanes < WARP; lanes *= 2) {
        u32 lower = shuffle(sum, lane >= lanes ? lane - lanes : 0);
        if (lane >= lanes) sum += lower;
    }
    if (lane == WARP - 1) room[warp_id()] = sum;
    SYNC_BLOCK();
    all = 0;
    for (int warp = 0; warp < (int)blockDim.x / WARP; warp++) {
        if (warp == warp_id()) before = all;
        all += room[warp];
    }
    SYNC_BLOCK();
    return before + sum - x;
}

// experts_sort  the rows by expert, ascending within each: rows[places[r][i]] = r for i of the k experts of row r
// chosen and places (t, k), ends (experts + 1), rows (t k) u32; the rows of expert e are ends[e]..ends[e + 1]
// grid experts, block 512; each block reads all choices twice
// roofline 8 t k experts bytes from the L2 cache
KERNEL __launch_bounds__(512) experts_sort(const u32* chosen, u32* ends, u32* rows, u32* places, u32 t, u32 k, u32 experts) {
    SHARED u32 room[WARP];
    u32 e = blockIdx.x, lower = 0, begin;
    for (u32 i = threadIdx.x; i < t * k; i += blockDim.x) lower += chosen[i] < e;
    sum_before(lower, room, begin);
    if (threadIdx.x == 0) {
        ends[e] = begin;
        if (e == experts - 1) ends[experts] = t * k;
    }
    for (u32 first = 0; first < t; first += blockDim.x) {
        u32 row = first + threadIdx.x, at = 0, has = 0, count;
        for (u32 i = 0; i < k && row < t; i++) {
            if (chosen[row * k + i] == e) at = row * k + i, has = 1;
        }
        u32 place = begin + sum_before(has, room, count);
        if (has) rows[place] = row, places[at] = place;
        begin += count;
    }
}

// experts_combine  x[r] = c[r] + sum_i g[r][i] y[places[r][i]], i ascending from 0 in f32, rounded once
// y (t k, d), x and c (t, d) bf16, c may be null or x; places (t, k) u32; g (t, k) f32, null for ones; eights = d / 8
// grid ceil(t eights / 256), block 256, eight values a thread; needs d % 8 == 0 and 16-byte alignment
// roofline 2 (k + 2) t d bytes
KERNEL __launch_bounds__(256) experts_combine(const bf16* y, const u32* places, const float* g, const bf16* c, bf16* x, u32 t, u32 k,
                                              u32 eights) {
    u32 index = blockIdx.x * blockDim.x + threadIdx.x, row = index / eights, at = index % eights * 8;
    if (row >= t) return;
    float sum[8] = {}, some[8];
    for (u32 i = row * k; i < (row + 1) * k; i++) {
        load_eight(y + (u64)places[i] * eights * 8 + at, some);
        float weight = g ? g[i] : 1.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] = fmaf(weight, some[j], sum[j]);
    }
    u64 own = (u64)index * 8;
    if (c) {
        load_eight(c + own, some);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] = some[j] + sum[j];
    }
    store_eight(x + own, sum);
}

// experts_spread  to[places[i]] = from[i]
// from and to (count) f32; places (count) u32, each number once
// grid ceil(count / 256), block 256
// roofline 12 count bytes
KERNEL __launch_bounds__(256) experts_spread(const float* from, const u32* places, float* to, u32 count) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[places[i]] = from[i];
}

// experts_collect  to[i] = from[places[i]]
// from and to (count) f32; places (count) u32
// grid ceil(count / 256), block 256
// roofline 12 count bytes
KERNEL __launch_bounds__(256) experts_collect(const float* from, const u32* places, float* to, u32 count) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[places[i]];
}

// experts_weigh  dg[i] = act[i] dact[i], which both are then multiplied by g[i]
// act and dact (count, f) bf16; g and dg (count) f32
// grid ceil(count / 8), block 256, a warp a row; needs f % 8 == 0 and 16-byte alignment
// roofline 8 count f bytes
KERNEL __launch_bounds__(256) experts_weigh(bf16* act, bf16* dact, const float* g, float* dg, u32 count, u32 f) {
    u32 i = row_of_warp();
    if (i >= count) return;
    float weight = g[i], sum = 0.0f, a[8], d[8];
    for (u32 at = 8 * lane_id(); at < f; at += 8 * WARP) {
        u64 own = (u64)i * f + at;
        load_eight(act + own, a);
        load_eight(dact + own, d);
#pragma unroll
        for (int j = 0; j < 8; j++) sum = fmaf(a[j], d[j], sum), a[j] *= weight, d[j] *= weight;
        store_eight(act + own, a);
        store_eight(dact + own, d);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) dg[i] = sum;
}

// router_sums  of each expert: its rows, sum_r p, and -sum_r p ln p, r in 32 chains (r mod 32, ascending), the chains added in order
// p (t, experts), sums (3, experts) f32; ends (experts + 1) u32
// grid ceil(experts / 32), block 1024: a lane an expert, a warp a chain
// roofline 4 t experts bytes
KERNEL __launch_bounds__(1024) router_sums(const float* p, const u32* ends, float* sums, u32 t, u32 experts) {
    SHARED float chains[2][WARP][WARP];
    u32 e = blockIdx.x * WARP + lane_id();
    float sum = 0.0f, entropy = 0.0f;
    for (u32 row = warp_id(); row < t && e < experts; row += WARP) {
        float x = p[(u64)row * experts + e];
        sum += x;
        if (x > 0.0f) entropy -= times(x, logf(x));
    }
    chains[0][warp_id()][lane_id()] = sum, chains[1][warp_id()][lane_id()] = entropy;
    SYNC_BLOCK();
    if (warp_id() != 0 || e >= experts) return;
    sum = 0.0f, entropy = 0.0f;
    for (int k = 0; k < WARP; k++) sum += chains[0][k][lane_id()], entropy += chains[1][k][lane_id()];
    sums[e] = (float)(ends[e + 1] - ends[e]);
    sums[experts + e] = sum;
    sums[2 * experts + e] = entropy;
}
