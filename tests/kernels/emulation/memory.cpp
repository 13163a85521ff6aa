// Memory of the emulated GPU, and the compiler's hooks, which every load and store of a kernel calls.
//
// Each run begins on pages of its own and ends close to a page that cannot be touched. Freed runs are unmapped and their
// addresses are never reused, so accesses to freed memory are detected.
#include "state.h"

#include <sys/mman.h>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>

namespace emulated {

struct Allocation {
    u64 start, end;
    bool live;
};

constexpr u64 REGION = 4ull << 40;
// The alignment of runs in bytes.
constexpr u64 ALIGN = 256;
// Runs of this size or more begin as zeros. Only touched pages use memory of the machine, so that tensors may be as
// large as those of real jobs.
constexpr u64 SPARSE = 256ull << 20;

// The record pages of smaller runs are mapped at the start: a page that is read before it is written is mapped twice,
// and the second time stops all threads.
constexpr u64 POPULATED = 4ull << 20;

// Reserved addresses, or writable zeros that use memory only once touched.
template <class T> T* reserve(u64 count, int protection = PROT_READ | PROT_WRITE) {
    void* at = mmap(nullptr, count * sizeof(T), protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) std::abort();
    return static_cast<T*>(at);
}

// One range of addresses for all memory, used from its start, two records for every two bytes of it, and the allocation
// of each page.
struct Region {
    const u64 base = (u64)reserve<u8>(REGION, PROT_NONE);
    u64 used = PAGE;
    Record *writes = reserve<Record>(REGION / 2), *reads = reserve<Record>(REGION / 2);
    u32* owners = reserve<u32>(REGION / PAGE);
    std::mutex one;
    std::deque<Allocation> allocations{{0, 0, false}};
};

namespace {

Region& region() {
    static Region* region = new Region;
    return *region;
}

// The error for a GPU address outside all allocations.
[[noreturn]] void outside(const char* did, u64 address, size_t bytes, const void* at) {
    Region& r = region();
    const Allocation* nearest = nullptr;
    u64 best = ~0ull;
    for (const Allocation& a : r.allocations) {
        u64 distance = address < a.start ? a.start - address : address < a.end ? 0 : address - a.end;
        if (a.end && distance < best) best = distance, nearest = &a;
    }
    if (!nearest) fail(at, "%s of %zu bytes at %#llx: no memory was allocated", did, bytes, address);
    u64 size = nearest->end - nearest->start;
    if (address < nearest->start) {
        fail(at, "%s of %zu bytes, %llu before an allocation of %llu", did, bytes, nearest->start - address, size);
    }
    fail(at, "%s of %zu bytes at byte %llu of %s of %llu", did, bytes, address - nearest->start,
         nearest->live ? "an allocation" : "freed memory", size);
}

// In whole jobs only addresses are checked. Tests of single kernels check races.
const bool is_order_checked = !std::getenv("EMULATED_ADDRESSES_ONLY");

// The records of an access; null for a fiber's own stack and for constants.
struct Place {
    Record *writes, *reads;
    bool shared;
};

// Sizes are constants in the hooks, so the compiler inlines all of this into each hook.
#define INLINE inline __attribute__((always_inline))

bool within_a_variable(const State& s, u64 address, size_t bytes) {
    for (const Variable& v : s.variables) {
        if (address >= (u64)v.start && address + bytes <= (u64)v.end) return true;
    }
    return false;
}

INLINE Place find(State& s, const char* did, u64 address, size_t bytes, const void* at) {
    u64 in_arena = address - (u64)s.arena;
    if (in_arena < ARENA) {
        bool dynamic = address >= (u64)s.dynamic.start && address + bytes <= (u64)s.dynamic.end;
        if (!dynamic && !within_a_variable(s, address, bytes)) fail_in_arena(s, did, address, bytes, at);
        return {s.writes + in_arena / 2, s.reads + in_arena / 2, true};
    }
    Region& r = *s.region;
    u64 in_region = address - r.base;
    if (in_region < REGION) {
        // Threads of a block often access one allocation repeatedly.
        if (address < s.recent_start || address + bytes > s.recent_end) {
            const Allocation& a = r.allocations[r.owners[in_region / PAGE]];
            if (address < a.start || address + bytes > a.end) outside(did, address, bytes, at);
            s.recent_start = a.start;
            s.recent_end = a.end;
        }
        return {r.writes + in_region / 2, r.reads + in_region / 2, false};
    }
    if (!of_the_library((const void*)address)) {
        fail(at, "%s of %zu bytes at %#llx, which is no address of the GPU", did, bytes, address);
    }
    return {nullptr, nullptr, false};
}

// Two accesses of one block: whether no barrier lies between them. A warp's barriers order its own lanes.
bool race(Record a, Record b) {
    Record x = a ^ b;
    if ((x & PHASE) || !(x & THREAD)) return false;
    return (x & WARP_OF_THREAD) || !(x & WARP_PHASE);
}

u32 serial_of(Record r) { return (u32)(r >> 32); }
int thread_of(Record r) { return (int)((r & THREAD) >> 2); }

// Same launch, another block, and no synchronisation with it. Each block has its own arena of shared memory.
bool foreign(const State& s, Record r, bool shared) {
    if (shared || serial_of(r) < s.launch->first_serial || serial_of(r) == s.serial) return false;
    return !ordered(s, serial_of(r), (r & PHASE) >> 20);
}

[[noreturn]] void clash(State& s, const char* did, Record other, const char* had, const void* at) {
    if (serial_of(other) != s.serial) {
        u64 block = s.launch->block_of(serial_of(other) - s.launch->first_serial);
        fail(at, "%s what another block, number %llu of the grid, %s in this launch", did, block, had);
    }
    fail(at, "%s what thread %d %s, with no barrier between", did, thread_of(other), had);
}

void check_last_write(State& s, const char* did, Record w, Record now, bool shared, const void* at) {
    if (serial_of(w) == s.serial) {
        if (w & UNDER_WAY) fail(at, "%s what a copy by thread %d is on its way to", did, thread_of(w));
        if (race(w, now)) clash(s, did, w, "wrote", at);
    } else if (foreign(s, w, shared)) {
        clash(s, did, w, "wrote", at);
    }
}

// Whether the reads are ordered before a write: in an earlier launch or block, or before a barrier.
INLINE bool are_done(const State& s, Record r, bool shared) {
    if (serial_of(r) == s.serial) return (r & PHASE) != s.phase << 20 && (shared || (r & KIND) != BY_BLOCKS);
    return shared || serial_of(r) < s.launch->first_serial;
}

// The readers that a cell records after one more read.
INLINE Record readers(State& s, Record r, Record now, bool shared) {
    if (are_done(s, r, shared)) return now;
    if (serial_of(r) != s.serial) return foreign(s, r, shared) ? (now | BY_BLOCKS) : now;
    if (!shared && (r & KIND) == BY_BLOCKS) return now | BY_BLOCKS;
    Record x = r ^ now;
    if ((r & KIND) == BY_WARPS || (x & WARP_OF_THREAD)) return now | BY_WARPS;
    if (x & WARP_PHASE) return now;
    return (r & KIND) == BY_LANES || (x & THREAD) ? now | BY_LANES : now;
}

void check_readers(State& s, Record r, Record now, bool shared, const void* at) {
    const char *did = "writes", *had = "reads";
    if (foreign(s, r, shared)) clash(s, did, r, had, at);
    if (serial_of(r) != s.serial) return;
    if ((r & KIND) == BY_BLOCKS) fail(at, "writes what another block reads in this launch");
    Record x = r ^ now;
    if (x & PHASE) return;
    if ((r & KIND) == BY_WARPS) fail(at, "writes what several warps read, with no barrier between");
    if ((r & KIND) == BY_LANES && !(x & WARP_OF_THREAD) && (x & WARP_PHASE)) return;
    if ((r & KIND) == BY_LANES) fail(at, "writes what lanes around thread %d read, with no barrier between", thread_of(r));
    if (race(r, now)) clash(s, did, r, had, at);
}

Record load(const Record* r) { return __atomic_load_n(r, __ATOMIC_RELAXED); }
void store(Record* r, Record x) { __atomic_store_n(r, x, __ATOMIC_RELAXED); }

// The usual cases: the last access was by this thread, in an earlier launch or block, or in this block before a
// barrier.
INLINE bool calm(const State& s, Record r, Record now, bool shared) {
    if (r == now) return true;
    if (r & KIND) return false;
    return (r ^ now) >> 20 && (shared || serial_of(r) == s.serial || serial_of(r) < s.launch->first_serial);
}

INLINE bool on_stack(const State& s, u64 address) { return address - (u64)s.stacks < STACKS; }

INLINE void seen_read(State& s, const void* address, size_t bytes, const void* at) {
    u64 from = (u64)address;
    if (on_stack(s, from)) return;
    Place p = find(s, "reads", from, bytes, at);
    // A cell has two bytes, of which two threads may use one each.
    if (!p.writes || bytes == 1 || !is_order_checked) return;
    Record now = s.stamp(s.current);
    size_t cells = (from + bytes + 1) / 2 - from / 2;
    for (size_t i = 0; i < cells; i++) {
        Record w = load(p.writes + i), r = load(p.reads + i);
        if (!calm(s, w, now, p.shared)) check_last_write(s, "reads", w, now, p.shared, at);
        if (r != now) store(p.reads + i, readers(s, r, now, p.shared));
    }
}

INLINE void seen_write(State& s, const void* address, size_t bytes, Record kind, const void* at) {
    u64 from = (u64)address;
    if (on_stack(s, from)) return;
    Place p = find(s, "writes", from, bytes, at);
    if (!p.writes) fail(at, "writes to a constant");
    if (bytes == 1 || !is_order_checked) return;
    Record now = s.stamp(s.current);
    size_t cells = (from + bytes + 1) / 2 - from / 2;
    for (size_t i = 0; i < cells; i++) {
        Record w = load(p.writes + i), r = load(p.reads + i);
        if (!calm(s, w, now, p.shared)) check_last_write(s, "writes", w, now, p.shared, at);
        if (r != now && !are_done(s, r, p.shared)) check_readers(s, r, now, p.shared, at);
        store(p.writes + i, now | kind);
    }
}

}  // namespace

void touch_read(const void* address, size_t bytes, const void* at) { seen_read(*mine, address, bytes, at); }

void touch_atomic(const void* address, size_t bytes, const void* at) {
    find(*mine, "reads and writes", (u64)address, bytes, at);
}

void touch_write(const void* address, size_t bytes, Record kind, const void* at) {
    seen_write(*mine, address, bytes, kind, at);
}

void open_region(State& s) {
    s.region = &region();
    s.recent_start = s.recent_end = 0;
}

// The lanes read for each other, so a barrier must come after the writes of any lane of the warp. A row of a matrix at
// a time; its cells belong to this thread of the host alone.
void touch_together(const void* row) {
    State& s = *mine;
    Place p = find(s, "load_matrices reads", (u64)row, ROW, nullptr);
    if (!p.shared) fail(nullptr, "load_matrices reads what is not shared memory");
    if (!is_order_checked) return;
    Record now = s.stamp(s.current), suspect = 0;
    Record *writes = p.writes, *reads = p.reads;
#pragma GCC unroll 8
    for (size_t i = 0; i < ROW / 2; i++) suspect |= ((writes[i] ^ now) >> 20 ? 0 : 1) | (writes[i] & KIND);
    for (size_t i = 0; suspect && i < ROW / 2; i++) {
        Record w = writes[i];
        if (serial_of(w) == s.serial && !((w ^ now) & (PHASE | WARP_OF_THREAD | WARP_PHASE))) {
            fail(nullptr, "load_matrices reads what thread %d wrote, with no barrier between", thread_of(w));
        }
        check_last_write(s, "load_matrices reads", w, now, true, nullptr);
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < ROW / 2; i++) {
        Record r = reads[i], x = r ^ now;
        bool other_warps = (r & KIND) == BY_WARPS || (x & WARP_OF_THREAD);
        reads[i] = now | (x >> 20 == 0 && other_warps ? BY_WARPS : BY_LANES);
    }
}

void landed(void* address, size_t bytes) {
    State& s = *mine;
    Place p = find(s, "copies", (u64)address, bytes, nullptr);
    if (!is_order_checked) return;
    for (size_t i = 0; i < bytes / 2; i++) store(p.writes + i, s.stamp(s.current));
}

}  // namespace emulated

