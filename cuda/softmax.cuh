// The statistics of a softmax row, in one fixed order for sampling, scoring and training.
//
// A row is cut into spans of 2048 columns. In a span, lane l of a warp takes columns 128 i + 4 l .. + 3, i ascending; lanes
// are added as a tree; span s goes to lane s % 32, s ascending, and lanes are added as a tree again. Nothing of this depends
// on how many rows or warps there are.
//
// Exponentials are taken relative to a whole power of two, so that another reference scales sums without rounding.
#pragma once
#include "common.cuh"

#define SPAN 2048
// Columns of a span that a warp takes at once.
#define STRIP 128
// Below this, 2^d is taken for 0.
#define LOWEST_POWER -150.0f

// Statistics of a part of a row, with z = logit * inverse_temperature: the largest z; a whole number that no z log2(e)
// exceeds by more than a rounding; sum 2^(z log2(e) - reference); sum of the same times its exponent.
struct alignas(16) Part {
    float max, reference, sum, dot;
};

// Statistics of a whole row, like the CPU's `RowStats`: max z; sum exp(z - max); sum exp(z - max) (z - max); and the
// target's logit, 0 if the target is in another part of the vocabulary.
struct alignas(16) Stats {
    float max, sum_exp, dot, target;
};

DEVICE Part no_part() { return Part{-infinity(), -1e30f, 0.0f, 0.0f}; }

// 2^k for whole k <= 0; what would be denormal is 0.
DEVICE float whole_power(float k) { return k < -126.0f ? 0.0f : float_of((u32)((i32)k + 127) << 23); }

DEVICE void rebase(Part& part, float reference) {
    if (reference == part.reference) return;
    float k = fmaxf(part.reference - reference, LOWEST_POWER);
    float scale = whole_power(k);
    part.dot = scale * fmaf(k, part.sum, part.dot);
    part.sum *= scale;
    part.reference = reference;
}

// Adds four columns. NaN is ignored by the maximum and shows in the sums.
DEVICE void add(Part& part, const float (&z)[4]) {
    float top = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
    if (top > part.max) {
        part.max = top;
        rebase(part, ceilf(top * LOG2_E));
    }
    for (int i = 0; i < 4; i++) {
        float d = fmaf(z[i], LOG2_E, -part.reference);
        d = d < LOWEST_POWER ? LOWEST_POWER : d;
        float e = exp2_fast(d);
        part.sum += e;
        part.dot = fmaf(e, d, part.dot);
    }
}

DEVICE void merge(Part& part, Part other) {
    float reference = fmaxf(part.reference, other.reference);
    rebase(part, reference);
    rebase(other, reference);
    part.max = fmaxf(part.max, other.max);
    part.sum += other.sum;
    part.dot += other.dot;
}

DEVICE Part warp_merge(Part part) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        merge(part, Part{shuffle_xor(part.max, lanes), shuffle_xor(part.reference, lanes),
                         shuffle_xor(part.sum, lanes), shuffle_xor(part.dot, lanes)});
    }
    return part;
}

// All of a row's spans, by one warp, in all lanes.
DEVICE Part merged(const Part* spans, int count) {
    Part part = no_part();
    for (int s = lane_id(); s < count; s += WARP) merge(part, spans[s]);
    return warp_merge(part);
}

DEVICE Stats finished(Part part) {
    // The largest z lies at 2^-above.
    float above = -fmaf(part.max, LOG2_E, -part.reference);
    float scale = exp2_fast(above);
    return Stats{part.max, part.sum * scale, LN_2 * scale * fmaf(above, part.sum, part.dot), 0.0f};
}

// ---- columns of a row ----

struct alignas(8) Pairs {
    u32 pair[2];
};

DEVICE void load_four(float (&x)[4], const float* from) {
    Four four = *(const Four*)from;
    for (int i = 0; i < 4; i++) x[i] = four.at[i];
}

DEVICE void load_four(float (&x)[4], const bf16* from) {
    Pairs pairs = *(const Pairs*)from;
    for (int i = 0; i < 2; i++) x[2 * i] = low_of(pairs.pair[i]), x[2 * i + 1] = high_of(pairs.pair[i]);
}

