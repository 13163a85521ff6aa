// Memory: what the host allocates, and how lanes reach it (9.7.9.8 to 9.7.9.12).
#include "hardware.h"
#include "pages.h"
#include "vectors.h"

#include <cmath>
#include <cstdio>
#include <mutex>

namespace ptx {

u64 recent_start = 1, recent_end = 0;

namespace {

constexpr u64 PAGE = pages::BYTES, REGION = pages::REGION;

struct Allocation {
    u64 end;
    bool lives;
};

struct Memory {
    pages::Region addresses;
    u64 base = addresses.base;
    std::map<u64, Allocation> allocations;
    std::mutex one;
    // Which block wrote two bytes last, by its number among all that ever ran.
    u32* writers = static_cast<u32*>(pages::reserve_zeros(REGION / 2 * sizeof(u32)));
};

Memory& memory() {
    static Memory* memory = new Memory;
    return *memory;
}

void* fill(Memory& m, u64 start, u64 bytes) {
    u16* cells = (u16*)start;
    for (u64 i = 0; bytes < pages::SPARSE && i < bytes / 2; i++) cells[i] = UNWRITTEN;
    m.allocations[start] = {start + bytes, true};
    return (void*)start;
}

}  // namespace

void* allocate(u64 bytes) {
    Memory& m = memory();
    std::lock_guard<std::mutex> one(m.one);
    bytes = bytes ? bytes : 1;
    if (is_beside()) {
        u64 start = (u64)allocate_beside(bytes);
        // It gives addresses in rising order, all from one region.
        if (m.allocations.empty()) m.base = start / PAGE * PAGE - PAGE;
        return start ? fill(m, start, bytes) : nullptr;
    }
    u64 first, count, start = m.addresses.take(bytes, first, count);
    return start ? fill(m, start, bytes) : nullptr;
}

void release(void* at, u64 bytes) {
    Memory& m = memory();
    std::lock_guard<std::mutex> one(m.one);
    bytes = bytes ? bytes : 1;
    auto found = m.allocations.find((u64)at);
    if (found == m.allocations.end() || !found->second.lives || found->second.end != (u64)at + bytes) {
        std::fprintf(stderr, "%p, %llu bytes, is given back, and is no memory that was given\n", at, bytes);
        std::abort();
    }
    found->second.lives = false;
    recent_start = 1, recent_end = 0;
    if (is_beside()) return release_beside(at, bytes);
    u64 first, count;
    m.addresses.give_back((u64)at, bytes, first, count);
    pages::forget(m.writers, first, count);
}

void clear(u64 address, u64 bytes) { pages::clear(address, bytes); }

bool allocation_of(u64 address, u64& start, u64& end) {
    Memory& m = memory();
    auto after = m.allocations.upper_bound(address);
    if (after == m.allocations.begin()) return false;
    --after;
    start = after->first, end = after->second.end;
    return after->second.lives && address < end;
}

bool holds(u64 address, u64 bytes) {
    Memory& m = memory();
    std::lock_guard<std::mutex> one(m.one);
    auto after = m.allocations.upper_bound(address);
    if (after == m.allocations.begin()) return false;
    --after;
    return after->second.lives && address + bytes <= after->second.end;
}

void check_global(u64 address, u64 bytes, int lane, const char* did) {
    if (address >= recent_start && address + bytes <= recent_end) return;
    Memory& m = memory();
    auto after = m.allocations.upper_bound(address);
    auto before = after == m.allocations.begin() ? m.allocations.end() : std::prev(after);
    bool known = address >= m.base && address < m.base + REGION;
    if (!known) fault(lane, "%s of %llu bytes at %#llx, which is no address of the GPU", did, bytes, address);
    bool is_before = after != m.allocations.end() &&
                     (before == m.allocations.end() || (address >= before->second.end && after->first - address <= PAGE &&
                                                        after->first - address < address - before->second.end));
    if (is_before) {
        fault(lane, "%s of %llu bytes, %llu before an allocation of %llu", did, bytes, after->first - address,
              after->second.end - after->first);
    }
    if (before == m.allocations.end()) fault(lane, "%s of %llu bytes at %#llx: no memory was allocated", did, bytes, address);
    u64 start = before->first, end = before->second.end;
    if (!before->second.lives || address + bytes > end) {
        fault(lane, "%s of %llu bytes at byte %llu of %s of %llu", did, bytes, address - start,
              before->second.lives ? "an allocation" : "freed memory", end - start);
    }
    recent_start = start, recent_end = end;
}

namespace {

// Addresses of an access, each lane's register and what is added.
void addresses(Warp& w, const Instruction& i, i32 place, u64* at) {
    if (i.address_bytes == 8) {
        const u64* base = w.in<u64>(place);
        for (int l = 0; l < LANES; l++) at[l] = base[l] + (u64)i.number;
    } else {
        const u32* base = w.in<u32>(place);
        for (int l = 0; l < LANES; l++) at[l] = (u32)(base[l] + (u32)i.number);
    }
}

// Blocks of a launch run in any order: what one writes no other may touch, unless the kernel has them wait for each other.
void check_writers(Warp& w, u32 lanes, const u64* at, u32 bytes, bool writes) {
    const Launch& launch = *w.block->launch;
    if (launch.kernel->waits_for_blocks) return;
    const Memory& m = memory();
    u32 mine = w.block->serial, first = launch.first_serial, cells = bytes / 2;
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        u32* writers = m.writers + (at[l] - m.base) / 2;
        for (u32 k = 0; k < cells; k++) {
            u32 other = writers[k];
            if (other >= first && other != mine) {
                fault(l, "%s what another block, number %llu of the grid, wrote in this launch",
                      writes ? "writes" : "reads", launch.block_of(other - first));
            }
            if (writes) writers[k] = mine;
        }
    }
}

void find_global(Warp& w, u32 lanes, u64* at, u32 bytes, bool writes) {
    const char* did = writes ? "writes" : "reads";
    // Where all lie in the allocation of the last access, as they mostly do, nothing else is asked.
    u64 least = ~0ull, most = 0, bits = 0;
    for (int l = 0; l < LANES; l++) {
        u64 a = lanes >> l & 1 ? at[l] : at[__builtin_ctz(lanes)];
        least = a < least ? a : least, most = a > most ? a : most, bits |= a;
    }
    if (least < recent_start || most + bytes > recent_end) {
        for (int l = 0; l < LANES; l++) {
            if (lanes >> l & 1) check_global(at[l], bytes, l, did);
        }
    }
    if (bits % bytes) {
        for (int l = 0; l < LANES; l++) {
            if ((lanes >> l & 1) && at[l] % bytes) fault(l, "%s %u bytes at an address that is not aligned to them", did, bytes);
        }
    }
    check_writers(w, lanes, at, bytes, writes);
    if (w.block->launch->counts_memory) count_global(w, lanes, at, bytes);
}

void find_shared(Warp& w, u32 lanes, u64* at, u32 bytes, bool writes) {
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        if (at[l] % bytes) {
            fault(l, "%s %u bytes of shared memory at an address that is not aligned to them", writes ? "writes" : "reads", bytes);
        }
        if (writes) shared_write(w, l, (u32)at[l], bytes, 0);
        else shared_read(w, l, (u32)at[l], bytes);
    }
    if (w.block->launch->counts_memory) count_shared(w, lanes, at, bytes);
    for (int l = 0; l < LANES; l++) {
        if (lanes >> l & 1) at[l] = (u64)shared_place(w, (u32)at[l]);
    }
}

