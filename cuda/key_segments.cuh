// Runs: where all kernels of attention cut a row's keys, so that several blocks of threads can work on one row.
//
// Cuts lie at multiples of RUN keys, counted from the start of the sequence. A run is a chain of its own (flash.cuh), from no
// maximum, sum 0 and result 0. Runs are joined in ascending order, in f32, the sum of a run taken over its lanes before:
//   m' = max(m, m1)   a = 2^((m - m') scale)   b = 2^((m1 - m') scale)
//   l = fma(l, a, l1 b)   o = fma(o, a, o1 b)
// A run of which a row sees nothing leaves it as it was, and to begin with nothing leaves the first run as it is. So the bits of a
// row depend neither on whether one block walks all runs or each has its own, nor on which other rows are computed.
#pragma once
#include "common.cuh"

#define RUN 4096
// Below every score, and finite, so that the lowest less the lowest is 0.
#define LOWEST -1.0e30f

// Two neighbours in memory.
struct alignas(8) Both {
    float at[2];
};

// A row of results that runs leave for later ones: its columns, then maximum and sum.
template <int E> struct Held {
    static constexpr int STRIDE = E + 8;
};

// What a row has when a run is joined to it, and the factors of its result and of the run's.
struct Join {
    float max, sum, keeps, takes;
};

DEVICE Join join(float max, float sum, float run_max, float run_sum, float scale) {
    float top = fmaxf(max, run_max);
    float keeps = exp2_fast((max - top) * scale), takes = exp2_fast((run_max - top) * scale);
    return Join{top, fmaf(sum, keeps, times(run_sum, takes)), keeps, takes};
}

DEVICE float joined(const Join& join, float o, float run) { return fmaf(o, join.keeps, times(run, join.takes)); }

// The sum of a row, whose parts are in four lanes.
DEVICE float sum_of_lanes(float sum) {
    sum += shuffle_xor(sum, 1);
    return sum + shuffle_xor(sum, 2);
}

// Joins a run of a warp's sixteen rows, lane / 4 and that + 8, to those before it, which lie at `held`; null: a row that is not
// there.
template <int E>
DEVICE void join_held(float (&o)[E / 8][4], float (&max)[2], float (&sum)[2], float* const (&held)[2], float scale) {
    Join both[2];
    for (int i = 0; i < 2; i++) {
        Both before = held[i] ? *(const Both*)(held[i] + E) : Both{{LOWEST, 0.0f}};
        both[i] = join(before.at[0], before.at[1], max[i], sum_of_lanes(sum[i]), scale);
        max[i] = both[i].max;
        sum[i] = lane_id() % 4 == 0 ? both[i].sum : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < E / 8; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Both before = {{0.0f, 0.0f}};
            if (held[i]) before = *(const Both*)(held[i] + lane_id() % 4 * 2 + n * 8);
            o[n][2 * i] = joined(both[i], before.at[0], o[n][2 * i]);
            o[n][2 * i + 1] = joined(both[i], before.at[1], o[n][2 * i + 1]);
        }
        // The compiler would read all at once, into registers that are not there.
        if (n % 4 == 3) SYNC_WARP();
    }
}

// Leaves what the rows have for the runs that follow.
template <int E>
DEVICE void hold(const float (&o)[E / 8][4], const float (&max)[2], const float (&sum)[2], float* const (&held)[2]) {
    int lane = lane_id();
    for (int i = 0; i < 2; i++) {
        float all = sum_of_lanes(sum[i]);
        if (!held[i]) continue;
        if (lane % 4 == 0) *(Both*)(held[i] + E) = Both{{max[i], all}};
#pragma unroll
        for (int n = 0; n < E / 8; n++) {
            *(Both*)(held[i] + lane % 4 * 2 + n * 8) = Both{{o[n][2 * i], o[n][2 * i + 1]}};
        }
    }
}
