// Values of bf16.
#pragma once
#include <cstdint>
#include <cstring>

inline float widened(uint16_t x) {
    uint32_t bits = uint32_t{x} << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

inline uint16_t narrowed(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
