// Approximate instructions (9.7.3) with the largest errors that the document grants them, release 8.7: ex2 2^-22, rsqrt
// 2^-22.9, sqrt 2^-23 and tanh 2^-11 of the result; lg2 2^-22.6 between 0.5 and 2, else 2^-22 of the result; sin and cos 2^-20.5
// within 2 pi; rcp one unit of the last place, div two. Atomic additions of f32 in global memory take denormals as 0 (9.7.13).
// Only rsqrt's figure has been compared with a source; the others are to be held against the document's text.
//
// Half of all operands meet the largest error, the others less; size and sign follow from an operand's bits alone, as a GPU
// computes the same for the same. What the document says of zeros, infinities and NaN holds.
#include "hardware.h"
#include "vectors.h"

#include <cmath>
#include <cstdlib>

namespace ptx {

namespace {

u32 bits_of(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// In -1 .. 1, the same for the same bits; one of the ends for half of them.
double off(u32 bits) {
    u32 x = bits * 0x9e3779b9u;
    x = (x ^ x >> 15) * 0x2c1b3c6du;
    x ^= x >> 13;
    double at = (double)(i32)x * 0x1p-30;
    return at < -1.0 ? -1.0 : at > 1.0 ? 1.0 : at;
}

// Within `relative` of y, the last rounding included.
float by_share(double y, double relative, u32 bits) { return (float)(y * (1.0 + (relative - 0x1p-24) * off(bits))); }

// Within so many units of the last place: half a unit is the last rounding's.
float by_units(double y, double units, u32 bits) {
    float near = (float)y;
    if (!std::isnormal(near)) return near;
    u32 power = bits_of(near) & 0x7f800000u;
    float of_two;
    std::memcpy(&of_two, &power, 4);
    return (float)(y + (units - 0.5) * 0x1p-23 * (double)of_two * off(bits));
}

struct RoughExp2 {
    static float of(float x) {
        double y = wide_exp2(x);
        // 2^0 is 1, of denormals, too.
        return x != x ? x : std::fabs(x) < 0x1p-126f ? 1.0f : by_share(y, 0x1p-22, bits_of(x));
    }
};
struct RoughLog2 {
    static float of(float x) {
        double y = std::log2((double)x);
        // 2^-22.6
        return x > 0.5f && x < 2.0f ? (float)(y + (1.573e-7 - std::fabs(y) * 0x1p-24) * off(bits_of(x))) : by_share(y, 0x1p-22, bits_of(x));
    }
};
// 2^-22.9
struct RoughInverseRoot {
    static float of(float x) { return by_share(1.0 / std::sqrt((double)x), 1.277e-7, bits_of(x)); }
};
struct RoughRoot {
    static float of(float x) { return by_share(std::sqrt((double)x), 0x1p-23, bits_of(x)); }
};
struct RoughReciprocal {
    static float of(float x) { return by_units(1.0 / (double)x, 1.0, bits_of(x)); }
};
struct RoughQuotient {
    static float of(float a, float b) { return by_units((double)a / (double)b, 2.0, bits_of(a) ^ bits_of(b) * 31); }
};
// 2^-20.5
struct RoughSine {
    static float of(float x) { return (float)(std::sin((double)x) + 6.7e-7 * off(bits_of(x))); }
};
struct RoughCosine {
    static float of(float x) { return (float)(std::cos((double)x) + 6.7e-7 * off(bits_of(x))); }
};
struct RoughTangent {
    static float of(float x) { return by_share(std::tanh((double)x), 0x1p-11, bits_of(x)); }
};

// Denormals as 0, of operands and results.
template <Run RUN> void flushing(Warp& w, const Instruction& i, u32 lanes) {
    u32 before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    RUN(w, i, lanes);
    _mm_setcsr(before);
}

template <Run RUN> void roughen(Meanings& meanings, const std::string& name) {
    meanings.at(name + ".f32").run = RUN;
    meanings.at(name + ".ftz.f32").run = flushing<RUN>;
}

}  // namespace

Hardware hardware() {
    static const Hardware chosen = [] {
        const char* name = std::getenv("PTX_HARDWARE");
        std::string of = name ? name : "";
        if (of.empty()) return Hardware::Kind;
        if (of != "a100" && of != "h100") std::fprintf(stderr, "PTX_HARDWARE is a100 or h100, not %s\n", name), std::abort();
        return of == "a100" ? Hardware::A100 : Hardware::H100;
    }();
    return chosen;
}

void become(Hardware hardware, Meanings& meanings) {
    meanings.at("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32").run = mma_of(hardware);
    roughen<one<float, float, RoughExp2>>(meanings, "ex2.approx");
    roughen<one<float, float, RoughLog2>>(meanings, "lg2.approx");
    roughen<one<float, float, RoughInverseRoot>>(meanings, "rsqrt.approx");
    roughen<one<float, float, RoughRoot>>(meanings, "sqrt.approx");
    roughen<one<float, float, RoughReciprocal>>(meanings, "rcp.approx");
    roughen<two<float, float, float, RoughQuotient>>(meanings, "div.approx");
    roughen<two<float, float, float, RoughQuotient>>(meanings, "div.full");
    roughen<one<float, float, RoughSine>>(meanings, "sin.approx");
    roughen<one<float, float, RoughCosine>>(meanings, "cos.approx");
    roughen<one<float, float, RoughTangent>>(meanings, "tanh.approx");
}

}  // namespace ptx