void find_local(Warp& w, u32 lanes, u64* at, u32 bytes) {
    u32 size = w.block->launch->kernel->local_bytes;
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        if (at[l] + bytes > size) fault(l, "byte %llu of a stack of %u", at[l], size);
        at[l] += (u64)w.local.data() + (u64)size * (u64)l;
    }
}

}  // namespace

void find_accesses(Warp& w, const Instruction& i, u32 lanes, u64* at, u32 bytes, bool writes) {
    Space space = i.space;
    if (space == Space::Generic) {
        u64 first = at[__builtin_ctz(lanes)], window = first - SHARED_WINDOW < WINDOW_BYTES ? SHARED_WINDOW
                                                       : first - LOCAL_WINDOW < WINDOW_BYTES ? LOCAL_WINDOW : 0;
        space = window == SHARED_WINDOW ? Space::Shared : window ? Space::Local : Space::Global;
        for (int l = 0; window && l < LANES; l++) {
            if ((lanes >> l & 1) && at[l] - window >= WINDOW_BYTES) fault(l, "lanes reach into several spaces at once");
            at[l] -= window;
        }
    }
    if (space == Space::Shared) find_shared(w, lanes, at, bytes, writes);
    else if (space == Space::Local) find_local(w, lanes, at, bytes);
    else find_global(w, lanes, at, bytes, writes);
}

