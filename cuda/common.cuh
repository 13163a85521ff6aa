// Code that all kernels share: types, bf16, warp and block sums in one fixed order, and a function for each instruction
// of tensor cores and asynchronous copies.
//
// One source, three builds: nvcc, NVRTC (without headers), and g++ with tests/kernels/emulation, which emulates a GPU
// on the CPU (EMULATED). So nothing here uses CUDA's headers, and only this file has inline PTX.
#pragma once

#ifdef EMULATED
#include "emulate.h"
#else
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
#define KERNEL extern "C" __global__ void
#define DEVICE static __device__ __forceinline__
#define SHARED __shared__
// Dynamic shared memory, with the alignment of wgmma operands.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) u8 name[]
#define SYNC_BLOCK() __syncthreads()
#define SYNC_WARP() __syncwarp()
#endif

#define WARP 32
#define ALL_LANES 0xffffffffu

// ---- bf16: the upper half of an f32 ----

struct bf16 {
    u16 bits;
};

#ifdef EMULATED
DEVICE u32 bits_of(float x) { u32 u; __builtin_memcpy(&u, &x, 4); return u; }
DEVICE float float_of(u32 u) { float x; __builtin_memcpy(&x, &u, 4); return x; }
#else
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 u) { return __uint_as_float(u); }
#endif

DEVICE float infinity() { return float_of(0x7f800000u); }

DEVICE float to_f32(bf16 x) { return float_of((u32)x.bits << 16); }

// Nearest, ties to even; NaN stays NaN.
DEVICE bf16 to_bf16(float x) {
    u32 u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{(u16)((u >> 16) | 0x40u)};
    return bf16{(u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

// Two bf16 in a register, the first in the lower half.
DEVICE u32 pack(float low, float high) {
#ifdef EMULATED
    return (u32)to_bf16(low).bits | (u32)to_bf16(high).bits << 16;
#else
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

DEVICE float low_of(u32 pair) { return float_of(pair << 16); }
DEVICE float high_of(u32 pair) { return float_of(pair & 0xffff0000u); }

// The products of two pairs, each rounded once.
DEVICE u32 times_pair(u32 a, u32 b) {
#ifdef EMULATED
    return pack(low_of(a) * low_of(b), high_of(a) * high_of(b));
#else
    // The sum with -0 changes nothing; a product alone needs sm_90.
    u32 pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(0x80008000u));
    return pair;
#endif
}

// Sixteen bytes at once: eight bf16.
struct alignas(16) Eight {
    u32 pair[4];
};
struct alignas(16) Four {
    float at[4];
};

// In one store: compilers may split the copy of a struct in registers.
DEVICE void store(bf16* to, const Eight& x) {
#ifdef EMULATED
    *(Eight*)to = x;
#else
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(to)), "r"(x.pair[0]),
                 "r"(x.pair[1]), "r"(x.pair[2]), "r"(x.pair[3]) : "memory");
#endif
}

DEVICE float load(const float* x) { return *x; }
DEVICE float load(const bf16* x) { return to_f32(*x); }
DEVICE void store(float* to, float x) { *to = x; }
DEVICE void store(bf16* to, float x) { *to = to_bf16(x); }

// ---- arithmetic ----

// 2^x, to about 2 units in the last place; denormal results are 0.
DEVICE float exp2_fast(float x) {
#ifdef EMULATED
    return exp2_emulated(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// log2(x), to about 2^-22, absolute or relative; -inf for denormal x.
DEVICE float log2_fast(float x) {
#ifdef EMULATED
    return log2_emulated(x);
#else
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// 1 / x, to 1 unit in the last place; denormal results are 0.
DEVICE float reciprocal_fast(float x) {
#ifdef EMULATED
    return 1.0f / x;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// A product that is rounded before an addition: otherwise compilers fuse the two in some places and not in others.
DEVICE float times(float a, float b) {
#ifdef EMULATED
    return a * b;
#else
    return __fmul_rn(a, b);
#endif
}

DEVICE double times(double a, double b) {
#ifdef EMULATED
    return a * b;
#else
    return __dmul_rn(a, b);
#endif
}

// 1 / sqrt(x), to 2 units in the last place.
DEVICE float inverse_sqrt(float x) {
#ifdef EMULATED
    return 1.0f / sqrtf(x);
#else
    return rsqrtf(x);
#endif
}

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

// ---- lanes of a warp, warps of a block ----

#ifdef EMULATED
template <class T> DEVICE T shuffle_xor(T x, int lanes) { return emulated::shuffle_xor(x, lanes); }
template <class T> DEVICE T shuffle(T x, int lane) { return emulated::shuffle(x, lane); }
#else
template <class T> DEVICE T shuffle_xor(T x, int lanes) { return __shfl_xor_sync(ALL_LANES, x, lanes); }
template <class T> DEVICE T shuffle(T x, int lane) { return __shfl_sync(ALL_LANES, x, lane); }
#endif

// Whether `x` holds in any lane of the warp.
DEVICE bool any_lane(bool x) {
#ifdef EMULATED
    u32 any = x;
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) any |= shuffle_xor(any, lanes);
    return any;
#else
    return __any_sync(ALL_LANES, x);
#endif
}

// Whether products with these factors of the warp's rows change anything. A running maximum seldom grows, and then all
// factors are exactly 1.
template <int M> DEVICE bool any_not_one(const float (&by)[M][2]) {
    bool differs = false;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) differs |= by[i / 2][i % 2] != 1.0f;
    return any_lane(differs);
}

DEVICE int lane_id() { return threadIdx.x % WARP; }
DEVICE int warp_id() { return threadIdx.x / WARP; }

// The sum over the warp, in all lanes, always in the same order.
DEVICE float warp_sum(float x) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
}

DEVICE float warp_max(float x) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) x = fmaxf(x, shuffle_xor(x, lanes));
    return x;
}

