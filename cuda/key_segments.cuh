// Key segments (runs): all attention kernels split a row's keys at the same bounds, so that several blocks of threads
// can work on one row.
//
// Bounds are multiples of RUN keys from the start of the sequence. Each run is a separate chain (flash.cuh), with no
// maximum, sum 0 and result 0 at its start. The sum of a run is first added over its lanes. Runs are combined in
// ascending order:
//   m' = max(m, m1)   a = 2^((m - m') scale)   b = 2^((m1 - m') scale)
//   l = fma(l, a, l1 b)   o = fma(o, a, o1 b)
// A fully masked run does not change a row, and combining the first run with the empty state does not change the run.
// So the bits of a row depend neither on the distribution of runs over blocks, nor on the other rows.
#pragma once
#include "common.cuh"

#define RUN 4096
// Below every score, and finite, so that LOWEST - LOWEST is 0.
#define LOWEST -1.0e30f

// Two neighbours in memory.
struct alignas(8) Both {
    float at[2];
};

// A row of results between runs: its columns, then maximum and sum.
template <int E> struct Held {
    static constexpr int STRIDE = E + 8;
};

// The state of a row after a run is combined with it, and the factors of the old result and of the run's.
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

// Combines a run of a warp's sixteen rows, lane / 4 and lane / 4 + 8, with the earlier runs at `held`; null: no such
// row.
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
        // Otherwise the compiler would load all at once and spill registers.
        if (n % 4 == 3) SYNC_WARP();
    }
}

// Stores the rows' state for later runs.
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
