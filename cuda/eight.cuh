// Eight neighbouring values of a row in registers as f32, from and to bf16 (one access of 16 bytes) or f32 (two).
#pragma once
#include "common.cuh"

DEVICE void widen(const Eight& from, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) x[2 * i] = low_of(from.pair[i]), x[2 * i + 1] = high_of(from.pair[i]);
}

DEVICE Eight narrow(const float (&x)[8]) {
    Eight to;
#pragma unroll
    for (int i = 0; i < 4; i++) to.pair[i] = pack(x[2 * i], x[2 * i + 1]);
    return to;
}

// One access: through a reference the compiler would read word by word.
DEVICE Eight load_eight(const bf16* from) {
    Eight whole = *(const Eight*)from;
    return whole;
}

DEVICE void load_eight(const bf16* from, float (&x)[8]) { widen(load_eight(from), x); }

DEVICE void load_eight(const float* from, float (&x)[8]) {
    Four low = ((const Four*)from)[0], high = ((const Four*)from)[1];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = low.at[i], x[4 + i] = high.at[i];
}

DEVICE void store_eight(bf16* to, const float (&x)[8]) { *(Eight*)to = narrow(x); }

DEVICE void store_eight(float* to, const float (&x)[8]) {
    ((Four*)to)[0] = Four{{x[0], x[1], x[2], x[3]}};
    ((Four*)to)[1] = Four{{x[4], x[5], x[6], x[7]}};
}

// The first `count` of eight values; one by one where they are fewer or do not begin at a multiple of 16 bytes. The others
// are 0, or stay as they are in memory.
template <class T> DEVICE void load_up_to(const T* from, int count, bool aligned, float (&x)[8]) {
    if (count == 8 && aligned) return load_eight(from, x);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = i < count ? load(from + i) : 0.0f;
}

template <class T> DEVICE void store_up_to(T* to, int count, bool aligned, const float (&x)[8]) {
    if (count == 8 && aligned) return store_eight(to, x);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i < count) store(to + i, x[i]);
    }
}

// The same of four values, for runs of f32: lanes that take eight would leave every other 16 bytes to the next access.
DEVICE void load_up_to(const float* from, int count, bool aligned, float (&x)[4]) {
    if (count == 4 && aligned) {
        const Four four = *(const Four*)from;
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = four.at[i];
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = i < count ? from[i] : 0.0f;
}

DEVICE void store_up_to(float* to, int count, bool aligned, const float (&x)[4]) {
    if (count == 4 && aligned) {
        *(Four*)to = Four{{x[0], x[1], x[2], x[3]}};
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i < count) to[i] = x[i];
    }
}

DEVICE void store_up_to(bf16* to, int count, bool aligned, const float (&x)[4]) {
    if (count == 4 && aligned) {
        *(u64*)to = (u64)pack(x[2], x[3]) << 32 | pack(x[0], x[1]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i < count) store(to + i, x[i]);
    }
}

// Whether a pointer is aligned to 16 bytes.
DEVICE bool is_aligned(const void* at) { return ((u64)at & 15) == 0; }

// Of eight values at `at`, how many lie below `len`.
DEVICE int eight_or_rest(u64 at, u64 len) { return len - at < 8 ? (int)(len - at) : 8; }

// The same of four.
DEVICE int four_or_rest(u64 at, u64 len) { return at >= len ? 0 : len - at < 4 ? (int)(len - at) : 4; }

// The first of this thread's eight values, where threads of the grid share out a flat run.
DEVICE u64 flat_eight() { return ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8; }