// The sum over a block of up to 1024 threads (whole warps), in all threads; `room` holds 33 floats in shared memory.
DEVICE float block_sum(float x, float* room) {
    x = warp_sum(x);
    if (lane_id() == 0) room[warp_id()] = x;
    SYNC_BLOCK();
    if (warp_id() == 0) {
        float all = lane_id() < (int)blockDim.x / WARP ? room[lane_id()] : 0.0f;
        all = warp_sum(all);
        if (lane_id() == 0) room[WARP] = all;
    }
    SYNC_BLOCK();
    float sum = room[WARP];
    SYNC_BLOCK();
    return sum;
}

// ---- tensor cores: d (16,8) f32 += a (16,16) b (16,8), bf16; fragments as in the PTX ISA, mma.m16n8k16 ----
//
// With g = lane / 4 and q = lane % 4: a[0] = A[g][2q..], a[1] = A[g+8][2q..], a[2] = A[g][2q+8..], a[3] = A[g+8][2q+8..];
// b[0] = B[2q..][g], b[1] = B[2q+8..][g]; d[0], d[1] = D[g][2q], D[g][2q+1]; d[2], d[3] = D[g+8][2q], D[g+8][2q+1].

DEVICE void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef EMULATED
    emulated::mma(d, a, b);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// ---- tensor cores of sm_90a: d (64, N) f32 += a (64, 16) b (16, N), by four warps together ----
//
// Each output has the bits of a chain of `mma`: observed on an H200 for all of 156,000 sums over 4,096 values. Warp w
// of the four has rows 16 w.., and d[j] of a lane the columns 8 j.. as in an `mma`. Operands are read from shared
// memory asynchronously, between wgmma_begin and wgmma_wait.
#if !defined(EMULATED) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA

