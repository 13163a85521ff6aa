// mma.m16n8k16 of bf16 as tensor cores were measured to compute it; NVIDIA does not say. Two groups have models that equal
// GPUs in every bit of their trials, and agree: arXiv:2512.07004 (A100: blocks of 8 terms, 1 bit of alignment more than f32
// has; H100: 16 and 2; both cut) and arXiv:2511.10909 (24 and 25 bits behind the point, k16 in halves on Ampere).
//
// Products are exact. Those of a block and the accumulator are cut to a grid: so many bits behind the point of the largest
// exponent among them, which is that of a product's factors together, before it is normalised. What is left is added
// exactly, and the sum cut to f32. So sums are biased towards 0, by up to 2^-23 of themselves for every block.
#include "hardware.h"
#include "vectors.h"

namespace ptx {

namespace {

constexpr u32 EXPONENT = 0x7f800000;
// The least exponent that a grid may belong to: 2^-100 and less are nothing beside it.
constexpr float LEAST = 0x1p-100f;

using Floats = __m256;

Floats exponents_of(Floats x) { return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32((int)EXPONENT))); }

float low(u32 pair) {
    u32 bits = pair << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Whether bf16 or f32 are infinite or NaN, or so large that a product overflows.
bool is_large(u32 pair) { return (pair & 0x7f80) >= 0x5f00 || (pair & EXPONENT) >= 0x5f000000; }

// Four sums of eight lanes: of rows `g` and `g + 8`, in even and odd columns.
struct Sums {
    Floats d[4];
};

// The factors of one k: of two rows, and of two columns.
struct Factors {
    Floats a[2], b[2];
};

// Adds the products of a block to the sums.
template <int BLOCK, int BITS> void add_block(Sums& sums, const Factors* factors) {
    for (int i = 0; i < 4; i++) {
        Floats largest = _mm256_max_ps(exponents_of(sums.d[i]), _mm256_set1_ps(LEAST));
        for (int k = 0; k < BLOCK; k++) {
            Floats a = factors[k].a[i / 2], b = factors[k].b[i % 2];
            largest = _mm256_max_ps(_mm256_mul_ps(exponents_of(a), exponents_of(b)), largest);
        }
        // 2^BITS / largest: powers of 2, so all of this is exact but for the cuts.
        __m256i bits = _mm256_sub_epi32(_mm256_set1_epi32((254 + BITS) << 23), _mm256_castps_si256(largest));
        Floats scale = _mm256_castsi256_ps(bits);
        __m256i part[2] = {_mm256_cvttps_epi32(_mm256_mul_ps(sums.d[i], scale)), _mm256_setzero_si256()};
        // Eight products of less than 2^27 in each part.
        for (int k = 0; k < BLOCK; k++) {
            Floats product = _mm256_mul_ps(factors[k].a[i / 2], factors[k].b[i % 2]);
            part[k / 8] = _mm256_add_epi32(part[k / 8], _mm256_cvttps_epi32(_mm256_mul_ps(product, scale)));
        }
        auto half = [&](auto place) {
            constexpr int P = decltype(place)::value;
            auto wide = [](__m256i x) { return _mm256_cvtepi32_pd(_mm256_extracti128_si256(x, P)); };
            __m256d sum = _mm256_add_pd(wide(part[0]), wide(part[1]));
            __m256d unit = _mm256_cvtps_pd(_mm256_extractf128_ps(largest, P));
            unit = _mm256_mul_pd(unit, _mm256_set1_pd(1.0 / (1 << BITS)));
            // Cut: see `multiply`.
            return _mm256_cvtpd_ps(_mm256_mul_pd(sum, unit));
        };
        sums.d[i] = _mm256_set_m128(half(std::integral_constant<int, 1>()), half(std::integral_constant<int, 0>()));
    }
}

// The processor cuts while this runs.
template <int BLOCK, int BITS> __attribute__((noinline)) void multiply(Warp& w, const Instruction& i) {
    // Columns of B by parity, as the lanes of one group need them: [k][place in the group].
    alignas(32) float even[16][4], odd[16][4];
    for (int r = 0; r < 2; r++) {
        const u32* b = w.in<u32>(i.at[8 + r]);
        for (int l = 0; l < LANES; l++) {
            int column = l / 4, k = 2 * (l % 4) + 8 * r;
            float(*to)[4] = column % 2 ? odd : even;
            to[k][column / 2] = low(b[l]);
            to[k + 1][column / 2] = low(b[l] >> 16 & 0xffff);
        }
    }
    float results[4][LANES];
    for (int chunk = 0; chunk < 4; chunk++) {
        Sums sums;
        for (int r = 0; r < 4; r++) sums.d[r] = _mm256_loadu_ps(w.in<float>(i.at[10 + r]) + 8 * chunk);
        // Of two groups, lanes 8 * chunk to 8 * chunk + 7, what each place holds, in all lanes of its group.
        Factors factors[16];
        auto place = [&](auto of) {
            constexpr int P = decltype(of)::value;
            for (int r = 0; r < 4; r++) {
                __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w.in<u32>(i.at[4 + r]) + 8 * chunk));
                __m256i upper = _mm256_and_si256(pair, _mm256_set1_epi32((int)0xffff0000u));
                Factors* at = factors + r / 2 * 8 + 2 * P;
                at[0].a[r % 2] = _mm256_permute_ps(_mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)), P * 0x55);
                at[1].a[r % 2] = _mm256_permute_ps(_mm256_castsi256_ps(upper), P * 0x55);
            }
        };
        place(std::integral_constant<int, 0>()), place(std::integral_constant<int, 1>());
        place(std::integral_constant<int, 2>()), place(std::integral_constant<int, 3>());
        for (int k = 0; k < 16; k++) {
            factors[k].b[0] = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(even[k]));
            factors[k].b[1] = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(odd[k]));
        }
        for (int k = 0; k < 16; k += BLOCK) add_block<BLOCK, BITS>(sums, factors + k);
        for (int r = 0; r < 4; r++) _mm256_storeu_ps(results[r] + 8 * chunk, sums.d[r]);
    }
    for (int r = 0; r < 4; r++) std::memcpy(w.out<float>(i.at[r]), results[r], sizeof results[r]);
}

template <int BLOCK, int BITS> void mma_on(Warp& w, const Instruction& i, u32 lanes) {
    for (int r = 4; r < 14; r++) {
        const u32* x = w.in<u32>(i.at[r]);
        bool found = false;
        for (int l = 0; l < LANES; l++) found |= r < 10 ? is_large(x[l]) : (x[l] & EXPONENT) >= 0x5f000000;
        // What overflows or is NaN does so in any arithmetic.
        if (found) return mma(w, i, lanes);
    }
    check_factors(w, i);
    u32 before = _mm_getcsr();
    _mm_setcsr(before | 0x6000);
    multiply<BLOCK, BITS>(w, i);
    _mm_setcsr(before);
}

}  // namespace

Run mma_of(Hardware hardware) { return hardware == Hardware::A100 ? mma_on<8, 24> : mma_on<16, 25>; }

}  // namespace ptx
