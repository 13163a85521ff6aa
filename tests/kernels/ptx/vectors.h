// Operations on all lanes at once: loops that the compiler turns into vectors.
#pragma once
#include "run.h"

#include <immintrin.h>
#include <cstring>

namespace ptx {

template <class D> inline void put(D* __restrict to, const D* __restrict from, u32 lanes) {
    for (int l = 0; l < LANES; l++) to[l] = lanes >> l & 1 ? from[l] : to[l];
}

// O::of(a) for each lane. Results and operands of other widths have places of their own: see registers.cpp.
template <class D, class A, class O> __attribute__((noinline)) void one(Warp& w, const Instruction& i, u32 lanes) {
    const A* a = w.in<A>(i.at[1]);
    D* d = w.out<D>(i.at[0]);
    D t[LANES];
    for (int l = 0; l < LANES; l++) t[l] = O::of(a[l]);
    if (lanes == ALL) std::memcpy(d, t, sizeof t);
    else put(d, t, lanes);
}

template <class D, class A, class B, class O> __attribute__((noinline)) void two(Warp& w, const Instruction& i, u32 lanes) {
    const A* a = w.in<A>(i.at[1]);
    const B* b = w.in<B>(i.at[2]);
    D* d = w.out<D>(i.at[0]);
    D t[LANES];
    for (int l = 0; l < LANES; l++) t[l] = O::of(a[l], b[l]);
    if (lanes == ALL) std::memcpy(d, t, sizeof t);
    else put(d, t, lanes);
}

template <class D, class A, class B, class C, class O>
__attribute__((noinline)) void three(Warp& w, const Instruction& i, u32 lanes) {
    const A* a = w.in<A>(i.at[1]);
    const B* b = w.in<B>(i.at[2]);
    const C* c = w.in<C>(i.at[3]);
    D* d = w.out<D>(i.at[0]);
    D t[LANES];
    for (int l = 0; l < LANES; l++) t[l] = O::of(a[l], b[l], c[l]);
    if (lanes == ALL) std::memcpy(d, t, sizeof t);
    else put(d, t, lanes);
}

// A bit for each lane whose number is not 0 (0 or -1).
inline u32 bits_of_lanes(const i32* all) {
    u32 bits = 0;
    for (int k = 0; k < 4; k++) {
        __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(all + 8 * k));
        bits |= (u32)_mm256_movemask_ps(_mm256_castsi256_ps(eight)) << 8 * k;
    }
    return bits;
}

inline void set_predicate(Warp& w, i32 place, u32 bits, u32 lanes) {
    u32* p = w.out<u32>(place);
    *p = (*p & ~lanes) | (bits & lanes);
}

// 2^x by a series around the nearest integer, in more bits than f32 has; for NaN a number.
inline double wide_exp2(float x) {
    constexpr double MAGIC = 6755399441055744.0;
    double wide = x < -200.0f ? -200.0 : x > 200.0f ? 200.0 : (double)x;
    double rounded = wide + MAGIC;
    i64 bits;
    std::memcpy(&bits, &rounded, 8);
    double f = (wide - (rounded - MAGIC)) * 0.693147180559945309417;
    double p = 1.0 / 479001600.0;
    constexpr double OF[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                             1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0,        1.0};
    for (double c : OF) p = __builtin_fma(p, f, c);
    i64 power = (bits << 52) + (1023ll << 52);
    double scale;
    std::memcpy(&scale, &power, 8);
    return p * scale;
}

}  // namespace ptx
