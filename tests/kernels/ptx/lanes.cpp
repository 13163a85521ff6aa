// What the lanes of a warp do together: shuffles (9.7.9.6), votes (9.7.13), products of matrices (9.7.15), and order.
#include "hardware.h"
#include "vectors.h"

namespace ptx {

namespace {

enum class Way { Up, Down, Across, Index };

template <Way WAY> void shuffle(Warp& w, const Instruction& i, u32 lanes) {
    const u32 *a = w.in<u32>(i.at[2]), *b = w.in<u32>(i.at[3]), *c = w.in<u32>(i.at[4]);
    u32 t[LANES], in_range = 0;
    for (int lane = 0; lane < LANES; lane++) {
        int by = (int)(b[lane] & 31), clamp = (int)(c[lane] & 31), segment = (int)(c[lane] >> 8 & 31);
        int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
        int from = WAY == Way::Up ? lane - by : WAY == Way::Down ? lane + by : WAY == Way::Across ? lane ^ by
                                                                                : least | (by & ~segment);
        bool is_in = WAY == Way::Up ? from >= most : from <= most;
        if (!is_in) from = lane;
        in_range |= (u32)is_in << lane;
        t[lane] = a[from & 31];
        if ((lanes >> lane & 1) && !(lanes >> (from & 31) & 1)) {
            fault(lane, "takes a value from lane %d, which does not take part", from);
        }
    }
    put(w.out<u32>(i.at[0]), t, lanes);
    set_predicate(w, i.at[1], in_range, lanes);
}

void set_all(Warp& w, const Instruction& i, u32 lanes, u32 value) {
    u32 t[LANES];
    for (u32& x : t) x = value;
    put(w.out<u32>(i.at[0]), t, lanes);
}

void ballot(Warp& w, const Instruction& i, u32 lanes) { set_all(w, i, lanes, *w.in<u32>(i.at[1]) & lanes); }
void active(Warp& w, const Instruction& i, u32 lanes) { set_all(w, i, lanes, lanes); }

enum class Vote { Any, Every, Same };

template <Vote VOTE> void vote(Warp& w, const Instruction& i, u32 lanes) {
    u32 votes = *w.in<u32>(i.at[1]) & lanes;
    bool is = VOTE == Vote::Any ? votes != 0 : VOTE == Vote::Every ? votes == lanes : votes == 0 || votes == lanes;
    set_predicate(w, i.at[0], is ? ALL : 0, lanes);
}

void match_any(Warp& w, const Instruction& i, u32 lanes) {
    const u32* a = w.in<u32>(i.at[1]);
    u32 t[LANES];
    for (int l = 0; l < LANES; l++) {
        t[l] = 0;
        for (int k = 0; k < LANES; k++) t[l] |= (u32)((lanes >> k & 1) && a[k] == a[l]) << k;
    }
    put(w.out<u32>(i.at[0]), t, lanes);
}

struct Sum { template <class T> static T of(T a, T b) { return (T)((u32)a + (u32)b); } };
struct Least { template <class T> static T of(T a, T b) { return a < b ? a : b; } };
struct Most { template <class T> static T of(T a, T b) { return a > b ? a : b; } };
struct And { template <class T> static T of(T a, T b) { return a & b; } };
struct Or { template <class T> static T of(T a, T b) { return a | b; } };
struct Xor { template <class T> static T of(T a, T b) { return a ^ b; } };

template <class T, class O> void reduce(Warp& w, const Instruction& i, u32 lanes) {
    const T* a = w.in<T>(i.at[1]);
    int first = __builtin_ctz(lanes);
    T all = a[first];
    for (int l = first + 1; l < LANES; l++) {
        if (lanes >> l & 1) all = O::of(all, a[l]);
    }
    set_all(w, i, lanes, (u32)all);
}

float low(u32 pair) {
    u32 bits = pair << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
float high(u32 pair) { return low(pair >> 16); }

// Whether a fragment holds what nobody wrote, and then of which lane.
void check_written(const u32* fragment) {
    constexpr u32 BOTH = (u32)UNWRITTEN << 16 | UNWRITTEN;
    u32 found = 0;
    for (int l = 0; l < LANES; l++) {
        u32 x = fragment[l] ^ BOTH;
        found |= (u32)((x & 0xffff) == 0) | (u32)(x >> 16 == 0);
    }
    for (int l = 0; found && l < LANES; l++) {
        u32 x = fragment[l] ^ BOTH;
        if ((x & 0xffff) == 0 || x >> 16 == 0) fault(l, "mma takes a factor that nobody wrote");
    }
}

}  // namespace

void check_factors(const Warp& w, const Instruction& i) {
    for (int r = 4; w.block->launch->looks_for_unwritten && r < 10; r++) check_written(w.in<u32>(i.at[r]));
}

// 9.7.15.5.8, mma.m16n8k16 of bf16. Lane l is of group l / 4 and the (l % 4)-th of it. Of A it holds eight values: rows are
// the group, and 8 more for values 2, 3, 6 and 7; columns twice its place in the group and the value's parity, and 8 more
// for values 4 to 7. Of B four: rows as the columns of A's values 0, 1, 4 and 5, the column is the group. Of C and D four:
// rows as of A's first four, columns as theirs.
//
// The order of sums is not specified. Here products come one by one, in the order of k, each sum rounded to f32; what GPUs
// do stands in tensor_core.cpp.
void mma(Warp& w, const Instruction& i, u32) {
    check_factors(w, i);
    const u32* a[4];
    for (int r = 0; r < 4; r++) a[r] = w.in<u32>(i.at[4 + r]);
    // Columns of B by parity, as the lanes of one group need them: [k][place in the group].
    alignas(32) float even[16][4], odd[16][4];
    for (int r = 0; r < 2; r++) {
        const u32* b = w.in<u32>(i.at[8 + r]);
        for (int l = 0; l < LANES; l++) {
            int column = l / 4, k = 2 * (l % 4) + 8 * r;
            float(*to)[4] = column % 2 ? odd : even;
            to[k][column / 2] = low(b[l]);
            to[k + 1][column / 2] = high(b[l]);
        }
    }
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
    float results[4][LANES];
    for (int chunk = 0; chunk < 4; chunk++) {
        __m256 d[4];
        for (int r = 0; r < 4; r++) d[r] = _mm256_loadu_ps(w.in<float>(i.at[10 + r]) + 8 * chunk);
        // Two groups at a time: lanes 8 * chunk to 8 * chunk + 7.
        auto step = [&](auto place, int r, bool is_high, int k) {
            constexpr int P = decltype(place)::value;
            auto value = [&](int of) {
                __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a[of] + 8 * chunk));
                __m256i bits = is_high ? _mm256_and_si256(pair, upper) : _mm256_slli_epi32(pair, 16);
                return _mm256_permute_ps(_mm256_castsi256_ps(bits), P * 0x55);
            };
            __m256 top = value(2 * r), bottom = value(2 * r + 1);
            __m256 b0 = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(even[k]));
            __m256 b1 = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(odd[k]));
            d[0] = _mm256_fmadd_ps(top, b0, d[0]), d[1] = _mm256_fmadd_ps(top, b1, d[1]);
            d[2] = _mm256_fmadd_ps(bottom, b0, d[2]), d[3] = _mm256_fmadd_ps(bottom, b1, d[3]);
        };
        for (int r = 0; r < 2; r++) {
            auto pair = [&](auto place) {
                step(place, r, false, 8 * r + 2 * decltype(place)::value);
                step(place, r, true, 8 * r + 2 * decltype(place)::value + 1);
            };
            pair(std::integral_constant<int, 0>()), pair(std::integral_constant<int, 1>());
            pair(std::integral_constant<int, 2>()), pair(std::integral_constant<int, 3>());
        }
        for (int r = 0; r < 4; r++) _mm256_storeu_ps(results[r] + 8 * chunk, d[r]);
    }
    for (int r = 0; r < 4; r++) std::memcpy(w.out<float>(i.at[r]), results[r], sizeof results[r]);
}

