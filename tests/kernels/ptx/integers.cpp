// Integers and logic (9.7.1, 9.7.2, 9.7.8), and moves (9.7.9).
#include "vectors.h"

#include <type_traits>

namespace ptx {

namespace {

template <class T, class S, class U> using Signed = std::conditional_t<std::is_signed<T>::value, S, U>;
template <class T>
using Wide = std::conditional_t<sizeof(T) == 8, Signed<T, __int128, unsigned __int128>,
                                std::conditional_t<sizeof(T) == 4, Signed<T, i64, u64>, Signed<T, i32, u32>>>;

// Sums and products wrap.
struct Add { template <class T> static T of(T a, T b) { return (T)(a + b); } };
struct Sub { template <class T> static T of(T a, T b) { return (T)(a - b); } };
struct Low { template <class T> static T of(T a, T b) { return (T)(a * b); } };
struct High { template <class T> static T of(T a, T b) { return (T)((Wide<T>)a * (Wide<T>)b >> 8 * sizeof(T)); } };
struct Whole { template <class T> static Wide<T> of(T a, T b) { return (Wide<T>)a * (Wide<T>)b; } };
struct LowAdd { template <class T> static T of(T a, T b, T c) { return (T)(a * b + c); } };
struct HighAdd { template <class T> static T of(T a, T b, T c) { return (T)(High::of(a, b) + c); } };
struct WholeAdd {
    template <class T> static Wide<T> of(T a, T b, Wide<T> c) {
        return (Wide<T>)((std::make_unsigned_t<Wide<T>>)((Wide<T>)a * (Wide<T>)b) + (std::make_unsigned_t<Wide<T>>)c);
    }
};
struct Min { template <class T> static T of(T a, T b) { return a < b ? a : b; } };
struct Max { template <class T> static T of(T a, T b) { return a > b ? a : b; } };
struct And { template <class T> static T of(T a, T b) { return (T)(a & b); } };
struct Or { template <class T> static T of(T a, T b) { return (T)(a | b); } };
struct Xor { template <class T> static T of(T a, T b) { return (T)(a ^ b); } };
struct Not { template <class T> static T of(T a) { return (T)~a; } };
struct Same { template <class T> static T of(T a) { return a; } };
struct Negated { template <class T> static T of(T a) { return (T)(0 - (std::make_unsigned_t<T>)a); } };
struct Absolute { template <class T> static T of(T a) { return a < 0 ? Negated::of(a) : a; } };

// Amounts beyond the width count as the width.
struct Left { template <class T> static T of(T a, u32 by) { return by < 8 * sizeof(T) ? (T)(a << by) : 0; } };
struct Right {
    template <class T> static T of(T a, u32 by) {
        u32 most = 8 * sizeof(T) - 1;
        return by <= most ? (T)(a >> by) : std::is_signed<T>::value ? (T)(a >> most) : 0;
    }
};

// Division by 0 is unspecified: here it is a fault.
template <class T, bool REMAINS> void divide(Warp& w, const Instruction& i, u32 lanes) {
    const T *a = w.in<T>(i.at[1]), *b = w.in<T>(i.at[2]);
    T* d = w.out<T>(i.at[0]);
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        if (b[l] == 0) fault(l, "a division by zero");
        bool overflows = std::is_signed<T>::value && b[l] == (T)-1;
        if (overflows) d[l] = REMAINS ? 0 : Negated::of((std::make_signed_t<T>)a[l]);
        else d[l] = REMAINS ? a[l] % b[l] : a[l] / b[l];
    }
}

struct Population { template <class T> static u32 of(T a) { return (u32)__builtin_popcountll(a); } };
struct Leading {
    template <class T> static u32 of(T a) {
        u32 bits = 8 * (u32)sizeof(T);
        return a ? (u32)__builtin_clzll(a) - (64 - bits) : bits;
    }
};
struct Reversed {
    template <class T> static T of(T a) {
        T r = 0;
        for (u32 k = 0; k < 8 * sizeof(T); k++) r = (T)(r << 1 | (a >> k & 1));
        return r;
    }
};

// 9.7.1.20: a field of `len` bits from `pos` on; beyond the top signed fields go on with their sign.
struct Extract {
    template <class T> static T of(T a, u32 b, u32 c) {
        u32 pos = b & 0xff, len = c & 0xff, top = 8 * sizeof(T) - 1;
        bool is_negative = std::is_signed<T>::value && len && (a >> (pos + len - 1 < top ? pos + len - 1 : top) & 1);
        T d = 0;
        for (u32 k = 0; k <= top; k++) {
            bool bit = k < len && pos + k <= top ? a >> (pos + k) & 1 : is_negative;
            d = (T)(d | (T)((std::make_unsigned_t<T>)bit << k));
        }
        return d;
    }
};

// 9.7.1.21: `a`, its lower `len` bits, into `b` at `pos`.
template <class T> void insert(Warp& w, const Instruction& i, u32 lanes) {
    const T *a = w.in<T>(i.at[1]), *b = w.in<T>(i.at[2]);
    const u32 *c = w.in<u32>(i.at[3]), *e = w.in<u32>(i.at[4]);
    T t[LANES];
    for (int l = 0; l < LANES; l++) {
        u32 pos = c[l] & 0xff, len = e[l] & 0xff;
        T ones = len >= 8 * sizeof(T) ? (T)~(T)0 : (T)(((T)1 << len) - 1);
        T field = Left::of(ones, pos);
        t[l] = (T)((b[l] & ~field) | (Left::of(a[l], pos) & field));
    }
    put(w.out<T>(i.at[0]), t, lanes);
}

// 9.7.9.7: bytes of b:a by the nibbles of c; a nibble's top bit repeats the sign.
struct Permuted {
    static u32 of(u32 a, u32 b, u32 c) {
        u64 both = (u64)b << 32 | a;
        u32 d = 0;
        for (u32 k = 0; k < 4; k++) {
            u32 nibble = c >> 4 * k & 15;
            u32 byte = (u32)(both >> 8 * (nibble & 7)) & 0xff;
            if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
            d |= byte << 8 * k;
        }
        return d;
    }
};

// 9.7.8.7: 64 bits b:a shifted by c, the upper half (left) or the lower one (right).
template <bool LEFT, bool WRAPS> struct Funnel {
    static u32 of(u32 a, u32 b, u32 c) {
        u32 n = WRAPS ? c & 31 : c < 32 ? c : 32;
        u64 both = (u64)b << 32 | a;
        return LEFT ? (u32)(both << n >> 32) : (u32)(both >> n);
    }
};

void logic_of_three(Warp& w, const Instruction& i, u32 lanes) {
    const u32 *a = w.in<u32>(i.at[1]), *b = w.in<u32>(i.at[2]), *c = w.in<u32>(i.at[3]), *table = w.in<u32>(i.at[4]);
    u32 t[LANES];
    for (int l = 0; l < LANES; l++) {
        t[l] = 0;
        for (u32 k = 0; k < 8; k++) {
            u32 x = k & 4 ? a[l] : ~a[l], y = k & 2 ? b[l] : ~b[l], z = k & 1 ? c[l] : ~c[l];
            if (table[l] >> k & 1) t[l] |= x & y & z;
        }
    }
    put(w.out<u32>(i.at[0]), t, lanes);
}

template <class T, class H> void pack(Warp& w, const Instruction& i, u32 lanes) {
    const H *a = w.in<H>(i.at[1]), *b = w.in<H>(i.at[2]);
    T t[LANES];
    for (int l = 0; l < LANES; l++) t[l] = (T)((T)a[l] | (T)b[l] << 8 * sizeof(H));
    put(w.out<T>(i.at[0]), t, lanes);
}

template <class T, class H> void unpack(Warp& w, const Instruction& i, u32 lanes) {
    const T* a = w.in<T>(i.at[2]);
    H t[LANES], u[LANES];
    for (int l = 0; l < LANES; l++) t[l] = (H)a[l], u[l] = (H)(a[l] >> 8 * sizeof(H));
    put(w.out<H>(i.at[0]), t, lanes);
    put(w.out<H>(i.at[1]), u, lanes);
}

enum Known { TidX, TidY, NtidX, NtidY, CtaidX, CtaidY, CtaidZ, NctaidX, NctaidY, NctaidZ, LaneId, WarpId, Zero };

template <Known K> void known(Warp& w, const Instruction& i, u32 lanes) {
    const Launch& launch = *w.block->launch;
    u32 t[LANES];
    for (int l = 0; l < LANES; l++) {
        t[l] = K == TidX ? (u32)w.thread(l) : K == NtidX ? launch.threads : K == NtidY ? 1u
               : K >= CtaidX && K <= CtaidZ ? w.block->at[K - CtaidX]
               : K >= NctaidX && K <= NctaidZ ? launch.grid[K - NctaidX]
               : K == LaneId ? (u32)l : K == WarpId ? (u32)w.index : 0u;
    }
    put(w.out<u32>(i.at[0]), t, lanes);
}

template <class T, class O> void add_two(Meanings& to, const std::string& name, const char* operands) {
    to[name] = {two<T, T, T, O>, operands, Class::Integer};
}

// All operations of one width: U without, S with a sign.
template <class U, class S> void add_width(Meanings& to, const std::string& bits, const char* twice, const char* thrice,
                                           const char* once, const char* shifted, const char* counted) {
    for (std::string t : {"u", "s"}) {
        add_two<U, Add>(to, "add." + t + bits, twice);
        add_two<U, Sub>(to, "sub." + t + bits, twice);
        add_two<U, Low>(to, "mul.lo." + t + bits, twice);
        to["mad.lo." + t + bits] = {three<U, U, U, U, LowAdd>, thrice, Class::Integer};
    }
    add_two<U, High>(to, "mul.hi.u" + bits, twice), add_two<S, High>(to, "mul.hi.s" + bits, twice);
    add_two<U, Min>(to, "min.u" + bits, twice), add_two<S, Min>(to, "min.s" + bits, twice);
    add_two<U, Max>(to, "max.u" + bits, twice), add_two<S, Max>(to, "max.s" + bits, twice);
    add_two<U, And>(to, "and.b" + bits, twice), add_two<U, Or>(to, "or.b" + bits, twice);
    add_two<U, Xor>(to, "xor.b" + bits, twice);
    to["div.u" + bits] = {divide<U, false>, twice, Class::Integer}, to["div.s" + bits] = {divide<S, false>, twice, Class::Integer};
    to["rem.u" + bits] = {divide<U, true>, twice, Class::Integer}, to["rem.s" + bits] = {divide<S, true>, twice, Class::Integer};
    to["not.b" + bits] = {one<U, U, Not>, once, Class::Integer};
    to["neg.s" + bits] = {one<S, S, Negated>, once, Class::Integer}, to["abs.s" + bits] = {one<S, S, Absolute>, once, Class::Integer};
    to["shl.b" + bits] = {two<U, U, u32, Left>, shifted, Class::Integer};
    to["shr.u" + bits] = to["shr.b" + bits] = {two<U, U, u32, Right>, shifted, Class::Integer};
    to["shr.s" + bits] = {two<S, S, u32, Right>, shifted, Class::Integer};
    for (std::string t : {"u", "s", "b", "f"}) to["mov." + t + bits] = {one<U, U, Same>, once, Class::Move};
    if (sizeof(U) == 2) return;
    to["popc.b" + bits] = {one<u32, U, Population>, counted, Class::Integer};
    to["clz.b" + bits] = {one<u32, U, Leading>, counted, Class::Integer};
    to["brev.b" + bits] = {one<U, U, Reversed>, once, Class::Integer};
}

}  // namespace

