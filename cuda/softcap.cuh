// Soft caps: y = c tanh(x / c) (arXiv:2408.00118, section 2), for logits (softcap.cu) and scores of attention.
#pragma once
#include "common.cuh"

// tanh(x), the rational function of src/device/cpu/exp.rs: to about 6 units in the last place. NaN stays NaN.
DEVICE float tanh_of(float x) {
    const float one = 7.905311f;
    x = x < -one ? -one : x;
    x = x > one ? one : x;
    const float square = times(x, x);
    float p = -2.7607687e-16f, q = 1.1982584e-6f;
    p = fmaf(p, square, 2.000188e-13f);
    p = fmaf(p, square, -8.604672e-11f);
    p = fmaf(p, square, 5.122297e-8f);
    p = fmaf(p, square, 1.4857224e-5f);
    p = fmaf(p, square, 6.3726195e-4f);
    p = fmaf(p, square, 4.8935246e-3f);
    q = fmaf(q, square, 1.1853471e-4f);
    q = fmaf(q, square, 2.2684345e-3f);
    q = fmaf(q, square, 4.893525e-3f);
    return times(times(x, p), reciprocal_fast(q));
}

// `inverse`: 1 / cap, by reciprocal_fast: a division would need more registers.
DEVICE float capped(float x, float cap, float inverse) { return times(cap, tanh_of(times(x, inverse))); }

// The factor on a slope, 1 - (y / c)^2, from y / c. It is 0 where y is -inf or not a number, as in masked columns.
DEVICE float cap_slope(float of_cap) { return fmaxf(fmaf(-of_cap, of_cap, 1.0f), 0.0f); }

// Caps a warp's scores, all in the same order of operations wherever they are computed.
template <int N> DEVICE void cap_scores(float (&s)[N][4], float cap) {
    const float inverse = reciprocal_fast(cap);
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = capped(s[n][i], cap, inverse);
        // Otherwise the compiler would compute all at once and spill registers.
        SYNC_WARP();
    }
}