namespace {

// One value of each lane, M in memory, D in the register.
template <class M, class D> u32 take(Warp& w, const Instruction& i, int value, u32 lanes, const u64* at) {
    D* d = w.out<D>(i.at[value]);
    M unwritten;
    std::memset(&unwritten, 0, sizeof unwritten);
    u64 pattern = 0x0001000100010001ull * UNWRITTEN;
    std::memcpy(&unwritten, &pattern, sizeof unwritten);
    u32 suspicious = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        M m;
        std::memcpy(&m, (const void*)(at[l] + (u64)value * sizeof(M)), sizeof m);
        d[l] = (D)m;
        suspicious |= (u32)(m == unwritten) << l;
    }
    return sizeof(M) == 1 ? 0 : suspicious;
}

u32 take(Warp& w, const Instruction& i, int value, u32 lanes, const u64* at) {
    int kind = i.bytes * 100 + i.register_bytes * 10 + i.is_signed;
    switch (kind) {
        case 120: return take<u8, u16>(w, i, value, lanes, at);
        case 121: return take<i8, u16>(w, i, value, lanes, at);
        case 140: return take<u8, u32>(w, i, value, lanes, at);
        case 141: return take<i8, u32>(w, i, value, lanes, at);
        case 180: return take<u8, u64>(w, i, value, lanes, at);
        case 181: return take<i8, u64>(w, i, value, lanes, at);
        case 220: case 221: return take<u16, u16>(w, i, value, lanes, at);
        case 240: return take<u16, u32>(w, i, value, lanes, at);
        case 241: return take<i16, u32>(w, i, value, lanes, at);
        case 280: return take<u16, u64>(w, i, value, lanes, at);
        case 281: return take<i16, u64>(w, i, value, lanes, at);
        case 440: case 441: return take<u32, u32>(w, i, value, lanes, at);
        case 480: return take<u32, u64>(w, i, value, lanes, at);
        case 481: return take<i32, u64>(w, i, value, lanes, at);
        case 880: case 881: return take<u64, u64>(w, i, value, lanes, at);
        default: fault(-1, "a load of %u bytes to a register of %u", i.bytes, i.register_bytes);
    }
}

template <class M, class S> void give(Warp& w, const Instruction& i, int value, u32 lanes, const u64* at) {
    const S* s = w.in<S>(i.at[1 + value]);
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        M m = (M)s[l];
        std::memcpy((void*)(at[l] + (u64)value * sizeof(M)), &m, sizeof m);
    }
}

void give(Warp& w, const Instruction& i, int value, u32 lanes, const u64* at) {
    switch (i.bytes * 10 + i.register_bytes) {
        case 12: return give<u8, u16>(w, i, value, lanes, at);
        case 14: return give<u8, u32>(w, i, value, lanes, at);
        case 18: return give<u8, u64>(w, i, value, lanes, at);
        case 22: return give<u16, u16>(w, i, value, lanes, at);
        case 24: return give<u16, u32>(w, i, value, lanes, at);
        case 28: return give<u16, u64>(w, i, value, lanes, at);
        case 44: return give<u32, u32>(w, i, value, lanes, at);
        case 48: return give<u32, u64>(w, i, value, lanes, at);
        case 88: return give<u64, u64>(w, i, value, lanes, at);
        default: fault(-1, "a store of %u bytes from a register of %u", i.bytes, i.register_bytes);
    }
}

}  // namespace

void load(Warp& w, const Instruction& i, u32 lanes) {
    u64 at[LANES];
    addresses(w, i, i.at[i.values], at);
    find_accesses(w, i, lanes, at, (u32)i.values * i.bytes, false);
    u32 mask = (1u << i.bytes) - 1;
    for (int v = 0; v < i.values; v++) {
        u32 suspicious = take(w, i, v, lanes, at);
        bool looked_at = i.used_bytes >> v * i.bytes & mask;
        if (suspicious && looked_at && w.block->launch->looks_for_unwritten) {
            fault(__builtin_ctz(suspicious), "reads %u bytes that nobody wrote", i.bytes);
        }
    }
}

