// A GPU played on the CPU, for tests: each thread of a block is a fiber, blocks run one after another, and the lanes of a warp
// meet at every instruction that needs all of them. Faults that a GPU would hide are errors here: threads that wait for
// others that never come, reads of shared memory that nobody wrote (it is filled with NaN before each block), copies that were
// not waited for. The order in which fibers run can be chosen, since some missing barriers show in some orders only.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
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
// Variables of a block: in a section of their own, so that they can be found and filled before each block.
#define SHARED static __attribute__((section("emulated_shared"), aligned(128)))
#define DYNAMIC_SHARED(name) u8* name = emulated::dynamic_shared()
#define SYNC_BLOCK() emulated::sync_block()
#define SYNC_WARP() emulated::sync_warp()
// Defines a kernel, and an entry by which the host finds and starts it.
#define KERNEL extern "C" void

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulated {

struct Here {
    dim3 grid, block_dim, block, thread;
};
extern Here here;

u8* dynamic_shared();
void sync_block();
void sync_warp();
int lane();
int warp_base();

// Leaves `bytes` for the lanes of this warp, waits until all have come to the same operation, and lets `read` look at what
// they left.
void* slot(int thread);
void meet(const char* operation, int detail);
void leave(const char* operation);

template <class T> T shuffle(T x, int from) {
    static_assert(sizeof(T) <= 64, "a slot holds 64 bytes");
    std::memcpy(slot(warp_base() + lane()), &x, sizeof x);
    meet("shuffle", 0);
    T y;
    std::memcpy(&y, slot(warp_base() + (from & 31)), sizeof y);
    leave("shuffle");
    return y;
}

template <class T> T shuffle_xor(T x, int lanes) { return shuffle(x, lane() ^ lanes); }

void mma(float* d, const u32* a, const u32* b);
void load_matrices(u32* r, const void* row, bool transposed);
template <int N, bool TRANSPOSED> void load_matrices(u32 (&r)[N], const void* row) {
    static_assert(N == 4, "four matrices at a time");
    load_matrices(static_cast<u32*>(r), row, TRANSPOSED);
}

void copy_async(void* to, const void* from, bool valid);
void copy_commit();
void copy_wait(int pending);

// What a test says of a kernel's parameters: pointer, integer or floating point, and its size.
struct Parameter {
    u32 kind, bytes;
};
template <class T> constexpr Parameter parameter() {
    return {std::is_pointer<T>::value ? 0u : std::is_floating_point<T>::value ? 2u : 1u, (u32)sizeof(T)};
}

// A kernel as the host finds it.
struct Entry {
    const char* name;
    u32 parameters;
    const Parameter* types;
    void (*start)(void** arguments);
    const Entry* next;
};
extern const Entry* entries;

template <class... A> struct Signature {
    static constexpr Parameter types[] = {parameter<A>()..., {0, 0}};
    template <void (*KERNEL_)(A...), size_t... I> static void start(void** arguments, std::index_sequence<I...>) {
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

#define threadIdx (emulated::here.thread)
#define blockIdx (emulated::here.block)
#define blockDim (emulated::here.block_dim)
#define gridDim (emulated::here.grid)

inline float exp2_emulated(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
