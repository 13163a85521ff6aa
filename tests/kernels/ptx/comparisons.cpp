// Comparisons, selections and logic of predicates (9.7.6, 9.7.8).
#include "vectors.h"

namespace ptx {

namespace {

// Ordered ones are false where a NaN is; those that end in u are true there.
struct Eq { template <class T> static bool of(T a, T b) { return a == b; } };
struct Ne { template <class T> static bool of(T a, T b) { return (a < b) | (a > b); } };
struct Lt { template <class T> static bool of(T a, T b) { return a < b; } };
struct Le { template <class T> static bool of(T a, T b) { return a <= b; } };
struct Gt { template <class T> static bool of(T a, T b) { return a > b; } };
struct Ge { template <class T> static bool of(T a, T b) { return a >= b; } };
struct Number { template <class T> static bool of(T a, T b) { return (a == a) & (b == b); } };
template <class O> struct Inverse { template <class T> static bool of(T a, T b) { return !O::of(a, b); } };

struct Alone { static u32 of(u32 bits, u32) { return bits; } };
struct AndWith { static u32 of(u32 bits, u32 with) { return bits & with; } };
struct OrWith { static u32 of(u32 bits, u32 with) { return bits | with; } };
struct XorWith { static u32 of(u32 bits, u32 with) { return bits ^ with; } };

// p is the comparison, and with it c; q its opposite, and with it c.
template <class T, class O, class W, bool HAS_C> __attribute__((noinline)) void compare(Warp& w, const Instruction& i, u32 lanes) {
    const T *a = w.in<T>(i.at[2]), *b = w.in<T>(i.at[3]);
    i32 t[LANES];
    for (int l = 0; l < LANES; l++) t[l] = -(i32)O::of(a[l], b[l]);
    u32 bits = bits_of_lanes(t), c = HAS_C ? *w.in<u32>(i.at[4]) : 0;
    set_predicate(w, i.at[0], W::of(bits, c), lanes);
    set_predicate(w, i.at[1], W::of(~bits, c), lanes);
}

template <class T, class O> void add_comparison(Meanings& to, const std::string& name, const std::string& type, char letter) {
    auto add = [&](const std::string& with, Run run, const char* last) {
        // Names live as long as the table.
        std::string operands = std::string("pp=") + letter + letter + last;
        to["setp." + name + with + "." + type] = {run, strdup(operands.c_str()), Class::Integer};
    };
    add("", compare<T, O, Alone, false>, "");
    add(".and", compare<T, O, AndWith, true>, "p");
    add(".or", compare<T, O, OrWith, true>, "p");
    add(".xor", compare<T, O, XorWith, true>, "p");
}

template <class T> void add_type(Meanings& to, const std::string& type, char letter) {
    add_comparison<T, Eq>(to, "eq", type, letter), add_comparison<T, Ne>(to, "ne", type, letter);
    add_comparison<T, Lt>(to, "lt", type, letter), add_comparison<T, Le>(to, "le", type, letter);
    add_comparison<T, Gt>(to, "gt", type, letter), add_comparison<T, Ge>(to, "ge", type, letter);
    add_comparison<T, Lt>(to, "lo", type, letter), add_comparison<T, Le>(to, "ls", type, letter);
    add_comparison<T, Gt>(to, "hi", type, letter), add_comparison<T, Ge>(to, "hs", type, letter);
    if (type[0] != 'f') return;
    add_comparison<T, Inverse<Ne>>(to, "equ", type, letter), add_comparison<T, Inverse<Eq>>(to, "neu", type, letter);
    add_comparison<T, Inverse<Ge>>(to, "ltu", type, letter), add_comparison<T, Inverse<Gt>>(to, "leu", type, letter);
    add_comparison<T, Inverse<Le>>(to, "gtu", type, letter), add_comparison<T, Inverse<Lt>>(to, "geu", type, letter);
    add_comparison<T, Number>(to, "num", type, letter), add_comparison<T, Inverse<Number>>(to, "nan", type, letter);
}

template <class T> void select(Warp& w, const Instruction& i, u32 lanes) {
    const T *a = w.in<T>(i.at[1]), *b = w.in<T>(i.at[2]);
    u32 p = *w.in<u32>(i.at[3]);
    T t[LANES];
    for (int l = 0; l < LANES; l++) t[l] = p >> l & 1 ? a[l] : b[l];
    put(w.out<T>(i.at[0]), t, lanes);
}

template <class O> void both(Warp& w, const Instruction& i, u32 lanes) {
    set_predicate(w, i.at[0], O::of(*w.in<u32>(i.at[1]), *w.in<u32>(i.at[2])), lanes);
}

void negate(Warp& w, const Instruction& i, u32 lanes) { set_predicate(w, i.at[0], ~*w.in<u32>(i.at[1]), lanes); }
void copy(Warp& w, const Instruction& i, u32 lanes) { set_predicate(w, i.at[0], *w.in<u32>(i.at[1]), lanes); }

}  // namespace

void add_comparisons(Meanings& to) {
    add_type<u16>(to, "u16", 'h'), add_type<u16>(to, "b16", 'h'), add_type<i16>(to, "s16", 'h');
    add_type<u32>(to, "u32", 'r'), add_type<u32>(to, "b32", 'r'), add_type<i32>(to, "s32", 'r');
    add_type<u64>(to, "u64", 'l'), add_type<u64>(to, "b64", 'l'), add_type<i64>(to, "s64", 'l');
    add_type<float>(to, "f32", 'r'), add_type<double>(to, "f64", 'l');
    for (const char* t : {"b16", "u16", "s16"}) to[std::string("selp.") + t] = {select<u16>, "h=hhp", Class::Integer};
    for (const char* t : {"b32", "u32", "s32", "f32"}) to[std::string("selp.") + t] = {select<u32>, "r=rrp", Class::Integer};
    for (const char* t : {"b64", "u64", "s64", "f64"}) to[std::string("selp.") + t] = {select<u64>, "l=llp", Class::Integer};
    to["and.pred"] = {both<AndWith>, "p=pp", Class::Integer};
    to["or.pred"] = {both<OrWith>, "p=pp", Class::Integer};
    to["xor.pred"] = {both<XorWith>, "p=pp", Class::Integer};
    to["not.pred"] = {negate, "p=p", Class::Integer};
    to["mov.pred"] = {copy, "p=p", Class::Move};
}

}  // namespace ptx
