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

}  // namespace ptx
