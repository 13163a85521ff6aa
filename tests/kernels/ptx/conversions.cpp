// cvt (9.7.9.21) and cvta (9.7.9.20).
#include "vectors.h"

#include <cmath>
#include <limits>

namespace ptx {

namespace {

// Integers: cut or extended; to a register that is wider than the type, extended by its sign.
template <class T> struct As { template <class A> static T of(A a) { return (T)a; } };

enum class To { Nearest, Zero, Down, Up };

template <To TO> struct Integral {
    template <class T> static T of(T x) {
        return TO == To::Nearest ? std::nearbyint(x) : TO == To::Zero ? std::trunc(x) : TO == To::Down ? std::floor(x) : std::ceil(x);
    }
};

// To an integer: what lies beyond its range becomes its end, NaN 0.
template <class D, To TO> struct Whole {
    template <class T> static D of(T x) {
        T r = Integral<TO>::of(x);
        // The first number beyond: a power of two.
        T end = std::ldexp((T)1, (int)(8 * sizeof(D)) - (std::is_signed<D>::value ? 1 : 0));
        if (x != x) return 0;
        if (r >= end) return std::numeric_limits<D>::max();
        if (r < (std::is_signed<D>::value ? -end : (T)0)) return std::numeric_limits<D>::min();
        return (D)r;
    }
};

struct Saturated { static float of(float x) { return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; } };

// To the nearest bf16, ties to even; a NaN is 0x7fff.
struct Brain {
    static u32 bits(float x) {
        u32 u;
        std::memcpy(&u, &x, 4);
        u32 rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
        return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded;
    }
    static u16 of(float x) { return (u16)bits(x); }
    // The first operand comes to the upper half.
    static u32 of(float a, float b) { return bits(a) << 16 | bits(b); }
};
struct OfBrain {
    static u32 of(u16 x) { return (u32)x << 16; }
};
struct HalfOfSingle { static u16 of(float x) { return (u16)_cvtss_sh(x, 0); } };
struct SingleOfHalf { static float of(u16 x) { return _cvtsh_ss(x); } };

template <i64 ADDED> struct Moved { static u64 of(u64 a) { return a + (u64)ADDED; } };

char letter_of(size_t bytes) { return bytes == 8 ? 'l' : bytes == 4 ? 'r' : 'h'; }

void add(Meanings& to, const std::string& name, Run run, size_t d, size_t a) {
    std::string operands = std::string(1, letter_of(d)) + "=" + letter_of(a);
    to["cvt." + name] = {run, strdup(operands.c_str()), Class::Conversion};
}

// From integer A to each integer. Bytes live in registers of 16 bits, or wider ones.
template <class A> void from_integer(Meanings& to, const std::string& a) {
    add(to, "u16." + a, one<u16, A, As<u16>>, 2, sizeof(A)), add(to, "s16." + a, one<u16, A, As<u16>>, 2, sizeof(A));
    add(to, "u32." + a, one<u32, A, As<u32>>, 4, sizeof(A)), add(to, "s32." + a, one<u32, A, As<u32>>, 4, sizeof(A));
    add(to, "u64." + a, one<u64, A, As<u64>>, 8, sizeof(A)), add(to, "s64." + a, one<u64, A, As<u64>>, 8, sizeof(A));
    add(to, "rn.f32." + a, one<float, A, As<float>>, 4, sizeof(A)), add(to, "rn.f64." + a, one<double, A, As<double>>, 8, sizeof(A));
}

// A byte of a register: A of 16 or 32 bits holds it.
template <class B> struct Byte {
    template <class A> static u32 of(A a) { return (u32)(B)a; }
};

template <class T, To TO> void from_float(Meanings& to, const std::string& rounding, const std::string& a) {
    add(to, rounding + ".s32." + a, one<i32, T, Whole<i32, TO>>, 4, sizeof(T));
    add(to, rounding + ".u32." + a, one<u32, T, Whole<u32, TO>>, 4, sizeof(T));
    add(to, rounding + ".s64." + a, one<i64, T, Whole<i64, TO>>, 8, sizeof(T));
    add(to, rounding + ".u64." + a, one<u64, T, Whole<u64, TO>>, 8, sizeof(T));
    add(to, rounding + "." + a + "." + a, one<T, T, Integral<TO>>, sizeof(T), sizeof(T));
}

}  // namespace

void add_conversions(Meanings& to) {
    from_integer<u16>(to, "u16"), from_integer<i16>(to, "s16"), from_integer<u32>(to, "u32");
    from_integer<i32>(to, "s32"), from_integer<u64>(to, "u64"), from_integer<i64>(to, "s64");
    add(to, "u32.u8", one<u32, u16, Byte<u8>>, 4, 2), add(to, "s32.s8", one<u32, u16, Byte<i8>>, 4, 2);
    from_float<float, To::Nearest>(to, "rni", "f32"), from_float<double, To::Nearest>(to, "rni", "f64");
    from_float<float, To::Zero>(to, "rzi", "f32"), from_float<double, To::Zero>(to, "rzi", "f64");
    from_float<float, To::Down>(to, "rmi", "f32"), from_float<double, To::Down>(to, "rmi", "f64");
    from_float<float, To::Up>(to, "rpi", "f32"), from_float<double, To::Up>(to, "rpi", "f64");
    add(to, "f64.f32", one<double, float, As<double>>, 8, 4);
    add(to, "rn.f32.f64", one<float, double, As<float>>, 4, 8);
    add(to, "sat.f32.f32", one<float, float, Saturated>, 4, 4);
    add(to, "rn.bf16.f32", one<u16, float, Brain>, 2, 4);
    add(to, "f32.bf16", one<u32, u16, OfBrain>, 4, 2);
    add(to, "rn.f16.f32", one<u16, float, HalfOfSingle>, 2, 4);
    add(to, "f32.f16", one<float, u16, SingleOfHalf>, 4, 2);
    to["cvt.rn.bf16x2.f32"] = {two<u32, float, float, Brain>, "r=rr", Class::Conversion};
    to["cut.8.4"] = {one<u32, u64, As<u32>>, "r=l", Class::Move};
    to["cut.8.2"] = {one<u16, u64, As<u16>>, "h=l", Class::Move};
    to["cut.4.2"] = {one<u16, u32, As<u16>>, "h=r", Class::Move};
    for (const char* space : {"global", "const", "param"}) {
        to[std::string("cvta.") + space + ".u64"] = to[std::string("cvta.to.") + space + ".u64"] =
            {one<u64, u64, Moved<0>>, "l=l", Class::Move};
    }
    to["cvta.shared.u64"] = {one<u64, u64, Moved<(i64)SHARED_WINDOW>>, "l=l", Class::Move};
    to["cvta.to.shared.u64"] = {one<u64, u64, Moved<-(i64)SHARED_WINDOW>>, "l=l", Class::Move};
    to["cvta.local.u64"] = {one<u64, u64, Moved<(i64)LOCAL_WINDOW>>, "l=l", Class::Move};
    to["cvta.to.local.u64"] = {one<u64, u64, Moved<-(i64)LOCAL_WINDOW>>, "l=l", Class::Move};
}

}  // namespace ptx
