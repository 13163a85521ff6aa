// The instructions of warps and of asynchronous copies.
#include "state.h"

namespace emulated {

namespace {

struct Shuffle {
    u64 bits;
    int from;
};

void shuffle_run(State&, int, void* const* arguments) {
    u64 left[LANES];
    for (int l = 0; l < LANES; l++) left[l] = static_cast<Shuffle*>(arguments[l])->bits;
    for (int l = 0; l < LANES; l++) {
        Shuffle* mine = static_cast<Shuffle*>(arguments[l]);
        mine->bits = left[mine->from & (LANES - 1)];
    }
}

const Operation SHUFFLE{"shuffle", shuffle_run}, SHUFFLE_XOR{"shuffle_xor", shuffle_run};
const Operation BARRIER{"a warp's barrier", [](State& s, int first, void* const*) { s.warp_phase[first / LANES]++; }};

float low(u32 pair) {
    u32 bits = pair << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

float high(u32 pair) {
    u32 bits = pair & 0xffff0000u;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

struct Mma {
    F4 d;
    U4 a;
    u64 b;
};

// A lane's two values of D, in the first eight rows or the last.
void* at(void* lane, int half) { return reinterpret_cast<float*>(&static_cast<Mma*>(lane)->d) + 2 * half; }

// Sums are in the order of k. A tensor core has another order and more bits.
void mma_run(State&, int, void* const* arguments) {
    typedef float F8 __attribute__((vector_size(32)));
    float a[16][16], b[16][8];
    for (int l = 0; l < LANES; l++) {
        const Mma& lane = *static_cast<const Mma*>(arguments[l]);
        int g = l / 4, q = 2 * (l % 4);
        for (int i = 0; i < 4; i++) {
            a[g + i % 2 * 8][q + i / 2 * 8] = low(lane.a[i]);
            a[g + i % 2 * 8][q + i / 2 * 8 + 1] = high(lane.a[i]);
        }
        for (int i = 0; i < 2; i++) {
            u32 pair = (u32)(lane.b >> 32 * i);
            b[q + 8 * i][g] = low(pair);
            b[q + 8 * i + 1][g] = high(pair);
        }
    }
    F8 rows[16];
    for (int k = 0; k < 16; k++) std::memcpy(&rows[k], b[k], sizeof rows[k]);
    // Eight rows at a time, whose sums are independent.
    for (int half = 0; half < 2; half++) {
        float d[8][8];
        for (int l = 0; l < LANES; l++) std::memcpy(&d[l / 4][2 * (l % 4)], at(arguments[l], half), 8);
        F8 sums[8];
#pragma GCC unroll 8
        for (int row = 0; row < 8; row++) std::memcpy(&sums[row], d[row], sizeof sums[row]);
        for (int k = 0; k < 16; k++) {
#pragma GCC unroll 8
            for (int row = 0; row < 8; row++) sums[row] += a[8 * half + row][k] * rows[k];
        }
#pragma GCC unroll 8
        for (int row = 0; row < 8; row++) std::memcpy(d[row], &sums[row], sizeof sums[row]);
        for (int l = 0; l < LANES; l++) std::memcpy(at(arguments[l], half), &d[l / 4][2 * (l % 4)], 8);
    }
}

const Operation MMA{"mma", mma_run};

struct Load {
    const u16* row;
    U4 loaded;
};

template <bool TRANSPOSED> void load_run(State& s, int first, void* const* arguments) {
    u16 matrices[4][8][8];
    for (int l = 0; l < LANES; l++) {
        const u16* row = static_cast<Load*>(arguments[l])->row;
        s.current = first + l;
        touch_together(row);
        std::memcpy(matrices[l / 8][l % 8], row, 16);
    }
    for (int l = 0; l < LANES; l++) {
        int i = l / 4, j = 2 * (l % 4);
        for (int m = 0; m < 4; m++) {
            auto& at = matrices[m];
            u32 one = TRANSPOSED ? at[j][i] : at[i][j], two = TRANSPOSED ? at[j + 1][i] : at[i][j + 1];
            static_cast<Load*>(arguments[l])->loaded[m] = one | two << 16;
        }
    }
}

const Operation LOAD{"load_matrices", load_run<false>}, LOAD_TRANSPOSED{"load_matrices_transposed", load_run<true>};

void put(const Copy& c) {
    if (c.valid) std::memcpy(c.to, c.from, c.bytes);
    else std::memset(c.to, 0, c.bytes);
}

void land(State& s, Fiber& f, size_t until) {
    for (size_t i = 0; i < until; i++) {
        const Copy& c = f.copies[i];
        if (!s.lands_early()) put(c);
        landed(c.to, c.bytes);
    }
    f.copies.erase(f.copies.begin(), f.copies.begin() + (ptrdiff_t)until);
}

}  // namespace

void sync_warp() { meet(BARRIER, nullptr); }

u64 shuffle_bits(u64 bits, int from) {
    Shuffle lane{bits, from};
    meet(SHUFFLE, &lane);
    return lane.bits;
}

u64 shuffle_xor_bits(u64 bits, int lanes) {
    Shuffle lane{bits, mine->current ^ lanes};
    meet(SHUFFLE_XOR, &lane);
    return lane.bits;
}

F4 mma_values(F4 d, U4 a, u64 b) {
    Mma lane{d, a, b};
    meet(MMA, &lane);
    return lane.d;
}

U4 load_matrices_values(const void* row, bool transposed) {
    if ((uintptr_t)row % 16) fail(__builtin_return_address(0), "load_matrices: a row that is not aligned to 16 bytes");
    Load lane{static_cast<const u16*>(row), {}};
    meet(transposed ? LOAD_TRANSPOSED : LOAD, &lane);
    return lane.loaded;
}

// The source is read when the copy completes: at once or as late as possible. Until then its target is pending.
void copy_async(void* to, const void* from, bool valid, size_t bytes) {
    const void* at = __builtin_return_address(0);
    if (((uintptr_t)to | (uintptr_t)from) % bytes) fail(at, "copy_async: an address that is not aligned to %zu bytes", bytes);
    State& s = *mine;
    if (valid) touch_read(from, bytes, at);
    touch_write(to, bytes, UNDER_WAY, at);
    Copy copy{static_cast<u8*>(to), static_cast<const u8*>(from), valid, bytes};
    if (s.lands_early()) put(copy);
    s.fibers[s.current].copies.push_back(copy);
}

void copy_commit() {
    Fiber& f = mine->fibers[mine->current];
    f.groups.push_back(f.copies.size());
}

void copy_wait(int pending) {
    Fiber& f = mine->fibers[mine->current];
    if ((int)f.groups.size() <= pending) return;
    size_t groups = f.groups.size() - (size_t)pending, until = f.groups[groups - 1];
    land(*mine, f, until);
    f.groups.erase(f.groups.begin(), f.groups.begin() + (ptrdiff_t)groups);
    for (size_t& end : f.groups) end -= until;
}

}  // namespace emulated
