// Whole pages of the machine's memory: what an emulated GPU gives out begins on pages of its own, each run ends close to one that
// cannot be touched, and what is given back is taken from the machine and never given out again.
#pragma once
#include <sys/mman.h>
#include <cstdlib>
#include <cstring>

namespace pages {

typedef unsigned long long u64;

constexpr u64 BYTES = 4096;
// Where runs begin: multiples of so many bytes.
constexpr u64 ALIGN = 256;
// Addresses are never given out twice, so that freed memory is known.
constexpr u64 REGION = 4ull << 40;
// Runs of as many bytes or more begin as zeros: of them only what is touched takes memory of the machine, so that tensors may be
// as large as those of real jobs.
constexpr u64 SPARSE = 256ull << 20;

// Addresses, or zeros where they may be read and written, that take memory only where they are touched.
inline void* reserve(u64 bytes, int protection) {
    void* at = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) std::abort();
    return at;
}

inline void* reserve_zeros(u64 bytes) { return reserve(bytes, PROT_READ | PROT_WRITE); }

// A region of addresses, taken from its begin on.
struct Region {
    u64 base = (u64)reserve(REGION, PROT_NONE), used = BYTES;

    // A run of at least one byte, or 0 where there is none; `first` and `count` are its pages, counted from the base.
    u64 take(u64 bytes, u64& first, u64& count) {
        first = used / BYTES, count = (bytes + ALIGN + BYTES - 1) / BYTES;
        if (used + (count + 1) * BYTES > REGION) return 0;
        u64 begin = base + used;
        if (mprotect((void*)begin, count * BYTES, PROT_READ | PROT_WRITE)) return 0;
        used += (count + 1) * BYTES;
        return (begin + count * BYTES - bytes) / ALIGN * ALIGN;
    }

    // The pages from that of a run's first byte on to that of its last are not touched any more.
    void give_back(u64 start, u64 bytes, u64& first, u64& count) {
        first = (start - base) / BYTES, count = (start + bytes - base + BYTES - 1) / BYTES - first;
        mprotect((void*)(base + first * BYTES), count * BYTES, PROT_NONE);
        madvise((void*)(base + first * BYTES), count * BYTES, MADV_DONTNEED);
    }
};

// What stands beside each cell of two bytes of given pages becomes zeros again.
template <class T> void forget(T* beside, u64 first, u64 count) {
    madvise(beside + first * BYTES / 2, count * BYTES / 2 * sizeof(T), MADV_DONTNEED);
}

// Sets bytes to 0; of a sparse run whole pages take no memory of the machine until they are touched again.
inline void clear(u64 address, u64 bytes) {
    u64 end = address + bytes, first = (address + BYTES - 1) / BYTES * BYTES, last = end / BYTES * BYTES;
    if (bytes < SPARSE) {
        std::memset((void*)address, 0, bytes);
        return;
    }
    std::memset((void*)address, 0, first - address);
    madvise((void*)first, last - first, MADV_DONTNEED);
    std::memset((void*)last, 0, end - last);
}

}  // namespace pages
