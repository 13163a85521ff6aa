// Floating point (9.7.3): every operation rounds as its name says. What the document calls approximate is rounded correctly
// here; a GPU's result may lie a few units of the last place beside: see hardware.cpp.
#include "vectors.h"

#include <cmath>
#include <limits>

namespace ptx {

namespace {

// The processor's modes: where it rounds to, and whether denormal operands and results are 0.
enum Mode : u32 { NEAREST = 0, DOWN = 0x2000, UP = 0x4000, TOWARDS_0 = 0x6000, FLUSH = 0x8040 };

template <Run RUN, u32 MODE> void under(Warp& w, const Instruction& i, u32 lanes) {
    u32 before = _mm_getcsr();
    _mm_setcsr((before & ~0xe040u) | MODE);
    RUN(w, i, lanes);
    _mm_setcsr(before);
}

struct Add { template <class T> static T of(T a, T b) { return a + b; } };
struct Sub { template <class T> static T of(T a, T b) { return a - b; } };
struct Mul { template <class T> static T of(T a, T b) { return a * b; } };
struct Div { template <class T> static T of(T a, T b) { return a / b; } };
struct Fma {
    static float of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
    static double of(double a, double b, double c) { return __builtin_fma(a, b, c); }
};
struct Negated {
    static u32 of(u32 a) { return a ^ 0x80000000u; }
    static u64 of(u64 a) { return a ^ 1ull << 63; }
};
struct Absolute {
    static u32 of(u32 a) { return a & 0x7fffffffu; }
    static u64 of(u64 a) { return a & ~(1ull << 63); }
};
struct Root {
    static float of(float a) { return __builtin_sqrtf(a); }
    static double of(double a) { return __builtin_sqrt(a); }
};
struct Reciprocal { template <class T> static T of(T a) { return (T)1 / a; } };

template <class T> T quiet() { return std::numeric_limits<T>::quiet_NaN(); }

// Of a number and a NaN the number; -0 is less than +0.
template <bool LEAST> struct Extreme {
    template <class T> static T of(T a, T b) {
        T chosen = LEAST ? (a < b ? a : b) : (a > b ? a : b);
        bool is_less = std::signbit(a);
        chosen = a == b ? (is_less == LEAST ? a : b) : chosen;
        chosen = b != b ? a : chosen;
        return chosen != chosen ? quiet<T>() : chosen;
    }
};

template <class O> struct Saturated {
    template <class... T> static float of(T... a) {
        float x = O::of(a...);
        return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f;
    }
};

template <bool FLUSHES> struct Exp2 {
    static float of(float x) {
        double y = wide_exp2(x);
        y = FLUSHES && y < 0x1p-126 ? 0.0 : y;
        return x != x ? x : (float)y;
    }
};
// As the emulation has them, for comparisons with it.
struct Exp2OfHost { static float of(float x) { return x < -126.0f ? 0.0f : exp2f(x); } };
struct InverseRootOfHost { static float of(float x) { return 1.0f / __builtin_sqrtf(x); } };
struct Log2 { static float of(float x) { return (float)std::log2((double)x); } };
struct InverseRoot { static float of(float x) { return (float)(1.0 / std::sqrt((double)x)); } };
struct Sine { static float of(float x) { return (float)std::sin((double)x); } };
struct Cosine { static float of(float x) { return (float)std::cos((double)x); } };
struct Tangent { static float of(float x) { return (float)std::tanh((double)x); } };
// The lower 32 bits of operand and result count for nothing.
struct RoughReciprocal {
    static double of(double x) {
        u64 bits;
        std::memcpy(&bits, &x, 8);
        bits &= ~0ull << 32;
        std::memcpy(&x, &bits, 8);
        double y = 1.0 / x;
        std::memcpy(&bits, &y, 8);
        bits &= ~0ull << 32;
        std::memcpy(&y, &bits, 8);
        return std::fabs(y) < 0x1p-1022 ? std::copysign(0.0, y) : y;
    }
};

// Each rounding of an operation, of f32 also with denormals as 0.
template <Run RUN> void add_roundings(Meanings& to, const std::string& name, const std::string& type, const char* operands) {
    bool narrow = type == "f32";
    Class is = narrow ? Class::F32 : Class::F64;
    to[name + "." + type] = to[name + ".rn." + type] = {RUN, operands, is};
    to[name + ".rm." + type] = {under<RUN, DOWN>, operands, is};
    to[name + ".rp." + type] = {under<RUN, UP>, operands, is};
    to[name + ".rz." + type] = {under<RUN, TOWARDS_0>, operands, is};
    if (!narrow) return;
    to[name + ".ftz." + type] = to[name + ".rn.ftz." + type] = {under<RUN, FLUSH>, operands, is};
    to[name + ".rm.ftz." + type] = {under<RUN, DOWN | FLUSH>, operands, is};
    to[name + ".rp.ftz." + type] = {under<RUN, UP | FLUSH>, operands, is};
    to[name + ".rz.ftz." + type] = {under<RUN, TOWARDS_0 | FLUSH>, operands, is};
}

template <class T> void add_type(Meanings& to, const std::string& type, const char* once, const char* twice, const char* thrice) {
    using Bits = std::conditional_t<sizeof(T) == 4, u32, u64>;
    Class is = sizeof(T) == 4 ? Class::F32 : Class::F64;
    add_roundings<two<T, T, T, Add>>(to, "add", type, twice);
    add_roundings<two<T, T, T, Sub>>(to, "sub", type, twice);
    add_roundings<two<T, T, T, Mul>>(to, "mul", type, twice);
    add_roundings<two<T, T, T, Div>>(to, "div", type, twice);
    add_roundings<three<T, T, T, T, Fma>>(to, "fma", type, thrice);
    add_roundings<one<T, T, Root>>(to, "sqrt", type, once);
    add_roundings<one<T, T, Reciprocal>>(to, "rcp", type, once);
    to["neg." + type] = {one<Bits, Bits, Negated>, once, is};
    to["abs." + type] = {one<Bits, Bits, Absolute>, once, is};
    to["min." + type] = {two<T, T, T, Extreme<true>>, twice, is};
    to["max." + type] = {two<T, T, T, Extreme<false>>, twice, is};
}

template <Run RUN> void add_approximate(Meanings& to, const std::string& name, const char* operands) {
    to[name + ".f32"] = {RUN, operands, Class::F32};
    to[name + ".ftz.f32"] = {under<RUN, FLUSH>, operands, Class::F32};
}

}  // namespace

void add_floats(Meanings& to) {
    add_type<float>(to, "f32", "r=r", "r=rr", "r=rrr");
    add_type<double>(to, "f64", "l=l", "l=ll", "l=lll");
    to["add.sat.f32"] = {two<float, float, float, Saturated<Add>>, "r=rr", Class::F32};
    to["mul.sat.f32"] = {two<float, float, float, Saturated<Mul>>, "r=rr", Class::F32};
    to["fma.rn.sat.f32"] = {three<float, float, float, float, Saturated<Fma>>, "r=rrr", Class::F32};
    to["ex2.approx.f32"] = {one<float, float, Exp2<false>>, "r=r", Class::F32};
    to["ex2.approx.ftz.f32"] = {one<float, float, Exp2<true>>, "r=r", Class::F32};
    add_approximate<one<float, float, Log2>>(to, "lg2.approx", "r=r");
    add_approximate<one<float, float, InverseRoot>>(to, "rsqrt.approx", "r=r");
    if (is_beside()) {
        to["ex2.approx.ftz.f32"].run = one<float, float, Exp2OfHost>;
        to["rsqrt.approx.f32"].run = one<float, float, InverseRootOfHost>;
    }
    add_approximate<one<float, float, Root>>(to, "sqrt.approx", "r=r");
    add_approximate<one<float, float, Reciprocal>>(to, "rcp.approx", "r=r");
    add_approximate<two<float, float, float, Div>>(to, "div.approx", "r=rr");
    add_approximate<two<float, float, float, Div>>(to, "div.full", "r=rr");
    add_approximate<one<float, float, Sine>>(to, "sin.approx", "r=r");
    add_approximate<one<float, float, Cosine>>(to, "cos.approx", "r=r");
    add_approximate<one<float, float, Tangent>>(to, "tanh.approx", "r=r");
    to["rcp.approx.ftz.f64"] = {one<double, double, RoughReciprocal>, "l=l", Class::F64};
}

}  // namespace ptx
