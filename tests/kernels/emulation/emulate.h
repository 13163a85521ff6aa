// A GPU emulated on the CPU, for tests: each thread of a block is a fiber, and the lanes of a warp synchronise at every
// instruction that needs all of them. Errors that a GPU would hide are reported with the block, the thread and the line:
// - accesses outside an allocation, of freed memory, beyond the requested shared memory, or not aligned;
// - races: two threads access the same bytes without a barrier, in shared or global memory and in any order; or two
//   blocks do without a synchronisation;
// - accesses to bytes that a pending copy writes;
// - lanes of a warp that diverge, and threads that wait for others for ever;
// - uninitialised reads: memory and shared memory are initialised with NaN.
//
// Kernels are compiled with the compiler's hooks for every load and store (-fsanitize=thread), which memory.cpp answers.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef int32_t i32;
typedef long long i64;

#define DEVICE static inline __attribute__((always_inline, unused))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define KERNEL extern "C" void
// `SHARED float room[33];` is rewritten before it is compiled: see `SHARED_VARIABLE` and tests/kernels/emulation.rs.
#define SHARED_VARIABLE(type, name) type& name = *static_cast<type*>(emulated::shared_variable(#name, sizeof(type)))
#define DYNAMIC_SHARED(name) u8* name = emulated::dynamic_shared()
#define SYNC_BLOCK() emulated::sync_block()
#define SYNC_WARP() emulated::sync_warp()

struct dim3 {
    unsigned x, y, z;
};

namespace emulated {

// The index of the running fiber along x, y and z. `const` functions: the value never changes during a fiber's life, so
// compilers call them once. (They return one number each, as compilers do not cache larger values.)
__attribute__((const)) unsigned thread_x();
__attribute__((const)) unsigned threads_x();
__attribute__((const)) unsigned block_along(int axis);
__attribute__((const)) unsigned blocks_along(int axis);

void* shared_variable(const char* name, size_t bytes);
u8* dynamic_shared();
void sync_block();
void sync_warp();

// Instructions pass values in registers, so that a kernel's fragments need not be in memory.
typedef float F4 __attribute__((vector_size(16)));
typedef u32 U4 __attribute__((vector_size(16)));

u64 shuffle_bits(u64 bits, int from);
u64 shuffle_xor_bits(u64 bits, int lanes);
F4 mma_values(F4 d, U4 a, u64 b);
U4 load_matrices_values(const void* row, bool transposed);

void copy_async(void* to, const void* from, bool valid, size_t bytes);
void copy_commit();
void copy_wait(int pending);

u32 take_number(u32* count);
void store_release(u32* to, u32 x);
u32 load_acquire(const u32* from);
void pause();

template <u64 (*MOVED)(u64, int), class T> T moved(T x, int by) {
    static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
    u64 bits = 0;
    std::memcpy(&bits, &x, sizeof x);
    bits = MOVED(bits, by);
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
template <class T> T shuffle(T x, int from) { return moved<shuffle_bits>(x, from); }
template <class T> T shuffle_xor(T x, int lanes) { return moved<shuffle_xor_bits>(x, lanes); }

inline __attribute__((always_inline)) void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    F4 sum = mma_values(F4{d[0], d[1], d[2], d[3]}, U4{a[0], a[1], a[2], a[3]}, b[0] | (u64)b[1] << 32);
    for (int i = 0; i < 4; i++) d[i] = sum[i];
}

template <int N, bool TRANSPOSED> inline __attribute__((always_inline)) void load_matrices(u32 (&r)[N], const void* row) {
    static_assert(N == 4, "four matrices at a time");
    U4 loaded = load_matrices_values(row, TRANSPOSED);
    for (int i = 0; i < 4; i++) r[i] = loaded[i];
}

// A parameter of a kernel.
struct Parameter {
    u32 bytes;
    bool is_address;
};
template <class T> constexpr Parameter parameter() {
    return {(u32)sizeof(T), std::is_pointer<T>::value};
}

// The host's description of a kernel.
struct Entry {
    const char* name;
    u32 parameters;
    const Parameter* types;
    void (*start)(void** arguments);
    const Entry* next;
};
extern const Entry* entries;

template <class... A> struct Signature {
    static constexpr Parameter types[] = {parameter<A>()..., {0, false}};
    // Without hooks: arguments lie in the host's memory.
    template <void (*KERNEL_)(A...), size_t... I>
    __attribute__((no_sanitize("thread"))) static void start(void** arguments, std::index_sequence<I...>) {
        KERNEL_(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
    }
    template <void (*KERNEL_)(A...)> static void start(void** arguments) {
        start<KERNEL_>(arguments, std::index_sequence_for<A...>{});
    }
};
template <class... A> constexpr Parameter Signature<A...>::types[];

template <auto K> struct Registered;
template <class... A, void (*K)(A...)> struct Registered<K> {
    Entry entry;
    explicit Registered(const char* name)
        : entry{name, sizeof...(A), Signature<A...>::types, &Signature<A...>::template start<K>, entries} {
        entries = &entry;
    }
};

}  // namespace emulated

#define threadIdx (dim3{emulated::thread_x(), 0, 0})
#define blockDim (dim3{emulated::threads_x(), 1, 1})
#define blockIdx (dim3{emulated::block_along(0), emulated::block_along(1), emulated::block_along(2)})
#define gridDim (dim3{emulated::blocks_along(0), emulated::blocks_along(1), emulated::blocks_along(2)})

inline float exp2_emulated(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
inline float log2_emulated(float x) { return log2f(x < 0x1p-126f && x >= 0.0f ? 0.0f : x); }