// Four columns from `at`; minus infinity past v. `aligned`: the row starts at a multiple of 16 bytes.
template <class T> DEVICE void load_four(float (&x)[4], const T* row, int at, int v, bool aligned) {
    if (aligned && at + 4 <= v) return load_four(x, row + at);
    for (int i = 0; i < 4; i++) x[i] = at + i < v ? load(row + at + i) : -infinity();
}

DEVICE bool aligned_to_16(const void* at) { return (u64)at % 16 == 0; }

// The span of a row that starts at column `start`, by one warp, in all lanes.
template <class T> DEVICE Part span_of(const T* row, int start, int v, float inverse_temperature) {
    // Loads that are under way at once.
    constexpr int STRIPS = 4;
    bool aligned = aligned_to_16(row);
    Part part = no_part();
    for (int at = start; at < start + SPAN && at < v; at += STRIPS * STRIP) {
        float x[STRIPS][4];
        const int mine = at + 4 * lane_id();
        if (aligned && at + STRIPS * STRIP <= v) {
            for (int j = 0; j < STRIPS; j++) load_four(x[j], row + mine + j * STRIP);
        } else {
            for (int j = 0; j < STRIPS; j++) load_four(x[j], row, mine + j * STRIP, v, aligned);
        }
        for (int j = 0; j < STRIPS; j++) {
            for (int i = 0; i < 4; i++) x[j][i] = times(x[j][i], inverse_temperature);
            add(part, x[j]);
        }
    }
    return warp_merge(part);
}

// A whole row by a block; `spans` has room for each span in shared memory. The result is warp 0's. The block must meet
// before `spans` is used again.
template <class T> DEVICE Stats row_stats(const T* row, int v, float inverse_temperature, Part* spans) {
    int count = (v + SPAN - 1) / SPAN, warps = blockDim.x / WARP;
    for (int s = warp_id(); s < count; s += warps) {
        Part part = span_of(row, s * SPAN, v, inverse_temperature);
        if (lane_id() == 0) spans[s] = part;
    }
    SYNC_BLOCK();
    Stats stats{0.0f, 0.0f, 0.0f, 0.0f};
    if (warp_id() == 0) stats = finished(merged(spans, count));
    return stats;
}

// ---- values computed from the statistics; the formulas of `RowStats` ----

DEVICE float logprob_of(float logit, float inverse_temperature, const Stats& stats) {
    return times(logit, inverse_temperature) - stats.max - logf(stats.sum_exp);
}

DEVICE float entropy_of(const Stats& stats) { return logf(stats.sum_exp) - stats.dot / stats.sum_exp; }

// exp(x) with the bits of the CPU's (`src/device/cpu/exp.rs`, after Cephes expf), for decisions that must be equal on
// both.
DEVICE float exp_as_cpu(float x) {
    x = x < -105.0f ? -105.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float round = 12582912.0f;
    float shifted = fmaf(x, LOG2_E, round);
    float n = shifted - round;
    float r = fmaf(n, 2.1219444e-4f, fmaf(n, -0.6933594f, x));
    float p = 1.9875691e-4f;
    p = fmaf(p, r, 1.3981999e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 1.6666666e-1f);
    p = fmaf(p, r, 5e-1f);
    float y = fmaf(p, times(r, r), r) + 1.0f;
    i32 whole = (i32)(bits_of(shifted) - bits_of(round)), half = whole >> 1;
    return times(times(y, float_of((u32)(half + 127) << 23)), float_of((u32)(whole - half + 127) << 23));
}

// The statistics of a row from those of its parts, `stride` apart, left to right, with the bits of `RowStats::combined`.
DEVICE Stats combined(const Stats* parts, int count, u64 stride) {
    Stats all = parts[0];
    if (count == 1) return all;
    for (int p = 1; p < count; p++) all.max = fmaxf(all.max, parts[p * stride].max);
    all.sum_exp = all.dot = all.target = 0.0f;
    for (int p = 0; p < count; p++) {
        Stats part = parts[p * stride];
        float d = part.max - all.max;
        d = d < -105.0f ? -105.0f : d;
        float scale = exp_as_cpu(d);
        all.sum_exp += times(scale, part.sum_exp);
        all.dot += times(scale, part.dot + times(d, part.sum_exp));
        all.target += part.target;
    }
    return all;
}