namespace {

void nothing(Warp&, const Instruction&, u32) {}
void warp_barrier(Warp& w, const Instruction&, u32) { w.phase++; }
void trap(Warp&, const Instruction&, u32 lanes) { fault(__builtin_ctz(lanes), "a trap"); }

}  // namespace

void add_lanes(Meanings& to) {
    auto together = [&](const std::string& name, Run run, const char* operands) {
        to[name] = {run, operands, Class::Lanes, Kind::Together};
    };
    together("shfl.sync.up.b32", shuffle<Way::Up>, "rp=rrrr");
    together("shfl.sync.down.b32", shuffle<Way::Down>, "rp=rrrr");
    together("shfl.sync.bfly.b32", shuffle<Way::Across>, "rp=rrrr");
    together("shfl.sync.idx.b32", shuffle<Way::Index>, "rp=rrrr");
    together("vote.sync.ballot.b32", ballot, "r=pr");
    together("vote.sync.any.pred", vote<Vote::Any>, "p=pr");
    together("vote.sync.all.pred", vote<Vote::Every>, "p=pr");
    together("vote.sync.uni.pred", vote<Vote::Same>, "p=pr");
    together("match.any.sync.b32", match_any, "r=rr");
    together("redux.sync.add.u32", reduce<u32, Sum>, "r=rr"), together("redux.sync.add.s32", reduce<u32, Sum>, "r=rr");
    together("redux.sync.min.u32", reduce<u32, Least>, "r=rr"), together("redux.sync.min.s32", reduce<i32, Least>, "r=rr");
    together("redux.sync.max.u32", reduce<u32, Most>, "r=rr"), together("redux.sync.max.s32", reduce<i32, Most>, "r=rr");
    together("redux.sync.and.b32", reduce<u32, And>, "r=rr"), together("redux.sync.or.b32", reduce<u32, Or>, "r=rr");
    together("redux.sync.xor.b32", reduce<u32, Xor>, "r=rr");
    together("bar.warp.sync", warp_barrier, "=r");
    to["activemask.b32"] = {active, "r=", Class::Lanes};
    to["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] = {mma, "rrrr=rrrrrrrrrr", Class::Mma, Kind::Together};
    to["cp.async.commit_group"] = {copy_commit, "=", Class::Copy};
    // Blocks and warps run one after another, so memory is in order.
    for (const char* name : {"membar.cta", "membar.gl", "membar.sys", "fence.acq_rel.cta", "fence.acq_rel.gpu",
                             "fence.acq_rel.sys",
                             "fence.sc.cta", "fence.sc.gpu", "fence.sc.sys", "griddepcontrol.wait",
                             "griddepcontrol.launch_dependents"}) {
        to[name] = {nothing, "=", Class::Control};
    }
    to["nanosleep.u32"] = {nothing, "=r", Class::Control, Kind::Poll};
    to["trap"] = {trap, "=", Class::Control};
}

}  // namespace ptx