// ---- memory functions for the host ----

extern "C" {

// Memory filled with NaN in every dtype (a sparse run: zeros), or null if there is too little.
void* emulated_allocate(u64 bytes) {
    using namespace emulated;
    // An empty run also has an address, of its own page.
    bytes = bytes > 0 ? bytes : 1;
    Region& r = region();
    std::lock_guard<std::mutex> one(r.one);
    // The page after it, which cannot be touched, is for the host's copies; kernels are checked to the byte.
    u64 first = r.used / PAGE, count = (bytes + ALIGN + PAGE - 1) / PAGE, begin = r.base + r.used;
    if (r.used + (count + 1) * PAGE > REGION || mprotect((void*)begin, count * PAGE, PROT_READ | PROT_WRITE)) return nullptr;
    r.used += (count + 1) * PAGE;
    u64 start = (begin + count * PAGE - bytes) / ALIGN * ALIGN;
    if (bytes < SPARSE) std::memset((void*)start, 0xff, bytes);
    if (bytes < POPULATED) {
        for (Record* records : {r.writes, r.reads}) {
            madvise(records + first * PAGE / 2, count * PAGE / 2 * sizeof(Record), MADV_POPULATE_WRITE);
        }
    }
    r.allocations.push_back({start, start + bytes, true});
    for (u64 i = 0; i < count; i++) r.owners[first + i] = (u32)r.allocations.size() - 1;
    return (void*)start;
}

void emulated_free(void* memory, u64 bytes) {
    using namespace emulated;
    bytes = bytes > 0 ? bytes : 1;
    Region& r = region();
    std::lock_guard<std::mutex> one(r.one);
    u64 start = (u64)memory;
    Allocation& a = r.allocations[r.owners[(start - r.base) / PAGE]];
    if (a.start != start || a.end - a.start != bytes || !a.live) {
        std::fprintf(stderr, "%p, %llu bytes, is given back, and is no memory that was given\n", memory, bytes);
        std::abort();
    }
    a.live = false;
    u64 first = (start - r.base) / PAGE, count = (start + bytes - r.base + PAGE - 1) / PAGE - first;
    void* pages = (void*)(r.base + first * PAGE);
    mprotect(pages, count * PAGE, PROT_NONE);
    madvise(pages, count * PAGE, MADV_DONTNEED);
    for (Record* records : {r.writes, r.reads}) {
        madvise(records + first * PAGE / 2, count * PAGE / 2 * sizeof(Record), MADV_DONTNEED);
    }
    for (u64 i = 0; i < count; i++) r.owners[first + i] = 0;
}

// Sets bytes to 0. Whole pages of a sparse run use no memory of the machine until they are touched again.
void emulated_clear(u64 address, u64 bytes) {
    using namespace emulated;
    u64 end = address + bytes, first = (address + PAGE - 1) / PAGE * PAGE, last = end / PAGE * PAGE;
    if (bytes < SPARSE) return (void)std::memset((void*)address, 0, bytes);
    std::memset((void*)address, 0, first - address);
    madvise((void*)first, last - first, MADV_DONTNEED);
    std::memset((void*)last, 0, end - last);
}

// ---- hooks ----

#define EMULATED_HOOKS(bytes)                                                                                   \
    void __tsan_read##bytes(void* a) { hook_read(a, bytes, __builtin_return_address(0)); }                      \
    void __tsan_write##bytes(void* a) { hook_write(a, bytes, __builtin_return_address(0)); }                    \
    void __tsan_unaligned_read##bytes(void* a) { hook_read(a, bytes, __builtin_return_address(0)); }            \
    void __tsan_unaligned_write##bytes(void* a) { hook_write(a, bytes, __builtin_return_address(0)); }

// Registration also calls the hooks, while no block runs.
static INLINE void hook_read(void* a, size_t bytes, const void* at) {
    if (emulated::State* s = emulated::mine) emulated::seen_read(*s, a, bytes, at);
}
static INLINE void hook_write(void* a, size_t bytes, const void* at) {
    if (emulated::State* s = emulated::mine) emulated::seen_write(*s, a, bytes, 0, at);
}

EMULATED_HOOKS(1)
EMULATED_HOOKS(2)
EMULATED_HOOKS(4)
EMULATED_HOOKS(8)
EMULATED_HOOKS(16)
void __tsan_read_range(void* a, size_t bytes) { hook_read(a, bytes, __builtin_return_address(0)); }
void __tsan_write_range(void* a, size_t bytes) { hook_write(a, bytes, __builtin_return_address(0)); }
void __tsan_init() {}

// Undefined behaviour that the compiler's checks have found.
void __ubsan_handle_type_mismatch_v1(const void*, u64 address) {
    emulated::fail(__builtin_return_address(0), "an access at %#llx that is not aligned to its type", address);
}
void __ubsan_handle_out_of_bounds(const void*, u64 index) {
    emulated::fail(__builtin_return_address(0), "index %lld of an array outside its bounds", (i64)index);
}
void __ubsan_handle_shift_out_of_bounds(const void*, u64, u64 by) {
    emulated::fail(__builtin_return_address(0), "a shift by %lld bits", (i64)by);
}
void __ubsan_handle_divrem_overflow(const void*, u64, u64) {
    emulated::fail(__builtin_return_address(0), "a division by zero");
}
#define EMULATED_OVERFLOW(name)                                              \
    void __ubsan_handle_##name##_overflow(const void*, u64, u64) {           \
        emulated::fail(__builtin_return_address(0), "a signed number overflows"); \
    }
EMULATED_OVERFLOW(add)
EMULATED_OVERFLOW(sub)
EMULATED_OVERFLOW(mul)
EMULATED_OVERFLOW(negate)

}  // extern "C"