void store(Warp& w, const Instruction& i, u32 lanes) {
    u64 at[LANES];
    addresses(w, i, i.at[0], at);
    find_accesses(w, i, lanes, at, (u32)i.values * i.bytes, true);
    for (int v = 0; v < i.values; v++) give(w, i, v, lanes, at);
}

void load_parameter(Warp& w, const Instruction& i, u32 lanes) {
    u64 at[LANES];
    for (u64& a : at) a = (u64)(w.block->launch->parameters + i.number);
    for (int v = 0; v < i.values; v++) take(w, i, v, lanes, at);
}

namespace {

struct Plus { template <class T> static T of(T a, T b, T) { return (T)(a + b); } };
// As Plus, with denormals as 0.
struct FlushedPlus {
    static float of(float a, float b, float) {
        auto flushed = [](float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; };
        return flushed(flushed(a) + flushed(b));
    }
};
struct Exchange { template <class T> static T of(T, T b, T) { return b; } };
struct Compare { template <class T> static T of(T a, T b, T c) { return a == b ? c : a; } };
struct Least { template <class T> static T of(T a, T b, T) { return a < b ? a : b; } };
struct Most { template <class T> static T of(T a, T b, T) { return a > b ? a : b; } };
struct And { template <class T> static T of(T a, T b, T) { return a & b; } };
struct Or { template <class T> static T of(T a, T b, T) { return a | b; } };
struct Xor { template <class T> static T of(T a, T b, T) { return a ^ b; } };
struct Increment { template <class T> static T of(T a, T b, T) { return a >= b ? 0 : (T)(a + 1); } };
struct Decrement { template <class T> static T of(T a, T b, T) { return a == 0 || a > b ? b : (T)(a - 1); } };

// Lanes one after another, lowest first.
template <class T, class O> void exchange(Warp& w, const Instruction& i, u32 lanes) {
    u64 at[LANES];
    addresses(w, i, i.at[1], at);
    if (i.space == Space::Shared) {
        for (int l = 0; l < LANES; l++) {
            if (lanes >> l & 1) at[l] = (u64)shared_place(w, (u32)at[l]);
        }
    } else {
        find_accesses(w, i, lanes, at, sizeof(T), true);
    }
    const T *b = w.in<T>(i.at[2]), *c = i.operands > 3 ? w.in<T>(i.at[3]) : b;
    T* d = w.out<T>(i.at[0]);
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        T a, given = b[l], other = c[l];
        std::memcpy(&a, (const void*)at[l], sizeof a);
        T next = O::of(a, given, other);
        std::memcpy((void*)at[l], &next, sizeof next);
        d[l] = a;
    }
}

}  // namespace

Run atomic(const std::string& operation, const std::string& type, Space space) {
    if (hardware() != Hardware::Kind && space == Space::Global && operation == "add" && type == "f32") {
        return exchange<float, FlushedPlus>;
    }
    static const std::map<std::string, Run> runs = {
        {"add.u32", exchange<u32, Plus>}, {"add.s32", exchange<u32, Plus>}, {"add.u64", exchange<u64, Plus>},
        {"add.f32", exchange<float, Plus>}, {"exch.b32", exchange<u32, Exchange>}, {"exch.b64", exchange<u64, Exchange>},
        {"cas.b32", exchange<u32, Compare>}, {"cas.b64", exchange<u64, Compare>}, {"min.u32", exchange<u32, Least>},
        {"min.s32", exchange<i32, Least>}, {"max.u32", exchange<u32, Most>}, {"max.s32", exchange<i32, Most>},
        {"and.b32", exchange<u32, And>}, {"or.b32", exchange<u32, Or>}, {"xor.b32", exchange<u32, Xor>},
        {"inc.u32", exchange<u32, Increment>}, {"dec.u32", exchange<u32, Decrement>},
    };
    auto found = runs.find(operation + "." + type);
    return found == runs.end() ? nullptr : found->second;
}

}  // namespace ptx
