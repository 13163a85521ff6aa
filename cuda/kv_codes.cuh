// Keys and values in 8 bits: codes e4m3 (arXiv:2209.05433), and a power of two for each token and key head, as the CPU has
// them (src/device/cpu/kv_codes.rs):
//
//   x = code 2^s, with s = ceil(log2(max |x| / 448)) over the head, -100 <= s <= 119,
//
// rounded once, to the nearest code, ties to even. The product is exact in bf16. So attention over codes has the bits of
// attention over rounded keys and values. A power is stored as s + 127, and as 255 for a head with Inf or NaN, whose values
// become Inf or NaN.
#pragma once
#include "eight.cuh"

// Eight neighbouring codes.
struct alignas(8) Codes {
    u32 four[2];
};

// The least and the largest s + 127 of numbers, and the largest code of one: 448.
#define POWER_MIN 27
#define POWER_MAX 246
#define LARGEST_CODE 0x7eu

// s + 127 of a head, of which `wide` lanes (a power of two) have eight values each, or zeros. All lanes of a warp call it.
DEVICE u32 power_of(const float (&x)[8], u32 wide) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 size = bits_of(x[i]) & 0x7fffffffu;
        largest = size > largest ? size : largest;
    }
    for (u32 lanes = wide / 2; lanes > 0; lanes /= 2) {
        const u32 other = shuffle_xor(largest, (int)lanes);
        largest = other > largest ? other : largest;
    }
    const int exponent = (int)(largest >> 23);
    // 448 = 1.75 * 2^8
    const int power = exponent + ((largest & 0x7fffffu) > 0x600000u) - 8;
    if (exponent == 255) return 255;
    return power < POWER_MIN ? POWER_MIN : power > POWER_MAX ? POWER_MAX : power;
}

// The code of x, given 2^-s.
DEVICE u32 code_of(float x, float inverse) {
    const u32 bits = bits_of(times(x, inverse)), sign = bits >> 24 & 0x80, size = bits & 0x7fffffffu;
    // Below 2^-6 codes are multiples of 2^-9, the last bit of 2^14.
    const u32 normal = ((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - (120 << 3);
    const u32 fixed = bits_of(float_of(size) + 16384.0f) - bits_of(16384.0f);
    const u32 code = size < 0x3c800000u ? fixed : normal;
    return sign | (code < LARGEST_CODE ? code : LARGEST_CODE);
}

DEVICE Codes codes_of(const float (&x)[8], u32 power) {
    // 2^-s; 0 for a head without numbers.
    const float inverse = float_of(power < 254 ? (254 - power) << 23 : 0);
    Codes codes{{0, 0}};
#pragma unroll
    for (int i = 0; i < 8; i++) codes.four[i / 4] |= code_of(x[i], inverse) << i % 4 * 8;
    return codes;
}

// Their values.
DEVICE Eight values_of(const Codes& codes, u32 power) {
    // 2^120, as the bias of bf16 is 120 larger, and 2^s; their product could overflow.
    const u32 rebias = 0x7b807b80u, factor = power << 7 | power << 23;
    Eight x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 two = codes.four[i / 2] >> i % 2 * 16, apart = (two & 0xff) << 8 | (two & 0xff00) << 16;
        x.pair[i] = times_pair(times_pair((apart & 0x80008000u) | (apart >> 4 & 0x07f007f0u), rebias), factor);
    }
    return x;
}

// ---- tiles of a cache in shared memory ----
//
// In a tile (_, COLUMNS) of bf16, rows STRIDE apart, the codes of a row land in its second half, and the word with its power
// lands in the padding at its end. Then each thread turns the chunks of eight that it has copied into bf16, in place. The
// threads that share a row are lanes of one warp.

// The number of bytes of a row before its codes, and before the word with its power.
template <int COLUMNS> struct Landing {
    static constexpr int CODES = COLUMNS, POWER = 2 * COLUMNS;
};

// Turns this thread's chunks into bf16: chunk `column` of the rows row, row + STEP .. below ROWS. Its copies have landed, and
// a barrier comes before others read the tile.
template <int COLUMNS, int STRIDE, int ROWS, int STEP> DEVICE void expand(bf16* tile, int row, int column) {
    // More rows at once would not fit the registers.
    constexpr int COUNT = ROWS / STEP, AT_ONCE = 2;
    static_assert(STEP % 4 == 0 && COUNT % AT_ONCE == 0, "a thread's powers have one place in their words");
    const bool is_there = column < COLUMNS / 8;
    u8* line = (u8*)(tile + row * STRIDE);
    SYNC_WARP();  // the powers, which one lane of a row has copied, are there
#pragma unroll
    for (int first = 0; first < COUNT; first += AT_ONCE) {
        Codes codes[AT_ONCE];
        u32 powers[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE && is_there; i++) {
            const u8* from = line + (first + i) * STEP * STRIDE * 2;
            codes[i] = *(const Codes*)(from + Landing<COLUMNS>::CODES + column * 8);
            powers[i] = *(const u32*)(from + Landing<COLUMNS>::POWER);
        }
        SYNC_WARP();  // no lane has yet to read what one writes
#pragma unroll
        for (int i = 0; i < AT_ONCE && is_there; i++) {
            Eight* to = (Eight*)(line + (first + i) * STEP * STRIDE * 2 + column * 16);
            *to = values_of(codes[i], powers[i] >> row % 4 * 8 & 0xff);
        }
    }
}