void add_integers(Meanings& to) {
    add_width<u16, i16>(to, "16", "h=hh", "h=hhh", "h=h", "h=hr", "");
    add_width<u32, i32>(to, "32", "r=rr", "r=rrr", "r=r", "r=rr", "r=r");
    add_width<u64, i64>(to, "64", "l=ll", "l=lll", "l=l", "l=lr", "r=l");
    auto integer = [&](const char* name, Run run, const char* operands) { to[name] = {run, operands, Class::Integer}; };
    integer("mul.wide.u16", two<u32, u16, u16, Whole>, "r=hh");
    integer("mul.wide.s16", two<i32, i16, i16, Whole>, "r=hh");
    integer("mul.wide.u32", two<u64, u32, u32, Whole>, "l=rr");
    integer("mul.wide.s32", two<i64, i32, i32, Whole>, "l=rr");
    integer("mad.wide.u32", three<u64, u32, u32, u64, WholeAdd>, "l=rrl");
    integer("mad.wide.s32", three<i64, i32, i32, i64, WholeAdd>, "l=rrl");
    integer("mad.wide.u16", three<u32, u16, u16, u32, WholeAdd>, "r=hhr");
    integer("mad.wide.s16", three<i32, i16, i16, i32, WholeAdd>, "r=hhr");
    integer("mad.hi.u32", three<u32, u32, u32, u32, HighAdd>, "r=rrr");
    integer("mad.hi.s32", three<i32, i32, i32, i32, HighAdd>, "r=rrr");
    integer("bfe.u32", three<u32, u32, u32, u32, Extract>, "r=rrr");
    integer("bfe.s32", three<i32, i32, u32, u32, Extract>, "r=rrr");
    integer("bfe.u64", three<u64, u64, u32, u32, Extract>, "l=lrr");
    integer("bfe.s64", three<i64, i64, u32, u32, Extract>, "l=lrr");
    integer("bfi.b32", insert<u32>, "r=rrrr");
    integer("bfi.b64", insert<u64>, "l=llrr");
    integer("prmt.b32", three<u32, u32, u32, u32, Permuted>, "r=rrr");
    integer("shf.l.wrap.b32", three<u32, u32, u32, u32, Funnel<true, true>>, "r=rrr");
    integer("shf.r.wrap.b32", three<u32, u32, u32, u32, Funnel<false, true>>, "r=rrr");
    integer("shf.l.clamp.b32", three<u32, u32, u32, u32, Funnel<true, false>>, "r=rrr");
    integer("shf.r.clamp.b32", three<u32, u32, u32, u32, Funnel<false, false>>, "r=rrr");
    integer("lop3.b32", logic_of_three, "r=rrrr");
    auto move = [&](const char* name, Run run, const char* operands) { to[name] = {run, operands, Class::Move}; };
    move("pack.b64", pack<u64, u32>, "l=rr"), move("unpack.b64", unpack<u64, u32>, "rr=l");
    move("pack.b32", pack<u32, u16>, "r=hh"), move("unpack.b32", unpack<u32, u16>, "hh=r");
    move("mov.%tid.x", known<TidX>, "r="), move("mov.%tid.y", known<Zero>, "r="), move("mov.%tid.z", known<Zero>, "r=");
    move("mov.%ntid.x", known<NtidX>, "r="), move("mov.%ntid.y", known<NtidY>, "r="), move("mov.%ntid.z", known<NtidY>, "r=");
    move("mov.%ctaid.x", known<CtaidX>, "r="), move("mov.%ctaid.y", known<CtaidY>, "r=");
    move("mov.%ctaid.z", known<CtaidZ>, "r="), move("mov.%nctaid.x", known<NctaidX>, "r=");
    move("mov.%nctaid.y", known<NctaidY>, "r="), move("mov.%nctaid.z", known<NctaidZ>, "r=");
    move("mov.%laneid", known<LaneId>, "r="), move("mov.%warpid", known<WarpId>, "r=");
}

}  // namespace ptx