// The descriptor of an operand: lines of 128 bytes whose 16-byte chunks are permuted by line % 8, eight lines aligned
// to 1024 bytes. Either a line is a row with values of s; or a line is one s with 64 rows, and the lines of the next 64
// rows are `WGMMA_BLOCK` bytes further (ACROSS).
#define WGMMA_BLOCK 8192
DEVICE u64 wgmma_factor(const void* at) {
    constexpr u64 NEXT_ROWS = WGMMA_BLOCK / 16, NEXT_LINES = 1024 / 16, TURNED_BY_8 = 1;
    return ((u64)__cvta_generic_to_shared(at) & 0x3ffff) / 16 | NEXT_ROWS << 16 | NEXT_LINES << 32 | TURNED_BY_8 << 62;
}

// Makes this thread's writes to shared memory visible to the tensor cores, after a barrier.
DEVICE void wgmma_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING groups are in flight.
template <int PENDING> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

template <int A_ACROSS, int B_ACROSS> DEVICE void wgmma(float (&d)[4][4], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, 1, 1, 1, %18, %19;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
          "+f"(d[3][2]), "+f"(d[3][3])
        : "l"(a), "l"(b), "n"(A_ACROSS), "n"(B_ACROSS));
}

template <int A_ACROSS, int B_ACROSS> DEVICE void wgmma(float (&d)[16][4], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, 1, 1, 1, %66, %67;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
          "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
          "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]),
          "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]),
          "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]),
          "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),
          "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "l"(a), "l"(b), "n"(A_ACROSS), "n"(B_ACROSS));
}
#endif

// Four 8x8 matrices of bf16 from shared memory: lane l names row l % 8 of matrix l / 8 (16 bytes, aligned to 16); lane l
// receives of each matrix row l / 4, columns 2 (l % 4) and the next.
DEVICE void load_matrices(u32 (&r)[4], const void* row) {
#ifdef EMULATED
    emulated::load_matrices<4, false>(r, row);
#else
    u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
#endif
}

// The same, each matrix transposed: lane l receives column l / 4, rows 2 (l % 4) and the next.
DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row) {
#ifdef EMULATED
    emulated::load_matrices<4, true>(r, row);
#else
    u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
#endif
}

// ---- asynchronous copies to shared memory, of 16, 8 or 4 bytes ----

// Both aligned to the size; writes zeros if `valid` is false (then `from` is not read and may be any address).
template <int BYTES = 16> DEVICE void copy_async(void* to, const void* from, bool valid) {
#ifdef EMULATED
    emulated::copy_async(to, from, valid, BYTES);
#else
    u32 at = (u32)__cvta_generic_to_shared(to), bytes = valid ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
    }
#endif
}

// Ends a group of this thread's copies.
DEVICE void copy_commit() {
#ifdef EMULATED
    emulated::copy_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `PENDING` of this thread's newest groups are in flight. Other threads see the data after
// SYNC_BLOCK.
template <int PENDING> DEVICE void copy_wait() {
#ifdef EMULATED
    emulated::copy_wait(PENDING);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---- blocks of one launch that wait for each other ----
//
// A block may wait for blocks with a lower number: they have started, and none of them waits for it.

// A unique number for each block, ascending from 0 in the order of calls.
DEVICE u32 take_number(u32* count) {
#ifdef EMULATED
    return emulated::take_number(count);
#else
    u32 number;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(number) : "l"(count) : "memory");
    return number;
#endif
}

// Stores x. A block that reads it also sees, after its own barrier, this block's writes before its last barrier.
DEVICE void store_release(u32* to, u32 x) {
#ifdef EMULATED
    emulated::store_release(to, x);
#else
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
#endif
}

// Loads the value of another block's `store_release`.
DEVICE u32 load_acquire(const u32* from) {
#ifdef EMULATED
    return emulated::load_acquire(from);
#else
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
#endif
}

// A pause between two loads while waiting for another block.
DEVICE void pause() {
#ifdef EMULATED
    emulated::pause();
#else
    asm volatile("nanosleep.u32 64;" ::: "memory");
#endif
}

// Adds in memory without returning the old value, so no thread waits.
DEVICE void add_in_memory(float* to, float x) {
#ifdef EMULATED
    *to += x;
#else
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
#endif
}
